"""Write and read artifacts atomically.

Every artifact is written to a temporary name in its own folder, fsynced and renamed, so a reader
never sees a partial file and a crash leaves the previous version in place. Devices and pipes are
written to directly and never replaced.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import select
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, TextIO

# Name of an unfinished file of `write_bytes` or `write_new_json`, with process and machine.
TEMPORARY = re.compile(r"\..*\.(\d+)@(.*)\.tmp")


def is_temporary(path: Path) -> bool:
    """Return whether the file is an unfinished write, of a running or killed process."""
    return TEMPORARY.fullmatch(path.name) is not None


class ArtifactError(Exception):
    """An artifact is missing, unreadable or malformed; the text names the file and the line.

    Attributes:
        lines: the lines of the text; any other line end in it is from an artifact.
    """

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an error of opening the file at `path`, in the `with` block, into an ArtifactError.

    Raises:
        ArtifactError: the file does not exist, or is a folder.
    """
    try:
        yield
    except FileNotFoundError:
        raise ArtifactError(f"{path}: no such file") from None
    except (IsADirectoryError, NotADirectoryError) as error:
        raise ArtifactError(f"{path}: {error.strerror}; allowed: a file") from None


def fsync(path: Path) -> None:
    """Make a file's content, or the renames in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_durable(folder: Path) -> None:
    """Make everything in `folder` durable, including the path to it.

    For files of other processes, before a file that lists them is written.
    """
    for parent, _, names in os.walk(folder):
        for name in names:
            if (path := Path(parent, name)).is_file() and not path.is_symlink():
                fsync(path)
        fsync(Path(parent))
    for ancestor in folder.resolve().parents:
        # A folder without read permission is not the study's.
        with contextlib.suppress(PermissionError):
            fsync(ancestor)


@contextlib.contextmanager
def locked(lock: Path) -> Iterator[None]:
    """Hold a lock on a file, which is created if missing.

    It is opened for writing, since NFS gives no exclusive lock on a read-only file or a folder.
    """
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def open_closed_streams() -> None:
    """Connect standard streams that were closed at the start to /dev/null.

    Otherwise a socket would get their number, and libuv aborts when such a descriptor is closed.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def exit_status(main: Callable[[], int]) -> int:
    """Run a command and return its exit status; 0 if its reader closed the pipe (`| head`)."""
    try:
        return main()
    except BrokenPipeError:
        if not any(_reader_left(stream) for stream in (sys.stdout, sys.stderr)):
            raise
        return 0
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except BrokenPipeError:  # the interpreter would flush again at its end
                drop_output(stream)


def drop_output(stream: TextIO) -> None:
    """Connect a standard stream that cannot be written to /dev/null."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def _reader_left(stream: TextIO) -> bool:
    poll = select.poll()
    try:
        poll.register(stream.fileno(), 0)
    except (OSError, ValueError):  # without a descriptor it is no pipe
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def standard_stream(path: Path) -> BinaryIO | None:
    """Return the standard stream that `path` names (`-` is standard output), or None."""
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        if stream is None:  # closed before the start
            continue
        with contextlib.suppress(OSError):  # no such file, or a closed descriptor
            if str(path) == "-" or os.path.samestat(path.stat(), os.fstat(number)):
                stream.flush()
                return stream.buffer
    return None


def is_stdout(path: Path | None) -> bool:
    """Return whether the path leads to standard output; False for None."""
    stream = None if path is None else standard_stream(path)
    return stream is not None and stream is sys.stdout.buffer


def write_all(stream: BinaryIO | FileIO, data: bytes | bytearray) -> None:
    """Write all of `data` and flush; an unbuffered stream may accept only a part at a time."""
    rest = memoryview(data)
    while rest:
        rest = rest[stream.write(rest) :]
    stream.flush()


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically and durably, creating parent folders; links are followed.

    An existing file that is not regular is written to directly, and so is a standard stream.

    Raises:
        OSError: a file cannot be written; the message names it.
    """
    try:
        if (standard := standard_stream(path)) is not None:
            write_all(standard, data)
        elif path.exists() and not path.is_file():
            path.write_bytes(data)
        else:
            _replace(path.resolve(), data)
    except OSError as error:
        error.filename = error.filename or str(path)  # an error of write() has no file name
        raise


def _replace(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(
        prefix=f".{path.name}.", suffix=f".{os.getpid()}@{platform.node()}.tmp", dir=path.parent
    )
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fchmod(stream.fileno(), 0o644)
            os.fsync(stream.fileno())
        Path(temporary).replace(path)
    finally:
        Path(temporary).unlink(missing_ok=True)
    fsync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8, atomically."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON with a final newline, atomically; NaN is rejected."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_new_json(path: Path, value: Any) -> bool:
    """Write JSON if the file does not exist, and return True; otherwise return False.

    Only one of several processes, on any machine, creates it: a link fails where a rename would
    replace.
    """
    draft = path.with_name(f".{path.name}.new.{os.getpid()}@{platform.node()}.tmp")
    write_json(draft, value)
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    finally:
        draft.unlink()
    return True


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        name = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"found key {name[:100]!r} twice in one object; allowed: once")
    return content


_DECODER = json.JSONDecoder(object_pairs_hook=_without_duplicates)


def parse_json(data: str | bytes) -> Any:
    """Parse a JSON text; reject duplicate keys in an object.

    A person would read the first of two values, and a program the last.

    Raises:
        ValueError: `data` is not JSON, not UTF-8, nested too deeply, or has a duplicate key.
    """
    try:
        return _DECODER.decode(data if isinstance(data, str) else data.decode())
    except RecursionError as error:
        raise ValueError(str(error)) from None


def read_json(path: Path) -> Any:
    """Parse the JSON file at `path`.

    Raises:
        ArtifactError: the file is missing, does not parse or has a duplicate key; names the file,
            and line and column of a syntax error.
    """
    try:
        with reading(path):
            return parse_json(path.read_bytes())
    except ValueError as error:
        raise ArtifactError(f"{path}: not valid JSON: {error}") from error


def read_jsonl(path: Path) -> Iterator[Any]:
    """Yield the records of a JSON-lines file in order.

    Raises:
        ArtifactError: the file is missing, or a line does not parse or has a key twice; names file
            and line.
    """
    try:
        with reading(path), path.open(encoding="utf-8") as stream:
            for number, line in enumerate(stream, 1):
                try:
                    yield parse_json(line)
                except ValueError as error:
                    raise ArtifactError(f"{path}:{number}: not valid JSON: {error}") from error
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{path}: not UTF-8: {error}") from error


# Digests by file identity, inside `digests_kept`.
_KEPT: dict[tuple[int, int, int, int], str] | None = None


@contextlib.contextmanager
def digests_kept() -> Iterator[None]:
    """Hash each file only once in the `with` block, while its inode, size and time stay the same.

    For readers of a whole study, which compare each file with several lists of hashes.
    """
    global _KEPT
    before, _KEPT = _KEPT, {}
    try:
        yield
    finally:
        _KEPT = before


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hex.

    Raises:
        ArtifactError: the file is missing, or a folder.
    """
    with reading(path):
        identity = _identity(path)
        if _KEPT is not None and identity in _KEPT:
            return _KEPT[identity]
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if _KEPT is not None:
        _KEPT[identity] = digest
    return digest


def _identity(path: Path) -> tuple[int, int, int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def sha256_below(folder: Path, pattern: str = "*") -> dict[str, str]:
    """Return the SHA-256 of every file below `folder` that fits the pattern, by relative path.

    Temporary files are left out.
    """
    return {
        path.relative_to(folder).as_posix(): sha256_file(path)
        for path in sorted(folder.rglob(pattern))
        if path.is_file() and not is_temporary(path)
    }


def sha256_tree(folder: Path, pattern: str = "*") -> str:
    """Return one digest over the names and contents of the files."""
    lines = (f"{digest}  {name}\n" for name, digest in sha256_below(folder, pattern).items())
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def is_intact(path: Path, sha256: str) -> bool:
    """Return whether the file exists and still has the recorded digest."""
    return path.is_file() and sha256_file(path) == sha256


def check_sha256(path: Path, sha256: str | None) -> None:
    """Raise if the hash of a cell's file differs from `sha256`, unless `sha256` is None."""
    if sha256 is not None:
        compare_sha256(path, sha256_file(path), sha256)


def compare_sha256(path: Path, found: str, recorded: str) -> None:
    """Raise if the digest found in a cell's file differs from the recorded one."""
    if found != recorded:
        raise ArtifactError(
            f"{path}: sha256 is {found}, but index.json says {recorded}: the file changed after it"
            " was measured. To keep the damaged cell and measure it again: --rerun-incomplete"
        )


def sha256_json(value: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the canonical (sorted, compact) JSON of `value`, in hex."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()

"""Pack a study into one file, `results/archive/<study>.tar.zst`, and unpack such files safely.

Layout: a zstd frame over a POSIX ustar archive of plain files. The first member, `archive.json`,
lists every file of the study with size and SHA-256; then `study.json`; then the rest by name. The
records of all cells are stored by column, in a member for each kind (`encode`), from which `unpack`
restores their files byte by byte. Owners, times and modes are fixed, so the same study gives the
same bytes (with the same zstd).

Nothing in another person's archive is trusted before it is checked. Only plain files that
archive.json lists, in the few places a study has, with the listed size and hash, are written, and
only into a private temporary folder. The study's folder appears by rename once everything is
checked.
"""

import contextlib
import hashlib
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Annotated, Any, Literal, NamedTuple, TypedDict

import zstandard

from connector_tax.artifacts import paths
from connector_tax.artifacts.record_reader import Record, checked
from connector_tax.artifacts.study_file import every_launch
from connector_tax.artifacts.study_records import StudyDocument, meta
from connector_tax.files import (
    ArtifactError,
    is_temporary,
    parse_json,
    sha256_file,
    write_bytes,
    write_text,
)

FORMAT = "connector-tax archive 4"
HEADER = "archive.json"
README, VERIFY, PUBLISHED = "README.md", "verify.py", "published"
# Files that unpacking adds to a study.
BESIDE = (HEADER, paths.ORIGIN, README, VERIFY, PUBLISHED)
REQUIRED = (
    paths.STUDY, paths.ENVIRONMENT, paths.ENV_TEXT, paths.REFERENCE_RATES, paths.MANIFEST,
    paths.SEALS, README,
)  # fmt: skip
SINGLE = (
    *REQUIRED,
    paths.COMPLETE,
    paths.MODEL,
    paths.LOOKS,
    paths.ARGUMENTS,
    paths.TRAFFIC,
    VERIFY,
)
FOLDERS = (paths.PREFLIGHT, paths.PATCH, paths.RUNS, PUBLISHED)
MADE_BY_REPLOT = (
    paths.ORIGIN, paths.ANALYSIS, paths.FIGURES, paths.REPORT, paths.AUDIT, paths.LOGS
)  # fmt: skip
TABLES = tuple(f"tables/{kind}" for kind in paths.ALL_LOGS)
MOST_DEPTH = 9  # a study's files are 5 folders deep
# Files of an earlier design, and earlier interim analyses, kept by `connector-tax remeasure`.
OLD_DESIGN = re.compile(
    r"(study|environment|env|model|preflight|patch|looks)\.superseded\d+(\.\w+)?"
)
PART = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}"
NAME = re.compile(
    rf"{'|'.join(map(re.escape, SINGLE))}|{OLD_DESIGN.pattern}(/{PART}){{0,{MOST_DEPTH}}}"
    rf"|({'|'.join(FOLDERS)})(/{PART}){{1,{MOST_DEPTH}}}",
    re.ASCII,
)
NUMBER = re.compile(rb"\d+(?:\.\d+)?")
# Numbers that integers represent exactly, and whose differences stay short.
INTEGER = re.compile(rb"(?:0|[1-9]\d{0,17})")
WORDS_BYTES = 256
LEVEL = 19
MAX_WINDOW_BYTES = 1 << 27
# Size limit of a JSON file, archive.json and a table's head; parsed values take up to 30 times it.
MOST_JSON_BYTES = 16 << 20
# Compressed bytes read at a time; each can expand to 32,768 bytes.
CHUNK_BYTES = 1 << 10
BLOCK, RECORD = 512, 10240
# Deletes a folder when its standard input ends, however the process at the other end ends.
CLEANER = "import shutil, sys; sys.stdin.read(); shutil.rmtree(sys.argv[1], ignore_errors=True)"


class Member(TypedDict):
    """Size and SHA-256 of a study's file, or of a member of the archive."""

    bytes: Annotated[int, meta(ge=0)]
    sha256: Annotated[str, meta(pattern="^[0-9a-f]{64}$")]


class TableMember(Member):
    """A member with the records of one kind; `files` names the files restored from it."""

    files: list[str]


class ArchiveHeader(TypedDict):
    """The content of archive.json: the study's files, and the tables that hold some of them."""

    format: Literal["connector-tax archive 4"]
    study: Annotated[str, meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
    files: dict[str, Member]
    tables: dict[str, TableMember]


# ---- content of an archive


class Limits(NamedTuple):
    """Limits set by an archive's size, so that a small hostile archive takes little to read.

    The six shipped studies contain 28 to 42 times the archive's size in total and 4 times in a
    table. For each archive byte they have 1.6 numbers; they have a file per 1,400 bytes and a
    column per 120 bytes.

    Attributes:
        total_bytes: bytes of the tar archive, and of the files restored from it.
        file_bytes: bytes of a file, and of a table.
        files: number of files.
        numbers: numbers in a table, including those that give each line's shape.
        columns: columns of a table, and its shapes.
    """

    total_bytes: int
    file_bytes: int
    files: int
    numbers: int
    columns: int

    @classmethod
    def of(cls, archive_bytes: int) -> "Limits":
        """Return the limits of an archive of this size."""
        floor = 64 << 20
        return cls(
            floor + 100 * archive_bytes,
            floor + 16 * archive_bytes,
            1000 + archive_bytes // 256,
            (4 << 20) + 3 * archive_bytes,
            (1 << 15) + archive_bytes // 100,
        )


def check_name(name: str) -> None:
    """Raise unless a member name belongs to a file of a study.

    Raises:
        ArtifactError: names the member.
    """
    if not NAME.fullmatch(name) or len(name) > 200:
        raise ArtifactError(f"member {name!r} has no place in a study")


def readme(study: StudyDocument) -> str:
    """Return an archive's README.md, which explains the content and how to check it."""
    version = study.get("package_version", "of a version that is not recorded")
    return f"""# Connector-tax study {study["study"]}

Engine: {study["engine_label"]}. Package {version}.
Design {study["design_sha256"]}.

- `runs/` raw records of every server launch, `published/` the tables as they were published,
  `archive.json` the size and SHA-256 of every file, `manifest.json` a digest of every figure.
- `tables/` holds the lines of `runs/*/*/*/*/*.jsonl` by column. `read_table` of `{VERIFY}` reads
  them; with the project's package installed `connector-tax archive unpack` writes the files.
- `python -I scripts/connector_tax/provenance/{VERIFY} FOLDER`, in a checkout of the project,
  computes percentiles, taxes and hypotheses anew from `tables/`, beside the published ones. Do not
  run the copy that lies here, nor start Python here: whoever made the archive made that too.
- In a checkout of the project, `snakemake --cores 1 replot --config archive=FILE` checks every
  hash, redraws all figures and the report, and audits each published number against the raw
  records. It starts no server and needs no network.
"""


# ---- JSON lines by column, which compress to half of the lines
#
# The text of such files is cut at its numbers. A line is then one of few *shapes*, with a NUL in
# place of each number, and the numbers of a shape are columns. Lines of text, the last without end:
#
#   {"files": [[name, lines], ...], "shapes": [shape, ...]}
#   the number of its shape for each line of all files, in order
#   a column for each NUL of each shape: `=` and its numbers, or `+` and their differences


def fits(data: bytes) -> bool:
    """Return whether a file can be stored by column."""
    return data.endswith(b"\n") and b"\0" not in data


def encode(files: Mapping[str, bytes]) -> bytes:
    """Return the table that stores these files by column; each must pass `fits`."""
    shapes: dict[bytes, list[list[bytes]]] = {}
    numbers: dict[bytes, int] = {}
    order = []
    for data in files.values():
        for line in data.split(b"\n")[:-1]:
            shape, values = NUMBER.sub(b"\0", line), NUMBER.findall(line)
            columns = shapes.setdefault(shape, [[] for _ in values])
            for column, value in zip(columns, values, strict=True):
                column.append(value)
            order.append(b"%d" % numbers.setdefault(shape, len(numbers)))
    header = {
        "files": [(name, data.count(b"\n")) for name, data in files.items()],
        "shapes": [shape.decode("latin-1") for shape in shapes],
    }
    columns = [column for of_shape in shapes.values() for column in of_shape]
    return b"\n".join([json.dumps(header).encode(), b" ".join(order), *map(_written, columns)])


def _written(column: Sequence[bytes]) -> bytes:
    if not all(map(INTEGER.fullmatch, column)):
        return b"=" + b" ".join(column)
    values = list(map(int, column))
    return b"+" + b" ".join(b"%d" % (b - a) for a, b in itertools.pairwise((0, *values)))


def _read(data: bytes, begin: int, end: int) -> Iterator[bytes]:
    """Yield the numbers of the column in the bytes from `begin` to `end`."""
    words = itertools.chain.from_iterable(_words(data, begin + 1, end))
    if data[begin : begin + 1] != b"+":
        return words
    return (b"%d" % value for value in itertools.accumulate(map(int, words)))


def _words(data: bytes, begin: int, end: int) -> Iterator[list[bytes]]:
    """Yield the words between `begin` and `end` in small lists.

    A single list would take 20 times the words' bytes.
    """
    while begin < end:
        stop = data.find(b" ", begin + WORDS_BYTES, end)
        stop = end if stop < 0 else stop
        yield data[begin:stop].split()
        begin = stop


def _lines(data: bytes, begin: int) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each line from `begin` on; the last line has no line end."""
    while (end := data.find(b"\n", begin)) >= 0:
        yield begin, end
        begin = end + 1
    yield begin, len(data)


def decode(data: bytes, sizes: Mapping[str, int], limits: Limits) -> Iterator[tuple[str, bytes]]:
    """Yield the files of a table one by one, checked against their listed sizes.

    Raises:
        Exception: the data was not made by `encode`, or exceeds the limits.
    """
    head_end = data.index(b"\n")
    columns = data.count(b"\n") - 1
    numbers = data.count(b" ", head_end) + columns
    if head_end > MOST_JSON_BYTES or numbers > limits.numbers or columns > limits.columns:
        raise ValueError(f"too many numbers ({numbers:,}), columns ({columns:,}) or shapes")
    header = parse_json(data[:head_end])
    if [name for name, _ in header["files"]] != [*sizes] or len(header["shapes"]) > limits.columns:
        raise ValueError(
            f"its files differ from those that {HEADER} lists, or have too many shapes"
        )
    places = _lines(data, head_end + 1)
    begin, end = next(places)
    order = map(int, itertools.chain.from_iterable(_words(data, begin, end)))
    lines, rows = [], []
    for shape in header["shapes"]:
        line = shape.encode("latin-1")
        lines.append(line.replace(b"%", b"%%").replace(b"\0", b"%b") + b"\n")
        cells = [_read(data, *next(places)) for _ in range(line.count(b"\0"))]
        rows.append(zip(*cells, strict=False) if cells else itertools.repeat(()))
    for name, count in header["files"]:
        content = bytearray()
        for number in itertools.islice(order, count):
            content += lines[number] % next(rows[number])
            if len(content) > sizes[name]:
                raise ValueError(f"{name}: more than the {sizes[name]} bytes that are listed")
        yield name, bytes(content)


# ---- writing


def packed(header: Mapping[str, Any], files: Mapping[str, bytes]) -> bytes:
    """Return the bytes of an archive.

    Args:
        header: the content of archive.json besides the files.
    """
    members, tables = dict(files), dict[str, Any]()
    for kind, table in zip(paths.ALL_LOGS, TABLES, strict=True):
        log = re.compile(rf"{paths.RUNS}/.*/{kind}_[^/]*\.jsonl")
        logs = {n: members.pop(n) for n in sorted(files) if log.fullmatch(n) and fits(files[n])}
        if logs:
            members[table] = encode(logs)
            tables[table] = _entry(members[table]) | {"files": list(logs)}
    listed = {name: _entry(files[name]) for name in sorted(files, key=_place)}
    head = {"format": FORMAT, **header, "files": listed, "tables": tables}
    content = (json.dumps(head, indent=1) + "\n").encode()
    stream = io.BytesIO()
    parameters = zstandard.ZstdCompressionParameters.from_level(
        LEVEL, write_checksum=True, write_content_size=False, threads=0
    )
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    with (
        compressor.stream_writer(stream, closefd=False) as writer,
        tarfile.open(fileobj=writer, mode="w|", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for name in (HEADER, *sorted(members, key=_place)):
            data = content if name == HEADER else members[name]
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), _mode(name)
            tar.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def _entry(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _mode(name: str) -> int:
    return 0o755 if name.endswith(".sh") else 0o644


def _place(name: str) -> tuple[bool, str]:
    """Return the sort key of a member: study.json first, then by name."""
    return name != paths.STUDY, name


# ---- opening


def read_head(archive: Path) -> StudyDocument:
    """Return study.json of an archive; other members are decompressed but not checked.

    Raises:
        ArtifactError: the file is not an archive of this kind.
    """
    with _opened(archive) as opened:
        _, data = next(_files(opened))
        return _study(opened.header, data)


def unpack(archive: Path, target: Path) -> ArchiveHeader:
    """Check an archive completely, then put the study at `target`.

    The content of `target` is replaced; it may hold only files of an earlier replot.

    Raises:
        ArtifactError: the archive is damaged or hostile, or `target` is something else. Nothing has
            been written then, and the temporary folder beside `target` is removed.
    """
    known = {HEADER, *SINGLE, *FOLDERS, *MADE_BY_REPLOT}
    for path in sorted(target.glob("*")):
        if not (path.name in known or OLD_DESIGN.fullmatch(path.name) or is_temporary(path)):
            raise ArtifactError(f"{target}: holds {path.name}, which no replot makes; move it away")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with private_folder(target) as private, _opened(archive, private) as opened:
            folder = private / "study"
            write_bytes(folder / HEADER, opened.listed)
            for name, data in _files(opened):
                if name == paths.STUDY:
                    _study(opened.header, data)
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
                path.chmod(_mode(name))
            size = archive.stat().st_size
            write_text(folder / paths.ORIGIN, f"{sha256_file(archive)}  {archive.name} {size}\n")
            if target.exists():
                shutil.rmtree(target)
            folder.rename(target)
    except OSError as error:
        raise ArtifactError(f"{archive}: cannot be unpacked: {error}") from None
    return opened.header


@contextlib.contextmanager
def private_folder(target: Path) -> Iterator[Path]:
    """Yield a folder beside `target` that is deleted however this process ends, even by SIGKILL."""
    folder = tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent)
    command = [sys.executable, "-I", "-c", CLEANER, folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True):
        yield Path(folder)


class Opened(NamedTuple):
    """An open tar archive whose first member was read, with this member's content and text."""

    content: IO[bytes]
    header: ArchiveHeader
    listed: bytes
    limits: Limits


@contextlib.contextmanager
def _opened(archive: Path, folder: Path | None = None) -> Iterator[Opened]:
    """Open an archive, read its first member, and yield both.

    Args:
        folder: a folder on the disk that stores the tar archive meanwhile.

    Raises:
        ArtifactError: the file cannot be opened, or the content read inside the block is rejected.
    """
    try:
        stream = archive.open("rb")
    except OSError as error:
        raise ArtifactError(
            f"{archive}: {error.strerror}; allowed: an archive of a study"
        ) from None
    try:
        with stream as file, tempfile.TemporaryFile(dir=folder) as content:
            limits = Limits.of(os.fstat(file.fileno()).st_size)
            _decompress(file, content, limits)
            yield Opened(content, *_header(content, limits), limits)
    except ArtifactError as error:
        raise ArtifactError(f"{archive}: refused: {error}") from None


def _decompress(file: IO[bytes], content: IO[bytes], limits: Limits) -> None:
    """Write the content of the file's one zstd frame, up to a limit."""
    frame = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).decompressobj()
    data = file.read(len(zstandard.FRAME_HEADER))
    if not data:
        raise ArtifactError("it is empty")
    if not zstandard.FRAME_HEADER.startswith(data):
        raise ArtifactError("not a zstd file")
    read_bytes = 0
    while not frame.eof:
        if not data:
            raise ArtifactError(f"it is cut off after {read_bytes:,} bytes; copy it again")
        read_bytes += len(data)
        try:
            content.write(frame.decompress(data))
        except zstandard.ZstdError as error:
            raise ArtifactError(f"the compressed data is damaged: {error}; copy it again") from None
        if content.tell() > limits.total_bytes:
            raise ArtifactError(f"more than {limits.total_bytes:,} bytes in all{_FOR_ITS_SIZE}")
        data = b"" if frame.eof else file.read(CHUNK_BYTES)
    if frame.unused_data or file.read(1):
        raise ArtifactError("there is data behind its end")
    content.seek(0)


_FOR_ITS_SIZE = ", the limit for an archive of its size"


def _header(content: IO[bytes], limits: Limits) -> tuple[ArchiveHeader, bytes]:
    """Check the first member; return its content and its text."""
    data = _next(content, HEADER)
    header = _parsed(data, ArchiveHeader, HEADER)
    files, tables = header["files"], header["tables"]
    for name in files:
        check_name(name)
    rows = [name for entry in tables.values() for name in entry["files"]]
    if missing := [name for name in REQUIRED if name not in files or name in rows]:
        raise ArtifactError(f"{HEADER}: {missing[0]!r} is not among the members")
    if unknown := {*tables} - {*TABLES}:
        raise ArtifactError(f"{HEADER}: {min(unknown)!r} is not a table of a study")
    if len({*rows} & {*files}) < len(rows):
        raise ArtifactError(f"{HEADER}: a file is in two tables, or in one and not listed")
    _check_sizes(files, tables, limits)
    return header, data


def _parsed(data: bytes, kind: type[Record], name: str) -> Record:
    try:
        return checked(parse_json(data), kind, name)
    except ValueError as error:
        raise ArtifactError(f"{name}: not valid JSON: {error}") from None


def _check_sizes(files: Mapping[str, Member], tables: Mapping[str, Member], limits: Limits) -> None:
    if len(files) > limits.files:
        reason = f"{len(files):,} files; allowed for an archive of its size: {limits.files:,}"
        raise ArtifactError(f"{HEADER}: {reason}")
    for listed in (files, tables):
        if sum(entry["bytes"] for entry in listed.values()) > limits.total_bytes:
            reason = f"more than {limits.total_bytes:,} bytes in all{_FOR_ITS_SIZE}"
            raise ArtifactError(f"{HEADER}: {reason}")
        for name, entry in listed.items():
            most = MOST_JSON_BYTES if name.endswith(".json") else limits.file_bytes
            if entry["bytes"] > most:
                reason = f"{name!r} has {entry['bytes']:,} bytes; allowed: {most:,}"
                raise ArtifactError(f"{HEADER}: {reason}")


def _files(opened: Opened) -> Iterator[tuple[str, bytes]]:
    """Yield every file of the study as archive.json lists it, study.json first; reject anything
    else.
    """
    content, header, *_ = opened
    listed: dict[str, Member] = {**header["files"], **header["tables"]}
    in_tables = {name for entry in header["tables"].values() for name in entry["files"]}
    for member in sorted({*listed} - in_tables, key=_place):
        data = _next(content, member, listed[member]["bytes"])
        _check_hash(member, data, listed)
        if member in header["tables"]:
            yield from _files_of_table(member, data, opened)
        else:
            yield member, data
    end = content.tell() + 2 * BLOCK
    if content.read(2 * RECORD) != bytes(2 * BLOCK + -end % RECORD):
        raise ArtifactError("there is data behind the end of the tar archive, or no end")


def _files_of_table(member: str, data: bytes, opened: Opened) -> Iterator[tuple[str, bytes]]:
    files = opened.header["files"]
    sizes = {name: files[name]["bytes"] for name in opened.header["tables"][member]["files"]}
    rows = decode(data, sizes, opened.limits)
    while True:
        try:
            name, content = next(rows)
        except StopIteration:
            return
        except Exception as error:
            raise ArtifactError(f"member {member!r}: {error!r}") from None
        _check_hash(name, content, files)
        yield name, content


def _check_hash(name: str, data: bytes, listed: Mapping[str, Member]) -> None:
    if hashlib.sha256(data).hexdigest() != listed[name]["sha256"]:
        raise ArtifactError(f"member {name!r}: sha256 is not what {HEADER} says")


def _next(content: IO[bytes], name: str, size: int | None = None) -> bytes:
    """Return the next member, a plain file of `size` bytes (None: any size that a JSON file may
    have).
    """
    try:
        info = tarfile.TarInfo.frombuf(content.read(BLOCK), "utf-8", "strict")
        member = info.name, info.type, info.size
    except (tarfile.TarError, UnicodeError):
        member = "", b"", 0
    if size is None and member[0] != name:
        raise ArtifactError(f"its first member is not {name}")
    if size is None and member[2] > MOST_JSON_BYTES:
        raise ArtifactError(f"{name} has {member[2]:,} bytes; allowed: {MOST_JSON_BYTES:,}")
    size = max(member[2], 0) if size is None else size
    if member != (name, tarfile.REGTYPE, size):
        reason = f"missing, out of order, or not a regular file of {size} bytes as {HEADER} lists"
        raise ArtifactError(f"member {name!r}: {reason}")
    data = content.read(size)
    content.read(-size % BLOCK)
    return data


def _study(header: ArchiveHeader, data: bytes) -> StudyDocument:
    """Return study.json, checked before any path is built from its names."""
    study = _parsed(data, StudyDocument, paths.STUDY)
    if study["study"] != header["study"]:
        reason = f"study is {study['study']!r}, {HEADER} says {header['study']!r}"
        raise ArtifactError(f"{paths.STUDY}: {reason}")
    named = set()
    for launch in every_launch(study):
        index = (launch.folder(Path()) / paths.INDEX).as_posix()
        if launch in named or index not in header["files"]:
            why = "twice" if launch in named else f"{HEADER} lists no {index}"
            raise ArtifactError(f"{paths.STUDY}: run_order: found {launch.name}: {why}")
        named.add(launch)
    return study

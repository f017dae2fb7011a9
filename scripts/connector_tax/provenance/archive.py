"""One study in one file: `results/archive/<study>.tar.zst`, packed reproducibly, opened carefully.

Layout: a zstd frame over a POSIX ustar archive of plain files. The first member, `archive.json`,
lists every file of the study with size and SHA-256; then `study.json`; then the rest by name.
The records of all cells stand by column, a member for each kind (`encode`), from which `unpack`
writes their files again, to the byte. Owners, times and modes are fixed, so the same study gives
the same bytes (with the same zstd).

Of an archive that comes from someone else nothing is believed before it is checked. Only plain
files that archive.json lists, under the few places a study has, with the size and hash it names,
are written, and only into a private temporary folder; the study's folder appears by rename once all
is right.
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
from typing import IO, Annotated, Any, Literal, TypedDict

import zstandard

from connector_tax.artifacts import paths
from connector_tax.artifacts.record_reader import checked
from connector_tax.artifacts.study_records import StudyDocument, meta
from connector_tax.files import ArtifactError, sha256_file, write_bytes, write_text

FORMAT = "connector-tax archive 4"
HEADER = "archive.json"
# Beside what was unpacked: of which archive it is.
ORIGIN = "archive.sha256"
README, VERIFY, PUBLISHED = "README.md", "verify.py", "published"
# What lies beside a study that was unpacked.
BESIDE = (HEADER, ORIGIN, README, VERIFY, PUBLISHED)
REQUIRED = (
    paths.STUDY, paths.ENVIRONMENT, paths.ENV_TEXT, paths.REFERENCE_RATES, paths.MANIFEST,
    paths.SEALS, README,
)  # fmt: skip
SINGLE = (*REQUIRED, paths.COMPLETE, paths.MODEL, paths.LOOKS, paths.ARGUMENTS, VERIFY)
FOLDERS = (paths.PREFLIGHT, paths.PATCH, paths.RUNS, PUBLISHED)
MADE_BY_REPLOT = (
    ORIGIN, paths.ANALYSIS, paths.FIGURES, paths.REPORT, paths.AUDIT, paths.LOGS
)  # fmt: skip
TABLES = tuple(f"tables/{kind}" for kind in paths.ALL_LOGS)
# What `connector-tax remeasure --all` keeps of an earlier design.
OLD_DESIGN = re.compile(r"(study|environment|env|model|preflight|patch)\.superseded\d+(\.\w+)?")
PART = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}"
NAME = re.compile(
    rf"{'|'.join(map(re.escape, SINGLE))}|{OLD_DESIGN.pattern}(/{PART})*"
    rf"|({'|'.join(FOLDERS)})(/{PART})+",
    re.ASCII,
)
NUMBER = re.compile(rb"\d+(?:\.\d+)?")
# Of these nothing is lost as an integer, nor does a difference of two take many digits.
INTEGER = re.compile(rb"(?:0|[1-9]\d{0,17})")
LEVEL = 19
# An honest study is 15 to 40 times its archive.
FLOOR_BYTES = 64 << 20
MOST_TIMES = 200
MAX_WINDOW_BYTES = 1 << 27
# Compressed bytes at a time: each of them can be 32,768 bytes of content.
CHUNK_BYTES = 1 << 10
BLOCK, RECORD = 512, 10240
# Ends with its standard input, however the process that holds the other end of it ends.
CLEANER = "import shutil, sys; sys.stdin.read(); shutil.rmtree(sys.argv[1], ignore_errors=True)"


class Member(TypedDict):
    """A file of a study, or a member of the archive."""

    bytes: Annotated[int, meta(ge=0)]
    sha256: Annotated[str, meta(pattern="^[0-9a-f]{64}$")]


class TableMember(Member):
    """The records of a kind, and the files that are made of it."""

    files: list[str]


class ArchiveHeader(TypedDict):
    """archive.json: every file of the study, and the tables that hold some of them."""

    format: Literal["connector-tax archive 4"]
    study: Annotated[str, meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
    files: dict[str, Member]
    tables: dict[str, TableMember]


# ---- what an archive holds


def check_name(name: str) -> None:
    """Refuse a member name that is not one of a study's.

    Raises:
        ArtifactError: names it.
    """
    if not NAME.fullmatch(name) or len(name) > 200:
        raise ArtifactError(f"member {name!r} has no place in a study")


def readme(study: StudyDocument) -> str:
    """README.md of an archive: what it is, and how to check it."""
    return f"""# Connector-tax study {study["study"]}

Engine: {study["engine_label"]}. Package {study["package_version"]}.
Design {study["design_sha256"]}.

- `runs/` raw records of every server launch, `published/` the tables and the numbers under each
  figure as they were published, `archive.json` the size and SHA-256 of every file.
- `tables/` holds the lines of `runs/*/*/*/*/*.jsonl` by column. `read_table` of `{VERIFY}` reads
  them; with the project's package installed `connector-tax archive unpack` writes the files.
- `python {VERIFY}` computes percentiles, taxes and hypotheses anew from
  `tables/`, beside the published ones: one file to read; it needs pandas and scipy.
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
    """Whether a file can be written by column."""
    return data.endswith(b"\n") and b"\0" not in data


def encode(files: Mapping[str, bytes]) -> bytes:
    """Files that fit, by column."""
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


def _read(column: bytes) -> Iterator[bytes]:
    values = column[1:].split()
    if column[:1] != b"+":
        return iter(values)
    return (b"%d" % value for value in itertools.accumulate(map(int, values)))


def decode(data: bytes, sizes: Mapping[str, int]) -> dict[str, bytes]:
    """The files, each of at most the size that is listed for it.

    Raises:
        Exception: it is nothing that `encode` made.
    """
    head, order, *rest = data.split(b"\n")
    header, columns, numbers = json.loads(head), iter(rest), map(int, order.split())
    shapes = [shape.encode("latin-1").split(b"\0") for shape in header["shapes"]]
    values = [[_read(next(columns)) for _ in shape[1:]] for shape in shapes]
    files = {}
    for name, count in header["files"]:
        lines, left = [], sizes[name]
        for number in itertools.islice(numbers, count):
            first, *parts = shapes[number]
            between = zip(values[number], parts, strict=True)
            lines.append(first + b"".join(next(value) + part for value, part in between) + b"\n")
            left -= len(lines[-1])
            if left < 0:
                raise ValueError(f"{name}: more than the {sizes[name]} bytes that are listed")
        files[name] = b"".join(lines)
    return files


# ---- writing


def packed(header: Mapping[str, Any], files: Mapping[str, bytes]) -> bytes:
    """The bytes of an archive.

    Args:
        header: what archive.json says besides the files.
        files: their content by name.
    """
    members, tables = dict(files), dict[str, Any]()
    for kind, table in zip(paths.ALL_LOGS, TABLES, strict=True):
        log = re.compile(rf"{paths.RUNS}/.*/{kind}_[^/]*\.jsonl")
        own = {n: members.pop(n) for n in sorted(files) if log.fullmatch(n) and fits(files[n])}
        if own:
            members[table] = encode(own)
            tables[table] = _entry(members[table]) | {"files": list(own)}
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
    """By what members are sorted."""
    return name != paths.STUDY, name


# ---- opening


def read_head(archive: Path) -> StudyDocument:
    """study.json of an archive; the rest is decompressed and not checked.

    Raises:
        ArtifactError: the file is not an archive of this kind.
    """
    with _opened(archive) as (content, header, _):
        _, data = next(_files(content, header))
        return _study(header, data)


def unpack(archive: Path, target: Path) -> ArchiveHeader:
    """Check an archive to the last byte, then put the study at `target`.

    What `target` held is replaced; it must hold nothing but what an earlier replot made.

    Args:
        archive: the file.
        target: a study's folder.

    Raises:
        ArtifactError: the archive is damaged or hostile, or `target` is something else. Nothing has
            been written then but a temporary folder beside `target`, which is removed.
    """
    known = {HEADER, *SINGLE, *FOLDERS, *MADE_BY_REPLOT}
    for path in sorted(target.glob("*")):
        if path.name not in known and not OLD_DESIGN.fullmatch(path.name):
            raise ArtifactError(f"{target}: holds {path.name}, which no replot makes; move it away")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with private_folder(target) as private, _opened(archive, private) as opened:
            content, header, listed = opened
            folder = private / "study"
            write_bytes(folder / HEADER, listed)
            for name, data in _files(content, header):
                if name == paths.STUDY:
                    _study(header, data)
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
                path.chmod(_mode(name))
            write_text(folder / ORIGIN, f"{sha256_file(archive)}  {archive.name}\n")
            if target.exists():
                shutil.rmtree(target)
            folder.rename(target)
    except OSError as error:
        raise ArtifactError(f"{archive}: cannot be unpacked: {error}") from None
    return header


@contextlib.contextmanager
def private_folder(target: Path) -> Iterator[Path]:
    """A folder beside `target` that goes away however this process ends, killed too."""
    folder = tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent)
    command = [sys.executable, "-I", "-c", CLEANER, folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True):
        yield Path(folder)


@contextlib.contextmanager
def _opened(
    archive: Path, folder: Path | None = None
) -> Iterator[tuple[IO[bytes], ArchiveHeader, bytes]]:
    """The tar archive in the file, behind its first member; this one, and its text.

    Args:
        archive: the file.
        folder: on whose disk the tar archive is kept meanwhile.

    Raises:
        ArtifactError: what is read in the block is refused.
    """
    try:
        with archive.open("rb") as file, tempfile.TemporaryFile(dir=folder) as content:
            most_bytes = FLOOR_BYTES + MOST_TIMES * os.fstat(file.fileno()).st_size
            _decompress(file, content, most_bytes)
            yield content, *_header(content, most_bytes)
    except ArtifactError as error:
        raise ArtifactError(f"{archive}: refused: {error}") from None
    except FileNotFoundError as error:
        raise ArtifactError(f"{archive}: {error.strerror}") from None


def _decompress(file: IO[bytes], content: IO[bytes], most_bytes: int) -> None:
    """The content of the file's one zstd frame, up to a limit."""
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
        if content.tell() > most_bytes:
            raise ArtifactError(_too_much(most_bytes))
        data = b"" if frame.eof else file.read(CHUNK_BYTES)
    if frame.unused_data or file.read(1):
        raise ArtifactError("there is data behind its end")
    content.seek(0)


def _too_much(most_bytes: int) -> str:
    return f"more than {most_bytes} bytes in all, which is {MOST_TIMES} times the archive"


def _header(content: IO[bytes], most_bytes: int) -> tuple[ArchiveHeader, bytes]:
    """The first member, checked, and its text."""
    data = _next(content, HEADER)
    try:
        header = checked(json.loads(data), ArchiveHeader, HEADER)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{HEADER}: {error!r}") from None
    files, tables = header["files"], header["tables"]
    for name in files:
        check_name(name)
    rows = [name for entry in tables.values() for name in entry["files"]]
    if missing := [name for name in REQUIRED if name not in files or name in rows]:
        raise ArtifactError(f"{HEADER}: {missing[0]!r} is not among the members")
    if unknown := {*tables} - {*TABLES}:
        raise ArtifactError(f"{HEADER}: {min(unknown)!r} is no table of a study")
    if len({*rows} & {*files}) < len(rows):
        raise ArtifactError(f"{HEADER}: a file is in two tables, or in one and not listed")
    if any(sum(e["bytes"] for e in listed.values()) > most_bytes for listed in (files, tables)):
        raise ArtifactError(f"{HEADER}: {_too_much(most_bytes)}")
    return header, data


def _files(content: IO[bytes], header: ArchiveHeader) -> Iterator[tuple[str, bytes]]:
    """Every file of the study as archive.json lists it, first study.json; nothing else is there."""
    listed: dict[str, Member] = {**header["files"], **header["tables"]}
    in_tables = {name for entry in header["tables"].values() for name in entry["files"]}
    for member in sorted({*listed} - in_tables, key=_place):
        made = {member: _next(content, member, listed[member]["bytes"])}
        if member in header["tables"]:
            sizes = {name: listed[name]["bytes"] for name in header["tables"][member]["files"]}
            try:
                rows = decode(made[member], sizes)
                made |= {name: rows[name] for name in sizes}
            except Exception as error:
                raise ArtifactError(f"member {member!r}: {error!r}") from None
        for name, data in made.items():
            if hashlib.sha256(data).hexdigest() != listed[name]["sha256"]:
                raise ArtifactError(f"member {name!r}: sha256 is not what {HEADER} says")
            if name not in header["tables"]:
                yield name, data
    end = content.tell() + 2 * BLOCK
    if content.read(2 * RECORD) != bytes(2 * BLOCK + -end % RECORD):
        raise ArtifactError("there is data behind the end of the tar archive, or no end")


def _next(content: IO[bytes], name: str, size: int | None = None) -> bytes:
    """The next member of the tar archive, this plain file; None: of any size up to FLOOR_BYTES."""
    try:
        info = tarfile.TarInfo.frombuf(content.read(BLOCK), "utf-8", "strict")
        found = info.name, info.type, info.size
    except (tarfile.TarError, UnicodeError):
        found = "", b"", 0
    if size is None and found[0] != name:
        raise ArtifactError(f"its first member is not {name}")
    size = min(max(found[2], 0), FLOOR_BYTES) if size is None else size
    if found != (name, tarfile.REGTYPE, size):
        told = f"{name!r} is missing, no plain file of the {size} bytes that {HEADER} lists, or not"
        raise ArtifactError(f"member {told} in its place")
    data = content.read(size)
    content.read(-size % BLOCK)
    return data


def _study(header: ArchiveHeader, data: bytes) -> StudyDocument:
    """study.json, checked before any path is made of what it names."""
    try:
        study = checked(json.loads(data), StudyDocument, paths.STUDY)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{paths.STUDY}: not valid JSON: {error}") from None
    if study["study"] != header["study"]:
        told = f"study is {study['study']!r}, {HEADER} says {header['study']!r}"
        raise ArtifactError(f"{paths.STUDY}: {told}")
    return study

"""One study in one file: `results/archive/<study>.tar.zst`, packed reproducibly, opened carefully.

Layout: a zstd frame over a POSIX ustar archive of plain files. The first member, `archive.json`,
lists every file of the study with size and SHA-256; then `study.json`; then the rest by name.
The records of all cells stand by column, a member for each kind (`columns`), from which `unpack`
writes their files again, to the byte. Owners, times and modes are fixed, so the same study gives
the same bytes (with the same zstd).

Of an archive that comes from someone else nothing is believed before it is checked. Only plain
files that archive.json lists, under the few places a study has, with the size and hash it names,
are written, and only into a private temporary folder; the study's folder appears by rename once all
is right.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import IO, Annotated, Any, Literal, TypedDict

import zstandard

from connector_tax import __version__
from connector_tax.artifacts import paths
from connector_tax.artifacts.declare import meta
from connector_tax.artifacts.record_reader import checked
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.commands import run_command
from connector_tax.files import ArtifactError, read_json, sha256_file, write_bytes, write_text
from connector_tax.machine import arithmetic
from connector_tax.provenance.claims import FAIL
from connector_tax.provenance.columns import decode, encode, fits
from connector_tax.provenance.manifest import name_archive, section_of
from connector_tax.seals import read_links, settled_files

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
# Kind of the claim about what MANIFEST.md says of a study's pictures.
LISTED = "pictures"
TABLES = tuple(f"tables/{kind}" for kind in paths.ALL_LOGS)
# What `connector-tax remeasure --all` keeps of an earlier design.
OLD_DESIGN = re.compile(r"(study|environment|env|model|preflight|patch)\.superseded\d+(\.\w+)?")
PART = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}"
NAME = re.compile(
    rf"{'|'.join(map(re.escape, SINGLE))}|{OLD_DESIGN.pattern}(/{PART})*"
    rf"|({'|'.join(FOLDERS)})(/{PART})+",
    re.ASCII,
)
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


# What pictures depend on besides the raw records.
PACKAGES = (
    "numpy", "scipy", "polars", "pandas", "matplotlib", "pillow", "contourpy", "kiwisolver",
    "fonttools", "seaborn", "jinja2", "markupsafe",
)  # fmt: skip
PICTURES = (".png", ".svg")
# matplotlib names a clip path by a hash of its coordinates, whose last bits the layout's solver
# leaves to where variables lie in memory: the same picture, drawn again, may name it otherwise.
CLIP_PATH = re.compile(rb'(?<=["#])p[0-9a-f]{10}(?=[")])')
DATA = re.compile(r"data:[^\s\"')]+")


def versions() -> dict[str, str]:
    """What pictures depend on besides the records: versions, the code that draws, the processor."""
    package = Path(__file__).parents[1]
    drawing = (package / "marks.py", *sorted((package / "figures").glob("*.py")))
    own = {
        "drawing": hashlib.sha256(b"".join(p.read_bytes() for p in drawing)).hexdigest()[:12],
        "python": platform.python_version(),
        "connector-tax": __version__,
        "processor": arithmetic(),
    }
    installed = {(d.metadata["Name"] or "").lower(): d.version for d in metadata.distributions()}
    return own | {name: installed.get(name, "absent") for name in PACKAGES}


def digest(path: Path) -> str:
    """SHA-256 of a picture in which clip paths are named by number."""
    content = path.read_bytes()
    names: dict[bytes, int] = {}
    if path.suffix == ".svg":
        content = CLIP_PATH.sub(
            lambda name: b"p%d" % names.setdefault(name[0], len(names)), content
        )
    return hashlib.sha256(content).hexdigest()


def page_text(html: str) -> str:
    """A page without its pictures and downloads."""
    return DATA.sub("data:", html)


# ---- packing


def pack(study_file: Path, manifest: Path, target: Path) -> None:
    """Write the archive of a complete study.

    Args:
        study_file: results/<study>/study.json.
        manifest: MANIFEST.md; it gets the study's rows, and names the archive.
        target: results/archive/<study>.tar.zst.

    Raises:
        ArtifactError: the study is incomplete, a claim of it fails the audit, or what was packed
            would be refused by whoever unpacks it.
    """
    # Imported late: it draws figures, which opening an archive does without.
    from connector_tax.provenance.audit import audit

    root = study_file.parent
    claims = audit(study_file, manifest)[0].claims
    # The line of the pictures is written anew below.
    failed = [claim for claim in claims if claim.verdict == FAIL and claim.kind != LISTED]
    if failed:
        lines = [f"{claim.kind} {claim.subject}: {claim.message}" for claim in failed[:10]]
        told = f"{root} is not archived: {len(failed)} claims fail the audit"
        raise ArtifactError("\n  ".join([f"{told}:", *lines]))
    target.parent.mkdir(parents=True, exist_ok=True)
    with private_folder(target) as folder:
        packed = folder / target.name
        write_bytes(packed, packed_study(root))
        try:
            unpack(packed, folder / "unpacked")
        except ArtifactError as error:
            raise ArtifactError(f"{root} is not archived: {error}") from None
        packed.replace(target)
    study = read_json(study_file)["study"]
    body = section_of((root / paths.MANIFEST_PAGE).read_text(encoding="utf-8"), study)
    name_archive(manifest, study, target, body, png_digests(root))


def png_digests(root: Path) -> dict[str, str]:
    """SHA-256 of a study's PNG files by name."""
    return {path.name: sha256_file(path) for path in (root / paths.FIGURES).glob("*.png")}


def packed_study(root: Path) -> bytes:
    """The bytes of the archive of the study in `root`: all that is sealed, and what was published.

    Raises:
        ArtifactError: a file is missing, or has no place in a study.
    """
    study = read_json(root / paths.STUDY)
    names = [paths.SEALS, paths.MANIFEST, paths.COMPLETE, *settled_files(read_links(root))]
    members = {name: root / name for name in names}
    for path in sorted((root / paths.RUNS).rglob("*")):
        if not path.is_dir() or path.is_symlink():
            members[path.relative_to(root).as_posix()] = path
    # The CSVs are enough of the tables: their parquet form holds the same.
    for tree in (paths.ANALYSIS, paths.FIGURES):
        published = (path for path in (root / tree).iterdir() if path.suffix in (".csv", ".json"))
        members |= {f"{PUBLISHED}/{tree}/{path.name}": path for path in published}
    for name, path in members.items():
        if path.is_symlink() or not path.is_file():
            raise ArtifactError(f"{path}: missing, or not a plain file")
        check_name(name)
    contents = {name: path.read_bytes() for name, path in members.items()}
    contents |= {
        README: readme(study).encode(),
        VERIFY: Path(__file__).with_name(VERIFY).read_bytes(),
        f"{PUBLISHED}/{paths.REPORT}": page_text((root / paths.REPORT).read_text("utf-8")).encode(),
    }
    drawn = sorted(path for path in (root / paths.FIGURES).iterdir() if path.suffix in PICTURES)
    header = {
        "study": study["study"],
        "engine_label": study["engine_label"],
        "design_sha256": study["design_sha256"],
        "versions": versions(),
        "redrawn": {f"{paths.FIGURES}/{path.name}": digest(path) for path in drawn},
    }
    return packed(header, contents)


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


def read_head(archive: Path) -> tuple[ArchiveHeader, StudyDocument]:
    """archive.json and study.json of an archive; the rest is decompressed and not checked.

    Raises:
        ArtifactError: the file is not an archive of this kind.
    """
    with _opened(archive) as (content, header, _):
        _, data = next(_files(content, header))
        return header, _study(header, data)


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


def main(argv: Sequence[str] | None = None) -> int:
    """Pack a study into an archive, or unpack one."""
    parser = argparse.ArgumentParser(
        prog="python -m connector_tax.provenance.archive", description=main.__doc__
    )
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="write results/archive/<study>.tar.zst")
    packing.add_argument("--study", type=Path, required=True, help="results/<study>/study.json")
    packing.add_argument("--manifest", type=Path, required=True, help="MANIFEST.md")
    packing.add_argument("--out", type=Path, required=True)
    unpacking = commands.add_parser("unpack", help="check an archive and put it into a folder")
    unpacking.add_argument("--archive", type=Path, required=True)
    unpacking.add_argument("--out", type=Path, required=True)
    return run_command(parser, argv, _carry_out)


def _carry_out(arguments: argparse.Namespace) -> None:
    if arguments.command == "pack":
        pack(arguments.study, arguments.manifest, arguments.out)
        size = arguments.out.stat().st_size
        print(f"{arguments.out}: {size} bytes, sha256 {sha256_file(arguments.out)}")
    else:
        header = unpack(arguments.archive, arguments.out)
        print(f"{arguments.out}: {len(header['files'])} files, every hash as listed")
        print(f"{arguments.archive}: sha256 {sha256_file(arguments.archive)}")


if __name__ == "__main__":
    sys.exit(main())

"""One study in one file: `results/archive/<study>.tar.zst`, packed reproducibly, opened carefully.

Layout: a zstd frame over a POSIX ustar archive of plain files. The first member, `archive.json`,
lists every file of the study with size and SHA-256; then `study.json`; then the rest by name.
Records stand in one parquet table each kind (`tables`), from which `unpack` writes their files
again, to the byte. Owners, times and modes are fixed, so the same study gives the same bytes (with
the same zstd and polars).

An archive comes from someone else: nothing is believed before it is checked. Only plain files that
archive.json lists, under the few places a study has, with the size and hash it names, are written,
and only into a private temporary folder; the study's folder appears by rename once all is right.
"""

import argparse
import contextlib
import hashlib
import io
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import zstandard

from connector_tax.commands import run_command
from connector_tax.config import ROOT, ConfigError, validate
from connector_tax.files import ArtifactError, read_json, sha256_file, write_bytes, write_text
from connector_tax.provenance.archive_limits import (
    BLOCK,
    FORMAT,
    SEALED,
    SINGLE,
    STUDY,
    TABLES,
    TREES,
    ArchiveError,
    Frame,
    Header,
    check_header,
    check_name,
    kind_of,
)
from connector_tax.provenance.audit import audit
from connector_tax.provenance.audit_remade import HEADER, ORIGIN, published_files, versions
from connector_tax.provenance.claims import FAIL
from connector_tax.provenance.crate import crate, readme
from connector_tax.provenance.manifest import name_archive, parse
from connector_tax.provenance.tables import decode, encode, read_table

MADE_HERE = ("README.md", "ro-crate-metadata.json")
MADE_BY_REPLOT = (ORIGIN, "analysis", "figures", "report.html", "audit.json", "logs")
RAW_TREES = ("preflight", "patch", "runs")
LEVEL = 19
COPY_BYTES = 1 << 20
KINDS = {
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.LNKTYPE: "a hard link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a pipe",
    tarfile.DIRTYPE: "a folder",
}
# Ends with its standard input, however the process that holds the other end of it ends.
CLEANER = "import shutil, sys; sys.stdin.read(); shutil.rmtree(sys.argv[1], ignore_errors=True)"


# ---- packing


def pack(study_file: Path, manifest: Path, target: Path) -> None:
    """Write the archive of a complete study.

    Args:
        study_file: results/<study>/study.json.
        manifest: MANIFEST.md, for the audit that comes first; it then names the archive.
        target: results/archive/<study>.tar.zst.

    Raises:
        ArtifactError: the study is incomplete, a claim of it fails the audit, or what was packed
            would be refused by whoever unpacks it.
    """
    failed = [claim for claim in audit(study_file, manifest).claims if claim.verdict == FAIL]
    if failed:
        lines = [f"{claim.kind} {claim.subject}: {claim.message}" for claim in failed[:10]]
        raise ArtifactError(
            f"{study_file.parent} is not archived: {len(failed)} claims fail the audit:\n  "
            + "\n  ".join(lines)
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with _private_folder(target) as folder:
        packed = folder / target.name
        write_bytes(packed, _of_study(study_file))
        try:
            unpack(packed, folder / "unpacked")
        except ArchiveError as error:
            raise ArtifactError(f"{study_file.parent} is not archived: {error}") from None
        packed.replace(target)
    _name(manifest, read_json(study_file)["study"], target)


def _name(manifest: Path, study: str, archive: Path) -> None:
    if any(row["study"] == study for row in parse(manifest.read_text("utf-8"))):
        name_archive(manifest, study, archive)


def convert(archive: Path, target: Path) -> None:
    """Write what an archive holds as an archive of the present format.

    Raises:
        ArchiveError: the archive is damaged or hostile.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with _private_folder(target) as folder:
        header = unpack(archive, folder / "study")
        old = read_json(folder / "study" / HEADER)
        kept = {
            key: value for key, value in old.items() if key not in ("format", "files", "tables")
        }
        write_bytes(target, _packed(kept, {name: folder / "study" / name for name in header.files}))


def _of_study(study_file: Path) -> bytes:
    members = _members(study_file.parent)
    study = read_json(study_file)
    made = {"README.md": readme(study)}
    outside = {name: path.read_bytes() for name, path in members.items() if "runs/" not in name}
    made["ro-crate-metadata.json"] = crate(study, outside | made, sorted(members))
    header = {
        "study": study["study"],
        "engine_label": study["engine_label"],
        "design_sha256": study["design_sha256"],
        "versions": versions(),
        "redrawn": published_files(study_file.parent),
    }
    return _packed(header, {**members, **made})


def _packed(header: Mapping[str, Any], sources: Mapping[str, Path | bytes]) -> bytes:
    """The bytes of an archive.

    Args:
        header: what archive.json says besides the files.
        sources: the files by name, as a path or as content.
    """
    contents = {
        name: source if isinstance(source, bytes) else source.read_bytes()
        for name, source in sources.items()
    }
    order = sorted(contents, key=lambda name: (name != STUDY, name))
    files = {name: _entry(contents[name]) for name in order}
    tables = {}
    for kind in TABLES:
        raw = {name: contents[name] for name in order if kind_of(name) == kind}
        table, encoded = encode(raw)
        if encoded:
            tables[f"tables/{kind}.parquet"] = _entry(table) | {"files": encoded}
            contents[f"tables/{kind}.parquet"] = table
            for name in encoded:
                del contents[name]
    head = {"format": FORMAT, **header, "files": files, "tables": tables}
    content = io.BytesIO()
    parameters = zstandard.ZstdCompressionParameters.from_level(
        LEVEL, write_checksum=True, write_content_size=False, threads=0
    )
    writer = zstandard.ZstdCompressor(compression_params=parameters).stream_writer(
        content, closefd=False
    )
    with writer, tarfile.open(fileobj=writer, mode="w|", format=tarfile.USTAR_FORMAT) as tar:
        _add(tar, HEADER, (json.dumps(head, indent=1) + "\n").encode())
        for name in sorted(contents, key=lambda name: (name != STUDY, name)):
            _add(tar, name, contents[name])
    return content.getvalue()


def _entry(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _members(root: Path) -> dict[str, Path]:
    """Name in the archive to path on disk, the crate's description aside."""
    found = {name: root / name for name in SINGLE if name not in MADE_HERE}
    found |= {name: root / name for name in SEALED if (root / name).exists()}
    for tree in RAW_TREES:
        found |= _tree(root / tree, tree)
    found |= _tree(root / "analysis", "published/analysis")
    found |= {f"published/figures/{path.name}": path for path in (root / "figures").glob("*.csv")}
    found["workflow/Snakefile"] = ROOT / "Snakefile"
    found |= _tree(ROOT / "workflow" / "rules", "workflow/rules")
    found |= _tree(ROOT / "workflow" / "schemas", "workflow/schemas")
    for name, path in found.items():
        if path.is_symlink() or not path.is_file():
            raise ArtifactError(f"{path}: missing, or not a plain file")
        try:
            check_name(name)
        except ValueError as error:
            raise ArtifactError(f"{path}: {error}") from None
    return found


def _tree(folder: Path, name: str) -> dict[str, Path]:
    return {
        f"{name}/{path.relative_to(folder).as_posix()}": path
        for path in sorted(folder.rglob("*"))
        if not path.is_dir() or path.is_symlink()
    }


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    info.mode = 0o755 if name.endswith(".sh") else 0o644
    tar.addfile(info, io.BytesIO(data))


# ---- opening


def read_head(archive: Path) -> tuple[Header, dict[str, Any]]:
    """archive.json and study.json of an archive, without opening the rest.

    Raises:
        ArchiveError: the file is not an archive of this kind.
    """
    with tempfile.TemporaryDirectory(prefix="archive-") as name, _opened(archive) as (frame, tar):
        folder = Path(name)
        header = _header(frame, tar, folder)
        if next(_extracted(frame, tar, header, folder), None) != STUDY:
            raise frame.refused(f"{STUDY} is not its second member")
        return header, _study(frame, header, folder)


def unpack(archive: Path, target: Path) -> Header:
    """Check an archive to the last byte, then put the study at `target`.

    What `target` held is replaced; it must hold nothing but what an earlier replot made.

    Raises:
        ArchiveError: the archive is damaged or hostile, or `target` is something else. Nothing has
            been written then but a temporary folder beside `target`, which is removed.
    """
    known = {HEADER, *SINGLE, *SEALED, *TREES, *MADE_BY_REPLOT}
    unknown = sorted({path.name for path in target.glob("*")} - known)
    if unknown:
        raise ArchiveError(f"{target}: holds {unknown[0]}, which no replot makes; move it away")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _private_folder(target) as private, _opened(archive) as (frame, tar):
            folder = private / "study"
            folder.mkdir()
            header = _header(frame, tar, folder)
            needed, free = frame.limit, shutil.disk_usage(private).free
            if needed > free:
                raise ArchiveError(f"{archive}: needs {needed} bytes, {target.parent} has {free}")
            for _ in _extracted(frame, tar, header, folder):
                pass
            _restore(frame, header, folder)
            _study(frame, header, folder)
            write_text(folder / ORIGIN, f"{sha256_file(archive)}  {archive.name}\n")
            if target.exists():
                shutil.rmtree(target)
            folder.rename(target)
    except OSError as error:
        raise ArchiveError(f"{archive}: cannot be unpacked: {error}") from None
    return header


@contextlib.contextmanager
def _private_folder(target: Path) -> Iterator[Path]:
    """A folder beside `target` that goes away however this process ends, killed too."""
    folder = tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent)
    command = [sys.executable, "-I", "-c", CLEANER, folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True):
        yield Path(folder)


@contextlib.contextmanager
def _opened(archive: Path) -> Iterator[tuple[Frame, tarfile.TarFile]]:
    # Blocks of the tar's own size: nothing behind its end is read by it.
    with Frame(archive) as frame:
        try:
            with tarfile.open(fileobj=frame, mode="r|", bufsize=BLOCK) as tar:
                yield frame, tar
        except (tarfile.TarError, UnicodeError) as error:
            raise frame.refused(f"the tar archive is damaged: {error}") from None


def _header(frame: Frame, tar: tarfile.TarFile, folder: Path) -> Header:
    """Write and check the first member; nothing beyond what it lists is read from here on."""
    info = tar.next()
    content = None if info is None or info.name != HEADER else tar.extractfile(info)
    if content is None:
        raise frame.refused(f"its first member is not {HEADER}")
    data = content.read()
    try:
        header = check_header(json.loads(data), frame.most_bytes)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise frame.refused(f"{HEADER}: {error!r}") from None
    frame.limit = header.tar_bytes(len(data))
    write_bytes(folder / HEADER, data)
    return header


def _extracted(frame: Frame, tar: tarfile.TarFile, header: Header, folder: Path) -> Iterator[str]:
    """Write the further members into `folder`, each checked; yields their names."""
    left = dict(header.members)
    for info in iter(tar.next, None):
        name = info.name
        if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or info.pax_headers:
            kind = KINDS.get(info.type, f"of type {info.type!r}")
            raise frame.refused(f"member {name!r} is {kind}; only plain files are allowed")
        if name not in left:
            told = "stands twice" if name in header.members else f"is not listed in {HEADER}"
            raise frame.refused(f"member {name!r} {told}")
        size, digest = left.pop(name)
        if info.size != size:
            raise frame.refused(f"member {name!r} has {info.size} bytes, {HEADER} says {size}")
        tarfile.data_filter(info, str(folder))
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        found, content = hashlib.sha256(), tar.extractfile(info)
        assert content is not None
        with path.open("xb") as stream:
            while block := content.read(COPY_BYTES):
                found.update(block)
                stream.write(block)
        if found.hexdigest() != digest:
            raise frame.refused(f"member {name!r}: sha256 is not what {HEADER} says")
        path.chmod(0o755 if name.endswith(".sh") else 0o644)
        yield name
    if left:
        raise frame.refused(f"{len(left)} members are missing, first {min(left)!r}")
    if frame.drain().strip(b"\0"):
        raise frame.refused("there is data behind the end of the tar archive")
    if frame.total != frame.limit:
        raise frame.refused(f"{frame.total} bytes, {HEADER} lists {frame.limit}")


def _restore(frame: Frame, header: Header, folder: Path) -> None:
    """Write the files that are in tables, each to the byte that archive.json lists; drop these."""
    for table, names in header.tables.items():
        sizes = {name: header.files[name][0] for name in names}
        try:
            made = decode(read_table(folder / table, sum(sizes.values())), sizes)
        except (Exception, pl.exceptions.PanicException) as error:
            raise frame.refused(f"member {table!r}: {error!r}") from None
        for name in names:
            data = made.get(name, b"")
            if hashlib.sha256(data).hexdigest() != header.files[name][1]:
                raise frame.refused(f"member {table!r}: {name}: sha256 is not what {HEADER} says")
            write_bytes(folder / name, data)
    shutil.rmtree(folder / "tables", ignore_errors=True)


def table(archive: str | Path, name: str) -> pl.DataFrame:
    """A table of an archive: all records of a kind (`requests`), or a published one (`taxes.csv`).

    Of records `file` names the file they are of; the other columns are those of docs/artifacts.md.

    Raises:
        ArchiveError: the archive is damaged or hostile, or holds no such table.
    """
    with tempfile.TemporaryDirectory(prefix="archive-") as folder:
        root = Path(folder) / "study"
        files = unpack(Path(archive), root).files
        if f"published/analysis/{name}" in files:
            return pl.read_csv(root / f"published/analysis/{name}", infer_schema_length=None)
        frames = [
            pl.read_ndjson(root / file, infer_schema_length=None).with_columns(file=pl.lit(file))
            for file, (size, _) in files.items()
            if kind_of(file) == name and size
        ]
    if not frames:
        raise ArchiveError(f"{archive}: no table {name!r}; allowed: {', '.join(TABLES)}, taxes.csv")
    return pl.concat(frames, how="diagonal_relaxed")


def _study(frame: Frame, header: Header, folder: Path) -> dict[str, Any]:
    """study.json, checked before any path is made of what it names."""
    try:
        study: dict[str, Any] = read_json(folder / STUDY)
        validate(study, "study.schema.yaml", f"{frame.archive}: refused: {STUDY}")
    except (ArtifactError, RecursionError) as error:
        raise frame.refused(f"{STUDY}: {error}") from None
    except ConfigError as error:
        raise ArchiveError(str(error)) from None
    if study["study"] != header.study:
        told = f"study is {study['study']!r}, {HEADER} says {header.study!r}"
        raise frame.refused(f"{STUDY}: {told}")
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
    converting = commands.add_parser("convert", help="write an archive in the present format")
    converting.add_argument("--archive", type=Path, required=True)
    converting.add_argument("--out", type=Path, required=True)
    converting.add_argument("--manifest", type=Path, required=True, help="MANIFEST.md, to name it")
    return run_command(parser, argv, _carry_out)


def _carry_out(arguments: argparse.Namespace) -> None:
    if arguments.command == "pack":
        pack(arguments.study, arguments.manifest, arguments.out)
    elif arguments.command == "convert":
        convert(arguments.archive, arguments.out)
        _name(arguments.manifest, read_head(arguments.out)[0].study, arguments.out)
    if arguments.command != "unpack":
        size = arguments.out.stat().st_size
        print(f"{arguments.out}: {size} bytes, sha256 {sha256_file(arguments.out)}")
    else:
        header = unpack(arguments.archive, arguments.out)
        print(f"{arguments.out}: {len(header.files)} files, every hash as listed")
        print(f"{arguments.archive}: sha256 {sha256_file(arguments.archive)}")


if __name__ == "__main__":
    sys.exit(main())

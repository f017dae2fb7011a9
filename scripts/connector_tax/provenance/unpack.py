"""Opening an archive that comes from someone else: nothing is believed before it is checked.

Only plain files that archive.json lists, under the few places a study has, with the size and hash
it names, are written, and only into a private temporary folder; the study's folder appears by
rename once all is right.
"""

import contextlib
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import polars as pl

from connector_tax.artifacts import paths
from connector_tax.artifacts.record_reader import checked
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.files import ArtifactError, read_json, sha256_file, write_bytes, write_text
from connector_tax.provenance.archive_limits import (
    BLOCK,
    HEADER,
    OLD_DESIGN,
    ORIGIN,
    SINGLE,
    TREES,
    ArchiveError,
    ArchiveHeader,
    Frame,
    check_header,
    kind_of,
)
from connector_tax.provenance.tables import decode, read_table

MADE_BY_REPLOT = (
    ORIGIN, paths.ANALYSIS, paths.FIGURES, paths.REPORT, paths.AUDIT, paths.LOGS
)  # fmt: skip
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


def read_head(archive: Path) -> tuple[ArchiveHeader, StudyDocument]:
    """archive.json and study.json of an archive, without opening the rest.

    Raises:
        ArchiveError: the file is not an archive of this kind.
    """
    with tempfile.TemporaryDirectory(prefix="archive-") as name, _opened(archive) as (frame, tar):
        folder = Path(name)
        header = _header(frame, tar, folder)
        if next(_extracted(frame, tar, header, folder), None) != paths.STUDY:
            raise frame.refused(f"{paths.STUDY} is not its second member")
        return header, _study(frame, header, folder)


def unpack(archive: Path, target: Path, records_of: str = "") -> ArchiveHeader:
    """Check an archive to the last byte, then put the study at `target`.

    What `target` held is replaced; it must hold nothing but what an earlier replot made.

    Args:
        archive: the file.
        target: a study's folder.
        records_of: how the names of those files begin that are made of the tables, which takes most
            of the time; the others are left out.

    Raises:
        ArchiveError: the archive is damaged or hostile, or `target` is something else. Nothing has
            been written then but a temporary folder beside `target`, which is removed.
    """
    known = {HEADER, *SINGLE, *TREES, *MADE_BY_REPLOT}
    unknown = [
        path.name
        for path in sorted(target.glob("*"))
        if path.name not in known and not OLD_DESIGN.fullmatch(path.name)
    ]
    if unknown:
        raise ArchiveError(f"{target}: holds {unknown[0]}, which no replot makes; move it away")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with private_folder(target) as private, _opened(archive) as (frame, tar):
            folder = private / "study"
            folder.mkdir()
            header = _header(frame, tar, folder)
            needed, free = frame.limit, shutil.disk_usage(private).free
            if needed > free:
                raise ArchiveError(f"{archive}: needs {needed} bytes, {target.parent} has {free}")
            for _ in _extracted(frame, tar, header, folder):
                pass
            _restore(frame, header, folder, records_of)
            _study(frame, header, folder)
            write_text(folder / ORIGIN, f"{sha256_file(archive)}  {archive.name}\n")
            if target.exists():
                shutil.rmtree(target)
            folder.rename(target)
    except OSError as error:
        raise ArchiveError(f"{archive}: cannot be unpacked: {error}") from None
    return header


@contextlib.contextmanager
def private_folder(target: Path) -> Iterator[Path]:
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


def _header(frame: Frame, tar: tarfile.TarFile, folder: Path) -> ArchiveHeader:
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


def _extracted(
    frame: Frame, tar: tarfile.TarFile, header: ArchiveHeader, folder: Path
) -> Iterator[str]:
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
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        hashed, content = hashlib.sha256(), tar.extractfile(info)
        assert content is not None
        with path.open("xb") as stream:
            while block := content.read(COPY_BYTES):
                hashed.update(block)
                stream.write(block)
        if hashed.hexdigest() != digest:
            raise frame.refused(f"member {name!r}: sha256 is not what {HEADER} says")
        path.chmod(0o755 if name.endswith(".sh") else 0o644)
        yield name
    if left:
        raise frame.refused(f"{len(left)} members are missing, first {min(left)!r}")
    if frame.drain().strip(b"\0"):
        raise frame.refused("there is data behind the end of the tar archive")
    if frame.total != frame.limit:
        raise frame.refused(f"{frame.total} bytes, {HEADER} lists {frame.limit}")


def _restore(frame: Frame, header: ArchiveHeader, folder: Path, records_of: str) -> None:
    """Write the files that are in tables, each to the byte that archive.json lists; drop these."""
    for table, names in header.tables.items():
        sizes = {name: header.files[name][0] for name in names}
        wanted = [name for name in names if name.startswith(records_of)]
        try:
            rows = read_table(folder / table, sum(sizes.values()))
            made = decode(rows.filter(pl.col("file").is_in(wanted)), sizes)
        except (Exception, pl.exceptions.PanicException) as error:
            raise frame.refused(f"member {table!r}: {error!r}") from None
        for name in wanted:
            data = made.get(name, b"")
            if hashlib.sha256(data).hexdigest() != header.files[name][1]:
                raise frame.refused(f"member {table!r}: {name}: sha256 is not what {HEADER} says")
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    shutil.rmtree(folder / "tables", ignore_errors=True)


def table(archive: str | Path, name: str) -> pl.DataFrame:
    """A table of an archive: records of a kind (`requests`), or a published one (`effects.csv`).

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
        raise ArchiveError(
            f"{archive}: no table {name!r}; allowed: {', '.join(paths.ALL_LOGS)}, {paths.EFFECTS}"
        )
    return pl.concat(frames, how="diagonal_relaxed")


def _study(frame: Frame, header: ArchiveHeader, folder: Path) -> StudyDocument:
    """study.json, checked before any path is made of what it names."""
    try:
        study = checked(read_json(folder / paths.STUDY), StudyDocument, paths.STUDY)
    except (ArtifactError, RecursionError) as error:
        raise frame.refused(str(error)) from None
    if study["study"] != header.study:
        told = f"study is {study['study']!r}, {HEADER} says {header.study!r}"
        raise frame.refused(f"{paths.STUDY}: {told}")
    return study

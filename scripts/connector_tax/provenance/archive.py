"""One study in one file: `results/archive/<study>.tar.zst`, packed reproducibly, opened carefully.

Layout: a zstd frame over a POSIX ustar archive of plain files. The first member, `archive.json`,
lists every other one with size and SHA-256; then `study.json`; then the rest by name. Owners,
times and modes are fixed, so the same study gives the same bytes (with the same zstd).

An archive comes from someone else: nothing is believed before it is checked. Only plain files that
archive.json lists, under the few places a study has, with the size and hash it names, are written,
and only into a private temporary folder; the study's folder appears by rename once all is right.
"""

import argparse
import hashlib
import io
import json
import re
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import zstandard

from connector_tax.commands import run_command
from connector_tax.config import ROOT
from connector_tax.files import ArtifactError, read_json, sha256_file, write_bytes, write_text
from connector_tax.provenance.audit import audit
from connector_tax.provenance.audit_redrawn import HEADER, ORIGIN, versions
from connector_tax.provenance.claims import FAIL
from connector_tax.provenance.crate import crate, readme
from connector_tax.provenance.manifest import name_archive, parse

FORMAT = "connector-tax archive 1"
STUDY = "study.json"
SINGLE = (
    STUDY,
    "environment.json",
    "env.txt",
    "reference_rates.json",
    "manifest.json",
    "README.md",
    "ro-crate-metadata.json",
)
MADE_HERE = ("README.md", "ro-crate-metadata.json")
TREES = ("preflight", "patch", "runs", "published", "workflow")
MADE_BY_REPLOT = (ORIGIN, "analysis", "figures", "report.html", "audit.json", "logs")
RAW_TREES = ("preflight", "patch", "runs")
BLOCK = 512
LEVEL = 19
MAX_WINDOW_BYTES = 1 << 27
MAX_HEADER_BYTES = 64 << 20
MAX_MEMBER_BYTES = 8 << 30
MAX_TOTAL_BYTES = 64 << 30
COPY_BYTES = 1 << 20
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
STUDY_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
SHA256 = re.compile(r"[0-9a-f]{64}")


class ArchiveError(ArtifactError):
    """An archive is refused; the text names it and says why."""


@dataclass(frozen=True, slots=True)
class Header:
    """archive.json, checked."""

    study: str
    versions: Mapping[str, str]
    files: Mapping[str, tuple[int, str]]
    redrawn: Mapping[str, str]


# ---- packing


def pack(study_file: Path, manifest: Path, target: Path) -> None:
    """Write the archive of a complete study.

    Args:
        study_file: results/<study>/study.json.
        manifest: MANIFEST.md, for the audit that comes first; it then names the archive.
        target: results/archive/<study>.tar.zst.

    Raises:
        ArtifactError: the study is incomplete, or a claim of it fails the audit.
    """
    failed = [claim for claim in audit(study_file, manifest).claims if claim.verdict == FAIL]
    if failed:
        lines = [f"{claim.kind} {claim.subject}: {claim.message}" for claim in failed[:10]]
        raise ArtifactError(
            f"{study_file.parent} is not archived: {len(failed)} claims fail the audit:\n  "
            + "\n  ".join(lines)
        )
    members = _members(study_file.parent)
    study = read_json(study_file)
    made = {"README.md": readme(study)}
    outside = {name: path.read_bytes() for name, path in members.items() if "runs/" not in name}
    made["ro-crate-metadata.json"] = crate(study, outside | made, sorted(members))
    sizes = {name: path.stat().st_size for name, path in members.items()}
    sizes |= {name: len(data) for name, data in made.items()}
    hashes = {name: sha256_file(path) for name, path in members.items()}
    hashes |= {name: hashlib.sha256(data).hexdigest() for name, data in made.items()}
    order = sorted(sizes, key=lambda name: (name != STUDY, name))
    header = {
        "format": FORMAT,
        "study": study["study"],
        "engine_label": study["engine_label"],
        "design_sha256": study["design_sha256"],
        "versions": versions(),
        "files": {name: {"bytes": sizes[name], "sha256": hashes[name]} for name in order},
        "redrawn": _redrawn(study_file.parent),
    }
    content = io.BytesIO()
    parameters = zstandard.ZstdCompressionParameters.from_level(
        LEVEL, write_checksum=True, write_content_size=False, threads=0
    )
    writer = zstandard.ZstdCompressor(compression_params=parameters).stream_writer(
        content, closefd=False
    )
    with writer, tarfile.open(fileobj=writer, mode="w|", format=tarfile.USTAR_FORMAT) as tar:
        _add_bytes(tar, HEADER, (json.dumps(header, indent=1) + "\n").encode())
        for name in order:
            if name in made:
                _add_bytes(tar, name, made[name])
            else:
                _add_file(tar, name, members[name])
    write_bytes(target, content.getvalue())
    if any(row["study"] == study["study"] for row in parse(manifest.read_text("utf-8"))):
        name_archive(manifest, study["study"], target)


def _members(root: Path) -> dict[str, Path]:
    """Name in the archive to path on disk, the crate's description aside."""
    found = {name: root / name for name in SINGLE if name not in MADE_HERE}
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
        _check_name(name)
    return found


def _tree(folder: Path, name: str) -> dict[str, Path]:
    return {
        f"{name}/{path.relative_to(folder).as_posix()}": path
        for path in sorted(folder.rglob("*"))
        if not path.is_dir() or path.is_symlink()
    }


def _redrawn(root: Path) -> dict[str, str]:
    """SHA-256 of everything a replot makes again, by path below the study's folder."""
    paths = [
        *(root / "analysis").glob("*.*"),
        *(p for kind in ("png", "svg", "csv") for p in (root / "figures").glob(f"*.{kind}")),
        root / "report.html",
    ]
    return {path.relative_to(root).as_posix(): sha256_file(path) for path in sorted(paths)}


def _info(name: str, size: int, executable: bool = False) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size = size
    info.mode = 0o755 if executable else 0o644
    return info


def _add_bytes(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    tar.addfile(_info(name, len(data)), io.BytesIO(data))


def _add_file(tar: tarfile.TarFile, name: str, path: Path) -> None:
    with path.open("rb") as stream:
        tar.addfile(_info(name, path.stat().st_size, name.endswith(".sh")), stream)


# ---- opening


def read_head(archive: Path) -> tuple[Header, dict[str, Any]]:
    """archive.json and study.json of an archive, without opening the rest.

    Raises:
        ArchiveError: the file is not an archive of this kind.
    """
    with _Reader(archive) as reader:
        header = reader.header()
        for name, size, blocks in reader.members(header):
            if name != STUDY or size > MAX_HEADER_BYTES:
                break
            data = b"".join(blocks)
            reader.check(name, header, hashlib.sha256(data).hexdigest())
            return header, _study(archive, header, data)
    raise ArchiveError(f"{archive}: {STUDY} is not its second member")


def unpack(archive: Path, target: Path) -> Header:
    """Check an archive to the last byte, then put the study at `target`.

    What `target` held is replaced; it must hold nothing but what an earlier replot made.

    Raises:
        ArchiveError: the archive is damaged or hostile, or `target` is something else. Nothing has
            been written then but a temporary folder beside `target`, which is removed.
    """
    with archive_file(archive) as stream:
        _check_frame(archive, stream)
    header, _ = read_head(archive)
    _check_room(archive, header, target)
    known = {HEADER, *SINGLE, *TREES, *MADE_BY_REPLOT}
    unknown = sorted({path.name for path in target.glob("*")} - known)
    if unknown:
        raise ArchiveError(f"{target}: holds {unknown[0]}, which no replot makes; move it away")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as private:
        folder = Path(private) / "study"
        _extract(archive, folder)
        if target.exists():
            shutil.rmtree(target)
        write_text(folder / ORIGIN, f"{sha256_file(archive)}  {archive.name}\n")
        folder.rename(target)
    return header


def _extract(archive: Path, folder: Path) -> None:
    folder.mkdir()
    with _Reader(archive) as reader:
        header = reader.header()
        write_bytes(folder / HEADER, reader.header_bytes)
        for name, _, blocks in reader.members(header):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            digest = hashlib.sha256()
            with path.open("xb") as stream:
                for block in blocks:
                    digest.update(block)
                    stream.write(block)
            reader.check(name, header, digest.hexdigest())
            path.chmod(0o755 if name.endswith(".sh") else 0o644)
        reader.check_end()


class _Reader:
    """Reads the members of an archive in order; everything it yields is bounded and checked."""

    def __init__(self, archive: Path) -> None:
        self._archive = archive
        self.header_bytes = b""

    def __enter__(self) -> "_Reader":
        self._file = archive_file(self._archive)
        decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
        self._stream = decompressor.stream_reader(self._file, read_across_frames=False)
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()  # type: ignore[no-untyped-call]
        self._file.close()

    def header(self) -> Header:
        """Read and check the first member."""
        found = self._next()
        if found is None or found.name != HEADER or found.size > MAX_HEADER_BYTES:
            raise self._refused(f"its first member is not {HEADER}")
        self.header_bytes = b"".join(self._content(found.size))
        try:
            return _header(json.loads(self.header_bytes))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._refused(f"{HEADER}: {error!r}") from None

    def members(self, header: Header) -> Iterator[tuple[str, int, Iterator[bytes]]]:
        """Name, size and content of every further member; each must be read to its end."""
        seen: set[str] = set()
        while (found := self._next()) is not None:
            if found.name in seen:
                raise self._refused(f"member {found.name!r} stands twice")
            if found.name not in header.files:
                raise self._refused(f"member {found.name!r} is not listed in {HEADER}")
            size = header.files[found.name][0]
            if found.size != size:
                raise self._refused(
                    f"member {found.name!r} has {found.size} bytes, {HEADER} says {size}"
                )
            seen.add(found.name)
            yield found.name, found.size, self._content(found.size)
        missing = sorted(header.files.keys() - seen)
        if missing:
            raise self._refused(f"{len(missing)} members are missing, first {missing[0]!r}")

    def check(self, name: str, header: Header, digest: str) -> None:
        """Refuse a member whose content is not the listed one."""
        if digest != header.files[name][1]:
            raise self._refused(f"member {name!r}: sha256 is not what {HEADER} says")

    def check_end(self) -> None:
        """Refuse anything but padding behind the last member."""
        while data := self._read(COPY_BYTES, exact=False):
            if data.strip(b"\0"):
                raise self._refused("there is data behind the end of the tar archive")

    def _next(self) -> tarfile.TarInfo | None:
        """The next member's head; None at the end of the archive."""
        block = self._read(BLOCK)
        if not block.strip(b"\0"):
            return None
        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
        except (tarfile.HeaderError, UnicodeDecodeError) as error:
            raise self._refused(f"a member's head is damaged: {error}") from None
        kinds = {
            tarfile.SYMTYPE: "a symbolic link",
            tarfile.LNKTYPE: "a hard link",
            tarfile.CHRTYPE: "a device",
            tarfile.BLKTYPE: "a device",
            tarfile.FIFOTYPE: "a pipe",
            tarfile.DIRTYPE: "a folder",
        }
        if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
            kind = kinds.get(info.type, f"of type {info.type!r}")
            raise self._refused(f"member {info.name!r} is {kind}; only plain files are allowed")
        return info

    def _content(self, size: int) -> Iterator[bytes]:
        left = size
        while left:
            data = self._read(min(left, COPY_BYTES))
            left -= len(data)
            yield data
        self._read(-size % BLOCK)

    def _read(self, size: int, exact: bool = True) -> bytes:
        parts, left = [], size
        try:
            while left and (data := self._stream.read(left)):
                parts.append(data)
                left -= len(data)
        except zstandard.ZstdError as error:
            raise self._refused(f"the compressed data is damaged: {error}") from None
        if left and exact:
            raise self._refused("it is cut off")
        return b"".join(parts)

    def _refused(self, reason: str) -> ArchiveError:
        return ArchiveError(f"{self._archive}: refused: {reason}")


def _header(value: Mapping[str, Any]) -> Header:
    if value["format"] != FORMAT:
        raise ValueError(f"format is {value['format']!r}, this version reads {FORMAT!r}")
    if not STUDY_NAME.fullmatch(value["study"]):
        raise ValueError(f"study {value['study']!r} is no study name")
    files: dict[str, tuple[int, str]] = {}
    for name, entry in value["files"].items():
        _check_name(name)
        size, digest = entry["bytes"], entry["sha256"]
        if type(size) is not int or not 0 <= size <= MAX_MEMBER_BYTES:
            raise ValueError(f"member {name!r}: {size!r} bytes; allowed: up to {MAX_MEMBER_BYTES}")
        if not SHA256.fullmatch(digest):
            raise ValueError(f"member {name!r}: {digest!r} is no SHA-256")
        files[name] = (size, digest)
    if sum(size for size, _ in files.values()) > MAX_TOTAL_BYTES:
        raise ValueError(f"more than {MAX_TOTAL_BYTES} bytes in all")
    missing = [name for name in SINGLE if name not in files]
    if missing:
        raise ValueError(f"{missing[0]!r} is not among the members")
    versions_, redrawn = dict(value["versions"]), dict(value["redrawn"])
    return Header(value["study"], versions_, files, redrawn)


def _check_name(name: str) -> None:
    """Refuse a member name that is not one of a study's."""
    parts = PurePosixPath(name).parts
    plain = "/".join(parts) == name and all(NAME.fullmatch(part) for part in parts)
    known = name in SINGLE or (len(parts) > 1 and parts[0] in TREES)
    if not plain or not known or len(name) > 200:
        raise ValueError(f"member {name!r} has no place in a study")


def _study(archive: Path, header: Header, data: bytes) -> dict[str, Any]:
    try:
        study: dict[str, Any] = json.loads(data)
        if study["study"] != header.study:
            raise ValueError(f"study is {study['study']!r}, {HEADER} says {header.study!r}")
    except (ValueError, KeyError, TypeError) as error:
        raise ArchiveError(f"{archive}: refused: {STUDY}: {error}") from None
    return study


def archive_file(path: Path) -> BinaryIO:
    """The archive opened for reading.

    Raises:
        ArchiveError: it cannot be opened.
    """
    try:
        return path.open("rb")
    except OSError as error:
        raise ArchiveError(f"{path}: {error.strerror}") from None


def _check_frame(archive: Path, stream: BinaryIO) -> None:
    """Refuse a file that is not exactly one zstd frame (RFC 8878): cut off, or with a tail."""
    size = stream.seek(0, io.SEEK_END)
    stream.seek(0)
    head = stream.read(18)
    try:
        end = zstandard.frame_header_size(head)
        checksum = 4 if zstandard.get_frame_parameters(head).has_checksum else 0
    except (zstandard.ZstdError, ValueError):
        raise ArchiveError(f"{archive}: refused: not a zstd file") from None
    last = False
    while not last:
        stream.seek(end)
        block = int.from_bytes(stream.read(3), "little")
        last, kind, length = bool(block & 1), block >> 1 & 3, block >> 3
        if end + 3 > size:
            raise ArchiveError(f"{archive}: refused: it is cut off")
        end += 3 + (1 if kind == 1 else length)
    if end + checksum != size:
        told = "it is cut off" if end + checksum > size else "there is data behind its end"
        raise ArchiveError(f"{archive}: refused: {told}")


def _check_room(archive: Path, header: Header, target: Path) -> None:
    parent = next(path for path in target.absolute().parents if path.exists())
    free = shutil.disk_usage(parent).free
    needed = sum(size for size, _ in header.files.values())
    if needed > free:
        raise ArchiveError(f"{archive}: unpacking needs {needed} bytes, {parent} has {free} free")


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
    return run_command(parser, argv, _pack_or_unpack)


def _pack_or_unpack(arguments: argparse.Namespace) -> None:
    if arguments.command == "pack":
        pack(arguments.study, arguments.manifest, arguments.out)
        size = arguments.out.stat().st_size
        print(f"{arguments.out}: {size} bytes, sha256 {sha256_file(arguments.out)}")
    else:
        header = unpack(arguments.archive, arguments.out)
        print(f"{arguments.out}: {len(header.files)} files, every hash as listed")
        print(f"{arguments.archive}: sha256 {sha256_file(arguments.archive)}")


if __name__ == "__main__":
    sys.exit(main())

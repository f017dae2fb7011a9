"""One study in one file: `results/archive/<study>.tar.zst`, packed reproducibly, opened carefully.

Layout: a zstd frame over a POSIX ustar archive of plain files. The first member, `archive.json`,
lists every file of the study with size and SHA-256; then `study.json`; then the rest by name.
Records stand in one parquet table each kind (`tables`), from which `unpack` writes their files
again, to the byte. Owners, times and modes are fixed, so the same study gives the same bytes (with
the same zstd and polars).
"""

import argparse
import hashlib
import io
import json
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import zstandard

from connector_tax.artifacts import paths
from connector_tax.commands import run_command
from connector_tax.config import ROOT
from connector_tax.files import ArtifactError, read_json, sha256_file, write_bytes
from connector_tax.provenance.archive_limits import (
    FORMAT,
    HEADER,
    MADE_HERE,
    SEALED,
    SINGLE,
    ArchiveError,
    check_name,
    kind_of,
)
from connector_tax.provenance.audit import audit
from connector_tax.provenance.audit_remade import published_files, versions
from connector_tax.provenance.claims import FAIL
from connector_tax.provenance.crate import crate, readme
from connector_tax.provenance.manifest import name_archive, section_of
from connector_tax.provenance.tables import encode
from connector_tax.provenance.unpack import private_folder, read_head, unpack

RAW_TREES = (paths.PREFLIGHT, paths.PATCH, paths.RUNS)
LEVEL = 19


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
    failed = [claim for claim in audit(study_file, manifest).claims if claim.verdict == FAIL]
    if failed:
        lines = [f"{claim.kind} {claim.subject}: {claim.message}" for claim in failed[:10]]
        raise ArtifactError(
            f"{study_file.parent} is not archived: {len(failed)} claims fail the audit:\n  "
            + "\n  ".join(lines)
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with private_folder(target) as folder:
        packed = folder / target.name
        write_bytes(packed, _of_study(study_file))
        try:
            unpack(packed, folder / "unpacked")
        except ArchiveError as error:
            raise ArtifactError(f"{study_file.parent} is not archived: {error}") from None
        packed.replace(target)
    _name(manifest, read_json(study_file)["study"], target, study_file.parent / paths.MANIFEST_PAGE)


def _name(manifest: Path, study: str, archive: Path, page: Path) -> None:
    """Name the archive in MANIFEST.md, above the rows that `page` has of the study."""
    body = section_of(page, study)
    if body is None:
        raise ArtifactError(f"{page}: no rows of study {study}")
    name_archive(manifest, study, archive, body)


def convert(archive: Path, target: Path) -> None:
    """Write what an archive holds as an archive of the present format.

    Raises:
        ArchiveError: the archive is damaged or hostile.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with private_folder(target) as folder:
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
    order = sorted(contents, key=lambda name: (name != paths.STUDY, name))
    files = {name: _entry(contents[name]) for name in order}
    tables = {}
    for kind in paths.CELL_LOGS:
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
        for name in sorted(contents, key=lambda name: (name != paths.STUDY, name)):
            _add(tar, name, contents[name])
    return content.getvalue()


def _entry(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _members(root: Path) -> dict[str, Path]:
    """Name in the archive to path on disk, the crate's description aside."""
    members = {name: root / name for name in SINGLE if name not in MADE_HERE}
    members |= {name: root / name for name in SEALED if (root / name).exists()}
    for tree in RAW_TREES:
        members |= _tree(root / tree, tree)
    # The CSVs are enough: a replot makes the parquet tables again, and compares their hashes.
    published = _tree(root / paths.ANALYSIS, "published/analysis")
    members |= {name: path for name, path in published.items() if path.suffix != ".parquet"}
    members |= {
        f"published/figures/{path.name}": path for path in (root / paths.FIGURES).glob("*.csv")
    }
    members["workflow/Snakefile"] = ROOT / "workflow" / "Snakefile"
    members |= _tree(ROOT / "workflow" / "rules", "workflow/rules")
    members |= _tree(ROOT / "workflow" / "schemas", "workflow/schemas")
    for name, path in members.items():
        if path.is_symlink() or not path.is_file():
            raise ArtifactError(f"{path}: missing, or not a plain file")
        try:
            check_name(name)
        except ValueError as error:
            raise ArtifactError(f"{path}: {error}") from None
    return members


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
        study = read_head(arguments.out)[0].study
        _name(arguments.manifest, study, arguments.out, arguments.manifest)
    if arguments.command != "unpack":
        size = arguments.out.stat().st_size
        print(f"{arguments.out}: {size} bytes, sha256 {sha256_file(arguments.out)}")
    else:
        header = unpack(arguments.archive, arguments.out)
        print(f"{arguments.out}: {len(header.files)} files, every hash as listed")
        print(f"{arguments.archive}: sha256 {sha256_file(arguments.archive)}")


if __name__ == "__main__":
    sys.exit(main())

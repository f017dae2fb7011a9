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
from connector_tax.provenance.audit import audit
from connector_tax.provenance.claims import FAIL
from connector_tax.provenance.manifest import name_archive, section_of
from connector_tax.provenance.remade import PICTURES, digest, page_text, versions
from connector_tax.provenance.tables import encode
from connector_tax.provenance.unpack import (
    FORMAT,
    HEADER,
    PUBLISHED,
    README,
    REPORT_TEXT,
    VERIFY,
    WORKFLOW,
    ArchiveError,
    check_name,
    kind_of,
    private_folder,
    readme,
    unpack,
)
from connector_tax.seals import read_links, settled_files

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
    ledger, _ = audit(study_file, manifest)
    failed = [claim for claim in ledger.claims if claim.verdict == FAIL]
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
    study, root = read_json(study_file)["study"], study_file.parent
    body = section_of((root / paths.MANIFEST_PAGE).read_text(encoding="utf-8"), study)
    assert body is not None
    pictures = {p.name: sha256_file(p) for p in (root / paths.FIGURES).glob("*.png")}
    name_archive(manifest, study, target, body, pictures)


def _of_study(study_file: Path) -> bytes:
    root, study = study_file.parent, read_json(study_file)
    report = (root / paths.REPORT).read_text(encoding="utf-8")
    made = {
        README: readme(study, FORMAT).encode(),
        VERIFY: Path(__file__).with_name(VERIFY).read_bytes(),
        f"{PUBLISHED}/{REPORT_TEXT}": page_text(report).encode(),
    }
    drawn = [path for path in (root / paths.FIGURES).iterdir() if path.suffix in PICTURES]
    header = {
        "study": study["study"],
        "engine_label": study["engine_label"],
        "design_sha256": study["design_sha256"],
        "versions": versions(),
        "redrawn": {f"{paths.FIGURES}/{path.name}": digest(path) for path in sorted(drawn)},
    }
    return _packed(header, {**_members(root), **made})


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
    for kind in paths.ALL_LOGS:
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
    """Name in the archive to path on disk: all that is sealed, the seal, what was published."""
    names = [paths.SEALS, paths.MANIFEST, paths.COMPLETE, *settled_files(read_links(root))]
    members = {name: root / name for name in names} | _tree(root / paths.RUNS, paths.RUNS)
    # The CSVs are enough of the tables: their parquet form holds the same.
    for tree in (paths.ANALYSIS, paths.FIGURES):
        published = (path for path in (root / tree).iterdir() if path.suffix in (".csv", ".json"))
        members |= {f"{PUBLISHED}/{tree}/{path.name}": path for path in published}
    if not (root / paths.ARGUMENTS).exists():  # else no workflow has run: see `ab`
        members[f"{WORKFLOW}/Snakefile"] = ROOT / WORKFLOW / "Snakefile"
        for part in ("rules", "schemas"):
            members |= _tree(ROOT / WORKFLOW / part, f"{WORKFLOW}/{part}")
    for name, path in members.items():
        if path.is_symlink() or not path.is_file():
            raise ArtifactError(f"{path}: missing, or not a plain file")
        check_name(name)
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

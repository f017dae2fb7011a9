"""Pack a study that passes its audit into one file, or unpack such a file."""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from connector_tax.artifacts import paths
from connector_tax.commands import UNREADABLE, run_command
from connector_tax.files import ArtifactError, is_temporary, read_json, sha256_file, write_bytes
from connector_tax.foreign import LogSecrets
from connector_tax.provenance.archive import (
    PUBLISHED,
    README,
    VERIFY,
    check_name,
    packed,
    private_folder,
    readme,
    unpack,
)
from connector_tax.provenance.audit import LISTED, audit
from connector_tax.provenance.claims import FAIL
from connector_tax.provenance.manifest import name_archive, pictures_of, section_of
from connector_tax.provenance.remade import published_views
from connector_tax.provenance.views import versions
from connector_tax.seals import read_links, settled_files

# Tables and records by request, step and sample: their only foreign text is an error's detail.
NUMBERS = (".jsonl", ".csv")
_DETAIL = re.compile(r'"error_detail": ?"((?:[^"\\]|\\.)*)"')


def pack(study_file: Path, manifest: Path, target: Path) -> None:
    """Write the archive of a complete study.

    Args:
        study_file: results/<study>/study.json.
        manifest: MANIFEST.md, in which the study's rows and archive are entered.
        target: results/archive/<study>.tar.zst.

    Raises:
        ArtifactError: the study is incomplete, one of its claims fails the audit, another method
            made its claims, or `unpack` would reject the archive.
    """
    root = study_file.parent
    result = audit(study_file, manifest)
    if result.by_another:
        raise ArtifactError(f"{root} is not archived: {result.method}; make its tables again")
    # The rows and the pictures' line are rewritten below.
    claims = result.ledger.claims
    failed = [claim for claim in claims if claim.verdict == FAIL and claim.kind != LISTED]
    if failed:
        lines = [f"  {claim.kind} {claim.subject}: {claim.message}" for claim in failed[:10]]
        reason = f"{root} is not archived: {len(failed)} claims fail the audit:"
        raise ArtifactError(reason, *lines)
    target.parent.mkdir(parents=True, exist_ok=True)
    with private_folder(target) as folder:
        made = folder / target.name
        write_bytes(made, packed_study(root))
        try:
            unpack(made, folder / "unpacked")
        except ArtifactError as error:
            raise ArtifactError(f"{root} is not archived: {error}") from None
        made.replace(target)
    study = read_json(study_file)["study"]
    body = section_of((root / paths.MANIFEST_PAGE).read_text(encoding="utf-8"), study)
    name_archive(manifest, study, target, body, pictures_of(published_views(root)))


def packed_study(root: Path) -> bytes:
    """Return the archive's bytes for the study in `root`, with all sealed or published files.

    Raises:
        ArtifactError: a file is missing, or has no place in a study.
    """
    study = read_json(root / paths.STUDY)
    names = [paths.SEALS, paths.MANIFEST, paths.COMPLETE, *settled_files(read_links(root))]
    members = {name: root / name for name in names}
    for path in sorted((root / paths.RUNS).rglob("*")):
        if (not path.is_dir() or path.is_symlink()) and not is_temporary(path):
            members[path.relative_to(root).as_posix()] = path
    tables = (f"{paths.ANALYSIS}/{name}" for name in paths.ANALYSIS_FILES)
    members |= {f"{PUBLISHED}/{name}": root / name for name in tables}
    for name, path in members.items():
        if path.is_symlink() or not path.is_file():
            raise ArtifactError(f"{path}: missing, or not a plain file")
        check_name(name)
    contents = {name: path.read_bytes() for name, path in members.items()}
    _refuse_secrets(root, contents)
    contents |= {
        README: readme(study).encode(),
        VERIFY: Path(__file__).with_name(VERIFY).read_bytes(),
    }
    header = {
        "study": study["study"],
        "engine_label": study["engine_label"],
        "design_sha256": study["design_sha256"],
        "versions": versions(),
    }
    return packed(header, contents)


def _refuse_secrets(root: Path, contents: Mapping[str, bytes]) -> None:
    """Raise if a text to publish seems to contain a secret.

    Of logs of numbers only the errors count: a server may quote the key that it refuses.
    """
    secrets = LogSecrets()
    places = [
        f"{root / name}:{line}"
        for name, data in contents.items()
        for line in secrets.lines(_words(name, data.decode(errors="replace")))
    ]
    if places:
        reason = (
            "found what looks like a secret (not shown); allowed: none, an archive is published"
        )
        raise ArtifactError(*(f"{place}: {reason}" for place in places[:20]))


def _words(name: str, text: str) -> str:
    if not name.endswith(NUMBERS):
        return text
    return "\n".join(" ".join(_DETAIL.findall(line)) for line in text.split("\n"))


def main(argv: Sequence[str] | None = None) -> int:
    """Pack a study into an archive, or unpack an archive."""
    parser = argparse.ArgumentParser(prog="connector-tax archive", description=main.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="write results/archive/<study>.tar.zst")
    packing.add_argument("--study", type=Path, required=True, help="results/<study>/study.json")
    packing.add_argument("--manifest", type=Path, required=True, help="MANIFEST.md")
    packing.add_argument("--out", type=Path, required=True)
    unpacking = commands.add_parser("unpack", help="check an archive and put it into a folder")
    unpacking.add_argument("--archive", type=Path, required=True)
    unpacking.add_argument("--out", type=Path, required=True)
    return run_command(parser, argv, _carry_out, UNREADABLE)


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

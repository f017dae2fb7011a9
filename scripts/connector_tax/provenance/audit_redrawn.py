"""Claims about what was made again from an archive: is it bit for bit what was published?"""

import platform
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from connector_tax import __version__
from connector_tax.files import read_json, sha256_file
from connector_tax.provenance.audit_study import RawStudy
from connector_tax.provenance.claims import Ledger
from connector_tax.provenance.manifest import archive_of

HEADER = "archive.json"
ORIGIN = "archive.sha256"
# What the numbers and pictures depend on besides the raw records.
PACKAGES = (
    "numpy", "scipy", "polars", "pandas", "matplotlib", "pillow", "contourpy", "kiwisolver",
    "fonttools", "seaborn", "jinja2", "markupsafe",
)  # fmt: skip


def versions() -> dict[str, str]:
    """The versions that what is drawn depends on."""
    found = {"python": platform.python_version(), "connector-tax": __version__}
    installed = {(d.metadata["Name"] or "").lower(): d.version for d in metadata.distributions()}
    return found | {name: installed.get(name, "absent") for name in PACKAGES}


def check_redrawn(study: RawStudy, manifest: Path, ledger: Ledger) -> None:
    """Compare every remade table, picture and the report with the hashes in archive.json.

    A difference is a FAIL where the versions are those of the archive; with others it is NOT
    CHECKABLE, because the last digit of a number or pixel may depend on them.
    """
    root = study.root
    with ledger.guarded("redrawn", HEADER):
        header = read_json(root / HEADER)
        here, there = versions(), header["versions"]
        other = [f"{n} {v} (here {here.get(n)})" for n, v in there.items() if here.get(n) != v]
        if study.older_form:
            other.insert(0, "the method of before `plain_launches`")
        for name, digest in header["redrawn"].items():
            problems = list(_differs(root, name, digest))
            if problems and other and (root / name).is_file():
                reason = f"{problems[0]}; drawn with {', '.join(other)}"
                ledger.not_checkable("redrawn", name, reason)
            else:
                ledger.check("redrawn", name, problems, "bit for bit as published")
        _check_origin(root, header["study"], manifest, ledger)
        ledger.check("unpacked", "files", _unpacked(root, header["files"]), "every hash as listed")


def _check_origin(root: Path, study: str, manifest: Path, ledger: Ledger) -> None:
    """Is it the archive that the MANIFEST.md of this checkout names?"""
    text = manifest.read_text(encoding="utf-8") if manifest.exists() else ""
    named = archive_of(text, study)
    found = (root / ORIGIN).read_text(encoding="utf-8").split()[0]
    if named is None:
        reason = f"MANIFEST.md names no archive of study {study}"
        ledger.not_checkable("unpacked", "archive", reason)
    else:
        problems = [] if named == found else [f"sha256 is {found}, MANIFEST.md names {named}"]
        ledger.check("unpacked", "archive", problems, "the one MANIFEST.md names")


def _differs(root: Path, name: str, digest: str) -> Iterator[str]:
    path = root / name
    if not path.is_file():
        yield "it was not made again"
    elif sha256_file(path) != digest:
        yield "it is not bit for bit what was published"


def _unpacked(root: Path, files: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    for name, entry in files.items():
        if not (root / name).is_file() or sha256_file(root / name) != entry["sha256"]:
            yield f"{name}: missing or changed since it was unpacked"

"""`snakemake audit`: every published claim of a study, checked against its raw records.

Three questions (docs/reviewers.md): are the files those that were sealed while the study was
measured; is everything derived what the same code makes of them again; do the records agree with
the seed, the design and each other. PASS: yes. FAIL: no, with the reason. NOT CHECKABLE: nothing in
the folder can tell, with the reason.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from connector_tax.artifacts import paths
from connector_tax.artifacts.study_file import Study, load_study
from connector_tax.commands import run_command, study_parser
from connector_tax.files import ArtifactError, read_json, sha256_file, write_json
from connector_tax.provenance.claims import FAIL, NOT_CHECKABLE, PASS, Ledger
from connector_tax.provenance.launches import check_launches
from connector_tax.provenance.manifest import archive_of, rows
from connector_tax.provenance.records import check_records, measured_cells
from connector_tax.provenance.remade import (
    KIND,
    PICTURES,
    TREES,
    check_inlined,
    check_judged,
    check_picture,
    check_remade,
    check_summaries,
    compare,
    differences,
    digest,
    other_versions,
    page_text,
    rates_again,
    remake,
    words,
)
from connector_tax.provenance.sealed import check_published, check_seals
from connector_tax.provenance.unpack import (
    BESIDE,
    FORMAT_OF_0_2,
    HEADER,
    ORIGIN,
    PUBLISHED,
    README,
    REPORT_TEXT,
    readme,
)

VERDICTS = (PASS, FAIL, NOT_CHECKABLE)
PLAIN_WIDTH = 160
# Release 0.2 had other tables and figures, but for these.
KEPT = (paths.STEP_CDF, paths.ENGINE_TABLE)
OTHER_LAYOUT = "made by release 0.2 in another way; replot it with that version"


def audit(study_file: Path, manifest: Path) -> tuple[Ledger, str]:
    """Check every claim of a study, or of one that was unpacked from an archive and redrawn.

    Args:
        study_file: results/<study>/study.json.
        manifest: MANIFEST.md.

    Returns:
        The claims, and what can be said of where the study comes from.

    Raises:
        ArtifactError: there is no study to audit.
    """
    if not study_file.is_file():
        raise ArtifactError(f"{study_file}: no such file")
    ledger, told = Ledger(), "No seal."
    with ledger.guarded("study", "study.json"):
        study = load_study(study_file)
        told = check_study(study, manifest, ledger)
        with ledger.guarded(KIND, "study"):
            if (study.root / HEADER).is_file():
                check_archived(study, manifest, ledger)
            else:
                with tempfile.TemporaryDirectory(prefix="audit-") as folder:
                    check_remade(study.root, remake(study_file, Path(folder)), ledger)
    return ledger, told


def check_study(study: Study, manifest: Path, ledger: Ledger) -> str:
    """Every claim but those about what is made again; where the study comes from."""
    told = "No seal."
    with ledger.guarded("seal", "study"):
        beside = BESIDE if (study.root / HEADER).is_file() else ()
        head = check_seals(study, ledger, beside)
        told = check_published(study, head, manifest, ledger)
    with ledger.guarded("launch", "study"):
        check_launches(study, ledger)
    with ledger.guarded("records", "study"):
        check_records(study, ledger)
        for cell in measured_cells(study, Ledger()):
            check_judged(study, cell, ledger)
    with ledger.guarded(KIND, "summaries"):
        check_summaries(study, ledger)
    with ledger.guarded(KIND, paths.REPORT):
        check_inlined(study.root, ledger)
    return told


def check_archived(study: Study, manifest: Path, ledger: Ledger) -> None:
    """What an archive published, against what `replot` made of its records."""
    root, header = study.root, read_json(study.root / HEADER)
    problems = (
        f"{name}: missing or changed since it was unpacked"
        for name, entry in header["files"].items()
        if not (root / name).is_file() or sha256_file(root / name) != entry["sha256"]
    )
    ledger.check("archive", "files", problems, "every hash as listed")
    text = manifest.read_text(encoding="utf-8") if manifest.is_file() else ""
    named = archive_of(text, header["study"])
    own = (root / ORIGIN).read_text(encoding="utf-8").split()[0]
    if named is None:
        reason = f"{manifest.name} names no archive of study {header['study']}"
        ledger.not_checkable("archive", "file", reason)
    else:
        wrong = [] if named == own else [f"sha256 is {own}, {manifest.name} names {named}"]
        ledger.check("archive", "file", wrong, f"the one {manifest.name} names")
    page = (root / README).read_text(encoding="utf-8")
    same = page == readme(study.document, header["format"])
    ledger.check(KIND, README, [] if same else ["is not what follows from the study"])
    rates, lines = read_json(root / paths.REFERENCE_RATES), read_json(root / paths.MANIFEST)
    ledger.check(KIND, paths.REFERENCE_RATES, differences(rates, rates_again(study), "rates"))
    ledger.check(KIND, paths.MANIFEST, differences(lines, rows(root / paths.STUDY), "row"))
    of_0_2 = header["format"] == FORMAT_OF_0_2
    other = [*other_versions(header["versions"]), *(["release 0.2"] if of_0_2 else [])]
    for tree in TREES:
        names = {path.name for path in (root / PUBLISHED / tree).glob("*")}
        names |= {p.name for p in (root / tree).glob("*") if p.suffix in (".csv", ".json")}
        for name in sorted(names):
            published, made = root / PUBLISHED / tree / name, root / tree / name
            if of_0_2 and name not in KEPT:
                if published.exists():
                    ledger.not_checkable(KIND, f"{tree}/{name}", OTHER_LAYOUT)
            else:
                compare(f"{tree}/{name}", published, made, other, ledger)
    for name, sha256 in header["redrawn"].items():
        if Path(name).suffix in PICTURES:
            same = (root / name).is_file() and digest(root / name) == sha256
            check_picture(name, same, other, ledger)
    _check_report(root, other, ledger)


def _check_report(root: Path, other: Sequence[str], ledger: Ledger) -> None:
    """The report by its words; release 0.2 published their hash only."""
    text = root / PUBLISHED / REPORT_TEXT
    if text.is_file():
        made = page_text((root / paths.REPORT).read_text(encoding="utf-8"))
        problems = differences(words(text.read_text(encoding="utf-8")), words(made), "word")
        ledger.check(KIND, paths.REPORT, problems, "word for word")
    else:
        reason = f"published as a hash, by other versions: {', '.join(other) or 'none'}"
        ledger.not_checkable(KIND, paths.REPORT, reason)


def table(ledger: Ledger) -> Table:
    """One row for each kind of claim."""
    shown = Table("claims about", "of", *VERDICTS, box=None, pad_edge=False)
    for kind in dict.fromkeys(claim.kind for claim in ledger.claims):
        mine = [claim for claim in ledger.claims if claim.kind == kind]
        counts = [sum(claim.verdict == verdict for claim in mine) for verdict in VERDICTS]
        subjects = mine[0].subject if len(mine) == 1 else f"{mine[0].subject} ... ({len(mine)})"
        shown.add_row(kind, subjects, *(str(count or "") for count in counts))
    return shown


def show(ledger: Ledger, told: str, console: Console) -> None:
    """Print the table, every claim that did not pass, and where the study comes from."""
    console.print(table(ledger))
    for verdict in (NOT_CHECKABLE, FAIL):
        for claim in ledger.claims:
            if claim.verdict == verdict:
                line = f"{verdict} {claim.kind} {claim.subject}: {claim.message}"
                console.print(line, markup=False, highlight=False, soft_wrap=True)
    counts = ", ".join(f"{ledger.count(verdict)} {verdict}" for verdict in VERDICTS)
    console.print(f"{len(ledger.claims)} claims: {counts}")
    console.print(told, markup=False, highlight=False, soft_wrap=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Audit a study: write audit.json beside study.json, print the claims, end non-zero on FAIL."""
    parser = study_parser("provenance.audit", main.__doc__)
    parser.add_argument("--manifest", type=Path, required=True, help="MANIFEST.md")
    return run_command(parser, argv, _audit_study, label="audit: ")


def _audit_study(arguments: argparse.Namespace) -> int:
    ledger, told = audit(arguments.study, arguments.manifest)
    show(ledger, told, Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH))
    write_json(
        arguments.study.parent / paths.AUDIT,
        {
            "study": arguments.study.parent.name,
            "counts": {verdict: ledger.count(verdict) for verdict in VERDICTS},
            "seal": told,
            "claims": [asdict(claim) for claim in ledger.claims],
        },
    )
    return int(ledger.count(FAIL) > 0)


if __name__ == "__main__":
    sys.exit(main())

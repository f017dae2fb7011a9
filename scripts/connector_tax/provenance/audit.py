"""`snakemake audit`: every published claim of a study, checked against its raw records.

Recomputes with its own plain implementation (`recompute*`; nothing from connector_tax.analysis or
connector_tax.figures), so that the two can disagree. PASS: recomputed and equal. FAIL: not so, with
the reason. NOT CHECKABLE: nothing in the folder can tell, with the reason.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from connector_tax.commands import run_command, study_parser
from connector_tax.files import ArtifactError, write_json
from connector_tax.provenance.archive_limits import HEADER
from connector_tax.provenance.audit_blocks import check_blocks
from connector_tax.provenance.audit_records import check_records
from connector_tax.provenance.audit_remade import KIND, check_redrawn, check_remade
from connector_tax.provenance.audit_resources import check_resources
from connector_tax.provenance.audit_seal import check_seals
from connector_tax.provenance.audit_study import RawStudy
from connector_tax.provenance.audit_tables import check_published
from connector_tax.provenance.claims import FAIL, NOT_CHECKABLE, PASS, Ledger

VERDICTS = (PASS, FAIL, NOT_CHECKABLE)
PLAIN_WIDTH = 160


def audit(study_file: Path, manifest: Path) -> Ledger:
    """Check every claim of a study, or of one that was unpacked from an archive and redrawn.

    Args:
        study_file: results/<study>/study.json.
        manifest: MANIFEST.md.

    Raises:
        ArtifactError: there is no study to audit.
    """
    ledger = Ledger()
    if not study_file.is_file():
        raise ArtifactError(f"{study_file}: no such file")
    with ledger.guarded("study", "study.json"):
        study = raw_study(study_file)
        check_study(study, manifest, ledger)
        with ledger.guarded(KIND, "study"):
            if study.published == study.root:
                check_remade(study, ledger)
            else:
                check_redrawn(study, manifest, ledger)
    return ledger


def raw_study(study_file: Path) -> RawStudy:
    """The folder of a study; one that was unpacked has its published tables beside the remade."""
    root = study_file.parent
    return RawStudy(study_file, root / "published" if (root / HEADER).is_file() else None)


def check_study(study: RawStudy, manifest: Path, ledger: Ledger) -> None:
    """Every claim but those about what is made again."""
    with ledger.guarded("seal", "study"):
        check_seals(study, manifest, ledger)
    with ledger.guarded("records", "study"):
        check_records(study, ledger)
    with ledger.guarded("blocks", "study"):
        check_blocks(study, ledger)
    with ledger.guarded("numbers", "study"):
        check_published(study, ledger, manifest)
    with ledger.guarded("launch records", "study"):
        check_resources(study, ledger)


def table(ledger: Ledger) -> Table:
    """One row for each kind of claim."""
    shown = Table("claims about", "of", *VERDICTS, box=None, pad_edge=False)
    for kind in dict.fromkeys(claim.kind for claim in ledger.claims):
        mine = [claim for claim in ledger.claims if claim.kind == kind]
        counts = [sum(claim.verdict == verdict for claim in mine) for verdict in VERDICTS]
        subjects = mine[0].subject if len(mine) == 1 else f"{mine[0].subject} ... ({len(mine)})"
        shown.add_row(kind, subjects, *(str(count or "") for count in counts))
    return shown


def show(ledger: Ledger, console: Console) -> None:
    """Print the table, then every claim that did not pass."""
    console.print(table(ledger))
    for verdict in (NOT_CHECKABLE, FAIL):
        for claim in ledger.claims:
            if claim.verdict == verdict:
                line = f"{verdict} {claim.kind} {claim.subject}: {claim.message}"
                console.print(line, markup=False, highlight=False, soft_wrap=True)
    counts = ", ".join(f"{ledger.count(verdict)} {verdict}" for verdict in VERDICTS)
    console.print(f"{len(ledger.claims)} claims: {counts}")


def main(argv: Sequence[str] | None = None) -> int:
    """Audit a study: write audit.json beside study.json, print the claims, end non-zero on FAIL."""
    parser = study_parser("provenance.audit", main.__doc__)
    parser.add_argument("--manifest", type=Path, required=True, help="MANIFEST.md")
    return run_command(parser, argv, _audit_study, label="audit: ")


def _audit_study(arguments: argparse.Namespace) -> int:
    ledger = audit(arguments.study, arguments.manifest)
    show(ledger, Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH))
    write_json(
        arguments.study.parent / "audit.json",
        {
            "study": arguments.study.parent.name,
            "counts": {verdict: ledger.count(verdict) for verdict in VERDICTS},
            "claims": [claim.as_dict() for claim in ledger.claims],
        },
    )
    return int(ledger.count(FAIL) > 0)


if __name__ == "__main__":
    sys.exit(main())

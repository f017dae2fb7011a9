"""`python -m connector_tax.report --study results/x/study.json`: write results/x/report.html."""

import argparse
import sys
from collections.abc import Sequence

from connector_tax.artifacts import paths
from connector_tax.commands import run_command, study_parser
from connector_tax.figures.tables import StudyTables
from connector_tax.files import write_text
from connector_tax.report.page import render


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report of a finished study."""
    return run_command(study_parser("report", main.__doc__), argv, _write_report, label="report: ")


def _write_report(arguments: argparse.Namespace) -> None:
    study = StudyTables(arguments.study)
    write_text(study.root / paths.REPORT, render(study))


if __name__ == "__main__":
    sys.exit(main())

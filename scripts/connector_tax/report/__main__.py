"""Write tables, figures and page: `python -m connector_tax.report --study results/x/study.json`."""

import argparse
import shutil
import sys
from collections.abc import Sequence

from connector_tax.analysis.aggregate import write_tables
from connector_tax.artifacts import paths
from connector_tax.commands import UNREADABLE, run_command, study_parser
from connector_tax.figures import style
from connector_tax.figures.names import FIGURES, draw
from connector_tax.figures.tables import StudyTables
from connector_tax.files import write_text
from connector_tax.report.page import render


def main(argv: Sequence[str] | None = None) -> int:
    """Write the tables, the figures and the report of a study, all from its raw records.

    All are made in one process, because importing the drawing libraries takes most of a figure's
    time.
    """
    parser = study_parser("report", main.__doc__)
    return run_command(parser, argv, _write, UNREADABLE, label="report: ")


def _write(arguments: argparse.Namespace) -> None:
    study = StudyTables(arguments.study)
    if (study.root / paths.ORIGIN).is_file():
        # An earlier release may have made other files of the archive.
        for name in (paths.ANALYSIS, paths.FIGURES):
            shutil.rmtree(study.root / name, ignore_errors=True)
    write_tables(study.folder)
    write_views(study)


def write_views(study: StudyTables) -> None:
    """Write the figures and the report of a study that has its tables.

    Raises:
        ArtifactError: a required table or record is missing or malformed.
    """
    for name in FIGURES:
        style.save(draw(study, name), study.root / paths.FIGURES, name)
    write_text(study.root / paths.REPORT, render(study))


if __name__ == "__main__":
    sys.exit(main())

"""Write tables, figures and page: `python -m connector_tax.report --study results/x/study.json`."""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from connector_tax.analysis.aggregate import write_tables
from connector_tax.artifacts import paths
from connector_tax.commands import UNREADABLE, run_command, study_parser
from connector_tax.figures import style
from connector_tax.figures.names import FIGURES, draw
from connector_tax.figures.tables import StudyTables
from connector_tax.files import ArtifactError, write_text
from connector_tax.foreign import one_line
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
            _remove(study.root / name)
    write_tables(study.folder)
    write_views(study)
    print(one_line(f"{study.root / paths.REPORT}"))


def _remove(folder: Path) -> None:
    """Delete a folder with its content, if it exists.

    Raises:
        ArtifactError: it cannot be deleted.
    """
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ArtifactError(
            f"{folder}: left by an earlier replot, and cannot be deleted ({error}); delete it, then"
            " rerun the same command"
        ) from None


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

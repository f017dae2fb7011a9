"""Draw figures: `python -m connector_tax.figures NAME... --study results/x/study.json`."""

import argparse
import sys
from collections.abc import Sequence

from connector_tax.artifacts import paths
from connector_tax.commands import run_command, study_parser
from connector_tax.figures.names import FIGURES, draw
from connector_tax.figures.tables import StudyTables


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the named figures into the study's figures/ folder."""
    parser = study_parser("figures", main.__doc__)
    parser.add_argument(
        "names", nargs="+", choices=FIGURES, metavar="NAME", help=", ".join(FIGURES)
    )
    return run_command(parser, argv, _draw, label="figures: ")


def _draw(arguments: argparse.Namespace) -> None:
    from connector_tax.figures import style

    study = StudyTables(arguments.study)
    for name in arguments.names:
        style.save(draw(study, name), study.root / paths.FIGURES, name)


if __name__ == "__main__":
    sys.exit(main())

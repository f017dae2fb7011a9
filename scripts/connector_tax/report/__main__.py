"""`python -m connector_tax.report --study results/x/study.json`: write results/x/report.html."""

import argparse
import sys
from pathlib import Path

from connector_tax.figures.tables import Study
from connector_tax.files import ArtifactError, write_text
from connector_tax.report.page import render


def main() -> int:
    """Write the report of a finished study; 1 with a message on bad or missing input."""
    parser = argparse.ArgumentParser(prog="connector_tax.report", description=__doc__)
    parser.add_argument("--study", type=Path, required=True, help="the study's study.json")
    arguments = parser.parse_args()
    try:
        study = Study(arguments.study)
        write_text(study.root / "report.html", render(study))
    except ArtifactError as error:
        print(f"connector_tax.report: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Draw figures: `python -m connector_tax.figures NAME... --study results/x/study.json`."""

import argparse
import sys
from importlib import import_module
from pathlib import Path

from connector_tax.figures.names import NAMES
from connector_tax.figures.tables import Study
from connector_tax.files import ArtifactError


def main() -> int:
    """Draw the named figures into the study's figures/ folder; 1 with a message on bad input."""
    parser = argparse.ArgumentParser(prog="connector_tax.figures", description=__doc__)
    parser.add_argument("names", nargs="+", choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--study", type=Path, required=True, help="the study's study.json")
    arguments = parser.parse_args()
    from connector_tax.figures import style

    try:
        study = Study(arguments.study)
        for name in arguments.names:
            module = import_module(f"connector_tax.figures.{name}")
            style.save(module.draw(study), study.root / "figures", name, module.TITLE)
    except ArtifactError as error:
        print(f"connector_tax.figures: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Calibrate the pipeline: virtual studies, studies over real HTTP, injected faults, a report."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from connector_tax.calibration import parts, report
from connector_tax.calibration.parts import FULL, SHORT
from connector_tax.files import ArtifactError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the calibration and write its tables and its figure."""
    parser = argparse.ArgumentParser(
        prog="python -m connector_tax.calibration", description=main.__doc__
    )
    parser.add_argument("--out", type=Path, default=Path("results/calibration"))
    parser.add_argument("--seed", type=int, default=20260)
    parser.add_argument("--short", action="store_true", help="tens of seconds, few studies")
    parser.add_argument(
        "--only", choices=parts.NAMES, help="run one part again; the others keep their results"
    )
    arguments = parser.parse_args(argv)
    console = Console(stderr=True)
    scale = SHORT if arguments.short else FULL
    say: Callable[[str], None] = console.print
    try:
        for name in parts.NAMES if arguments.only is None else (arguments.only,):
            parts.run(name, arguments.out, scale, arguments.seed, say)
        text = report.write(arguments.out)
    except ArtifactError as error:
        print(f"calibration: {error}", file=sys.stderr)
        return 2
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

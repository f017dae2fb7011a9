"""The command `doctor`: check this machine for a study, and estimate the study's duration."""

import argparse
import json
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from connector_tax.artifacts.study_file import read_study
from connector_tax.commands import run_command, study_parser
from connector_tax.study.doctor import of_slots
from connector_tax.study.durations import durations_of
from connector_tax.study.plan import remaining

# Beginning of the last line after a failed check.
UNFIT = "NOT FIT for this study"


def main(argv: Sequence[str] | None = None) -> int:
    """Check the machine for a study; exit non-zero if a check fails."""
    parser = study_parser("rehearsal.doctor", main.__doc__)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON lines")
    return run_command(parser, argv, _examine)


def _examine(arguments: argparse.Namespace) -> int:
    study = read_study(arguments.study)
    folder = arguments.study.parent
    rows = list(of_slots(study, folder))
    if arguments.json:
        for row in rows:
            print(json.dumps({"check": row.check, "verdict": row.verdict, "text": row.text}))
    else:
        table = Table(box=None, pad_edge=False)
        for heading in ("check", "verdict", "found"):
            table.add_column(heading, overflow="fold")
        for row in rows:
            table.add_row(row.check, row.verdict, row.text)
        Console(width=None if sys.stdout.isatty() else 120).print(table)
        left = remaining(study, folder)
        hours, minutes = divmod(int(left.wall_s // 60), 60)
        source = durations_of(study).source
        print(f"expected duration: {hours} h {minutes:02d} min{left.of_devices}, {source}")
        failed = dict.fromkeys(row.check for row in rows if row.verdict == "fail")
        print(f"{UNFIT}: {', '.join(failed)}" if failed else "fit for this study")
    return int(any(row.verdict == "fail" for row in rows))


if __name__ == "__main__":
    sys.exit(main())

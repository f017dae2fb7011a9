"""The command `plan`: list launches and cells in seeded run order, with state and seconds."""

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from connector_tax.artifacts.study_file import read_study
from connector_tax.commands import run_command, study_parser
from connector_tax.study.durations import durations_of
from connector_tax.study.plan import TO_MEASURE, planned_cells, remaining
from connector_tax.text import duration


def main(argv: Sequence[str] | None = None) -> int:
    """Print the seeded run order with state and expected seconds of each cell."""
    return run_command(study_parser("rehearsal.plan", main.__doc__), argv, _show)


def _show(arguments: argparse.Namespace) -> None:
    study = read_study(arguments.study)
    folder = arguments.study.parent
    rows = list(planned_cells(study, folder))
    table = Table(box=None, pad_edge=False)
    for heading, justify in (("#", "right"), ("phase", "left"), ("block", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for heading in ("configuration", "cell", "state"):
        table.add_column(heading, no_wrap=True)
    table.add_column("s", justify="right")
    table.add_column("reason", overflow="fold")
    numbers = {launch: n for n, launch in enumerate(dict.fromkeys(r.launch for r in rows), 1)}
    for row in rows:
        table.add_row(
            str(numbers[row.launch]),
            row.launch.phase,
            str(row.launch.block),
            row.launch.config,
            row.cell,
            row.state,
            f"{row.expected_s:.1f}" if row.expected_s else "",
            row.reason.replace("[", "\\["),
        )
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    left = remaining(study, folder)
    least = ""
    if "looks" in study["config"]["statistics"]:
        soonest = remaining(study, folder, least=True)
        least = f", at least {duration(soonest.wall_s)} if the first interim analysis decides all"
    console.print(
        f"{len(numbers)} launches, {len(rows)} cells, "
        f"{sum(r.state in TO_MEASURE for r in rows)} still to measure, "
        f"about {duration(left.wall_s)}{left.of_devices}{least} "
        f"(design {study['design_sha256'][:12]}, seed {study['seed']})"
    )
    console.print(f"Seconds: {durations_of(study).source}.", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())

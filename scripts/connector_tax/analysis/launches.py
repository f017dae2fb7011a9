"""Print every launch of a Phase A: its latencies and the CPU time of its threads, and how much the
launches of one configuration differ.

What `config/executors.yaml` is answered with; it reads any study's folder.
"""

import argparse
import sys
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from connector_tax.analysis.ingest import Cell, load_cells
from connector_tax.analysis.measure import measure_requests
from connector_tax.analysis.samples import METRICS
from connector_tax.artifacts.index import read_index
from connector_tax.artifacts.study_file import Study, load_study
from connector_tax.commands import run_command, study_parser

SHOWN = ("ttft_p50", "ttft_p90", "tpot_p50", "tpot_p90")
THREADS = 4


def launch_table(study: Study, cells: Sequence[Cell]) -> Table:
    """One row for each valid cell, in the study's order; percentiles in ms."""
    table = Table(title=f"{study.document['study']}: {study.document['engine_label']}", box=None)
    for heading in ("configuration", "block", "cell", "n", *(f"{m} ms" for m in SHOWN)):
        table.add_column(heading, justify="left" if heading == "configuration" else "right")
    table.add_column("CPU s by thread, whole launch")
    for cell in cells:
        requests = measure_requests(cell)
        values = [
            f"{np.percentile(getattr(requests, column), percent):.2f}"
            for column, percent in (METRICS[name] for name in SHOWN)
        ]
        table.add_row(
            cell.key.config,
            str(cell.key.block),
            cell.key.cell,
            str(requests.n),
            *values,
            _threads(cell),
        )
    return table


def spread_table(cells: Sequence[Cell]) -> Table:
    """One row for each configuration and cell: geometric mean, and the spread between launches."""
    table = Table(
        title="between launches: geometric mean ms (standard deviation of logs)", box=None
    )
    for heading in ("configuration", "cell", "launches", *SHOWN):
        table.add_column(heading, justify="left" if heading == "configuration" else "right")
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.configuration, cell.key.cell), []).append(cell)
    for (configuration, name), members in groups.items():
        measured = [measure_requests(cell) for cell in members]
        shown = []
        for column, percent in (METRICS[metric] for metric in SHOWN):
            logs = np.log([np.percentile(getattr(m, column), percent) for m in measured])
            spread = f"{np.std(logs, ddof=1):.1%}" if len(logs) > 1 else "one launch"
            shown.append(f"{np.exp(logs.mean()):.2f} ({spread})")
        table.add_row(configuration, name, str(len(members)), *shown)
    return table


def _threads(cell: Cell) -> str:
    index = read_index(cell.folder.parent)
    threads = index.attempts[-1]["server_threads"] if index is not None and index.attempts else []
    return ", ".join(f"{t['name']} {t['cpu_s']:.1f}" for t in threads[:THREADS])


def main(argv: Sequence[str] | None = None) -> int:
    """Print the launches of a study's Phase A, and the spread between them."""
    parser = study_parser("analysis.launches", main.__doc__)
    return run_command(parser, argv, _print)


def _print(arguments: argparse.Namespace) -> None:
    study = load_study(arguments.study)
    cells = [cell for cell in load_cells(study, "A") if cell.status == "valid"]
    console = Console(width=140)
    console.print(launch_table(study, cells))
    console.print(spread_table(cells))


if __name__ == "__main__":
    sys.exit(main())

"""What the study's own /metrics scrapes do to the latencies of plain.

Offline, on Phase A of a study. A request's first token met a scrape that began between the
request's due time and its first token, its decode one that began between its first and last token.
For each launch: the share of requests that were met, and the p90 of all and of those that were not;
below the table the standard deviation of the logarithms between launches of plain
(docs/decisions/quiet-time.md, "The study's own scrapes").
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from connector_tax.analysis.ingest import Cell, load_cells
from connector_tax.analysis.records import REQUESTS, read_records
from connector_tax.artifacts.study_file import load_study
from connector_tax.commands import run_command
from connector_tax.files import ArtifactError, read_jsonl

PERCENT = 90


def met(scrapes_ns: NDArray[np.int64], begin_ns: pl.Series, end_ns: pl.Series) -> NDArray[np.bool_]:
    """(n,) whether a scrape began in [begin, end) of each request; `scrapes_ns` ascends."""
    before = np.searchsorted(scrapes_ns, begin_ns.to_numpy())
    return np.searchsorted(scrapes_ns, end_ns.to_numpy()) > before


def measured(cell: Cell) -> pl.DataFrame:
    """The successes of a valid cell that were due in its window."""
    assert cell.record is not None
    window = cell.record["window"]
    requests = pl.concat(read_records(cell.file("requests"), REQUESTS, cell.sha256("requests")))
    inside = pl.col("t_intended_ns").is_between(
        window["t_warmup_end_ns"], window["t_stop_ns"], closed="left"
    )
    return requests.filter((pl.col("status") == "ok") & inside)


def latencies(cell: Cell) -> list[tuple[NDArray[np.float64], NDArray[np.bool_]]]:
    """TTFT and TPOT of the cell's measured successes in ms, each with who met a scrape."""
    requests = measured(cell).with_columns(
        ttft=(pl.col("t_first_token_ns") - pl.col("t_intended_ns")) / 1e6,
        tpot=(pl.col("t_last_token_ns") - pl.col("t_first_token_ns"))
        / (pl.col("completion_tokens") - 1)
        / 1e6,
    )
    due, first, last = (
        requests[name] for name in ("t_intended_ns", "t_first_token_ns", "t_last_token_ns")
    )
    at = np.sort([scrape["t_ns"] for scrape in read_jsonl(cell.file("metrics"))])
    return [
        (requests["ttft"].to_numpy(), met(at, due, first)),
        (requests["tpot"].to_numpy(), met(at, first, last)),
    ]


def explain(study_file: Path, name: str) -> None:
    """Print the table of one cell.

    Raises:
        ArtifactError: plain has no valid cell of that name, or a file is not what it was.
    """
    study = load_study(study_file)
    cells = [
        cell
        for cell in load_cells(study, "A")
        if cell.configuration == "plain" and cell.key.cell == name and cell.status == "valid"
    ]
    if not cells:
        raise ArtifactError(f"{study_file}: no valid cell {name} of plain in Phase A")
    columns = ("launch", "TTFT p90, ms", "met", "others", "TPOT p90, ms", "met", "others")
    table = Table(*columns, title=f"{study_file.parent.name}, {name}: scrapes and plain's p90")
    p90s = []
    for cell in cells:
        row = []
        for values, hit in latencies(cell):
            everyone, others = np.percentile(values, PERCENT), np.percentile(values[~hit], PERCENT)
            p90s.append((everyone, others))
            row += [f"{everyone:.2f}", f"{hit.mean():.0%}", f"{others:.2f}"]
        table.add_row(f"{cell.key.config}/block{cell.key.block}", *row)
    console = Console(width=100)
    console.print(table)
    logs = np.log(np.array(p90s).reshape(len(cells), 2, 2))
    for index, metric in enumerate(("TTFT", "TPOT")):
        everyone, others = logs[:, index].std(axis=0, ddof=1)
        console.print(
            f"{metric} p90 between {len(cells)} launches: {everyone:.1%}, without those that met"
            f" a scrape {others:.1%} (ratio {everyone / others:.2f})"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Show what the scrapes of a measured study met."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scrapes", description=main.__doc__)
    parser.add_argument("--study", type=Path, required=True, help="results/<study>/study.json")
    parser.add_argument("--cell", default="r8", help="of Phase A; default: %(default)s")
    return run_command(parser, argv, _run, (ArtifactError,))


def _run(arguments: argparse.Namespace) -> None:
    explain(arguments.study, arguments.cell)


if __name__ == "__main__":
    sys.exit(main())

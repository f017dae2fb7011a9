"""Where the time to a first token goes beside an emulated device: before the engine, in it, after.

Offline, on Phase A of a study with a device log, for requests that found the engine idle and were
computed in one step: from the client's send to the engine core, to the device's start, the device,
and from its end to the first token at the client.
"""

import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import polars as pl
from rich.console import Console
from rich.table import Table

from benchmarks import study_parser
from connector_tax.analysis.ingest import Cell, load_cells
from connector_tax.analysis.records import DEVICE, REQUESTS, read_whole
from connector_tax.artifacts import paths
from connector_tax.artifacts.study_file import load_study
from connector_tax.commands import run_command
from connector_tax.text import number

STAMPS = ("t_send_ns", "t_since_ns", "t_start_ns", "t_end_ns", "t_first_token_ns")
HEADINGS = ("send to engine core", "to the device", "device", "to first token")


def stages(cell: Cell) -> pl.DataFrame:
    """The four parts, in ms, of each request of a valid cell that was alone in its prefill step.

    Raises:
        ArtifactError: a file is not what the cell's index lists, or a line is malformed.
    """
    (path, digest), (log, log_digest) = cell.listed("requests"), cell.listed(paths.DEVICE_LOG)
    requests, steps = read_whole(path, REQUESTS, digest), read_whole(log, DEVICE, log_digest)
    prefill = steps.filter((pl.col("prefill_tokens") > 0) & pl.col("t_since_ns").is_not_null())
    answered = requests.filter(pl.col("status") == "ok").sort("t_send_ns")
    alone = answered.join_asof(
        prefill.sort("t_since_ns"),
        left_on="t_send_ns",
        right_on="t_since_ns",
        strategy="forward",
        coalesce=False,
    ).filter(pl.col("t_end_ns") < pl.col("t_first_token_ns"))
    return alone.select(
        (pl.col(later) - pl.col(sooner)).alias(name) / 1e6
        for name, (sooner, later) in zip(HEADINGS, pairwise(STAMPS), strict=True)
    )


def explain(study_file: Path) -> None:
    """Print a row for each cell of Phase A and configuration: medians over its requests.

    Raises:
        ArtifactError: the study has no device log, or a file is not what it was.
    """
    study = load_study(study_file)
    found: dict[tuple[str, str], list[pl.DataFrame]] = {}
    for cell in load_cells(study, "A", None):
        if cell.status == "valid":
            found.setdefault((cell.key.cell, cell.configuration), []).append(stages(cell))
    table = Table("cell", "configuration", *(f"{name}, ms" for name in HEADINGS), "requests")
    for (cell_name, config), frames in sorted(found.items()):
        own = pl.concat(frames)
        medians = own.median().row(0)
        table.add_row(cell_name, config, *map(number, medians), str(len(own)))
    Console(width=120).print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Split the time to first token of requests that were alone, by configuration."""
    parser = study_parser("first_token", main.__doc__)
    return run_command(parser, argv, lambda given: explain(given.study))


if __name__ == "__main__":
    sys.exit(main())

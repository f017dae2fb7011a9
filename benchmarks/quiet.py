"""Whether leaving out the requests of disturbed time would make a study's launches agree better.

Offline, on Phases A and B of a study whose machine was watched, by the rule of release 0.2. A chunk
of the machine's file is disturbed when the 75th percentile of its memory samples is above
FACTOR times the cell's level (10th percentile of its chunks' values), when its steal is above
STEAL, or when it holds fewer than three samples; a request that was under way in one is left
out. "By chance" is the share of chunks that the factor flags when the cell's samples are shuffled.
The first table has, by configuration, the share left out and how much slower than the kept ones
those are (difference of the percentiles' logarithms, mean over cells). The second has the residual
of the block model, each cell name by itself, with nothing and with them left out.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks import study_parser
from connector_tax.analysis.block_model import Launches
from connector_tax.analysis.ingest import Cell, load_cells
from connector_tax.analysis.machine import WatchedMachine, read_machine
from connector_tax.analysis.measure import measure_requests
from connector_tax.analysis.step_tables import by_cell
from connector_tax.artifacts import paths
from connector_tax.artifacts.record_reader import read_record
from connector_tax.artifacts.stage_records import RatesRecord
from connector_tax.artifacts.study_file import Study, load_study
from connector_tax.commands import run_command
from connector_tax.files import ArtifactError

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
PERCENTILES = {f"{metric}_p{p}": (metric, p) for metric in ("ttft", "tpot") for p in (50, 90)}
CHUNK, LEVEL, LEAST_SAMPLES = 75, 10, 3
FACTOR, STEAL = 1.1, 0.02
# Fewer requests on one side than this give no percentile here.
LEAST_REQUESTS = 10


@dataclass(frozen=True)
class Seen:
    """A cell: its latencies in ms by metric, which requests are kept; which chunks are disturbed,
    and which would be slow by chance.
    """

    cell: Cell
    latencies: dict[str, Floats]
    kept: Bools
    disturbed: Bools
    by_chance: Bools


def slow(machine: WatchedMachine, memory_ns: NDArray[np.int64]) -> Bools:
    """(chunks,) which are, by these samples; so is one with too few."""
    parts = np.split(memory_ns, np.searchsorted(machine.t_ns, machine.edges_ns[1:-1]))
    values = [np.percentile(p, CHUNK) if len(p) >= LEAST_SAMPLES else np.nan for p in parts]
    # A comparison with NaN is false.
    return ~(np.array(values) <= FACTOR * np.nanpercentile(values, LEVEL))


def seen(study: Study) -> list[Seen]:
    """Every valid cell of Phases A and B.

    Raises:
        ArtifactError: there is none, or one whose machine was not watched.
    """
    rates = read_record(study.root / paths.REFERENCE_RATES, RatesRecord)
    cells, shuffle = [], np.random.default_rng(1)
    for cell in [*load_cells(study, "A"), *load_cells(study, "B", rates["ref_safe"])]:
        if cell.status != "valid" or cell.record is None:
            continue
        requests, machine = measure_requests(cell), read_machine(*cell.listed("machine"))
        bad = slow(machine, machine.memory_ns) | (machine.steal > STEAL)
        by_chance = slow(machine, shuffle.permutation(machine.memory_ns))
        edges = machine.edges_ns
        start = cell.record["window"]["t_warmup_end_ns"] + requests.since_warmup_s * 1e9
        end = start + requests.e2e_ms * 1e6
        first, last = (
            np.clip(np.searchsorted(edges, at, side="right") - 1, 0, len(bad) - 1)
            for at in (start, end)
        )
        met = np.concatenate([[0], np.cumsum(bad)])
        kept = (start >= edges[0]) & (end <= edges[-1]) & (met[last + 1] == met[first])
        latencies = {"ttft": requests.ttft_ms, "tpot": requests.tpot_ms}
        cells.append(Seen(cell, latencies, kept, bad, by_chance))
    if not cells:
        raise ArtifactError(f"{study.root}: no valid cell of Phases A and B")
    return cells


def slower(cells: Sequence[Seen]) -> dict[str, tuple[float, float, int]]:
    """By percentile: how much slower the requests left out are, its standard error, cells."""
    found = {}
    for name, (metric, percent) in PERCENTILES.items():
        logs = [
            np.log(np.percentile(of[~c.kept], percent) / np.percentile(of[c.kept], percent))
            for c in cells
            for of in [c.latencies[metric]]
            if min(c.kept.sum(), (~c.kept).sum()) >= LEAST_REQUESTS
        ]
        error = float(np.std(logs, ddof=1) / np.sqrt(len(logs))) if len(logs) > 1 else np.nan
        found[name] = (float(np.mean(logs)) if logs else np.nan, error, len(logs))
    return found


def residual(cells: Sequence[Seen], name: str, keeps: Callable[[Seen], Bools]) -> float:
    """Of the log of a percentile, configurations and blocks of each cell name taken out."""
    metric, percent = PERCENTILES[name]
    logs = {
        c.cell.key: float(np.log(np.percentile(c.latencies[metric][keeps(c)], percent)))
        for c in cells
        if min(c.kept.sum(), keeps(c).sum()) >= LEAST_REQUESTS
    }
    fits = [Launches.of(launched).residual for launched in by_cell(logs).values()]
    squares, df = sum(float(rest @ rest) for rest, _ in fits), sum(df for _, df in fits)
    return float(np.sqrt(squares / df)) if df else np.nan


def explain(study: Study) -> None:
    """Print both tables."""
    cells, console = seen(study), Console(width=110)
    bad = np.concatenate([c.disturbed for c in cells])
    chance = np.concatenate([c.by_chance for c in cells])
    console.print(
        f"{bad.mean():.1%} of {len(bad)} chunks are disturbed, {chance.mean():.1%} by chance"
    )
    console.print("Requests left out over those kept, in brackets standard error and cells:")
    table = Table("configuration", "left out", *PERCENTILES)
    for config in [*study.configurations, "all"]:
        own = [c for c in cells if config in (c.cell.configuration, "all")]
        if own:
            share = 1 - sum(c.kept.sum() for c in own) / sum(len(c.kept) for c in own)
            numbers = [f"{d:+.2%} ({se:.2%}; {n})" for d, se, n in slower(own).values()]
            table.add_row(config, f"{share:.1%}", *numbers)
    console.print(table)
    table = Table("residual between launches", "nothing left out", "left out", "ratio")
    for name in PERCENTILES:
        whole = residual(cells, name, lambda c: np.ones(len(c.kept), np.bool_))
        without = residual(cells, name, lambda c: c.kept)
        table.add_row(name, f"{whole:.2%}", f"{without:.2%}", f"{without / whole:.2f}")
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Show what leaving out the requests of disturbed time would do to a measured study."""
    parser = study_parser("quiet", main.__doc__)
    return run_command(parser, argv, lambda given: explain(load_study(given.study)))


if __name__ == "__main__":
    sys.exit(main())

"""How much of the latencies' variance the watched machine explains, and what each rule leaves.

Offline, on Phase A of a study whose machine was watched, void cells included. Two ways are
compared: leaving out what met a disturbed chunk, and nothing left out with what was watched over
the cell (memory latency, the same of samples taken while no request was under way, or steal) as a
covariate. All latencies are logarithms. What is explained is of plain, each cell name's mean taken
off; what is left between launches is the residual of the block model, configurations and blocks of
each cell name taken out.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy import stats

from connector_tax.analysis.ingest import Cell, load_cells
from connector_tax.analysis.measure import measure_machine, measure_requests
from connector_tax.analysis.quiet import WatchedMachine, undisturbed
from connector_tax.analysis.records import REQUESTS, read_records
from connector_tax.artifacts.study_file import Study
from connector_tax.files import ArtifactError

Floats = NDArray[np.float64]
METRICS = ("ttft", "tpot")
NAMES = tuple(f"{metric}_p{percent}" for metric in METRICS for percent in (50, 90))
STEAL = "steal"
MEMORY_IDLE = "memory, no request under way"
WATCHED = ("memory", MEMORY_IDLE, STEAL)
BIN_NS = 2_000_000_000
# What was watched of a request: the samples from so long before it to so long after it.
AROUND_NS = 500_000_000
# Fewer requests than this give no percentile here.
LEAST_REQUESTS = 20
# An A/A of so many blocks, one launch of plain against another in each.
BLOCKS = 3


@dataclass(frozen=True)
class Watched:
    """One cell: its successes in order of arrival, and the machine.

    Attributes:
        start_ns, end_ns: (n,) intended time and last token of each success.
        ttft, tpot: (n,) latencies in ms.
        idle: of the machine's samples, which were taken while no request was under way.
    """

    cell: Cell
    machine: WatchedMachine
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    ttft: Floats
    tpot: Floats
    idle: NDArray[np.bool_]


def watched_cells(study: Study) -> list[Watched]:
    """Every measured Phase A cell with its machine file.

    Raises:
        ArtifactError: there is none, or a file is not what it was.
    """
    cells = []
    for cell in load_cells(study, "A"):
        if cell.record is None:
            continue
        machine = measure_machine(cell)
        if machine is None:
            raise ArtifactError(f"{cell.folder}: the machine was not watched")
        cells.append(_watched(cell, machine))
    if not cells:
        raise ArtifactError(f"{study.root}: no measured Phase A cell")
    return cells


def _watched(cell: Cell, machine: WatchedMachine) -> Watched:
    assert cell.record is not None
    requests = measure_requests(cell, rule=False)
    start = cell.record["window"]["t_warmup_end_ns"] + np.round(requests.since_warmup_s * 1e9)
    frames = list(read_records(cell.file("requests"), REQUESTS, cell.sha256("requests")))
    sent = pl.concat(frames).drop_nulls(["t_send_ns", "t_done_ns"])
    begun = np.sort(sent["t_send_ns"].to_numpy())
    over = np.sort(sent["t_done_ns"].to_numpy())
    under_way = np.searchsorted(begun, machine.t_ns) - np.searchsorted(over, machine.t_ns)
    start_ns = start.astype(np.int64)
    return Watched(
        cell,
        machine,
        start_ns,
        start_ns + np.round(requests.e2e_ms * 1e6).astype(np.int64),
        requests.ttft_ms,
        requests.tpot_ms,
        under_way == 0,
    )


class Explained(NamedTuple):
    """How what was `watched` goes with the log of a metric: the correlation of `n` points."""

    level: str
    watched: str
    metric: str
    n: int
    r: float


def explained(cells: Sequence[Watched]) -> Iterator[Explained]:
    """By what was watched, metric and level (requests, 2 s medians, launches), over plain's cells.

    Raises:
        ArtifactError: plain has no cell.
    """
    cells = [c for c in cells if c.cell.configuration == "plain"]
    if not cells:
        raise ArtifactError("no measured Phase A cell of plain")
    for watched in WATCHED:
        for metric in METRICS:
            for level, points in (
                ("requests", [_by_request(c, metric, watched) for c in cells]),
                (f"medians of {BIN_NS / 1e9:g} s", [_by_bin(c, metric, watched) for c in cells]),
            ):
                x, y = (np.concatenate([p[k] - p[k].mean() for p in points if len(p[k])])
                        for k in (0, 1))  # fmt: skip
                yield Explained(level, watched, metric, len(x), _correlation(x, y))
            x = covariates(cells, watched)
            y = np.array([np.log(np.median(getattr(c, metric))) for c in cells])
            x, y = centred(cells, x), centred(cells, y)
            yield Explained("launches (p50)", watched, metric, len(x), _correlation(x, y))


def covariates(cells: Sequence[Watched], watched: str) -> Floats:
    """(cells,) what was watched, over each cell: median log memory latency, or mean steal."""
    return np.array([_centre(watched)(_series(c, watched)[1]) for c in cells])


def _series(cell: Watched, watched: str) -> tuple[NDArray[np.int64], Floats]:
    """What was watched in a cell, over time: the log of each sample, or each chunk's steal."""
    machine = cell.machine
    if watched == STEAL:
        return (machine.edges_ns[1:] + machine.edges_ns[:-1]) // 2, machine.steal
    kept = cell.idle if watched == MEMORY_IDLE else slice(None)
    return machine.t_ns[kept], np.log(machine.memory_ns[kept])


def _centre(watched: str) -> Callable[[Floats], Any]:
    return np.mean if watched == STEAL else np.median


def _by_request(cell: Watched, metric: str, watched: str) -> tuple[Floats, Floats]:
    t_ns, values = _series(cell, watched)
    first = np.searchsorted(t_ns, cell.start_ns - AROUND_NS)
    last = np.searchsorted(t_ns, cell.end_ns + AROUND_NS)
    kept = (last > first) & (getattr(cell, metric) > 0)
    centre = _centre(watched)
    x = [centre(values[a:b]) for a, b in zip(first[kept], last[kept], strict=True)]
    return np.array(x), np.log(getattr(cell, metric)[kept])


def _by_bin(cell: Watched, metric: str, watched: str) -> tuple[Floats, Floats]:
    t_ns, series = _series(cell, watched)
    values = getattr(cell, metric)
    of_request = (cell.start_ns - cell.start_ns[0]) // BIN_NS
    of_sample = (t_ns - cell.start_ns[0]) // BIN_NS
    both = [b for b in np.unique(of_request) if np.any(of_sample == b)]
    centre = _centre(watched)
    x = [centre(series[of_sample == b]) for b in both]
    y = [np.median(values[of_request == b]) for b in both]
    return np.array(x), np.log(y)


def _correlation(x: Floats, y: Floats) -> float:
    return float(np.corrcoef(x, y)[0, 1]) if len(x) > 2 and x.std() > 0 < y.std() else np.nan


def centred(cells: Sequence[Watched], values: Floats) -> Floats:
    """`values` (one for each cell) with the mean of the cells of the same name taken off."""
    names = np.array([c.cell.key.cell for c in cells])
    means: Floats = np.array([values[names == name].mean() for name in names])
    return values - means


class Spread(NamedTuple):
    """What is left between launches under one rule, by percentile.

    Attributes:
        rule: what was done.
        kept: share of the requests that were measured.
        launches: with enough requests left.
        sd: by name of the percentile, standard deviation of its logarithm between launches.
        half_width: by name, of the 95% interval of an A/A over BLOCKS blocks, relative.
    """

    rule: str
    kept: float
    launches: int
    sd: Mapping[str, float]
    half_width: Mapping[str, float]


def spreads(
    cells: Sequence[Watched],
    factors: Sequence[float],
    steals: Sequence[float],
    rule: Mapping[str, Any],
) -> Iterator[Spread]:
    """Nothing left out; the rule at each factor and each bound of steal; covariates.

    Args:
        cells: of all configurations.
        factors: for `max_factor`.
        steals: for `max_chunk_steal`.
        rule: the rest of the rule (`quiet.rule` of a cell's record).
    """
    whole = [np.ones(len(c.start_ns), np.bool_) for c in cells]
    yield _spread("nothing", cells, whole)
    bounds = [*((f, None) for f in factors), *((None, s) for s in steals)]
    bounds += list(itertools.product(factors, steals))
    for factor, steal in bounds:
        chosen: Any = {**rule, "max_factor": factor, "max_chunk_steal": steal}
        kept = [undisturbed(c.machine.chunks(chosen), c.start_ns, c.end_ns) for c in cells]
        parts = [] if factor is None else [f"memory > {factor:g} x"]
        parts += [] if steal is None else [f"steal > {steal:.0%}"]
        yield _spread(", ".join(parts), cells, kept)
    for name in WATCHED:
        yield _spread(f"covariate: {name}", cells, whole, covariates(cells, name))


def _spread(
    rule: str,
    cells: Sequence[Watched],
    kept: Sequence[NDArray[np.bool_]],
    covariate: Floats | None = None,
) -> Spread:
    share = sum(int(k.sum()) for k in kept) / sum(len(k) for k in kept)
    enough = [i for i, k in enumerate(kept) if k.sum() >= LEAST_REQUESTS]
    left = [cells[i] for i in enough]
    design = _design(left)
    if covariate is not None:
        design = np.column_stack([design, covariate[enough]])
    freedom = len(left) - int(np.linalg.matrix_rank(design))
    sd, half = {}, {}
    for name in NAMES:
        metric, _, percent = name.partition("_p")
        values = [np.percentile(getattr(cells[i], metric)[kept[i]], int(percent)) for i in enough]
        y = np.log(values)
        residual = y - design @ np.linalg.lstsq(design, y)[0]
        sd[name] = float(np.sqrt(residual @ residual / freedom)) if freedom else np.nan
        quantile = float(stats.t.ppf(0.975, freedom)) if freedom else np.nan
        half[name] = float(np.expm1(quantile * sd[name] * np.sqrt(2 / BLOCKS)))
    return Spread(rule, share, len(left), sd, half)


def _design(cells: Sequence[Watched]) -> Floats:
    """(cells, terms) indicators of the configuration and of the block, for each cell name."""
    keys = [
        ((key.cell, c.cell.configuration), (key.cell, key.block))
        for c in cells
        for key in [c.cell.key]
    ]
    columns = [[pair[k] == term for pair in keys]
               for k in (0, 1) for term in sorted({pair[k] for pair in keys})]  # fmt: skip
    return np.array(columns, float).T

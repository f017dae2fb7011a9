"""How much of the latencies' variance the yardstick explains, and what is left of it by each rule.

Offline, on the plain launches of a study whose machine was watched. Two ways are compared: leaving
out what met a disturbed chunk, and nothing left out with the launch's yardstick (samples taken
while no request was under way) as a covariate. All values are logarithms; launches of one cell are
compared with each other, and cells of several names are pooled by taking each name's mean off.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy import stats

from connector_tax.analysis.ingest import Cell, Study, load_cells
from connector_tax.analysis.measure import measure_machine, measure_requests
from connector_tax.analysis.quiet import Chunks, Machine, judge_chunks, undisturbed
from connector_tax.analysis.records import REQUESTS, read_records
from connector_tax.files import ArtifactError, read_json

Floats = NDArray[np.float64]
METRICS = ("ttft", "tpot")
NAMES = tuple(f"{metric}_p{percent}" for metric in METRICS for percent in (50, 90))
BIN_NS = 2_000_000_000
# A request's yardstick: the samples from so long before it to so long after it.
AROUND_NS = 500_000_000
# Fewer requests than this give no percentile here.
LEAST_REQUESTS = 20
# An A/A of so many blocks, one launch of plain against another in each.
BLOCKS = 3


@dataclass(frozen=True)
class Watched:
    """One valid cell of plain: its successes in order of arrival, and the machine.

    Attributes:
        start_ns, end_ns: (n,) intended time and last token of each success.
        ttft, tpot: (n,) latencies in ms.
        idle: of the machine's samples, which were taken while no request was under way.
    """

    cell: Cell
    machine: Machine
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    ttft: Floats
    tpot: Floats
    idle: NDArray[np.bool_]


def watched_cells(study: Study) -> list[Watched]:
    """Every valid Phase A cell of plain with its machine file.

    Raises:
        ArtifactError: there is none, or a file is not what it was.
    """
    found = []
    for cell in load_cells(study, "A"):
        if cell.configuration != "plain" or cell.status != "valid":
            continue
        machine = measure_machine(cell)
        if machine is None:
            raise ArtifactError(f"{cell.folder}: the machine was not watched")
        found.append(_watched(cell, machine))
    if not found:
        raise ArtifactError(f"{study.root}: no valid Phase A cell of plain")
    return found


def _watched(cell: Cell, machine: Machine) -> Watched:
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
    """Share of a metric's variance that the yardstick explains (r squared), and its sign."""

    level: str
    samples: str
    metric: str
    n: int
    r: float


def explained(cells: Sequence[Watched]) -> Iterator[Explained]:
    """By level (requests, 2 s medians, launches), all samples or idle ones, and metric."""
    for samples in ("all", "idle"):
        for metric in METRICS:
            for level, points in (
                ("requests", [_by_request(c, metric, samples) for c in cells]),
                (f"medians of {BIN_NS / 1e9:g} s", [_by_bin(c, metric, samples) for c in cells]),
            ):
                x, y = (np.concatenate([p[k] - p[k].mean() for p in points if len(p[k])])
                        for k in (0, 1))  # fmt: skip
                yield Explained(level, samples, metric, len(x), _correlation(x, y))
            x = yardsticks(cells, samples)
            y = np.array([np.log(np.median(getattr(c, metric))) for c in cells])
            x, y = centred(cells, x), centred(cells, y)
            yield Explained("launches (p50)", samples, metric, len(x), _correlation(x, y))


def yardsticks(cells: Sequence[Watched], samples: str) -> Floats:
    """(cells,) the logarithm of each cell's median memory latency."""
    return np.array([np.log(np.median(_memory(c, samples)[1])) for c in cells])


def _memory(cell: Watched, samples: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    kept = cell.idle if samples == "idle" else slice(None)
    return cell.machine.t_ns[kept], cell.machine.memory_ns[kept]


def _by_request(cell: Watched, metric: str, samples: str) -> tuple[Floats, Floats]:
    t_ns, memory = _memory(cell, samples)
    first = np.searchsorted(t_ns, cell.start_ns - AROUND_NS)
    last = np.searchsorted(t_ns, cell.end_ns + AROUND_NS)
    kept = (last > first) & (getattr(cell, metric) > 0)
    x = [np.median(memory[a:b]) for a, b in zip(first[kept], last[kept], strict=True)]
    return np.log(x), np.log(getattr(cell, metric)[kept])


def _by_bin(cell: Watched, metric: str, samples: str) -> tuple[Floats, Floats]:
    t_ns, memory = _memory(cell, samples)
    values = getattr(cell, metric)
    of_request = (cell.start_ns - cell.start_ns[0]) // BIN_NS
    of_sample = (t_ns - cell.start_ns[0]) // BIN_NS
    both = [b for b in np.unique(of_request) if np.any(of_sample == b)]
    x = [np.median(memory[of_sample == b]) for b in both]
    y = [np.median(values[of_request == b]) for b in both]
    return np.log(x), np.log(y)


def _correlation(x: Floats, y: Floats) -> float:
    return float(np.corrcoef(x, y)[0, 1]) if len(x) > 2 and x.std() > 0 < y.std() else np.nan


def centred(cells: Sequence[Watched], values: Floats) -> Floats:
    """`values` (one for each cell) with the mean of the cells of the same name taken off."""
    names = np.array([c.cell.key.cell for c in cells])
    means: Floats = np.array([values[names == name].mean() for name in names])
    return values - means


class Spread(NamedTuple):
    """What is left between launches of plain under one rule, by percentile.

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
    study: Study, cells: Sequence[Watched], factors: Sequence[float], rule: Mapping[str, Any]
) -> Iterator[Spread]:
    """Nothing left out; the rule at each factor, by the cell's level and the study's; covariates.

    Args:
        study: the study.
        cells: its plain cells.
        factors: for `max_factor`.
        rule: the rest of the rule (`quiet.rule` of a cell's record).
    """
    whole = [np.ones(len(c.start_ns), np.bool_) for c in cells]
    yield _spread("nothing", cells, whole)
    environment = read_json(study.root / "environment.json")
    level = environment.get("quiet_level", {}).get("memory_ns")
    for factor in factors:
        chosen = {**rule, "max_factor": factor}
        judged = [judge_chunks(c.machine.t_ns, c.machine.memory_ns, chosen) for c in cells]
        kept = [undisturbed(j, c.start_ns, c.end_ns) for j, c in zip(judged, cells, strict=True)]
        yield _spread(f"{factor:g} x cell's level", cells, kept)
        if level is not None:
            again = [_against(j, factor * level * c.machine.elements)
                     for j, c in zip(judged, cells, strict=True)]  # fmt: skip
            kept = [undisturbed(j, c.start_ns, c.end_ns) for j, c in zip(again, cells, strict=True)]
            yield _spread(f"{factor:g} x study's level", cells, kept)
    for samples in ("all", "idle"):
        yield _spread(f"covariate, {samples} samples", cells, whole, yardsticks(cells, samples))


def _against(chunks: Chunks, limit_ns: float) -> Chunks:
    return chunks._replace(disturbed=~(chunks.values_ns <= limit_ns))


def _spread(
    rule: str,
    cells: Sequence[Watched],
    kept: Sequence[NDArray[np.bool_]],
    covariate: Floats | None = None,
) -> Spread:
    share = sum(int(k.sum()) for k in kept) / sum(len(k) for k in kept)
    enough = [i for i, k in enumerate(kept) if k.sum() >= LEAST_REQUESTS]
    left = [cells[i] for i in enough]
    names = {c.cell.key.cell for c in left}
    freedom = len(left) - len(names) - (covariate is not None)
    sd, half = {}, {}
    for name in NAMES:
        metric, _, percent = name.partition("_p")
        values = [np.percentile(getattr(cells[i], metric)[kept[i]], int(percent)) for i in enough]
        if freedom < 1:
            sd[name] = half[name] = np.nan
            continue
        y = centred(left, np.log(values))
        if covariate is not None:
            x = centred(left, covariate[enough])
            y = y - x * float(x @ y / (x @ x))
        sd[name] = float(np.sqrt(y @ y / freedom))
        quantile = float(stats.t.ppf(0.975, freedom))
        half[name] = float(np.expm1(quantile * sd[name] * np.sqrt(2 / BLOCKS)))
    return Spread(rule, share, len(left), sd, half)

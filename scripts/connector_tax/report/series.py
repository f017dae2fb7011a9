"""Draw each cell's time series from its raw records, as SVG paths.

The time from the first planned request to the window's end is divided into BINS equal parts. A
part's value is the median of its records; a part without records is a gap.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from connector_tax import text
from connector_tax.analysis.measure import WAITING, gauge_values
from connector_tax.analysis.records import request_table, taken
from connector_tax.analysis.steps import step_times
from connector_tax.artifacts.cell_records import CellRecord
from connector_tax.artifacts.folder import CellFolder
from connector_tax.files import ArtifactError
from connector_tax.report.launches import LaunchReport

BINS, HEIGHT = 48, 16  # size of a drawing, in its own units
COLUMNS = (
    "TTFT, ms", "TPOT, ms", "in flight", "waiting", "KV blocks used, %", "engine step, ms",
)  # fmt: skip
KV_USE = "vllm:kv_cache_usage_perc"

Floats = NDArray[np.float64]
# Times in ns, and recorded values.
Samples = tuple[Floats, Floats]


@dataclass(frozen=True)
class Drawing:
    """One time series: an SVG path with zero at the bottom, and the range of its values as text."""

    path: str
    words: str


@dataclass(frozen=True)
class CellSeries:
    """The time series of one cell.

    Attributes:
        cell: its state, with the reason if it has no number.
        warm: end of the warm-up, in units of the drawing.
        failed: an SVG path with a stroke for each part in which a request failed or was dropped.
        drawings: one for each of COLUMNS; None without records.
    """

    cell: CellFolder
    warm: int
    failed: str
    drawings: Sequence[Drawing | None]


def series_of(launch: LaunchReport) -> list[CellSeries]:
    """Return the time series of the launch's cells with records.

    Raises:
        ArtifactError: a raw record is missing, changed or malformed.
    """
    return [_series(cell, cell.record) for cell in launch.cells if cell.record]


def _series(cell: CellFolder, record: CellRecord) -> CellSeries:
    window = record["window"]
    start, stop = window["t_origin_ns"], window["t_stop_ns"]
    edges = np.linspace(start, stop, BINS + 1)
    none = (np.empty(0), np.empty(0))

    def read(kind: str, samples: Callable[[], list[Samples]], count: int) -> list[Samples]:
        """Return the samples of a kind of file; empty if the cell lacks the file."""
        return [none] * count if cell.sha256(kind) is None else samples()

    *latencies, (failed, _) = read("requests", lambda: _requests(cell, edges), 4)
    scraped = read("metrics", lambda: _gauges(cell), 2)
    (steps,) = read("engine_step", lambda: _steps(cell), 1)
    cell.release()
    samples = [*latencies, *scraped, steps]
    warm = round(BINS * (window["t_warmup_end_ns"] - start) / (stop - start))
    hit = np.flatnonzero(np.histogram(failed, edges)[0])
    strokes = "".join(f"M{part}.5 {HEIGHT}v-{HEIGHT}" for part in hit)
    return CellSeries(cell, warm, strokes, [_drawing(*pair, edges) for pair in samples])


def _drawing(t_ns: Floats, values: Floats, edges: Floats) -> Drawing | None:
    """Return the median of each part as a step line, with gaps for parts without records."""
    order = np.argsort(t_ns)
    parts = np.split(values[order], np.searchsorted(t_ns[order], edges))[1:-1]
    medians = {place: float(np.median(part)) for place, part in enumerate(parts) if len(part)}
    if not medians:
        return None
    low, high = min(medians.values()), max(medians.values())
    scale = HEIGHT / high if high > 0 else 0.0
    runs: list[tuple[int, int, int]] = []  # of equal parts: first, last, height
    for place, value in medians.items():
        y = HEIGHT - round(scale * value)
        if runs and runs[-1][1:] == (place - 1, y):
            runs[-1] = (runs[-1][0], place, y)
        else:
            runs.append((place, place, y))
    path = "".join(
        (f"V{y}" if first - 1 in medians else f"M{first} {y}") + f"h{last + 1 - first}"
        for first, last, y in runs
    )
    words = text.compact(low) if low == high else f"{text.compact(low)} to {text.compact(high)}"
    return Drawing(path, words)


def _requests(cell: CellFolder, edges: Floats) -> list[Samples]:
    """Return TTFT and TPOT by due time, requests in flight, and failed requests."""
    table = request_table(cell)
    is_ok = table["status"] == "ok"
    ok = taken(table, is_ok)
    due, first, last, sent, done, tokens = (
        ok[name].astype(float)
        for name in ("t_intended_ns", "t_first_token_ns", "t_last_token_ns", "t_send_ns",
                     "t_done_ns", "completion_tokens")
    )  # fmt: skip
    several = tokens > 1
    tpot = (last - first)[several] / (tokens - 1)[several]
    middles = (edges[1:] + edges[:-1]) / 2
    flying = np.searchsorted(np.sort(sent), middles) - np.searchsorted(np.sort(done), middles)
    failed = table["t_intended_ns"][~is_ok].astype(float)
    return [
        (due, (first - due) / 1e6),
        (due[several], tpot / 1e6),
        (middles, flying.astype(float)),
        (failed, np.ones(len(failed))),
    ]


def _gauges(cell: CellFolder) -> list[Samples]:
    """Return waiting requests over all engines, and the highest share of used KV blocks in %."""
    rows = list(_scrapes(cell))
    t_ns, waiting, used = np.array(rows, float).reshape(-1, 3).T
    known = [~np.isnan(values) for values in (waiting, used)]
    return [(t_ns[known[0]], waiting[known[0]]), (t_ns[known[1]], 100 * used[known[1]])]


def _scrapes(cell: CellFolder) -> Iterator[tuple[float, float, float]]:
    lines: list[Any] = cell.lines("metrics")
    for number, record in enumerate(lines, 1):
        try:
            if record["ok"]:
                waiting, used = (gauge_values(record, gauge) for gauge in (WAITING, KV_USE))
                nan = float("nan")
                yield record["t_ns"], sum(waiting) if waiting else nan, max(used, default=nan)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            reason = f"{cell.file('metrics')}:{number}: not a metrics record: {error!r}"
            raise ArtifactError(reason) from None


def _steps(cell: CellFolder) -> list[Samples]:
    """Return the start (ns) and duration (ms) of the engine's steps, from `step_times`."""
    t_ns, step_us = step_times(cell)
    return [(t_ns, step_us / 1e3)]

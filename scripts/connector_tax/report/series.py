"""How each cell went while it ran: small time series of its raw records, drawn as SVG paths.

From the first planned request until the window ends, in BINS equal parts; a part's value is the
median of what was recorded in it, and a part without a record is a gap.

And whether the server stood still: the longest time in which requests were in flight and no token
came. A token is seen when a read brought it, where a study keeps its reads; else when a request's
first or last token came, and when a step of the engine that scheduled tokens was logged. With
neither reads nor steps the tokens between a request's first and last are not known, and nor is the
silence.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import polars as pl
from numpy.typing import NDArray

from connector_tax import text
from connector_tax.analysis.machine import read_machine
from connector_tax.analysis.measure import WAITING, gauge_values
from connector_tax.analysis.records import REQUESTS, STEPS, read_records, read_whole
from connector_tax.artifacts import paths
from connector_tax.artifacts.cell_records import CellRecord, MeasuredWindow
from connector_tax.files import ArtifactError, read_jsonl, reading
from connector_tax.report.launches import CellState, LaunchReport

BINS, HEIGHT = 48, 16  # of a drawing, in its own units
COLUMNS = (
    "TTFT, ms", "TPOT, ms", "in flight", "waiting", "KV blocks used, %", "engine step, ms",
    "yardstick, ns",
)  # fmt: skip
KV_USE = "vllm:kv_cache_usage_perc"
# A silence is flagged beyond LEAST_S, or TTFTS times the cell's shortest TTFT where that is longer:
# alone, a prompt is silent for as long as its own TTFT. LEAST_S is nine times the longest silence
# below saturation in the archives `default` and `vllm-cpu`, three times that of saturated cells,
# 0.31 s (tests/report/test_silence.py).
LEAST_S = 1.0
TTFTS = 3.0

Floats = NDArray[np.float64]
# When something was recorded, in ns, and its value.
Samples = tuple[Floats, Floats]


@dataclass(frozen=True)
class Drawing:
    """One time series: an SVG path, zero at the bottom, and the range of its values in words."""

    path: str
    words: str


class Silence(NamedTuple):
    """The longest silence of a cell, and its bound, in s."""

    longest_s: float
    bound_s: float

    @property
    def flagged(self) -> bool:
        """Whether the server stood still for longer than a cell's own prompts explain."""
        return self.longest_s > self.bound_s


@dataclass(frozen=True)
class CellSeries:
    """The time series of one cell.

    Attributes:
        cell: its state, with the reason where it has no number.
        warm: where the warm-up ends, in units of the drawing.
        failed: an SVG path with a stroke for each part in which a request failed or was dropped.
        drawings: one for each of COLUMNS; None where nothing was recorded.
        silence: the longest time without a token; None where it is not known.
    """

    cell: CellState
    warm: int
    failed: str
    drawings: Sequence[Drawing | None]
    silence: Silence | None


def series_of(launch: LaunchReport) -> list[CellSeries]:
    """The time series of the launch's cells that left records.

    Raises:
        ArtifactError: a raw record is missing, changed or malformed.
    """
    return [_series(cell, cell.record) for cell in launch.cells if cell.record]


def _series(cell: CellState, record: CellRecord) -> CellSeries:
    window = record["window"]
    start, stop = window["t_origin_ns"], window["t_stop_ns"]
    edges = np.linspace(start, stop, BINS + 1)
    none = (np.empty(0), np.empty(0))

    def read(kind: str, samples: Callable[[Path, str], list[Samples]], count: int) -> list[Samples]:
        """What a kind of file holds, in `count` parts; nothing where the cell has no such file."""
        name = paths.cell_log(kind, record["phase"], record["cell"])
        digest = record["files"].get(name)
        return [none] * count if digest is None else samples(cell.path.with_name(name), digest)

    *latencies, (failed, _) = read("requests", lambda file, sha: _requests(file, sha, edges), 4)
    scraped = read("metrics", lambda file, _: _gauges(file), 2)
    (steps,) = read("engine_step", _steps, 1)
    samples = [*latencies, *scraped, steps, *read("machine", _yardstick, 1)]
    warm = round(BINS * (window["t_warmup_end_ns"] - start) / (stop - start))
    hit = np.flatnonzero(np.histogram(failed, edges)[0])
    strokes = "".join(f"M{part}.5 {HEIGHT}v-{HEIGHT}" for part in hit)
    requests = cell.path.with_name(paths.cell_log("requests", record["phase"], record["cell"]))
    quiet = silence(requests, steps[0], window) if requests.name in record["files"] else None
    return CellSeries(cell, warm, strokes, [_drawing(*pair, edges) for pair in samples], quiet)


def _drawing(t_ns: Floats, values: Floats, edges: Floats) -> Drawing | None:
    """The median of each part as a staircase, broken where there is none."""
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


def _requests(path: Path, sha256: str, edges: Floats) -> list[Samples]:
    """TTFT and TPOT by when a request was due, how many are in flight, and which failed."""
    table = read_whole(path, REQUESTS, sha256)
    ok = table.filter(pl.col("status") == "ok")
    due, first, last, sent, done, tokens = (
        ok[name].to_numpy().astype(float)
        for name in ("t_intended_ns", "t_first_token_ns", "t_last_token_ns", "t_send_ns",
                     "t_done_ns", "completion_tokens")
    )  # fmt: skip
    several = tokens > 1
    tpot = (last - first)[several] / (tokens - 1)[several]
    middles = (edges[1:] + edges[:-1]) / 2
    flying = np.searchsorted(np.sort(sent), middles) - np.searchsorted(np.sort(done), middles)
    failed = table.filter(pl.col("status") != "ok")["t_intended_ns"].to_numpy().astype(float)
    return [
        (due, (first - due) / 1e6),
        (due[several], tpot / 1e6),
        (middles, flying.astype(float)),
        (failed, np.ones(len(failed))),
    ]


def _gauges(path: Path) -> list[Samples]:
    """Waiting requests, of all engines, and the share of KV blocks used, of the fullest, in %."""
    rows = list(_scrapes(path))
    t_ns, waiting, used = np.array(rows, float).reshape(-1, 3).T
    known = [~np.isnan(values) for values in (waiting, used)]
    return [(t_ns[known[0]], waiting[known[0]]), (t_ns[known[1]], 100 * used[known[1]])]


def _scrapes(path: Path) -> Iterator[tuple[float, float, float]]:
    for number, record in enumerate(read_jsonl(path), 1):
        try:
            if record["ok"]:
                waiting, used = (gauge_values(record, gauge) for gauge in (WAITING, KV_USE))
                nan = float("nan")
                yield record["t_ns"], sum(waiting) if waiting else nan, max(used, default=nan)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ArtifactError(f"{path}:{number}: not a metrics record: {error!r}") from None


def _steps(path: Path, sha256: str) -> list[Samples]:
    """Whole engine steps that scheduled tokens, in ms; schedule() where that is all there is."""
    tokens = pl.col("prefill_tokens") + pl.col("decode_tokens")
    busy = (pl.col("process") == "scheduler") & (tokens > 0)
    spent = pl.coalesce("engine_step_us", "step_duration_us") / 1e3
    frames = [
        frame.filter(busy).select("t_ns", spent=spent)
        for frame in read_records(path, STEPS, sha256)
    ]
    table = pl.concat(frames)
    return [(table["t_ns"].to_numpy().astype(float), table["spent"].to_numpy())]


def _yardstick(path: Path, sha256: str) -> list[Samples]:
    """The time of one load from memory, in ns."""
    machine = read_machine(path, sha256)
    return [(machine.t_ns.astype(float), machine.memory_ns / machine.elements)]


# ---- did the server stand still?


class _Request(msgspec.Struct):
    t_send_ns: int | None
    t_first_token_ns: int | None
    t_last_token_ns: int | None
    t_done_ns: int | None
    reads: list[tuple[int, int]] | None = None


def silence(path: Path, steps_ns: Floats, window: MeasuredWindow) -> Silence | None:
    """The longest silence of a cell from the end of its warm-up on; None where it is not known.

    Args:
        path: its requests file, of which the hash has been checked.
        steps_ns: when steps that scheduled tokens were logged.
    """
    with reading(path):
        lines = path.read_bytes().splitlines()
    sent = [r for r in map(msgspec.json.Decoder(_Request).decode, lines) if r.t_send_ns is not None]
    firsts = [r.t_first_token_ns for r in sent if r.t_first_token_ns is not None]
    reads = [t_ns for r in sent for t_ns, _ in r.reads or ()]
    if not firsts or not (reads or len(steps_ns)):
        return None
    lasts = [r.t_last_token_ns for r in sent if r.t_last_token_ns is not None]
    lives = [(r.t_send_ns or 0, r.t_done_ns or window["t_stop_ns"]) for r in sent]
    seen = np.concatenate([firsts, lasts, reads if reads else steps_ns]).astype(float)
    ttfts = [r.t_first_token_ns - r.t_send_ns for r in sent if r.t_first_token_ns and r.t_send_ns]
    bound_s = max(LEAST_S, TTFTS * min(ttfts) / 1e9)
    return Silence(longest_silence_s(lives, seen, window["t_warmup_end_ns"]), bound_s)


def longest_silence_s(lives: Sequence[tuple[int, int]], tokens_ns: Floats, from_ns: float) -> float:
    """The longest time from `from_ns` on with a request in flight and without a token.

    Args:
        lives: when each request was sent, and when it was over, in ns.
        tokens_ns: when tokens came, in any order.
        from_ns: what was before does not count.
    """
    sent, over = np.sort(np.array(lives, float).reshape(-1, 2), axis=0).T
    # A silence begins with a token, or with a request that is alone, and ends where none is left.
    alone = sent[np.searchsorted(sent, sent, "left") == np.searchsorted(over, sent, "right")]
    last = over[np.searchsorted(sent, over, "right") == np.searchsorted(over, over, "right")]
    moments = np.concatenate([tokens_ns, alone, last, [from_ns]])
    moments = np.sort(moments[moments >= from_ns])
    middles = (moments[1:] + moments[:-1]) / 2
    in_flight = np.searchsorted(sent, middles) > np.searchsorted(over, middles)
    return float(np.diff(moments)[in_flight].max(initial=0.0)) / 1e9

"""What one cell's raw records say, a second time: plain numpy and the standard library.

Written from docs/method.md and the papers, and sharing no code with connector_tax.analysis, so that
the two can disagree. Sources: Hyndman & Fan (1996), definition 7; White (1997), MSER-5.
"""

import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from connector_tax.artifacts.study_records import StatisticsSection
from connector_tax.provenance.distributions import Floats, binomial_ranks, mann_whitney_p

Row = dict[str, Any]

PERCENTS = (50, 90, 99)
MAX_CHUNKS = 60
ELEMENTS_AT_ONCE = 4_000_000


def named_generator(name: str) -> np.random.Generator:
    """The documented named stream: PCG64 seeded with the SHA-256 of the name as eight words."""
    words = np.frombuffer(hashlib.sha256(name.encode()).digest(), dtype=np.uint32)
    return np.random.default_rng(words)


def arrival_offsets_ns(
    kind: str, rate_rps: float, until_ns: int, seed: str, gamma_shape: float | None
) -> list[int]:
    """Every arrival before `until_ns`, in ns from the origin, drawn again from the seed's name."""
    if kind == "fixed":
        count = math.ceil(until_ns / 1e9 * rate_rps) + 1
        due = [round(k / rate_rps * 1e9) for k in range(count)]
        return [t for t in due if t < until_ns]
    shape = 1.0 if kind == "poisson" else float(gamma_shape or 0)
    rng = named_generator(seed)
    offsets: list[int] = []
    reached = 0.0
    while reached * 1e9 < until_ns:
        # The documented stream is drawn 4,096 gaps at a time.
        times = reached + np.cumsum(rng.gamma(shape, 1 / (rate_rps * shape), size=4096))
        offsets += [round(float(t) * 1e9) for t in times]
        reached = float(times[-1])
    return [t for t in offsets if t < until_ns]


def prompts_sha256(
    *, model: str, vocab_size: int, shape: tuple[int, int], count: int, seed: str
) -> str:
    """SHA-256 over the bodies of a cell's requests, one a line, drawn again from the seed's name.

    Token ids are uniform in [10, vocab_size).
    """
    rng = named_generator(seed)
    digest = hashlib.sha256()
    for _ in range(count):
        body = {
            "model": model,
            "prompt": rng.integers(10, vocab_size, size=shape[0]).tolist(),
            "max_tokens": shape[1],
            "min_tokens": shape[1],
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        digest.update(json.dumps(body, separators=(",", ":")).encode() + b"\n")
    return digest.hexdigest()


# ---- one cell


class Measured:
    """What the raw requests of one valid cell say; latencies in ms, by intended arrival.

    Args:
        requests: the parsed lines of the requests file.
        window: the cell's window (CLOCK_MONOTONIC ns).
        kept: `seq` of the successes that latencies are taken of; None: all of the window. What is
            about load is over all of them anyway.
    """

    def __init__(
        self,
        requests: Sequence[Row],
        window: Mapping[str, int],
        kept: Collection[int] | None = None,
    ) -> None:
        start, stop = window["t_warmup_end_ns"], window["t_stop_ns"]
        inside = [r for r in requests if start <= r["t_intended_ns"] < stop]
        inside.sort(key=lambda r: (r["t_intended_ns"], r["seq"]))
        ok = [r for r in inside if r["status"] == "ok"]
        self.window_s = (stop - start) / 1e9
        self.arrivals = len(inside)
        self.dropped = sum(r["status"] == "dropped" for r in inside)
        self.failed = self.arrivals - self.dropped - len(ok)
        self.all_n = len(ok)
        self.all_e2e = _ms(ok, "t_intended_ns", "t_last_token_ns")
        self.all_since_s = np.array([(r["t_intended_ns"] - start) / 1e9 for r in ok])
        self.all_ttft = _ms(ok, "t_intended_ns", "t_first_token_ns")
        if kept is not None:
            chosen = set(kept)
            ok = [r for r in ok if r["seq"] in chosen]
        self.n = len(ok)
        self.since_s = np.array([(r["t_intended_ns"] - start) / 1e9 for r in ok])
        self.ttft = _ms(ok, "t_intended_ns", "t_first_token_ns")
        self.e2e = _ms(ok, "t_intended_ns", "t_last_token_ns")
        self.from_send = _ms(ok, "t_send_ns", "t_first_token_ns")
        gaps = np.array([r["completion_tokens"] - 1 for r in ok])
        spans = _ms(ok, "t_first_token_ns", "t_last_token_ns")
        self.tpot = spans / gaps if (gaps > 0).all() else np.array([])

    @property
    def metrics(self) -> dict[str, Floats]:
        """The three latencies by name."""
        return {"ttft": self.ttft, "tpot": self.tpot, "e2e": self.e2e}

    @property
    def throughput_rps(self) -> float:
        """Successes over the window, lengthened by the growth of the backlog."""
        n, e2e = self.all_n, self.all_e2e
        if n == 0:
            return 0.0
        tenth = max(1, n // 10)
        growth_ms = float(np.median(e2e[n - tenth :]) - np.median(e2e[:tenth]))
        return n / (self.window_s + max(0.0, growth_ms / 1e3))

    @property
    def quarters_s(self) -> list[float | None]:
        """Median E2E of each quarter of the window over the first quarter's, in s."""
        medians = []
        for q in range(4):
            low, high = q * self.window_s / 4, (q + 1) * self.window_s / 4
            chosen = (self.all_since_s >= low) & ((self.all_since_s < high) | (q == 3))
            medians.append(float(np.median(self.all_e2e[chosen])) / 1e3 if chosen.any() else None)
        return [None if m is None or medians[0] is None else m - medians[0] for m in medians]


def _ms(requests: Sequence[Row], start: str, end: str) -> Floats:
    return np.array([(r[end] - r[start]) / 1e6 for r in requests])


def percentile_columns(name: str, values: Floats, confidence: float, p99_min: int, n: int) -> Row:
    """`<name>_p50_ms` with `_lo` and `_hi`, and so on for p90 and p99."""
    row: Row = {}
    ordered = np.sort(values)
    for percent in PERCENTS:
        refused = len(values) == 0 or (percent == 99 and n < p99_min)
        low, high = (None, None) if refused else binomial_ranks(len(values), percent, confidence)
        value = math.nan if refused else float(np.percentile(ordered, percent))
        row[f"{name}_p{percent}_ms"] = None if refused else value
        # In a tiny sample the interpolated percentile can lie beyond an order statistic.
        row[f"{name}_p{percent}_lo_ms"] = None if low is None else min(value, ordered[low - 1])
        row[f"{name}_p{percent}_hi_ms"] = None if high is None else max(value, ordered[high - 1])
    return row


def request_columns(cell: Measured, confidence: float, p99_min: int) -> Row:
    """What the requests alone give: a cell's entry in summary.json, part of a row of the tables."""
    row: Row = {"n": cell.n, "window_s": cell.window_s}
    for name, values in cell.metrics.items():
        row |= percentile_columns(name, values, confidence, p99_min, len(values))
    sent = cell.arrivals - cell.dropped
    requested = cell.arrivals / cell.window_s
    return row | {
        "p99_reason": "n too small" if cell.n < p99_min else None,
        "ttft_from_send_p90_ms": float(np.percentile(cell.from_send, 90)) if cell.n else None,
        "requested_throughput_rps": requested,
        "effective_throughput_rps": cell.throughput_rps,
        "throughput_ratio": cell.throughput_rps / requested if cell.arrivals else None,
        "error_rate": cell.failed / sent if sent else None,
        "dropped": cell.dropped,
    }


def stationarity_columns(tpot: Floats, margin: float) -> Row:
    """MSER-5, and the first quarter against the second half, on TPOT in order of arrival."""
    names = ("warming_up", "mser5_discard", "start_change", "start_p")
    m = len(tpot) // 5
    quarter, half = len(tpot) // 4, len(tpot) // 2
    if m < 16 or not float(np.median(tpot[half:])) > 0:
        return dict.fromkeys(names)
    batches = np.array([tpot[5 * i : 5 * i + 5].mean() for i in range(m)])
    kept = [batches[d:] for d in range(m // 2 + 1)]
    scores = [float(((k - k.mean()) ** 2).sum()) / len(k) ** 2 for k in kept]
    discard = scores.index(min(scores)) / m
    change = float(np.median(tpot[:quarter])) / float(np.median(tpot[half:])) - 1
    p = mann_whitney_p(batches[: quarter // 5], batches[half // 5 :])
    warming = p < 0.01 and abs(change) > margin and discard > 0
    return dict(zip(names, (warming, discard, change, p), strict=True))


def waiting_p50(metrics: Sequence[Row], window: Mapping[str, int]) -> float:
    """Median queue length over the scrapes inside the window, label sets summed."""
    name = "vllm:num_requests_waiting"
    depths = [
        sum(v for k, v in scrape["values"].items() if k.split("{")[0] == name)
        for scrape in metrics
        if scrape["ok"] and window["t_warmup_end_ns"] <= scrape["t_ns"] < window["t_stop_ns"]
    ]
    return float(np.median(depths))


# ---- the bootstrap


def chunk_length_s(cells: Sequence[Measured], statistics: StatisticsSection) -> float:
    """Of the time-chunks of one cell, the same in all its launches.

    As long as a request lives (the median E2E, in the launch in which that is longest), or
    `chunk_s` where that is longer; at most 60 in a window.
    """
    lives = [float(np.median(cell.e2e)) / 1e3 for cell in cells if cell.n]
    windows = [cell.window_s / MAX_CHUNKS for cell in cells]
    return max(float(statistics["chunk_s"]), *lives, *windows)


def resampled_logs(
    cell: Measured, length: float, resamples: int, seed_name: str
) -> dict[str, tuple[float, Floats, int]]:
    """metric -> (log of the percentile, logs of its resamples, sample size).

    Contiguous time-chunks of requests, `length` seconds each, are drawn with replacement, as many
    as there are; one draw under the cell's name serves every metric and every launch of a block.
    """
    if cell.n == 0:
        return {}
    labels = np.unique(np.floor(cell.since_s / length), return_inverse=True)[1]
    chunks = int(labels.max()) + 1
    rng = named_generator(seed_name)
    drawn = rng.multinomial(chunks, np.full(chunks, 1 / chunks), size=resamples)
    logs: dict[str, tuple[float, Floats, int]] = {}
    wanted = {"ttft": (90, 50), "tpot": (90, 50), "e2e": (90,)}
    for name, values in cell.metrics.items():
        for percent in wanted[name] if len(values) else ():
            replicates = _resampled_percentile(values, labels, drawn, percent)
            point = float(np.percentile(values, percent))
            if point <= 0 or (replicates <= 0).any():
                continue  # nothing can be divided by it
            logs[f"{name}_p{percent}"] = (math.log(point), np.log(replicates), len(values))
    return logs


def _resampled_percentile(
    values: Floats, labels: NDArray[np.intp], drawn: NDArray[np.int64], percent: int
) -> Floats:
    """The percentile of each resample, which holds every value as often as its chunk was drawn."""
    order = np.argsort(values)
    ordered, sorted_labels = values[order], labels[order]
    result = []
    at_once = max(1, ELEMENTS_AT_ONCE // len(values))
    for first in range(0, len(drawn), at_once):
        upto = np.cumsum(drawn[first : first + at_once][:, sorted_labels], axis=1)
        position = (upto[:, -1] - 1) * (percent / 100)
        rank = np.floor(position)
        lower = ordered[(upto <= rank[:, None]).sum(axis=1)]
        last = np.minimum(rank + 1, upto[:, -1] - 1)
        upper = ordered[(upto <= last[:, None]).sum(axis=1)]
        result.append(lower + (upper - lower) * (position - rank))
    return np.concatenate(result)

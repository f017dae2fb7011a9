"""Measure one valid cell: request latencies, throughput, waiting queue, backlog.

TTFT and E2E begin at the intended time. Requests that arrive in warm-up or drain are excluded, and
failures have no latency. Effective throughput charges a growing backlog to the window, so that
requests served only during the drain do not count as sustained.

Sources: docs/method.md, "Clocks, latencies, success"; Hyndman & Fan (1996), definition 7 (numpy's
`linear`); Le Boudec, "Performance Evaluation of Computer and Communication Systems", theorem 2.1
(exact binomial ranks).
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from connector_tax.analysis.records import REQUESTS, RequestRow, request_table
from connector_tax.artifacts import paths
from connector_tax.artifacts.cell_records import CellRecord, ScrapeLine
from connector_tax.artifacts.folder import CellFolder, decoded, read_blocks
from connector_tax.artifacts.metrics import FAR_TAIL, LATENCY_METRICS, THROUGHPUT_METRICS
from connector_tax.artifacts.names import CLOSED, FAILED, TRACE
from connector_tax.artifacts.saturation import HALF, TENTH, effective_rps
from connector_tax.artifacts.tables import Row
from connector_tax.files import ArtifactError, read_json
from connector_tax.ranks import order_statistic_ranks

WAITING = "vllm:num_requests_waiting"


class Quantile(NamedTuple):
    """A percentile and its interval, in the unit of the data; None if the sample is too small."""

    value: float | None
    lo: float | None
    hi: float | None


def quantile(values: NDArray[np.float64], percent: float, confidence: float) -> Quantile:
    """Return a percentile of `values` (any order, no NaN) with its order-statistic interval."""
    n = len(values)
    if n == 0:
        return Quantile(None, None, None)
    ordered = np.sort(values)
    low, high = order_statistic_ranks(n, percent, confidence)
    value = float(np.percentile(ordered, percent))
    # In a tiny sample the interpolated percentile can lie outside; the interval is then widened.
    return Quantile(
        value,
        None if low is None else min(value, float(ordered[low - 1])),
        None if high is None else max(value, float(ordered[high - 1])),
    )


@dataclass(frozen=True)
class Requests:
    """The successes among a cell's measured arrivals, in order of arrival, and its counts.

    Attributes:
        ttft_ms, ttft_from_send_ms, e2e_ms: (n,) latencies.
        per_token_ms: (n,); NaN where an answer has a single token.
        since_warmup_s: (n,) intended arrival times after the end of the warm-up.
        window_s: length of the measured window.
        arrivals, failed, dropped: counts of the measured arrivals.
        requests_per_s, tokens_per_s: throughput of successes; in a closed loop a request that
            began before the window or ended after it counts in part.
        parts: number of parts of the window; the backlog's growth compares the first and the last.
    """

    ttft_ms: NDArray[np.float64]
    ttft_from_send_ms: NDArray[np.float64]
    per_token_ms: NDArray[np.float64]
    e2e_ms: NDArray[np.float64]
    since_warmup_s: NDArray[np.float64]
    window_s: float
    arrivals: int
    failed: int
    dropped: int
    requests_per_s: float = 0.0
    tokens_per_s: float = 0.0
    parts: int = TENTH

    @property
    def n(self) -> int:
        """Return the number of successes."""
        return len(self.ttft_ms)

    @cached_property
    def tpot_ms(self) -> NDArray[np.float64]:
        """Return the TPOT (m,) of answers with several tokens, in ms."""
        return self.per_token_ms[~np.isnan(self.per_token_ms)]

    def throughputs(self, limits_ms: Mapping[str, float]) -> dict[str, float]:
        """Return THROUGHPUT_METRICS, 1/s.

        Args:
            limits_ms: by latency; goodput counts the requests within all of them; a missing latency
                is not within its limit. If no request counts, half a request is used.
        """
        of = {"ttft": self.ttft_ms, "tpot": self.per_token_ms, "e2e": self.e2e_ms}
        good = np.ones(self.n, bool)
        for name, limit_ms in limits_ms.items():
            good &= of[name] <= limit_ms
        share = max(float(good.sum()), 0.5) / self.n if self.n else 0.0
        values = self.requests_per_s, self.tokens_per_s, share * self.requests_per_s
        return dict(zip(THROUGHPUT_METRICS, values, strict=True))

    @cached_property
    def percentiles_ms(self) -> dict[str, float]:
        """Return the percentiles of LATENCY_METRICS for the latencies that the cell has."""
        return {
            name: float(np.percentile(values, metric.percent))
            for name, metric in LATENCY_METRICS.items()
            if len(values := getattr(self, metric.latency))
        }

    @property
    def backlog_by_quarter_s(self) -> list[float | None]:
        """Return each quarter's median E2E minus the first quarter's median E2E, in s."""
        edges = np.linspace(0, self.window_s, 5)[1:-1]
        quarter = np.searchsorted(edges, self.since_warmup_s, side="right")
        medians = [
            float(np.median(self.e2e_ms[quarter == q])) / 1e3 if np.any(quarter == q) else None
            for q in range(4)
        ]
        first = medians[0]
        return [None if m is None or first is None else m - first for m in medians]

    @property
    def requested_rps(self) -> float:
        """Return the measured arrivals divided by the window."""
        return self.arrivals / self.window_s

    @property
    def effective_rps(self) -> float:
        """Return the successes divided by the window plus the backlog's growth."""
        return effective_rps(self.e2e_ms, self.window_s, self.parts)

    @property
    def throughput_ratio(self) -> float | None:
        """Return effective over requested throughput; None without arrivals."""
        return self.effective_rps / self.requested_rps if self.arrivals else None

    @property
    def error_rate(self) -> float | None:
        """Return failures over the arrivals that the in-flight cap did not drop."""
        sent = self.arrivals - self.dropped
        return self.failed / sent if sent else None


def requests_of(path: Path, rows: Iterable[RequestRow], record: CellRecord) -> Requests:
    """Return the latencies and counts of a cell's measured requests.

    Args:
        path: the requests file, for messages.

    Raises:
        ArtifactError: the stamps of a success are out of order.
    """
    start, stop = record["window"]["t_warmup_end_ns"], record["window"]["t_stop_ns"]
    if not stop > start:
        raise ArtifactError(
            f"{path}: the cell's window ends at {stop}, before it starts at {start}"
        )
    every = list(rows)
    measured = [row for row in every if start <= row.t_intended_ns < stop]
    measured.sort(key=lambda row: (row.t_intended_ns, row.seq))
    ok = [row for row in measured if row.status == "ok"]
    intended, sent, first, last, tokens = (
        np.array([getattr(row, name) for row in ok], np.int64)
        for name in (
            "t_intended_ns", "t_send_ns", "t_first_token_ns", "t_last_token_ns",
            "completion_tokens",
        )
    )  # fmt: skip
    wrong = np.flatnonzero((first < sent) | (last < first) | (tokens < 1))
    if len(wrong):
        raise ArtifactError(
            f"{path}: the success with seq {ok[wrong[0]].seq} has its stamps out of order"
            " (send <= first token <= last token) or no completion token"
        )
    several, states = tokens > 1, Counter(row.status for row in measured)
    per_token = np.where(several, (last - first) / np.maximum(tokens - 1, 1) / 1e6, np.nan)
    if record["schedule"]["kind"] == CLOSED:
        requests_per_s, tokens_per_s = _throughput(every, start, stop)
    else:
        requests_per_s, tokens_per_s = (n * 1e9 / (stop - start) for n in (len(ok), tokens.sum()))
    return Requests(
        ttft_ms=(first - intended) / 1e6,
        ttft_from_send_ms=(first - sent) / 1e6,
        per_token_ms=per_token,
        e2e_ms=(last - intended) / 1e6,
        since_warmup_s=(intended - start) / 1e9,
        window_s=(stop - start) / 1e9,
        arrivals=len(measured),
        failed=sum(states[status] for status in FAILED),
        dropped=states["dropped"],
        requests_per_s=requests_per_s,
        tokens_per_s=float(tokens_per_s),
        parts=HALF if record["schedule"]["kind"] == TRACE else TENTH,
    )


def _throughput(rows: Sequence[RequestRow], start: int, stop: int) -> tuple[float, float]:
    """Return the requests/s and tokens/s of the successes in a closed loop's window.

    A request counts with the share of its time that lies in the window: if whole requests were
    counted, the number would jump when N places end at once.
    """
    ok = [row for row in rows if row.status == "ok"]
    sent, last, tokens = (
        np.array([getattr(row, name) for row in ok], np.float64)
        for name in ("t_send_ns", "t_last_token_ns", "completion_tokens")
    )
    inside = np.clip(np.minimum(last, stop) - np.maximum(sent, start), 0, None)
    shares = inside / np.maximum(last - sent, 1)
    seconds = (stop - start) / 1e9
    return float(shares.sum() / seconds), float((shares * tokens).sum() / seconds)


def gauge_values(record: ScrapeLine, gauge: str) -> list[float]:
    """Return the values of a gauge in a line of a metrics file, for all label sets.

    Raises:
        KeyError, TypeError, AttributeError, ValueError: the line is not a metrics record.
    """
    values = record["values"].items()
    return [float(value) for name, value in values if name.partition("{")[0] == gauge]


def measure_waiting(cell: CellFolder) -> float | None:
    """Return the median of vllm:num_requests_waiting over the scrapes in a cell's measured window.

    The cell must be valid. Returns None for a server without vLLM's metric names. The result is
    cached.

    Raises:
        ArtifactError: the file differs from the index, or a scrape lacks the gauge.
    """
    return cell.kept("waiting", lambda: _waiting(cell))


def _waiting(cell: CellFolder) -> float | None:
    assert cell.record is not None
    path, window = cell.file("metrics"), cell.record["window"]
    scrapes = decoded(path, cell.blocks("metrics"), msgspec.json.Decoder(dict[str, Any]).decode)
    depths, of_vllm = [], False
    for number, record in enumerate(itertools.chain.from_iterable(scrapes), 1):
        try:
            inside = window["t_warmup_end_ns"] <= record["t_ns"] < window["t_stop_ns"]
            if not (inside and record["ok"]):
                continue
            series = gauge_values(cast(ScrapeLine, record), WAITING)
            of_vllm = of_vllm or any(name.startswith("vllm:") for name in record["values"])
        except (KeyError, TypeError, ValueError) as error:
            raise ArtifactError(f"{path}:{number}: not a metrics record: {error!r}") from None
        if not series and not of_vllm:
            continue
        if not series:
            raise ArtifactError(f"{path}:{number}: no {WAITING} among the values")
        depths.append(sum(series))
    return float(np.median(depths)) if depths else None


def measure_requests(cell: CellFolder) -> Requests:
    """Return the measured requests of a valid or void cell; the result is cached.

    Raises:
        ArtifactError: the index does not list the file, the file differs from the index, or a line
            is malformed.
    """

    def read() -> Requests:
        assert cell.record is not None
        path = cell.file("requests")
        rows = [row for block in REQUESTS.rows(path, cell.blocks("requests")) for row in block]
        request_table(cell, rows)
        return requests_of(path, rows, cell.record)

    return cell.kept("requests", read)


def summarise_cell(cell_dir: Path) -> Row:
    """Return the percentiles of the cell in a folder, for the launch's `summary.json`.

    Returns:
        The entry as from `summary_of`.

    Raises:
        ArtifactError: a file is missing or malformed.
    """
    records = sorted(cell_dir.glob("cell_*.json"))
    if len(records) != 1:
        raise ArtifactError(f"{cell_dir}: found {len(records)} files cell_*.json; allowed: 1")
    record: CellRecord = read_json(records[0])
    file = cell_dir / paths.cell_log("requests", record["phase"], record["cell"])
    rows = itertools.chain.from_iterable(REQUESTS.rows(file, read_blocks(file, None)))
    return summary_of(requests_of(file, rows, record))


def summary_of(requests: Requests) -> Row:
    """Return the entry of a cell in `summary.json`.

    Returns:
        n, window_s, requested and effective throughput (1/s), error_rate, and for ttft, tpot and
        e2e the p50, p90 and p99 (from 1,000 requests) in ms with their 95% intervals.
    """
    return request_columns(requests, confidence=0.95, p99_min_samples=1000)


def request_columns(requests: Requests, confidence: float, p99_min_samples: int) -> Row:
    """Return the columns of cells.csv that need only the requests; units are ms and 1/s."""
    row: Row = {"n": requests.n, "window_s": requests.window_s}
    refused = requests.n < p99_min_samples
    for name, metric in LATENCY_METRICS.items():
        unknown = refused and metric.percent >= FAR_TAIL
        values = np.empty(0) if unknown else getattr(requests, metric.latency)
        ends = quantile(values, metric.percent, confidence)
        row |= {
            f"{name}{bound}_ms": end for bound, end in zip(("", "_lo", "_hi"), ends, strict=True)
        }
    row["ttft_from_send_p90_ms"] = (
        float(np.percentile(requests.ttft_from_send_ms, 90)) if requests.n else None
    )
    row["requested_throughput_rps"] = requests.requested_rps
    row["effective_throughput_rps"] = requests.effective_rps
    row["throughput_ratio"] = requests.throughput_ratio
    row["error_rate"] = requests.error_rate
    row["dropped"] = requests.dropped
    return row

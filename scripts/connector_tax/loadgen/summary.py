"""What became of a run: requests as they end, to a file and to the eye, and their summary."""

import contextlib
import sys
import time
from array import array
from collections import Counter, deque
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from connector_tax.files import standard_stream
from connector_tax.loadgen.generator import CellResult
from connector_tax.loadgen.health import ADVICE, WRONG, Check
from connector_tax.loadgen.messages import FAILURES, LINE_FIELDS, TOLERATED, RequestRecord
from connector_tax.loadgen.plan import Progress
from connector_tax.loadgen.rule import CONFIDENCE
from connector_tax.ranks import order_statistic_ranks, percentile_of

PENDING_BYTES = 1 << 20
"""Of lines before they are written, whether or not it is time to show how the run goes."""
RECENT = 200
"""Successes over which the running percentiles are taken."""


class RecordSink:
    """Takes each request once, writes its line, and drops the stamps of its reads.

    `itl_ms`: the gaps between successive reads that brought tokens, of the measured successes; 4
    bytes each, where the records would keep 16. `problem`: why the file could not be written.
    """

    def __init__(self, path: Path | None) -> None:
        """Open the file, which is written as it stands; raises OSError."""
        self.itl_ms = array("f")
        self.problem: str | None = None
        self._path = path
        self._lines = bytearray()
        self._written = 0  # bytes, all of them whole lines
        self._stream: BinaryIO | FileIO | None = None
        if path is not None:
            self._stream = standard_stream(path) or path.open("wb", buffering=0)
        self._encode = msgspec.json.Encoder().encode
        self._recent_ms: deque[float] = deque(maxlen=RECENT)
        self._tokens = 0
        self._told = (0.0, 0)
        self._terminal = sys.stderr.isatty()
        self._next_s = 0.0

    def take(self, record: RequestRecord) -> None:
        """Take a request that has ended."""
        if self._stream is not None:
            self._lines += self._encode(record.fields(LINE_FIELDS)) + b"\n"
            if len(self._lines) > PENDING_BYTES:
                self._flush()
        if record.status == "ok" and record.t_first_token_ns is not None:
            self._recent_ms.append((record.t_first_token_ns - record.t_intended_ns) / 1e6)
            self._tokens += record.completion_tokens or 0
        if record.raw_reads is not None:
            if record.status == "ok" and record.measured:
                stamps = np.frombuffer(record.raw_reads, np.int64)[::2]
                self.itl_ms.frombytes((np.diff(stamps) / 1e6).astype(np.float32).tobytes())
            record.raw_reads = None

    def progress(self, progress: Progress) -> None:
        """Let what was written reach the file; show how the run goes.

        By a line that is rewritten in a terminal, and a new one every five seconds elsewhere.
        """
        self._flush()
        if progress.elapsed_s < self._next_s:
            return
        self._next_s = progress.elapsed_s + (1.0 if self._terminal else 5.0)
        since_s, tokens = self._told
        self._told = progress.elapsed_s, self._tokens
        rate = (self._tokens - tokens) / max(progress.elapsed_s - since_s, 1e-9)
        latest = ""
        if self._recent_ms:
            p50, p90 = np.percentile(self._recent_ms, (50, 90))
            latest = f", TTFT p50 {p50:.1f} p90 {p90:.1f} ms, {rate:,.0f} tokens/s"
        print(
            f"{progress.elapsed_s:7.1f} s  {progress.issued} sent, {progress.inflight} in "
            f"flight, {progress.ok} ok, {progress.failed} failed{latest}",
            end="\x1b[K\r" if self._terminal else "\n", file=sys.stderr, flush=True,
        )  # fmt: skip

    def close(self) -> None:
        """Write what is left; leave the line of progress standing."""
        self._leave_line()
        self._flush()
        if isinstance(self._stream, FileIO):
            self._stream.close()
        self._stream = None

    def _flush(self) -> None:
        data, self._lines = memoryview(self._lines), bytearray()
        stream = self._stream
        if stream is None or not data:
            return
        try:
            left = data
            while left:
                left = left[stream.write(left) :]
            stream.flush()
            self._written += len(data)
        except OSError as error:
            self._stream = None
            with contextlib.suppress(OSError):  # a pipe or a device
                stream.truncate(self._written)
            self.problem = f"{self._path}: {error.strerror}; it has what came before"
            self._leave_line()
            print(f"error: {self.problem}; the run goes on", file=sys.stderr)

    def _leave_line(self) -> None:
        if self._terminal and self._next_s:
            print(file=sys.stderr)


def utc_offset_ns() -> int:
    """UTC less CLOCK_MONOTONIC, in ns: by this the stamps can be joined to a server's log."""
    tries = []
    for _ in range(5):
        before = time.monotonic_ns()
        wall = time.time_ns()
        after = time.monotonic_ns()
        tries.append((after - before, wall - (before + after) // 2))
    return min(tries)[1]


P99_MIN_SAMPLES = 1000
PERCENTS = (50, 90, 99)
TEXTS = 3
"""The commonest texts of a kind of failure that are told."""
SHARED_FIRST_MAX = 0.01


def latencies_ms(record: RequestRecord) -> dict[str, float]:
    """Return the latencies of a success, in ms, from the intended send time.

    TTFT is that of the first token, TTFA of the first that is no reasoning.
    TPOT = (last token - first token) / (completion_tokens - 1).
    """
    due_ns, first_ns, last_ns = (
        record.t_intended_ns,
        record.t_first_token_ns,
        record.t_last_token_ns,
    )
    if record.status != "ok" or first_ns is None or last_ns is None:
        return {}
    latencies = {"TTFT": (first_ns - due_ns) / 1e6, "E2E": (last_ns - due_ns) / 1e6}
    if record.t_first_answer_ns is not None:
        latencies["TTFA"] = (record.t_first_answer_ns - due_ns) / 1e6
    if (record.completion_tokens or 0) > 1 and last_ns > first_ns:
        latencies["TPOT"] = (last_ns - first_ns) / 1e6 / ((record.completion_tokens or 0) - 1)
    return latencies


def summarise(
    result: CellResult,
    checks: Sequence[Check],
    itl_ms: "array[float]",
    slos_ms: Sequence[tuple[str, float]],
) -> dict[str, Any]:
    """Return what the measured requests say. Times are in s and ms.

    Rates are over the time from the beginning of the window to the last answer to it.

    Args:
        itl_ms: gaps between successive reads that brought tokens; sorted here.
        slos_ms: latencies that a request must keep to count as good.
    """
    records = [record for record in result.requests if record.measured]
    window_s = max((result.t_stop_ns - result.t_warmup_end_ns) / 1e9, 1e-9)
    last_ns = max((r.t_done_ns or 0 for r in records), default=0)
    served_s = max((last_ns - result.t_warmup_end_ns) / 1e9, window_s)
    ok = [record for record in records if record.status == "ok"]
    tokens = sum(record.completion_tokens or 0 for record in ok)
    latencies = [latencies_ms(record) for record in ok]
    series = {
        name: np.sort([row[name] for row in latencies if name in row])
        for name in ("TTFT", "TTFA", "TPOT", "E2E")
    }
    gaps = np.frombuffer(itl_ms, np.float32)
    gaps.sort()
    series["ITL"] = gaps
    waits = sum(values.get("pool_waits", 0) for values in result.health["processes"].values())
    return {
        "window_s": window_s,
        "served_s": served_s,
        "requests": len(records),
        "unmeasured": len(result.requests) - len(records),
        "ok": len(ok),
        "failed": _failures(records),
        "retried": sum(record.retries for record in records),
        "tolerated": Counter(record.tolerated for record in ok if record.tolerated is not None),
        "counted_by_client": sum(record.counted_by == "client" for record in ok),
        "waited_for_connection": int(waits),
        "first_token_shared": sum((record.first_read_tokens or 1) > 1 for record in ok),
        "requests_per_s": len(ok) / served_s,
        "tokens_per_s": tokens / served_s,
        "latency_ms": {k: _quantiles(k, v) for k, v in series.items() if len(v)},
        "goodput": _goodput(latencies, slos_ms, len(records), served_s) if slos_ms else None,
        "clock": result.clock,
        "traffic_ended_by": result.cooldown_ended_by,
        "bodies_sha256": result.bodies_sha256,
        "checks": [msgspec.structs.asdict(check) for check in checks],
        "load_generator": result.health,
    }


def _failures(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """By kind: how many, and the commonest texts with their counts."""
    texts: dict[str, Counter[str]] = {}
    for record in records:
        if record.error_kind is not None:
            texts.setdefault(record.error_kind, Counter())[record.error_detail or ""] += 1
    return {
        kind: {
            "count": counts.total(),
            "texts": {text: count for text, count in counts.most_common(TEXTS) if text},
        }
        for kind, counts in sorted(texts.items())
    }


def _goodput(
    latencies: Sequence[dict[str, float]],
    slos_ms: Sequence[tuple[str, float]],
    requests: int,
    served_s: float,
) -> dict[str, Any]:
    """How many requests kept every one of `slos_ms`; a latency that does not exist is kept."""
    good = sum(all(row.get(name, 0.0) <= limit for name, limit in slos_ms) for row in latencies)
    return {
        "slo_ms": dict(slos_ms),
        "good": good,
        "share": good / requests if requests else None,
        "requests_per_s": good / served_s,
    }


def _quantiles(name: str, ordered: "NDArray[np.floating[Any]]") -> dict[str, Any]:
    """n, mean, max and percentiles with their order-statistic intervals, null where there is none.

    ITL has no intervals: the gaps of one stream are not independent.
    """
    n = len(ordered)
    row: dict[str, Any] = {"n": n, "mean": float(np.mean(ordered, dtype=np.float64))}
    for percent in PERCENTS:
        row[f"p{percent}"] = percentile_of(ordered, percent)
        row[f"p{percent}_interval"] = None
        if name == "ITL" or (percent == 99 and n < P99_MIN_SAMPLES):
            continue
        low, high = order_statistic_ranks(n, percent, CONFIDENCE)
        if low is not None and high is not None:
            row[f"p{percent}_interval"] = [float(ordered[low - 1]), float(ordered[high - 1])]
    return row | {"max": float(ordered[-1])}


def print_summary(summary: dict[str, Any], stream: TextIO) -> None:
    """Print outcome counts, latencies and what the checks found."""
    console = Console(file=stream, width=110, highlight=False, markup=False)
    console.print(
        f"{summary['requests']} requests in {summary['window_s']:.1f} s, answered in "
        f"{summary['served_s']:.1f} s: {summary['ok']} ok ({summary['requests_per_s']:.2f} "
        f"requests/s, {summary['tokens_per_s']:.1f} tokens/s)"
    )
    for kind, failures in summary["failed"].items():
        console.print(f"  {failures['count']} {kind}: {FAILURES[kind][1]}")
        for text, count in failures["texts"].items():
            console.print(f"      {count} x {text}")
    for note in (*_notes(summary), *summary.get("notes", ())):
        console.print(f"note: {note}")
    if (goodput := summary["goodput"]) is not None:
        limits = ", ".join(f"{name} {limit:g} ms" for name, limit in goodput["slo_ms"].items())
        share = "-" if goodput["share"] is None else f"{100 * goodput['share']:.1f}%"
        console.print(
            f"goodput within {limits}: {goodput['requests_per_s']:.2f} requests/s, {share} of all"
        )
    if summary["latency_ms"]:
        latency = Table("ms", "n", "mean", "p50", "p90", "p99", "max",
                        title="latency of successes, 95% CI")  # fmt: skip
        for name, row in summary["latency_ms"].items():
            cells = [_cell(row[f"p{percent}"], row[f"p{percent}_interval"]) for percent in PERCENTS]
            latency.add_row(name, f"{row['n']}", f"{row['mean']:.3f}", *cells, f"{row['max']:.3f}")
        console.print(latency)
    checks = summary["checks"]
    console.print(f"{sum(check['passed'] for check in checks)} of {len(checks)} checks pass")
    for check in checks:
        if not check["passed"]:
            value = "no data" if check["value"] is None else f"{check['value']:.4g}"
            name = check["name"]
            console.print(f"FAIL {name} is {value}, allowed {check['bound']}: {WRONG[name]}")
            console.print(f"     {ADVICE[name]}")


def _notes(summary: dict[str, Any]) -> list[str]:
    """What a reader should know of numbers that are there."""
    ok, shared = summary["ok"], summary["first_token_shared"]
    notes = [f"{count} of {ok}: {TOLERATED[name]}" for name, count in summary["tolerated"].items()]
    if summary["counted_by_client"]:
        notes.append(
            f"{summary['counted_by_client']} of {ok} without usage: tokens are the token events "
            "that came, so a server that puts two tokens into one event is counted short"
        )
    if shared > SHARED_FIRST_MAX * ok:
        notes.append(
            f"{shared} of {ok}: the first read brought several tokens, so TTFT is that of a later "
            "one (the server sends them together, or this machine reads too late)"
        )
    if summary["retried"]:
        notes.append(f"{summary['retried']} sent again: a connection from the pool was dead")
    if summary["waited_for_connection"]:
        notes.append(f"{summary['waited_for_connection']} waited for a connection (--connections)")
    return notes


def _cell(value: float, interval: Sequence[float] | None) -> str:
    if interval is None:
        return f"{value:.3f}"
    return f"{value:.3f} ({interval[0]:.3f} to {interval[1]:.3f})"

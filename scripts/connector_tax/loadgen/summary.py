"""What became of a run: requests as they end, to a file and to the eye; its checks; its summary.

The checks ask whether the load generator did what the schedule says. Every check has a value and a
bound, is two-sided where the quantity can err both ways, and fails when its data are missing. Those
that a study's cells have too have its names, bounds and sentences.
"""

import contextlib
import sys
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, Literal, TextIO

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from connector_tax.artifacts.cell_records import CheckRecord
from connector_tax.artifacts.checks import (
    BOUNDS,
    CHECKS,
    at_most,
    generator_checks,
    schedule_check,
)
from connector_tax.files import standard_stream, write_all
from connector_tax.loadgen.generator import CellResult
from connector_tax.loadgen.messages import (
    FAILURES,
    LINE_FIELDS,
    PAUSE_AFTER,
    PAUSE_NS,
    TOLERATED,
    RequestRecord,
)
from connector_tax.loadgen.plan import CONFIDENCE, Progress
from connector_tax.loadgen.traffic import Load
from connector_tax.ranks import order_statistic_ranks, percentile_of

# ---- requests as they end

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
        self._file: FileIO | None = None  # none of the standard streams
        if path is not None:
            self._stream = standard_stream(path)
            if self._stream is None:
                self._stream = self._file = path.open("wb", buffering=0)
        self._encode = msgspec.json.Encoder().encode
        self._recent_ms: deque[float] = deque(maxlen=RECENT)
        self._tokens = 0
        self._told = (0.0, 0)
        self._terminal = sys.stderr.isatty()
        self._next_s = 0.0

    def take(self, record: RequestRecord) -> None:
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
        if self._file is not None:
            self._file.close()
        self._stream = None

    def _flush(self) -> None:
        data, self._lines = self._lines, bytearray()
        stream = self._stream
        if stream is None or not data:
            return
        try:
            write_all(stream, data)
            self._written += len(data)
        except OSError as error:
            self._stream = None
            if self._file is not None:
                with contextlib.suppress(OSError):  # a pipe or a device
                    self._file.truncate(self._written)
            self.problem = f"{self._path}: {error.strerror}; it has what came before"
            self._leave_line()
            print(f"error: {self.problem}; the run goes on", file=sys.stderr)

    def _leave_line(self) -> None:
        if self._terminal and self._next_s:
            print(file=sys.stderr)


# ---- sessions and latencies


class SessionOutcome(msgspec.Struct, kw_only=True):
    """What became of a session that started; times are CLOCK_MONOTONIC ns.

    `t_start_ns` is when its first request was sent (null: none was), less that request's own wait;
    `t_end_ns` when its last one ended. `status`: `cut` when the run ended before the session.
    """

    session: str
    status: Literal["ok", "failed", "cut"]
    requests: int
    ok: int
    t_start_ns: int | None
    t_end_ns: int


def session_outcomes(records: Sequence[RequestRecord]) -> list[SessionOutcome]:
    """Return one outcome per session, in the order of their first requests."""
    by_session: dict[str, list[RequestRecord]] = {}
    for record in records:
        by_session.setdefault(record.session, []).append(record)
    outcomes = []
    for session, own in by_session.items():
        kinds = [r.error_kind for r in own]
        starts = [r.t_send_ns - r.wait_after_ready_ns for r in own if r.t_send_ns is not None]
        outcome = SessionOutcome(
            session=session,
            status="cut" if "run_ended" in kinds else "failed" if any(kinds) else "ok",
            requests=len(kinds),
            ok=kinds.count(None),
            t_start_ns=min(starts, default=None),
            t_end_ns=max(r.t_done_ns or 0 for r in own),
        )
        outcomes.append(outcome)
    return outcomes


def latencies_ms(record: RequestRecord) -> dict[str, float]:
    """Return the latencies of a success, in ms, from the intended send time.

    TTFT is that of the first token, TTFA of the first that is no reasoning.
    TPOT = (last token - first token) / (completion_tokens - 1).
    """
    due_ns, first_ns = record.t_intended_ns, record.t_first_token_ns
    last_ns = record.t_last_token_ns
    if record.status != "ok" or first_ns is None or last_ns is None:
        return {}
    latencies = {"TTFT": (first_ns - due_ns) / 1e6, "E2E": (last_ns - due_ns) / 1e6}
    if record.t_first_answer_ns is not None:
        latencies["TTFA"] = (record.t_first_answer_ns - due_ns) / 1e6
    if (record.completion_tokens or 0) > 1 and last_ns > first_ns:
        latencies["TPOT"] = (last_ns - first_ns) / 1e6 / ((record.completion_tokens or 0) - 1)
    return latencies


# ---- checks

SESSION_DELAY_P99_MS = 5.0
# Of the checks that a study has not: what is wrong where one fails.
WRONG = {name: check.void for name, check in CHECKS.items()} | {
    "dropped": "requests were dropped at the in-flight cap",
    "intra_session_delay_p99_ms": "requests were sent late after their parents (p99)",
    "intra_session_early_ms": "a request was sent before its parents had ended",
    "concurrent_sessions_max": "more sessions were active than asked for",
    "session_start_delay_p99_ms": "a free place was taken late (p99)",
}
_BUSY = "stop what else runs on its CPUs, give it more of them, or lower the load"
# What a user can do where a check fails.
ADVICE = {
    "schedule_lag_p99_ms": _BUSY,
    "early_send_ms": "a fault of the load generator: report it",
    "sent_rate_ratio": "lower --rate, or raise --workers",
    "error_rate": "read the failures above; lower the load, or raise --timeout",
    "dropped": "the server does not keep up: lower --rate, or raise --inflight-cap",
    "intra_session_delay_p99_ms": _BUSY,
    "intra_session_early_ms": "a fault of the load generator: report it",
    "concurrent_sessions_max": "a fault of the load generator: report it",
    "session_start_delay_p99_ms": _BUSY,
    "loop_lag_p99_ms": _BUSY,
    "loop_lag_max_ms": _BUSY,
    "cpu_share": "raise --workers, or lower the load",
    "workers_died": "read the messages above; look whether memory ran out",
    "silent_workers": "read the messages above; look whether memory ran out",
    "unopened_connections": "lower --connections, or look why the server takes no more",
    "unstamped_reads": "the clock was set during the run: repeat it",
    "lost_messages": "raise --workers, or lower the load",
}


Checks = dict[str, CheckRecord]
"""By name; a value is null when there are no data, which fails."""


def verify(result: CellResult, load: Load) -> Checks:
    requests, stop_ns = result.requests, result.t_stop_ns
    measured = [record for record in requests if record.measured]
    checks = check_requests(measured)
    if load.offsets_ns is None:
        ramp = load.concurrency, result.t_origin_ns, load.rampup_ns
        checks |= check_concurrency(requests, len(load.sessions), ramp, stop_ns)
    elif len(load.sessions) > 1 and load.offsets_ns[-1] > load.offsets_ns[0]:
        starts_ns = (load.offsets_ns + result.t_origin_ns).tolist()
        due_ns = [t for t in starts_ns if result.t_warmup_end_ns <= t < stop_ns]
        checks["sent_rate_ratio"] = check_sent_rate(measured, due_ns)
    if any(record.parents for record in requests):
        checks |= check_intra_session(requests)
    return checks | generator_checks(result.health, result.clock, BOUNDS)


def check_requests(records: Sequence[RequestRecord]) -> Checks:
    """Check lag, early sends, dropped requests and errors."""
    lags_ms = [(r.t_send_ns - r.t_intended_ns) / 1e6 for r in records if r.t_send_ns is not None]
    ttfts_ms = [row["TTFT"] for row in map(latencies_ms, records) if row]
    failed = sum(r.status in ("error", "timeout") for r in records)
    attempted = sum(r.status != "cancelled" for r in records)
    error_rate = failed / attempted if attempted else None
    return {
        "schedule_lag_p99_ms": schedule_check(lags_ms, ttfts_ms, BOUNDS),
        "early_send_ms": at_most(-min(lags_ms) if lags_ms else None, 0.0),
        "error_rate": at_most(error_rate, BOUNDS["max_error_rate"]),
        "dropped": at_most(float(sum(r.status == "dropped" for r in records)), 0.0),
    }


def check_sent_rate(
    records: Sequence[RequestRecord], planned_starts_ns: Sequence[int]
) -> CheckRecord:
    """Check the rate at which sessions were dispatched against the plan, both ways.

    The first request that a session sent stands for its start; `planned_starts_ns` are the starts
    due within the run.
    """
    first: dict[str, int] = {}
    for record in records:
        if record.t_send_ns is not None and not record.parents:
            begin_ns = record.t_send_ns - record.wait_after_ready_ns
            first[record.session] = min(begin_ns, first.get(record.session, begin_ns))
    tolerance = BOUNDS["sent_rate_tolerance"]
    bound = [1 - tolerance, 1 + tolerance]
    planned_span = planned_starts_ns[-1] - planned_starts_ns[0] if planned_starts_ns else 0
    span = max(first.values()) - min(first.values()) if first else 0
    if planned_span <= 0 or span <= 0:
        return {"value": None, "bound": bound, "pass": False}
    ratio = (len(first) - 1) / span / ((len(planned_starts_ns) - 1) / planned_span)
    return {"value": ratio, "bound": bound, "pass": abs(ratio - 1) <= tolerance}


def check_intra_session(records: Sequence[RequestRecord]) -> Checks:
    """Check that every request with parents was sent when they had ended plus its wait: not before,
    and not late. Computed anew from the stamps of the parents, not from the scheduler's due times.
    """
    ended = {(record.session, record.node): record.t_done_ns for record in records}
    delays_ms: list[float] = []
    for record in records:
        if not record.parents or record.t_send_ns is None:
            continue
        ends = [ended.get((record.session, parent)) for parent in record.parents]
        if None in ends:
            return {"intra_session_delay_p99_ms": at_most(None, SESSION_DELAY_P99_MS)}
        due_ns = max(end for end in ends if end is not None) + record.wait_after_ready_ns
        delays_ms.append((record.t_send_ns - due_ns) / 1e6)
    return {
        "intra_session_delay_p99_ms": at_most(_p99(delays_ms), SESSION_DELAY_P99_MS),
        "intra_session_early_ms": at_most(-min(delays_ms) if delays_ms else None, 0.0),
    }


def check_concurrency(
    records: Sequence[RequestRecord], sessions: int, ramp: tuple[int, int, int], stop_ns: int
) -> Checks:
    """Check that never more than the target's sessions were under way at once, and no fewer: each
    of the `sessions` must start when its place is there, which is when enough others have ended.
    A session that never started though it had a place before `stop_ns` counts as late as that.
    `ramp`: the target, which the places reach linearly from this origin over that time (ns).
    """
    target, origin_ns, ramp_ns = ramp
    outcomes = session_outcomes(records)
    spans = [(o.t_start_ns, o.t_end_ns) for o in outcomes if o.t_start_ns is not None]
    starts = sorted(begin for begin, _ in spans)
    # A place is free when its session has ended, or after the pause that a failure asks for.
    free: dict[str, int] = defaultdict(int)
    for record in records:
        pause_ns = PAUSE_NS if record.error_kind in PAUSE_AFTER else 0
        free[record.session] = max(free[record.session], (record.t_done_ns or 0) + pause_ns)
    ends = sorted(free[o.session] for o in outcomes if o.status != "cut")
    delays_ms = []
    for k in range(sessions):
        place = min(k + 1, target)
        due_ns = origin_ns + ramp_ns * place // target
        if k >= target:
            if k - target >= len(ends):
                break
            due_ns = max(due_ns, ends[k - target])
        if due_ns >= stop_ns:
            break
        delays_ms.append(((starts[k] if k < len(starts) else stop_ns) - due_ns) / 1e6)
    # At equal times an end counts before a start.
    late_ms = _p99(delays_ms) if starts else None
    edges = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    highest = float(np.cumsum([step for _, step in edges]).max()) if edges else None
    return {
        "concurrent_sessions_max": at_most(highest, float(target)),
        "session_start_delay_p99_ms": at_most(late_ms, SESSION_DELAY_P99_MS),
    }


def _p99(values: Sequence[float]) -> float | None:
    return float(np.percentile(values, 99)) if values else None


def _bound_text(bound: float | list[float]) -> str:
    return f"1 ± {bound[1] - 1:g}" if isinstance(bound, list) else f"<= {bound:g}"


# ---- the summary

P99_MIN_SAMPLES = 1000
PERCENTS = (50, 90, 99)
TEXTS = 3
"""The commonest texts of a kind of failure that are told."""
SHARED_FIRST_MAX = 0.01


def summarise(
    result: CellResult,
    checks: Checks,
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
    ok = [record for record in records if record.status == "ok"]
    last_ns = max((record.t_last_token_ns or 0 for record in ok), default=0)
    served_s = max((last_ns - result.t_warmup_end_ns) / 1e9, window_s)
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
        "checks": [
            {
                "name": name,
                "value": check["value"],
                "bound": _bound_text(check["bound"]),
                "passed": check["pass"],
            }
            for name, check in checks.items()
        ],
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
    console = Console(file=stream, width=110, highlight=False, markup=False)
    console.print(
        f"{summary['requests']} requests in {summary['window_s']:.1f} s, answered in "
        f"{summary['served_s']:.1f} s: {summary['ok']} ok ({summary['requests_per_s']:.2f} "
        f"requests/s, {summary['tokens_per_s']:.1f} tokens/s)"
    )
    for kind, failures in summary["failed"].items():
        console.print(f"  {failures['count']} {kind}: {FAILURES[kind][1]}")
        texts = failures["texts"]
        for text, count in texts.items():
            console.print(f"      {count} x {text}")
        if texts and (others := failures["count"] - sum(texts.values())):
            console.print(f"      {others} x other texts")
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
        name, value = check["name"], check["value"]
        if value is None:
            console.print(f"FAIL {name}: no data")
        elif not check["passed"]:
            console.print(f"FAIL {name} is {value:.4g}, allowed {check['bound']}: {WRONG[name]}")
            console.print(f"     {ADVICE[name]}")


def _notes(summary: dict[str, Any]) -> list[str]:
    """What a reader should know of numbers that are there."""
    ok, shared = summary["ok"], summary["first_token_shared"]
    notes = [f"{count} of {ok}: {TOLERATED[name]}" for name, count in summary["tolerated"].items()]
    if summary["counted_by_client"]:
        counted = f"{summary['counted_by_client']} of {ok} without usage: tokens are"
        notes.append(
            f"{counted} the token events that came: too few where two tokens share an event, one "
            "too many where the last event is none"
            if not summary["configuration"]["no_stream"]
            else f"{counted} not known"
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

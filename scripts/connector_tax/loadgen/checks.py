"""Check that the load generator sent the planned schedule.

Every check has a value and a bound, is two-sided where the quantity can err both ways, and fails
when its data are missing. Checks that a study's cells share have the same names, bounds and texts.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from connector_tax.artifacts.cell_records import CheckRecord
from connector_tax.artifacts.checks import (
    BOUNDS,
    CHECKS,
    at_most,
    generator_checks,
    schedule_check,
)
from connector_tax.loadgen.generator import CellResult
from connector_tax.loadgen.latency import latencies_ms
from connector_tax.loadgen.messages import RequestRecord
from connector_tax.loadgen.summary import Checks, session_outcomes
from connector_tax.loadgen.traffic import Load

SESSION_DELAY_P99_MS = 5.0
# Check -> what is wrong when it fails; the second part holds the checks that no study has.
WRONG = {name: check.void for name, check in CHECKS.items()} | {
    "dropped": "requests were dropped at the in-flight cap",
    "intra_session_delay_p99_ms": "requests were sent late after their parents (p99)",
    "intra_session_early_ms": "a request was sent before its parents had ended",
    "concurrent_sessions_max": "more sessions were active than requested",
    "session_start_delay_p99_ms": "a free place of the closed loop was taken late (p99)",
}
_BUSY = "stop other programs on its CPUs, give it more CPUs, or lower the load"
# Check -> what a user can do when it fails.
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
    "workers_died": "read the messages above; check whether memory ran out",
    "silent_workers": "read the messages above; check whether memory ran out",
    "unopened_connections": "lower --connections, or find out why the server accepts no more",
    "unstamped_reads": "the clock was set during the run: repeat the run",
    "lost_messages": "raise --workers, or lower the load",
}


def verify(result: CellResult, load: Load) -> Checks:
    requests, stop_ns = result.requests, result.t_stop_ns
    measured = [record for record in requests if record.measured]
    checks = check_requests(measured)
    if load.offsets_ns is None:
        ramp = load.concurrency, result.t_origin_ns, load.rampup_ns
        checks |= check_concurrency(requests, len(load.sessions), ramp, stop_ns)
    elif len(load.sessions) > 1 and load.offsets_ns[-1] > load.offsets_ns[0]:
        starts_ns = load.offsets_ns + result.t_origin_ns
        due_ns = starts_ns[(result.t_warmup_end_ns <= starts_ns) & (starts_ns < stop_ns)]
        # A single moment has no rate.
        if len(due_ns) == 0 or due_ns[-1] > due_ns[0]:
            checks["sent_rate_ratio"] = check_sent_rate(measured, due_ns)
    if any(record.parents for record in requests):
        checks |= check_intra_session(requests)
    return checks | generator_checks(result.health, result.clock, BOUNDS)


def check_requests(records: Sequence[RequestRecord]) -> Checks:
    """Check lag, early sends, dropped requests and errors."""
    lags_ms = [(r.t_send_ns - r.t_intended_ns) / 1e6 for r in records if r.t_send_ns is not None]
    ttfts_ms = [row["TTFT"] for row in map(latencies_ms, records) if "TTFT" in row]
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
    records: Sequence[RequestRecord], planned_starts_ns: Sequence[int] | NDArray[np.int64]
) -> CheckRecord:
    """Check that sessions were dispatched at the planned rate, neither slower nor faster.

    A session starts with the first request that it sent, or dropped at the in-flight cap.

    Args:
        planned_starts_ns: the planned starts within the run, in ns, ascending.
    """
    first: dict[str, int] = {}
    for record in records:
        begun_ns = record.t_done_ns if record.status == "dropped" else record.t_send_ns
        if begun_ns is not None and not record.parents:
            begin_ns = begun_ns - record.wait_after_ready_ns
            first[record.session] = min(begin_ns, first.get(record.session, begin_ns))
    tolerance = BOUNDS["sent_rate_tolerance"]
    bound = [1 - tolerance, 1 + tolerance]
    planned_span = 0
    if len(planned_starts_ns):
        planned_span = int(planned_starts_ns[-1] - planned_starts_ns[0])
    span = max(first.values()) - min(first.values()) if first else 0
    if planned_span <= 0 or span <= 0:
        return {"value": None, "bound": bound, "pass": False}
    ratio = (len(first) - 1) / span / ((len(planned_starts_ns) - 1) / planned_span)
    return {"value": ratio, "bound": bound, "pass": abs(ratio - 1) <= tolerance}


def check_intra_session(records: Sequence[RequestRecord]) -> Checks:
    """Check that each request was sent at the end of its parents plus its wait, neither early nor
    late.

    Due times are recomputed from the parents' stamps, not taken from the scheduler.
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
    """Check that the sessions in progress never exceeded the target, and that no place stayed
    empty.

    Each of the `sessions` must start when its place is free, that is, when enough earlier sessions
    have ended. A session with a free place before `stop_ns` that never started counts as late by
    the time until `stop_ns`.

    Args:
        ramp: target, origin (ns) and duration (ns) of the linear ramp to the target.
    """
    target, origin_ns, ramp_ns = ramp
    outcomes = session_outcomes(records)
    spans = [(o.t_start_ns, o.t_end_ns) for o in outcomes if o.t_start_ns is not None]
    starts = sorted(begin for begin, _ in spans)
    # A place is free when its session has ended, or after the pause that a failure asks for.
    free: dict[str, int] = defaultdict(int)
    for record in records:
        free_ns = (record.t_done_ns or 0) + record.pause_ns
        free[record.session] = max(free[record.session], free_ns)
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

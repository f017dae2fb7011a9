"""Timing verification: did the load generator do what the schedule says?

Every check has a value and a bound, is two-sided where the quantity can err both ways, and fails
when its data are missing. The bounds are those a study has unless it sets its own.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from connector_tax.artifacts.cell_records import GeneratorHealth
from connector_tax.artifacts.checks import BOUNDS, UNSTAMPED_SHARE_MAX
from connector_tax.loadgen.messages import Clock, RequestRecord
from connector_tax.loadgen.records import SessionRequest, session_outcomes

SESSION_DELAY_P99_MS = 5.0
COUNTERS = ("undecodable", "oversized", "dropped_messages", "late_results")


class Check(msgspec.Struct, frozen=True):
    """One verified property; `value` is null when there are no data, which fails."""

    name: str
    value: float | None
    bound: str
    passed: bool


def check_requests(records: Sequence[RequestRecord]) -> list[Check]:
    """Check lag, early sends, sent rate and errors of the requests of one run."""
    sent = [r for r in records if r.t_send_ns is not None]
    lags_ms = [(r.t_send_ns - r.t_intended_ns) / 1e6 for r in sent if r.t_send_ns is not None]
    ttfts_ms = [
        (r.t_first_token_ns - r.t_intended_ns) / 1e6
        for r in sent
        if r.status == "ok" and r.t_first_token_ns is not None
    ]
    lag_bound_ms = BOUNDS["schedule_lag_p99_ms"]
    if ttfts_ms:
        share = BOUNDS["schedule_lag_ttft_fraction"]
        lag_bound_ms = max(lag_bound_ms, share * float(np.median(ttfts_ms)))
    failed = sum(r.status in ("error", "timeout") for r in records)
    attempted = sum(r.status != "cancelled" for r in records)
    return [
        _at_most("schedule_lag_p99_ms", _percentile(lags_ms, 99), lag_bound_ms),
        _at_most("earliest_send_ms", -min(lags_ms) if lags_ms else None, 0.0),
        _at_most("error_rate", failed / attempted if attempted else None, BOUNDS["max_error_rate"]),
        _at_most("dropped", float(sum(r.status == "dropped" for r in records)), 0.0),
    ]


def check_session_rate(
    records: Sequence[SessionRequest], planned_starts_ns: Sequence[int]
) -> Check:
    """Check the rate at which sessions were dispatched against the plan, both ways.

    The first request that a session sent stands for its start; `planned_starts_ns` are the starts
    due within the run.
    """
    first: dict[str, int] = {}
    for entry in records:
        sent_ns = entry.record.t_send_ns
        if sent_ns is not None and not entry.parents:
            begin_ns = sent_ns - entry.wait_after_ready_ns
            first[entry.session] = min(begin_ns, first.get(entry.session, begin_ns))
    name = "session_rate_ratio"
    tolerance = BOUNDS["sent_rate_tolerance"]
    bound = f"1 ± {tolerance:g}"
    if len(first) < 2 or len(planned_starts_ns) < 2:
        return Check(name, None, bound, False)
    planned_span = planned_starts_ns[-1] - planned_starts_ns[0]
    span = max(first.values()) - min(first.values())
    if planned_span <= 0 or span <= 0:
        return Check(name, None, bound, False)
    ratio = (len(first) - 1) / span / ((len(planned_starts_ns) - 1) / planned_span)
    return Check(name, ratio, bound, abs(ratio - 1) <= tolerance)


def check_intra_session(records: Sequence[SessionRequest]) -> list[Check]:
    """Check that every request with parents was sent when they had ended plus its wait: not before,
    and not late. Computed anew from the stamps of the parents, not from the scheduler's due times.
    """
    ended = {(entry.session, entry.node): entry.record.t_done_ns for entry in records}
    delays_ms: list[float] = []
    for entry in records:
        sent_ns = entry.record.t_send_ns
        if not entry.parents or sent_ns is None:
            continue
        ends = [ended.get((entry.session, parent)) for parent in entry.parents]
        if any(end is None for end in ends):
            return [Check("intra_session_parents", None, "every parent recorded", False)]
        due_ns = max(end for end in ends if end is not None) + entry.wait_after_ready_ns
        delays_ms.append((sent_ns - due_ns) / 1e6)
    return [
        _at_most("intra_session_delay_p99_ms", _percentile(delays_ms, 99), SESSION_DELAY_P99_MS),
        _at_most("intra_session_earliest_ms", -min(delays_ms) if delays_ms else None, 0.0),
    ]


class Ramp(NamedTuple):
    """Closed loop: `target` sessions at once, rising linearly from `origin_ns` over `ramp_ns`."""

    target: int
    origin_ns: int
    ramp_ns: int


def check_concurrency(
    records: Sequence[SessionRequest], sessions: int, ramp: Ramp, stop_ns: int
) -> list[Check]:
    """Check that never more than the target's sessions were under way at once, and no fewer: each
    of the `sessions` must start when its place is there, which is when enough others have ended.
    A session that never started though it had a place before `stop_ns` counts as late as that.
    """
    outcomes = session_outcomes(records)
    spans = [(o.t_start_ns, o.t_end_ns) for o in outcomes if o.t_start_ns is not None]
    starts = sorted(begin for begin, _ in spans)
    ends = sorted(end for o in outcomes if o.status != "cut" for end in [o.t_end_ns])
    delays_ms = []
    for k in range(sessions):
        place = min(k + 1, ramp.target)
        due_ns = ramp.origin_ns + ramp.ramp_ns * place // ramp.target
        if k >= ramp.target:
            if k - ramp.target >= len(ends):
                break
            due_ns = max(due_ns, ends[k - ramp.target])
        if due_ns >= stop_ns:
            break
        delays_ms.append(((starts[k] if k < len(starts) else stop_ns) - due_ns) / 1e6)
    # At equal times an end counts before a start.
    late_ms = _percentile(delays_ms, 99) if starts else None
    edges = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    highest = float(np.cumsum([step for _, step in edges]).max()) if edges else None
    return [
        _at_most("concurrent_sessions_max", highest, float(ramp.target)),
        _at_most("session_start_delay_p99_ms", late_ms, SESSION_DELAY_P99_MS),
    ]


def check_processes(health: GeneratorHealth, clock: Clock) -> list[Check]:
    """Check event-loop lag, CPU share and message counters of every process, that every worker
    lives and opened its connections, and that the clock is the one it is said to be.
    """
    checks: list[Check] = []
    for name, values in health["processes"].items():
        lag, share = values.get("loop_lag_p99_ms"), values.get("cpu_share")
        checks.append(_at_most(f"{name}_loop_lag_p99_ms", lag, BOUNDS["loop_lag_p99_ms"]))
        checks.append(
            _at_most(
                f"{name}_loop_lag_max_ms", values.get("loop_lag_max_ms"), BOUNDS["loop_lag_max_ms"]
            )
        )
        checks.append(_at_most(f"{name}_cpu_share", share, BOUNDS["max_cpu_share"]))
        counters = [c for c in COUNTERS if c != "late_results" or name == "main"]
        told = [values[c] for c in counters if c in values]
        lost = float(sum(told)) if len(told) == len(counters) else None
        checks.append(_at_most(f"{name}_messages_lost", lost, 0.0))
        if name != "main" and clock == "kernel":
            reads, unstamped = values.get("reads"), values.get("unstamped_reads")
            share = unstamped / reads if reads and unstamped is not None else None
            checks.append(_at_most(f"{name}_unstamped_share", share, UNSTAMPED_SHARE_MAX))
    workers = health["workers"]
    silent = workers - sum(name != "main" for name in health["processes"])
    unopened = workers * health["connections_per_worker"] - sum(health["connections"].values())
    checks.append(_at_most("workers_died", float(len(health["workers_died"])), 0.0))
    checks.append(_at_most("silent_workers", float(silent), 0.0))
    checks.append(_at_most("unopened_connections", float(unopened), 0.0))
    return checks


def _at_most(name: str, value: float | None, bound: float) -> Check:
    passed = value is not None and value <= bound
    return Check(name, value, f"<= {bound:g}", passed)


def _percentile(values: Sequence[float], q: float) -> float | None:
    return float(np.percentile(values, q)) if values else None

"""The checks of a run: did the load generator do what the schedule says?

Every check has a value and a bound, is two-sided where the quantity can err both ways, and fails
when its data are missing. Those that a study's cells have too have its names, bounds and sentences.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from connector_tax.artifacts.cell_records import CheckRecord, GeneratorHealth
from connector_tax.artifacts.checks import BOUNDS, CHECKS, at_most, generator_checks
from connector_tax.loadgen.generator import CellResult
from connector_tax.loadgen.messages import Clock, RequestRecord
from connector_tax.loadgen.traffic import Load


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


def session_outcomes(entries: Sequence[RequestRecord]) -> list[SessionOutcome]:
    """Return one outcome per session, in the order of their first requests."""
    by_session: dict[str, list[RequestRecord]] = {}
    for entry in entries:
        by_session.setdefault(entry.session, []).append(entry)
    return [_outcome(session, entries) for session, entries in by_session.items()]


def _outcome(session: str, entries: Sequence[RequestRecord]) -> SessionOutcome:
    kinds = [entry.error_kind for entry in entries]
    starts = [
        entry.t_send_ns - entry.wait_after_ready_ns
        for entry in entries
        if entry.t_send_ns is not None
    ]
    status: Literal["ok", "failed", "cut"] = "failed" if any(kinds) else "ok"
    if "run_ended" in kinds:
        status = "cut"
    return SessionOutcome(
        session=session,
        status=status,
        requests=len(kinds),
        ok=kinds.count(None),
        t_start_ns=min(starts, default=None),
        t_end_ns=max(entry.t_done_ns or 0 for entry in entries),
    )


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


class Check(msgspec.Struct, frozen=True):
    """One verified property; `value` is null when there are no data, which fails."""

    name: str
    value: float | None
    bound: str
    passed: bool


def verify(result: CellResult, load: Load) -> list[Check]:
    """Return every check that applies to this load."""
    requests, stop_ns = result.requests, result.t_stop_ns
    measured = [record for record in requests if record.measured]
    checks = check_requests(measured)
    if load.offsets_ns is None:
        ramp = load.concurrency, result.t_origin_ns, load.rampup_ns
        checks += check_concurrency(requests, len(load.sessions), ramp, stop_ns)
    elif len(load.sessions) > 1 and load.offsets_ns[-1] > load.offsets_ns[0]:
        starts_ns = (load.offsets_ns + result.t_origin_ns).tolist()
        due_ns = [t for t in starts_ns if result.t_warmup_end_ns <= t < stop_ns]
        checks.append(check_sent_rate(measured, due_ns))
    if any(record.parents for record in requests):
        checks += check_intra_session(requests)
    return checks + check_processes(result.health, result.clock)


def check_requests(records: Sequence[RequestRecord]) -> list[Check]:
    """Check lag, early sends, dropped requests and errors."""
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
        _at_most("early_send_ms", -min(lags_ms) if lags_ms else None, 0.0),
        _at_most("error_rate", failed / attempted if attempted else None, BOUNDS["max_error_rate"]),
        _at_most("dropped", float(sum(r.status == "dropped" for r in records)), 0.0),
    ]


def check_sent_rate(records: Sequence[RequestRecord], planned_starts_ns: Sequence[int]) -> Check:
    """Check the rate at which sessions were dispatched against the plan, both ways.

    The first request that a session sent stands for its start; `planned_starts_ns` are the starts
    due within the run.
    """
    first: dict[str, int] = {}
    for record in records:
        if record.t_send_ns is not None and not record.parents:
            begin_ns = record.t_send_ns - record.wait_after_ready_ns
            first[record.session] = min(begin_ns, first.get(record.session, begin_ns))
    name = "sent_rate_ratio"
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


def check_intra_session(records: Sequence[RequestRecord]) -> list[Check]:
    """Check that every request with parents was sent when they had ended plus its wait: not before,
    and not late. Computed anew from the stamps of the parents, not from the scheduler's due times.
    """
    ended = {(record.session, record.node): record.t_done_ns for record in records}
    delays_ms: list[float] = []
    late, early = "intra_session_delay_p99_ms", "intra_session_early_ms"
    for record in records:
        if not record.parents or record.t_send_ns is None:
            continue
        ends = [ended.get((record.session, parent)) for parent in record.parents]
        if any(end is None for end in ends):
            return [Check(late, None, "every parent recorded", False)]
        due_ns = max(end for end in ends if end is not None) + record.wait_after_ready_ns
        delays_ms.append((record.t_send_ns - due_ns) / 1e6)
    return [
        _at_most(late, _percentile(delays_ms, 99), SESSION_DELAY_P99_MS),
        _at_most(early, -min(delays_ms) if delays_ms else None, 0.0),
    ]


def check_concurrency(
    records: Sequence[RequestRecord], sessions: int, ramp: tuple[int, int, int], stop_ns: int
) -> list[Check]:
    """Check that never more than the target's sessions were under way at once, and no fewer: each
    of the `sessions` must start when its place is there, which is when enough others have ended.
    A session that never started though it had a place before `stop_ns` counts as late as that.
    `ramp`: the target, which the places reach linearly from this origin over that time (ns).
    """
    target, origin_ns, ramp_ns = ramp
    outcomes = session_outcomes(records)
    spans = [(o.t_start_ns, o.t_end_ns) for o in outcomes if o.t_start_ns is not None]
    starts = sorted(begin for begin, _ in spans)
    ends = sorted(end for o in outcomes if o.status != "cut" for end in [o.t_end_ns])
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
    late_ms = _percentile(delays_ms, 99) if starts else None
    edges = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    highest = float(np.cumsum([step for _, step in edges]).max()) if edges else None
    return [
        _at_most("concurrent_sessions_max", highest, float(target)),
        _at_most("session_start_delay_p99_ms", late_ms, SESSION_DELAY_P99_MS),
    ]


def check_processes(health: GeneratorHealth, clock: Clock) -> list[Check]:
    """Check the load generator's processes, as a study's cells do."""
    return [_shown(name, check) for name, check in generator_checks(health, clock, BOUNDS).items()]


def _at_most(name: str, value: float | None, bound: float) -> Check:
    return _shown(name, at_most(value, bound))


def _shown(name: str, check: CheckRecord) -> Check:
    return Check(name, check["value"], f"<= {check['bound']:g}", check["pass"])


def _percentile(values: Sequence[float], q: float) -> float | None:
    return float(np.percentile(values, q)) if values else None

"""Summarise a run: sessions, latencies, percentiles and rates of the measured requests."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from connector_tax.artifacts.cell_records import CheckRecord
from connector_tax.loadgen.generator import CellResult
from connector_tax.loadgen.latency import latencies_ms
from connector_tax.loadgen.messages import RequestRecord
from connector_tax.loadgen.plan import CONFIDENCE
from connector_tax.loadgen.sink import RecordSink
from connector_tax.loadgen.throughput import ended_between
from connector_tax.ranks import order_statistic_ranks, percentile_of

Checks = dict[str, CheckRecord]
"""Checks by name; a value is null when data are missing, and such a check fails."""

# ---- sessions and latencies


class SessionOutcome(msgspec.Struct, kw_only=True):
    """The outcome of a session that started; times are CLOCK_MONOTONIC ns.

    `t_start_ns`: when its first request was sent, minus that request's wait (null if none).
    `t_end_ns`: when its last request ended. `status` is `cut` if the run ended before the session.
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
    for session, session_records in by_session.items():
        kinds = [r.error_kind for r in session_records]
        starts = [
            r.t_send_ns - r.wait_after_ready_ns for r in session_records if r.t_send_ns is not None
        ]
        outcome = SessionOutcome(
            session=session,
            status="cut" if "run_ended" in kinds else "failed" if any(kinds) else "ok",
            requests=len(kinds),
            ok=kinds.count(None),
            t_start_ns=min(starts, default=None),
            t_end_ns=max(r.t_done_ns or 0 for r in session_records),
        )
        outcomes.append(outcome)
    return outcomes


# ---- the summary

BEYOND = 10
"""A percentile of 99 or more gets an interval if this many samples lie beyond it."""
TEXTS = 3
"""Number of most frequent texts shown for each kind of failure."""


def summarise(
    result: CellResult,
    checks: Checks,
    sink: RecordSink,
    slos_ms: Sequence[tuple[str, float]],
    percents: Sequence[float],
) -> dict[str, Any]:
    """Return the summary of a run; times are in s and ms.

    Latencies, failures and lengths describe the measured requests. Throughput describes the window:
    the requests that ended and the tokens that came in it, divided by its length.

    Args:
        sink: has processed every request; its gaps are sorted here.
        slos_ms: limits of the latencies of a good request, for goodput.
        percents: the percentiles of the latencies, ascending.
    """
    records = [record for record in result.requests if record.measured]
    begin_ns, stop_ns = result.t_warmup_end_ns, result.t_stop_ns
    window_s = max((stop_ns - begin_ns) / 1e9, 1e-9)
    ok = [record for record in records if record.status == "ok"]
    ended = ended_between(result.requests, begin_ns, stop_ns)
    latencies = [latencies_ms(record) for record in ok]
    series = {
        name: np.sort([row[name] for row in latencies if name in row])
        for name in ("TTFT", "TTFA", "TPOT", "E2E")
    }
    gaps = np.frombuffer(sink.itl_ms, np.float32)
    gaps.sort()
    series["ITL"] = gaps
    waits = sum(values.get("pool_waits", 0) for values in result.health["processes"].values())
    return {
        "window_s": window_s,
        "requests": len(records),
        "unmeasured": len(result.requests) - len(records),
        "ok": len(ok),
        "failed": _failures(records),
        "finish_reasons": Counter(r.finish_reason for r in records if r.finish_reason is not None),
        "paused": sum(record.pause_ns > 0 for record in records),
        "retried": sum(record.retries for record in records),
        "tolerated": Counter(record.tolerated for record in ok if record.tolerated is not None),
        "counted_by_client": sum(record.counted_by == "client" for record in ok),
        "waited_for_connection": int(waits),
        "first_token_shared": sum((record.first_read_tokens or 1) > 1 for record in ok),
        "tokens_per_event": _tokens_per_event(ok),
        "bundled": sink.bundled,
        "latency_missing": {
            name: missing
            for name in ("TTFT", "TPOT")
            if (missing := sum(name not in row for row in latencies))
        },
        "cached_tokens": _sum_known([record.cached_tokens for record in ok]),
        "requests_per_s": len(ended) / window_s,
        "tokens_per_s": sink.tokens.between(begin_ns, stop_ns) / window_s,
        "input_tokens_per_s": sum(record.prompt_tokens or 0 for record in ended) / window_s,
        "lengths": {
            "input": _lengths([record.prompt_tokens for record in ok]),
            "output": _lengths([record.completion_tokens for record in ok]),
        },
        "latency_ms": {k: _quantiles(k, v, percents) for k, v in series.items() if len(v)},
        "goodput": _goodput(latencies, slos_ms, len(records), window_s) if slos_ms else None,
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


def _tokens_per_event(ok: Sequence[RequestRecord]) -> float | None:
    """Return the server's token count divided by the token events; None without streams."""
    both = [
        (record.completion_tokens or 0, record.token_events)
        for record in ok
        if record.counted_by == "server" and record.token_events
    ]
    return sum(tokens for tokens, _ in both) / sum(events for _, events in both) if both else None


def _sum_known(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _lengths(counts: Sequence[int | None]) -> dict[str, float] | None:
    """Return mean, p50 and p90 of the known counts; None if none is known."""
    known = sorted(count for count in counts if count is not None)
    if not known:
        return None
    return {
        "n": len(known),
        "mean": float(np.mean(known)),
        "p50": percentile_of(known, 50),
        "p90": percentile_of(known, 90),
    }


def _failures(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Return the count of each kind of failure, with the kind's most frequent texts."""
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
    window_s: float,
) -> dict[str, Any]:
    """Count the requests within every limit of `slos_ms`; a missing latency breaks its limit."""
    good = sum(
        all(row.get(name, math.inf) <= limit for name, limit in slos_ms) for row in latencies
    )
    missing = {name: sum(name not in row for row in latencies) for name, _ in slos_ms}
    return {
        "slo_ms": dict(slos_ms),
        "good": good,
        "share": good / requests if requests else None,
        "not_measured": {name: count for name, count in missing.items() if count},
        "requests_per_s": good / window_s,
    }


def _quantiles(
    name: str, ordered: "NDArray[np.floating[Any]]", percents: Sequence[float]
) -> dict[str, Any]:
    """Return n, mean, standard deviation, max, and percentiles with order-statistic intervals.

    Values that a sample is too small for are null. ITL has no intervals, since the gaps of one
    stream depend on each other.
    """
    n = len(ordered)
    row: dict[str, Any] = {
        "n": n,
        "mean": float(np.mean(ordered, dtype=np.float64)),
        "std": float(np.std(ordered, dtype=np.float64, ddof=1)) if n > 1 else None,
    }
    for percent in percents:
        key = f"p{percent:g}"
        row[key] = percentile_of(ordered, percent)
        row[f"{key}_interval"] = None
        if name == "ITL" or (percent >= 99 and n * (100 - percent) < 100 * BEYOND):
            continue
        low, high = order_statistic_ranks(n, percent, CONFIDENCE)
        if low is not None and high is not None:
            row[f"{key}_interval"] = [float(ordered[low - 1]), float(ordered[high - 1])]
    return row | {"max": float(ordered[-1])}


def _bound_text(bound: float | list[float]) -> str:
    return f"1 ± {bound[1] - 1:g}" if isinstance(bound, list) else f"<= {bound:g}"

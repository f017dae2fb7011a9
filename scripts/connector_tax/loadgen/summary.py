"""Summarise a run: sessions, latencies, percentiles and rates of the measured requests."""

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from connector_tax.artifacts.cell_records import CheckRecord
from connector_tax.loadgen.generator import CellResult
from connector_tax.loadgen.messages import RequestRecord
from connector_tax.loadgen.plan import CONFIDENCE
from connector_tax.ranks import order_statistic_ranks, percentile_of

Checks = dict[str, CheckRecord]
"""By name; a value is null when there are no data, which fails."""

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


# ---- the summary

P99_MIN_SAMPLES = 1000
PERCENTS = (50, 90, 99)
TEXTS = 3
"""The commonest texts of a kind of failure that are told."""


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


def _bound_text(bound: float | list[float]) -> str:
    return f"1 ± {bound[1] - 1:g}" if isinstance(bound, list) else f"<= {bound:g}"

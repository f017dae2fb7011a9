"""The summary of a run: counts, rates and latency percentiles, as data and as a table."""

from collections.abc import Sequence
from typing import Any, TextIO

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from connector_tax.loadgen.generator import CellResult
from connector_tax.loadgen.health import Check
from connector_tax.loadgen.messages import FAILURES
from connector_tax.loadgen.records import SessionRequest
from connector_tax.ranks import order_statistic_ranks

P99_MIN_SAMPLES = 1000
CONFIDENCE = 0.95
PERCENTS = (50, 90, 99)


def latencies_ms(entries: Sequence[SessionRequest]) -> dict[str, list[float]]:
    """Return the latencies of the successes, in ms, from the intended send time.

    TTFT is that of the first token, TTFA of the first that is no reasoning.
    TPOT = (last token - first token) / (completion_tokens - 1). ITL is the gap between successive
    reads that brought tokens; tokens that came in one read have no gap of their own.
    """
    series: dict[str, list[float]] = {"TTFT": [], "TTFA": [], "TPOT": [], "ITL": [], "E2E": []}
    for entry in entries:
        r = entry.record
        if r.status != "ok" or r.t_first_token_ns is None or r.t_last_token_ns is None:
            continue
        series["TTFT"].append((r.t_first_token_ns - r.t_intended_ns) / 1e6)
        if entry.t_first_answer_ns is not None:
            series["TTFA"].append((entry.t_first_answer_ns - r.t_intended_ns) / 1e6)
        series["E2E"].append((r.t_last_token_ns - r.t_intended_ns) / 1e6)
        span_ms = (r.t_last_token_ns - r.t_first_token_ns) / 1e6
        if r.completion_tokens is not None and r.completion_tokens > 1 and span_ms > 0:
            series["TPOT"].append(span_ms / (r.completion_tokens - 1))
        stamps = [t_ns for t_ns, _ in r.reads or ()]
        series["ITL"].extend((np.diff(stamps) / 1e6).tolist())
    return series


def summarise(result: CellResult, checks: Sequence[Check]) -> dict[str, Any]:
    """Return what the measured requests say. Times are in s and ms.

    Rates are over the time from the beginning of the window to the last answer to it.
    """
    measured = [entry for entry in result.requests if entry.record.measured]
    records = [entry.record for entry in measured]
    window_s = max((result.t_stop_ns - result.t_warmup_end_ns) / 1e9, 1e-9)
    last_ns = max((r.t_done_ns or 0 for r in records), default=0)
    served_s = max((last_ns - result.t_warmup_end_ns) / 1e9, window_s)
    ok = [entry for entry in measured if entry.record.status == "ok"]
    tokens = sum(entry.record.completion_tokens or 0 for entry in ok)
    kinds = sorted({r.error_kind for r in records if r.error_kind is not None})
    return {
        "window_s": window_s,
        "served_s": served_s,
        "requests": len(records),
        "unmeasured": len(result.requests) - len(records),
        "ok": len(ok),
        "failed": {kind: sum(r.error_kind == kind for r in records) for kind in kinds},
        "counted_by_client": sum(entry.counted_by == "client" for entry in ok),
        "requests_per_s": len(ok) / served_s,
        "tokens_per_s": tokens / served_s,
        "latency_ms": {k: _quantiles(k, v) for k, v in latencies_ms(measured).items() if v},
        "clock": result.clock,
        "traffic_ended_by": result.cooldown_ended_by,
        "bodies_sha256": result.bodies_sha256,
        "checks": [msgspec.structs.asdict(check) for check in checks],
        "load_generator": result.health,
    }


def _quantiles(name: str, values: Sequence[float]) -> dict[str, Any]:
    """n, mean and percentiles with their order-statistic intervals, null where n is too small.

    ITL has no intervals: the gaps of one stream are not independent.
    """
    ordered = np.sort(values)
    n = len(ordered)
    row: dict[str, Any] = {"n": n, "mean": float(np.mean(ordered))}
    for percent in PERCENTS:
        low, high = order_statistic_ranks(n, percent, CONFIDENCE)
        refused = percent == 99 and n < P99_MIN_SAMPLES
        row[f"p{percent}"] = None if refused else float(np.percentile(ordered, percent))
        known = not refused and name != "ITL" and low is not None and high is not None
        row[f"p{percent}_interval"] = (
            [float(ordered[low - 1]), float(ordered[high - 1])]
            if known and low is not None and high is not None
            else None
        )
    return row


def print_summary(summary: dict[str, Any], stream: TextIO) -> None:
    """Print outcome counts, latencies and the timing verification."""
    console = Console(file=stream, width=100, highlight=False)
    console.print(
        f"{summary['requests']} requests in {summary['window_s']:.1f} s, answered in "
        f"{summary['served_s']:.1f} s: {summary['ok']} ok ({summary['requests_per_s']:.2f} "
        f"requests/s, {summary['tokens_per_s']:.1f} tokens/s)"
    )
    for kind, count in summary["failed"].items():
        console.print(f"  {count} {kind}: {FAILURES[kind][1]}", markup=False)
    if summary["counted_by_client"]:
        console.print(
            f"  {summary['counted_by_client']} without usage: tokens are the token events that came"
        )
    for note in summary.get("notes", ()):
        console.print(f"note: {note}", markup=False)
    latency = Table("ms", "n", "mean", "p50", "p90", "p99", title="latency of successes, 95% CI")
    for name, row in summary["latency_ms"].items():
        cells = [_cell(row[f"p{percent}"], row[f"p{percent}_interval"]) for percent in PERCENTS]
        latency.add_row(name, str(row["n"]), f"{row['mean']:.3f}", *cells)
    console.print(latency)
    table = Table("check", "value", "bound", "", title="timing verification")
    for check in summary["checks"]:
        value = "no data" if check["value"] is None else f"{check['value']:.4g}"
        table.add_row(check["name"], value, check["bound"], "pass" if check["passed"] else "FAIL")
    console.print(table)


def _cell(value: float | None, interval: Sequence[float] | None) -> str:
    if value is None:
        return "n too small"
    if interval is None:
        return f"{value:.3f}"
    return f"{value:.3f} ({interval[0]:.3f} to {interval[1]:.3f})"

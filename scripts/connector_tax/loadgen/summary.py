"""The summary of a run: latency percentiles as a table for people."""

from collections.abc import Sequence
from typing import TextIO

import numpy as np
from rich.console import Console
from rich.table import Table

from connector_tax.loadgen.health import Check
from connector_tax.loadgen.messages import FAILURES, RequestRecord

P99_MIN_SAMPLES = 1000


def latencies_ms(records: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Return TTFT, TPOT, ITL and E2E of the successes, in ms, from the intended send time.

    TPOT = (last token - first token) / (completion_tokens - 1). ITL is the gap between successive
    reads that brought tokens; tokens that came in one read have no gap of their own.
    """
    series: dict[str, list[float]] = {"TTFT": [], "TPOT": [], "ITL": [], "E2E": []}
    for r in records:
        if r.status != "ok" or r.t_first_token_ns is None or r.t_last_token_ns is None:
            continue
        series["TTFT"].append((r.t_first_token_ns - r.t_intended_ns) / 1e6)
        series["E2E"].append((r.t_last_token_ns - r.t_intended_ns) / 1e6)
        span_ms = (r.t_last_token_ns - r.t_first_token_ns) / 1e6
        if r.completion_tokens is not None and r.completion_tokens > 1 and span_ms > 0:
            series["TPOT"].append(span_ms / (r.completion_tokens - 1))
        stamps = [t_ns for t_ns, _ in r.reads or ()]
        series["ITL"].extend((np.diff(stamps) / 1e6).tolist())
    return series


def print_summary(
    records: Sequence[RequestRecord],
    checks: Sequence[Check],
    window_s: float,
    served_s: float,
    stream: TextIO,
) -> None:
    """Print outcome counts, latencies and the timing verification.

    Args:
        window_s: how long requests were sent.
        served_s: from the first due time to the last answer, over which rates are taken.
    """
    console = Console(file=stream, width=100, highlight=False)
    ok = sum(r.status == "ok" for r in records)
    tokens = sum(r.completion_tokens or 0 for r in records if r.status == "ok")
    console.print(
        f"{len(records)} requests in {window_s:.1f} s, answered in {served_s:.1f} s: {ok} ok "
        f"({ok / served_s:.2f} requests/s, {tokens / served_s:.1f} tokens/s)"
    )
    kinds = sorted({r.error_kind for r in records if r.error_kind is not None})
    for kind in kinds:
        count = sum(r.error_kind == kind for r in records)
        console.print(f"  {count} {kind}: {FAILURES[kind][1]}", markup=False)
    _latency_table(console, latencies_ms(records))
    table = Table("check", "value", "bound", "", title="timing verification")
    for check in checks:
        value = "no data" if check.value is None else f"{check.value:.4g}"
        table.add_row(check.name, value, check.bound, "pass" if check.passed else "FAIL")
    console.print(table)


def _latency_table(console: Console, series: dict[str, list[float]]) -> None:
    table = Table("ms", "n", "mean", "p50", "p90", "p99", title="latency of successes")
    for name, values in series.items():
        if not values:
            table.add_row(name, "0", "-", "-", "-", "-")
            continue
        p50, p90, p99 = np.percentile(values, [50, 90, 99])
        last = f"{p99:.3f}" if len(values) >= P99_MIN_SAMPLES else "n too small"
        mean = f"{np.mean(values):.3f}"
        table.add_row(name, str(len(values)), mean, f"{p50:.3f}", f"{p90:.3f}", last)
    console.print(table)

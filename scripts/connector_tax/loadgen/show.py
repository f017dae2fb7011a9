"""Print the summary of a run."""

from collections.abc import Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from connector_tax.loadgen.checks import ADVICE, WRONG
from connector_tax.loadgen.messages import FAILURES, TOLERATED
from connector_tax.loadgen.summary import PERCENTS

SHARED_FIRST_MAX = 0.01


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
    timed = summary["latency_ms"].get("TPOT", {"n": 0})["n"]
    if ok > timed and not summary["configuration"]["no_stream"]:
        notes.append(
            f"{ok - timed} of {ok} without TPOT: fewer than two tokens, or all in one read"
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

"""Render the latencies as a table of at most 80 columns, with a column for each latency."""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

Latencies = Mapping[str, Mapping[str, Any]]
"""Latencies by name (TTFT, ...), from `loadgen/summary.py:summarise`; ms."""


def latency_table(latencies: Latencies, percents: Sequence[float]) -> Table:
    """Return a table of count, mean, spread and percentiles, each percentile with its interval
    below.
    """
    shown = distinct(latencies)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("ms")
    for name in shown:
        table.add_column(name, justify="right")
    rows = shown.values()
    table.add_row("n", *(str(row["n"]) for row in rows))
    for key in ("mean", "std"):
        table.add_row(key, *(short(row[key]) for row in rows))
    for percent in percents:
        key = f"p{percent:g}"
        table.add_row(key, *(short(row[key]) for row in rows))
        intervals = [row[f"{key}_interval"] for row in rows]
        if any(intervals):
            table.add_row("  95% CI", *map(_interval, intervals), style="dim")
    table.add_row("max", *(short(row["max"]) for row in rows))
    return table


def distinct(latencies: Latencies) -> Latencies:
    """Return the latencies, without TTFA where it equals TTFT (no answer began with reasoning)."""
    same = latencies.get("TTFA") == latencies.get("TTFT")
    return {name: row for name, row in latencies.items() if not (same and name == "TTFA")}


def short(value: float | None) -> str:
    """Return a time in ms with about four digits."""
    if value is None:
        return "-"
    return f"{value:.{3 if value < 10 else 2 if value < 100 else 1 if value < 1000 else 0}f}"


def _interval(ends: Sequence[float] | None) -> str:
    return "" if ends is None else f"{short(ends[0])}–{short(ends[1])}"


def latency_csv(runs: Sequence[tuple[str, Latencies]], percents: Sequence[float]) -> bytes:
    """Return CSV with a row for each load and latency: the table's numbers, unrounded, in ms."""
    keys = [f"p{percent:g}" for percent in percents]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    bounds = [f"{key}{end}_ms" for key in keys for end in ("", "_low", "_high")]
    writer.writerow(["load", "latency", "n", "mean_ms", "std_ms", *bounds, "max_ms"])
    for load, latencies in runs:
        for name, row in latencies.items():
            cells = [row["n"], row["mean"], row["std"]]
            for key in keys:
                cells += [row[key], *(row[f"{key}_interval"] or (None, None))]
            writer.writerow([load, name, *cells, row["max"]])
    return text.getvalue().encode()

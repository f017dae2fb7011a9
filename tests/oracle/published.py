"""What release 0.2 published of a study, in the form of the present tables.

Its tables by the keys of cells.csv and effects.csv: cells, and of effects the estimates.
"""

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Key = tuple[str, ...]
Values = dict[str, Any]
# quantity, config, phase, cell, metric, item
EFFECT_KEY = ("quantity", "config", "phase", "cell", "metric", "item")
CELL_KEY = ("config", "block", "phase", "cell")
GONE = ("p99_reason", "mser5_discard", "start_change", "start_p")
STEP_METRICS = {
    "tax_step_p50": "step",
    "tax_engine_step_p50": "engine_step",
    "tax_callback_p50": "callbacks",
}
TAX_COLUMNS = {
    "estimate": "tax", "base": "plain_ms", "own": "config_ms", "n_blocks": "n_blocks",
    "n": "n_config", "n_base": "n_plain", "family": "family", "margin": "margin", "mark": "mark",
    "status": "status", "reason": "reason", "rate_rps": "rate_rps", "reference": "reference",
}  # fmt: skip


def read(folder: Path, name: str) -> list[dict[str, str]]:
    """The rows of a CSV."""
    with (folder / name).open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def cells(folder: Path) -> dict[Key, Values]:
    """aggregate.csv by the key of cells.csv."""
    return {
        tuple(row[name] for name in CELL_KEY): {k: v for k, v in row.items() if k not in GONE}
        for row in read(folder, "aggregate.csv")
    }


def effects(folder: Path) -> dict[Key, Values]:
    """Every estimate by the key of effects.csv."""
    return {
        tuple(str(values.get(name, "")) for name in EFFECT_KEY): values
        for values in (*_taxes(folder), *_steps(folder), *_hooks(folder), *_resources(folder))
    }


def _columns(row: Mapping[str, str], columns: Mapping[str, str]) -> Values:
    return {new: row[old] for new, old in columns.items()}


def _taxes(folder: Path) -> Iterator[Values]:
    for row in read(folder, "taxes.csv"):
        where = {name: row[name] for name in ("config", "phase", "cell", "metric")}
        yield {"quantity": "tax", **where, **_columns(row, TAX_COLUMNS)}
        if row["tax_all"]:
            yield {"quantity": "tax_all", **where, "estimate": row["tax_all"]}
    gap = {"estimate": "gap", "base": "tax_ref_safe", "own": "tax_ref_load"}
    same = ("n_blocks", "mark", "status", "reason", "metric", "config")
    for row in read(folder, "amplification.csv"):
        own = _columns(row, gap | {name: name for name in same})
        yield {"quantity": "gap", "phase": "A", **own}


def _steps(folder: Path) -> Iterator[Values]:
    ends = {"estimate": "us", "n_blocks": "n_blocks", "reason": "reason"}
    for row in read(folder, "step_taxes.csv"):
        if row["metric"] not in STEP_METRICS:
            continue
        where = {name: row[name] for name in ("config", "phase", "cell")}
        where |= {"quantity": "step", "metric": STEP_METRICS[row["metric"]]}
        yield where | _columns(row, ends)
        if row["aa_us"]:
            yield where | {"config": "plain_2", "estimate": row["aa_us"]}


def _hooks(folder: Path) -> Iterator[Values]:
    for row in read(folder, "hooks.csv"):
        where = {name: row[name] for name in ("config", "phase", "cell")}
        where |= {"quantity": "hook", "item": "/".join((row["process"], row["child"], row["hook"]))}
        if not row["config"]:
            continue
        for metric in ("p50", "mean", "share"):
            unit = "" if metric == "share" else "_us"
            if row[metric + unit]:
                ends = {"estimate": metric + unit, "n": "n_ran" if metric == "p50" else "n_steps"}
                yield where | {"metric": metric} | _columns(row, ends)
        yield where | {"metric": "empty", "estimate": row["empty_us"]}


def _resources(folder: Path) -> Iterator[Values]:
    for row in read(folder, "resources.csv"):
        of = "tax" if row["scale"] == "log" else "difference"
        where = {"quantity": "resource", "config": row["config"], "phase": "A",
                 "metric": row["resource"]}  # fmt: skip
        more = {
            "estimate": of,
            "base": "plain_mean",
            "own": "config_mean",
            "n_blocks": "n_blocks",
            "status": "status",
            "reason": "reason",
            "unit": "unit",
            "scale": "scale",
        }
        yield where | _columns(row, more) | {"companions": row["companions"]}
        if row["aa_difference"]:
            yield where | {"config": "plain_2", "estimate": row[f"aa_{of}"]}

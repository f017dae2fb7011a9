"""What release 0.2 published of a study, in the form of the present tables.

Its ten tables by the keys of cells.csv and effects.csv, without the columns that are no more. How
an interval was made is told in more words of steps and resources now, and is not compared there.
"""

import csv
import json
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
    "estimate": "tax", "lo": "tax_lo", "hi": "tax_hi", "base": "plain_ms", "own": "config_ms",
    "p": "p_value", "p_adjusted": "p_adjusted", "df": "error_df", "method": "interval_method",
    "n_blocks": "n_blocks", "n": "n_config", "n_base": "n_plain", "family": "family",
    "margin": "margin", "verdict": "verdict", "blocks_needed": "blocks_needed", "mark": "mark",
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
        for values in (*_taxes(folder), *_steps(folder), *_resources(folder))
    }


def _columns(row: Mapping[str, str], columns: Mapping[str, str]) -> Values:
    return {new: row[old] for new, old in columns.items()}


def _taxes(folder: Path) -> Iterator[Values]:
    for row in read(folder, "taxes.csv"):
        where = {name: row[name] for name in ("config", "phase", "cell", "metric")}
        numbers = {"difference": [row[f"abs{end}_ms"] for end in ("", "_lo", "_hi")]}
        yield {"quantity": "tax", **where, **_columns(row, TAX_COLUMNS), **numbers}
        if row["tax_all"]:
            ends = {"estimate": "tax_all", "lo": "tax_all_lo", "hi": "tax_all_hi"}
            yield {"quantity": "tax_all", **where, **_columns(row, ends)}
        if row["aa_tax"]:
            aa = {"estimate": row["aa_tax"], "lo": row["aa_lo"], "hi": row["aa_hi"]}
            yield {"quantity": "tax", **where, "config": "plain_2", **aa, **_aa_tax(folder, row)}
    gap = {"estimate": "gap", "lo": "gap_lo", "hi": "gap_hi", "base": "tax_ref_safe",
           "own": "tax_ref_load", "df": "error_df", "method": "interval_method"}  # fmt: skip
    same = ("n_blocks", "mark", "status", "reason", "metric", "config")
    for row in read(folder, "amplification.csv"):
        own = _columns(row, gap | {name: name for name in same})
        yield {"quantity": "gap", "phase": "A", **own}


def _aa_tax(folder: Path, row: Mapping[str, str]) -> Values:
    """The whole row of A/A that `row` has the ends of: it stands in the table itself."""
    for own in read(folder, "taxes.csv"):
        if own["config"] == "plain_2" and all(
            own[k] == row[k] for k in ("phase", "cell", "metric")
        ):
            return _columns(own, TAX_COLUMNS)
    raise AssertionError("A/A of a row that is not there")


def _steps(folder: Path) -> Iterator[Values]:
    ends = {"estimate": "us", "lo": "lo_us", "hi": "hi_us", "p": "p", "n_blocks": "n_blocks",
            "reason": "reason"}  # fmt: skip
    for row in read(folder, "step_taxes.csv"):
        if row["metric"] not in STEP_METRICS:
            continue
        where = {name: row[name] for name in ("config", "phase", "cell")}
        where |= {"quantity": "step", "metric": STEP_METRICS[row["metric"]]}
        if where["metric"] == "callbacks":
            # Its interval was pooled over the configurations; it is of its own launches now.
            yield where | _columns(row, {"estimate": "us", "n_blocks": "n_blocks"})
            continue
        yield where | _columns(row, ends)
        if row["aa_us"]:
            aa = {"estimate": "aa_us", "lo": "aa_lo_us", "hi": "aa_hi_us"}
            yield where | {"config": "plain_2"} | _columns(row, aa)


def _resources(folder: Path) -> Iterator[Values]:
    for row in read(folder, "resources.csv"):
        of = "tax" if row["scale"] == "log" else "difference"
        where = {"quantity": "resource", "config": row["config"], "phase": "A",
                 "metric": row["resource"]}  # fmt: skip
        ends = {"estimate": of, "lo": f"{of}_lo", "hi": f"{of}_hi"}
        more = {
            "base": "plain_mean",
            "own": "config_mean",
            "p": "p_value",
            "n_blocks": "n_blocks",
            "status": "status",
            "reason": "reason",
            "unit": "unit",
            "scale": "scale",
        }
        numbers = {"difference": [row[f"difference{end}"] for end in ("", "_lo", "_hi")],
                   "companions": row["companions"]}  # fmt: skip
        yield where | _columns(row, ends | more) | numbers
        if row["aa_difference"]:
            aa = {new: f"aa_{old}" for new, old in ends.items()}
            numbers = {"difference": [row[f"aa_difference{e}"] for e in ("", "_lo", "_hi")]}
            yield where | {"config": "plain_2"} | _columns(row, aa) | numbers


def hypotheses(folder: Path) -> dict[str, Any]:
    """hypotheses.json without the tables that nobody read."""
    content: dict[str, Any] = json.loads((folder / "hypotheses.json").read_text())
    return {key: value for key, value in content.items() if key not in ("prior", "resolution")}

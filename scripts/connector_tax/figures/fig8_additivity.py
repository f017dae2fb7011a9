"""Figure 8: is the stacked connector's tax the sum of its parts' taxes (H4), at ref_safe?"""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from connector_tax.figures import rows, style
from connector_tax.figures.tables import StudyTables, records

PARTS = ("mooncake_both", "lmcache_only")
STACKED = "multi_mooncake_lmcache"
SUM = "sum of the two"
ROW_IN = 0.22
TOLERANCE = ["tolerance_lo", "tolerance_hi"]
DOTTED: dict[str, Any] = {"color": "black", "lw": 0.9, "ls": (0, (1, 1.2)), "zorder": 4.5}


def draw(study: StudyTables) -> style.Picture:
    """Bars of both parts, of their sum with its interval, and of the stack, over the A/A band."""
    if absent := rows.stand_in(study, "fig8_additivity"):
        return absent
    labels = {item.id: item.label for item in study.configurations} | {SUM: SUM}
    shown = (*PARTS, SUM, STACKED)
    missing = [config for config in shown if config not in labels]
    if missing:
        reason = f"not in this study: {', '.join(missing)}."
        return style.absent(study, "fig8_additivity", reason)
    tolerance = study.settings["hypotheses"]["h4_tolerance"]
    table = rows.taxes(study, shown)
    measured = table[table["config"] != SUM]
    table = _with_sums(table, tolerance)
    notes = [
        f"dotted: ±{100 * tolerance:g} % of the stack's tax; a sum inside is additive (H4)",
        rows.tax_text(measured),
        rows.aa_text(study),
    ]
    figure = style.new_figure(study, style.COLUMN_IN, 2 * (4 * ROW_IN + 0.4) + 0.2, notes)
    grid = figure.subplots(2, sharex=True)
    for axes, (metric, panel) in zip(grid, table.groupby("metric", sort=False), strict=True):
        rows.tax_scale(axes, rows.numbers(table, [*rows.ENDS, *TOLERANCE]))
        rows.shade(axes, panel)
        _bars(study, axes, panel)
        rows.prepare(axes, [labels[config] for config in shown], rows.METRICS[str(metric)])
    grid[-1].set_xlabel(rows.tax_label(study, grid[-1]))
    return style.picture(figure, table, rows.overload_handles(measured))


def _with_sums(taxes: pd.DataFrame, tolerance: float) -> pd.DataFrame:
    """The taxes with the rows of the sums filled in, where both parts have a tax.

    A sum's ends are the sums of its parts' ends. Conservative: it holds whatever the dependence of
    the two (they share plain's launches).
    """
    filled = [row | dict.fromkeys(TOLERANCE) for row in records(taxes)]
    for start in range(0, len(filled), 4):
        one, other, total, whole = filled[start : start + 4]
        if one["tax"] is None or other["tax"] is None:
            total["reason"] = "a part has no valid tax"
            continue
        total |= {"status": "valid", "rate_rps": one["rate_rps"], "family": one["family"]}
        total["mark"] = "; ".join(filter(None, (one["mark"], other["mark"])))
        for end in rows.ENDS:
            known = one[end] is not None and other[end] is not None
            total[end] = one[end] + other[end] if known else None
        if whole["tax"] is not None:
            ends = sorted(factor * whole["tax"] for factor in (1 - tolerance, 1 + tolerance))
            total |= dict(zip(TOLERANCE, ends, strict=True))
    return pd.DataFrame(filled, dtype=object)


def _bars(study: StudyTables, axes: Axes, panel: pd.DataFrame) -> None:
    """A bar per row with its interval; the sum's is its parts end to end, between dotted ends."""
    marks, bars = style.marks(study), records(panel)
    for y, row in enumerate(bars):
        if not rows.value(axes, y, row, height=0.75):
            continue
        start = 0.0
        for part in bars[:2] if row["config"] == SUM else [row]:
            color = marks[part["config"]].color
            axes.barh(y, part["tax"], left=start, height=0.7, color=color, zorder=3, lw=0)
            start += part["tax"]
        rows.beside(axes, y, rows.size_text(row))
        for end in (row[name] for name in TOLERANCE if row[name] is not None):
            axes.plot([end, end], [y - 0.45, y + 0.45], **DOTTED)

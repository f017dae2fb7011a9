"""Figure 9: every tax at ref_safe with its interval and verdict, beside prior, A/A band and margin.

The headline of the study in one picture: what was measured, how sure, and what was expected.
"""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from connector_tax.artifacts.metrics import margin_of
from connector_tax.artifacts.verdicts import TOO_FEW, costs, in_words
from connector_tax.figures import rows, style
from connector_tax.figures.tables import StudyTables, records

ROW_IN = 0.17
MARGIN: dict[str, Any] = {"color": "#7c6a3c", "lw": 0.8, "ls": (0, (1, 1.5))}
PRIOR: dict[str, Any] = rows.OVERLOAD | {"marker": "D", "ms": 4}


def priors(study: StudyTables) -> dict[str, float]:
    """The TTFT p90 taxes of the earlier trace replay (8 instances, saturated), by configuration."""
    values = study.settings["hypotheses"]["prior"]
    plain = values["plain_ttft_p90_s"]
    return {
        "mooncake_both": values["mooncake_both_ttft_p90_s"] / plain - 1,
        "nixl_both": values["nixl_ttft_p90_s"] / plain - 1,
    }


def draw(study: StudyTables) -> style.Picture:
    """A forest plot per metric, with the numbers, their intervals and verdicts written out."""
    if absent := rows.stand_in(study, "fig9_forest"):
        return absent
    table = rows.taxes(study, [item.id for item in study.compared])
    expected = table["metric"] == "ttft_p90"
    table["prior_tax"] = table["config"].map(priors(study)).where(expected)
    table["margin"] = [
        margin_of(study.settings["statistics"]["margins"], m) for m in table["metric"]
    ]
    notes = [f"{rows.tax_text(table)}; {study.reference['ref_safe']:g} req/s"]
    height = 2 * (ROW_IN * len(study.compared) + 0.25) + 0.5
    figure = style.new_figure(study, style.PAGE_IN, height, notes)
    grid = figure.subplots(2, sharex=True)
    for axes, (metric, panel) in zip(grid, table.groupby("metric", sort=False), strict=True):
        _panel(study, axes, str(metric), panel, table)
    grid[-1].set_xlabel(rows.tax_label(study, grid[-1]))
    margins = " or ".join(f"{100 * margin:g}" for margin in sorted(table["margin"].unique()))
    prior = [Line2D([], [], label="prior (trace replay)", **PRIOR)]
    handles = [
        *(prior if table["prior_tax"].notna().any() else []),
        rows.band_handle(table),
        Line2D([], [], label=f"±{margins} % margin", **MARGIN),
        *rows.overload_handles(table),
    ]
    return style.picture(figure, table, handles, 4)


def _panel(
    study: StudyTables, axes: Axes, metric: str, panel: pd.DataFrame, table: pd.DataFrame
) -> None:
    margin, widest = panel["margin"].iloc[0], table["margin"].max()
    ends = [*rows.numbers(table, [*rows.ENDS, "prior_tax"]), -widest, widest]
    rows.tax_scale(axes, ends, logarithmic=True)
    rows.shade(axes, panel)
    for end in (-margin, margin):
        axes.axvline(end, zorder=0.8, **MARGIN)
    for y, row in enumerate(records(panel)):
        if not rows.value(axes, y, row, mark=style.marks(study)[row["config"]]):
            continue
        if row["prior_tax"] is not None:
            axes.plot(row["prior_tax"], y, zorder=5, **PRIOR)
        untold = row["config"] == study.aa or row["verdict"] == TOO_FEW
        said = "" if untold else in_words(row["verdict"], row["margin"])
        rows.beside(axes, y, rows.size_text(row))
        rows.beside(axes, y, said, bold=not untold and costs(row["verdict"]), offset=76)
    title = f"{rows.METRICS[metric]} at ref_safe"
    rows.prepare(axes, [item.label for item in study.compared], title)

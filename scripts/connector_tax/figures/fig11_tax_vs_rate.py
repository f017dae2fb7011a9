"""Figure 11: the tax on TTFT p90 and TPOT p90 at every offered rate of Phase A.

How a tax grows as the server gets busier, before and after it saturates.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.lines import Line2D

from connector_tax.figures import rates, rows, style
from connector_tax.figures.tables import StudyTables

COLUMNS = ["config", "metric", "rate_rps", *rows.ENDS, "verdict", "mark", "status", "reason"]
ACROSS = 4
PANEL_IN = 1.35
# Of a metric: its line, whether its points are filled, and on which side of the rate they stand.
LOOK: Mapping[str, tuple[Any, bool, float]] = {
    "ttft_p90": ("-", True, -0.4),
    "tpot_p90": ((0, (3, 1.5)), False, 0.4),
}


def draw(study: StudyTables) -> style.Picture:
    """A panel for each configuration with both taxes and their intervals, all on one scale."""
    shown = {item.id: item.label for item in study.compared}
    table = rows.measured(study, "A").dropna(subset="rate_rps")
    table = table[table["metric"].isin(LOOK) & table["config"].isin(shown)]
    drawn = []
    notes = [f"{rows.interval_text(table)}; {rates.sample_text(study)}"]
    lines = math.ceil(len(shown) / ACROSS)
    figure = style.new_figure(study, style.PAGE_IN, lines * PANEL_IN + 0.5, notes)
    grid = style.panels(figure, len(shown), ACROSS, share_x=True)
    for axes, (config, label) in zip(grid.flat, shown.items(), strict=False):
        rows.tax_scale(axes, rates.within(table), "y")
        rates.rate_axis(axes, study)
        for metric, (line, filled, side) in LOOK.items():
            own = table[(table["config"] == config) & (table["metric"] == metric)]
            mark = replace(style.marks(study)[config], line=line, filled=filled)
            rates.tax_curve(axes, study, own, mark, side)
            drawn.append(own)
        axes.set_title(style.fitted(label, 1.3, 1.13 * style.TEXT_PT))
    for axes in grid[:, 0]:
        axes.set_ylabel(rows.tax_label(study, axes, "y"))
    for axes in grid[-1]:
        axes.set_xlabel("offered rate (requests/s)")
    handles: list[Artist] = [
        Line2D([], [], ls=line, color="black", marker="o", mfc="black" if filled else "white",
               label=rows.METRICS[metric])
        for metric, (line, filled, _) in LOOK.items()
    ]  # fmt: skip
    handles += rows.overload_handles(table)
    return style.picture(figure, pd.concat(drawn)[COLUMNS], handles, 3)

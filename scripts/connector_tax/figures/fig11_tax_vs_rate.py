"""Figure 11: the tax on TTFT p90 and TPOT p90 at every offered rate of Phase A.

How a tax grows as the server gets busier, before and after it saturates.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from matplotlib.lines import Line2D

from connector_tax.figures import rates, rows, style
from connector_tax.figures.style import Picture
from connector_tax.figures.tables import StudyTables

COLUMNS = ("config", "metric", "rate_rps", *rows.ENDS, "verdict", "mark", "status", "reason")
ACROSS = 4
PANEL_IN = 1.35
# Of a metric: its line, whether its points are filled, and on which side of the rate they stand.
LOOK: Mapping[str, tuple[Any, bool, float]] = {
    "ttft_p90": ("-", True, -0.4),
    "tpot_p90": ((0, (3, 1.5)), False, 0.4),
}


def draw(study: StudyTables) -> Picture:
    """A panel for each configuration with both taxes and their intervals, all on one scale."""
    taxes = {metric: rates.taxes_of(study, metric) for metric in rows.METRICS}
    shown = [item for item in study.launched if item.id != study.baseline]
    everyone = [
        row for by_config in taxes.values() for of_config in by_config.values() for row in of_config
    ]
    notes = [f"{rows.interval_text(everyone)}; {rates.sample_text(study)}"]
    lines = math.ceil(len(shown) / ACROSS)
    figure = style.new_figure(study, style.PAGE_IN, lines * PANEL_IN + 0.5, notes)
    grid = figure.subplots(lines, min(ACROSS, len(shown)), squeeze=False, sharex=True, sharey=True)
    for axes in grid.flat[len(shown) :]:
        axes.set_axis_off()
    rows.tax_scale(grid[0, 0], rates.within(everyone), "y")
    records: list[dict[str, object]] = []
    for axes, item in zip(grid.flat, shown, strict=False):
        axes.grid(axis="y")
        axes.axhline(0, color="black", lw=0.6, zorder=2)
        rates.rate_axis(axes, study)
        for metric, (line, filled, side) in LOOK.items():
            mark = replace(style.marks(study)[item.id], line=line, filled=filled)
            rates.tax_line(axes, study, taxes[metric][item.id], mark, side)
            records += [
                {name: getattr(row, name) for name in COLUMNS}
                | ({} if rows.numbers(row) else dict.fromkeys(rows.ENDS))
                for row in taxes[metric][item.id]
            ]
        axes.set_title(style.fitted(item.label, 1.3, 1.13 * style.TEXT_PT))
    for axes in grid[:, 0]:
        axes.set_ylabel(rows.tax_label(study, axes, "y"))
    for axes in grid[-1]:
        axes.set_xlabel("offered rate (requests/s)")
    handles = [
        Line2D([], [], ls=line, color="black", marker="o", mfc="black" if filled else "white",
               label=rows.METRICS[metric])
        for metric, (line, filled, _) in LOOK.items()
    ]  # fmt: skip
    style.legend(figure, [*handles, *rows.overload_handles(everyone)], 3)
    return style.picture(figure, COLUMNS, records)

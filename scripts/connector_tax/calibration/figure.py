"""The calibration's figure: coverage of the intervals, and the power curve, for R = 3 and 5.

Of the studies whose launches differ equally; the CSV beside it holds the others too.
"""

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from connector_tax.calibration.coverage import BLOCKS, KEYS, POWER, TARGET
from connector_tax.calibration.design import ARRIVALS, STEP_TAX_US
from connector_tax.calibration.studies import METRICS
from connector_tax.figures.style import BAND, MUTED, PAGE_IN, Picture, new_figure, picture
from connector_tax.figures.tables import StudyTables
from connector_tax.marks import Mark

HEIGHT_IN = 3.9
MARKS = {3: Mark("#D55E00", "o", "-"), 5: Mark("#0072B2", "s", (0, (4, 1.2)))}
ARRIVAL_LABELS = {"fixed": "fixed", "poisson": "Poisson"}
LABELS = {"ttft_p90": "TTFT p90", "tpot_p90": "TPOT p90"}
COLUMNS = [
    "spread", "arrivals", "metric", "blocks", "config", "studies", "truth", "truth_se", "covered",
    "covered_lo", "covered_hi", "detected",
]  # fmt: skip


def draw(study: StudyTables, part: Mapping[str, Any]) -> Picture:
    """Coverage above, power below; one column for each arrival process and metric."""
    note = f"virtual time, {part['scale']['studies']} studies for each arrival process"
    figure = new_figure(study, PAGE_IN, HEIGHT_IN, [note])
    panels = [(arrivals, metric) for arrivals in ARRIVALS for metric in METRICS]
    grid = figure.subplots(2, len(panels), sharex="col", sharey="row")
    for (arrivals, metric), upper, lower in zip(panels, *grid, strict=True):
        upper.set_title(f"{LABELS[metric]}, {ARRIVAL_LABELS[arrivals]}")
        for blocks in BLOCKS:
            rows = [
                row
                for row in part["levels"]
                if tuple(row[key] for key in KEYS) == ("equal", arrivals, metric, blocks)
            ]
            _coverage(upper, rows, blocks)
            _power(lower, [row for row in rows if row["config"] in STEP_TAX_US], blocks)
        _finish(upper, lower)
    grid[0, 0].set_ylabel("intervals that cover, %")
    grid[1, 0].set_ylabel("taxes detected, %")
    grid[1, 0].legend(loc="lower right")
    return picture(figure, pd.DataFrame(part["levels"], columns=COLUMNS, dtype=object))


def _coverage(axes: Axes, rows: list[Mapping[str, Any]], blocks: int) -> None:
    mark = MARKS[blocks]
    shift = 0.1 * (BLOCKS.index(blocks) - 0.5)
    x = [100 * row["truth"] + shift for row in rows]
    y = [100 * row["covered"] for row in rows]
    low = [100 * (row["covered"] - row["covered_lo"]) for row in rows]
    high = [100 * (row["covered_hi"] - row["covered"]) for row in rows]
    axes.errorbar(
        x, y, yerr=[low, high], color=mark.color, marker=mark.marker, linestyle="none",
        markersize=2.6, elinewidth=0.7, label=f"R = {blocks}",
    )  # fmt: skip


def _power(axes: Axes, rows: list[Mapping[str, Any]], blocks: int) -> None:
    mark = MARKS[blocks]
    axes.plot(
        [100 * row["truth"] for row in rows], [100 * row["detected"] for row in rows],
        color=mark.color, marker=mark.marker, linestyle=mark.line, markersize=2.6,
        label=f"R = {blocks}",
    )  # fmt: skip


def _finish(upper: Axes, lower: Axes) -> None:
    upper.axhspan(*(100 * bound for bound in TARGET), color=BAND, zorder=0)
    upper.axhline(95, color=MUTED, linewidth=0.5, zorder=0)
    upper.set_ylim(80, 100.5)
    lower.axhline(100 * POWER, color=MUTED, linewidth=0.5, zorder=0)
    lower.set_ylim(-3, 103)
    lower.set_xlabel("true tax, %")

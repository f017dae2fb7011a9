"""The forest plot of a comparison: each ratio of taxes with interval and verdict."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from connector_tax.artifacts.metrics import HEADLINE, LATENCY_METRICS, VERDICT_METRICS
from connector_tax.artifacts.names import ALL_RATES, REFERENCES
from connector_tax.artifacts.tables import TAX
from connector_tax.artifacts.verdicts import TOO_FEW, costs, gains, in_words
from connector_tax.compare.rows import AA, ComparedRow
from connector_tax.compare.studies import Where
from connector_tax.figures import rows as row_plots
from connector_tax.figures import style
from connector_tax.figures.style import Picture
from connector_tax.figures.tables import StudyTables, frame
from connector_tax.marks import AA_MARK, Mark

TITLE = "Ratio of taxes, B over A"
CAPTION = (
    "For each configuration (1 + tax in B) / (1 + tax in A), with its 95 % interval: right of 1 "
    "the configuration costs more in B. Dotted: the margin fixed in the studies. The last row of "
    "a panel is plain against plain, which should be 1."
)
ROW_IN = 0.165


def forest_cells(a: StudyTables, b: StudyTables, rows: Sequence[ComparedRow]) -> list[Where]:
    """All rates and the compared cells at a reference rate of either study; else all of Phase A."""
    compared = list(dict.fromkeys((row.phase, row.cell) for row in rows if row.quantity == TAX))
    named = {("A", study.cell_at(reference)) for study in (a, b) for reference in REFERENCES}
    sweep = [where for where in compared if where[0] == "A"]
    named.add(("A", ALL_RATES))
    # The taxes over all rates first: they carry the verdict.
    chosen = [where for where in sweep if where in named] or sweep or compared
    return sorted(chosen, key=lambda where: where[1] != ALL_RATES)


def metrics_of(cell: str) -> Sequence[str]:
    """What is drawn of a cell: medians over all rates, p90 at one."""
    return VERDICT_METRICS if cell == ALL_RATES else HEADLINE


def draw(a: StudyTables, b: StudyTables, rows: Sequence[ComparedRow]) -> Picture:
    """A panel for TTFT and one for TPOT of each cell."""
    panels = [
        panel
        for where in forest_cells(a, b, rows)
        for metric in metrics_of(where[1])
        if (panel := [r for r in rows if (r.quantity, r.metric, _at(r)) == (TAX, metric, where)])
    ]
    labels = {item.id: item.label for item in a.configurations} | {AA: "plain again (A/A)"}
    marks = {**style.marks(a), AA: AA_MARK}
    heights = [ROW_IN * len(panel) for panel in panels]
    stamp = f"A {_name(a)}; B {_name(b)}"
    height = sum(heights) + 0.5 * len(panels)
    figure = style.new_figure(a, style.COLUMN_IN, height, stamp=stamp)
    grid = figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    for axes, panel in zip(grid, panels, strict=True):
        _panel(axes, panel, marks, [labels[row.config] for row in panel])
    drawn = [row for panel in panels for row in panel]
    return style.picture(figure, frame(drawn, ComparedRow))


def _at(row: ComparedRow) -> Where:
    return row.phase, row.cell


def _name(study: StudyTables) -> str:
    return f"{study.name}, {study.blocks} block{'' if study.blocks == 1 else 's'}"


def _panel(
    axes: Axes,
    rows: Sequence[ComparedRow],
    marks: Mapping[str, Mark],
    labels: Sequence[str],
) -> None:
    ends = [e for r in rows for e in (r.effect, r.effect_lo, r.effect_hi) if e is not None]
    low, high = min([0.97, *ends]), max([1.03, *ends])
    axes.set_xlim(low - 0.04 * (high - low), high + 0.04 * (high - low))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.6g}"))
    axes.axvline(1, color="black", lw=0.6, zorder=4)
    if rows and rows[0].margin is not None:
        for end in (1 - rows[0].margin, 1 + rows[0].margin):
            axes.axvline(end, color="#7c6a3c", lw=0.6, linestyle=(0, (1, 1.5)), zorder=0.8)
    for index, row in enumerate(rows):
        _draw_row(axes, index, row, marks[row.config])
    rate = "over all rates" if rows[0].rate_rps is None else f"at {rows[0].rate_rps:g} req/s"
    row_plots.prepare(axes, labels, f"{LATENCY_METRICS[rows[0].metric].label} {rate}")
    axes.set_xlabel("(1 + tax in B) / (1 + tax in A)")
    axes.grid(axis="x")


def _draw_row(axes: Axes, index: int, row: ComparedRow, mark: Mark) -> None:
    drawn = vars(row) | {"status": row.reason, "reason": "", "mark": ""}
    if not row_plots.value(axes, index, drawn, ("effect", "effect_lo", "effect_hi"), mark):
        return
    said = "" if row.verdict == TOO_FEW else in_words(row.verdict, row.margin)
    off = row.config != AA and (costs(row.verdict) or gains(row.verdict))
    row_plots.beside(axes, index, effect_text(row))
    row_plots.beside(axes, index, "A/A" if row.config == AA else said, bold=off, offset=72)


def effect_text(row: ComparedRow) -> str:
    """'0.93 [0.90, 0.97]'; of two numbers without intervals the ratio alone."""
    if row.effect is None:
        return ""
    text = f"{row.effect:.3g}" if abs(np.log(max(row.effect, 1e-9))) > 1 else f"{row.effect:.3f}"
    if row.effect_lo is None or row.effect_hi is None:
        return text
    return f"{text} [{row.effect_lo:.3f}, {row.effect_hi:.3f}]"

"""Figure 3: effective against offered throughput, with y = x and knees (Phase A)."""

from connector_tax.figures import rates
from connector_tax.figures.style import Picture
from connector_tax.figures.tables import StudyTables

TITLE = "Figure 3: effective vs offered throughput"
CAPTION = (
    "Effective against offered throughput in Phase A. The grey line is y = x, the shaded wedge "
    "the share of the rate that counts as keeping up, a ring each configuration's knee. The "
    "middle panel is the ratio of the two, where a loss of a few per cent is visible. Marks below"
    " as in Figure 1."
)
RATIO_IN = 0.8
QUANTITY = rates.Quantity(
    label="effective throughput\n(requests/s)",
    unit="requests/s",
    value=lambda row: row.effective_throughput_rps,
    low=lambda _: None,
    high=lambda _: None,
    log=True,
    spread=False,
    height_in=1.3,
    room_below_in=RATIO_IN + 0.14,
)


def _ideal_and_knees(drawing: rates.RateFigure, kept: float) -> None:
    axes = drawing.axes
    ends = axes.get_xlim()
    axes.plot(ends, ends, color="#7a7a7a", lw=0.6, zorder=1)
    axes.fill_between(ends, [kept * end for end in ends], ends, color="#d8dde3", lw=0, zorder=0.6)
    axes.set_xlim(ends)
    for config, row in drawing.cells.items():
        saturated = [c for c in row.values() if c.saturated and c.rate_rps and c.status == "valid"]
        knee = min(saturated, key=lambda c: c.rate_rps or 0, default=None)
        if knee is not None and knee.effective_throughput_rps is not None:
            axes.plot(
                knee.rate_rps or 0, knee.effective_throughput_rps, "o", markersize=6.5, zorder=5,
                markerfacecolor="none", markeredgecolor=drawing.marks[config].color,
                markeredgewidth=0.8,
            )  # fmt: skip


def _ratio_panel(drawing: rates.RateFigure, kept: float) -> None:
    """Effective over offered: where the curves above part from y = x by a few per cent."""
    strip = rates.ROW_IN * len(drawing.cells)
    axes = drawing.panel(rates.BOTTOM_IN + strip + rates.GAP_IN, RATIO_IN)
    for config, row in drawing.cells.items():
        mark = drawing.marks[config]
        points = sorted(
            (cell.rate_rps, cell.throughput_ratio)
            for cell in row.values()
            if cell.rate_rps and cell.throughput_ratio is not None and cell.status == "valid"
        )
        axes.plot(
            [rate for rate, _ in points], [ratio for _, ratio in points], color=mark.color,
            linestyle=mark.line, marker=mark.marker, markeredgewidth=0.6, markersize=2.8,
            markerfacecolor=mark.color if mark.filled else "white",
        )  # fmt: skip
    drawing.panels.append(axes)
    axes.axhspan(kept, 1, color="#d8dde3", lw=0, zorder=0.6)
    axes.grid(axis="y")
    axes.set_ylim(top=1.04)
    axes.tick_params(labelbottom=False)
    axes.set_ylabel("ratio to rate")


def draw(study: StudyTables) -> Picture:
    """Effective throughput with the line y = x, and their ratio; a ring marks each knee."""
    kept = study.settings["saturation"]["throughput_ratio_min"]
    drawing = rates.draw(study, QUANTITY)
    _ideal_and_knees(drawing, kept)
    _ratio_panel(drawing, kept)
    drawing.references()
    drawing.key(
        (
            "grey line: y = x",
            f"shaded: ≥ {kept:g} of rate",
            "○ knee: first",
            "\u00a0 saturated rate",
        )
    )
    return drawing.picture()

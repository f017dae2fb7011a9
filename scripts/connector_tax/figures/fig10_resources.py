"""Figure 10: what an idle connector takes besides latency, as differences from plain.

One panel for each resource; what a user of the machine pays for even when no request comes.
"""

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from connector_tax.artifacts.tables import ResourceRow
from connector_tax.figures import bars, style
from connector_tax.figures.style import Picture
from connector_tax.figures.tables import StudyTables
from connector_tax.marks import Mark
from connector_tax.text import MINUS

TITLE = "Figure 10: resources an idle connector takes"
CAPTION = (
    "Resources of each configuration minus plain's, from the launches of Phase A, with 95 % "
    "intervals of the block model: CPU of the ready server without a request, CPU per 1,000 "
    "requests at ref_safe, memory (PSS of all its processes, companions included) before the first "
    "request, GPU memory, KV blocks, threads, and time from start to ready. A point without an "
    "interval is a count that was the same in every launch, or a study of one block. Grey: the A/A "
    "band, plain against plain. Right of each panel the difference; above it plain's own value."
)
PANELS: Mapping[str, str] = {
    "idle_cpu": "CPU while idle, cores",
    "cpu_s_per_1000": "CPU s per 1,000 req.",
    "memory_pss_mib": "memory (PSS), MiB",
    "gpu_memory_mib": "GPU memory, MiB",
    "kv_blocks": "KV blocks",
    "threads": "threads",
    "startup_s": "start-up, s",
}
COLUMNS = (
    "config", "resource", "unit", "plain_mean", "difference", "difference_lo", "difference_hi",
    "tax", "aa_lo", "aa_hi", "interval_method", "n_blocks", "status", "reason",
)  # fmt: skip
ACROSS = 3
ROW_IN = 0.135
NUMBER_IN = 0.46
TITLE_IN = 0.24
AXIS_IN = 0.36


def draw(study: StudyTables) -> Picture:
    """A panel for each resource that was read in some launch, rows of configurations."""
    rows = [row for row in study.resources if row.resource in PANELS]
    shown = [name for name in PANELS if any(_drawn(r) for r in rows if r.resource == name)]
    if not shown:
        reasons = dict.fromkeys(row.reason for row in rows if row.reason)
        return style.absent(study, TITLE, next(iter(reasons), "no launch of Phase A was measured"))
    labels = [item.label for item in study.connectors]
    left = 0.12 + style.label_margin_in(labels, 6)
    panel = ROW_IN * len(labels)
    width = (style.PAGE_IN - left - 0.05) / ACROSS - NUMBER_IN
    lines = math.ceil(len(shown) / ACROSS)
    height = lines * (panel + TITLE_IN + AXIS_IN) + 0.16
    figure = style.new_figure(study, style.PAGE_IN, height, "grey: A/A, plain against plain")
    records: list[dict[str, object]] = []
    for position, name in enumerate(shown):
        line, column = divmod(position, ACROSS)
        bottom = height - (line + 1) * (panel + TITLE_IN + AXIS_IN) + AXIS_IN
        axes = style.axes_in(figure, left + column * (width + NUMBER_IN), bottom, width, panel)
        of_panel = {row.config: row for row in rows if row.resource == name}
        _panel(study, axes, name, of_panel, width)
        bars.row_labels(axes, labels if column == 0 else [""] * len(labels), 1.2)
        records += [_record(of_panel[item.id]) for item in study.connectors if item.id in of_panel]
    return Picture(figure, COLUMNS, records)


def aa_band(row: ResourceRow) -> tuple[float | None, float | None]:
    """The A/A interval as a difference, or its size both ways where it has no interval."""
    if row.aa_difference_lo is not None:
        return row.aa_difference_lo, row.aa_difference_hi
    if row.aa_difference is None:
        return None, None
    return -abs(row.aa_difference), abs(row.aa_difference)


def decimals(values: Sequence[float]) -> int:
    """How many decimals give the largest of these three digits; none for whole numbers."""
    largest = max(map(abs, values), default=0.0)
    if not largest or all(value == round(value) for value in values):
        return 0
    return max(0, 2 - math.floor(math.log10(largest)))


def number_text(value: float, digits: int) -> str:
    """A difference with its sign; without one where nothing is left of it."""
    rounded = round(value, digits)
    text = f"{rounded:+,.{digits}f}" if rounded else f"{0:.{digits}f}"
    return text.replace("-", MINUS)


def _drawn(row: ResourceRow) -> bool:
    return row.status == "valid" and row.difference is not None


def _panel(
    study: StudyTables, axes: Axes, name: str, rows: Mapping[str, ResourceRow], width_in: float
) -> None:
    marks = style.marks(study)
    drawn = [row for row in rows.values() if _drawn(row)]
    ends = [end for row in drawn for end in (row.difference, row.difference_lo, row.difference_hi)]
    band = aa_band(drawn[0])
    _axis(axes, [end for end in (*ends, *band) if end is not None])
    low, high = band
    if low is not None and high is not None and low < high:
        axes.axvspan(low, high, color=style.BAND, lw=0, zorder=0.5)
    digits = decimals([row.difference for row in drawn if row.difference is not None])
    for index, item in enumerate(study.connectors):
        row = rows.get(item.id)
        if row is None or not _drawn(row):
            _no_number(axes, index, row, width_in)
        else:
            _row(axes, index, row, marks[item.id], width_in, digits)
    plain = next((row.plain_mean for row in drawn if row.plain_mean is not None), 0.0)
    value = number_text(plain, decimals([plain])).removeprefix("+")
    axes.set_title(f"{PANELS[name]} (plain {value})", loc="left", x=0)


def _axis(axes: Axes, values: Sequence[float]) -> None:
    low, high = min(0.0, *values), max(0.0, *values)
    span = high - low or 1.0
    axes.set_xlim(low - 0.08 * span, high + 0.08 * span)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:+.6g}".replace("-", MINUS) if value else "0")
    )
    axes.set_xlabel("difference from plain")
    axes.axvline(0, color="black", lw=0.6, zorder=4)
    axes.grid(axis="x")


def _row(
    axes: Axes, index: int, row: ResourceRow, mark: Mark, width_in: float, digits: int
) -> None:
    assert row.difference is not None
    if row.difference_lo is not None and row.difference_hi is not None:
        ends = (row.difference_lo, row.difference_hi)
        axes.plot(ends, [index, index], color=mark.color, lw=0.7, zorder=5)
        for end in ends:
            axes.plot([end, end], [index - 0.12, index + 0.12], color=mark.color, lw=0.7, zorder=5)
    axes.plot(
        row.difference, index, mark.marker, color=mark.color, ms=3.6, zorder=6, clip_on=False,
        markeredgewidth=0.7, markerfacecolor=mark.color if mark.filled else "white",
    )  # fmt: skip
    axes.text(
        1 + 0.04 / width_in, index, number_text(row.difference, digits), ha="left",
        va="center_baseline", fontsize=style.SMALL_PT, transform=axes.get_yaxis_transform(),
    )  # fmt: skip


def _no_number(axes: Axes, index: int, row: ResourceRow | None, width_in: float) -> None:
    low, high = axes.get_xlim()
    style.hatched(axes, low, index - 0.4, high - low, 0.8)
    text = "not launched" if row is None else row.reason
    axes.text(
        0.5, index, style.fitted(text, width_in - 0.1, 5), fontsize=5, ha="center",
        va="center_baseline", transform=axes.get_yaxis_transform(), color="#333333", zorder=6,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4, "alpha": 0.9},
    )  # fmt: skip


def _record(row: ResourceRow) -> dict[str, object]:
    """A row as plotted, for the figure's CSV."""
    low, high = aa_band(row)
    kept = {name: getattr(row, name) for name in COLUMNS if not name.startswith("aa_")}
    return kept | {"aa_lo": low, "aa_hi": high}

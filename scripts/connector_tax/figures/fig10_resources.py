"""Figure 10: what an idle connector takes besides latency, as differences from plain.

One panel for each resource; what a user of the machine pays for even when no request comes.
"""

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from connector_tax.artifacts.tables import ResourceRow
from connector_tax.figures import rows, style
from connector_tax.figures.style import Picture
from connector_tax.figures.tables import StudyTables
from connector_tax.text import MINUS

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
ROW_IN = 0.15


def draw(study: StudyTables) -> Picture:
    """A panel for each resource that was read in some launch, rows of configurations."""
    resources = [row for row in study.resources if row.resource in PANELS]
    shown = [name for name in PANELS if any(_drawn(r) for r in resources if r.resource == name)]
    if not shown:
        reasons = dict.fromkeys(row.reason for row in resources if row.reason)
        reason = next(iter(reasons), "no launch of Phase A was measured")
        return style.absent(study, "fig10_resources", reason)
    lines = math.ceil(len(shown) / ACROSS)
    height = lines * (ROW_IN * len(study.connectors) + 0.55)
    notes = [study.against("differences from plain; grey: A/A, plain against plain")]
    figure = style.new_figure(study, style.PAGE_IN, height, notes)
    grid = figure.subplots(lines, min(ACROSS, len(shown)), squeeze=False, sharey=True)
    records: list[dict[str, object]] = []
    for axes in grid.flat[len(shown) :]:
        axes.set_axis_off()
    for axes, name in zip(grid.flat, shown, strict=False):
        of_panel = {row.config: row for row in resources if row.resource == name}
        _panel(study, axes, name, of_panel)
        records += [_record(of_panel[item.id]) for item in study.connectors if item.id in of_panel]
    return style.picture(figure, COLUMNS, records)


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


def _aa(row: ResourceRow) -> tuple[float, float] | None:
    return rows.band(row.aa_difference, row.aa_difference_lo, row.aa_difference_hi)


def _panel(study: StudyTables, axes: Axes, name: str, of_panel: Mapping[str, ResourceRow]) -> None:
    marks = style.marks(study)
    drawn = [row for row in of_panel.values() if _drawn(row)]
    aa = _aa(drawn[0])
    ends = [end for row in drawn for end in (row.difference, row.difference_lo, row.difference_hi)]
    _scale(axes, [end for end in (*ends, *(aa or ())) if end is not None])
    rows.shade(axes, aa)
    digits = decimals([row.difference for row in drawn if row.difference is not None])
    for index, item in enumerate(study.connectors):
        row = of_panel.get(item.id)
        if row is None or row.difference is None or not _drawn(row):
            rows.lost(axes, index, 0.8, "not launched" if row is None else row.reason, 1.0)
            continue
        mark = marks[item.id]
        rows.interval(axes, index, row.difference_lo, row.difference_hi, mark.color)
        axes.plot(row.difference, index, zorder=6, clip_on=False, **style.marker_style(mark))
        rows.beside(axes, index, number_text(row.difference, digits))
    plain = next((row.plain_mean for row in drawn if row.plain_mean is not None), 0.0)
    value = number_text(plain, decimals([plain])).removeprefix("+")
    title = f"{PANELS[name]} ({study.against('plain')} {value})"
    rows.prepare(axes, [item.label for item in study.connectors], title)


def _scale(axes: Axes, values: Sequence[float]) -> None:
    low, high = min(0.0, *values), max(0.0, *values)
    span = high - low or 1.0
    axes.set_xlim(low - 0.08 * span, high + 0.08 * span)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=3, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:+,.6g}".replace("-", MINUS) if value else "0")
    )
    axes.axvline(0, color="black", lw=0.6, zorder=4)
    axes.grid(axis="x")


def _record(row: ResourceRow) -> dict[str, object]:
    """A row as plotted, for the figure's CSV."""
    low, high = _aa(row) or (None, None)
    kept = {name: getattr(row, name) for name in COLUMNS if not name.startswith("aa_")}
    return kept | {"aa_lo": low, "aa_hi": high}

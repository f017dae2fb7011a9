"""What the figures over the offered rate share: the axis, the curves, taxes with their edges."""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from connector_tax.artifacts.names import REFERENCES
from connector_tax.artifacts.tables import POOLED, AggregateRow, TaxRow
from connector_tax.figures import rows, style
from connector_tax.figures.style import Picture
from connector_tax.figures.tables import StudyTables
from connector_tax.marks import Mark

COLUMNS = (
    "config", "rate_rps", "value", "lo", "hi", "unit", "n", "status", "reason", "blocks_lost",
    "saturation_criteria", "knee_rps",
)  # fmt: skip
SPREAD = 0.18  # of the distance between neighbouring rates, all configurations together
PANEL_IN = 1.55
# Where a point is drawn: value, low and high; the value is NaN where there is none.
Points = dict[float, tuple[float, float | None, float | None]]
CROSS: dict[str, Any] = {"marker": "x", "ls": "none", "color": "black", "ms": 4, "mew": 0.7}


def grid_rates(study: StudyTables) -> list[float]:
    """The offered rates of Phase A in ascending order, requests/s."""
    return sorted({float(rate) for rate in study.settings["phase_a"]["rates_rps"]})


def rate_axis(axes: Axes, study: StudyTables, named: bool = False) -> None:
    """A logarithmic rate axis with a tick for each rate, and the reference rates' lines.

    Args:
        axes: to be prepared.
        study: whose rates.
        named: whether the names of the reference rates stand above the lines.
    """
    rates = grid_rates(study)
    axes.set_xscale("log", base=2)
    axes.set_xlim(rates[0] / _step(rates) ** 0.55, rates[-1] * _step(rates) ** 0.55)
    axes.xaxis.set_major_locator(FixedLocator(rates))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.10g}"))
    at = {name: study.reference[name] for name in REFERENCES}
    lines = {at[name]: name for name in reversed(REFERENCES) if at[name] is not None}
    for rate, name in lines.items():
        style_of_line = "-" if name == "ref_safe" else (0, (3, 2))
        axes.axvline(rate, color="#9aa7b5", ls=style_of_line, lw=0.8, zorder=0.5)
        if not named:
            continue
        words = "ref_safe = ref_load" if len(lines) == 1 and at["ref_load"] else name
        last = rate == max(lines)
        side = "center" if len(lines) == 1 else "left" if last else "right"
        axes.annotate(
            words, (rate, 1), xycoords=axes.get_xaxis_transform(), xytext=(-3 if last else 3, 2),
            textcoords="offset points", ha=side, color="#4f6073",
        )  # fmt: skip


def _step(rates: Sequence[float]) -> float:
    """The smallest ratio between neighbouring rates."""
    return min((b / a for a, b in itertools.pairwise(rates)), default=2.0)


def share_of(study: StudyTables, config: str) -> float:
    """A configuration's place among those drawn side by side at one rate, -0.5 to 0.5."""
    order = [item.id for item in study.configurations]
    middle = (len(order) - 1) / 2
    return (order.index(config) - middle) / max(1.0, 2 * middle)


def _aside(study: StudyTables, rate: float, share: float) -> float:
    """Where a point at `rate` is drawn: slightly aside, so that none hides another."""
    return rate * float(_step(grid_rates(study)) ** (SPREAD * share))


def line(axes: Axes, points: Points, mark: Mark) -> None:
    """Points with their intervals, joined; the line breaks where a rate between two is lost.

    Args:
        axes: to be drawn on.
        points: where each is drawn, and its numbers.
        mark: of the configuration.
    """
    values = [points[x][0] for x in sorted(points)]
    axes.plot(sorted(points), values, ls=mark.line, zorder=3, **style.marker_style(mark))
    for x, (_, low, high) in points.items():
        if low is not None and high is not None:
            axes.plot([x, x], [low, high], color=mark.color, lw=0.8, zorder=2)


def within(rows_: Sequence[TaxRow]) -> tuple[float, float]:
    """The range of the taxes that carry no mark, with their intervals; of all where each does."""
    clear = [row for row in rows_ if not row.mark] or list(rows_)
    values = [0.0, *(value for row in clear for value in rows.numbers(row))]
    return min(values), max(values)


def tax_line(
    axes: Axes, study: StudyTables, taxes: Sequence[TaxRow], mark: Mark, share: float
) -> None:
    """Taxes over the rate: a triangle on marked ones, an arrow for one beyond the axis.

    `share` is the points' place beside others at the same rate (`share_of`).
    """
    low, high = axes.get_ylim()
    known = {row.rate_rps: row for row in taxes if rows.numbers(row) and row.rate_rps is not None}
    points: Points = {}
    for rate in grid_rates(study):
        row = known.get(rate)
        x = _aside(study, rate, share)
        if row is None or row.tax is None:
            points[x] = (math.nan, None, None)
            continue
        points[x] = (row.tax, row.tax_lo, row.tax_hi)
        if not low <= row.tax <= high:
            edge, marker = (high, "^") if row.tax > high else (low, "v")
            axes.plot(x, edge, marker, color=mark.color, ms=3.6, zorder=6, clip_on=False)
        elif row.mark:
            axes.plot(x, row.tax, zorder=6, **rows.OVERLOAD)
    line(axes, points, mark)


def taxes_of(study: StudyTables, metric: str) -> dict[str, list[TaxRow]]:
    """Configuration, and the A/A launch of plain, to its taxes in Phase A."""
    by_config: dict[str, list[TaxRow]] = {
        item.id: [] for item in study.launched if item.id != study.baseline
    }
    for row in study.taxes:
        if row.phase == "A" and row.metric == metric and row.config in by_config:
            by_config[row.config].append(row)
    return by_config


def knee_text(study: StudyTables, config: str) -> str:
    """The configuration's saturation rate as text; '>32' when no rate of the grid saturates it."""
    cells = [cell for (name, _), cell in study.pooled("A").items() if name == config]
    if not any(cell.status == "valid" for cell in cells):
        return "–"
    knee = study.reference["saturation_rate_rps"].get(config)
    saturated = [c.rate_rps for c in cells if c.saturated and c.rate_rps is not None]
    if knee is None and not saturated:
        return f">{max(cell.rate_rps or 0.0 for cell in cells):.10g}"
    return f"{min(saturated) if knee is None else knee:.10g}"


def records(study: StudyTables, column: str, unit: str) -> list[dict[str, object]]:
    """A quantity of every cell of Phase A for the CSV, configuration by configuration.

    Args:
        study: the tables.
        column: of aggregate.csv, its ends under `_lo` and `_hi` before the unit, where it has any.
        unit: what the value is in.
    """
    lost = Counter(
        (row.configuration, row.cell)
        for row in study.aggregate
        if row.phase == "A" and row.block != POOLED and row.status != "valid"
    )
    order = [item.id for item in study.configurations]
    cells = sorted(
        study.pooled("A").values(), key=lambda cell: (order.index(cell.config), cell.rate_rps or 0)
    )
    stem, _, suffix = column.rpartition("_")
    return [
        {
            "config": cell.config, "rate_rps": cell.rate_rps or 0.0, "value": getattr(cell, column),
            "lo": getattr(cell, f"{stem}_lo_{suffix}", None),
            "hi": getattr(cell, f"{stem}_hi_{suffix}", None), "unit": unit, "n": cell.n,
            "status": cell.status, "reason": cell.reason,
            "blocks_lost": lost[cell.config, cell.cell],
            "saturation_criteria": cell.saturation_criteria,
            "knee_rps": knee_text(study, cell.config),
        }
        for cell in cells
    ]  # fmt: skip


def sample_text(study: StudyTables) -> str:
    """How many requests stand behind a point."""
    counts = [cell.n for cell in study.pooled("A").values() if cell.n]
    return f"{rows.n_range(counts)} requests per point"


def latency_figure(study: StudyTables, metric: str) -> Picture:
    """A latency against the rate: above in ms, below its tax over plain."""
    taxes = taxes_of(study, metric)
    compared = [row for item in study.connectors for row in taxes[item.id]]
    label = rows.METRICS[metric]
    note = f"{rows.interval_text(compared)}; {sample_text(study)}"
    lines = math.ceil(len(study.configurations) / 2)
    height = 2 * PANEL_IN + 0.55 + 0.13 * (lines + 1)
    figure = style.new_figure(study, style.COLUMN_IN, height, [note])
    upper, lower = figure.subplots(2, sharex=True)
    marks, cells = style.marks(study), study.pooled("A")
    for item in study.configurations:
        own = {cell.rate_rps: cell for (name, _), cell in cells.items() if name == item.id}
        _curve(upper, study, item.id, own, metric, marks[item.id])
    upper.set_yscale("log")
    _log_ticks(upper)
    upper.set_ylabel(f"{label} (ms)")
    upper.grid(axis="y")
    rows.tax_scale(lower, within(compared), "y")
    lower.set_ylabel(rows.tax_label(study, lower, "y"))
    for item in study.connectors:
        tax_line(lower, study, taxes[item.id], marks[item.id], share_of(study, item.id))
    rate_axis(upper, study, named=True)
    rate_axis(lower, study)
    lower.set_xlabel("offered rate (requests/s)")
    handles = style.configuration_handles(study, [item.id for item in study.configurations])
    crossed: list[Artist] = [Line2D([], [], label="saturated", **CROSS)]
    marked = rows.overload_handles(compared, "saturated, dropped: no verdict")
    style.legend(figure, [*handles, *crossed, *marked], 2)
    by_key: dict[tuple[object, object], TaxRow] = {(r.config, r.rate_rps): r for r in compared}
    table = [
        record | {name: getattr(by_key.get((record["config"], record["rate_rps"])), name, None)
                  for name in rows.ENDS}
        for record in records(study, f"{metric}_ms", "ms")
    ]  # fmt: skip
    return style.picture(figure, (*COLUMNS, *rows.ENDS), table)


def _curve(
    axes: Axes, study: StudyTables, config: str, cells: Mapping[float | None, AggregateRow],
    metric: str, mark: Mark,
) -> None:  # fmt: skip
    points: Points = {}
    for rate in grid_rates(study):
        cell, x = cells.get(rate), _aside(study, rate, share_of(study, config))
        value = None if cell is None else getattr(cell, f"{metric}_ms")
        if cell is None or value is None:
            points[x] = (math.nan, None, None)
            continue
        ends = (getattr(cell, f"{metric}_{end}_ms") for end in ("lo", "hi"))
        points[x] = (value, *ends)
        if cell.saturated:
            axes.plot(x, value, zorder=4, **CROSS)
    line(axes, points, mark)


def _log_ticks(axes: Axes) -> None:
    """Plain numbers on a logarithmic y axis, fewer per decade the more decades there are."""
    low, high = axes.get_ylim()
    decades = math.log10(high / low)
    subdivisions: tuple[float, ...] = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
    if decades > 0.8:
        subdivisions = (1.0,) if decades > 3 else (1.0, 2.0, 5.0)
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=subdivisions, numticks=20))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.10g}"))

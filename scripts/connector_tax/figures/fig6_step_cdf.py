"""Figure 6: distribution of the step duration at ref_safe, per configuration (Phase A).

The upper panel is the design's step duration, schedule() entry to exit; the lower one the whole
engine step, where a connector whose cost lies outside schedule() is seen.
"""

from dataclasses import asdict
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from connector_tax.figures import bars, style
from connector_tax.figures.rates import n_range, plain_number
from connector_tax.figures.style import Picture
from connector_tax.figures.tables import Study
from connector_tax.study_file import PLAIN

TITLE = "Figure 6: step duration at ref_safe"
CAPTION = (
    "Cumulative distribution, at ref_safe (Phase A), of schedule() and, where the records have it,"
    " of the whole engine step, over steps that scheduled tokens; empty polling steps are left out."
    " The legend gives plain's medians and the others' differences from them. The axes span the 1st"
    " to the 99th percentile."
)
COLUMNS = ("config", "step_duration_us", "engine_step_us", "cdf", "status", "reason")
LABELS = {"step_duration_us": "schedule()", "engine_step_us": "whole engine step"}
SHOWN = (0.01, 0.99)  # quantiles the x axes span; the CSV holds all
PLOT_IN = 1.35
LINE_IN = 0.12

# Duration in µs and cumulative share, in order.
Curve = list[tuple[float, float]]


def median(curve: Curve) -> float | None:
    """The duration at the first point whose cumulative share reaches one half, in µs."""
    return next((value for value, share in curve if share >= 0.5), None)


def _legend(study: Study, figure: Figure, curves: dict[str, dict[str, Curve]]) -> None:
    """Under the plots: line samples, each with its medians or their differences from plain's."""
    marks = style.marks(study)
    height = LINE_IN * (len(study.launched) + 1)
    legend = style.axes_in(figure, 0.08, 0.24, style.COLUMN_IN - 0.16, height)
    legend.set_axis_off()
    ends = [0.99 - 0.25 * place for place in range(len(curves))][::-1]
    y = 1 - 0.5 * LINE_IN / height
    words = f"plain's median, then differences, µs ({study.reference['ref_safe']:g} req/s)"
    head: dict[str, Any] = {"fontsize": 5.5, "va": "center_baseline", "color": style.MUTED}
    legend.text(0, y, style.fitted(words, 2.0, 5.5), **head)
    for end, measure in zip(ends, curves, strict=True):
        legend.text(end, y, LABELS[measure], ha="right", **head)
    for line, item in enumerate(study.launched, 1):
        y = 1 - (line + 0.5) * LINE_IN / height
        style.line_sample(legend, (0, 0.0375), y, marks[item.id])
        label = style.fitted(item.label, 1.4, 5.5)
        legend.text(0.055, y, label, fontsize=5.5, va="center_baseline")
        for end, by_config in zip(ends, curves.values(), strict=True):
            value = _median_text(study, by_config, item.id)
            legend.text(end, y, value, fontsize=5.5, ha="right", va="center_baseline")


def _median_text(study: Study, curves: dict[str, Curve], config: str) -> str:
    middle, base = median(curves.get(config, [])), median(curves.get(PLAIN, []))
    if middle is None:
        return "skipped" if study.skip_reason(config) else "no steps"
    if base is None or config == PLAIN:
        return f"{middle:.0f}"
    return f"{middle - base:+.0f}".replace("-", style.MINUS)


def _curves(study: Study) -> dict[str, dict[str, Curve]]:
    """Measure -> configuration -> curve; the whole engine step only where the records have it."""
    curves: dict[str, dict[str, Curve]] = {}
    for point in sorted(study.step_cdf, key=lambda point: (point.config, point.cdf)):
        for measure in LABELS:
            value = getattr(point, measure)
            if value is not None:
                by_config = curves.setdefault(measure, {})
                by_config.setdefault(point.config, []).append((value, point.cdf))
    return curves or {"step_duration_us": {}}


def draw(study: Study) -> Picture:
    """Cumulative share of non-empty steps against their duration in µs, logarithmic."""
    absent = bars.no_steps(study, TITLE) or bars.no_reference(study, TITLE)
    if absent:
        return absent
    curves = _curves(study)
    counts = [
        row.n_steps
        for (config, _), row in study.pooled("A").items()
        if row.rate_rps == study.reference["ref_safe"]
        and row.n_steps
        and config in curves["step_duration_us"]
    ]
    note = n_range(counts).replace("n =", "steps:") + " per curve"
    legend_in = LINE_IN * (len(study.launched) + 1)
    height = legend_in + 0.24 + len(curves) * (PLOT_IN + 0.42) + 0.06
    figure = style.new_figure(study, style.COLUMN_IN, height, note)
    for position, (measure, by_config) in enumerate(reversed(curves.items())):
        bottom = legend_in + 0.62 + position * (PLOT_IN + 0.42)
        axes = style.axes_in(figure, 0.42, bottom, style.COLUMN_IN - 0.58, PLOT_IN)
        _panel(study, axes, by_config)
        axes.set_xlabel(f"{LABELS[measure]} (µs)")
    _legend(study, figure, curves)
    records: list[dict[str, object]] = [
        {**asdict(point), "status": "valid", "reason": ""}
        for item in study.launched
        for point in study.step_cdf
        if point.config == item.id
    ]
    lost = [item.id for item in study.launched if item.id not in curves["step_duration_us"]]
    return Picture(figure, COLUMNS, records + [_no_curve(study, config) for config in lost])


def _panel(study: Study, axes: Axes, curves: dict[str, Curve]) -> None:
    marks = style.marks(study)
    for index, item in enumerate(study.launched):
        curve = curves.get(item.id, [])
        mark = marks[item.id]
        every = max(1, len(curve) // 6)
        axes.plot(
            [value for value, _ in curve], [share for _, share in curve],
            color=mark.color, linestyle=mark.line, marker=mark.marker, lw=0.9,
            markevery=(index * every // 9, every), markersize=2.6, markeredgewidth=0.5,
            markerfacecolor=mark.color if mark.filled else "white",
        )  # fmt: skip
    _axis(axes, curves)


def _no_curve(study: Study, config: str) -> dict[str, object]:
    reason = study.skip_reason(config)
    status = "missing" if reason is None else "skipped"
    return dict.fromkeys(COLUMNS) | {"config": config, "status": status, "reason": reason}


def _axis(axes: Axes, curves: dict[str, Curve]) -> None:
    inside = [value for curve in curves.values() for value, share in curve
              if SHOWN[0] <= share <= SHOWN[1] and value > 0]  # fmt: skip
    axes.set_xscale("log")
    subdivisions: tuple[float, ...] = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
    if inside:
        axes.set_xlim(0.95 * min(inside), 1.05 * max(inside))
        if (span := max(inside) / min(inside)) > 10:
            subdivisions = (1.0, 2.0, 5.0) if span < 200 else (1.0,)
    axes.xaxis.set_major_locator(LogLocator(subs=subdivisions, numticks=30))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(plain_number))
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.grid()
    axes.set_ylabel("cumulative share of steps")

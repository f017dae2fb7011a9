"""Figure 6: distribution of the step duration at ref_safe, per configuration (Phase A)."""

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from connector_tax.figures import bars, style
from connector_tax.figures.rates import n_range, plain_number
from connector_tax.figures.style import Picture
from connector_tax.figures.tables import PLAIN, StepPoint, Study

TITLE = "Figure 6: step duration at ref_safe"
CAPTION = (
    "Cumulative distribution of the engine's step duration at ref_safe (Phase A), over steps that"
    " scheduled tokens; empty polling steps are left out. The legend gives plain's median and the"
    " others' difference from it. The axis spans the 1st to the 99th percentile."
)
COLUMNS = ("config", "step_duration_us", "cdf", "status", "reason")
SHOWN = (0.01, 0.99)  # quantiles the x axis spans; the CSV holds all
PLOT_IN = 1.75


def no_steps_reason(study: Study) -> str | None:
    """Why there are no step records, or None if there are."""
    if study.patch["step_timing_available"]:
        return None
    reason = study.patch.get("reason") or "the step probe could not be installed"
    return f"no step timing: {reason} (patch/patch_status.json)."


def median(points: list[StepPoint]) -> float | None:
    """The step duration at the first point whose cumulative share reaches one half, in µs."""
    return next((point.step_duration_us for point in points if point.cdf >= 0.5), None)


def _legend(study: Study, axes: Axes, curves: dict[str, list[StepPoint]], bottom_in: float) -> None:
    """Two columns of line samples with medians, and the difference from plain's, under the plot."""
    marks = style.marks(study)
    base = median(curves.get(PLAIN, []))
    figure = axes.get_figure()
    assert figure is not None
    lines = (len(study.launched) + 1) // 2
    legend = style.axes_in(
        figure.figure, 0.08, bottom_in, style.COLUMN_IN - 0.16, 0.12 * lines
    )  # fmt: skip
    legend.set_axis_off()
    for index, item in enumerate(study.launched):
        column, line = divmod(index, lines)
        x, y = 0.5 * column, 1 - (line + 0.5) / lines
        style.line_sample(legend, (x, x + 0.075), y, marks[item.id])
        middle = median(curves.get(item.id, []))
        if middle is None:
            value = "skipped" if study.skip_reason(item.id) else "no steps"
        elif base is None or item.id == PLAIN:
            value = f"{middle:.0f}"
        else:
            value = f"{middle - base:+.0f}".replace("-", style.MINUS)
        label = style.fitted(item.label, 0.95, 5.5)
        legend.text(x + 0.09, y, label, fontsize=5.5, va="center_baseline")
        legend.text(
            x + 0.475, y, value, fontsize=5.5, ha="right", va="center_baseline",
        )  # fmt: skip


def draw(study: Study) -> Picture:
    """Cumulative share of non-empty steps against their duration in µs, logarithmic."""
    reason = no_steps_reason(study)
    if reason:
        return style.absent(study, TITLE, reason)
    absent = bars.no_reference(study, TITLE)
    if absent:
        return absent
    curves: dict[str, list[StepPoint]] = {}
    for point in sorted(study.step_cdf, key=lambda point: (point.config, point.cdf)):
        curves.setdefault(point.config, []).append(point)
    lines = (len(study.launched) + 1) // 2
    legend_in = 0.12 * lines
    counts = [
        row.n_steps
        for (config, _), row in study.pooled("A").items()
        if row.rate_rps == study.reference["ref_safe"] and row.n_steps and config in curves
    ]
    note = n_range(counts).replace("n =", "steps:") + " per curve"
    figure = style.new_figure(study, style.COLUMN_IN, PLOT_IN + legend_in + 0.72, note)
    axes = style.axes_in(
        figure, 0.42, legend_in + 0.64, style.COLUMN_IN - 0.52, PLOT_IN
    )  # fmt: skip
    marks = style.marks(study)
    records: list[dict[str, object]] = []
    for index, item in enumerate(study.launched):
        points = curves.get(item.id, [])
        mark = marks[item.id]
        every = max(1, len(points) // 6)
        axes.plot(
            [point.step_duration_us for point in points], [point.cdf for point in points],
            color=mark.color, linestyle=mark.line, marker=mark.marker, lw=0.9,
            markevery=(index * every // 9, every), markersize=2.6, markeredgewidth=0.5,
            markerfacecolor=mark.color if mark.filled else "white",
        )  # fmt: skip
        for point in points:
            records.append({"config": item.id, "step_duration_us": point.step_duration_us,
                            "cdf": point.cdf, "status": "valid", "reason": ""})  # fmt: skip
        if not points:
            records.append(_no_curve(study, item.id))
    _axis(axes, curves)
    _legend(study, axes, curves, 0.26)
    figure.text(
        0.08 / style.COLUMN_IN, (0.26 + legend_in) / figure.get_figheight(),
        "median of plain and differences from it, in µs; "
        f"Phase A, {study.reference['ref_safe']:g} req/s",
        fontsize=5.5, color=style.MUTED, va="bottom",
    )  # fmt: skip
    return Picture(figure, COLUMNS, records)


def _no_curve(study: Study, config: str) -> dict[str, object]:
    reason = study.skip_reason(config)
    status = "missing" if reason is None else "skipped"
    return dict.fromkeys(COLUMNS) | {"config": config, "status": status, "reason": reason}


def _axis(axes: Axes, curves: dict[str, list[StepPoint]]) -> None:
    inside = [point.step_duration_us for points in curves.values() for point in points
              if SHOWN[0] <= point.cdf <= SHOWN[1] and point.step_duration_us > 0]  # fmt: skip
    axes.set_xscale("log")
    if inside:
        axes.set_xlim(0.95 * min(inside), 1.05 * max(inside))
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0), numticks=30))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(plain_number))
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.grid()
    axes.set_xlabel("step duration (µs)")
    axes.set_ylabel("cumulative share of steps")

"""Figure 6: distribution of the step duration at ref_safe, per configuration (Phase A).

The left panel is the design's step duration, schedule() entry to exit; the right one the whole
engine step, where a connector whose cost lies outside schedule() is seen.
"""

from dataclasses import asdict

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from connector_tax.artifacts.names import PLAIN
from connector_tax.artifacts.tables import StepTaxRow
from connector_tax.figures import bars, style
from connector_tax.figures.rates import n_range, plain_number
from connector_tax.figures.style import Picture
from connector_tax.figures.tables import StudyTables

TITLE = "Figure 6: step duration at ref_safe"
CAPTION = (
    "Cumulative distribution, at ref_safe (Phase A), of schedule() and, where the records have it,"
    " of the whole engine step, over steps that scheduled tokens; empty polling steps are left out."
    " Each curve is the mean of its launches' quantiles, plain's of all its launches. The table"
    " gives plain's median and each other configuration's difference from it with its 95 % interval"
    " (step taxes: medians of launches, compared within blocks). The axes span the 1st to the 99th"
    " percentile."
)
COLUMNS = ("config", "step_duration_us", "engine_step_us", "cdf", "status", "reason")
LABELS = {"step_duration_us": "schedule()", "engine_step_us": "whole engine step"}
TAXES = {"step_duration_us": "tax_step_p50", "engine_step_us": "tax_engine_step_p50"}
SHOWN = (0.01, 0.99)  # quantiles the x axes span; the CSV holds all
PLOT_IN = 1.7
LINE_IN = 0.14
LEFT_IN = 0.5
GAP_IN = 0.55

# Duration in µs and cumulative share, in order.
Curve = list[tuple[float, float]]


def _curves(study: StudyTables) -> dict[str, dict[str, Curve]]:
    """Measure -> configuration -> curve; the whole engine step only where the records have it."""
    curves: dict[str, dict[str, Curve]] = {}
    for point in sorted(study.step_cdf, key=lambda point: (point.config, point.cdf)):
        for measure in LABELS:
            value = getattr(point, measure)
            if value is not None:
                by_config = curves.setdefault(measure, {})
                by_config.setdefault(point.config, []).append((value, point.cdf))
    return curves or {"step_duration_us": {}}


def _median(curve: Curve) -> float | None:
    """The mean of the launches' medians, in µs: the curve at one half."""
    return next((value for value, share in curve if share == 0.5), None)


def draw(study: StudyTables) -> Picture:
    """Cumulative share of non-empty steps against their duration in µs, logarithmic."""
    absent = bars.no_steps(study, TITLE) or bars.no_reference(study, TITLE)
    if absent:
        return absent
    curves = _curves(study)
    drawn = curves["step_duration_us"]
    counts = [
        row.n_steps
        for (config, _), row in study.pooled("A").items()
        if row.rate_rps == study.reference["ref_safe"] and row.n_steps and config in drawn
    ]
    note = n_range(counts).replace("n =", "steps:") + " per configuration"
    table_in = LINE_IN * (len(study.configurations) + 2)
    height = table_in + 0.3 + 0.4 + PLOT_IN + 0.08
    figure = style.new_figure(study, style.PAGE_IN, height, note)
    width = (style.PAGE_IN - LEFT_IN - GAP_IN - 0.12) / 2
    for place, (measure, by_config) in enumerate(curves.items()):
        left = LEFT_IN + place * (width + GAP_IN)
        axes = style.axes_in(figure, left, table_in + 0.7, width, PLOT_IN)
        _panel(study, axes, by_config)
        axes.set_xlabel(f"{LABELS[measure]} (µs)")
    _table(study, figure, curves, table_in)
    records: list[dict[str, object]] = [
        {**asdict(point), "status": "valid", "reason": ""}
        for item in study.configurations
        for point in study.step_cdf
        if point.config == item.id
    ]
    lost = [item.id for item in study.configurations if item.id not in drawn]
    return Picture(figure, COLUMNS, records + [_no_curve(study, config) for config in lost])


def _panel(study: StudyTables, axes: Axes, curves: dict[str, Curve]) -> None:
    marks = style.marks(study)
    for index, item in enumerate(study.configurations):
        curve = curves.get(item.id, [])
        mark = marks[item.id]
        every = max(1, len(curve) // 6)
        axes.plot(
            [value for value, _ in curve], [share for _, share in curve],
            color=mark.color, linestyle=mark.line, marker=mark.marker, lw=0.9,
            markevery=(index * every // 9, every), markersize=2.6, markeredgewidth=0.5,
        )  # fmt: skip
    _axis(axes, curves)


def _table(
    study: StudyTables, figure: Figure, curves: dict[str, dict[str, Curve]], height_in: float
) -> None:
    """Under the plots: line samples, plain's medians and the step taxes."""
    marks = style.marks(study)
    axes = style.axes_in(figure, 0.1, 0.24, style.PAGE_IN - 0.2, height_in)
    axes.set_axis_off()
    width = (style.PAGE_IN - LEFT_IN - GAP_IN - 0.12) / 2
    # Under the right end of each plot.
    ends = [
        (LEFT_IN + width + place * (width + GAP_IN) - 0.1) / (style.PAGE_IN - 0.2)
        for place in range(len(curves))
    ]
    lines = len(study.configurations) + 2

    def write(line: int, x: float, text: str, ha: str, color: str = "black") -> None:
        y = 1 - (line + 0.5) / lines
        axes.text(x, y, text, ha=ha, va="center_baseline", color=color, fontsize=style.TEXT_PT)

    words = f"{study.reference['ref_safe']:g} req/s; plain's median, then over plain (µs)"
    write(0, 0, style.fitted(words, 2.6, style.TEXT_PT), "left", style.MUTED)
    for end, measure in zip(ends, curves, strict=True):
        write(0, end, LABELS[measure], "right", style.MUTED)
    for line, item in enumerate(study.configurations, 1):
        style.line_sample(axes, (0, 0.025), 1 - (line + 0.5) / lines, marks[item.id])
        write(line, 0.035, style.fitted(item.label, 2.0, style.TEXT_PT), "left")
        for end, (measure, by_config) in zip(ends, curves.items(), strict=True):
            write(line, end, _number(study, measure, by_config, item.id), "right")
    write(lines - 1, 0.035, "plain over plain (A/A)", "left", style.MUTED)
    for end, measure in zip(ends, curves, strict=True):
        rows = study.step_taxes_at("ref_safe", TAXES[measure]).values()
        noise = next((row for row in rows if row.aa_us is not None), None)
        text = _signed(noise.aa_us, noise.aa_lo_us, noise.aa_hi_us) if noise else "none"
        write(lines - 1, end, text, "right", style.MUTED)


def _number(study: StudyTables, measure: str, curves: dict[str, Curve], config: str) -> str:
    if config == PLAIN:
        middle = _median(curves.get(PLAIN, []))
        return "no steps" if middle is None else f"{middle:.0f}"
    row: StepTaxRow | None = study.step_taxes_at("ref_safe", TAXES[measure]).get(config)
    if row is None or row.us is None:
        return "skipped" if study.skip_reason(config) else "no number"
    return _signed(row.us, row.lo_us, row.hi_us)


def _signed(us: float | None, low: float | None, high: float | None) -> str:
    """'+31 [−1, +64]' in µs, without brackets where there is no interval."""
    if us is None:
        return "none"
    if low is None or high is None:
        return style.signed(us)
    return f"{style.signed(us)} [{style.signed(low)}, {style.signed(high)}]"


def _no_curve(study: StudyTables, config: str) -> dict[str, object]:
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
    axes.tick_params(labelsize=style.TEXT_PT)
    axes.grid()
    axes.set_ylabel("cumulative share of steps")

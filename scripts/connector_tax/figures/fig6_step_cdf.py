"""Figure 6: distribution of the step duration at ref_safe, per configuration (Phase A).

The left panel is the design's step duration, schedule() entry to exit; the right one the whole
engine step, where a connector whose cost lies outside schedule() is seen.
"""

from dataclasses import asdict

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from connector_tax.figures import rows, style
from connector_tax.figures.style import Picture
from connector_tax.figures.tables import StudyTables
from connector_tax.text import size

COLUMNS = ("config", "step_duration_us", "engine_step_us", "cdf", "status", "reason")
LABELS = {"step_duration_us": "schedule()", "engine_step_us": "whole engine step"}
TAXES = {"step_duration_us": "tax_step_p50", "engine_step_us": "tax_engine_step_p50"}
SHOWN = (0.01, 0.99)  # quantiles the x axes span; the CSV holds all
PLOT_IN = 1.9
LINE_IN = 0.14


def draw(study: StudyTables) -> Picture:
    """Cumulative share of non-empty steps against their duration in µs, logarithmic."""
    name = "fig6_step_cdf"
    absent = rows.no_steps(study, name) or rows.no_reference(study, name)
    if absent:
        return absent
    points = pd.DataFrame([asdict(point) for point in study.step_cdf], columns=COLUMNS[:4])
    measures = [m for m in LABELS if points[m].notna().any()] or ["step_duration_us"]
    lines = len(study.configurations) + 2
    notes = [f"{_counts(study)}; {study.reference['ref_safe']:g} req/s"]
    height = PLOT_IN + 0.3 + LINE_IN * lines
    figure = style.new_figure(study, style.PAGE_IN, height, notes)
    plots, table = figure.subplots(
        2, len(measures), squeeze=False, height_ratios=[PLOT_IN, LINE_IN * lines]
    )
    for axes, words, measure in zip(plots, table, measures, strict=True):
        _panel(study, axes, points, measure)
        _table(study, words, points, measure, named=measure == measures[0])
    plots[0].set_ylabel("cumulative share of steps")
    drawn = set(points["config"])
    lost = [item.id for item in study.configurations if item.id not in drawn]
    records: list[dict[str, object]] = [
        {**asdict(point), "status": "valid", "reason": ""}
        for item in study.configurations
        for point in study.step_cdf
        if point.config == item.id
    ]
    return style.picture(figure, COLUMNS, records + [_no_curve(study, c) for c in lost])


def _counts(study: StudyTables) -> str:
    counts = [
        row.n_steps
        for row in study.pooled("A").values()
        if row.rate_rps == study.reference["ref_safe"] and row.n_steps
    ]
    return rows.n_range(counts).replace("n =", "steps:") + " per configuration"


def _panel(study: StudyTables, axes: Axes, points: pd.DataFrame, measure: str) -> None:
    for index, (config, mark) in enumerate(style.marks(study).items()):
        curve = points[points["config"] == config].sort_values("cdf")
        every = max(1, len(curve) // 6)
        axes.plot(
            curve[measure].astype(float), curve["cdf"], ls=mark.line, ms=2.8,
            markevery=(index * every // 9, every), **style.marker_style(mark),
        )  # fmt: skip
    inside = points[points["cdf"].between(*SHOWN)][measure].astype(float)
    inside = inside[inside > 0]
    axes.set_xscale("log")
    subdivisions: tuple[float, ...] = (1.0, 2.0, 5.0)
    if len(inside):
        axes.set_xlim(0.95 * inside.min(), 1.05 * inside.max())
        span = inside.max() / inside.min()
        subdivisions = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0) if span < 10 else subdivisions
        subdivisions = (1.0,) if span > 200 else subdivisions
    axes.xaxis.set_major_locator(LogLocator(subs=subdivisions, numticks=30))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.set(ylim=(0, 1), yticks=[0, 0.25, 0.5, 0.75, 1], xlabel=f"{LABELS[measure]} (µs)")
    axes.grid()


def _table(study: StudyTables, axes: Axes, points: pd.DataFrame, measure: str, named: bool) -> None:
    """Under a plot the median and the step taxes, under the first the names and lines too."""
    axes.set_axis_off()
    taxes = study.step_taxes_at("ref_safe", TAXES[measure])
    noise = next((row for row in taxes.values() if row.aa_us is not None), None)
    words = [study.against(f"{LABELS[measure]}: plain's median, then over plain, µs")]
    labels = [""]
    for item in study.configurations:
        labels.append(style.fitted(item.label, 1.5))
        words.append(_number(study, points, measure, item.id))
    aa = (noise.aa_us, noise.aa_lo_us, noise.aa_hi_us) if noise else (None,)
    labels.append(study.against("plain over plain (A/A)"))
    words.append(size(*aa))
    axes.set(xlim=(0, 1), ylim=(len(words) - 0.5, -0.5))
    marks = list(style.marks(study).values())
    for line, (label, text) in enumerate(zip(labels, words, strict=True)):
        color = style.MUTED if line in (0, len(words) - 1) else "black"
        axes.text(1, line, text, ha="right", va="center_baseline", color=color)
        if not named:
            continue
        axes.text(0.12, line, label, va="center_baseline", color=color)
        if 0 < line < len(words) - 1:
            mark = marks[line - 1]
            axes.plot([0, 0.05, 0.1], [line] * 3, ls=mark.line, markevery=[1],
                      **style.marker_style(mark))  # fmt: skip


def _number(study: StudyTables, points: pd.DataFrame, measure: str, config: str) -> str:
    if config == study.baseline:
        middle = points[(points["config"] == config) & (points["cdf"] == 0.5)][measure]
        return "no steps" if middle.empty else f"{float(middle.iloc[0]):,.0f}"
    row = study.step_taxes_at("ref_safe", TAXES[measure]).get(config)
    if row is None or row.us is None:
        return "skipped" if study.skip_reason(config) else "no number"
    return size(row.us, row.lo_us, row.hi_us)


def _no_curve(study: StudyTables, config: str) -> dict[str, object]:
    reason = study.skip_reason(config)
    status = "missing" if reason is None else "skipped"
    return dict.fromkeys(COLUMNS) | {"config": config, "status": status, "reason": reason}

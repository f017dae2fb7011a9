"""Figure 6: distribution of the step duration at ref_safe, per configuration (Phase A).

The left panel is the design's step duration, schedule() entry to exit; the right one the whole
engine step, where a connector whose cost lies outside schedule() is seen.
"""

import pandas as pd
from matplotlib.axes import Axes

from connector_tax.artifacts.tables import STEP, StepPoint
from connector_tax.figures import rows, style
from connector_tax.figures.tables import StudyTables, frame
from connector_tax.text import size

LABELS = {"step_duration_us": "schedule()", "engine_step_us": "whole engine step"}
TAXES = {"step_duration_us": "step", "engine_step_us": "engine_step"}
COLUMNS = ["config", *LABELS, "cdf", "status", "reason"]
SHOWN = (0.01, 0.99)  # quantiles the x axes span; the CSV holds all
PLOT_IN = 1.9
LINE_IN = 0.14


def draw(study: StudyTables) -> style.Picture:
    """Cumulative share of non-empty steps against their duration in µs, logarithmic."""
    if absent := rows.stand_in(study, "fig6_step_cdf", steps=True):
        return absent
    configs = pd.DataFrame({"config": [item.id for item in study.configurations]})
    points = configs.merge(frame(study.step_cdf, StepPoint), "left", on="config")
    measures = [m for m in LABELS if rows.numbers(points, [m])] or ["step_duration_us"]
    lines = len(study.configurations) + 2
    safe = study.reference["ref_safe"]
    counts = [row.n_steps for row in study.pooled("A").values() if row.rate_rps == safe]
    steps = rows.n_range(counts).replace("n =", "steps:")
    notes = [f"{steps} per configuration; {safe:g} req/s"]
    figure = style.new_figure(study, style.PAGE_IN, PLOT_IN + 0.3 + LINE_IN * lines, notes)
    plots, tables = figure.subplots(
        2, len(measures), squeeze=False, height_ratios=[PLOT_IN, LINE_IN * lines]
    )
    for axes, table, measure in zip(plots, tables, measures, strict=True):
        _curves(study, axes, points, measure)
        _table(study, table, points, measure, named=measure == measures[0])
    plots[0].set_ylabel("cumulative share of steps")
    drawn, lost = points[points["cdf"].notna()], points[points["cdf"].isna()]
    reasons = lost["config"].map(study.skip_reason)
    lost = lost.assign(reason=reasons, status=reasons.map(lambda r: "skipped" if r else "missing"))
    table = pd.concat([drawn.assign(status="valid", reason=""), lost])
    return style.picture(figure, table[COLUMNS])


def _curves(study: StudyTables, axes: Axes, points: pd.DataFrame, measure: str) -> None:
    for index, item in enumerate(study.configurations):
        mark = style.marks(study)[item.id]
        curve = points[points["config"] == item.id].sort_values("cdf")
        every = max(1, len(curve) // 6)
        axes.plot(
            curve[measure].astype(float), curve["cdf"].astype(float), ls=mark.line, ms=2.8,
            markevery=(index * every // 9, every), **style.marker_style(mark),
        )  # fmt: skip
    axes.set_xscale("log")
    inside = points[points["cdf"].astype(float).between(*SHOWN)]
    if values := [value for value in rows.numbers(inside, [measure]) if value > 0]:
        low, high = 0.95 * min(values), 1.05 * max(values)
        axes.set_xlim(low, high)
        style.log_ticks(axes.xaxis, low, high)
    axes.set(ylim=(0, 1), yticks=[0, 0.25, 0.5, 0.75, 1], xlabel=f"{LABELS[measure]} (µs)")
    axes.grid()


def _table(study: StudyTables, axes: Axes, points: pd.DataFrame, measure: str, named: bool) -> None:
    """Under a plot plain's median and the step taxes, under the first the names and lines too."""
    taxes = study.at("ref_safe", TAXES[measure], STEP)
    middle = points[(points["config"] == study.baseline) & (points["cdf"] == 0.5)]
    medians = rows.numbers(middle, [measure])
    said = {study.baseline: f"{medians[0]:,.0f}" if medians else "no steps"}
    for item in study.connectors:
        said[item.id] = "skipped" if study.skip_reason(item.id) else "no number"
        if (row := taxes.get(item.id)) and row.estimate is not None:
            said[item.id] = size(row.estimate, row.lo, row.hi)
    heading = study.against(f"{LABELS[measure]}: plain's median, then over plain, µs")
    noise = taxes.get(study.aa or "")
    aa = size(noise.estimate, noise.lo, noise.hi) if noise else size(None)
    marks = style.marks(study)
    lines = [
        ("", heading, None),
        *((item.label, said[item.id], marks[item.id]) for item in study.configurations),
        (study.against("plain over plain (A/A)"), aa, None),
    ]
    axes.set_axis_off()
    axes.set(xlim=(0, 1), ylim=(len(lines) - 0.5, -0.5))
    for y, (label, text, mark) in enumerate(lines):
        color = "black" if mark else style.MUTED
        axes.text(1, y, text, ha="right", va="center_baseline", color=color)
        if named:
            name = style.fitted(label, 1.5)
            axes.text(0.12, y, name, va="center_baseline", color=color)
        if named and mark:
            axes.plot(
                [0, 0.05, 0.1], [y] * 3, ls=mark.line, markevery=[1], **style.marker_style(mark)
            )

"""Draw figures 6 and 7, duration and cost of steps, and explain the step probe's spans."""

import re
from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from connector_tax.artifacts.names import NOOP
from connector_tax.artifacts.tables import KINDS, STEP, EffectRow, StepPoint
from connector_tax.figures import rows, style
from connector_tax.figures.tables import StudyTables, frame, records, steps_over_plain
from connector_tax.marks import Mark
from connector_tax.text import size

# ---- figure 6: schedule() entry to exit, and the whole engine step, which also shows the cost of a
# connector outside schedule()

LABELS = {"step_duration_us": "schedule()", "engine_step_us": "whole engine step"}
TAXES = {"step_duration_us": "step", "engine_step_us": "engine_step"}
SHOWN = (0.01, 0.99)  # quantiles the x axes span; step_cdf.csv holds all
PLOT_IN = 1.4
LINE_IN = 0.14


def distribution(study: StudyTables) -> Figure:
    """Draw the cumulative share of non-empty steps over their duration in us, logarithmic."""
    rows.need_steps(study)
    configs = pd.DataFrame({"config": [item.id for item in study.configurations]})
    points = configs.merge(frame(study.step_cdf, StepPoint), "left", on="config")
    measures = [m for m in LABELS if rows.numbers(points, [m])] or ["step_duration_us"]
    lines = len(study.configurations) + 2
    safe = study.reference["ref_safe"]
    counts = [row.n_steps for row in study.pooled if row.rate_rps == safe]
    steps = rows.n_range(counts).replace("n =", "steps:")
    notes = [f"{steps} per configuration; {safe:g} req/s"]
    heights = [PLOT_IN, LINE_IN * lines] * len(measures)
    figure = style.new_figure(study, style.COLUMN_IN, sum(heights) + 0.3 * len(measures), notes)
    grid = figure.subplots(len(heights), height_ratios=heights)
    for axes, table, measure in zip(grid[::2], grid[1::2], measures, strict=True):
        _curves(study, axes, points, measure)
        _table(study, table, points, measure)
    return style.laid_out(figure)


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
    axes.set_ylabel("cumulative share of steps")
    axes.grid()


def _table(study: StudyTables, axes: Axes, points: pd.DataFrame, measure: str) -> None:
    """Write a table under a plot: each line's name, plain's median and the step taxes."""
    taxes = study.at("ref_safe", TAXES[measure], STEP)
    middle = points[(points["config"] == study.baseline) & (points["cdf"] == 0.5)]
    medians = rows.numbers(middle, [measure])
    values = {study.baseline: f"{medians[0]:,.0f}" if medians else "no steps"}
    for item in study.connectors:
        values[item.id] = "skipped" if study.skip_reason(item.id) else "no number"
        if (row := taxes.get(item.id)) and row.estimate is not None:
            values[item.id] = size(row.estimate, row.lo, row.hi)
    heading = study.against(f"{LABELS[measure]}: plain's median, then over plain, µs")
    noise = taxes.get(study.aa or "")
    aa = size(noise.estimate, noise.lo, noise.hi) if noise else size(None)
    marks = style.marks(study)
    lines = [
        ("", heading, None),
        *((item.label, values[item.id], marks[item.id]) for item in study.configurations),
        (study.against("plain over plain (A/A)"), aa, None),
    ]
    axes.set_axis_off()
    axes.set(xlim=(0, 1), ylim=(len(lines) - 0.5, -0.5))
    for y, (label, text, mark) in enumerate(lines):
        color = "black" if mark else style.MUTED
        axes.text(1, y, text, ha="right", va="center_baseline", color=color)
        axes.text(0.12, y, style.fitted(label, 1.5), va="center_baseline", color=color)
        if mark:
            axes.plot(
                [0, 0.05, 0.1], [y] * 3, ls=mark.line, markevery=[1], **style.marker_style(mark)
            )


# ---- figure 7: step time above plain's at ref_safe, by kind of step
#
# Framework: step time of the no-op connector above plain's. Implementation: hook time above the
# no-op's. Left: time outside hooks. The three add up to the step.

# In grey: light, dark, hatched on white.
PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "framework_us": ("framework (no-op)", {"fc": "#b9bec6", "ec": "#5f6670"}),
    "implementation_us": ("implementation (hooks)", {"fc": "#1b3a6b", "ec": "#1b3a6b"}),
    "left_us": ("rest (outside hooks)", {"fc": "white", "ec": "#1b3a6b", "hatch": "////////"}),
}
STEP_ENDS = ["step_us", "step_lo_us", "step_hi_us"]
PART_COLUMNS = ["config", "kind", *STEP_ENDS, *rows.BAND, *PARTS, "status"]
TOTAL = Mark("black", "D", "-", filled=False)
ROW_IN = 0.16


def decomposition(study: StudyTables) -> Figure:
    """Draw a stack for each configuration with total and interval, in a panel per kind of step."""
    rows.need_steps(study)
    table = _parts(study)
    shown = [kind for kind in KINDS if rows.numbers(table[table["kind"] == kind], ["step_us"])]
    if not shown:
        raise style.AbsentError("the records have no whole engine steps at ref_safe.")
    table = table[table["kind"].isin(shown)]
    split = bool(rows.numbers(table, ["framework_us"]))
    diamond = study.against("diamond: the step over plain's, 95 % interval")
    notes = [f"{study.reference['ref_safe']:g} req/s; {diamond}"]
    valid = table[table["status"] == "valid"]
    bare = valid.set_index("config")[[*PARTS]].isna().all(axis=1).groupby(level=0).all()
    whole = "; ".join(item.label for item in study.connectors if bare.get(item.id, False))
    if whole:
        notes.append(f"not split, since no hook was called: {whole}")
    if not split:
        notes.append("not split into framework and implementation: no step of the no-op")
    labels = [item.label for item in study.connectors]
    height = len(shown) * (ROW_IN * len(labels) + 0.4) + 0.5
    figure = style.new_figure(study, style.COLUMN_IN, height, notes)
    grid = figure.subplots(len(shown), squeeze=False)[:, 0]
    for axes, kind in zip(grid, shown, strict=True):
        panel = table[table["kind"] == kind]
        rows.scale(axes, rows.numbers(panel, [*STEP_ENDS, *PARTS]), room=0.04, ticks=2)
        low, high = axes.get_xlim()
        ticks = [tick for tick in axes.get_xticks() if low <= tick <= high]
        axes.set_xticks(sorted({ticks[0], 0.0, ticks[-1]}))
        rows.shade(axes, panel)
        for y, row in enumerate(records(panel)):
            if rows.value(axes, y, row | {"reason": ""}, STEP_ENDS, TOTAL):
                rows.beside(axes, y, rows.size_text(row, STEP_ENDS, 1))
                _stack(axes, y, row)
        rows.prepare(axes, labels, f"{kind} step")
    grid[-1].set_xlabel(study.against("µs over plain's step of that kind"))
    handles: list[Artist] = [
        Patch(label=label, lw=0.6, **look)
        for part, (label, look) in PARTS.items()
        if split or part != "framework_us"
    ]
    handles.append(Line2D([], [], lw=0.7, label="step", **style.marker_style(TOTAL)))
    handles.append(rows.band_handle(table))
    return style.laid_out(figure, handles, 2)


def _parts(study: StudyTables) -> pd.DataFrame:
    """Return step times above plain's by kind and configuration, split if the parts are known."""
    over, hooks, left = (
        steps_over_plain(study, metric) for metric in ("step_us", "hooks_us", "left_us")
    )
    table = []
    for kind in KINDS:
        noise = over.get(kind, {}).get(study.aa or "")
        band = rows.band(noise.estimate, noise.lo, noise.hi) if noise else (None, None)
        for connector in study.connectors:
            parts = [of.get(kind, {}).get(connector.id) for of in (over, hooks, left)]
            row: dict[str, Any] = {"config": connector.id, "kind": kind}
            row |= dict(zip(rows.BAND, band, strict=True))
            if step := parts[0]:
                row |= dict(zip(STEP_ENDS, (step.estimate, step.lo, step.hi), strict=True))
                row["status"] = "valid"
                # Without a connector the hooks' time is 0 in every kind of step.
                if any((own := of.get(connector.id)) and own.estimate for of in hooks.values()):
                    row |= _split(connector.id, parts, hooks.get(kind, {}).get(NOOP))
            else:
                row["status"] = "skipped" if study.skip_reason(connector.id) else "missing"
            table.append(row)
    return pd.DataFrame(table, columns=PART_COLUMNS, dtype=object)


def _split(
    config: str, parts: Sequence[EffectRow | None], noop: EffectRow | None
) -> dict[str, Any]:
    """Return the parts of a step; without a no-op connector only hooks and remainder."""
    step, hooks, left = (None if row is None else row.estimate for row in parts)
    if config == NOOP:
        return {"framework_us": step}
    if step is None or hooks is None or left is None:
        return {}
    spent = hooks - ((noop.estimate or 0.0) if noop else 0.0)
    framework = step - left - spent if noop else None
    return {"framework_us": framework, "implementation_us": spent, "left_us": left}


def _stack(axes: Axes, y: float, row: dict[str, Any]) -> None:
    """Draw the parts end to end: to the right of zero if positive, to the left if negative."""
    ends = {1: 0.0, -1: 0.0}
    for part, (_, look) in PARTS.items():
        if us := row[part]:
            side = 1 if us > 0 else -1
            axes.barh(y, us, 0.62, left=ends[side], lw=0.5, zorder=3, **look)
            ends[side] += us


# ---- what a span includes, by the recorded settings (engine.csv)
#
# On a GPU the host submits work and continues. Whether a request waits for the host's further work
# depends on the scheduling, the model runner and the executor. Facts: docs/vllm.md.

DECIDED_BY = ("async_scheduling", "model_runner", "executor")
STEP_FIGURES = ("fig6_step_cdf", "fig7_decomposition")
RUNNER_V2 = re.compile(r"\.worker\.\w+\.model_runner\.")
BY_ASYNC_SCHEDULING = {
    "true": (
        "Scheduling was asynchronous: the host prepares a step while the GPU computes the previous"
        " one. schedule() and the hooks are hidden as long as the GPU takes longer: the engine"
        " waits less, and the rest is below zero. A request that finds an idle GPU waits for them."
    ),
    "false": (
        "Scheduling was synchronous: the GPU waits for schedule(), and the whole engine step"
        " includes the GPU's time."
    ),
}
UNKNOWN = "The GPU may hide this time or not: no launch recorded how steps were scheduled."


def hidden(study: StudyTables) -> str:
    """Return sentences on whether requests wait for the host's work; "" for other engines."""
    device = study.settings["engine"].get("device")
    if device is None:
        return ""
    if device == "cpu":
        return "Every span is time of the CPU, which computes the model too: none is hidden."
    scheduled = _baselines(study, "async_scheduling")
    sentences = [
        "Every span is host time; the GPU computes in parallel.",
        BY_ASYNC_SCHEDULING.get(scheduled, UNKNOWN),
    ]
    if labels := _differing(study, "async_scheduling"):
        other = "Synchronous" if scheduled == "true" else "Asynchronous"
        sentences.append(f"{other} instead: {labels}.")
    return _of_device(study, " ".join(sentences))


def placed(study: StudyTables) -> str:
    """Return sentences on when in a step the worker's hooks run; "" for other engines."""
    device = study.settings["engine"].get("device")
    if device is None:
        return ""
    scheduling, runner, executor = (_baselines(study, setting) for setting in DECIDED_BY)
    sentences = []
    if runner and device != "cpu":
        sentences.append(
            "Model runner V2 calls the worker's hooks after it has queued forward pass and sampling"
            " on the GPU; the worker's record never includes the GPU's time."
            if RUNNER_V2.search(runner)
            else "Model runner V1 calls the worker's hooks between forward pass and sampling."
        )
    if executor == "uni":
        sentences.append(
            "The worker runs in the engine core's process: its record lies in the engine step."
        )
    if executor == "mp":
        is_async = scheduling == "true"
        share = ": a hook's share of the engine step is a ratio, not a part" if is_async else ""
        sentences.append(f"The worker runs in separate processes{share}.")
    if labels := _differing(study, "model_runner", "executor"):
        sentences.append(f"This does not hold for {labels}, whose settings differ.")
    return _of_device(study, " ".join(sentences))


def _of_device(study: StudyTables, words: str) -> str:
    """Return sentences about the GPU, adapted if the device is emulated."""
    emulated = study.settings["engine"]["device"] == "emulated"
    return words.replace("GPU", "device") if emulated else words


def _differing(study: StudyTables, *settings: str) -> str:
    """Return the labels of the configurations whose setting differs from plain's."""
    other = {row.config for row in study.engine if row.differs and row.setting in settings}
    return ", ".join(item.label for item in study.configurations if item.id in other)


def _baselines(study: StudyTables, setting: str) -> str:
    """Return the value of a setting in the baseline's launches; "" if unknown."""
    baseline_rows = (row for row in study.engine if row.config == study.baseline)
    return next((row.value for row in baseline_rows if row.setting == setting), "")

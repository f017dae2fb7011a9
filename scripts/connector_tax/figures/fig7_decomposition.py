"""Figure 7: each tax at ref_safe and each step's cost, split into two parts that add up to it.

Framework cost = tax(no-op connector); implementation cost = tax(configuration) - tax(no-op). A step
tax splits into the three timed callbacks and what they do not explain. Both parts of a row start at
zero, so that no part shifts another.
"""

from collections.abc import Sequence

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from connector_tax.artifacts.tables import STEP, EffectRow
from connector_tax.figures import rows, style
from connector_tax.figures.tables import StudyTables, frame, records
from connector_tax.marks import DESIGN_MARKS, Mark
from connector_tax.text import size

NOOP = "noop_connector"
FRAMEWORK, IMPLEMENTATION, CALLBACKS = DESIGN_MARKS[NOOP].color, "#1B3A6B", "#7A5195"
# The parts of a tax and of a step tax: column, colours of face and edge, and words.
PARTS = {
    "framework_tax": (FRAMEWORK, FRAMEWORK, "framework (no-op connector)"),
    "implementation_tax": (IMPLEMENTATION, IMPLEMENTATION, "implementation"),
    "callback_us": (CALLBACKS, CALLBACKS, "callbacks"),
    "unattributed_us": ("white", CALLBACKS, "not in callbacks"),
}
TAX_PARTS, STEP_PARTS = list(PARTS)[:2], list(PARTS)[2:]
STEP_ENDS = ["step_tax_us", "step_tax_lo_us", "step_tax_hi_us"]
COLUMNS = [*rows.TAX_COLUMNS, *TAX_PARTS, *STEP_ENDS, *STEP_PARTS]
# Of a step tax: its name in the figure's table, and the panel's title.
STEPS = {
    "step_p50": "Per step: schedule(), µs",
    "engine_step_p50": "Per step: whole engine step, µs",
}
TOTAL = Mark("black", "D", "-")
ROW_IN = 0.3
HALF = 0.24  # of a row: how far the two bars of a row lie from its middle
ROOM = 0.24  # of an axis, for the number at a bar's end


def draw(study: StudyTables) -> style.Picture:
    """Two parts and the total of each configuration: TTFT p90, TPOT p90, and two step durations."""
    if absent := rows.stand_in(study, "fig7_decomposition", steps=True):
        return absent
    taxes = _split(rows.taxes(study, [item.id for item in study.connectors]))
    at_safe = taxes[taxes["metric"] == "ttft_p90"]
    steps = {metric: _step_taxes(study, at_safe, metric) for metric in STEPS}
    if not rows.numbers(steps["engine_step_p50"], STEP_ENDS):
        del steps["engine_step_p50"]
    split = bool(rows.numbers(taxes, TAX_PARTS))
    notes = [f"{rows.tax_text(at_safe)}; {rows.aa_text(study)}"]
    if not split:
        noop = records(at_safe[at_safe["config"] == NOOP])
        state = rows.state_text(noop[0]) if noop else "missing"
        notes.append(f"not split into framework and implementation: no-op {state}")
    if len(steps) < len(STEPS):
        notes.append("the records have no whole engine steps")
    height = 2 * (ROW_IN * len(study.connectors) + 0.5) + 0.25
    figure = style.new_figure(study, style.PAGE_IN, height, notes)
    upper, lower = figure.subplots(2, 2, sharey=True)
    labels = [item.label for item in study.connectors]
    for axes, (metric, panel) in zip(upper, taxes.groupby("metric", sort=False), strict=True):
        rows.tax_scale(axes, rows.numbers(panel, [*rows.ENDS, *TAX_PARTS]), room=ROOM)
        rows.shade(axes, panel)
        _draw_rows(axes, panel, rows.ENDS, TAX_PARTS, 100)
        rows.prepare(axes, labels, f"{rows.METRICS[str(metric)]}, %")
        axes.set_xlabel(rows.tax_label(study, axes))
    for axes, (metric, panel) in zip(lower, steps.items(), strict=False):
        rows.scale(axes, rows.numbers(panel, [*STEP_ENDS, *STEP_PARTS]), room=ROOM)
        noise = panel[["aa_us", *rows.BAND]].itertuples(index=False)
        rows.shade(axes, pd.DataFrame([rows.band(*ends) for ends in noise], columns=rows.BAND))
        _draw_rows(axes, panel.assign(status=panel["why"], reason=""), STEP_ENDS, STEP_PARTS, 1)
        rows.prepare(axes, labels, STEPS[metric])
        axes.set_xlabel(study.against("median over plain's (µs)"))
    if len(steps) < len(STEPS):
        lower[1].set_axis_off()
    handles: list[Artist] = [
        Patch(facecolor=face, edgecolor=edge, lw=0.6, label=label)
        for part, (face, edge, label) in PARTS.items()
        if split or part in STEP_PARTS
    ]
    total = Line2D([], [], lw=0.7, label="tax, interval", **style.marker_style(TOTAL))
    handles += [total, *rows.overload_handles(taxes)]
    columns = 3 if len(handles) > 5 else 5
    return style.picture(figure, pd.concat([taxes, *steps.values()])[COLUMNS], handles, columns)


def _split(taxes: pd.DataFrame) -> pd.DataFrame:
    """The taxes with their two parts, where the no-op connector has a tax too."""
    total = taxes["tax"].astype(float)
    noop = {row["metric"]: row["tax"] for row in records(taxes[taxes["config"] == NOOP])}
    framework = taxes["metric"].map(noop).astype(float).where(total.notna())
    parts = dict(zip(TAX_PARTS, (framework, total - framework), strict=True))
    return taxes.assign(**parts, **dict.fromkeys([*STEP_ENDS, *STEP_PARTS]))


def _step_taxes(study: StudyTables, taxes: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The same rows with the step tax of a metric and its parts, and `why` there is none."""
    ends = ("estimate", "lo", "hi")
    names = {**dict(zip(ends, STEP_ENDS, strict=True)), "reason": "why"}
    measured = study.at("ref_safe", metric.removesuffix("_p50"), STEP)
    steps = frame(list(measured.values()), EffectRow)[["config", *names]].rename(columns=names)
    noise = measured.get(study.aa or "")
    aa = [None] * 3 if noise is None else [getattr(noise, end) for end in ends]
    known = steps["step_tax_us"].notna()
    for name, value in zip(("aa_us", *rows.BAND), aa, strict=True):
        steps[name] = pd.Series([value] * len(steps), dtype=object).where(known, None)
    callbacks = study.at("ref_safe", "callbacks", STEP)
    kept = taxes.assign(metric=metric, **dict.fromkeys([*rows.ENDS, "verdict", *TAX_PARTS]))
    kept = kept.drop(columns=[*STEP_ENDS, *STEP_PARTS, *rows.BAND])
    table = kept.merge(steps, how="left", on="config").fillna({"why": "missing"})
    total = table["step_tax_us"].astype(float)
    spent = table["config"].map({config: row.estimate for config, row in callbacks.items()})
    spent = spent.astype(float).where(total.notna())
    return table.assign(callback_us=spent, unattributed_us=total - spent)


def _draw_rows(
    axes: Axes, panel: pd.DataFrame, ends: Sequence[str], parts: Sequence[str], factor: float
) -> None:
    """The totals with their intervals over two bars from zero, numbers at their ends."""
    for y, row in enumerate(records(panel)):
        if not rows.value(axes, y, row, ends, TOTAL):
            continue
        rows.beside(axes, y, rows.size_text(row, ends, factor))
        for part, place in zip(parts, (y - HALF, y + HALF), strict=True):
            # All of the no-op connector's tax is the framework's, by definition.
            is_noop = row["config"] == NOOP
            if row[part] is None or (is_noop and part == "implementation_tax"):
                continue
            face, edge, _ = PARTS[part]
            axes.barh(place, row[part], 2 * HALF - 0.06, fc=face, ec=edge, lw=0.6, zorder=3)
            # The framework's bar is the same in every row: its number stands at the first.
            if part == "framework_tax" and not is_noop:
                continue
            side = -1 if row[part] < 0 else 1
            axes.annotate(
                size(factor * row[part]), (row[part], place), xytext=(2.5 * side, 0),
                textcoords="offset points", ha="left" if side > 0 else "right",
                va="center_baseline", zorder=6,
            )  # fmt: skip

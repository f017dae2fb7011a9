"""Figure 7: what a step takes over plain's at ref_safe, stacked from its parts, by kind of step.

Framework: what a step of the no-op connector takes over plain's. Implementation: what the hooks
take over the no-op's. Left: what no hook has taken. The three add up to the step.
"""

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from connector_tax.artifacts.names import NOOP
from connector_tax.artifacts.tables import KINDS, EffectRow
from connector_tax.figures import rows, style
from connector_tax.figures.tables import StudyTables, records, steps_over_plain
from connector_tax.marks import Mark

# In grey: light, dark, hatched on white.
PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "framework_us": ("framework (no-op)", {"fc": "#b9bec6", "ec": "#5f6670"}),
    "implementation_us": ("implementation (hooks)", {"fc": "#1b3a6b", "ec": "#1b3a6b"}),
    "left_us": ("left (in no hook)", {"fc": "white", "ec": "#1b3a6b", "hatch": "////////"}),
}
STEP_ENDS = ["step_us", "step_lo_us", "step_hi_us"]
COLUMNS = ["config", "kind", *STEP_ENDS, *rows.BAND, *PARTS, "n_blocks", "n_steps", "status"]
TOTAL = Mark("black", "D", "-", filled=False)
ROW_IN = 0.16


def draw(study: StudyTables) -> style.Picture:
    """A stack for each configuration with its total and interval, a panel for each kind of step."""
    if absent := rows.stand_in(study, "fig7_decomposition", steps=True):
        return absent
    table = _parts(study)
    shown = [kind for kind in KINDS if rows.numbers(table[table["kind"] == kind], ["step_us"])]
    if not shown:
        reason = "the records have no whole engine steps at ref_safe."
        return style.absent(study, "fig7_decomposition", reason)
    table = table[table["kind"].isin(shown)]
    split = bool(rows.numbers(table, ["framework_us"]))
    notes = [study.against("means over steps; diamond: the step over plain's, 95 % interval")]
    if not split:
        notes.append("not split into framework and implementation: no step of the no-op")
    labels = [item.label for item in study.connectors]
    height = len(shown) * (ROW_IN * len(labels) + 0.3) + 0.2
    figure = style.new_figure(study, style.COLUMN_IN, height, notes)
    grid = figure.subplots(len(shown), squeeze=False)[:, 0]
    for axes, kind in zip(grid, shown, strict=True):
        panel = table[table["kind"] == kind]
        rows.scale(axes, rows.numbers(panel, [*STEP_ENDS, *PARTS]), room=0.04, ticks=2)
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
    return style.picture(figure, table[COLUMNS], handles, 2)


def _parts(study: StudyTables) -> pd.DataFrame:
    """The steps of each kind and configuration over plain's, split where the parts are known."""
    over, hooks, left = (
        steps_over_plain(study, metric) for metric in ("step_us", "hooks_us", "left_us")
    )
    table = []
    for kind in KINDS:
        noise = over.get(kind, {}).get(study.aa or "")
        band = rows.band(noise.estimate, noise.lo, noise.hi) if noise else (None, None)
        for connector in study.connectors:
            own = [of.get(kind, {}).get(connector.id) for of in (over, hooks, left)]
            row = dict.fromkeys((*STEP_ENDS, *PARTS))
            if step := own[0]:
                row |= dict(zip(STEP_ENDS, (step.estimate, step.lo, step.hi), strict=True))
                row |= {"n_blocks": step.n_blocks, "n_steps": step.n, "status": "valid"}
                row |= _split(connector.id, own, hooks.get(kind, {}).get(NOOP))
            else:
                row["status"] = "skipped" if study.skip_reason(connector.id) else "missing"
            table.append(
                row
                | {"config": connector.id, "kind": kind}
                | dict(zip(rows.BAND, band, strict=True))
            )
    return pd.DataFrame(table, columns=COLUMNS, dtype=object)


def _split(config: str, own: Sequence[EffectRow | None], noop: EffectRow | None) -> dict[str, Any]:
    """The parts of a step; without a no-op its hooks and the rest, all of it the connector's."""
    step, hooks, left = (None if row is None else row.estimate for row in own)
    if config == NOOP:
        return {"framework_us": step}
    if step is None or hooks is None or left is None:
        return {}
    spent = hooks - ((noop.estimate or 0.0) if noop else 0.0)
    framework = step - left - spent if noop else None
    return {"framework_us": framework, "implementation_us": spent, "left_us": left}


def _stack(axes: Axes, y: float, row: dict[str, Any]) -> None:
    """The parts end to end: those above zero to its right, those below to its left."""
    ends = {1: 0.0, -1: 0.0}
    for part, (_, look) in PARTS.items():
        if us := row[part]:
            side = 1 if us > 0 else -1
            axes.barh(y, us, 0.62, left=ends[side], lw=0.5, zorder=3, **look)
            ends[side] += us

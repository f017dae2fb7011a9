"""Figure 7: what a step takes over plain's at ref_safe, stacked from its parts, by kind of step.

Framework: what a step of the no-op connector takes over plain's. Implementation: what the hooks
take over the no-op's. Left: what no hook has taken. The three add up to the step.
"""

from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from connector_tax.artifacts.names import NOOP
from connector_tax.artifacts.tables import KINDS, STEP, StepGroup
from connector_tax.figures import rows, style
from connector_tax.figures.tables import StudyTables, records
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
    found: dict[tuple[str, str, str], Any] = {
        (row.item, row.config, row.metric): row
        for row in study.of(STEP, "A")
        if row.reference == "ref_safe"
    }
    table = []
    for kind in KINDS:
        item = StepGroup(kind).item

        def of(config: str, metric: str, item: str = item) -> Any:
            row = found.get((item, config, metric))
            return None if row is None else row.estimate

        noise = found.get((item, study.aa or "", "step_us"))
        ends = (noise.estimate, noise.lo, noise.hi) if noise else (None, None, None)
        band = dict(zip(rows.BAND, rows.band(*ends), strict=True))
        for config in (connector.id for connector in study.connectors):
            row = {"config": config, "kind": kind, **band, "status": "missing"}
            row |= dict.fromkeys((*STEP_ENDS, *PARTS))
            step = found.get((item, config, "step_us"))
            if step is None:
                row["status"] = "skipped" if study.skip_reason(config) else "missing"
            else:
                row |= dict(zip(STEP_ENDS, (step.estimate, step.lo, step.hi), strict=True))
                row |= {"n_blocks": step.n_blocks, "n_steps": step.n, "status": "valid"}
                hooks, left, noop = (
                    of(config, "hooks_us"),
                    of(config, "left_us"),
                    of(NOOP, "hooks_us"),
                )
                if config == NOOP:
                    row["framework_us"] = step.estimate
                elif hooks is not None and left is not None:
                    # Without a no-op all of it is the connector's.
                    row |= {"implementation_us": hooks - (noop or 0.0), "left_us": left}
                    if noop is not None:
                        row["framework_us"] = step.estimate - left - row["implementation_us"]
            table.append(row)
    return pd.DataFrame(table, columns=COLUMNS, dtype=object)


def _stack(axes: Axes, y: float, row: dict[str, Any]) -> None:
    """The parts end to end: those above zero to its right, those below to its left."""
    ends = {1: 0.0, -1: 0.0}
    for part, (_, look) in PARTS.items():
        if us := row[part]:
            side = 1 if us > 0 else -1
            axes.barh(y, us, 0.62, left=ends[side], lw=0.5, zorder=3, **look)
            ends[side] += us

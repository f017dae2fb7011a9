"""Figure 12: a step's period over the time that an emulated device takes for it.

Only of a study that sets these times (engine.device_time.sweep_us). Where a curve lies on the
diagonal, all of the host's work is hidden.
"""

import math

import pandas as pd
from matplotlib.axes import Axes

from connector_tax.artifacts.tables import DEVICE, EffectRow, StepGroup
from connector_tax.figures import style
from connector_tax.figures.tables import StudyTables, frame, records

# A period this much longer than the device's time has left the diagonal.
EXPOSED = 0.01
COLUMNS = [
    "config", "batch", "device_time_us", "period_us", "period_lo_us", "period_hi_us", "n_steps",
    "n_launches", "hidden_from_us",
]  # fmt: skip
ACROSS = 3
PANEL_IN = 1.9


def draw(study: StudyTables) -> style.Picture:
    """A panel for each size of the batch, the steps of all cells of Phase A in it."""
    table = device_steps(study)
    named = {item.id for item in study.launched}
    table = table[
        (table["kind"] == "decode") & table["config"].isin(named)
        & ~table["batch"].isin(["all", "0"]) & table["period_us"].notna()
    ]  # fmt: skip
    # A size that several cells have is shown from the one with the most steps of it.
    most = table.sort_values("n_steps", kind="stable").drop_duplicates(
        ["config", "batch", "device_time_us"], keep="last"
    )
    if most.empty:
        return style.absent(study, "fig12_boundary", "no steps of the emulated device")
    hidden = {key: hidden_from(own) for key, own in most.groupby(["config", "batch"], sort=False)}
    of_rows = [hidden[row["config"], row["batch"]] for row in records(most)]
    most = most.assign(hidden_from_us=pd.Series(of_rows, index=most.index, dtype=object))
    most = most.sort_values(["batch", "config", "device_time_us"], kind="stable")
    sizes = sorted(most["batch"].unique(), key=lambda name: int(name.partition("-")[0]))
    lines = math.ceil(len(sizes) / ACROSS)
    notes = [f"on the diagonal: at most {EXPOSED:.0%} longer than the device's own time"]
    figure = style.new_figure(study, style.PAGE_IN, lines * PANEL_IN + 0.5, notes)
    grid = style.panels(figure, len(sizes), ACROSS, share_x=True)
    times = most["device_time_us"].astype(float) / 1e3
    ends = (0.9 * float(times.min()), 1.1 * float(times.max()))
    for axes, size in zip(grid.flat, sizes, strict=False):
        _panel(study, axes, most[most["batch"] == size], ends)
        axes.set_title(f"{size} sequence{'' if size == '1' else 's'} in the step")
    for axes in grid[:, 0]:
        axes.set_ylabel("period of a step (ms)")
    for axes in grid[-1]:
        axes.set_xlabel("the device's time of a step (ms)")
    return style.picture(figure, most[COLUMNS], style.configuration_handles(study), 4)


def device_steps(study: StudyTables) -> pd.DataFrame:
    """The periods of the emulated device's steps in Phase A, by kind, batch and given time."""
    of = [row for row in study.of(DEVICE, "A") if row.metric == "period_us"]
    ends = ("period_us", "period_lo_us", "period_hi_us")
    named = dict(zip(("estimate", "lo", "hi"), ends, strict=True))
    named |= {"n": "n_steps", "n_blocks": "n_launches"}
    groups = frame([StepGroup.of(row.item) for row in of], StepGroup)
    return pd.concat([frame(of, EffectRow).rename(columns=named), groups], axis=1)


def hidden_from(own: pd.DataFrame) -> float | None:
    """The shortest time from which on every period is the device's own; None: of none is it."""
    shortest = None
    for row in records(own.sort_values("device_time_us", ascending=False)):
        if row["period_us"] > (1 + EXPOSED) * row["device_time_us"]:
            break
        shortest = float(row["device_time_us"])
    return shortest


def _panel(study: StudyTables, axes: Axes, table: pd.DataFrame, ends: tuple[float, float]) -> None:
    axes.plot(ends, ends, color="#9aa7b5", lw=0.8, zorder=0.5)
    for item in study.configurations:
        own = table[table["config"] == item.id]
        mark = style.marks(study)[item.id]
        axes.plot(
            own["device_time_us"].astype(float) / 1e3, own["period_us"].astype(float) / 1e3,
            ls=mark.line, **style.marker_style(mark),
        )  # fmt: skip
        bounded = own[own["period_lo_us"].notna()]
        axes.vlines(
            bounded["device_time_us"].astype(float) / 1e3,
            bounded["period_lo_us"].astype(float) / 1e3,
            bounded["period_hi_us"].astype(float) / 1e3,
            color=mark.color, lw=0.8,
        )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlim=ends)
    style.log_ticks(axes.xaxis, *ends)
    style.log_ticks(axes.yaxis, *axes.get_ylim())
    axes.grid()

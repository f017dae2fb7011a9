"""Figure 3: effective against offered throughput, and what saturates where (Phase A)."""

from typing import Any

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from connector_tax.artifacts.metrics import CRITERIA
from connector_tax.figures import rates, rows, style
from connector_tax.figures.tables import StudyTables, records

ROW_IN = 0.34
PLOTS_IN = 2.2  # the two plots, one above the other, at least
KEPT = "#d8dde3"
KNEE: dict[str, Any] = {"fill": False, "ec": "black", "lw": 1.2, "zorder": 7, "clip_on": False}


def draw(study: StudyTables) -> style.Picture:
    """Throughput with the line y = x and the ratio of the two, beside the criteria that fired."""
    limits = study.settings["saturation"]
    kept = limits["throughput_ratio_min"]
    signs = (
        f"{c.label}, {c.said} {'>' if c.above else '<'} {c.bound_of(limits):g}"
        for c in CRITERIA.values()
    )
    notes = [f"saturated: {'; '.join(signs)}", f"hatched: no number; {rates.sample_text(study)}"]
    height = max(ROW_IN * len(study.configurations) + 0.85, PLOTS_IN)
    figure = style.new_figure(study, style.PAGE_IN, height, notes)
    axes = figure.subplot_mosaic(
        [["throughput", "criteria"], ["ratio", "criteria"]], width_ratios=[1, 1.5]
    )
    table = rates.cells(study, "effective_throughput_rps", "requests/s")
    upper, lower = axes["throughput"], axes["ratio"]
    drawn = table.assign(ratio=table["value"].astype(float) / table["rate_rps"].astype(float))
    for item in study.configurations:
        mark, own = style.marks(study)[item.id], drawn[drawn["config"] == item.id]
        for axes_, column in ((upper, "value"), (lower, "ratio")):
            axes_.plot(
                own["rate_rps"], own[column].astype(float), ls=mark.line, zorder=3,
                **style.marker_style(mark),
            )  # fmt: skip
    _limits(upper, lower, study, kept)
    _criteria(axes["criteria"], study, table)
    kept_up = Patch(color=KEPT, label=f"≥ {kept:g} of the rate")
    handles = [*style.configuration_handles(study), kept_up]
    return style.picture(figure, table[rates.COLUMNS], handles, 5)


def _limits(upper: Axes, lower: Axes, study: StudyTables, kept: float) -> None:
    for axes in (upper, lower):
        rates.rate_axis(axes, study, named=axes is upper)
        axes.grid(axis="y")
    ends = upper.get_xlim()
    upper.set_yscale("log", base=2)
    upper.set_yticks(rates.grid_rates(study), [f"{r:.10g}" for r in rates.grid_rates(study)])
    upper.minorticks_off()
    upper.plot(ends, ends, color="#7a7a7a", lw=0.6, zorder=1)
    upper.fill_between(ends, [kept * end for end in ends], ends, color=KEPT, lw=0, zorder=0.6)
    upper.set(xlim=ends, ylabel="effective (requests/s)")
    upper.tick_params(labelbottom=False)
    lower.axhspan(kept, 1, color=KEPT, lw=0, zorder=0.6)
    lower.set(ylabel="effective / offered", xlabel="offered rate (requests/s)")
    lower.set_ylim(top=1.04)


def _criteria(axes: Axes, study: StudyTables, table: pd.DataFrame) -> None:
    """A row per configuration, a column per rate: the criteria that fired, the darker the more."""
    grid = rates.grid_rates(study)
    fired = table["saturation_criteria"].map(
        lambda text: [CRITERIA[c].label for c in text.split(";") if c]
    )
    lost = table["blocks_lost"].map(lambda count: [f"{count} lost"] if count else [])
    valid = table["status"] == "valid"
    said = (fired + lost).map("\n".join).where(valid, table["status"])
    keyed = table.assign(fired=fired.map(len).where(valid), words=said)
    order = [item.id for item in study.configurations]
    counts, words = (
        keyed.pivot_table(name, "config", "rate_rps", "first").reindex(index=order, columns=grid)
        for name in ("fired", "words")
    )
    words = words.fillna("missing")
    for line, item in enumerate(study.configurations):
        knee = rates.knee_text(study, item.id)
        rows.beside(axes, line + 0.5, knee)
        for place, rate in enumerate(grid):
            if f"{rate:.10g}" == knee:
                axes.add_patch(Rectangle((place, line), 1, 1, **KNEE))
        own = table[table["config"] == item.id]
        states = records(own[["status", "reason"]].drop_duplicates())
        if len(own) == len(grid) and len(states) == 1 and states[0]["status"] != "valid":
            # Said once, where the whole row has no number.
            words.loc[item.id] = ""
            reason = style.fitted(rows.state_text(states[0]), 2.4)
            style.reason_text(axes, len(grid) / 2, line + 0.5, reason)
    rows.beside(axes, -0.25, "knee")
    colors = sns.light_palette("#eba873", as_cmap=True)
    counts.index = [style.fitted(item.label, style.LABEL_IN) for item in study.configurations]
    counts.columns = [f"{rate:.10g}" for rate in grid]
    style.heat_map(axes, counts, words, vmin=0, vmax=3, cmap=colors)
    axes.set(xlabel="offered rate (requests/s)", title="criteria of saturation")

"""Figure 3: effective against offered throughput, and what saturates where (Phase A)."""

from collections.abc import Sequence

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from connector_tax.figures import rates, rows, style
from connector_tax.figures.style import Picture
from connector_tax.figures.tables import Configuration, StudyTables

ROW_IN = 0.34
PLOTS_IN = 2.2  # the two plots, one above the other, at least
WORDS = {"throughput_ratio": "rate", "waiting": "queue", "ttft_ratio": "TTFT"}
KEPT = "#d8dde3"


def draw(study: StudyTables) -> Picture:
    """Throughput with the line y = x and the ratio of the two, beside the criteria that fired."""
    limits = study.settings["saturation"]
    kept = limits["throughput_ratio_min"]
    notes = [
        f"saturated: rate, effective throughput / rate < {kept:g};"
        f" queue, median of waiting requests > {limits['waiting_p50_max']:g};"
        f" TTFT, p90(r) / p90(r/2) > {limits['ttft_p90_ratio_max']:g}; hatched: no number;"
        f" {rates.sample_text(study)}"
    ]
    shown = study.configurations
    height = max(ROW_IN * len(shown) + 0.85, PLOTS_IN)
    figure = style.new_figure(study, style.PAGE_IN, height, notes)
    axes = figure.subplot_mosaic(
        [["throughput", "criteria"], ["ratio", "criteria"]], width_ratios=[1, 1.5]
    )
    listed = rates.records(study, "effective_throughput_rps", "requests/s")
    table = pd.DataFrame(listed)
    upper, lower = axes["throughput"], axes["ratio"]
    ratios = table["value"].astype(float) / table["rate_rps"]
    for item in shown:
        own = table["config"] == item.id
        mark = style.marks(study)[item.id]
        x = table[own]["rate_rps"]
        for axes_, values in ((upper, table["value"].astype(float)), (lower, ratios)):
            axes_.plot(x, values[own], ls=mark.line, zorder=3, **style.marker_style(mark))
    _limits(upper, lower, study, kept)
    with style.layout_held(figure):
        _criteria(axes["criteria"], study, table, shown)
    handles = style.configuration_handles(study, [item.id for item in shown])
    style.legend(figure, [*handles, Patch(color=KEPT, label=f"≥ {kept:g} of the rate")], 5)
    return style.picture(figure, rates.COLUMNS, listed)


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


def _criteria(
    axes: Axes, study: StudyTables, table: pd.DataFrame, shown: Sequence[Configuration]
) -> None:
    """A row per configuration, a column per rate: the criteria that fired, the darker the more."""
    keyed = table.set_index(["config", "rate_rps"])

    def matrix(values: pd.Series) -> pd.DataFrame:
        flat = values.rename("value").reset_index()
        square = flat.pivot_table("value", "config", "rate_rps", aggfunc="first")
        return square.reindex(index=[item.id for item in shown], columns=_rates(study))

    fired = keyed["saturation_criteria"].map(lambda text: [WORDS[c] for c in text.split(";") if c])
    lost = keyed["blocks_lost"].map(lambda count: [f"{count} lost"] if count else [])
    counts = matrix(fired.map(len).where(keyed["status"] == "valid").astype(float))
    words = matrix((fired + lost).map("\n".join)).fillna("")
    axes.patch.set(**style.LOST)
    sns.heatmap(
        counts, mask=counts.isna(), annot=words, fmt="", vmin=0, vmax=3, cbar=False, ax=axes,
        cmap=sns.light_palette("#e0894a", as_cmap=True), linewidths=0.6,
        annot_kws={"fontsize": style.TEXT_PT, "color": "black", "linespacing": 0.95},
    )  # fmt: skip
    labels = [style.fitted(item.label, style.LABEL_IN) for item in shown]
    axes.set_yticklabels(labels, rotation=0)
    axes.set_xticklabels([f"{rate:.10g}" for rate in _rates(study)], rotation=0)
    axes.tick_params(length=0)
    axes.set(ylabel="", xlabel="offered rate (requests/s)", title="criteria of saturation")
    for line, item in enumerate(shown):
        rows.beside(axes, line + 0.5, rates.knee_text(study, item.id))
        _states(axes, line, table[table["config"] == item.id], _rates(study))
    rows.beside(axes, -0.25, "knee")


def _rates(study: StudyTables) -> list[float]:
    return rates.grid_rates(study)


def _states(axes: Axes, line: int, own: pd.DataFrame, grid: Sequence[float]) -> None:
    """Why a cell has no number; said once where the whole row has none."""
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
    states = {row.rate_rps: (row.status, row.reason) for row in own.itertuples()}
    alike = set(states.values())
    if len(states) == len(grid) and len(alike) == 1 and own["status"].iloc[0] != "valid":
        status, reason = alike.pop()
        words = str(status) + f": {reason!s}" * bool(reason)
        text = style.fitted(words, 2.4)
        axes.text(len(grid) / 2, line + 0.5, text, ha="center", va="center", bbox=box)
        return
    for place, rate in enumerate(grid):
        status, _ = states.get(rate, ("missing", ""))
        if status != "valid":
            axes.text(place + 0.5, line + 0.5, str(status), ha="center", va="center", bbox=box)

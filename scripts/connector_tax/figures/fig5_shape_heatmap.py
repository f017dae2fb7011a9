"""Figure 5: the TTFT p90 tax by input and output length, one heat map per configuration (Phase B).

The last map is the A/A comparison, on the same scale: what the colours of the others are worth.
"""

import math
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize, to_rgba

from connector_tax.artifacts.metrics import margin_of
from connector_tax.figures import rows, style, waits
from connector_tax.figures.tables import StudyTables, records
from connector_tax.text import size

COLUMNS = [
    "config", "cell", "input_tokens", "output_tokens", "rate_rps", *rows.ENDS,
    "interval_includes_0", *rows.BAND, "n_config", "n_plain", "family", "mark", "status",
    "reason",
]  # fmt: skip
PER_ROW = 4
CELL_IN = 0.22
CIRCLE, TRIANGLE = "○", "▽"


def draw(study: StudyTables) -> style.Picture:
    """Heat maps on one diverging scale centred at 0; a circle marks intervals with 0."""
    table = _taxes(study)
    if table.empty:
        name = "fig5_shape_heatmap"
        return style.absent(study, name, "the study has no Phase B, the sweep over shapes.")
    shown = list(table["config"].unique())
    inputs = sorted(table["input_tokens"].unique(), reverse=True)
    outputs = sorted(table["output_tokens"].unique())
    margin = margin_of(study.settings["statistics"]["margins"], "ttft_p90")
    limit = max([3 * margin, *map(abs, rows.numbers(table, ["tax"]))])
    colors = _colors(margin / limit)
    lines = math.ceil(len(shown) / PER_ROW)
    height = lines * (CELL_IN * len(inputs) + 0.42) + 0.3
    figure = style.new_figure(study, style.PAGE_IN, height, _notes(study, table, margin))
    grid = style.panels(figure, len(shown), PER_ROW, share_x=True)
    for axes, config in zip(grid.flat, shown, strict=False):
        own = table[table["config"] == config]
        taxes, words = (
            own.pivot_table(name, "input_tokens", "output_tokens", "first").reindex(
                index=inputs, columns=outputs
            )
            for name in ("tax", "words")
        )
        style.heat_map(axes, taxes, words, cmap=colors, vmin=-limit, vmax=limit)
        label = study.against("A/A: plain again") if config == study.aa else study.label(config)
        axes.set_title(style.fitted(label, 1.3, style.TEXT_PT * 1.13))
    for axes in grid[:, 0]:
        axes.set_ylabel("input tokens")
    for axes in grid[-1, :]:
        axes.set_xlabel("output tokens")
    scale = ScalarMappable(Normalize(-limit, limit), colors)
    bar = figure.colorbar(scale, ax=grid, aspect=30, pad=0.01)
    bar.set_ticks([-limit, 0, limit], labels=[size(-100 * limit), "0", size(100 * limit)])
    bar.set_label("TTFT p90 tax (%)")
    bar.outline.set_visible(False)
    return style.picture(figure, table[COLUMNS])


def _colors(margin: float) -> ListedColormap:
    """Red above zero, blue below, grey within the margin, which is a share of the scale's end."""
    ends = np.linspace(-1, 1, 512)
    colors = colormaps["RdBu_r"]((1 + ends) / 2)
    colors[abs(ends) <= margin] = to_rgba("#d9d9d9")
    return ListedColormap(colors)


def _taxes(study: StudyTables) -> pd.DataFrame:
    """Each configuration's tax in each shape, with the words of its cell."""
    table = rows.measured(study, "B").query("metric == 'ttft_p90'")
    noise = table[table["config"] == study.aa][["cell", *rows.ENDS[1:]]]
    table = table.merge(noise.set_axis(["cell", *rows.BAND], axis=1), how="left", on="cell")
    shapes = pd.DataFrame(study.cells("B"), columns=["cell", "input_tokens", "output_tokens"])
    table = table.merge(shapes, how="left", on="cell")
    order = {item.id: place for place, item in enumerate(study.compared)}
    table = table[table["config"].isin(order)].assign(order=table["config"].map(order))
    table = table.sort_values(["order", "input_tokens", "output_tokens"])
    low, high = (table[end].astype(float) for end in rows.ENDS[1:])
    within = ((low <= 0) & (high >= 0)).astype(object).where(low.notna() & high.notna())
    table = table.assign(interval_includes_0=within)
    return table.assign(words=[_words(row) for row in records(table)])


def _words(row: dict[Any, Any]) -> str:
    """A tax in per cent with its marks, or why there is none."""
    if row["tax"] is None:
        return str(row["status"])
    marks = CIRCLE * bool(row["interval_includes_0"]) + TRIANGLE * bool(row["mark"])
    return " ".join(filter(None, (size(100 * row["tax"]), marks)))


def _notes(study: StudyTables, table: pd.DataFrame, margin: float) -> list[str]:
    circle = f"{CIRCLE} 95 % interval includes 0; " * bool(rows.numbers(table, ["tax_lo"]))
    marked = f"{TRIANGLE} saturated or dropped arrivals: no verdict; "
    marked *= bool(rows.overload_handles(table))
    noise = rows.numbers(table[table["config"] == study.aa], ["tax"])
    ends = [size(100 * value) for value in (min(noise), max(noise))] if noise else []
    aa = f"A/A: {' to '.join(ends)} %" if ends else "no A/A comparison"
    return [
        f"grey: within ±{100 * margin:g} %; {circle}{marked}hatched: no number",
        f"{rows.tax_text(table)}; ref_safe, {study.reference['ref_safe']:g} req/s; {aa}",
        *filter(None, [waits.words(study)]),
    ]

"""Figure 5: the TTFT p90 tax by input and output length, one heat map per configuration (Phase B).

The last map is the A/A comparison, on the same scale: what the colours of the others are worth.
"""

import math

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize

from connector_tax.artifacts.tables import TaxRow
from connector_tax.figures import rows, style
from connector_tax.figures.style import Picture
from connector_tax.figures.tables import Configuration, StudyTables
from connector_tax.text import size

METRIC = "ttft_p90"
COLUMNS = (
    "config", "cell", "input_tokens", "output_tokens", "rate_rps", "tax", "tax_lo", "tax_hi",
    "interval_includes_0", "aa_lo", "aa_hi", "n_config", "n_plain", "family", "mark",
    "status", "reason",
)  # fmt: skip
PER_ROW = 4
CELL_IN = 0.22
CIRCLE, TRIANGLE = "○", "▽"


def draw(study: StudyTables) -> Picture:
    """Heat maps on one diverging scale centred at 0; a circle marks intervals with 0."""
    taxes = [row for row in study.taxes if row.phase == "B" and row.metric == METRIC]
    if not taxes:
        name = "fig5_shape_heatmap"
        return style.absent(study, name, "the study has no Phase B, the sweep over shapes.")
    measured = {row.config for row in taxes}
    shown = [i for i in study.launched if i.id in measured and i.id != study.baseline]
    table = pd.DataFrame([_record(row) for row in taxes])
    limit = max(0.01, float(table["tax"].astype(float).abs().max()))
    inputs, lines = table["input_tokens"].nunique(), math.ceil(len(shown) / PER_ROW)
    height = lines * (CELL_IN * inputs + 0.42) + 0.3
    figure = style.new_figure(study, style.PAGE_IN, height, _notes(study, taxes))
    grid = figure.subplots(lines, min(PER_ROW, len(shown)), squeeze=False, sharex=True, sharey=True)
    scale = Normalize(-limit, limit)
    for axes in grid.flat[len(shown) :]:
        axes.set_axis_off()
    with style.layout_held(figure):
        for axes, item in zip(grid.flat, shown, strict=False):
            _map(axes, table[table["config"] == item.id], table, scale)
    for axes, item in zip(grid.flat, shown, strict=False):
        label = study.against("A/A: plain again") if item.id == study.aa else item.label
        axes.set_title(style.fitted(label, 1.3, style.TEXT_PT * 1.13))
    for axes in grid[:, 0]:
        axes.set_ylabel("input tokens")
    for axes in grid[-1, :]:
        axes.set_xlabel("output tokens")
    bar = figure.colorbar(ScalarMappable(scale, "RdBu_r"), ax=grid, aspect=30, pad=0.01)
    bar.set_ticks([-limit, 0, limit], labels=[size(-100 * limit), "0", size(100 * limit)])
    bar.set_label("TTFT p90 tax (%)")
    bar.outline.set_visible(False)
    records = [record for item in shown for record in _of(study, item, taxes)]
    return style.picture(figure, COLUMNS, records)


def includes_zero(row: TaxRow) -> bool | None:
    """Whether the interval of a tax includes 0; None where there is no interval."""
    if row.tax_lo is None or row.tax_hi is None:
        return None
    return row.tax_lo <= 0 <= row.tax_hi


def _map(axes: Axes, own: pd.DataFrame, table: pd.DataFrame, scale: Normalize) -> None:
    """One configuration's map; hatched cells with their state where there is no number."""
    index = sorted(table["input_tokens"].unique(), reverse=True)
    columns = sorted(table["output_tokens"].unique())

    def matrix(values: str) -> pd.DataFrame:
        keyed = own.pivot_table(values, "input_tokens", "output_tokens", aggfunc="first")
        return keyed.reindex(index=index, columns=columns)

    taxes, words = matrix("tax").astype(float), matrix("words").fillna("missing")
    axes.patch.set(**style.LOST)
    sns.heatmap(
        taxes, mask=taxes.isna(), annot=words, fmt="", cmap="RdBu_r", vmin=scale.vmin,
        vmax=scale.vmax, cbar=False, linewidths=0.6, ax=axes, annot_kws={"fontsize": style.TEXT_PT},
    )  # fmt: skip
    axes.set(xlabel="", ylabel="")
    axes.tick_params(length=0, labelrotation=0)
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
    for line, row in enumerate(index):
        for place, column in enumerate(columns):
            if pd.isna(taxes.loc[row, column]):
                text = str(words.loc[row, column])
                axes.text(place + 0.5, line + 0.5, text, ha="center", va="center", bbox=box)


def _record(row: TaxRow) -> dict[str, object]:
    """A row for the CSV, with the words of its cell."""
    record: dict[str, object] = {name: getattr(row, name, None) for name in COLUMNS}
    if not rows.numbers(row):
        return record | dict.fromkeys(rows.ENDS) | {"words": row.status}
    within = includes_zero(row)
    marks = CIRCLE * bool(within) + TRIANGLE * bool(row.mark)
    words = " ".join(filter(None, (size(100 * (row.tax or 0.0)), marks)))
    return record | {"interval_includes_0": within, "words": words}


def _of(study: StudyTables, item: Configuration, taxes: list[TaxRow]) -> list[dict[str, object]]:
    """The CSV's rows of a configuration: one for each shape, missing or not."""
    own = {row.cell: row for row in taxes if row.config == item.id}
    shapes = {row.cell: (row.input_tokens, row.output_tokens) for row in taxes}
    records = []
    for cell, shape in sorted(shapes.items(), key=lambda entry: entry[1]):
        if cell in own:
            records.append(_record(own[cell]))
            continue
        missing: dict[str, object] = dict.fromkeys(COLUMNS)
        missing |= {"config": item.id, "cell": cell, "status": "missing"}
        missing |= {"input_tokens": shape[0], "output_tokens": shape[1]}
        records.append(missing | {"reason": study.skip_reason(item.id) or ""})
    return records


def _notes(study: StudyTables, taxes: list[TaxRow]) -> list[str]:
    known = any(row.tax_lo is not None for row in taxes)
    circle = f"{CIRCLE} 95 % interval includes 0" if known else rows.interval_text(taxes)
    marked = f"; {TRIANGLE} saturated or dropped arrivals: no verdict" * any(r.mark for r in taxes)
    noise = [row.tax for row in taxes if row.config == study.aa and row.tax is not None]
    ends = [size(100 * value) for value in (min(noise), max(noise))] if noise else []
    aa = f"A/A: {' to '.join(ends)} %" if ends else "no A/A comparison"
    return [
        f"{circle}{marked}; hatched: no number",
        f"{rows.family_text(taxes)} at ref_safe, {study.reference['ref_safe']:g} req/s; {aa};"
        f" {rows.sample_text(taxes)}",
    ]

"""Figure 4: the tax on TTFT p90 and TPOT p90 at ref_safe and ref_load, and the gap between them.

The gap is what queueing adds near saturation.
"""

from collections.abc import Sequence

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from connector_tax.artifacts import tables
from connector_tax.artifacts.names import REFERENCES
from connector_tax.artifacts.study_records import Reference
from connector_tax.artifacts.tables import EffectRow
from connector_tax.figures import rows, style
from connector_tax.figures.tables import StudyTables, frame, records

ROW_IN = 0.3
HATCH = "//////"
GAP = ["gap", "gap_lo", "gap_hi"]


def draw(study: StudyTables) -> style.Picture:
    """Bars of tax(config) with intervals over the A/A band; one panel per metric, on one scale."""
    if absent := rows.stand_in(study, "fig4_tax_bars"):
        return absent
    rates = study.reference
    one_rate = rates["ref_load"] in (None, rates["ref_safe"])
    references: list[Reference] = ["ref_safe"] if one_rate else list(REFERENCES)
    keys = ["config", "metric"]
    named = dict(zip(("estimate", "lo", "hi"), GAP, strict=True))
    gaps = frame(study.of(tables.GAP), EffectRow).rename(columns=named)[[*keys, *GAP]]
    table = rows.taxes(study, [item.id for item in study.connectors], references)
    table = table.merge(gaps, how="left", on=keys)
    notes = [f"{rows.tax_text(table)}; {rows.aa_text(study)}"]
    height = ROW_IN * len(study.connectors) + 0.8
    figure = style.new_figure(study, style.PAGE_IN, height, notes)
    grid = figure.subplots(ncols=2, sharey=True)
    for axes, (metric, panel) in zip(grid, table.groupby("metric", sort=False), strict=True):
        rows.tax_scale(axes, rows.numbers(table))
        rows.shade(axes, panel)
        _bars(study, axes, panel, references)
        rows.prepare(axes, [item.label for item in study.connectors], rows.METRICS[str(metric)])
        axes.set_xlabel(rows.tax_label(study, axes))
    names = [f"{name}, {rates[name]:g} req/s" for name in references]
    if one_rate:
        names = [f"ref_safe = ref_load, {rates['ref_safe']:g} req/s"]
    handles: list[Artist] = [
        Patch(edgecolor="#606060", lw=0.6, label=name, facecolor=fill, hatch=hatch)
        for name, (fill, hatch) in zip(names, (("#606060", None), ("white", HATCH)), strict=False)
    ]
    handles += [rows.band_handle(table), *rows.overload_handles(table)]
    return style.picture(figure, table, handles, 4)


def _bars(study: StudyTables, axes: Axes, panel: pd.DataFrame, references: Sequence[str]) -> None:
    height = 0.8 / len(references)
    for number, row in enumerate(records(panel)):
        place, line = divmod(number, len(study.connectors))
        y = line + (place - (len(references) - 1) / 2) * height
        if rows.value(axes, y, row, height=0.9 * height):
            color, filled = style.marks(study)[row["config"]].color, place == 0
            axes.barh(
                y, row["tax"], height=0.9 * height, zorder=3, lw=0.6, edgecolor=color,
                color=color if filled else "white", hatch=None if filled else HATCH,
            )  # fmt: skip
        if place == len(references) - 1 and row["gap"] is not None:
            rows.beside(axes, line, rows.size_text(row, GAP))
    if panel["gap"].notna().any():
        rows.beside(axes, -0.75, "gap, pp")

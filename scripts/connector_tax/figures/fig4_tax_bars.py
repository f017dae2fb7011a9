"""Figure 4: the tax on TTFT p90 and TPOT p90 at ref_safe and ref_load, side by side.

The gap between the two bars of a configuration is what queueing adds near saturation.
"""

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from connector_tax.artifacts.names import REFERENCES
from connector_tax.artifacts.tables import TaxRow
from connector_tax.figures import bars, style
from connector_tax.figures.style import Picture
from connector_tax.figures.tables import StudyTables

TITLE = "Figure 4: tax on TTFT p90 and TPOT p90 at the reference rates"
CAPTION = (
    "Tax of each configuration over plain on TTFT p90 and TPOT p90: filled at ref_safe, hatched "
    "at ref_load, with 95 % intervals; a study of one block has none: one launch, launches not "
    "included. The difference between the two bars is what queueing adds near saturation. The "
    "grey band is the A/A comparison, one launch of plain of each block against the others; a tax "
    "inside it is not distinguishable from launching plain twice. An open triangle marks a tax "
    "from a cell in which a server was saturated or dropped arrivals: it gets no verdict. "
    "Numbers are per cent."
)
ROW_IN = 0.23


def _references(study: StudyTables) -> list[str]:
    """The reference rates to draw: both, or ref_safe alone where they are one rate."""
    rates = study.reference
    same = rates["ref_load"] is None or rates["ref_load"] == rates["ref_safe"]
    return ["ref_safe"] if same else list(REFERENCES)


def _panel(study: StudyTables, axes: Axes, metric: str, width_in: float) -> list[dict[str, object]]:
    marks = style.marks(study)
    references = _references(study)
    taxes = {reference: study.taxes_at(reference, metric) for reference in references}
    bands = {reference: bars.aa_interval(study, reference, metric) for reference in references}
    drawn = [v for rows in taxes.values() for row in rows.values() for v in bars.numbers(row)]
    bars.tax_axis(axes, drawn)
    height = 0.8 / len(references)
    records = []
    for reference in references:
        bars.aa_band(axes, bands[reference], dashed=reference == "ref_load")
        for index, item in enumerate(study.connectors):
            row = taxes[reference].get(item.id)
            y = index + (references.index(reference) - (len(references) - 1) / 2) * height
            record = bars.tax_record(row, item.id, metric, reference)
            if band := bands[reference]:
                record["aa_lo"], record["aa_hi"] = band
            records.append(record)
            if row is None or row.status != "valid" or row.tax is None:
                bars.no_number(axes, y, height * 0.9, row, width_in)
                continue
            solid = reference == "ref_safe"
            axes.barh(
                y, row.tax, height=height * 0.9, zorder=3, lw=0.6, edgecolor=marks[item.id].color,
                color=marks[item.id].color if solid else "white", hatch=None if solid else "//////",
            )  # fmt: skip
            bars.interval(axes, y, row)
            bars.beside(axes, y, bars.numbers(row), style.percent(row.tax))
            if row.mark:
                bars.overload_mark(axes, row.tax, y)
    bars.row_labels(axes, [item.label for item in study.connectors], 1.2)
    axes.set_title(f"{bars.METRIC_LABELS[metric]}", loc="left")
    return records


def draw(study: StudyTables) -> Picture:
    """Bars of tax(config) with intervals over the A/A band; one panel per metric."""
    absent = bars.no_reference(study, TITLE)
    if absent:
        return absent
    metrics = list(bars.METRIC_LABELS)
    panel = ROW_IN * len(study.connectors)
    left = 0.15 + style.label_margin_in([item.label for item in study.connectors], 6)
    width = style.COLUMN_IN - left - 0.1
    shown = [row for metric in metrics for reference in _references(study)
             for row in study.taxes_at(reference, metric).values()]  # fmt: skip
    figure = style.new_figure(study, style.COLUMN_IN, 2 * panel + 1.68, bars.sample_note(shown))
    records = []
    for position, metric in enumerate(metrics):
        bottom = 0.98 + (1 - position) * (panel + 0.5)
        axes = style.axes_in(figure, left, bottom, width, panel)
        records += _panel(study, axes, metric, width - 0.1)
    _legend(study, figure, shown)
    return Picture(figure, bars.TAX_COLUMNS, records)


def _legend(study: StudyTables, figure: Figure, rows: list[TaxRow]) -> None:
    """What fill, band and strokes mean, in the room under the lower panel."""
    rates = study.reference
    names = [f"{name}, {rates[name]:g} req/s" for name in _references(study)]
    if len(names) == 1:
        names = [f"ref_safe = ref_load, {rates['ref_safe']:g} req/s"]
    fills = (("#606060", None), ("white", "//////"))
    handles: list[Artist] = [
        Patch(edgecolor="#606060", lw=0.6, label=name, facecolor=fill, hatch=hatch)
        for name, (fill, hatch) in zip(names, fills, strict=False)
    ]
    if bars.marked(rows):
        handles.append(bars.overload_handle())
    height = figure.get_figheight()
    figure.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0.0, 0.36 / height), ncols=2,
        frameon=False, fontsize=5.5, handlelength=1.6, columnspacing=1.2, borderaxespad=0.1,
    )  # fmt: skip
    dashed = len(names) > 1 and bars.aa_interval(study, "ref_load", "ttft_p90") is not None
    note = bars.aa_text(study) + ("; dashed: at ref_load" if dashed else "")
    note = f"{bars.interval_text(rows)}; {bars.family_text(rows)}\n{note}"
    figure.text(
        0.06 / style.COLUMN_IN, 0.19 / height, note, fontsize=5, va="bottom", linespacing=1.3
    )

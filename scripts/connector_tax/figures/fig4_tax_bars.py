"""Figure 4: the tax on TTFT p90 and TPOT p90 at ref_safe and ref_load, and the gap between them.

The gap is what queueing adds near saturation.
"""

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from connector_tax.artifacts.names import REFERENCES
from connector_tax.artifacts.tables import AmplificationRow, TaxRow
from connector_tax.figures import rows, style
from connector_tax.figures.style import Picture
from connector_tax.figures.tables import StudyTables
from connector_tax.text import size

ROW_IN = 0.3
HATCH = "//////"
COLUMNS = (*rows.TAX_COLUMNS, "gap", "gap_lo", "gap_hi")


def draw(study: StudyTables) -> Picture:
    """Bars of tax(config) with intervals over the A/A band; one panel per metric, on one scale."""
    absent = rows.no_reference(study, "fig4_tax_bars")
    if absent:
        return absent
    rates = study.reference
    one_rate = rates["ref_load"] in (None, rates["ref_safe"])
    references = ["ref_safe"] if one_rate else list(REFERENCES)
    shown = [
        row
        for metric in rows.METRICS
        for reference in references
        for row in study.taxes_at(reference, metric).values()
        if row.config != study.aa
    ]
    notes = [
        f"{rows.interval_text(shown)}; {rows.family_text(shown)}; {rows.aa_text(study)};"
        f" {rows.sample_text(shown)}"
    ]
    height = ROW_IN * len(study.connectors) + 0.8
    figure = style.new_figure(study, style.PAGE_IN, height, notes)
    records: list[dict[str, object]] = []
    scale = [value for row in shown for value in rows.numbers(row)]
    for axes, metric in zip(figure.subplots(ncols=2, sharey=True), rows.METRICS, strict=True):
        rows.tax_scale(axes, scale)
        records += _panel(study, axes, metric, references)
    names = [f"{name}, {rates[name]:g} req/s" for name in references]
    if one_rate:
        names = [f"ref_safe = ref_load, {rates['ref_safe']:g} req/s"]
    handles: list[Artist] = [
        Patch(edgecolor="#606060", lw=0.6, label=name, facecolor=fill, hatch=hatch)
        for name, (fill, hatch) in zip(names, (("#606060", None), ("white", HATCH)), strict=False)
    ]
    aa = rows.band_handle(rows.aa_interval(study, "ref_safe", "ttft_p90"))
    style.legend(figure, [*handles, aa, *rows.overload_handles(shown)], 4)
    return style.picture(figure, COLUMNS, records)


def _panel(
    study: StudyTables, axes: Axes, metric: str, references: list[str]
) -> list[dict[str, object]]:
    marks = style.marks(study)
    gaps = {row.config: row for row in study.amplification if row.metric == metric}
    rows.shade(axes, rows.aa_interval(study, "ref_safe", metric))
    height = 0.8 / len(references)
    records = []
    for place, reference in enumerate(references):
        taxes = study.taxes_at(reference, metric)
        aa = rows.aa_interval(study, reference, metric)
        for index, item in enumerate(study.connectors):
            row = taxes.get(item.id)
            gap = gaps.get(item.id)
            record = rows.tax_record(row, item.id, metric, reference, aa)
            records.append(record | _gap(gap))
            y = index + (place - (len(references) - 1) / 2) * height
            _bar(axes, y, 0.9 * height, row, marks[item.id].color, reference == "ref_safe")
            if gap and gap.gap is not None and reference == references[-1]:
                words = size(*(None if v is None else 100 * v for v in _gap(gap).values()))
                rows.beside(axes, index, words)
    rows.prepare(axes, [item.label for item in study.connectors], rows.METRICS[metric])
    axes.set_xlabel(rows.tax_label(study, axes))
    if any(gap.gap is not None for gap in gaps.values()):
        rows.beside(axes, -0.75, "gap, pp")
    return records


def _gap(row: AmplificationRow | None) -> dict[str, float | None]:
    names = ("gap", "gap_lo", "gap_hi")
    return {name: None if row is None else getattr(row, name) for name in names}


def _bar(axes: Axes, y: float, height: float, row: TaxRow | None, color: str, filled: bool) -> None:
    if row is None or row.tax is None or not rows.numbers(row):
        rows.lost(axes, y, height, rows.state_text(row), 1.3)
        return
    axes.barh(
        y, row.tax, height=height, zorder=3, lw=0.6, edgecolor=color,
        color=color if filled else "white", hatch=None if filled else HATCH,
    )  # fmt: skip
    rows.interval(axes, y, row.tax_lo, row.tax_hi)
    if row.mark:
        axes.plot(row.tax, y, zorder=7, **rows.OVERLOAD)

"""Figure 9: every tax at ref_safe with its interval and verdict, beside prior, A/A band and margin.

The headline of the study in one picture: what was measured, how sure, and what was expected.
"""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from connector_tax.artifacts.names import DEVICES_DIFFER, INCONCLUSIVE, MARKED, NO_TAX, TAX
from connector_tax.artifacts.tables import TaxRow
from connector_tax.figures import rows, style
from connector_tax.figures.style import Picture
from connector_tax.figures.tables import StudyTables

ROW_IN = 0.165
MARGIN: dict[str, Any] = {"color": "#7c6a3c", "lw": 0.8, "ls": (0, (1, 1.5))}
PRIOR: dict[str, Any] = {
    "marker": "D",
    "ls": "none",
    "ms": 4,
    "mfc": "white",
    "mec": "black",
    "mew": 0.6,
}
VERDICTS = {
    TAX: "TAX", NO_TAX: "NO TAX", INCONCLUSIVE: "cannot tell",
    MARKED: "marked", DEVICES_DIFFER: "devices differ",
}  # fmt: skip


def priors(study: StudyTables) -> dict[str, float]:
    """The TTFT p90 taxes of the earlier trace replay (8 instances, saturated), by configuration."""
    values = study.settings["hypotheses"]["prior"]
    plain = values["plain_ttft_p90_s"]
    return {
        "mooncake_both": values["mooncake_both_ttft_p90_s"] / plain - 1,
        "nixl_both": values["nixl_ttft_p90_s"] / plain - 1,
    }


def draw(study: StudyTables) -> Picture:
    """A forest plot per metric, with the numbers, their intervals and verdicts written out."""
    absent = rows.no_reference(study, "fig9_forest")
    if absent:
        return absent
    shown = [item.id for item in study.launched if item.id != study.baseline]
    taxes = {metric: study.taxes_at("ref_safe", metric) for metric in rows.METRICS}
    drawn = [row for by_config in taxes.values() for row in by_config.values()]
    notes = [
        f"{rows.interval_text(drawn)}; {rows.family_text(drawn)};"
        f" {study.reference['ref_safe']:g} req/s; {rows.sample_text(drawn)}"
    ]
    figure = style.new_figure(study, style.PAGE_IN, ROW_IN * len(shown) + 0.8, notes)
    records: list[dict[str, object]] = []
    for axes, metric in zip(figure.subplots(ncols=2, sharey=True), rows.METRICS, strict=True):
        records += _panel(study, axes, metric, taxes[metric])
    margins = sorted({100 * study.settings["statistics"]["margins"][m] for m in rows.METRICS})
    prior = [Line2D([], [], label="prior (trace replay)", **PRIOR)]
    handles = [
        *(prior if priors(study).keys() & set(shown) else []),
        rows.band_handle(rows.aa_interval(study, "ref_safe", "ttft_p90")),
        Line2D([], [], label=f"±{' or '.join(f'{m:g}' for m in margins)} % margin", **MARGIN),
        *rows.overload_handles(drawn),
    ]
    style.legend(figure, handles, 4)
    return style.picture(figure, (*rows.TAX_COLUMNS, "prior_tax", "margin"), records)


def _panel(
    study: StudyTables, axes: Axes, metric: str, taxes: dict[str, TaxRow]
) -> list[dict[str, object]]:
    marks = style.marks(study)
    margin = study.settings["statistics"]["margins"][metric]
    prior = priors(study) if metric == "ttft_p90" else {}
    aa = rows.aa_interval(study, "ref_safe", metric)
    shown = [item for item in study.launched if item.id != study.baseline]
    own = [prior[item.id] for item in shown if item.id in prior]
    values = [value for row in taxes.values() for value in rows.numbers(row)]
    rows.tax_scale(axes, [*values, *own, -margin, margin])
    rows.shade(axes, aa)
    for end in (-margin, margin):
        axes.axvline(end, zorder=0.8, **MARGIN)
    records = []
    for index, item in enumerate(shown):
        row = taxes.get(item.id)
        record = rows.tax_record(row, item.id, metric, "ref_safe", aa)
        records.append(record | {"prior_tax": prior.get(item.id), "margin": margin})
        if row is None or row.tax is None or not rows.numbers(row):
            rows.lost(axes, index, 0.8, rows.state_text(row), 1.3)
            continue
        if item.id in prior:
            axes.plot(prior[item.id], index, zorder=5, **PRIOR)
        rows.interval(axes, index, row.tax_lo, row.tax_hi, marks[item.id].color)
        axes.plot(row.tax, index, ms=4.2, zorder=6, **style.marker_style(marks[item.id]))
        if row.mark:
            axes.plot(row.tax, index, zorder=7, **rows.OVERLOAD)
        verdict = "" if item.id == study.aa else VERDICTS.get(row.verdict, "")
        rows.beside(axes, index, rows.tax_size(row))
        rows.beside(axes, index, verdict, bold=verdict == TAX, offset=76)
    rows.prepare(axes, [item.label for item in shown], f"{rows.METRICS[metric]} at ref_safe")
    axes.set_xlabel(rows.tax_label(study, axes))
    return records

"""What the report says of engine steps: step taxes and the hooks that cost something."""

from dataclasses import dataclass

from connector_tax import text
from connector_tax.artifacts.names import REFERENCES
from connector_tax.artifacts.tables import StepTaxRow
from connector_tax.figures.tables import StudyTables
from connector_tax.report.tables import Table, TableCell, TableRow, table
from connector_tax.report.taxes import number

SHOWN_US = 1.0  # hooks below this mean per step are in hooks.csv alone
METRICS = {
    "tax_step_p50": "schedule()",
    "tax_callback_p50": "callbacks",
    "unattributed": "schedule() minus callbacks",
    "tax_engine_step_p50": "whole engine step",
}


@dataclass(frozen=True)
class StepTaxes:
    """The step taxes at one reference rate: a row for each configuration and A/A."""

    reference: str
    rate_rps: float
    table: Table


def step_taxes(study: StudyTables) -> list[StepTaxes]:
    """Step taxes at both reference rates; ref_load only where it is another rate."""
    tables = []
    for reference in REFERENCES:
        by_metric = {metric: study.step_taxes_at(reference, metric) for metric in METRICS}
        rate = study.reference[reference]
        if rate is None or not any(by_metric.values()):
            continue
        rows = [
            TableRow(
                [
                    TableCell(item.label),
                    *(_tax(rows_of.get(item.id)) for rows_of in by_metric.values()),
                ]
            )
            for item in study.connectors
        ]
        noise = [next(iter(rows_of.values()), None) for rows_of in by_metric.values()]
        rows.append(
            TableRow([TableCell(study.against("plain over plain (A/A)")), *map(_noise, noise)])
        )
        columns = ("Configuration", *METRICS.values())
        tables.append(StepTaxes(reference, rate, table(f"steps-{reference}", columns, rows)))
    return tables


def hooks(study: StudyTables) -> Table | None:
    """Every configuration's hooks at ref_safe that take SHOWN_US of a step or more."""
    cell = study.cell_at("ref_safe")
    columns = (
        "Configuration", "Hook", "Of", "Process", "Median, µs", "Mean, µs", "Share, %", "Ran in",
        "In empty steps, µs",
    )  # fmt: skip
    rows = []
    for item in study.connectors:
        own = [r for r in study.hooks if (r.phase, r.cell, r.config) == ("A", cell, item.id)]
        dear = sorted((r for r in own if r.mean_us >= SHOWN_US), key=lambda r: -r.mean_us)
        for row in dear:
            share = None if row.share is None else 100 * row.share
            rows.append(
                TableRow(
                    [
                        TableCell(item.label),
                        TableCell(row.hook),
                        TableCell(row.child or "itself"),
                        TableCell(row.process),
                        _microseconds(row.p50_us, row.p50_lo_us, row.p50_hi_us),
                        _microseconds(row.mean_us, row.mean_lo_us, row.mean_hi_us),
                        number(share),
                        TableCell(f"{row.n_ran} of {row.n_steps}", row.n_ran / row.n_steps),
                        number(row.empty_us, 1),
                    ]
                )
            )
        if below := len(own) - len(dear):
            words = f"{below} {'other ' * bool(dear)}hook{'s' * (below > 1)} below 1 µs per step"
            dashes = [TableCell(text.DASH)] * (len(columns) - 2)
            rows.append(TableRow([TableCell(item.label), TableCell(words), *dashes], lost=True))
    return table("hooks", columns, rows) if rows else None


def _microseconds(value: float | None, low: float | None, high: float | None) -> TableCell:
    """'12.3 [10.1, 14.6]', without brackets where there is no interval."""
    if value is None:
        return TableCell(text.DASH)
    ends = "" if low is None or high is None else f" [{_short(low)}, {_short(high)}]"
    return TableCell(_short(value) + ends, value)


def _short(value: float) -> str:
    return text.number(value, 1 if abs(value) < 99.95 else 0)


def _tax(row: StepTaxRow | None) -> TableCell:
    if row is None or row.us is None:
        return TableCell(row.reason if row is not None else "missing")
    return TableCell(text.size(row.us, row.lo_us, row.hi_us), row.us)


def _noise(row: StepTaxRow | None) -> TableCell:
    if row is None or row.aa_us is None:
        return TableCell(text.DASH)
    return TableCell(text.size(row.aa_us, row.aa_lo_us, row.aa_hi_us), row.aa_us)

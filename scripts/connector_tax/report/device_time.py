"""What the report says of an emulated device: what of the host's work it waited for."""

from connector_tax import text
from connector_tax.artifacts.names import REFERENCES
from connector_tax.artifacts.tables import DeviceStepRow
from connector_tax.figures.tables import StudyTables
from connector_tax.report.tables import Table, TableCell, TableRow, table
from connector_tax.report.taxes import number

COLUMNS = (
    "Configuration", "Steps", "Sequences", "Device, µs", "Period, µs", "Exposed, µs",
    "Exposed steps, %", "Host busy, µs", "Exposed over plain, µs", "TPOT over plain (A/B), µs",
)  # fmt: skip
ALL = "all"


def steps(study: StudyTables) -> list[tuple[str, float, Table]]:
    """A table for each reference rate of Phase A: its name, rate, rows by kind and batch."""
    tables: list[tuple[str, float, Table]] = []
    for reference in REFERENCES:
        cell, rate = study.cell_at(reference), study.reference[reference]
        own = [row for row in study.device_steps if (row.phase, row.cell) == ("A", cell)]
        if not own or rate is None or any(rate == known for _, known, _ in tables):
            continue
        rows = [TableRow(_cells(study, reference, row)) for row in sorted(own, key=_order)]
        columns = [study.against(column) for column in COLUMNS]
        tables.append((reference, rate, table(f"device-{reference}", columns, rows)))
    return tables


def _order(row: DeviceStepRow) -> tuple[bool, str]:
    """All sizes together first; within them as the table has them."""
    return row.batch != ALL, row.kind


def _cells(study: StudyTables, reference: str, row: DeviceStepRow) -> list[TableCell]:
    share = None if row.exposed_share is None else 100 * row.exposed_share
    return [
        TableCell(study.label(row.config)),
        TableCell(row.kind),
        TableCell(row.batch),
        number(row.device_us, 0),
        _mean(row.period_us, row.period_lo_us, row.period_hi_us),
        _mean(row.exposed_us, row.exposed_lo_us, row.exposed_hi_us),
        number(share, 1),
        _mean(row.host_busy_us, row.host_busy_lo_us, row.host_busy_hi_us),
        TableCell(
            text.size(row.over_plain_us, row.over_plain_lo_us, row.over_plain_hi_us),
            row.over_plain_us,
        ),
        _tpot(study, reference, row),
    ]


def _tpot(study: StudyTables, reference: str, row: DeviceStepRow) -> TableCell:
    """The median TPOT's difference from plain: what the exposed time must agree with."""
    tax = study.taxes_at(reference, "tpot_p50").get(row.config)
    if tax is None or tax.abs_ms is None or (row.kind, row.batch) != ("decode", ALL):
        return TableCell(text.DASH)
    us = [None if ms is None else 1e3 * ms for ms in (tax.abs_ms, tax.abs_lo_ms, tax.abs_hi_ms)]
    return TableCell(text.size(*us), us[0])


def _mean(value: float | None, low: float | None, high: float | None) -> TableCell:
    if value is None:
        return TableCell(text.DASH)
    decimals = 1 if abs(value) < 99.95 else 0
    ends = "" if low is None or high is None else (
        f" [{text.number(low, decimals)}, {text.number(high, decimals)}]"
    )  # fmt: skip
    return TableCell(text.number(value, decimals) + ends, value)

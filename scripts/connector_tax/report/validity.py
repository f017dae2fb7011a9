"""The tables of validity and drift: cells without a number, the checks of each, plain over time."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from connector_tax import text
from connector_tax.artifacts.cell_records import CheckRecord, CountsRecord
from connector_tax.artifacts.metrics import CRITERIA
from connector_tax.artifacts.tables import POOLED
from connector_tax.figures.tables import StudyTables
from connector_tax.report.launches import CellState, LaunchReport
from connector_tax.report.tables import Table, TableCell, TableRow, number, percent, table

COUNTS: tuple[Literal["planned", "sent", "ok", "dropped", "measured_ok"], ...] = (
    "planned", "sent", "ok", "dropped", "measured_ok",
)  # fmt: skip


def lost_cells(study: StudyTables, launches: Sequence[LaunchReport]) -> Table | None:
    """Every cell that has no number, with its reason; None where all have."""
    columns = ("Configuration", "Block", "Phase", "Cell", "State", "Reason")
    rows = [
        TableRow(
            [
                TableCell(study.label(launch.config)),
                number(launch.block, 0),
                TableCell(launch.phase),
                TableCell(cell.name),
                TableCell(cell.status),
                TableCell(cell.reason or launch.reason),
            ]
        )
        for launch in launches
        for cell in launch.cells
        if cell.status != "valid"
    ]
    return table("lost-cells", columns, rows) if rows else None


def checks(launch: LaunchReport) -> Table | None:
    """What a launch's cells counted and how each check came out; None where none was measured."""
    measured = [cell for cell in launch.cells if cell.record]
    if not measured:
        return None
    names = list(dict.fromkeys(name for cell in measured for name in _health(cell)))
    columns = ("Cell", "State", *COUNTS, "failed", *names)
    rows = [
        TableRow(
            [
                TableCell(cell.name),
                TableCell(cell.status),
                *(number(_counts(cell)[name], 0) for name in COUNTS),
                TableCell(text.compact(_counts(cell)["failed"]) or "none"),
                *(_check(cell, name) for name in names),
            ]
        )
        for cell in measured
    ]
    name = f"checks-{launch.phase}-{launch.block}-{launch.config}"
    return table(name, columns, rows)


def _health(cell: CellState) -> dict[str, CheckRecord]:
    return cell.record["health"] if cell.record else {}


def _counts(cell: CellState) -> CountsRecord:
    assert cell.record is not None
    return cell.record["counts"]


def _check(cell: CellState, name: str) -> TableCell:
    """Value and bound of a check; one that failed says so."""
    result = _health(cell).get(name)
    if result is None:
        return TableCell(text.DASH)
    words = f"{text.compact(result['value'])} ({text.compact(result['bound'])})"
    value = result["value"]
    key = float(value) if isinstance(value, int | float) else None
    return TableCell(words if result["pass"] else f"{words} FAILED", key)


def reference_rates(study: StudyTables) -> Table:
    """Value of each saturation criterion at each rate, × where it fired."""
    rates = study.reference["rates_rps"]
    at = [f"{text.compact(rate)} req/s" for rate in rates]
    columns = ("Configuration", *at, "Knee, req/s", study.against("Capacity over plain's"))
    plain, rows = study.reference["saturation_rate_rps"].get(study.baseline), []
    for config, by_rate in study.reference["criteria"].items():
        cells = [TableCell(_criteria(entry)) for entry in by_rate.values()]
        knee = study.reference["saturation_rate_rps"].get(config)
        capacity = number(knee / plain if knee and plain else None)
        label = TableCell(study.label(config))
        rows.append(TableRow([label, *cells, TableCell(text.compact(knee), knee), capacity]))
    return table("criteria", columns, rows)


def _criteria(entry: Mapping[str, Any]) -> str:
    said = (text.compact(entry[n]["value"]) + "×" * bool(entry[n]["fired"]) for n in CRITERIA)
    return " / ".join(said)


@dataclass(frozen=True)
class DriftRow:
    """The launches of plain that ran first and last in a block, in one cell, in ms."""

    block: str
    phase: str
    cell: str
    metric: str
    earlier_ms: float
    later_ms: float

    @property
    def change(self) -> float:
        """Later over earlier, minus one."""
        return self.later_ms / self.earlier_ms - 1


def drift_rows(study: StudyTables) -> list[DriftRow]:
    """Plain's earliest against its latest launch of each block, wherever both cells are valid."""
    valid = {
        (row.config, row.block, row.phase, row.cell): row
        for row in study.cell_rows
        if row.block != POOLED and row.status == "valid" and row.configuration == study.baseline
    }
    rows = []
    for (config, block, phase, cell), earlier in valid.items():
        ran = [
            entry["config"]
            for entry in study.document["run_order"][phase]
            if str(entry["block"]) == block and (entry["config"], block, phase, cell) in valid
        ]
        if config != ran[0] or len(ran) < 2:
            continue
        later = valid[ran[-1], block, phase, cell]
        for metric, before, after in (
            ("TTFT p90", earlier.number("ttft_p90_ms"), later.number("ttft_p90_ms")),
            ("TPOT p90", earlier.number("tpot_p90_ms"), later.number("tpot_p90_ms")),
        ):
            if before and after is not None:
                rows.append(DriftRow(block, phase, cell, metric, before, after))
    return rows


def drift_summary(drift: Sequence[DriftRow]) -> list[tuple[str, int, float, DriftRow]]:
    """Per metric: how many comparisons, the median change, and the row that changed most."""
    changes = []
    for metric in dict.fromkeys(row.metric for row in drift):
        rows = [row for row in drift if row.metric == metric]
        middle = statistics.median(row.change for row in rows)
        changes.append((metric, len(rows), middle, max(rows, key=lambda row: abs(row.change))))
    return changes


def drift_table(drift: Sequence[DriftRow]) -> Table:
    """Every comparison of plain with itself later in the block."""
    columns = ("Block", "Phase", "Cell", "Metric", "Earlier, ms", "Later, ms", "Change, %")
    rows = [
        TableRow(
            [
                number(int(row.block), 0),
                TableCell(row.phase),
                TableCell(row.cell),
                TableCell(row.metric),
                number(row.earlier_ms, 3),
                number(row.later_ms, 3),
                percent(row.change),
            ]
        )
        for row in drift
    ]
    return table("drift", columns, rows)

"""The tables of validity and drift: cells without a number, the checks of each, plain over time."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from connector_tax import text
from connector_tax.artifacts.cell_records import CheckRecord, CountsRecord
from connector_tax.artifacts.metrics import CRITERIA, HEADLINE, LATENCY_METRICS
from connector_tax.artifacts.tables import POOLED
from connector_tax.figures.tables import StudyTables
from connector_tax.report.launches import CellState, LaunchReport
from connector_tax.report.tables import (
    Column,
    Table,
    TableCell,
    TableRow,
    number,
    of_rows,
    percent,
    table,
)

CountName = Literal["planned", "sent", "ok", "dropped", "measured_ok"]
COUNTS: tuple[CountName, ...] = get_args(CountName)


def lost_cells(study: StudyTables, launches: Sequence[LaunchReport]) -> Table | None:
    """Every cell that has no number, with its reason; None where all have."""
    columns: list[Column[tuple[LaunchReport, CellState]]] = [
        Column("Configuration", lambda row: study.label(row[0].config)),
        Column("Block", lambda row: number(row[0].block, 0)),
        Column("Phase", lambda row: row[0].phase),
        Column("Cell", lambda row: row[1].name),
        Column("State", lambda row: row[1].status),
        Column("Reason", lambda row: row[1].reason or row[0].reason),
    ]
    rows = [(la, cell) for la in launches for cell in la.cells if cell.status != "valid"]
    return of_rows("lost-cells", columns, rows) if rows else None


def checks(launch: LaunchReport) -> Table | None:
    """What a launch's cells counted and how each check came out; None where none was measured."""
    measured = [cell for cell in launch.cells if cell.record]
    if not measured:
        return None
    names = dict.fromkeys(name for cell in measured for name in _health(cell))
    columns: list[Column[CellState]] = [
        Column("Cell", lambda cell: cell.name),
        Column("State", lambda cell: cell.status),
        *map(_counted, COUNTS),
        Column("failed", lambda cell: text.compact(_counts(cell)["failed"]) or "none"),
        *map(_checked, names),
    ]
    return of_rows(f"checks-{launch.phase}-{launch.block}-{launch.config}", columns, measured)


def _health(cell: CellState) -> dict[str, CheckRecord]:
    return cell.record["health"] if cell.record else {}


def _counts(cell: CellState) -> CountsRecord:
    assert cell.record is not None
    return cell.record["counts"]


def _counted(name: CountName) -> Column[CellState]:
    return Column(name, lambda cell: number(_counts(cell)[name], 0))


def _checked(name: str) -> Column[CellState]:
    """Value and bound of a check; one that failed says so."""

    def says(cell: CellState) -> TableCell:
        result = _health(cell).get(name)
        if result is None:
            return TableCell(text.DASH)
        value = result["value"]
        words = f"{text.compact(value)} ({text.compact(result['bound'])})"
        key = float(value) if isinstance(value, int | float) else None
        return TableCell(words if result["pass"] else f"{words} FAILED", key)

    return Column(name, says)


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
        for metric in HEADLINE:
            before, after = (row.number(f"{metric}_ms") for row in (earlier, later))
            if before and after is not None:
                label = LATENCY_METRICS[metric].label
                rows.append(DriftRow(block, phase, cell, label, before, after))
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
    columns: list[Column[DriftRow]] = [
        Column("Block", lambda row: number(int(row.block), 0)),
        Column("Phase", lambda row: row.phase),
        Column("Cell", lambda row: row.cell),
        Column("Metric", lambda row: row.metric),
        Column("Earlier, ms", lambda row: number(row.earlier_ms, 3)),
        Column("Later, ms", lambda row: number(row.later_ms, 3)),
        Column("Change, %", lambda row: percent(row.change)),
    ]
    return of_rows("drift", columns, drift)

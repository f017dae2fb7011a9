"""Collect the report's data on launches: cells, checks, timing, validity and drift."""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any, Literal, get_args

from connector_tax import text
from connector_tax.artifacts import paths
from connector_tax.artifacts.cell_records import CellRecord
from connector_tax.artifacts.folder import CellFolder
from connector_tax.artifacts.index import LaunchIndex
from connector_tax.artifacts.launch_files import nodes_of
from connector_tax.artifacts.metrics import HEADLINE, LATENCY_METRICS, criteria_of
from connector_tax.artifacts.tables import POOLED
from connector_tax.figures.tables import StudyTables
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

PAUSE_S = 60.0
CountName = Literal["planned", "sent", "ok", "dropped", "measured_ok"]
COUNTS: tuple[CountName, ...] = get_args(CountName)


@dataclass(frozen=True)
class LaunchReport:
    """One server launch of the run order; `index` is None if it has no index.json."""

    phase: str
    config: str
    block: int
    index: LaunchIndex | None
    cells: Sequence[CellFolder]

    @property
    def status(self) -> str:
        """Return the launch's state, or `missing` without index.json."""
        return "missing" if self.index is None else self.index.status

    @property
    def reason(self) -> str:
        """Return why the launch failed or was skipped, or ""."""
        return "no index.json: not measured" if self.index is None else self.index.reason or ""

    @property
    def started_utc(self) -> str:
        """Return the start time of the first cell (UTC)."""
        records = [cell.record for cell in self.cells if cell.record]
        return min((record["window"]["started_utc"] for record in records), default="")


def measured_again(study: StudyTables) -> list[str]:
    """Return text such as `plain/block0/A (kept in A.superseded1)` for each replaced run."""
    aside = study.root.glob(f"{paths.RUNS}/*/block*/*.superseded*")
    names = sorted(path.relative_to(study.root / paths.RUNS).as_posix() for path in aside)
    return [f"{name.partition('.')[0]} (kept in {name.rpartition('/')[2]})" for name in names]


def read_launches(study: StudyTables) -> list[LaunchReport]:
    """Return all launches in run order; a launch without index.json is `missing`."""
    launches = []
    for launch in study.folder.launches:
        config, block, phase = launch.launch.config, launch.launch.block, launch.launch.phase
        cells = [launch.cell(planned) for planned in study.document["cells"][phase]]
        launches.append(LaunchReport(phase, config, block, launch.index, cells))
    return launches


def engine_files(launches: Sequence[LaunchReport]) -> list[str]:
    """Return the hashes of lock and vLLM sources by interpreter; empty for an embedded engine."""
    attempts = [a for launch in launches if launch.index for a in launch.index.attempts]
    entries = [item for node in nodes_of(attempts) for item in node["engine_files"].items()]
    return list(dict.fromkeys(f"{python}: {text.compact(files)}" for python, files in entries))


def placements(launches: Sequence[LaunchReport]) -> Counter[str]:
    """Return each warning about CPU placement, with its number of launches."""
    warnings: Counter[str] = Counter()
    for launch in launches:
        attempts = launch.index.attempts if launch.index else []
        used = [a["load_generator"]["affinity"] for a in attempts if a.get("load_generator")]
        warnings.update(sorted({text for plan in used if plan for text in plan["warnings"]}))
    return warnings


def void_phases(launches: Sequence[LaunchReport]) -> list[str]:
    """Return the measured phases without a valid cell."""
    states: dict[str, set[str]] = {}
    for launch in launches:
        states.setdefault(launch.phase, set()).update(cell.status for cell in launch.cells)
    return [phase for phase, seen in states.items() if "void" in seen and "valid" not in seen]


@dataclass(frozen=True)
class Overhead:
    """The study's wall time beyond the necessary time of its launches, in s."""

    wall_s: float
    startup_s: float
    cells_s: float
    release_s: float

    @property
    def ratio(self) -> float | None:
        """Return wall time over cell windows + start-ups + release times; None if nothing ran."""
        needed = self.startup_s + self.cells_s + self.release_s
        return self.wall_s / needed if needed > 0 else None


def overhead(launches: Iterable[LaunchReport]) -> Overhead:
    """Return the overhead of all launches that ran; wall time includes gaps between launches.

    A gap longer than `PAUSE_S` is an interruption of the study, not overhead, and so is the gap
    after a launch without a recorded end, whose driver was killed after its last cell.
    """
    ran = [launch.index for launch in launches if launch.index and launch.index.timing]
    ran.sort(key=lambda index: index.started_utc)
    gaps = [
        (datetime.fromisoformat(after.started_utc) - datetime.fromisoformat(end)).total_seconds()
        for before, after in pairwise(ran)
        if (end := before.ended_utc) is not None
    ]
    between_s = sum(gap for gap in gaps if 0 < gap <= PAUSE_S)
    wall_s, *needed = (
        sum(index.timing[name] for index in ran)
        for name in ("wall_s", "startup_s", "cells_s", "release_s")
    )
    return Overhead(wall_s + between_s, *needed)


# ---- cells without a number, and checks


Measured = tuple[CellFolder, CellRecord]


def lost_cells(study: StudyTables, launches: Sequence[LaunchReport]) -> Table | None:
    """Return every cell without a number, with its reason; None if there is none."""
    columns: list[Column[tuple[LaunchReport, CellFolder]]] = [
        ("Configuration", lambda row: study.label(row[0].config)),
        ("Block", lambda row: number(row[0].block, 0)),
        ("Phase", lambda row: row[0].phase),
        ("Cell", lambda row: row[1].key.cell),
        ("State", lambda row: row[1].status),
        ("Reason", lambda row: row[1].reason or row[0].reason),
    ]
    rows = [(la, cell) for la in launches for cell in la.cells if cell.status != "valid"]
    return of_rows("lost-cells", columns, rows) if rows else None


def checks(launch: LaunchReport) -> Table | None:
    """Return the counts and checks of a launch's cells, or None if none was measured."""
    measured = [(cell, cell.record) for cell in launch.cells if cell.record]
    if not measured:
        return None
    known = dict.fromkeys(name for _, record in measured for name in record["health"])
    columns: list[Column[Measured]] = [
        ("Cell", lambda row: row[0].key.cell),
        ("State", lambda row: row[0].status),
        *map(_counted, COUNTS),
        ("failed", lambda row: text.compact(row[1]["counts"]["failed"]) or "none"),
        *map(_checked, known),
    ]
    return of_rows(f"checks-{launch.phase}-{launch.block}-{launch.config}", columns, measured)


def _counted(name: CountName) -> Column[Measured]:
    return (name, lambda row: number(row[1]["counts"][name], 0))


def _checked(name: str) -> Column[Measured]:
    """Return a column with value and bound of a check, and whether it failed."""

    def says(row: Measured) -> TableCell:
        result = row[1]["health"].get(name)
        if result is None:
            return TableCell(text.DASH)
        value = result["value"]
        words = f"{text.compact(value)} ({text.compact(result['bound'])})"
        key = float(value) if isinstance(value, int | float) else None
        return TableCell(words if result["pass"] else f"{words} FAILED", key)

    return (name, says)


def reference_rates(study: StudyTables) -> Table:
    """Return the value of each saturation criterion at each rate, with × if it fired."""
    rates = study.reference["rates_rps"]
    at = [f"{text.compact(rate)} req/s" for rate in rates]
    columns = ("Configuration", *at, "Knee, req/s", study.against("Capacity over plain's"))
    plain, rows = study.reference["saturation_rate_rps"].get(study.baseline), []
    criteria = criteria_of(study.saturation)
    for config, by_rate in study.reference["criteria"].items():
        cells = [TableCell(_criteria(entry, criteria)) for entry in by_rate.values()]
        knee = study.reference["saturation_rate_rps"].get(config)
        capacity = number(knee / plain if knee and plain else None)
        label = TableCell(study.label(config))
        rows.append(TableRow([label, *cells, TableCell(text.compact(knee), knee), capacity]))
    return table("criteria", columns, rows)


def _criteria(entry: Mapping[str, Any], criteria: Iterable[str]) -> str:
    values = (text.compact(entry[n]["value"]) + "×" * bool(entry[n]["fired"]) for n in criteria)
    return " / ".join(values)


# ---- drift


@dataclass(frozen=True)
class DriftRow:
    """The latencies in ms of plain's first and last launch in a block, in one cell."""

    block: str
    phase: str
    cell: str
    metric: str
    earlier_ms: float
    later_ms: float

    @property
    def change(self) -> float:
        """Return the relative change from the earlier to the later latency."""
        return self.later_ms / self.earlier_ms - 1


def drift_rows(study: StudyTables) -> list[DriftRow]:
    """Compare plain's first and last launch of each block, in cells that are valid in both."""
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
    """Return metric, number of comparisons, median change, and row with the largest change."""
    changes = []
    for metric in dict.fromkeys(row.metric for row in drift):
        rows = [row for row in drift if row.metric == metric]
        middle = statistics.median(row.change for row in rows)
        changes.append((metric, len(rows), middle, max(rows, key=lambda row: abs(row.change))))
    return changes


def drift_table(drift: Sequence[DriftRow]) -> Table:
    """Return a table of the comparisons of plain's first and last launch in each block."""
    columns: list[Column[DriftRow]] = [
        ("Block", lambda row: number(int(row.block), 0)),
        ("Phase", lambda row: row.phase),
        ("Cell", lambda row: row.cell),
        ("Metric", lambda row: row.metric),
        ("Earlier, ms", lambda row: number(row.earlier_ms, 3)),
        ("Later, ms", lambda row: number(row.later_ms, 3)),
        ("Change, %", lambda row: percent(row.change)),
    ]
    return of_rows("drift", columns, drift)

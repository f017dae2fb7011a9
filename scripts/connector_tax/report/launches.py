"""Every launch of the study in the order it was planned, with its cells, checks and timing."""

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from connector_tax import text
from connector_tax.artifacts import names, paths
from connector_tax.artifacts.cell_records import CellRecord
from connector_tax.artifacts.index import LaunchIndex, read_index
from connector_tax.figures.tables import StudyTables
from connector_tax.files import read_json

PAUSE_S = 60.0


@dataclass(frozen=True)
class CellState:
    """One cell: its state with the reason, and what its record says (None: there is no record)."""

    name: str
    status: str
    reason: str
    record: CellRecord | None
    link: str | None


@dataclass(frozen=True)
class LaunchReport:
    """One server launch; `timing` is empty where it never ran."""

    phase: str
    config: str
    block: int
    position: int
    status: str
    reason: str
    link: str | None
    started_utc: str
    span_utc: tuple[str, str | None] = ("", None)
    timing: dict[str, float] = field(default_factory=dict)
    placement: list[str] = field(default_factory=list)
    engine_files: list[str] = field(default_factory=list)
    cells: list[CellState] = field(default_factory=list)


def measured_again(study: StudyTables) -> list[str]:
    """`plain/block0/A (kept in A.superseded1)` for each run that another took the place of."""
    aside = study.root.glob(f"{paths.RUNS}/*/block*/*.superseded*")
    names = sorted(path.relative_to(study.root / paths.RUNS).as_posix() for path in aside)
    return [f"{name.partition('.')[0]} (kept in {name.rpartition('/')[2]})" for name in names]


def read_launches(study: StudyTables) -> list[LaunchReport]:
    """All launches of the run order; one that left no index.json is `missing`."""
    return [
        _launch(study, phase, position, planned["config"], planned["block"])
        for phase, order in study.document["run_order"].items()
        for position, planned in enumerate(order, 1)
    ]


def _launch(study: StudyTables, phase: str, position: int, config: str, block: int) -> LaunchReport:
    relative = names.Launch(config, block, phase).folder(Path())
    planned = [cell["cell"] for cell in study.document["cells"][phase]]
    index = read_index(study.root / relative)
    if index is None:
        cells = [CellState(name, "missing", "no index.json", None, None) for name in planned]
        reason = "no index.json: not measured"
        return LaunchReport(
            phase, config, block, position, "missing", reason, None, "", ("", ""), {}, [], [], cells
        )
    cells = [_cell(study, relative, phase, name, index) for name in planned]
    started = [c.record["window"]["started_utc"] for c in cells if c.record]
    return LaunchReport(
        phase, config, block, position, index.status, index.reason or "",
        (relative / paths.INDEX).as_posix(), min(started, default=""),
        (index.started_utc, index.ended_utc), index.timing,
        placement_warnings(index), _engine_files(index), cells,
    )  # fmt: skip


def placement_warnings(index: LaunchIndex) -> list[str]:
    """What was amiss with the CPUs that a launch's server and load generator were given."""
    used = [a["load_generator"]["affinity"] for a in index.attempts if a.get("load_generator")]
    return sorted({text for plan in used if plan for text in plan["warnings"]})


def _engine_files(index: LaunchIndex) -> list[str]:
    """The hashes of lock and vLLM's sources by interpreter; none in older studies, and emulated."""
    nodes = (attempt.get("node", {}) for attempt in index.attempts)
    found = (item for node in nodes for item in node.get("engine_files", {}).items())
    return [f"{python}: {text.compact(files)}" for python, files in found]


def _cell(
    study: StudyTables, relative: Path, phase: str, name: str, index: LaunchIndex
) -> CellState:
    path = relative / name / paths.cell_record(phase, name)
    record: CellRecord | None = (
        read_json(study.root / path) if (study.root / path).exists() else None
    )
    link = path.as_posix() if record is not None else None
    entry = index.entry(name)
    if entry is None:
        return CellState(name, "missing", index.reason or "not in index.json", record, link)
    return CellState(name, entry.status, entry.reason or "", record, link)


def count_states(launches: list[LaunchReport]) -> Counter[str]:
    """How many cells are valid, void, skipped, missing."""
    return Counter(cell.status for launch in launches for cell in launch.cells)


def void_phases(launches: list[LaunchReport]) -> list[str]:
    """The phases that were measured, and none of whose cells is valid."""
    states: dict[str, set[str]] = {}
    for launch in launches:
        states.setdefault(launch.phase, set()).update(cell.status for cell in launch.cells)
    return [phase for phase, seen in states.items() if "void" in seen and "valid" not in seen]


def placements(launches: list[LaunchReport]) -> Counter[str]:
    """Each warning about the CPUs of server and load generator, with the launches it holds for."""
    return Counter(text for launch in launches for text in launch.placement)


@dataclass(frozen=True)
class Overhead:
    """The study's wall time beside what its launches cannot do without, in seconds."""

    wall_s: float
    startup_s: float
    cells_s: float
    release_s: float

    @property
    def ratio(self) -> float | None:
        """Wall time over cell windows + start-ups + release times; None when nothing ran."""
        needed = self.startup_s + self.cells_s + self.release_s
        return self.wall_s / needed if needed > 0 else None


def overhead(launches: list[LaunchReport]) -> Overhead:
    """Sums over every launch that ran; the wall time counts the moments between launches too.

    A gap longer than `PAUSE_S` is an interrupted study, not its overhead; nor is what follows a
    launch whose end nobody saw, because its driver was killed after its last cell.
    """
    ran = sorted((launch for launch in launches if launch.timing), key=lambda la: la.span_utc[0])
    gaps = [
        (datetime.fromisoformat(after.span_utc[0]) - datetime.fromisoformat(end)).total_seconds()
        for before, after in pairwise(ran)
        if (end := before.span_utc[1]) is not None
    ]
    between_s = sum(gap for gap in gaps if 0 < gap <= PAUSE_S)
    wall_s, *needed = (
        sum(launch.timing[name] for launch in ran)
        for name in ("wall_s", "startup_s", "cells_s", "release_s")
    )
    return Overhead(wall_s + between_s, *needed)

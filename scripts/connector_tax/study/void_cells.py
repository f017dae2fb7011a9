"""Why cells are void: one cause for each, what was disturbed before what that led to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from connector_tax.artifacts import paths
from connector_tax.artifacts.checks import CHECKS, MACHINE_CHECKS
from connector_tax.artifacts.names import PHASES
from connector_tax.files import read_json

if TYPE_CHECKING:
    from connector_tax.artifacts.cell_records import CellRecord

OVERLOADED = "the server was overloaded"
MACHINE_CAUSES = frozenset(CHECKS[name].void for name in MACHINE_CHECKS)
# So many of the last measurements are looked at while a study runs.
LATELY = 10


def void_cause(launch_folder: Path, cell: str) -> str | None:
    """Why a cell of a launch is void, without numbers; None where it is valid."""
    return _cause(launch_folder / cell / paths.cell_record(launch_folder.name, cell))


def recent_machine_voids(study_folder: Path) -> list[str]:
    """The causes of those of the last LATELY measurements that are void for the machine's sake."""
    records = [
        path
        for path in study_folder.glob(f"{paths.RUNS}/*/block*/*/*/cell_*.json")
        if path.parents[1].name in PHASES and ".damaged" not in path.parent.name
    ]
    latest = sorted(records, key=lambda path: path.stat().st_mtime_ns)[-LATELY:]
    return [cause for path in latest if (cause := _cause(path)) in MACHINE_CAUSES]


def _cause(path: Path) -> str | None:
    record: CellRecord = read_json(path)
    failed = [name for name, check in record["health"].items() if not check["pass"]]
    if not failed:
        return None
    if record.get("cooldown", {}).get("ended_by") == "overloaded":
        return OVERLOADED
    first = next((name for name in MACHINE_CHECKS if name in failed), failed[0])
    return CHECKS[first].void if first in CHECKS else first

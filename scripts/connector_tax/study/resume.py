"""What a launch keeps of an earlier run of it, and what it measures again."""

import os
import shutil
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from connector_tax.artifacts import paths
from connector_tax.artifacts.launch_files import AttemptRecord, NodeRecord
from connector_tax.artifacts.names import SAME_RATES, Launch
from connector_tax.artifacts.record_reader import read_records
from connector_tax.artifacts.stage_records import GateRecord, RatesRecord
from connector_tax.artifacts.study_records import CellPlan, StudyDocument
from connector_tax.files import ArtifactError, read_json, write_json
from connector_tax.study import cell as cells
from connector_tax.study.design import cell_order
from connector_tax.study.guard import kill_leftovers, remove_temporary_folder
from connector_tax.study.server import LOGS, remove_root_path

Say = Callable[[str], None]


def launch_skip_reason(study_folder: Path, launch: Launch) -> str | None:
    """Why the launch is not run at all; None where it is."""
    gates: dict[str, GateRecord] = read_json(study_folder / paths.PREFLIGHT_STATUS)
    gate = gates[launch.configuration]
    if not gate["include"]:
        return f"pre-flight: {gate['reason']}"
    if launch.phase == "A":
        if not (study_folder / paths.LOOKS).exists():
            return None
        # Imported here: what tests a tax takes a second to load, in the process of each launch.
        from connector_tax.analysis.looks import decided_earlier

        return decided_earlier(study_folder, launch)
    rates: RatesRecord = read_json(study_folder / paths.REFERENCE_RATES)
    if launch.phase == "Bp" and rates["ref_load"] == rates["ref_safe"]:
        return f"{SAME_RATES} ({rates['ref_safe']:g} req/s)"
    return None


def clear_interrupted(folder: Path, say: Say) -> None:
    """Remove what an interrupted run left in a launch's folder: processes and unfinished cells."""
    killed = kill_leftovers(folder)
    if killed:
        say(f"killed {killed} processes left over from an interrupted run")
    # An interrupted run has not done it; whether or not anything is left to measure.
    remove_root_path(folder)
    remove_temporary_folder(folder)
    for partial in folder.glob("*.partial"):
        shutil.rmtree(partial)


def missing_cells(
    study: StudyDocument,
    launch: Launch,
    folder: Path,
    rates: Mapping[str, float | None],
    say: Say,
) -> list[CellPlan]:
    """The cells of a launch that are to be measured, in run order; unusable ones are moved aside.

    Args:
        rates: by cell, in requests/s.
    """
    return [
        cell
        for cell in cell_order(study, launch)
        if not _is_finished(folder, launch.phase, cell["cell"], rates[cell["cell"]], say)
    ]


def _is_finished(folder: Path, phase: str, name: str, rate_rps: float | None, say: Say) -> bool:
    try:
        content = cells.read_intact(folder, phase, name)
    except ArtifactError as error:
        aside = cells.move_aside(folder, name, "damaged")
        say(f"{error}; moved to {aside.name}, measuring the cell again")
        return False
    if content is None:
        return False
    if content["schedule"]["rate_rps"] != rate_rps:
        aside = cells.move_aside(folder, name, "otherrate")
        say(
            f"cell {name} was measured at {content['schedule']['rate_rps']:g} req/s, its "
            f"rate is now {rate_rps:g}; kept as {aside.name}, measuring the cell again"
        )
        return False
    say(f"cell {name} is there and intact; kept")
    return True


class Attempts:
    """attempts.json: each start of the launch's server, one object for each.

    Attributes:
        entries: the objects; what is added to one is written with `write`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / paths.ATTEMPTS
        self.entries = read_records(self._path, AttemptRecord) if self._path.exists() else []
        self._begun = 0.0

    def begin(self, node: NodeRecord, supersedes: str | None) -> AttemptRecord:
        """Add an attempt, the files of the one before renamed; its object."""
        number = len(self.entries) + 1
        for name in (paths.LAUNCH_SCRIPT, paths.RESOURCES, paths.SETTINGS, *LOGS):
            if (self._folder / name).exists():
                stem, suffix = name.rsplit(".", 1)
                (self._folder / name).rename(self._folder / f"{stem}.attempt{number - 1}.{suffix}")
        self._begun = time.monotonic()
        # `ended_utc` stays as it is when the driver is killed.
        attempt: AttemptRecord = {
            "attempt": number,
            "pid": os.getpid(),
            "started_utc": utc(),
            "ended_utc": None,
            "started_ns": time.monotonic_ns(),
            "node": node,
            "supersedes": supersedes,
        }
        self.entries.append(attempt)
        write_json(self._path, self.entries)
        return attempt

    def end(self) -> None:
        """The last attempt is over."""
        self.entries[-1] |= {
            "ended_utc": utc(),
            "ended_ns": time.monotonic_ns(),
            "wall_s": time.monotonic() - self._begun,
        }
        write_json(self._path, self.entries)


def utc() -> str:
    """The time of day, ISO 8601, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")

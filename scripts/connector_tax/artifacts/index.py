"""The record index.json of a finished launch, for its writer and all readers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from connector_tax.artifacts import paths
from connector_tax.artifacts.cell_records import CellRecord
from connector_tax.artifacts.launch_files import AttemptRecord
from connector_tax.artifacts.names import Launch
from connector_tax.artifacts.record_reader import converted
from connector_tax.artifacts.study_records import DesignLabel, Phase, meta
from connector_tax.files import read_json, sha256_file, write_json


class CellEntry(msgspec.Struct, frozen=True):
    """A planned cell's entry: state, reason, and SHA-256 of its files by name."""

    cell: str
    status: Annotated[str, meta(pattern="^(valid|void|skipped|missing)$")]
    reason: str | None
    files: dict[str, str]


class LaunchIndex(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The content of a launch's index.json. docs/artifacts.md describes the fields."""

    config: str  #: the launch's name
    configuration: str  #: the configuration its server was started with
    block: int  #: from 0
    phase: Phase  #: A, B or Bp
    label: str  #: the engine's label
    #: done, skipped or failed
    status: Annotated[str, meta(pattern="^(done|skipped|failed)$")]
    reason: str | None  #: why it was skipped or failed; null: status done
    rate_rps: float | None  #: the reference rate of its measurement; null: Phase A, or skipped
    depends: dict[str, str]  #: design_sha256: hash of its design
    started_utc: str  #: start of the first attempt, ISO 8601
    ended_utc: str | None  #: end of the last attempt, ISO 8601; null: the last attempt was killed
    #: as attempts.json: pid, times (UTC, and started_ns and ended_ns of CLOCK_MONOTONIC), port,
    #: load generator with affinity plan, start-up seconds, how it was stopped; node (what it ran
    #: on: machine, an alias, boot, devices, gpus, gpu_numa_nodes (of each GPU, null: not known),
    #: cpu, cpus, quota_cpus, job of the scheduler, exclusive (whether no other job may come onto
    #: its node; null: not Slurm's, or unknown), engine_files (by interpreter: lock_sha256 of the
    #: lock its environment was built from, null: of none of this project's; sources_sha256 of
    #: vLLM's sources, null: no vLLM; empty for the embedded engine)); supersedes (folder of an
    #: earlier run of the launch that was measured again on request, else null)
    attempts: list[AttemptRecord]
    #: cell, status (valid, void, skipped, missing), reason, files with SHA-256
    cells: list[CellEntry]
    #: SHA-256 of every file of the launch outside the cells listed above; absent before it is
    #: sealed
    files: dict[str, str] | None = None
    seal: int | None = None  #: its link in seals.jsonl; absent before it is sealed
    timing: dict[str, float]  #: startup_s, cells_s, release_s, wall_s, over all attempts; s

    def entry(self, cell: str) -> CellEntry | None:
        """Return the entry of a cell, or None if it is not listed."""
        return next((entry for entry in self.cells if entry.cell == cell), None)


def cell_state(index: LaunchIndex | None, entry: CellEntry | None) -> tuple[str, str | None]:
    """Return a planned cell's state and reason, from its entry or from its failed launch.

    Args:
        index: the launch's index; None if the launch has not ended.
        entry: the cell's entry in the index; None if it is not listed.
    """
    if index is None:
        return "missing", "the launch has no index.json"
    if entry is None:
        status = "missing" if index.status == "done" else index.status
        return status, index.reason or "the launch's index.json does not list the cell"
    if entry.status == "valid":
        return "valid", None
    failed = entry.status == "missing" and index.status == "failed"
    reason = entry.reason or index.reason or "no reason was recorded"
    return ("failed" if failed else entry.status), reason


def launch_index(
    study: DesignLabel, launch: Launch, cells: Sequence[CellEntry], **fields: Any
) -> LaunchIndex:
    """Return the index of a launch of a study.

    By default the launch is `done`, without attempts, timing or a rate; `fields` override this.
    """
    went = {"status": "done", "reason": None, "rate_rps": None, "ended_utc": None}
    return LaunchIndex(
        config=launch.config,
        configuration=launch.configuration,
        block=launch.block,
        phase=launch.phase,
        label=study["engine_label"],
        depends={"design_sha256": study["design_sha256"]},
        cells=list(cells),
        **{**went, "attempts": [], "timing": {}, **fields},
    )


def finished_cell(record: CellRecord, folder: Path) -> CellEntry:
    """Return the entry of a cell with this record, whose files lie in `folder`."""
    record_name = paths.cell_record(record["phase"], record["cell"])
    status = "valid" if record["valid"] else "void"
    reason = "; ".join(record["void_reasons"]) or None
    files = {**record["files"], record_name: sha256_file(folder / record_name)}
    return CellEntry(record["cell"], status, reason, files)


def read_index(launch_folder: Path) -> LaunchIndex | None:
    """Return the index of a launch, or None if the launch has not ended.

    Raises:
        ArtifactError: the index is malformed; the message names the file, the key and what is
            allowed.
    """
    path = launch_folder / paths.INDEX
    return converted(read_json(path), LaunchIndex, str(path)) if path.exists() else None


def write_index(launch_folder: Path, index: LaunchIndex) -> None:
    """Write the index of a launch, atomically."""
    write_json(launch_folder / paths.INDEX, msgspec.to_builtins(index))

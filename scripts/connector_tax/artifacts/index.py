"""index.json: what a finished launch says of itself, as its writer and all its readers have it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from connector_tax.artifacts import paths
from connector_tax.artifacts.cell_records import CellRecord
from connector_tax.artifacts.launch_files import AttemptRecord
from connector_tax.artifacts.names import CELL_STATUSES, LAUNCH_STATUSES, PHASES, Launch
from connector_tax.artifacts.study_records import DesignLabel
from connector_tax.files import ArtifactError, read_json, sha256_file, write_json


def _check(key: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{key} is {value!r}; allowed: {', '.join(allowed)}")


class CellEntry(msgspec.Struct, frozen=True):
    """A planned cell: how it ended, why, and the SHA-256 of its files by name."""

    cell: str
    status: str
    reason: str | None
    files: dict[str, str]

    def __post_init__(self) -> None:
        _check("status", self.status, CELL_STATUSES)


class LaunchIndex(msgspec.Struct, frozen=True, kw_only=True):
    """One launch. The fields are described in docs/artifacts.md."""

    config: str
    configuration: str
    block: int
    phase: str
    label: str
    status: str
    reason: str | None
    rate_rps: float | None
    depends: dict[str, str]
    started_utc: str
    ended_utc: str | None
    attempts: list[AttemptRecord]
    cells: list[CellEntry]
    # Absent in studies measured before launches kept these records.
    files: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    # Absent in studies measured before they were sealed.
    seal: int | msgspec.UnsetType = msgspec.UNSET
    timing: dict[str, float]

    def __post_init__(self) -> None:
        _check("phase", self.phase, PHASES)
        _check("status", self.status, LAUNCH_STATUSES)

    @property
    def recorded(self) -> dict[str, str] | None:
        """`files`; None where there are none."""
        return None if isinstance(self.files, msgspec.UnsetType) else self.files

    def entry(self, cell: str) -> CellEntry | None:
        """What it says of a cell; None where it does not list it."""
        return next((entry for entry in self.cells if entry.cell == cell), None)


def cell_state(index: LaunchIndex | None, entry: CellEntry | None) -> tuple[str, str | None]:
    """How a planned cell ended (a CELL_STATUSES, or failed with its whole launch), and why.

    Args:
        index: of its launch; None where the launch has not ended.
        entry: what the index says of it; None where it does not list it.
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
    study: DesignLabel, launch: Launch, cells: Sequence[CellEntry], **rest: Any
) -> LaunchIndex:
    """The index of a launch of a study; `rest` is what depends on how it went.

    Unless given, the launch is `done`, without attempts, timing or a rate of its own.
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
        **{**went, "attempts": [], "timing": {}, **rest},
    )


def finished_cell(record: CellRecord, folder: Path) -> CellEntry:
    """The entry of a cell with this record, whose files lie in `folder`."""
    own = paths.cell_record(record["phase"], record["cell"])
    status = "valid" if record["valid"] else "void"
    reason = "; ".join(record["void_reasons"]) or None
    files = {**record["files"], own: sha256_file(folder / own)}
    return CellEntry(record["cell"], status, reason, files)


def read_index(launch_folder: Path) -> LaunchIndex | None:
    """The index of a launch; None where there is none: the launch has not ended.

    Raises:
        ArtifactError: it is not one; names the file, the key and what is allowed.
    """
    path = launch_folder / paths.INDEX
    if not path.exists():
        return None
    try:
        return msgspec.convert(read_json(path), LaunchIndex)
    except msgspec.ValidationError as error:
        raise ArtifactError(f"{path}: {error}") from error


def write_index(launch_folder: Path, index: LaunchIndex) -> None:
    """Write the index of a launch, atomically."""
    write_json(launch_folder / paths.INDEX, msgspec.to_builtins(index))

"""What each server launch of a phase took of the machine, and what its engine resolved.

Reads resources.json and settings.json of the launches; where a launch has none, it has the reason.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from connector_tax.analysis.block_model import LaunchId
from connector_tax.analysis.ingest import Cell
from connector_tax.artifacts import paths
from connector_tax.artifacts.index import read_index
from connector_tax.artifacts.launch_files import ResourcesRecord, SettingRecord
from connector_tax.files import ArtifactError, read_json, sha256_file

NOT_RECORDED = "not recorded: measured before launches kept it"


@dataclass(frozen=True)
class LaunchRecords:
    """One planned launch: its cells by name, and its records where it has them.

    Attributes:
        reason: why there are no records; None where there are.
    """

    launch: LaunchId
    configuration: str
    cells: Mapping[str, Cell]
    resources: ResourcesRecord | None
    settings: Mapping[str, SettingRecord] | None
    reason: str | None


def read_launch_records(cells: Sequence[Cell]) -> list[LaunchRecords]:
    """The launches these cells belong to, in their order.

    Raises:
        ArtifactError: a record is missing, malformed or has changed since it was measured.
    """
    groups: dict[LaunchId, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(LaunchId(cell.key.config, cell.key.block), []).append(cell)
    return [_records(launch, members) for launch, members in groups.items()]


def _records(launch: LaunchId, cells: Sequence[Cell]) -> LaunchRecords:
    folder = cells[0].folder.parent
    index = read_index(folder)
    listed: Mapping[str, str] = {}
    measured = [cell for cell in cells if cell.status in ("valid", "void")]
    reason = None if measured else cells[0].reason
    if index is not None:
        listed = index.files or {}
        if index.files is None:
            reason = reason or NOT_RECORDED
    settings = _read(folder / paths.SETTINGS, listed)
    return LaunchRecords(
        launch=launch,
        configuration=cells[0].configuration,
        cells={cell.key.cell: cell for cell in cells},
        resources=_read(folder / paths.RESOURCES, listed),
        settings=None if settings is None else settings["settings"],
        reason=reason or (None if paths.RESOURCES in listed else "the server was never ready"),
    )


def _read(path: Path, listed: Mapping[str, str]) -> Any:
    if path.name not in listed:
        return None
    if not path.exists() or sha256_file(path) != listed[path.name]:
        raise ArtifactError(
            f"{path}: missing, or its sha256 is not what index.json says: changed after it was"
            " measured"
        )
    return read_json(path)

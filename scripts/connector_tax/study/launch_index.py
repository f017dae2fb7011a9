"""index.json and summary.json: what a finished launch says of itself."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec

from connector_tax.artifacts import paths
from connector_tax.artifacts.cell_records import CellRecord
from connector_tax.artifacts.index import (
    CellEntry,
    LaunchIndex,
    finished_cell,
    launch_index,
)
from connector_tax.artifacts.launch_files import AttemptRecord
from connector_tax.artifacts.names import Launch
from connector_tax.artifacts.study_records import CellPlan, StudyDocument
from connector_tax.files import ArtifactError, make_durable, read_json, write_json
from connector_tax.seals import seal_launch
from connector_tax.study import cell as cells
from connector_tax.study.design import cell_order

SUMMARY_MODULE = "connector_tax.analysis.measure"


@dataclass(frozen=True, slots=True)
class LaunchOutcome:
    """How a launch ended.

    Attributes:
        status: `done`, `failed` or `skipped`.
        reason: why it failed or was skipped.
        rate_rps: the rate of the cells that have none of their own; None in Phase A.
        started_utc: when the driver began.
        attempts: the content of attempts.json.
    """

    status: str
    reason: str | None
    rate_rps: float | None
    started_utc: str
    attempts: Sequence[AttemptRecord]


def conclude(study: StudyDocument, launch: Launch, folder: Path, outcome: LaunchOutcome) -> None:
    """Write summary.json, the percentiles of each finished cell, then index.json and its seal.

    What index.json vouches for is on the disk first: the cells, their records, the logs.
    """
    index = _index(study, launch, folder, outcome)
    module = importlib.import_module(SUMMARY_MODULE)
    summaries = {
        path.name: module.summarise_cell(path)
        for cell in cell_order(study, launch)
        if (path := folder / cell["cell"]).exists()
    }
    write_json(folder / paths.SUMMARY, summaries)
    make_durable(folder)
    content = msgspec.to_builtins(index)
    seal_launch(folder.parents[3], launch.name, folder / paths.INDEX, content)


def _index(
    study: StudyDocument, launch: Launch, folder: Path, outcome: LaunchOutcome
) -> LaunchIndex:
    attempts = outcome.attempts
    started = outcome.started_utc
    ended: str | None = started
    if attempts:
        started, ended = attempts[0]["started_utc"], attempts[-1]["ended_utc"]
    return launch_index(
        study,
        launch,
        [_entry(launch, folder, cell, outcome) for cell in cell_order(study, launch)],
        status=outcome.status,
        reason=outcome.reason,
        rate_rps=outcome.rate_rps,
        started_utc=started,
        ended_utc=ended,
        attempts=list(attempts),
        timing=_timing(study, folder, attempts),
    )


def _entry(
    launch: Launch,
    folder: Path,
    cell: CellPlan,
    outcome: LaunchOutcome,
) -> CellEntry:
    name = cell["cell"]
    if outcome.status == "skipped":
        return CellEntry(name, "skipped", outcome.reason, {})
    try:
        content = cells.read_intact(folder, launch.phase, name)
    except ArtifactError as error:
        raise ArtifactError(f"{error}; the same command measures the cell again") from None
    if content is None:
        return CellEntry(name, "missing", outcome.reason, {})
    return finished_cell(content, folder / name)


def _timing(
    study: StudyDocument, folder: Path, attempts: Sequence[AttemptRecord]
) -> dict[str, float]:
    # Also the first measurement of a void cell, which stands aside as <cell>.void<k>.
    windows = [
        cast(CellRecord, read_json(path))["window"]
        for path in folder.glob("*/cell_*.json")
        if ".damaged" not in path.parent.name
    ]
    return {
        "startup_s": sum(a.get("startup_s", 0.0) for a in attempts),
        "cells_s": sum(w["t_drained_ns"] - w["t_origin_ns"] for w in windows) / 1e9,
        "release_s": study["config"]["server"]["release_s"] * len(attempts),
        "wall_s": sum(a.get("wall_s", 0.0) for a in attempts),
    }

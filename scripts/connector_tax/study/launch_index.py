"""index.json and summary.json: what a finished launch says of itself."""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from connector_tax.files import make_durable, read_json, sha256_file, write_json
from connector_tax.study import cell as cells
from connector_tax.study.design import Launch, cell_order
from connector_tax.study.precision import skip_reason
from connector_tax.study.server_use import records_of

SUMMARY_MODULE = "connector_tax.analysis.measure"


@dataclass(frozen=True, slots=True)
class Outcome:
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
    attempts: Sequence[Mapping[str, Any]]


def write_index(study: Mapping[str, Any], launch: Launch, folder: Path, outcome: Outcome) -> None:
    """Write summary.json, the percentiles of each finished cell, and then index.json.

    What index.json vouches for is on the disk first: the cells, their records, the logs.
    """
    index = _index(study, launch, folder, outcome)
    module = importlib.import_module(SUMMARY_MODULE)
    summaries = {
        path.name: module.summarise_cell(path)
        for cell in cell_order(study, launch)
        if (path := folder / cell["cell"]).exists()
    }
    write_json(folder / "summary.json", summaries)
    make_durable(folder)
    write_json(folder / "index.json", index)


def _index(
    study: Mapping[str, Any], launch: Launch, folder: Path, outcome: Outcome
) -> dict[str, Any]:
    attempts = outcome.attempts
    started, ended = outcome.started_utc, outcome.started_utc
    if attempts:
        started, ended = attempts[0]["started_utc"], attempts[-1]["ended_utc"]
    return {
        "config": launch.config,
        "configuration": launch.configuration,
        "block": launch.block,
        "phase": launch.phase,
        "label": study["engine_label"],
        "status": outcome.status,
        "reason": outcome.reason,
        "rate_rps": outcome.rate_rps,
        "depends": {"design_sha256": study["design_sha256"]},
        "started_utc": started,
        "ended_utc": ended,
        "attempts": attempts,
        "cells": [_entry(study, launch, folder, c, outcome) for c in cell_order(study, launch)],
        "files": records_of(folder),
        "timing": _timing(study, folder, attempts),
    }


def _entry(
    study: Mapping[str, Any],
    launch: Launch,
    folder: Path,
    cell: Mapping[str, Any],
    outcome: Outcome,
) -> dict[str, Any]:
    name = cell["cell"]
    if outcome.status == "skipped":
        return {"cell": name, "status": "skipped", "reason": outcome.reason, "files": {}}
    content = cells.read_intact(folder, launch.phase, name)
    if content is None:
        saturated = skip_reason(study, launch, folder, cell)
        status = "missing" if saturated is None else "skipped"
        return {"cell": name, "status": status, "reason": saturated or outcome.reason, "files": {}}
    own = cells.cell_file(launch.phase, name)
    return {
        "cell": name,
        "status": "valid" if content["valid"] else "void",
        "reason": "; ".join(content["void_reasons"]) or None,
        "files": {**content["files"], own: sha256_file(folder / name / own)},
    }


def _timing(
    study: Mapping[str, Any], folder: Path, attempts: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    # Also the first measurement of a void cell, which stands aside as <cell>.void<k>.
    windows = [read_json(path)["window"] for path in folder.glob("*/cell_*.json")]
    return {
        "startup_s": sum(a.get("startup_s", 0.0) for a in attempts),
        "cells_s": sum(w["t_drained_ns"] - w["t_origin_ns"] for w in windows) / 1e9,
        "release_s": study["config"]["server"]["release_s"] * len(attempts),
        "wall_s": sum(a.get("wall_s", 0.0) for a in attempts),
    }

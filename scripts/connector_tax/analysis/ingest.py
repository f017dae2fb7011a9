"""The study folder as the analysis sees it: study.json, launches, cells, and what each depended on.

Everything that was planned is represented: a launch or cell that was skipped, failed, void or never
measured is an object with that status and the reason, so that it becomes a row. The files are those
of docs/artifacts.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from connector_tax.files import ArtifactError, read_json, sha256_file
from connector_tax.study_file import configuration_of, launched_plains, read_study

PHASES = ("A", "B", "Bp")
LAUNCH_STATUSES = ("done", "skipped", "failed")
CELL_STATUSES = ("valid", "void", "skipped", "missing")


class CellKey(NamedTuple):
    """Where a cell stands: launch name (`nixl_both`, `plain_2`), block, phase, cell name."""

    config: str
    block: int
    phase: str
    cell: str


@dataclass(frozen=True)
class Study:
    """`study.json` and the folder it lies in."""

    root: Path
    document: Mapping[str, Any]

    @property
    def config(self) -> Mapping[str, Any]:
        """The resolved configuration."""
        config: Mapping[str, Any] = self.document["config"]
        return config

    @property
    def seed(self) -> int:
        """The number every random choice is derived from."""
        return int(self.document["seed"])

    @property
    def configurations(self) -> list[str]:
        """Configuration ids in the study's order."""
        return [entry["id"] for entry in self.document["configurations"]]

    def plains(self, phase: str) -> list[str]:
        """The launches of plain in each block of a phase: `plain`, `plain_2` and so on."""
        return launched_plains(entry["config"] for entry in self.document["run_order"][phase])

    def configs(self, phase: str) -> list[str]:
        """The launches of a block of a phase in the study's order, further plains at the end."""
        launched = {entry["config"] for entry in self.document["run_order"][phase]}
        further = self.plains(phase)[1:]
        return [c for c in self.configurations if c in launched] + further

    def cells(self, phase: str) -> Sequence[Mapping[str, Any]]:
        """The planned cells of a phase; rate_rps is null in B and Bp."""
        cells: Sequence[Mapping[str, Any]] = self.document["cells"][phase]
        return cells


@dataclass(frozen=True)
class Cell:
    """One planned cell of one launch.

    Attributes:
        key: where it stands.
        status: valid | void | skipped | missing | failed (the whole launch failed).
        reason: why it is not valid; None for a valid cell.
        folder: where its files lie.
        files: name to SHA-256 of its files, as the launch's index has it.
        record: `cell_<phase>_<cell>.json`; None unless valid or void.
        rate_rps: offered rate; None when no rate was chosen.
    """

    key: CellKey
    configuration: str
    status: str
    reason: str | None
    folder: Path
    files: Mapping[str, str]
    record: Mapping[str, Any] | None
    rate_rps: float | None
    input_tokens: int
    output_tokens: int

    def file(self, kind: str) -> Path:
        """The path of the cell's `requests`, `metrics` or `engine_step` file."""
        return self.folder / f"{kind}_{self.key.phase}_{self.key.cell}.jsonl"

    def sha256(self, kind: str) -> str | None:
        """What the index vouches for as that file's hash; None when it does not list the file."""
        return self.files.get(self.file(kind).name)


def merged_reasons(reasons: Sequence[tuple[int, str]]) -> str:
    """The reasons of several blocks as one text: `block 0, 2: died; block 1: early send`."""
    by_text: dict[str, list[int]] = {}
    for block, text in reasons:
        by_text.setdefault(text, []).append(block)
    return "; ".join(
        f"block {', '.join(map(str, blocks))}: {text}" for text, blocks in by_text.items()
    )


def load_study(path: Path) -> Study:
    """Read `study.json`.

    Raises:
        ArtifactError: the file is missing, not JSON, or lacks a key the analysis needs.
    """
    document = read_study(path)
    needed = ("design_sha256", "engine_label", "emulated", "seed", "blocks", "config")
    for key in (*needed, "configurations", "run_order", "cells"):
        if key not in document:
            raise ArtifactError(f"{path}: key {key!r} is missing")
    for key in ("run_order", "cells"):
        missing = [phase for phase in PHASES if phase not in document[key]]
        if missing:
            raise ArtifactError(f"{path}: {key}: phase {missing[0]!r} is missing")
    return Study(path.parent, document)


def load_cells(study: Study, phase: str, rate_rps: float | None = None) -> list[Cell]:
    """Every planned cell of a phase, in the study's order of configurations, blocks and cells.

    Args:
        study: the study.
        phase: A, B or Bp.
        rate_rps: the phase's reference rate as of now, which the launches of Phases B and Bp must
            have been measured at; not looked at in Phase A.

    Raises:
        ArtifactError: a launch belongs to another design or to another reference rate, or an index
            or a cell file is malformed; names the file and what differs.
    """
    order = study.configs(phase)
    launches = sorted(
        study.document["run_order"][phase], key=lambda e: (order.index(e["config"]), e["block"])
    )
    return [
        cell
        for entry in launches
        for cell in _launch_cells(study, phase, entry["config"], entry["block"], rate_rps)
    ]


def _launch_cells(
    study: Study, phase: str, config: str, block: int, rate_rps: float | None
) -> list[Cell]:
    folder = study.root / "runs" / config / f"block{block}" / phase
    path = folder / "index.json"
    if not path.exists():
        index: dict[str, Any] = {
            "status": "missing",
            "reason": "the launch has no index.json",
            "rate_rps": None,
            "cells": [],
        }
    else:
        index = read_json(path)
        _check_index(index, path, study, phase, config, block, rate_rps)
    listed = {entry["cell"]: entry for entry in index["cells"]}
    unknown = listed.keys() - {planned["cell"] for planned in study.cells(phase)}
    if unknown:
        raise ArtifactError(f"{path}: cell {min(unknown)!r} is not planned in study.json")
    return [
        _cell(
            CellKey(config, block, phase, planned["cell"]),
            planned,
            index,
            listed.get(planned["cell"]),
            folder,
        )
        for planned in study.cells(phase)
    ]


def _check_index(
    index: Any,
    path: Path,
    study: Study,
    phase: str,
    config: str,
    block: int,
    rate_rps: float | None,
) -> None:
    for key in ("config", "block", "phase", "status", "reason", "rate_rps", "depends", "cells"):
        if key not in index:
            raise ArtifactError(f"{path}: key {key!r} is missing")
    for key, value in (("config", config), ("block", block), ("phase", phase)):
        if index[key] != value:
            raise ArtifactError(f"{path}: {key} is {index[key]!r}, its folder says {value!r}")
    if index["status"] not in LAUNCH_STATUSES:
        raise ArtifactError(
            f"{path}: status is {index['status']!r}; allowed: {', '.join(LAUNCH_STATUSES)}"
        )
    found, wanted = index["depends"].get("design_sha256"), study.document["design_sha256"]
    if found != wanted:
        raise ArtifactError(
            f"{path}: depends.design_sha256 is {found}, this study has {wanted}:"
            " the launch belongs to another study; mixtures are refused"
        )
    if phase != "A" and index["status"] != "skipped" and index["rate_rps"] != rate_rps:
        raise ArtifactError(
            f"{path}: rate_rps is {index['rate_rps']}, the reference rate is now {rate_rps}:"
            " the launch was measured at another rate; mixtures are refused. Set the saturation"
            " criteria back, or measure the phase at the new rate, its launches kept aside:"
            f" --forcerun phase_{phase.lower()}"
        )


def _cell(
    key: CellKey,
    planned: Mapping[str, Any],
    index: Mapping[str, Any],
    entry: Mapping[str, Any] | None,
    folder: Path,
) -> Cell:
    status, reason = _status(index, entry, folder)
    record = None
    rate = planned["rate_rps"] if planned["rate_rps"] is not None else index["rate_rps"]
    if status in ("valid", "void"):
        assert entry is not None
        path = folder / key.cell / f"cell_{key.phase}_{key.cell}.json"
        record = read_json(path)
        _check_record(record, path, key, status, entry)
        rate = record["schedule"]["rate_rps"]
    return Cell(
        key=key,
        configuration=configuration_of(key.config),
        status=status,
        reason=reason,
        folder=folder / key.cell,
        files=entry["files"] if entry is not None else {},
        record=record,
        rate_rps=rate,
        input_tokens=planned["input_tokens"],
        output_tokens=planned["output_tokens"],
    )


def _status(
    index: Mapping[str, Any], entry: Mapping[str, Any] | None, folder: Path
) -> tuple[str, str | None]:
    if entry is None:
        status = "missing" if index["status"] == "done" else index["status"]
        return status, index["reason"] or "the launch's index.json does not list the cell"
    if entry["status"] not in CELL_STATUSES:
        raise ArtifactError(
            f"{folder / 'index.json'}: cells: {entry['cell']}: status is {entry['status']!r};"
            f" allowed: {', '.join(CELL_STATUSES)}"
        )
    if entry["status"] == "missing" and index["status"] == "failed":
        return "failed", entry["reason"] or index["reason"]
    if entry["status"] == "valid":
        return "valid", None
    return entry["status"], entry["reason"] or index["reason"] or "no reason was recorded"


def _check_record(
    record: Any, path: Path, key: CellKey, status: str, entry: Mapping[str, Any]
) -> None:
    if path.name not in entry["files"]:
        raise ArtifactError(f"{path.parent.parent / 'index.json'}: no hash of {path.name}")
    if sha256_file(path) != entry["files"][path.name]:
        raise ArtifactError(
            f"{path}: sha256 is not what index.json says: the file changed after it was measured."
            " To measure the cell again, the damaged one kept: --rerun-incomplete"
        )
    for name in ("config", "block", "phase", "cell"):
        if record.get(name) != getattr(key, name):
            raise ArtifactError(
                f"{path}: {name} is {record.get(name)!r}, its folder says {getattr(key, name)!r}"
            )
    for name in ("schedule", "window", "counts", "valid", "void_reasons"):
        if name not in record:
            raise ArtifactError(f"{path}: key {name!r} is missing")
    if record["valid"] != (status == "valid"):
        raise ArtifactError(f"{path}: valid is {record['valid']}, index.json says {status!r}")

"""Test that index.json's files are durable before it, and that damaged files are measured again."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from connector_tax.artifacts.names import Launch
from connector_tax.artifacts.study_file import cell_rates
from connector_tax.files import ArtifactError, make_durable, read_json, write_json
from connector_tax.seals import seal_settings
from connector_tax.study import cell as cells
from connector_tax.study import launch, plan
from connector_tax.study.device import devices_of, hold_devices
from connector_tax.study.launch import LaunchOutcome, conclude, missing_cells
from connector_tax.study.remeasure import withdraw_damaged
from tests.study.driving import arguments, index_of, launch_folder


class Disk:
    """A model of the disk after a power cut: each file and folder as last fsynced.

    A folder's change of entries and a file's change of content both show in its mtime.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.synced: dict[int, tuple[int, int]] = {}
        self.unsafe: dict[str, list[str]] = {}
        self._fsync, self._replace = os.fsync, os.replace
        monkeypatch.setattr(os, "fsync", self.fsync)
        monkeypatch.setattr(os, "replace", self.replace)

    def fsync(self, descriptor: int) -> None:
        self._fsync(descriptor)
        state = os.fstat(descriptor)
        self.synced[state.st_ino] = (state.st_mtime_ns, state.st_size)

    def replace(self, source: Any, target: Any) -> None:
        """Check at a rename that the files below and around an index are already durable."""
        path = Path(target)
        if path.name == "index.json":
            # The folder itself changes with the temporary file; its fsync comes after the rename.
            below = [p for p in path.parent.rglob("*") if p != Path(source)]
            self.unsafe[str(path)] = [str(p) for p in [*below, *path.parents[1:5]] if self.lost(p)]
        self._replace(source, target)

    def lost(self, path: Path) -> bool:
        state = path.stat()
        synced = self.synced.get(state.st_ino)
        if path.is_dir():
            return synced is None or synced[0] != state.st_mtime_ns
        return synced != (state.st_mtime_ns, state.st_size)


@pytest.mark.usefixtures("affinity")
def test_listed_files_are_synced_before_their_index(
    study_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    assert launch.main(arguments(study_file)) == 0
    index = index_of(study_file)
    assert index["status"] == "done"
    assert disk.unsafe == {str(launch_folder(study_file) / "index.json"): []}
    assert not disk.lost(launch_folder(study_file))
    # With nothing left to measure, the driver does not wait for a device that another study holds.
    (launch_folder(study_file) / "index.json").unlink()
    with hold_devices(devices_of(read_json(study_file)["config"])):
        assert launch.main(arguments(study_file)) == 0
    assert index_of(study_file)["status"] == "done"


def finished_cell(folder: Path, content: Any) -> None:
    """Write a launch with one of two cells finished, with this record."""
    path = folder / "r20" / "cell_A_r20.json"
    path.parent.mkdir(parents=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


WHOLE = {
    **{"files": {}, "schedule": {"rate_rps": 20.0}, "valid": True, "void_reasons": []},
    **{"window": {"t_origin_ns": 0, "t_drained_ns": 1}, "load_generator": {}},
}


@pytest.mark.parametrize(
    "content",
    [
        "",
        '{"valid": true,',
        [],
        {},
        *({key: value for key, value in WHOLE.items() if key != left} for left in WHOLE),
        {**WHOLE, "files": None},
        {**WHOLE, "schedule": {"rate_rps": "fast"}},
        {**WHOLE, "valid": "yes"},
    ],
)
def test_cell_that_contradicts_its_hash_is_measured_again(study_file: Path, content: Any) -> None:
    study, folder = read_json(study_file), launch_folder(study_file)
    finished_cell(folder, content)
    with pytest.raises(ArtifactError, match=r"cell_A_r20\.json"):
        cells.read_intact(folder, "A", "r20")
    if not (isinstance(content, dict) and {"valid", "void_reasons"} <= content.keys()):
        row = next(plan.planned_cells(study, study_file.parent))
        assert (row.cell, row.state) == ("r20", "damaged")
    lines: list[str] = []
    rates = cell_rates(study, "A", None, {})
    missing = missing_cells(study, Launch("plain", 0, "A"), folder, rates, lines.append)
    assert [cell["cell"] for cell in missing] == ["r20", "r40"]
    assert "moved to r20.damaged1" in lines[0]
    assert (folder / "r20.damaged1" / "cell_A_r20.json").exists()
    # The launch can be concluded although a cell was moved aside.
    seal_settings(study_file.parent, study)
    conclude(study, Launch("plain", 0, "A"), folder, LaunchOutcome("failed", "no server"))
    assert {c["status"] for c in index_of(study_file)["cells"]} == {"missing"}


def test_complete_cell_is_kept_unless_its_rate_changed(study_file: Path) -> None:
    finished_cell(launch_folder(study_file), WHOLE)
    study = read_json(study_file)
    rates = cell_rates(study, "A", None, {})
    missing = missing_cells(study, Launch("plain", 0, "A"), launch_folder(study_file), rates, print)
    assert [cell["cell"] for cell in missing] == ["r40"]
    rates = {**rates, "r20": 21.0}
    missing = missing_cells(study, Launch("plain", 0, "A"), launch_folder(study_file), rates, print)
    assert [cell["cell"] for cell in missing] == ["r20", "r40"]
    assert (launch_folder(study_file) / "r20.otherrate1").is_dir()


def test_unreadable_index_is_withdrawn(study_file: Path) -> None:
    index = launch_folder(study_file) / "index.json"
    write_json(index, {"cells": None})
    (message,) = withdraw_damaged(read_json(study_file), study_file.parent)
    assert "damaged: " in message
    assert str(index) in message
    assert index.with_name("index.damaged.json").exists()
    assert not index.exists()


def test_parent_folders_are_synced_with_a_new_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    (deep / "file").write_text("x")
    (deep / "link").symlink_to("nowhere")
    make_durable(deep)
    assert [p for p in (deep / "file", deep, deep.parent, tmp_path) if disk.lost(p)] == []

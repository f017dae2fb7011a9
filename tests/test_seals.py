"""Test the chain of seals while a study is measured."""

import json
from pathlib import Path
from typing import Any

import pytest

from connector_tax.artifacts import paths
from connector_tax.files import read_json
from connector_tax.seals import FIRST, changed_settings, read_links, seal_launch, seal_settings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("environment.json", "env.txt", "preflight/verify_x.log"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    return tmp_path


def study(margin: float, design: str = "d") -> Any:
    sections: dict[str, Any] = {key: {} for key in ("saturation", "reference", "hypotheses")}
    return {
        "design_sha256": design,
        "config": {**sections, "statistics": {"margin": margin}},
        "configurations": [{"id": "plain", "label": "plain"}],
    }


def launched(folder: Path, name: str) -> dict[str, Any]:
    path = folder / "runs" / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "server.log").write_text("log")
    seal_launch(folder, name, path / "index.json", {"cells": []})
    index: dict[str, Any] = read_json(path / "index.json")
    return index


def test_settings_are_sealed_once_for_each_design(folder: Path) -> None:
    seal_settings(folder, study(0.1))
    seal_settings(folder, study(0.2))
    assert len(read_links(folder)) == 1
    assert changed_settings(folder, study(0.2)) == ["statistics.margin: 0.1 -> 0.2"]
    assert changed_settings(folder, study(0.1)) == []
    seal_settings(folder, study(0.3, "another"))
    assert len(read_links(folder)) == 2
    assert changed_settings(folder, study(0.3, "another")) == []


def test_each_seal_names_its_predecessor_and_only_new_files(folder: Path) -> None:
    seal_settings(folder, study(0.1))
    assert launched(folder, "plain/block0/A")["seal"] == 1
    (folder / "preflight" / "verify_x.log").write_text("again")
    launched(folder, "plain/block0/A")
    chain = read_links(folder)
    assert [link["number"] for _, link in chain] == [0, 1, 2]
    assert [link["previous"] for _, link in chain] == [FIRST, chain[0][0], chain[1][0]]
    assert sorted(chain[0][1]["files"]) == ["env.txt", "environment.json", "preflight/verify_x.log"]
    assert [sorted(link["files"]) for _, link in chain[1:]] == [[], ["preflight/verify_x.log"]]


def test_incomplete_last_seal_is_dropped(folder: Path) -> None:
    seal_settings(folder, study(0.1))
    with (folder / paths.SEALS).open("ab") as stream:
        stream.write(b'{"number": 1, "prev')
    assert launched(folder, "plain/block0/A")["seal"] == 1
    assert [json.loads(line)["number"] for line in (folder / paths.SEALS).open()] == [0, 1]


def test_index_is_written_with_declared_keys_only(folder: Path) -> None:
    seal_settings(folder, study(0.1))
    index = launched(folder, "plain/block0/A")
    assert index.keys() == {"cells", "files", "seal"}
    assert list(index["files"]) == ["server.log"]

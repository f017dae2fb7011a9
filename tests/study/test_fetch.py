"""Test that a hub model is fetched once before anything starts, using a stub of the hub."""

import sys
from pathlib import Path
from typing import Any

import pytest

from connector_tax.artifacts.names import Launch
from connector_tax.config import ROOT, load_yaml
from connector_tax.files import read_json, write_json
from connector_tax.servers.kinds import command_for
from connector_tax.study import fetch
from connector_tax.study.design import resolve
from tests.shared import interpreter

HUB = """
import os, types
from pathlib import Path
def snapshot_download(model, revision=None, ignore_patterns=(), dry_run=False):
    if model == "no/such":
        raise RuntimeError("404")
    if dry_run:
        return [types.SimpleNamespace(file_size={size}, will_download=True),
                types.SimpleNamespace(file_size=1 << 60, will_download=False)]
    folder = Path("{cache}/hub/snapshots", revision or "c0ffee")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("ab")
    if "*.safetensors" not in ignore_patterns:
        (folder / "model.safetensors").write_text("abc")
    return str(folder)
"""
CONSTANTS = 'HF_HUB_OFFLINE, HF_HUB_CACHE = False, "{cache}/hub"'


def study_file(folder: Path, size: int = 1000, **engine: Any) -> Path:
    hub = folder / "site" / "huggingface_hub"
    hub.mkdir(parents=True)
    (hub / "__init__.py").write_text(HUB.format(cache=folder, size=size))
    (hub / "constants.py").write_text(CONSTANTS.format(cache=folder))
    python = interpreter(folder, f'PYTHONPATH={folder}/site exec {sys.executable} "$@"')
    config = load_yaml(ROOT / "config/h20.yaml")
    config["engine"] |= {"python": str(python), **engine}
    write_json(folder / "study.json", resolve(config, "h20.yaml"))
    return folder / "study.json"


DUMMY = load_yaml(ROOT / "config/h20.yaml")["engine"]["flags"] | {"--load-format": "dummy"}


@pytest.mark.parametrize(
    ("engine", "told"),
    [({}, ("c0ffee", None, 2, 5)), ({"revision": "v1", "flags": DUMMY}, ("v1", "v1", 1, 2))],
)
def test_fetched_files_are_recorded_except_for_dummy_weights(
    tmp_path: Path, engine: dict[str, Any], told: tuple[object, ...]
) -> None:
    assert fetch.main(["--study", str(study_file(tmp_path, **engine))]) == 0
    model = read_json(tmp_path / "model.json")
    assert tuple(model[key] for key in ("commit", "revision", "files", "bytes")) == told


@pytest.mark.parametrize(
    ("size", "engine", "message"),
    [
        (1 << 60, {}, "1073741824.0 GiB are to be fetched, but "),
        (1, {"model": "no/such"}, "engine.model: no/such was not fetched"),
        (1, {"model": "./build/models/tiny-qwen3"}, "is a folder; there is nothing to fetch"),
    ],
)
def test_unavailable_model_ends_the_study_before_any_launch(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], size: int, engine: Any, message: str
) -> None:
    assert fetch.main(["--study", str(study_file(tmp_path, size, **engine))]) == 2
    assert message in capfd.readouterr().err
    assert not (tmp_path / "model.json").exists()


@pytest.mark.parametrize("revision", [None, "v1"])
def test_server_loads_fetched_files_without_asking_the_hub(revision: str | None) -> None:
    config = load_yaml(ROOT / "config/h20.yaml")
    if revision:
        config["engine"]["revision"] = revision
    study = resolve(config, "h20.yaml")
    command = command_for(study, Launch("plain", 0, "A"), 1)
    assert command.environment["HF_HUB_OFFLINE"] == "1"
    pinned = ["--revision", "v1", "--tokenizer-revision", "v1"]
    assert ("--revision" in command.argv) == (revision is not None)
    assert revision is None or " ".join(pinned) in " ".join(command.argv)

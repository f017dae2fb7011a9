"""A launch that fails: plain ends the run at once, others at its end; the same command mends it."""

import json
from pathlib import Path

import pytest

from connector_tax.files import read_json
from connector_tax.study import complete, launch
from connector_tax.study.guard import PARENT_VARIABLE
from tests.study.driving import arguments, launch_folder, write_study


def set_ready_timeout(study_file: Path, seconds: float) -> None:
    study = read_json(study_file)
    study["config"]["server"]["ready_timeout_s"] = seconds
    study_file.write_text(json.dumps(study))


@pytest.fixture
def study_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(PARENT_VARIABLE, raising=False)
    file = write_study(tmp_path / "results" / "tiny")
    set_ready_timeout(file, 0.01)
    return file


def test_a_failed_plain_ends_the_run(study_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(arguments(study_file)) == 1
    said = "".join(capsys.readouterr())
    assert "plain/block0/A failed, and every tax is a comparison with plain" in said
    assert "the same command carries on at this launch" in said
    folder = launch_folder(study_file)
    assert not (folder / "index.json").exists()
    assert read_json(folder / "index.failed.json")["status"] == "failed"


@pytest.mark.long
def test_a_failed_plain_is_measured_by_the_same_command(study_file: Path) -> None:
    assert launch.main(arguments(study_file)) == 1
    set_ready_timeout(study_file, 30)
    assert launch.main(arguments(study_file)) == 0
    assert read_json(launch_folder(study_file) / "index.json")["status"] == "done"


@pytest.mark.long
def test_a_failed_connector_goes_on_and_is_missing_at_the_end_of_its_phase(
    study_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = read_json(study_file)
    study["run_order"]["A"] = [{"config": "noop_connector", "block": 0}]
    study_file.write_text(json.dumps(study))
    assert launch.main(arguments(study_file, "noop_connector")) == 0
    folder = study_file.parent / "runs" / "noop_connector" / "block0" / "A"
    assert read_json(folder / "index.json")["status"] == "failed"

    end = ["--study", str(study_file), "--phase", "A"]
    assert complete.main(end) == 1
    assert f"MISSING {folder}: " in capsys.readouterr().err
    assert not (folder / "index.json").exists()
    set_ready_timeout(study_file, 30)
    assert launch.main(arguments(study_file, "noop_connector")) == 0
    assert complete.main(end) == 0
    assert not (study_file.parent / "complete.json").exists()

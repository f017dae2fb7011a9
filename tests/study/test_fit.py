"""A block ends on a machine that cannot measure it, with the reason and before any launch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from connector_tax.artifacts import paths
from connector_tax.artifacts.study_records import EngineSection
from connector_tax.config import ROOT, filled, load_yaml
from connector_tax.files import read_json, write_json
from connector_tax.study.design import resolve
from connector_tax.study.doctor import UnfitError, _other_sources, require_fit
from connector_tax.vllm.overlay import engine_files, sources_sha256
from tests.study.driving import arguments, launch_folder, write_study
from tests.study_folder import write_stages


def test_this_machine_can_measure_the_tiny_study(tmp_path: Path) -> None:
    require_fit(read_json(write_study(tmp_path)), tmp_path)


def test_a_block_on_an_unfit_machine_ends_before_its_first_launch(tmp_path: Path) -> None:
    study_file = write_study(tmp_path)
    study = read_json(study_file)
    # Of no machine: reserved for documentation (RFC 5737).
    study["config"]["server"]["host"] = "192.0.2.1"
    write_json(study_file, study)
    done = subprocess.run(
        [sys.executable, "-m", "connector_tax.study.block", "--study", study_file, "--block", "0",
         "--phase", "A", "--logs", tmp_path / "logs"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert "cannot measure tiny:\n  ports: 192.0.2.1: " in done.stderr
    assert not (tmp_path / paths.RUNS).exists()


@pytest.mark.skipif(any(Path("/sys/class/infiniband").glob("*")), reason="has an RDMA device")
@pytest.mark.parametrize("skipped", [False, True])
def test_what_the_gates_left_out_needs_nothing(tmp_path: Path, skipped: bool) -> None:
    study = resolve(load_yaml(ROOT / "config/h20.yaml"), "h20.yaml")
    study["config"]["engine"]["forms"] = {}
    mooncake = [e["id"] for e in study["configurations"] if e["connector"] == "MooncakeConnector"]
    write_stages(tmp_path, study, dict.fromkeys(mooncake, "its gate") if skipped else None)
    with pytest.raises(UnfitError) as refused:
        require_fit(study, tmp_path)
    assert ("\n  RDMA: no device" in str(refused.value)) is not skipped
    assert "\n  environment:" not in str(refused.value)


def interpreter_of(package: Path) -> Path:
    """An interpreter that finds a vLLM there, which cannot be imported."""
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('to be found, not imported')\n")
    python = package.parents[1] / "python"
    python.write_text(
        f'#!/bin/sh\nexport PYTHONPATH={package.parent}\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    return python


def test_another_vllm_than_step_timing_was_proved_on_is_told(tmp_path: Path) -> None:
    package = tmp_path / "site" / "vllm"
    python = interpreter_of(package)
    status = tmp_path / "status.json"
    engine: EngineSection = {"kind": "vllm", "label": "a vLLM", "python": str(python), "forms": {}}
    write_json(status, {"step_timing_available": False})
    files = engine_files(engine)
    assert list(_other_sources(engine, files, status)) == []
    proved = sources_sha256(package)
    assert files == {str(python): {"lock_sha256": None, "sources_sha256": proved}}
    write_json(status, {"step_timing_available": True, "vllm_sources_sha256_before": proved})
    assert list(_other_sources(engine, files, status)) == []
    (package / "loop.py").write_text("\n")
    (told,) = _other_sources(engine, engine_files(engine), status)
    assert f"{proved[:12]} where step timing was proved" in told
    package.rename(tmp_path / "gone")
    (told,) = _other_sources(engine, engine_files(engine), status)
    assert f"{python}: no vLLM" in told


@pytest.mark.parametrize("given", [True, False])
def test_a_launch_records_the_files_that_its_block_was_told_or_asks_itself(
    tmp_path: Path, given: bool
) -> None:
    package = tmp_path / "site" / "vllm"
    config = filled(load_yaml(ROOT / "config/vllm-cpu.yaml"), "config")
    config["engine"]["python"] = python = str(interpreter_of(package))
    config["server"]["device"] = f"t{tmp_path.name}"
    study_file = write_stages(tmp_path / "x", resolve(config, "vllm-cpu"), step_timing=False)
    told = {python: {"lock_sha256": "a10c", "sources_sha256": "50ce"}}
    # As the block's driver says it.
    options = ["--engine-files", json.dumps(told)] if given else []
    done = subprocess.run(
        [sys.executable, "-m", "connector_tax.study.launch", *arguments(study_file), *options],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "plain/block0/A failed" in done.stdout + done.stderr
    (attempt,) = read_json(launch_folder(study_file) / paths.ATTEMPTS)
    here = {python: {"lock_sha256": None, "sources_sha256": sources_sha256(package)}}
    assert attempt["node"]["engine_files"] == (told if given else here)


def test_each_environment_of_a_study_has_its_lock(tmp_path: Path) -> None:
    pythons = []
    for name in ("one", "other"):
        python = tmp_path / name / ".venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.symlink_to(sys.executable)
        write_json(python.parents[1] / "built.json", {"lock_sha256": name})
        pythons.append(str(python))
    engine: EngineSection = {
        "kind": "vllm",
        "label": "two vLLMs",
        "python": pythons[0],
        "forms": {"old": {"python": pythons[1]}, "further": {"python": pythons[1]}},
    }
    assert {python: files["lock_sha256"] for python, files in engine_files(engine).items()} == {
        pythons[0]: "one",
        pythons[1]: "other",
    }

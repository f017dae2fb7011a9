"""Test a launch's other records, with the real driver and the embedded engine."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from connector_tax.files import read_json, sha256_file
from connector_tax.servers.kinds import ServerCommand
from connector_tax.study.resources import SETTINGS, engine_record
from connector_tax.study.server import Server
from tests.shared import VLLM
from tests.study.driving import drive, failed_index_of, index_of, launch_folder, write_study

CALLER = {
    "OMP_NUM_THREADS": "7",
    "HF_TOKEN": "hf_TheSecret01",
    "VLLM_API_KEY": "TheSecret02",
    "UCX_SESSION": "TheSecret03",
}
PAGE = """# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",num_gpu_blocks="None",cache_dtype="fp8"} 1.0
"""


@pytest.fixture(scope="module")
def study_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_study(tmp_path_factory.mktemp("use") / "study")
    done = drive(path, CALLER)
    assert done.returncode == 0, done.stdout
    return path


@pytest.mark.workflow
def test_resources_record_the_server_before_and_after_load(study_file: Path) -> None:
    record = read_json(launch_folder(study_file) / "resources.json")
    assert record["launch"] == "plain/block0/A"
    assert record["startup_s"] == index_of(study_file)["attempts"][0]["startup_s"]
    idle = record["idle_cpu"]
    assert 0 <= idle["value"] < 0.5
    assert (
        idle["to_ns"] - idle["from_ns"]
        >= 1e9 * read_json(study_file)["config"]["resources"]["idle_s"]
    )
    for when in ("before_load", "after_load"):
        assert 5 < record[when]["memory_pss_mib"]["value"] < 500
        assert record[when]["gpu_memory_mib"]["reason"] == "no GPU: the engine's device is a CPU"
    assert record["after_load_reason"] is None


@pytest.mark.workflow
def test_idle_resources_are_read_before_the_first_cell_and_cells_lie_between_readings(
    study_file: Path,
) -> None:
    folder = launch_folder(study_file)
    idle = read_json(folder / "resources.json")["idle_cpu"]
    for path in folder.glob("*/cell_*.json"):
        record = read_json(path)
        use, window = record["server_cpu"], record["window"]
        assert idle["to_ns"] < window["t_origin_ns"]
        assert use["from_ns"] <= window["t_origin_ns"]
        assert use["to_ns"] >= window["t_drained_ns"]
        assert use["requests"] >= record["counts"]["ok"]
        per_1000 = 1000 * use["cpu_s"] / use["requests"]
        assert use["cpu_s_per_1000"]["value"] == pytest.approx(per_1000)
        assert use["cpu_s"] > 0


@pytest.mark.workflow
def test_launch_index_lists_resources_and_settings_with_their_hashes(study_file: Path) -> None:
    folder = launch_folder(study_file)
    names = ("resources.json", "settings.json")
    files = index_of(study_file)["files"]
    assert {name: files[name] for name in names} == {n: sha256_file(folder / n) for n in names}


@pytest.mark.workflow
def test_settings_come_from_the_running_engine_or_have_a_reason(
    study_file: Path,
) -> None:
    settings = read_json(launch_folder(study_file) / "settings.json")["settings"]
    definition = read_json(study_file)["config"]["engine"]["definition_content"]["scheduler"]
    assert settings.keys() == set(SETTINGS)
    assert settings["kv_blocks"]["value"] == definition["kv_blocks"]
    assert settings["block_size"]["value"] == definition["kv_block_size"]
    assert settings["kv_blocks"]["source"] == "metrics"
    for setting in settings.values():
        assert (setting["value"] is None) == (setting["reason"] is not None)


@pytest.mark.workflow
def test_server_inherits_only_the_token_of_the_callers_variables(study_file: Path) -> None:
    server = read_json(launch_folder(study_file) / "settings.json")["environment"]["server"]
    assert server.keys() == {"AGENTIC_STEP_LOG_PATH", "PYTHONPATH", "HF_TOKEN"}
    assert server["HF_TOKEN"] is None


@pytest.mark.workflow
def test_failed_launch_keeps_its_resources_record_and_the_next_attempt_writes_its_own(
    tmp_path: Path,
) -> None:
    # The engine dies in its first cell, once its launch is recorded.
    fault = {"kind": "die", "at": [3]}
    path = write_study(tmp_path / "study", [fault])
    drive(path)
    folder = launch_folder(path)
    assert failed_index_of(path)["status"] == "failed"
    record = read_json(folder / "resources.json")
    assert record["before_load"]["memory_pss_mib"]["value"] > 5
    assert (record["after_load"], record["after_load_reason"]) == (
        None,
        "the launch ended before its last cell",
    )
    drive(path)
    assert read_json(folder / "resources.json")["attempt"] == 2
    assert read_json(folder / "resources.attempt1.json") == record


@pytest.fixture
def standing(tmp_path: Path) -> Any:
    """Yield a running server that answers nothing and writes its output to its log."""
    shout = "echo Using FLASH_ATTN attention backend out of potential backends; exec sleep 100"
    server = Server(tmp_path, ServerCommand(["bash", "-c", shout], {}), "t", 1)
    server.start()
    log = tmp_path / "vllm_stdout.log"
    with subprocess.Popen(["tail", "-n", "+1", "-f", str(log)], stdout=subprocess.PIPE) as tail:
        assert tail.stdout is not None
        tail.stdout.readline()
        tail.kill()
    yield server
    server.stop(5)


def test_settings_prefer_the_probe_then_metrics_then_the_log(standing: Server) -> None:
    unset = "this vLLM leaves it unset"
    probed = {"block_size": [128, None], "async_scheduling": [None, unset]}
    written = {"pid": standing.pid, "settings": probed}
    (standing.folder / "engine_step.engine.settings").write_text(json.dumps(written))
    settings = engine_record(standing, VLLM, PAGE)["settings"]
    for name, value, source in (
        ("block_size", 128, "probe"),
        ("kv_cache_dtype", "fp8", "metrics"),
        ("attention_backend", "FLASH_ATTN", "log"),
    ):
        assert (settings[name]["value"], settings[name]["source"]) == (value, source)
    assert settings["engine_core_process"]["value"] == "the API server's"
    assert settings["async_scheduling"] == {
        "value": None,
        "source": None,
        "reason": f"probe: {unset}",
    }
    # The metric says None: unknown.
    assert settings["kv_blocks"]["value"] is None
    assert "neither /metrics nor the log has the setting" in str(settings["kv_blocks"]["reason"])
    # A malformed page gives no setting either.
    settings = engine_record(standing, VLLM, 'vllm:cache_config_info{cache_dtype= 1\n"')["settings"]
    assert settings["kv_cache_dtype"]["value"] is None

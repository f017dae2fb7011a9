"""Test the gates with small servers that fail in each way, over real sockets and processes."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from connector_tax.config import ROOT, filled, load_yaml
from connector_tax.files import read_json, write_json
from connector_tax.study import patch, preflight
from connector_tax.study.design import resolve
from connector_tax.study.server_command import probe_overlay
from connector_tax.vllm import overlay
from tests.shared import interpreter
from tests.vllm import stub

FAKE = Path(__file__).with_name("fake_vllm.py")
# The fake has no LMCache server; the companion's own form is tested on the consumer.
IN_PROCESS = {"lmcache_only": {"connector": "LMCacheConnectorV1"}}


class Study:
    """A study of chosen configurations on the fake vLLM, in its own folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "study"
        self.notes: list[str] = []
        shutil.copy(FAKE, folder / "fake_vllm.py")
        (folder / "bin").mkdir()
        self._python = interpreter(
            folder / "bin",
            f'REAL_PYTHON={sys.executable} exec {sys.executable} {folder / "fake_vllm.py"} "$@"',
        )
        stub.write(folder / "site")
        self.half_known = folder / "half_known"

    def write(self, configuration: str, fault: str, **engine: Any) -> Path:
        config = filled(load_yaml(ROOT / "config/vllm-cpu.yaml"), "config")
        config["engine"] |= {"python": str(self._python), **engine}
        config["engine"]["environment"] = {"FAKE_VLLM": fault}
        config["server"] |= {"ready_timeout_s": 10, "stop_grace_s": 5, "release_s": 0}
        config["server"]["device"] = "gate_tests"
        config["load_generator"]["enable_cpu_affinity"] = False
        resolved = resolve(config, "test")
        wanted = {configuration, "mooncake_both", "lmcache_only"}
        resolved["configurations"] = [c for c in resolved["configurations"] if c["id"] in wanted]
        write_json(self.folder / "study.json", resolved)
        return self.folder / "study.json"

    def preflighted(self, fault: str) -> Path:
        """Return study.json of a study whose gates have run."""
        file = self.write("plain", fault)
        assert preflight.main(["--study", str(file)]) == 0
        return file

    def gate(self, configuration: str, fault: str, **engine: Any) -> str | None:
        """Return why the configuration is skipped, or None when it is included."""
        study = read_json(self.write(configuration, fault, **engine))
        entry = next(c for c in study["configurations"] if c["id"] == configuration)
        gate = entry["gate"] or f"verify_{configuration}"
        probe = None if self.half_known.exists() else self.folder / "overlay"
        if probe:
            overlay.install(probe)
        try:
            preflight.run_gate(
                study, configuration, gate, self.folder / configuration, self.notes.append, probe
            )
        except preflight.GateError as error:
            return str(error)
        return None


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    short = preflight.Gate(requests=3, max_tokens=4, within_s=2.0)
    monkeypatch.setattr(preflight, "OTHER_GATE", short)
    monkeypatch.setattr(preflight, "GATES", dict.fromkeys(preflight.GATES, short))
    return Study(tmp_path)


@pytest.mark.parametrize(
    "configuration",
    ["plain", "noop_connector", "mooncake_consumer", "nixl_both", "multi_mooncake_lmcache"],
)
def test_sound_server_passes_its_gate(study: Study, configuration: str) -> None:
    assert study.gate(configuration, "", forms=IN_PROCESS) is None


@pytest.mark.parametrize(
    ("configuration", "fault", "reason"),
    [
        ("plain", "exits", "ended with status 1 before it was ready"),
        ("plain", "wrong model", "/v1/models names [{'id': 'another-model'}], not 'tiny-qwen3'"),
        ("plain", "error status", "request 1: status 500: "),
        ("plain", "few tokens", "request 1: 3 tokens, not 4"),
        ("plain", "slow", "request 1: ReadTimeout"),
        ("plain", "dies", "request 2: "),
        ("plain", "dead engine", "the engine died (EngineDeadError)"),
        ("plain", "unhealthy", "/health answered 503"),
        ("plain", "no usage", "KeyError: 'usage'"),
        ("plain", "no metrics page", "Error: "),
        ("plain", "failed counter", "vllm:engine_core_failed_total is 1"),
        ("plain", "connector beside plain", "plain, but the log names Stray"),
        ("mooncake_consumer", "companion dies", "dummy_bootstrap ended before it was ready"),
        ("nixl_both", "not created", "the log does not say that a connector was created"),
        ("nixl_both", "no steps", "the step probe recorded no step"),
        ("nixl_both", "hooks not called", "never build_meta_us, get_finished_us, start_load"),
        (
            "lmcache_only",
            "dead connector",
            "its log says: LMCache ERROR: Failed to initialize the manager: Traceback (most "
            "RuntimeError: No supported cpu connector found.",
        ),
        (
            "nixl_both",
            "says Exception in thread Thread-3 (_nixl_handshake_listener):",
            "its log says: Exception in thread Thread-3 (_nixl_handshake_listener):",
        ),
        (
            "mooncake_consumer",
            "rdma without a device",
            "found no RDMA device and falls back to tcp",
        ),
        ("lmcache_only", "lmcache without kernels", "lacks its compiled kernels"),
        (
            "multi_mooncake_lmcache",
            "child not created",
            "MooncakeConnector, LMCacheConnectorV1 not created",
        ),
        (
            "multi_mooncake_lmcache",
            "idle child",
            "no hook of the child LMCacheConnectorV1 was seen",
        ),
    ],
)
def test_each_gate_failure_skips_the_configuration_with_a_reason(
    study: Study, configuration: str, fault: str, reason: str
) -> None:
    refusal = study.gate(configuration, fault, forms=IN_PROCESS)
    assert refusal is not None
    assert reason in refusal


def test_evidence_names_the_active_transport(study: Study) -> None:
    assert study.gate("nixl_both", "ucx") is None
    assert "paths: NIXL backend UCX, NIXL transports cma/memory, tcp/lo" in study.notes
    # UCX names the machine in each of its lines.
    log = (study.folder / "nixl_both" / "vllm_stdout.log").read_text()
    assert "[host:9751 :0]      ucp_worker.c:1997 UCX  INFO" in log


def test_gate_without_the_probe_decides_by_the_log_and_records_this(study: Study) -> None:
    study.half_known.touch()
    assert study.gate("nixl_both", "") is None
    assert any("the step probe is not available" in note for note in study.notes)
    reason = "the log does not say that a connector was created"
    assert study.gate("nixl_both", "not created") == reason


def test_preflight_gates_every_configuration_and_leaves_no_overlay(study: Study) -> None:
    file = study.write("plain", "dead connector", forms=IN_PROCESS)
    status = preflight.preflight(file)
    folder = study.folder / "preflight"
    included = {i: s["include"] for i, s in status.items()}
    assert included == {"plain": True, "mooncake_both": False, "lmcache_only": False}
    for name in ("mooncake_both", "lmcache_only"):
        entry = status[name]
        log = (study.folder / str(entry["evidence"])).read_text()
        assert "launching " in log
        assert "SKIP: " in log
        assert "No supported cpu connector found" in log
    assert not (folder / "overlay").exists()


def test_failed_gate_of_plain_stops_the_gates_without_a_verdict(
    study: Study, capsys: pytest.CaptureFixture[str]
) -> None:
    file = study.write("plain", "exits")
    resolved = read_json(file)
    resolved["configurations"].reverse()
    write_json(file, resolved)
    assert preflight.main(["--study", str(file)]) == 2
    message = capsys.readouterr().err
    assert "plain did not pass its gate" in message
    assert "ended with status 1 before it was ready" in message
    assert "verify_plain.log. Fix the cause and rerun the same command." in message
    asked = [path.name for path in (study.folder / "preflight").glob("verify_*.log")]
    assert asked == ["verify_plain.log"]
    assert not (study.folder / "preflight" / "preflight_status.json").exists()


def test_the_patch_is_applied_proved_and_reverted(study: Study) -> None:
    file = study.preflighted("")
    for _ in range(2):
        assert patch.main(["apply", "--study", str(file)]) == 0
        status = read_json(study.folder / "patch" / "patch_status.json")
        assert status["step_timing_available"] is True
        assert status["steps_recorded"] == {"scheduler": 3, "worker": 3}
        assert probe_overlay(read_json(file), study.folder) is not None
    for _ in range(2):
        assert patch.main(["revert", "--study", str(file)]) == 0
        reverted = read_json(study.folder / "patch" / "revert_status.json")
        assert reverted["reverted"] is True
        before = status["vllm_sources_sha256_before"]
        assert reverted["vllm_sources_sha256_after"] == before
        assert not (study.folder / "patch" / "overlay").exists()


@pytest.mark.parametrize(
    ("fault", "half_known", "reason"),
    [
        ("", True, "vLLM 9.9.9 lacks Scheduler.schedule"),
        ("no steps", False, "no step recorded by the scheduler and the worker process"),
    ],
)
def test_study_continues_without_step_timing_if_the_probe_fails(
    study: Study, fault: str, half_known: bool, reason: str
) -> None:
    if half_known:
        study.half_known.touch()
    file = study.preflighted(fault)
    assert patch.main(["apply", "--study", str(file)]) == 0
    status = read_json(study.folder / "patch" / "patch_status.json")
    assert status["step_timing_available"] is False
    assert reason in status["reason"]
    assert not (study.folder / "patch" / "overlay").exists()
    assert probe_overlay(read_json(file), study.folder) is None


def test_missing_environment_is_reported_by_relative_path(
    study: Study,
) -> None:
    file = study.write("plain", "", python="envs/no_such/bin/python")
    assert patch.main(["apply", "--study", str(file)]) == 0
    status = read_json(study.folder / "patch" / "patch_status.json")
    assert status["reason"].startswith("{root}/envs/no_such/bin/python: cannot be run")
    assert str(ROOT) not in status["reason"]
    with pytest.raises(preflight.NoBaselineError):
        preflight.preflight(file)
    logs = (study.folder / "preflight").glob("verify_*.log")
    texts = [path.read_text() for path in logs]
    assert any("{root}/envs/no_such/bin/python: cannot be run" in text for text in texts)
    assert not any(str(ROOT) in text for text in texts)


def test_a_probe_that_changed_since_it_was_applied_is_refused(study: Study) -> None:
    file = study.preflighted("")
    patch.main(["apply", "--study", str(file)])
    path = study.folder / "patch" / "patch_status.json"
    status = read_json(path)
    status["overlay"][f"{overlay.PROBE}/probe.py"] = "another"
    path.write_text(json.dumps(status))
    with pytest.raises(Exception, match="the step probe has changed since it was applied"):
        probe_overlay(read_json(file), study.folder)

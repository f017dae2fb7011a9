"""The doctor says what stands in a study's way, starts nothing, and fails when it must."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from connector_tax.config import ROOT, filled, load_yaml
from connector_tax.files import write_json
from connector_tax.rehearsal import doctor as doctor_command
from connector_tax.study import doctor
from connector_tax.study.design import resolve
from connector_tax.study.device import hold_devices


def findings(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    engine: Mapping[str, Any] | None = None,
    **server: Any,
) -> tuple[int, dict[str, tuple[str, str]]]:
    config = filled(load_yaml(ROOT / f"config/{name}.yaml"), "config")
    config["server"] |= {"device": "doctor_tests", **server}
    config["engine"] |= engine or {}
    write_json(folder / "study.json", resolve(config, name))
    status = doctor_command.main(["--study", str(folder / "study.json"), "--json"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return status, {row["check"]: (row["verdict"], row["text"]) for row in rows}


def nvidia_smi(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a stand-in first on PATH: there is no GPU here."""
    tool = folder / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")


def test_the_default_study_needs_neither_vllm_nor_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, rows = findings(tmp_path, capsys, "config")
    assert status == 0
    assert rows["device"] == ("ok", "doctor_tests is free")
    assert {"vLLM", "GPU", "model"}.isdisjoint(rows)
    # Its emulated LMCache takes no buffer.
    assert "LMCache" not in rows["memory"][1]
    assert [p.name for p in tmp_path.iterdir()] == ["study.json"]


@pytest.mark.skipif(
    (ROOT / "envs/vllm-gpu/.venv").exists(), reason="this machine has the GPU environment"
)
def test_a_machine_without_gpu_and_environment_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, rows = findings(tmp_path, capsys, "h20")
    assert status == 1
    assert rows["environment"][0] == rows["vLLM"][0] == "fail"
    assert "build the environment" in rows["vLLM"][1]
    assert rows["model"][0] == "warn"


@pytest.mark.parametrize("name", ["h20-emulated", "vllm-cpu"])
def test_a_model_that_the_run_makes_is_not_missed_before_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    model = {"model": "./build/models/nobody-made-it"}
    _, rows = findings(tmp_path, capsys, name, engine=model)
    assert rows["model"] == ("ok", "./build/models/nobody-made-it: not there, made by the run")
    (tmp_path / "preflight").mkdir()
    write_json(tmp_path / "preflight" / "preflight_status.json", {})
    assert findings(tmp_path, capsys, name, engine=model)[1]["model"][0] == "fail"
    _, rows = findings(tmp_path, capsys, name, engine={"model": "./elsewhere/model"})
    assert rows["model"] == ("fail", "./elsewhere/model: not there")


@pytest.mark.parametrize(
    ("used", "busy", "persistence", "verdicts"),
    [
        (512, 0, "Enabled", ("ok", "ok", "ok")),
        (30000, 0, "Enabled", ("fail", "ok", "ok")),
        (512, 37, "Disabled", ("ok", "fail", "warn")),
    ],
)
def test_the_gpu_the_study_is_to_run_on_is_looked_at(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    used: int,
    busy: int,
    persistence: str,
    verdicts: tuple[str, str, str],
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    row = f"NVIDIA H20, 570.86.15, 97871, {used}, {busy}, 1980, {persistence}"
    nvidia_smi(tmp_path, f"echo '{row}'", monkeypatch)
    _, rows = findings(tmp_path, capsys, "h20")
    assert rows["GPU"] == ("ok", "0: NVIDIA H20, driver 570.86.15")
    assert rows["GPU memory"][1] == f"{97871 - used} of 97871 MiB free, 90% wanted"
    assert tuple(rows[c][0] for c in ("GPU memory", "GPU load", "GPU clocks")) == verdicts


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("vllm-cpu", "Mooncake to every address, whatever is set"),
        ("h20", "NIXL to the machine's own address, unless UCX_NET_DEVICES is lo"),
    ],
)
def test_what_the_network_can_reach_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, said: str
) -> None:
    _, rows = findings(tmp_path, capsys, name)
    verdict, text = rows["listening"]
    assert verdict == "warn"
    assert said in text
    assert ("NIXL" in text) == (name == "h20")


@pytest.mark.parametrize("status", [0, 6])
def test_a_gpu_is_named_by_index_or_uuid_as_nvidia_smi_takes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    nvidia_smi(tmp_path, f'echo "$1, 570, [N/A], 1, 0, 1980, Enabled"; exit {status}', monkeypatch)
    visible = {"environment": {"CUDA_VISIBLE_DEVICES": "GPU-5ca1ab1e,1"}}
    _, rows = findings(tmp_path, capsys, "h20", engine=visible)
    if status:
        assert rows["GPU"][0] == "fail"
        assert rows["GPU"][1].startswith("GPU-5ca1ab1e: nvidia-smi: --id=GPU-5ca1ab1e")
    else:
        assert rows["GPU"] == ("ok", "GPU-5ca1ab1e: --id=GPU-5ca1ab1e, driver 570")
        assert rows["GPU memory"][0] == "fail"
        assert "[N/A]" in rows["GPU memory"][1]


@pytest.mark.parametrize(
    ("governors", "wanted"),
    [
        ([], ("ok", "not controlled by this system")),
        (["performance"] * 2, ("ok", "performance on 2 CPUs")),
        (
            ["performance", "powersave", "powersave"],
            ("warn", "performance on 1 CPUs, powersave on 2 CPUs"),
        ),
    ],
)
def test_every_cpu_has_a_clock_governor_of_its_own(
    tmp_path: Path, governors: list[str], wanted: tuple[str, str]
) -> None:
    for number, name in enumerate(governors):
        path = tmp_path / f"cpu{number}" / "cpufreq" / "scaling_governor"
        path.parent.mkdir(parents=True)
        path.write_text(f"{name}\n")
    finding = doctor.governor(tmp_path)
    assert (finding.verdict, finding.text) == wanted


def test_a_host_that_is_not_this_machine_s_has_no_free_port(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = resolve(load_yaml(ROOT / "config/config.yaml"), "config")
    # An address of TEST-NET-1, which no machine has; a configuration that names it is refused.
    study["config"]["server"] |= {"device": "doctor_tests", "host": "192.0.2.1"}
    write_json(tmp_path / "study.json", study)
    assert doctor_command.main(["--study", str(tmp_path / "study.json"), "--json"]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    rows = {row["check"]: (row["verdict"], row["text"]) for row in lines}
    assert rows["ports"][0] == "fail"
    assert "192.0.2.1" in rows["ports"][1]


def test_a_device_in_use_is_told_with_its_holder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with hold_devices(["doctor_tests_busy"]):
        status, rows = findings(tmp_path, capsys, "config", device="doctor_tests_busy")
    assert status == 1
    assert rows["device"][0] == "fail"
    assert f"pid {os.getpid()}, user " in rows["device"][1]


def test_the_artifacts_grow_with_the_blocks(tmp_path: Path) -> None:
    config = load_yaml(ROOT / "config/h20.yaml")
    one = resolve(config, "h20")
    three = resolve({**config, "blocks": 3}, "h20")
    sizes = [doctor.artifact_bytes(study, tmp_path) for study in (one, three)]
    assert sizes[1] == pytest.approx(3 * sizes[0])


@pytest.mark.parametrize(("driver", "verdict"), [("570.86.15", "fail"), ("580.65.06", "ok")])
def test_a_driver_older_than_the_environment_s_cuda_fails(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    driver: str,
    verdict: str,
) -> None:
    row = f"NVIDIA H20, {driver}, 97871, 512, 0, 1980, Enabled"
    nvidia_smi(tmp_path, f"echo '{row}'", monkeypatch)
    _, rows = findings(tmp_path, capsys, "h20")
    said = f"{driver}; CUDA 13 of vllm-gpu needs 580 or later"
    assert rows["GPU driver"] == (verdict, said)


def test_the_gpu_is_that_of_whoever_starts_the_study(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi(tmp_path, 'echo "$1, 580, 97871, 1, 0, 1980, Enabled"', monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5ca1ab1e")
    _, rows = findings(tmp_path, capsys, "h20")
    assert rows["GPU"] == ("ok", "GPU-5ca1ab1e: --id=GPU-5ca1ab1e, driver 580")


def test_every_gpu_of_the_ranks_is_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    busy = 'case "$1" in --id=1) busy=90;; *) busy=0;; esac'
    nvidia_smi(tmp_path, f'{busy}; echo "$1, 580, 97871, 1, $busy, 1980, Enabled"', monkeypatch)
    two = {"flags": {"--tensor-parallel-size": 2}}
    _, rows = findings(tmp_path, capsys, "h20", engine=two)
    assert rows["GPU load"] == ("fail", "90% busy; a study needs it idle")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    _, rows = findings(tmp_path, capsys, "h20", engine=two | {"environment": {}})
    assert rows["GPU load"][0] == "ok"
    assert rows["GPU"] == ("ok", "3: --id=3, driver 580")
    assert rows["GPUs"] == ("fail", "CUDA_VISIBLE_DEVICES: found 3; allowed: 2, one for each rank")


# Qwen3-Coder-30B-A3B has 30.5 billion weights of two bytes: 56.9 GiB.
@pytest.mark.parametrize(
    ("available_gib", "verdict", "said"),
    [
        (120, "ok", "21.1 wanted (server 16.0, LMCache 5.0, bodies 0.1)"),
        (60, "warn", "no room to keep 56.9 GiB of weights: each launch reads them from disk"),
        (20, "fail", "20.0 of 256.0 GiB available, 21.1 wanted"),
    ],
)
def test_memory_is_measured_against_weights_lmcache_and_request_bodies(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    available_gib: int,
    verdict: str,
    said: str,
) -> None:
    memory = SimpleNamespace(available=available_gib * 2**30, total=256 * 2**30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    _, rows = findings(tmp_path, capsys, "h20")
    assert rows["memory"][0] == verdict
    assert said in rows["memory"][1]


def test_each_rank_of_lmcache_has_a_buffer_and_a_cpu_holds_the_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = load_yaml(ROOT / "config/h20.yaml")["engine"]
    two = {"flags": engine["flags"] | {"--tensor-parallel-size": 2}}
    _, rows = findings(tmp_path, capsys, "h20", engine={**two, "environment": {}, "device": "cpu"})
    assert "(server 4.0, LMCache 10.0, weights 56.9, bodies 0.1)" in rows["memory"][1]


@pytest.mark.parametrize(("free_gib", "verdict"), [(300, "ok"), (50, "warn")])
def test_the_disk_has_room_for_a_model_that_is_yet_to_be_fetched(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    free_gib: int,
    verdict: str,
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache" / "hub"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free_gib * 2**30))
    _, rows = findings(tmp_path, capsys, "h20")
    shown, text = rows["disk for the model"]
    assert shown == verdict
    assert text.startswith(f"{free_gib}.0 GiB free for the hub's cache, 56.9 GiB of weights")
    write_json(tmp_path / "model.json", {"bytes": 2**30, "commit": "c0ffee"})
    _, rows = findings(tmp_path, capsys, "h20")
    assert "disk for the model" not in rows

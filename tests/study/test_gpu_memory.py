"""A server is started on GPUs whose memory is free; there is no GPU here, only a stand-in."""

import functools
import os
from pathlib import Path
from typing import Any

import pytest

from connector_tax.artifacts import paths
from connector_tax.artifacts.names import Launch
from connector_tax.files import read_json, write_json
from connector_tax.servers.kinds import ServerError
from connector_tax.study import device, launch, preflight
from connector_tax.study.device import DeviceError
from connector_tax.study.guard import PARENT_VARIABLE
from tests.study.driving import arguments, failed_index_of, launch_folder, write_study

CONFIG: Any = {
    "engine": {
        "device": "cuda",
        "flags": {"--gpu-memory-utilization": 0.9},
        "environment": {"CUDA_VISIBLE_DEVICES": "1"},
    },
    "server": {"device": "gpu"},
}


@pytest.fixture
def readings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with used memory of GPU 1, in MiB, a line for each look; the last one stays."""
    looks = tmp_path / "looks"
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(
        "#!/bin/sh\n"
        'case "$1" in\n'
        '*index,uuid*) echo "0, GPU-a"; echo "1, GPU-b"; exit;;\n'
        '*clocks.max.sm*) rest="x, 0:1, 580, 1, 1, 1, 1, 1"\n'
        '    echo "GPU-a, $rest"; echo "GPU-b, $rest"; exit;;\n'
        "esac\n"
        f"used=$(head -n 1 {looks})\n"
        f"if [ $(wc -l < {looks}) -gt 1 ]; then sed -i 1d {looks}; fi\n"
        'echo "GPU-a, 9000, 10000"; echo "GPU-b, $used, 10000"\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(device, "POLL_S", 0.01)
    return looks


def test_a_launch_waits_for_the_memory_of_its_own_gpu(readings: Path) -> None:
    readings.write_text("8000\n5000\n300\n")
    device.await_free_memory(CONFIG)
    assert readings.read_text() == "300\n"


def test_memory_that_stays_in_use_is_told(readings: Path) -> None:
    readings.write_text("1001\n")
    with pytest.raises(ServerError, match=r"GPU-b: 1001 of 10000 MiB; 90% of it must be free"):
        device.await_free_memory(CONFIG, wait_s=0.0)


def test_a_gpu_that_does_not_tell_is_taken_as_it_is(readings: Path) -> None:
    readings.write_text("[N/A]\n")
    device.await_free_memory(CONFIG)


def test_without_a_gpu_nothing_is_asked(readings: Path) -> None:
    config: Any = {"engine": {"kind": "vllm", "device": "cpu"}}
    device.await_free_memory(config)
    assert not readings.exists()


@pytest.fixture
def occupied(readings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """study.json of a small study on GPU 1, whose memory stays in use."""
    readings.write_text("1001\n")
    monkeypatch.delenv(PARENT_VARIABLE, raising=False)
    at_once = functools.partial(device.await_free_memory, wait_s=0.0)
    for module in (launch, preflight):
        monkeypatch.setattr(module, "await_free_memory", at_once)
    file = write_study(tmp_path / "results" / "tiny")
    study = read_json(file)
    study["config"]["engine"] |= CONFIG["engine"]
    write_json(file, study)
    return file


def test_no_launch_is_started_on_memory_that_is_in_use(occupied: Path) -> None:
    assert launch.main(arguments(occupied)) == 1
    assert "GPU-b: 1001 of 10000 MiB" in failed_index_of(occupied)["reason"]
    assert not (launch_folder(occupied) / paths.LAUNCH_CONFIG).exists()


def test_no_gate_is_started_on_memory_that_is_in_use(occupied: Path, tmp_path: Path) -> None:
    gate = preflight.gated_server(
        read_json(occupied), Launch("plain", 0, "A"), "verify_plain", tmp_path / "gate", print, None
    )
    # Not a GateError, which would leave the configuration out of the study for good.
    with pytest.raises(DeviceError, match="GPU-b: 1001 of 10000 MiB"), gate:
        pass

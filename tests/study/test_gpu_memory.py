"""A server is started on GPUs whose memory is free; there is no GPU here, only a stand-in."""

import os
from pathlib import Path
from typing import Any

import pytest

from connector_tax.study import gpu_memory
from connector_tax.study.server_command import ServerError

CONFIG: dict[str, Any] = {
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
        'case "$1" in *index,uuid*) echo "0, GPU-a"; echo "1, GPU-b"; exit;; esac\n'
        f"used=$(head -n 1 {looks})\n"
        f"if [ $(wc -l < {looks}) -gt 1 ]; then sed -i 1d {looks}; fi\n"
        'echo "GPU-a, 9000, 10000"; echo "GPU-b, $used, 10000"\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(gpu_memory, "POLL_S", 0.01)
    return looks


def test_a_launch_waits_for_the_memory_of_its_own_gpu(readings: Path) -> None:
    readings.write_text("8000\n5000\n300\n")
    gpu_memory.await_free_memory(CONFIG)
    assert readings.read_text() == "300\n"


def test_memory_that_stays_in_use_is_told(readings: Path) -> None:
    readings.write_text("1001\n")
    with pytest.raises(ServerError, match=r"GPU-b: 1001 of 10000 MiB; 90% of it must be free"):
        gpu_memory.await_free_memory(CONFIG, wait_s=0.0)


def test_a_gpu_that_does_not_tell_is_taken_as_it_is(readings: Path) -> None:
    readings.write_text("[N/A]\n")
    gpu_memory.await_free_memory(CONFIG)


def test_without_a_gpu_nothing_is_asked(readings: Path) -> None:
    gpu_memory.await_free_memory({"engine": {"kind": "vllm", "device": "cpu"}})
    assert not readings.exists()

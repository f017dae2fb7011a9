"""What a launch ran on is recorded, and a block keeps to its device."""

import os
from pathlib import Path
from typing import Any

import pytest

from connector_tax.files import read_json
from connector_tax.study.device import DeviceError, claim_device, describe_node
from tests.study.driving import drive, launch_folder, write_study

SMI = """#!/bin/sh
case $1 in
*index,uuid*) echo "0, GPU-aaaa"; echo "1, GPU-bbbb" ;;
*) for gpu in aaaa bbbb; do
  echo "GPU-$gpu, NVIDIA H100, 00000000:18:00.0, 580.1, 700.00 W, 1980 MHz, 2619 MHz, Enabled, N/A"
done ;;
esac
"""
SCONTROL = """#!/bin/sh
[ "$*" = "show job --oneliner 17" ] || exit 9
echo "JobId=17 JobName=x NumNodes=1 OverSubscribe={} Contiguous=0"
"""
CPU_STUDY: Any = {"engine": {"kind": "embedded"}, "server": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("oversubscribe", "exclusive"), [("NO", True), ("OK", False), ("YES", False), ("", None)]
)
def test_the_gpus_and_the_job_of_a_launch_are_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, oversubscribe: str, exclusive: bool | None
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(SCONTROL.format(oversubscribe))
    scontrol.chmod(0o755)
    engine = {"kind": "vllm", "device": "cuda", "environment": {}}
    config: Any = {"engine": engine, "server": {"device": "gpu"}}
    node = describe_node(config)
    assert node["devices"] == ["GPU-bbbb"]
    assert [(gpu["uuid"], gpu["name"], gpu["power.limit"]) for gpu in node["gpus"]] == [
        ("GPU-bbbb", "NVIDIA H100", "700.00 W")
    ]
    # The stand-in's bus is none of this machine's.
    assert node["gpu_numa_nodes"] == [None]
    assert (node["job"], node["exclusive"]) == ("17", exclusive)


def test_no_host_name_is_recorded() -> None:
    node = describe_node(CPU_STUDY)
    assert os.uname().nodename not in str(node)
    assert node["machine"] == describe_node(CPU_STUDY)["machine"]
    assert node["devices"] == ["cpu"]
    assert node["gpu_numa_nodes"] == []
    assert node["exclusive"] is None


def test_a_block_belongs_to_the_device_of_its_first_launch(tmp_path: Path) -> None:
    here = describe_node(CPU_STUDY)
    claim_device(tmp_path, 0, "a", here)
    claim_device(tmp_path, 0, "a", {**here, "boot": "the next", "job": "18", "exclusive": True})
    # Made by a version that recorded more of a node.
    newer: Any = {**here, "recorded_since": 1}
    claim_device(tmp_path, 0, "a", newer)
    claim_device(tmp_path, 1, "a", {**here, "machine": "machine-b"})
    with pytest.raises(DeviceError, match=r"block 0 .*machine: 'machine-.*', here 'machine-b'"):
        claim_device(tmp_path, 0, "a", {**here, "machine": "machine-b"})
    # Another design is another block.
    claim_device(tmp_path, 0, "b", {**here, "machine": "machine-b"})
    with pytest.raises(DeviceError):
        claim_device(tmp_path, 0, "b", here)


def test_a_driver_on_another_device_measures_nothing(tmp_path: Path) -> None:
    study_file = write_study(tmp_path)
    study = read_json(study_file)
    elsewhere = describe_node(study["config"]) | {"machine": "machine-b"}
    claim_device(tmp_path, 0, study["design_sha256"], elsewhere)
    done = drive(study_file)
    assert done.returncode == 2
    assert "block 0 was begun on another device (machine: 'machine-b', here" in done.stdout
    assert not list(launch_folder(study_file).iterdir())

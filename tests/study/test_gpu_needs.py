"""What a GPU study needs beside the GPU, on stand-ins for the machine."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from connector_tax.config import ROOT, load_yaml
from connector_tax.study.design import resolve
from connector_tax.study.device import gpu_node
from connector_tax.study.doctor import rdma, triton


def config(visible: str) -> Any:
    engine = {"device": "cuda", "environment": {"CUDA_VISIBLE_DEVICES": visible}}
    return {"engine": engine, "server": {"device": "gpu"}}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three GPUs, on the nodes 0, 1 and nobody knows which."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(
        "#!/bin/sh\n"
        'case "$1" in\n'
        '*index,uuid*) echo "0, GPU-a"; echo "1, GPU-b"; echo "2, GPU-c";;\n'
        '*) for gpu in "a, 00000000:3B:00.0" "b, 00000000:AF:00.0" "c, 00000001:D8:00.0"; do\n'
        '  echo "GPU-$gpu"; done;;\n'
        "esac\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    for address, node in (("0000:3b:00.0", 0), ("0000:af:00.0", 1), ("0001:d8:00.0", -1)):
        device = tmp_path / "sys/bus/pci/devices" / address
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("visible", "node"), [("0", 0), ("GPU-b", 1), ("0,1", None), ("2", None), ("7", None)]
)
def test_the_node_of_the_gpus_that_are_used(machine: Path, visible: str, node: int | None) -> None:
    assert gpu_node(config(visible), machine) == node


def test_a_study_without_a_gpu_has_no_node(machine: Path) -> None:
    embedded: Any = {"engine": {"kind": "embedded"}}
    assert gpu_node(embedded, machine) is None


def test_triton_needs_a_compiler_and_the_interpreters_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = tmp_path / "python"
    bare.write_text(f"#!/bin/sh\necho {tmp_path}\n")
    bare.chmod(0o755)
    one: Any = {"python": str(bare), "forms": {}}
    two: Any = {"python": str(bare), "forms": {"nixl_both": {"python": str(tmp_path / "none")}}}
    monkeypatch.setenv("PATH", f"{tmp_path}:/nowhere")
    assert re.match("no C compiler .*; no Python.h for .*: Triton cannot build", triton(one).text)
    monkeypatch.undo()
    (tmp_path / "cc").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert re.match(f"no Python.h for {bare} .*; .* does not run", triton(two).text)
    (tmp_path / "Python.h").touch()
    assert triton(one).verdict == "ok"


def test_rdma_is_missed_by_those_who_ask_for_it(tmp_path: Path) -> None:
    study = resolve(load_yaml(ROOT / "config/h20.yaml"), "h20.yaml")
    assert rdma(study, tmp_path).verdict == "ok"
    del study["config"]["engine"]["forms"]["mooncake_consumer"]
    assert rdma(study, tmp_path).text.endswith("mooncake_protocol: tcp for [mooncake_consumer]")
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert rdma(study, tmp_path).verdict == "ok"

"""What a study on a GPU needs of the machine beside the GPU: its NUMA node, a compiler, RDMA."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from connector_tax.config import ROOT, pythons_of
from connector_tax.study.device import DeviceError, devices_of, query_gpus

if TYPE_CHECKING:
    from connector_tax.artifacts.study_records import EngineSection, StudyConfig, StudyDocument

# What Triton builds its launchers with: one of these, and the headers of the interpreter.
COMPILERS = ("cc", "gcc", "clang")
HEADER = "import sysconfig; print(sysconfig.get_path('include'))"


def numa_node(bus_id: str, root: Path = Path("/")) -> int | None:
    """The NUMA node of a PCI device; None where nobody knows.

    Args:
        bus_id: as nvidia-smi has it.
        root: where /sys is found.
    """
    # nvidia-smi's domain has eight digits, the kernel's four.
    file = root / "sys/bus/pci/devices" / bus_id.lower()[-12:] / "numa_node"
    node = int(file.read_text()) if file.exists() else -1
    return None if node < 0 else node


def gpu_node(config: StudyConfig, root: Path = Path("/")) -> int | None:
    """The NUMA node that the study's GPUs hang on.

    None where the server runs on no GPU, or its GPUs on several nodes, or nobody knows (a virtual
    machine often does not say).

    Args:
        config: a resolved configuration.
        root: where /sys is found.
    """
    if config["engine"].get("device") != "cuda":
        return None
    try:
        devices, gpus = devices_of(config), query_gpus(("uuid", "pci.bus_id"))
    except DeviceError:
        return None  # whoever holds the devices tells
    nodes = {numa_node(gpu["pci.bus_id"], root) for gpu in gpus if gpu["uuid"] in devices}
    return nodes.pop() if len(nodes) == 1 else None


def missing_for_triton(engine: EngineSection) -> Iterator[str]:
    """What Triton lacks to build its launchers at the first start; nothing where it has all."""
    if not any(shutil.which(name) for name in COMPILERS):
        yield f"no C compiler ({', '.join(COMPILERS)})"
    for python in pythons_of(engine):
        try:
            done = subprocess.run(
                [ROOT / python, "-c", HEADER], check=True, capture_output=True, text=True
            )
        except (OSError, subprocess.CalledProcessError) as error:
            yield f"{python} does not run: {error}"
            continue
        if not (Path(done.stdout.strip()) / "Python.h").exists():
            yield f"no Python.h for {python} (Debian: the interpreter's -dev package)"


def without_rdma(study: StudyDocument, root: Path = Path("/")) -> list[str]:
    """Configurations whose Mooncake is to use RDMA, on a machine that has no device for it."""
    if any(root.glob("sys/class/infiniband/*")):
        return []
    forms = study["config"]["engine"]["forms"]
    return [
        entry["id"]
        for entry in study["configurations"]
        if entry["connector"] == "MooncakeConnector"
        and {**entry["extra_config"], **forms.get(entry["id"], {}).get("extra_config", {})}.get(
            "mooncake_protocol", "rdma"
        )
        == "rdma"
    ]

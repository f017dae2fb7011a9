"""Which machine a launch runs on, and what of it the launch was given.

Asked of the machine itself before each server is started: a study may be resumed elsewhere, and
what a baseline and a contrast are measured on must be known of each. No host name is recorded.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from connector_tax.artifacts import paths
from connector_tax.files import read_json, write_json, write_new_json
from connector_tax.linux import format_cpus
from connector_tax.machine import boot_id, command_output, cpu, machine_alias
from connector_tax.study.device import DeviceError, devices_of, query_gpus
from connector_tax.study.gpu_needs import numa_node

if TYPE_CHECKING:
    from connector_tax.artifacts.launch_files import DeviceClaim, NodeRecord
    from connector_tax.artifacts.study_records import StudyConfig

# Names of `nvidia-smi --help-query-gpu`.
GPU_FIELDS = (
    "uuid",
    "name",
    "pci.bus_id",
    "driver_version",
    "power.limit",
    "clocks.max.sm",
    "clocks.max.mem",
    "ecc.mode.current",
    "mig.mode.current",
)
JOB_VARIABLE = "SLURM_JOB_ID"
# Stays in the study's folder: archives and reports name machines by their alias.
NODE_VARIABLE = "SLURMD_NODENAME"
# What may change without another device: a reboot, the next job of a scheduler.
PASSING = ("boot", "job", "exclusive")


def describe_node(config: StudyConfig) -> NodeRecord:
    """The `node` of an attempt: machine, boot, devices, CPUs, job, whether the job is alone.

    Args:
        config: a resolved configuration.

    Raises:
        DeviceError: the GPUs the engine is to run on are not known.
    """
    # Imported late: Snakemake plans without the load generator.
    from connector_tax.loadgen.affinity import read_topology

    devices, topology = devices_of(config), read_topology()
    gpus = _gpus(devices) if config["engine"].get("device") == "cuda" else []
    return {
        "machine": machine_alias(),
        "boot": boot_id(),
        "devices": devices,
        "gpus": gpus,
        "gpu_numa_nodes": [numa_node(gpu.get("pci.bus_id", "")) for gpu in gpus],
        "cpu": cpu(),
        "cpus": format_cpus(tuple(c for core in topology.cores for c in core.cpus)),
        "quota_cpus": topology.quota_cpus,
        "job": os.environ.get(JOB_VARIABLE),
        "exclusive": _exclusive(),
    }


def claim_device(study_folder: Path, block: int, design: str, node: NodeRecord) -> None:
    """Make the device the block's, of all its phases; the first launch's is.

    Args:
        study_folder: results/<study>.
        block: its number.
        design: design_sha256; a claim of another design is void.
        node: as `describe_node` has it.

    Raises:
        DeviceError: the block was begun on another; names what differs, and the ways out.
    """
    path = _claim_file(study_folder, block)
    mine = {key: value for key, value in node.items() if key not in PASSING}
    claim = {"design_sha256": design, "slurm_node": os.environ.get(NODE_VARIABLE), "node": mine}
    if write_new_json(path, claim):
        return
    held = read_claim(study_folder, block, design)
    if held is None:
        write_json(path, claim)
        return
    then: Mapping[str, object] = held["node"]
    # An older claim says nothing of what is recorded since.
    wrong = [f"{k}: {then[k]!r}, here {v!r}" for k, v in mine.items() if then.get(k, v) != v]
    if wrong:
        raise DeviceError(
            f"block {block} was begun on another device ({'; '.join(wrong)}), and a block is "
            "measured on one. Go on there; or, to measure the whole block on this one, move "
            f"{path} and {study_folder / paths.RUNS}/*/block{block} away."
        )


def read_claim(study_folder: Path, block: int, design: str) -> DeviceClaim | None:
    """The device that a block of this design was begun on: devices/block<k>.json; None: on none.

    Args:
        study_folder: results/<study>.
        block: its number.
        design: design_sha256.
    """
    path = _claim_file(study_folder, block)
    held: DeviceClaim | None = read_json(path) if path.exists() else None
    return held if held is not None and held["design_sha256"] == design else None


def _claim_file(study_folder: Path, block: int) -> Path:
    return study_folder / paths.DEVICES / f"block{block}.json"


def _exclusive() -> bool | None:
    """Whether no other job may come onto this job's node; None: no job of Slurm, or it is not told.

    Source: `OverSubscribe` of scontrol(1), which is NO with --exclusive and in such a partition.
    """
    job = os.environ.get(JOB_VARIABLE)
    if job is None:
        return None
    try:
        told = command_output(["scontrol", "show", "job", "--oneliner", job])
    except (OSError, subprocess.SubprocessError):
        return None
    shared = re.search(r"\bOverSubscribe=(\w+)", told)
    return None if shared is None else shared[1] == "NO"


def _gpus(uuids: list[str]) -> list[dict[str, str]]:
    """What nvidia-smi says of these GPUs; a part of a GPU (MIG) is described by its UUID alone."""
    try:
        known = {gpu["uuid"]: gpu for gpu in query_gpus(GPU_FIELDS)}
    except DeviceError:
        known = {}
    return [known.get(uuid, {"uuid": uuid}) for uuid in uuids]

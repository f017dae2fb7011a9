"""The devices of a study: their locks, the device of each block, and their free memory.

Only one measurement at a time runs on a device, whichever user starts it. The lock is a Unix socket
named for the device in the abstract namespace (unix(7)). All users see it, whatever their temporary
folder is; it needs no privilege and leaves no file; the kernel names the holder (SO_PEERCRED) and
releases the lock however the holder ends. A container with its own network namespace does not see
it.

The machine is described before each server start, because a study may be resumed elsewhere. No host
name is recorded.

`devices` in a study's file lists the slots of one machine, on which blocks are measured side by
side; it is no part of the design. A slot is a set of CPUs and, with GPUs, a value of
CUDA_VISIBLE_DEVICES. The blocks take the slots in turn; a block that has begun stays on the slot
whose CPUs its claim names. Every server is started in a slot; Snakemake runs one block at a time on
each slot (`block_slots` of workflow/rules/common.smk).
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from connector_tax.artifacts import paths
from connector_tax.config import ConfigError
from connector_tax.files import read_json, write_json, write_new_json
from connector_tax.linux import format_cpus, parse_cpus
from connector_tax.machine import GpuError, boot_id, command_output, cpu, machine_alias, query_gpus
from connector_tax.roofline import memory_share
from connector_tax.servers.kinds import ServerError

if TYPE_CHECKING:
    from connector_tax.artifacts.launch_files import DeviceClaim, NodeRecord
    from connector_tax.artifacts.study_records import SlotSection, StudyConfig, StudyDocument


# ---- the lock

# The variable that lists the GPUs a server sees.
VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
_POLL_S = 0.05
_BACKLOG = 1000
_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid


class DeviceError(Exception):
    """A device cannot be used: unknown, locked by another process, or not the block's device."""


def devices_of(config: StudyConfig) -> list[str]:
    """Return the devices of a study's server: the UUIDs of its GPUs, or `server.device`.

    CUDA_VISIBLE_DEVICES selects GPUs, by their indices or the beginnings of their UUIDs.

    Raises:
        DeviceError: engine.device is cuda and nvidia-smi does not list the GPUs.
    """
    engine = config["engine"]
    if engine.get("device") != "cuda":
        return [config["server"]["device"]]
    try:
        gpus = {gpu["index"]: gpu["uuid"] for gpu in query_gpus(("index", "uuid"))}
    except GpuError as error:
        raise DeviceError(f"engine.device is cuda, and the GPUs are not known: {error}") from None
    inherited = os.environ.get(VISIBLE_VARIABLE)
    visible = engine.get("environment", {}).get(VISIBLE_VARIABLE, inherited)
    if visible is None:
        return sorted(gpus.values())
    chosen = set()
    for entry in filter(None, (text.strip() for text in visible.split(","))):
        of_entry = [u for i, u in gpus.items() if i == entry or u.startswith(entry)]
        # A part of a GPU (MIG) is not in the list, and has its own UUID.
        chosen.update(of_entry or ([entry] if entry.startswith("MIG-") else []))
    if not chosen:
        raise DeviceError(
            f"CUDA_VISIBLE_DEVICES: found {visible!r}; allowed: some of {sorted(gpus.values())}"
        )
    return sorted(chosen)


@contextlib.contextmanager
def hold_devices(
    names: Collection[str],
    wait_s: float = 10.0,
    say: Callable[[str], object] = lambda _: None,
    purpose: str = "device",
) -> Iterator[None]:
    """Lock the devices for one measurement.

    Args:
        purpose: holders for different purposes do not exclude each other.
        say: receives a line that names the holder being waited for.
        wait_s: how long to wait for a holder to release a device.

    Raises:
        DeviceError: a device is still held after `wait_s`; names the holder.
    """
    deadline = time.monotonic() + wait_s
    with contextlib.ExitStack() as stack:
        for name in sorted(names):
            stack.enter_context(_held(name, f"\0connector-tax/{purpose}/{name}", deadline, say))
        yield


def _held(name: str, address: str, deadline: float, say: Callable[[str], object]) -> socket.socket:
    holder, is_reported = socket.socket(socket.AF_UNIX), False
    while True:
        try:
            holder.bind(address)
            break
        except OSError:
            if time.monotonic() > deadline:
                holder.close()
                raise DeviceError(
                    f"device {name!r} is in use by another measurement ({_holder(address)}); two "
                    "on one device would disturb each other. Wait for it, or choose another "
                    "device: by `server.device` (--device of `ab`), for GPUs also by "
                    "CUDA_VISIBLE_DEVICES."
                ) from None
            if not is_reported:
                say(f"waiting for {_holder(address)} to release {name!r}")
                is_reported = True
            time.sleep(_POLL_S)
    holder.listen(_BACKLOG)
    return holder


def _holder(address: str) -> str:
    """Return process id, user and command of the process that has locked a device."""
    with socket.socket(socket.AF_UNIX) as caller:
        caller.setblocking(False)
        try:
            caller.connect(address)
        except OSError:
            return "unknown"
        data = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        command = b"command not known"
    # The kernel gives pid 0 for a process of another container.
    name = f"pid {pid}" if pid else "a process of another container"
    return f"{name}, user {user}: {' '.join(command.decode(errors='replace').split())}"


# ---- the machine of a launch, the device of a block

# Names of `nvidia-smi --help-query-gpu`.
GPU_FIELDS = (
    "uuid", "name", "pci.bus_id", "driver_version", "power.limit", "clocks.max.sm",
    "clocks.max.mem", "ecc.mode.current", "mig.mode.current",
)  # fmt: skip
JOB_VARIABLE = "SLURM_JOB_ID"
# Recorded only in the study's folder; archives and reports name machines by their alias.
NODE_VARIABLE = "SLURMD_NODENAME"
# Fields that may change on the same device, as after a reboot or in another scheduler job.
PASSING = ("boot", "job", "exclusive")


def describe_node(config: StudyConfig) -> NodeRecord:
    """Return an attempt's `node` record: machine, boot, devices, CPUs, job, exclusive use.

    Raises:
        DeviceError: the GPUs for the engine are not known.
    """
    # Imported late: Snakemake plans without the load generator.
    from connector_tax.loadgen.affinity import read_topology

    devices, topology = devices_of(config), read_topology()
    gpus: list[dict[str, str]] = []
    if config["engine"].get("device") == "cuda":
        known: dict[str, dict[str, str]] = {}
        with contextlib.suppress(GpuError):
            known = {gpu["uuid"]: gpu for gpu in query_gpus(GPU_FIELDS)}
        # A part of a GPU (MIG) is described by its UUID alone.
        gpus = [known.get(uuid, {"uuid": uuid}) for uuid in devices]
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
    """Claim this device for all phases of a block, or check that the block was begun on it.

    The first launch of a block makes the claim.

    Raises:
        DeviceError: the block was begun on another device; names what differs, and the remedies.
    """
    path = _claim_file(study_folder, block)
    identity = {key: value for key, value in node.items() if key not in PASSING}
    claim = {"design_sha256": design, "slurm_node": os.environ.get(NODE_VARIABLE), "node": identity}
    if write_new_json(path, claim):
        return
    held = read_claim(study_folder, block, design)
    if held is None:
        write_json(path, claim)
        return
    then: Mapping[str, object] = held["node"]
    # An older claim lacks fields that were added since.
    wrong = [f"{k}: {then[k]!r}, here {v!r}" for k, v in identity.items() if then.get(k, v) != v]
    if wrong:
        raise DeviceError(
            f"block {block} was begun on another device ({'; '.join(wrong)}), and a block is "
            "measured on a single device. Continue there; or, to measure the whole block on this "
            f"device, move {path} and {study_folder / paths.RUNS}/*/block{block} away."
        )


def read_claim(study_folder: Path, block: int, design: str) -> DeviceClaim | None:
    """Return the device that a block of this design began on (devices/block<k>.json), or None."""
    path = _claim_file(study_folder, block)
    claim: DeviceClaim | None = read_json(path) if path.exists() else None
    return claim if claim is not None and claim["design_sha256"] == design else None


def _claim_file(study_folder: Path, block: int) -> Path:
    return study_folder / paths.DEVICES / f"block{block}.json"


def _exclusive() -> bool | None:
    """Return whether Slurm keeps other jobs off this job's node; None if unknown or without Slurm.

    Source: `OverSubscribe` of scontrol(1), which is NO with --exclusive and in an exclusive
    partition.
    """
    job = os.environ.get(JOB_VARIABLE)
    if job is None:
        return None
    try:
        job_text = command_output(["scontrol", "show", "job", "--oneliner", job])
    except (OSError, subprocess.SubprocessError):
        return None
    shared = re.search(r"\bOverSubscribe=(\w+)", job_text)
    return None if shared is None else shared[1] == "NO"


# ---- slots of one machine


def check_slots(config: StudyConfig, source: str) -> None:
    """Check `devices` beyond its schema; `source` names the file in errors.

    Raises:
        ConfigError: a slot has no CPU or, with GPUs, no GPU; two slots share something; or the
            study sets CUDA_VISIBLE_DEVICES itself.
    """
    slots, engine = config.get("devices", []), config["engine"]
    owners: dict[tuple[str, str], int] = {}
    for position, slot in enumerate(slots):
        where = f"{source}: devices[{position}]"
        if (engine.get("device") == "cuda") != ("visible" in slot):
            raise ConfigError(
                f"{where}.visible: found {slot.get('visible')!r}; allowed: the slot's GPUs, only "
                "with engine.device cuda and required there"
            )
        for key, value in _uses(slot, where):
            owner = owners.setdefault((key, value), position)
            if owner != position:
                raise ConfigError(
                    f"{where}.{key}: found {value} of {slot.get(key)!r}, also in "
                    f"devices[{owner}]; allowed: slots that share nothing"
                )
    environments = [engine, *engine.get("forms", {}).values()]
    if slots and any(VISIBLE_VARIABLE in e.get("environment", {}) for e in environments):
        raise ConfigError(
            f"{source}: engine.environment.{VISIBLE_VARIABLE}: found with `devices`; allowed: one "
            "of the two, since each slot sets it"
        )


def _uses(slot: SlotSection, where: str) -> Iterator[tuple[str, str]]:
    """Yield the keys and values of a slot that must not occur in another slot."""
    yield "id", slot["id"]
    for part in slot["cpus"].split(","):
        cpus = parse_cpus(part)
        if not cpus:
            raise ConfigError(f"{where}.cpus: found {part!r}; allowed: ranges such as 0-3")
        yield from (("cpus", str(cpu)) for cpu in sorted(cpus))
    yield from (("visible", gpu) for gpu in slot.get("visible", "").split(",") if gpu)


def slot_of(study: StudyDocument, study_folder: Path, block: int) -> SlotSection | None:
    """Return the slot that a block is measured on, or None if the study has no slots."""
    slots: list[SlotSection] = study["config"].get("devices", [])
    claim = read_claim(study_folder, block, study["design_sha256"]) if slots else None
    begun = claim and slot_at(study, claim["node"]["cpus"])
    return begun or (slots[block % len(slots)] if slots else None)


def slot_at(study: StudyDocument, cpus: str) -> SlotSection | None:
    """Return the study's slot with these CPUs, or None."""
    slots: list[SlotSection] = study["config"].get("devices", [])
    begun = parse_cpus(cpus)
    return next((slot for slot in slots if parse_cpus(slot["cpus"]) == begun), None)


def enter_block_slot(study: StudyDocument, study_folder: Path, block: int = 0) -> StudyDocument:
    """Enter a block's slot, if the study has slots; return the study with the slot's values."""
    slot = slot_of(study, study_folder, block)
    return study if slot is None else enter_slot(study, slot)


def enter_slot(study: StudyDocument, slot: SlotSection) -> StudyDocument:
    """Confine this thread and its children to a slot; return the study with the slot's device.

    Raises:
        DeviceError: this process may not use a CPU of the slot.
    """
    cpus, usable = parse_cpus(slot["cpus"]), os.sched_getaffinity(0)
    if not cpus <= usable:
        raise DeviceError(
            f"devices: cpus of {slot['id']}: found {slot['cpus']}; allowed: some of "
            f"{format_cpus(tuple(usable))}, which this process may use"
        )
    os.sched_setaffinity(0, cpus)
    return on_slot(study, slot)


def on_slot(study: StudyDocument, slot: SlotSection) -> StudyDocument:
    """Return the study with one slot's values: device name and visible GPUs."""
    config = study["config"]
    server, engine = config["server"].copy(), config["engine"].copy()
    # Named by its CPUs, so that all studies on the same CPUs share one lock.
    server["device"] += f"/{format_cpus(tuple(parse_cpus(slot['cpus'])))}"
    if "visible" in slot:
        engine["environment"] = {**engine["environment"], VISIBLE_VARIABLE: slot["visible"]}
    return {**study, "config": {**config, "server": server, "engine": engine}}


# ---- free memory

# How long a server that has ended may still hold memory.
FREE_WAIT_S = 60.0
POLL_S = 1.0


def await_free_memory(config: StudyConfig) -> None:
    """Wait until the study's GPUs have as much free memory as the server will take.

    Does nothing for a server without a GPU or whose flags do not give its share of the memory;
    ignores GPUs whose memory is not reported.

    Raises:
        ServerError: a GPU's memory is still in use after FREE_WAIT_S; names it.
    """
    engine = config["engine"]
    if engine.get("device") != "cuda" or "flags" not in engine:
        return
    share = memory_share(engine["flags"])
    devices, deadline = devices_of(config), time.monotonic() + FREE_WAIT_S
    while occupied := _occupied(devices, share):
        if time.monotonic() > deadline:
            raise ServerError(
                f"GPU memory is in use: {'; '.join(occupied)}; {share:.0%} of it must be free. "
                "End the processes that hold it (nvidia-smi lists them)"
            )
        time.sleep(POLL_S)


def _occupied(devices: Collection[str], share: float) -> list[str]:
    """Return a line for each GPU with too little free memory."""
    try:
        gpus = query_gpus(("uuid", "memory.used", "memory.total"), units=False)
    except GpuError as error:
        raise ServerError(f"GPU memory: {error}") from error
    lines = []
    for uuid, used, total in (gpu.values() for gpu in gpus):
        known = used.isdecimal() and total.isdecimal()
        if uuid in devices and known and int(total) - int(used) < share * int(total):
            lines.append(f"{uuid}: {used} of {total} MiB")
    return lines


# ---- NUMA


def numa_node(bus_id: str, root: Path = Path("/")) -> int | None:
    """Return the NUMA node of a PCI device (bus id as in nvidia-smi), or None if unknown."""
    # nvidia-smi's domain has eight digits, the kernel's four.
    file = root / "sys/bus/pci/devices" / bus_id.lower()[-12:] / "numa_node"
    node = int(file.read_text()) if file.exists() else -1
    return None if node < 0 else node


def gpu_node(config: StudyConfig, root: Path = Path("/")) -> int | None:
    """Return the NUMA node of the study's GPUs, or None.

    None if the server runs on no GPU, its GPUs are on several nodes, or the machine does not report
    the node, as many virtual machines.
    """
    if config["engine"].get("device") != "cuda":
        return None
    try:
        devices, gpus = devices_of(config), query_gpus(("uuid", "pci.bus_id"))
    except (DeviceError, GpuError):
        return None  # `hold_devices` reports the error
    nodes = {numa_node(gpu["pci.bus_id"], root) for gpu in gpus if gpu["uuid"] in devices}
    return nodes.pop() if len(nodes) == 1 else None

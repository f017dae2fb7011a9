"""Record a launch's resources and resolved settings: resources.json and settings.json.

Resources are idle CPU time, memory, GPU memory and start-up time of the server, with the share of
each companion process. A quantity that could not be read is null and has a reason.

Two configurations can differ by more than the connector, which may change the KV-cache layout or
leave fewer blocks. Each setting has its value and source, or null and a reason. Sources are the
engine's objects (`probe`: vllm.settings_probe), then `vllm:cache_config_info` (`metrics`), then the
log. The environment variables of the server are recorded too.
"""

import contextlib
import json
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from connector_tax.artifacts import paths
from connector_tax.artifacts.cell_records import CellCpu, QuantityRecord, ServerCounters
from connector_tax.artifacts.launch_files import (
    AttemptRecord,
    EngineRecord,
    IdleCpu,
    ResourcesRecord,
    ServerSnapshot,
    SettingRecord,
)
from connector_tax.artifacts.names import Launch
from connector_tax.artifacts.study_records import EngineSection, StudyDocument
from connector_tax.files import write_json
from connector_tax.machine import command_output
from connector_tax.servers.kinds import STEP_LOG_PREFIX, Engine, engine_of, without_root
from connector_tax.study.processes import (
    SERVER,
    Process,
    ServerCpu,
    ServerProcesses,
    cpu_between,
)
from connector_tax.study.server import Server
from connector_tax.study.server_command import can_change, shown
from connector_tax.vllm.settings_probe import ENGINE, OF_WORKER

# ---- quantities

_QUERY = ("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")
WORTH_NAMING = 0.01  # CPU s per s of a thread


def idle_cpu(
    processes: ServerProcesses, idle_s: float, check_alive: Callable[[str], None]
) -> IdleCpu:
    """Measure the CPU seconds per second of an idle server over `idle_s`."""
    before = processes.read()
    threads = thread_times(before.engine)
    time.sleep(idle_s)
    check_alive("while it was idle")
    busy = thread_times(before.engine)
    use = cpu_between(before, processes.read())
    seconds = (use.to_ns - use.from_ns) / 1e9
    return {
        "threads": {who: round(share, 3) for who, share in _shares(threads, busy, seconds)},
        "from_ns": use.from_ns,
        "to_ns": use.to_ns,
        **_quantity({part: cpu / seconds for part, cpu in use.parts.items()}, use.reason),
    }


def snapshot(processes: ServerProcesses, device: str) -> ServerSnapshot:
    """Return memory (PSS) and GPU memory of an idle server, in MiB."""
    reading = processes.read()
    running = [p for p in reading.processes.values() if not p.zombie]
    if reading.unseen:
        unseen = _quantity({}, reading.unseen)
        return {"memory_pss_mib": unseen, "gpu_memory_mib": unseen}
    return {
        "memory_pss_mib": _memory(running)
        if reading.group_mib is None
        else _quantity({SERVER: reading.group_mib}),
        "gpu_memory_mib": _gpu_memory(running, device),
    }


def cell_cpu(
    use: ServerCpu, counters: ServerCounters, threads: Mapping[str, int], busy: Mapping[str, int]
) -> CellCpu:
    """Return the CPU seconds per 1,000 requests of a cell, in all and for the engine core's
    threads.

    The readings lie just outside the cell: the first before its origin, the second after its drain.
    Every request that the server answered counts, including the warm-up's.

    Args:
        use: CPU time between the two readings.
        counters: the server's counts `before` and `after` the cell, as in its record.
        threads: `thread_times` of the engine core before the cell.
        busy: `thread_times` after it.
    """
    before, after = counters["before"]["success"], counters["after"]["success"]
    requests, reason, parts, of_threads = None, use.reason, {}, {}
    if before is None or after is None:
        reason = reason or "the server does not count its answered requests"
    elif requests := after - before:
        parts = {name: 1000 * cpu / requests for name, cpu in use.parts.items()}
        seconds = (use.to_ns - use.from_ns) / 1e9
        of_threads = {
            who: round(1000 * share * seconds / requests, 3)
            for who, share in _shares(threads, busy, seconds)
        }
    else:
        reason = reason or "no request was answered"
    return {
        "from_ns": use.from_ns,
        "to_ns": use.to_ns,
        "cpu_s": use.cpu_s,
        "requests": requests,
        "cpu_s_per_1000": _quantity(parts, reason),
        "threads": of_threads,
    }


def _shares(
    before: Mapping[str, int], after: Mapping[str, int], seconds: float
) -> list[tuple[str, float]]:
    """Return the busy threads with their CPU seconds per second, busiest first."""
    shares = {who: (ns - before.get(who, 0)) / 1e9 / seconds for who, ns in after.items()}
    busiest = sorted(shares.items(), key=lambda item: item[1], reverse=True)
    return [(who, share) for who, share in busiest if share >= WORTH_NAMING]


def thread_times(process: Process | None) -> dict[str, int]:
    """Return the CPU time in ns of each thread of a process, by name and thread id."""
    times: dict[str, int] = {}
    for folder in Path(f"/proc/{process.pid}/task").glob("[0-9]*") if process else ():
        with contextlib.suppress(OSError):  # the thread has ended
            name = (folder / "comm").read_text(errors="replace").strip()
            cpu_ns = int((folder / "schedstat").read_text().split()[0])
            times[f"{name} ({folder.name})"] = cpu_ns
    return times


def _memory(running: list[Process]) -> QuantityRecord:
    try:
        sizes = [psutil.Process(process.pid).memory_full_info().pss for process in running]
    except psutil.Error as error:
        return _quantity({}, str(error))
    return _quantity(_by_part(running, [size / 2**20 for size in sizes]))


def _gpu_memory(running: list[Process], device: str) -> QuantityRecord:
    if device != "cuda":
        return _quantity({}, "no GPU: the engine's device is a CPU")
    used: dict[int, float] = {}
    try:
        for line in command_output(_QUERY).splitlines():
            pid, mib = line.split(",")
            used[int(pid)] = used.get(int(pid), 0.0) + float(mib)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return _quantity({}, f"nvidia-smi failed: {error}")
    on_gpu = [process for process in running if process.pid in used]
    if not on_gpu:
        return _quantity(
            {},
            f"nvidia-smi names none of the server's processes (it names {len(used)}); in a "
            "container it may see other process ids",
        )
    return _quantity(_by_part(on_gpu, [used[process.pid] for process in on_gpu]))


def _by_part(running: list[Process], values: Sequence[float]) -> dict[str, float]:
    parts: dict[str, float] = {}
    for process, value in zip(running, values, strict=True):
        parts[process.part] = parts.get(process.part, 0) + value
    return dict(sorted(parts.items()))


def _quantity(parts: Mapping[str, float], reason: str | None = None) -> QuantityRecord:
    value = None if reason else sum(parts.values())
    return {"value": value, "parts": dict(parts), "reason": reason}


# ---- settings

SETTINGS = (*ENGINE, *OF_WORKER, "engine_core_process")
_METRIC = "vllm:cache_config_info"
# Label of the metric, and how its text is read.
_LABELS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "kv_cache_layout": ("kv_cache_layout", str),
    "kv_blocks": ("num_gpu_blocks", int),
    "block_size": ("block_size", int),
    "kv_tokens": ("kv_cache_size_tokens", int),
    "kv_cache_dtype": ("cache_dtype", str),
    "prefix_caching": ("enable_prefix_caching", {"True": True, "False": False}.__getitem__),
}
_PARTS = ("engine", "worker")
# By setting: the value, or None and the reason.
Told = dict[str, tuple[Any, str | None]]


def engine_record(server: Server, section: EngineSection, page: str | None) -> EngineRecord:
    """Return the settings and environment variables of a ready server.

    Args:
        page: the text of its /metrics; None if it did not answer.
    """
    log = engine_of(section).log_settings(server.log_text())
    sources: dict[str, Told] = {
        "probe": _of_probe(server.folder, server.pid),
        "metrics": _of_metrics(page),
        "log": {name: (value, None) for name, value in log.items()},
    }
    environ = ""
    try:
        if not server.unseen:
            environ = Path(f"/proc/{server.pid}/environ").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        server.check_alive("while its settings were read")
        raise
    except PermissionError:
        pass  # the server is a container of another user
    pairs = (line.partition("=") for line in environ.split("\0") if line)
    running = {name: value for name, _, value in sorted(pairs) if can_change(name)}
    environment = shown({name: without_root(value) for name, value in running.items()})
    return {"settings": _settings(section, sources), "environment": {"server": environment}}


def virtual_engine_record(section: EngineSection, page: str) -> EngineRecord:
    """Return the settings on the /metrics page of a server in virtual time."""
    settings = _settings(section, {"metrics": _of_metrics(page)})
    return {"settings": settings, "environment": {"server": {}}}


def virtual_resources(
    launch: Launch, startup_s: float, idle: float, now_ns: int
) -> ResourcesRecord:
    """Return the resources of a server in virtual time, which has no memory.

    Args:
        idle: CPU seconds per second while it is idle.
        now_ns: the time, at which it is ready.
    """
    unseen = _quantity({}, "the server runs in virtual time")
    memory: ServerSnapshot = {"memory_pss_mib": unseen, "gpu_memory_mib": unseen}
    return {
        "launch": launch.name,
        "attempt": 1,
        "startup_s": startup_s,
        "idle_cpu": {
            "threads": {},
            "from_ns": now_ns - 10**9,
            "to_ns": now_ns,
            **_quantity({SERVER: idle}),
        },
        "before_load": memory,
        "after_load": memory,
        "after_load_reason": None,
    }


def remove_settings(folder: Path) -> None:
    """Delete the settings probe's files in a launch's folder; settings.json has their content."""
    for part in _PARTS:
        _probe_file(folder, part).unlink(missing_ok=True)


def _probe_file(folder: Path, part: str) -> Path:
    return folder / f"{STEP_LOG_PREFIX}.{part}.settings"


def _settings(section: EngineSection, sources: Mapping[str, Told]) -> dict[str, SettingRecord]:
    engine = engine_of(section)
    return {name: _setting(name, sources, engine) for name in SETTINGS}


def _setting(name: str, sources: Mapping[str, Told], engine: Engine) -> SettingRecord:
    """Return a setting from the first source that has it; if none has, say why in `reason`."""
    candidates = [(source, *known[name]) for source, known in sources.items() if name in known]
    for source, value, reason in candidates:
        if value is not None:
            return {"value": value, "source": source, "reason": reason}
    reasons = "; ".join(f"{source}: {reason}" for source, _, reason in candidates)
    unknown = "this server has no probe, and neither /metrics nor the log has the setting"
    return {"value": None, "source": None, "reason": engine.lacks or reasons or unknown}


def _of_probe(folder: Path, leader: int) -> Told:
    settings: Told = {}
    for part in _PARTS:
        path = _probe_file(folder, part)
        if not path.exists():
            continue
        written = json.loads(path.read_text(encoding="utf-8"))
        settings |= {name: (value, reason) for name, (value, reason) in written["settings"].items()}
        if part == "engine":
            where = "the API server's" if written["pid"] == leader else "its own"
            settings["engine_core_process"] = (where, None)
    return settings


def _of_metrics(page: str | None) -> Told:
    # Imported late: the driver starts its server first.
    from prometheus_client.parser import text_string_to_metric_families

    # The parser takes milliseconds for a whole page.
    lines = [line for line in (page or "").splitlines() if line.startswith(_METRIC)]
    try:
        families = list(text_string_to_metric_families("\n".join(lines)))
    except ValueError:
        return {}
    samples = (sample for family in families for sample in family.samples)
    labels = next((sample.labels for sample in samples if sample.name == _METRIC), {})
    # The API server prints None for settings that only the engine core resolves.
    return {
        name: (parse(labels[label]), None)
        for name, (label, parse) in _LABELS.items()
        if labels.get(label, "None") != "None"
    }


# ---- both records


class ServerUse:
    """The resources of one server launch, and the settings that the server resolved.

    Args:
        attempt: the driver's record of this server launch, with `attempt` and `startup_s`.
    """

    def __init__(
        self, study: StudyDocument, launch: Launch, server: Server, attempt: AttemptRecord
    ) -> None:
        self.processes = ServerProcesses(
            server.pid, server.companion_pids(), server.unseen, server.control_group
        )
        self._server = server
        self._engine = study["config"]["engine"]
        self._device = self._engine.get("device", "cpu")
        self._idle_s = study["config"]["resources"]["idle_s"]
        self._launch, self._attempt = launch.name, attempt

    def before_load(self) -> None:
        """Record the resources and settings of the idle server before its first request."""
        number = self._attempt["attempt"]
        self._resources: ResourcesRecord = {
            "launch": self._launch,
            "attempt": number,
            "startup_s": self._attempt["startup_s"],
            "idle_cpu": idle_cpu(self.processes, self._idle_s, self._server.check_alive),
            "before_load": snapshot(self.processes, self._device),
            "after_load": None,
            "after_load_reason": "the launch ended before its last cell",
        }
        write_json(self._server.folder / paths.RESOURCES, self._resources)
        settings = engine_record(self._server, self._engine, self._server.get("/metrics"))
        content = {"launch": self._launch, "attempt": number, **settings}
        write_json(self._server.folder / paths.SETTINGS, content)
        remove_settings(self._server.folder)

    def after_load(self) -> None:
        """Record the resources of the idle server after its last cell."""
        self._resources["after_load"] = snapshot(self.processes, self._device)
        self._resources["after_load_reason"] = None
        write_json(self._server.folder / paths.RESOURCES, self._resources)

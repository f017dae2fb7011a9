"""What a launch takes of the machine besides its time: resources.json of its folder.

Idle CPU time, memory, GPU memory, threads, processes and start-up time of the server, with what
each companion process has in them. A quantity that could not be read is null and has its reason.
"""

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from connector_tax.artifacts.cell_records import CellCpu, QuantityRecord, ServerCounters
from connector_tax.artifacts.launch_files import IdleCpu, ServerSnapshot
from connector_tax.study.processes import (
    SERVER,
    Process,
    ServerCpu,
    ServerProcesses,
    cpu_between,
    threads_of,
)

_QUERY = ("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")
_QUERY_TIMEOUT_S = 30
WORTH_NAMING = 0.01  # CPU s per s of a thread


def idle_cpu(
    processes: ServerProcesses, idle_s: float, check_alive: Callable[[str], None]
) -> IdleCpu:
    """CPU time that a server with nothing to do uses, in CPU seconds per second, over `idle_s`."""
    before = processes.read()
    threads = _threads(before.engine)
    time.sleep(idle_s)
    check_alive("while it was idle")
    busy = _threads(before.engine)
    use = cpu_between(before, processes.read())
    seconds = (use.to_ns - use.from_ns) / 1e9
    shares = {who: (ns - threads.get(who, 0)) / 1e9 / seconds for who, ns in busy.items()}
    named = sorted(((share, who) for who, share in shares.items()), reverse=True)
    return {
        "threads": {who: round(share, 3) for share, who in named if share >= WORTH_NAMING},
        "from_ns": use.from_ns,
        "to_ns": use.to_ns,
        **_quantity({part: cpu / seconds for part, cpu in use.parts.items()}, use.reason),
    }


def snapshot(processes: ServerProcesses, device: str) -> ServerSnapshot:
    """Memory (PSS), GPU memory, threads and processes of a server that has nothing to do."""
    running = [p for p in processes.read().processes.values() if not p.zombie]
    return {
        "memory_pss_mib": _memory(running),
        "gpu_memory_mib": _gpu_memory(running, device),
        "threads": _quantity(_by_part(running, [process.threads for process in running])),
        "processes": _quantity(_by_part(running, [1] * len(running))),
    }


def cell_cpu(use: ServerCpu, counters: ServerCounters) -> CellCpu:
    """What a cell cost in CPU seconds per 1,000 requests, and what the engine waited for a CPU.

    The readings lie just outside the cell, which begins after the first (its origin) and ends
    before the second (drained). Every request the server answered counts, of the warm-up too.

    Args:
        use: CPU time between the two readings.
        counters: `before` and `after` the cell, as in its record: the server's own counts.
    """
    before, after = counters["before"]["success"], counters["after"]["success"]
    requests, reason = None, use.reason
    if before is None or after is None:
        reason = reason or "the server does not count its answered requests"
    else:
        requests = after - before
        reason = reason or (None if requests else "no request was answered")
    parts = {}
    if requests is not None and reason is None:
        parts = {name: 1000 * cpu / requests for name, cpu in use.parts.items()}
    queued, unknown = {}, "the kernel does not tell for how long the engine's thread had no CPU"
    if use.engine_queued_s is not None:
        queued = {SERVER: use.engine_queued_s / (use.to_ns - use.from_ns) * 1e9}
    return {
        "from_ns": use.from_ns,
        "to_ns": use.to_ns,
        "cpu_s": use.cpu_s,
        "requests": requests,
        "cpu_s_per_1000": _quantity(parts, reason),
        "engine_queued": _quantity(queued, None if queued else unknown),
    }


def gpu_memory_by_process() -> dict[int, float] | str:
    """MiB of GPU memory by process id, over all GPUs; or why that is not known."""
    try:
        done = subprocess.run(
            _QUERY, check=True, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S
        )
        rows = [line.split(",") for line in done.stdout.splitlines() if line.strip()]
        used: dict[int, float] = {}
        for pid, mib in rows:
            used[int(pid)] = used.get(int(pid), 0.0) + float(mib)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return f"nvidia-smi does not tell: {error}"
    return used


def _threads(process: Process | None) -> dict[str, int]:
    """CPU time in ns of each of a process's threads, by name and thread id."""
    threads = threads_of(process.pid) if process else ()
    return {f"{name} ({thread})": cpu_ns for thread, name, cpu_ns in threads}


def _memory(running: list[Process]) -> QuantityRecord:
    sizes = []
    for process in running:
        path = Path(f"/proc/{process.pid}/smaps_rollup")
        try:
            lines = path.read_text().splitlines()
            sizes.append(next(int(line.split()[1]) for line in lines if line.startswith("Pss:")))
        except (OSError, StopIteration) as error:
            return _quantity({}, f"{process.name}: {path}: {error or 'no line Pss'}")
    return _quantity(_by_part(running, [kib / 1024 for kib in sizes]))


def _gpu_memory(running: list[Process], device: str) -> QuantityRecord:
    if device != "cuda":
        return _quantity({}, "no GPU: the engine's device is a CPU")
    used = gpu_memory_by_process()
    if isinstance(used, str):
        return _quantity({}, used)
    mine = [process for process in running if process.pid in used]
    if not mine:
        return _quantity(
            {},
            f"nvidia-smi names none of the server's processes (it names {len(used)}); in a "
            "container it may see other process ids",
        )
    return _quantity(_by_part(mine, [used[process.pid] for process in mine]))


def _by_part(running: list[Process], values: Sequence[float]) -> dict[str, float]:
    parts: dict[str, float] = {}
    for process, value in zip(running, values, strict=True):
        parts[process.part] = parts.get(process.part, 0) + value
    return dict(sorted(parts.items()))


def _quantity(parts: Mapping[str, float], reason: str | None = None) -> QuantityRecord:
    value = None if reason else sum(parts.values())
    return {"value": value, "parts": dict(parts), "reason": reason}

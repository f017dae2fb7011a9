"""What the kernel says of the machine: CPU time by CPU set and process, steal, pressure.

Sources: proc(5); the kernel's admin-guide/cgroup-v2 and accounting/psi. Every number is a total
since some start, so that any two readings can be subtracted.
"""

import contextlib
import os
import resource
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")
# Fields of a `cpuN` line of /proc/stat.
_IDLE, _IOWAIT, _STEAL = 4, 5, 8
# CPUs that a process must have used to be named as what disturbed.
WORTH_NAMING = 0.02


class ProcessTimes(NamedTuple):
    """A process: parent, group, and CPU time of it and of the children it has waited for."""

    parent: int
    group: int
    cpu_ms: float


def process(pid: int) -> ProcessTimes | None:
    """One process of /proc; None when it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in parentheses may hold anything; state is the first field after it.
    fields = text.rpartition(")")[2].split()
    return ProcessTimes(int(fields[1]), int(fields[2]), sum(map(int, fields[11:15])) * TICK_MS)


def own_processes(driver: int, server: int) -> tuple[list[int], list[int]]:
    """The study's processes: the load generator's side (driver and descendants), and the server's.

    The server's are `server`, the process group that it leads, and everything that descends from
    them.
    """
    there = {}
    for folder in Path("/proc").glob("[0-9]*"):
        if (seen := process(int(folder.name))) is not None:
            there[int(folder.name)] = seen
    sides: tuple[list[int], list[int]] = ([], [])
    for pid in there:
        line = [pid]
        while line[-1] in there and line[-1] != driver:
            line.append(there[line[-1]].parent)
        if any(p in there and server in (p, there[p].group) for p in line):
            sides[1].append(pid)
        elif line[-1] == driver:
            sides[0].append(pid)
    return sides


def every_cpu_ms() -> dict[int, float]:
    """CPU time of every process of the machine that /proc shows, in ms."""
    pids = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    return {pid: seen.cpu_ms for pid in pids if (seen := process(pid)) is not None}


def busiest_other(before: Mapping[int, float], own: Collection[int], seconds: float) -> str | None:
    """Name, id and CPUs used of the busiest process that is not the study's; None: none is known.

    Args:
        before: `every_cpu_ms` of some seconds ago.
        own: the study's processes.
        seconds: how long ago that was.

    One that has ended since is not seen, nor what runs outside this machine or container.
    """
    used = {
        pid: cpu - before.get(pid, 0.0) for pid, cpu in every_cpu_ms().items() if pid not in own
    }
    pid = max(used, key=lambda pid: used[pid], default=0)
    cpus = used.get(pid, 0.0) / 1e3 / seconds
    if cpus < WORTH_NAMING:
        return None
    with contextlib.suppress(OSError):
        name = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
        return f"{name} (process {pid}) used {cpus:.2f} CPUs"
    return None


def cpu_ms(pids: Iterable[int]) -> int:
    """CPU time of those of the processes that live, in ms."""
    return round(sum(seen.cpu_ms for pid in pids if (seen := process(pid)) is not None))


def set_times(sets: Iterable[Collection[int]]) -> list[tuple[int, int]]:
    """Idle (waiting for I/O included) and stolen time, in ms, summed over each set of CPUs."""
    by_cpu = {}
    with Path("/proc/stat").open(encoding="utf-8") as stream:
        next(stream)
        for line in stream:
            if not line.startswith("cpu"):
                break
            fields = line.split()
            idle = int(fields[_IDLE]) + int(fields[_IOWAIT])
            by_cpu[int(fields[0][3:])] = (idle * TICK_MS, int(fields[_STEAL]) * TICK_MS)
    return [
        (round(sum(by_cpu[c][0] for c in cpus)), round(sum(by_cpu[c][1] for c in cpus)))
        for cpus in sets
    ]


def pressure_us(kind: str) -> int | None:
    """Total time some task waited for `cpu` or `memory`; None where the kernel does not tell."""
    try:
        text = Path(f"/proc/pressure/{kind}").read_text(encoding="utf-8")
    except OSError:
        return None
    return int(text.split("\n", 1)[0].rpartition("total=")[2])


def throttled_file(root: Path = Path("/")) -> Path | None:
    """`cpu.stat` of this process's control group, of version 2 or 1; None where there is none."""
    groups = root / "proc/self/cgroup"
    if not groups.exists():
        return None
    for line in groups.read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        mount = root / "sys/fs/cgroup"
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = mount / controllers
        # Inside a container the path may be the host's; then the mount's own root is the group.
        for folder in (base / path.lstrip("/"), base, mount / "cpu"):
            candidate = folder / "cpu.stat"
            if candidate.exists() and "nr_throttled" in candidate.read_text(encoding="utf-8"):
                return candidate
    return None


def throttled(path: Path | None) -> int | None:
    """How many periods the control group was throttled in; None where nobody counts."""
    if path is None:
        return None
    for line in path.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(" ")
        if name == "nr_throttled":
            return int(value)
    return None


def suspended_ms() -> int:
    """How long the machine has been suspended since it was started, in ms."""
    boot = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return round((boot - time.clock_gettime_ns(time.CLOCK_MONOTONIC)) / 1e6)


def own_use() -> dict[str, int]:
    """This process: CPU time so far in us, and page faults."""
    use = resource.getrusage(resource.RUSAGE_SELF)
    return {"self_us": round((use.ru_utime + use.ru_stime) * 1e6), "faults": use.ru_minflt}

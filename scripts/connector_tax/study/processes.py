"""Find the processes of a server, and read their CPU time in ns.

A process's CPU clock counts in ns and includes its ended threads. The CPU time of an ended process
moves to the parent that waited for it, which the kernel reports in clock ticks (10 ms). Both are
read, so that a child's time only moves from one to the other when it ends. If no parent waited (it
ended first, or ignores its children), the kernel loses the time. If such a process existed at the
first of two readings, this is reported, not counted as zero.

The time for which the engine core's thread was ready but had no CPU is read as well.

For the whole machine: CPU time by CPU set and process, steal, throttling (proc(5); the kernel's
admin-guide/cgroup-v2). Each is a total since some start, so that any two readings can be
subtracted.
"""

import contextlib
import os
import re
import resource
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

# ---- any process


class Stat(NamedTuple):
    """The state of a process from /proc/<pid>/stat (proc(5)); CPU time in clock ticks.

    Attributes:
        own_ticks: CPU time of its threads.
        ended_ticks: CPU time of the children it has waited for.
        started: start time in clock ticks since the boot.
    """

    name: str
    state: str
    parent: int
    group: int
    session: int
    own_ticks: int
    ended_ticks: int
    started: int

    @property
    def is_zombie(self) -> bool:
        """Return whether the process has ended and no parent has waited for it yet."""
        return self.state in ("Z", "X")


def stat_of(pid: int) -> Stat | None:
    """Return the state of the process `pid`, or None if it does not exist."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in parentheses may contain any character.
    head, _, rest = text.rpartition(")")
    state, *fields = rest.split()
    n = list(map(int, fields))
    return Stat(
        head.partition("(")[2], state, parent=n[0], group=n[1], session=n[2],
        own_ticks=n[10] + n[11], ended_ticks=n[12] + n[13], started=n[18],
    )  # fmt: skip


def _every_stat() -> dict[int, Stat]:
    stats: dict[int, Stat] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        # /proc may hide the state of other users' processes (hidepid=1).
        with contextlib.suppress(PermissionError):
            if (stat := stat_of(int(folder.name))) is not None:
                stats[int(folder.name)] = stat
    return stats


# ---- a server's processes

SERVER, _DRIVER = "server", "driver"
# Name of vLLM's engine core process, truncated by the kernel; other engines have one process.
ENGINE_CORE = "VLLM::EngineCor"
_READINGS = 5
_NS_PER_TICK = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Process:
    """One process of a server.

    Attributes:
        part: `server`, or the name of the companion that it is or descends from.
        own_ns: CPU time of its threads, ended ones included.
        ended_ns: CPU time of the children it has waited for, to a clock tick.
    """

    pid: int
    name: str
    part: str
    zombie: bool
    own_ns: int
    ended_ns: int


class ControlGroup(NamedTuple):
    """The files with the CPU time and memory of a container's control group."""

    cpu: Path
    memory: Path

    def cpu_ns(self) -> int:
        """Return the CPU time of the group's processes, ended ones included."""
        text = self.cpu.read_text(encoding="utf-8")
        counted = re.search(r"^usage_usec (\d+)", text, re.MULTILINE)
        return int(text) if counted is None else 1000 * int(counted[1])

    def memory_mib(self) -> float:
        """Return the memory of the group's processes: anonymous and mapped files, no page cache."""
        lines = (line.split() for line in self.memory.read_text(encoding="utf-8").splitlines())
        return sum(int(size) for name, size in lines if name in _OF_PROCESSES) / 2**20


# In version 2, and in version 1.
_OF_PROCESSES = ("anon", "file_mapped", "total_rss", "total_mapped_file")


def control_group_of(pid: int) -> ControlGroup | None:
    """Return the control group of a process, if readable and not the group of this process."""
    groups = (Path(f"/proc/{of}/cgroup") for of in (pid, "self"))
    try:
        lines, own_lines = (path.read_text(encoding="utf-8").splitlines() for path in groups)
    except OSError:
        return None
    mount, files = Path("/sys/fs/cgroup"), {}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller, name in (("cpuacct", "cpuacct.usage"), ("memory", "memory.stat")):
            if controller in controllers.split(",") and line not in own_lines:
                files[controller] = mount / controller / path.lstrip("/") / name
        if not controllers and line not in own_lines:
            for controller, name in (("cpuacct", "cpu.stat"), ("memory", "memory.stat")):
                files.setdefault(controller, mount / path.lstrip("/") / name)
    if len(files) < 2 or not all(os.access(path, os.R_OK) for path in files.values()):
        return None
    return ControlGroup(files["cpuacct"], files["memory"])


@dataclass(frozen=True, slots=True)
class Reading:
    """The processes of a server at one moment (CLOCK_MONOTONIC, ns).

    `leader`: the process id of launch.sh. `unseen`: the reason why they cannot be seen.
    `group_cpu_ns`, `group_mib`: CPU time and memory of a container.
    """

    t_ns: int
    processes: Mapping[int, Process]
    leader: int
    unseen: str | None = None
    group_cpu_ns: int | None = None
    group_mib: float | None = None

    @property
    def engine(self) -> Process | None:
        """Return the process whose first thread runs the engine's steps."""
        cores = [p for p in self.processes.values() if p.name == ENGINE_CORE]
        return cores[0] if cores else self.processes.get(self.leader)


@dataclass(frozen=True, slots=True)
class ServerCpu:
    """The CPU seconds of each part between two readings, or the reason why they are unknown."""

    from_ns: int
    to_ns: int
    parts: dict[str, float]
    reason: str | None

    @property
    def cpu_s(self) -> float | None:
        """Return the CPU time of all parts together, in s."""
        return None if self.reason else sum(self.parts.values())


class ServerProcesses:
    """The processes of a server: `leader`, its session, and all their descendants.

    Args:
        leader: the process id of launch.sh, later of the server.
        companions: their process ids by name.
        unseen: why they cannot be seen; None if they can.
        group: of a container.
    """

    def __init__(
        self,
        leader: int,
        companions: Mapping[str, int],
        unseen: str | None = None,
        group: ControlGroup | None = None,
    ) -> None:
        self._leader, self._unseen, self._group = leader, unseen, group
        self._names = {leader: SERVER} | {pid: name for name, pid in companions.items()}

    def read(self) -> Reading:
        """Read all processes; repeat if a process ended meanwhile, since its time would be lost."""
        if self._unseen:
            return Reading(time.monotonic_ns(), {}, self._leader, self._unseen)
        for left in reversed(range(_READINGS)):
            now = time.monotonic_ns()
            processes: dict[int, Process] = {}
            ended = False
            for pid, (part, stat) in _parts(self._names, self._leader).items():
                try:
                    own_ns = time.clock_gettime_ns(_cpu_clock(pid))
                except OSError:
                    ended = True
                    continue
                ended_ns = stat.ended_ticks * _NS_PER_TICK
                processes[pid] = Process(pid, stat.name, part, stat.is_zombie, own_ns, ended_ns)
            if not ended or not left:
                break
        group = self._group
        if group is None:
            return Reading(now, processes, self._leader)
        return Reading(now, processes, self._leader, None, group.cpu_ns(), group.memory_mib())


def _parts(names: Mapping[int, str], leader: int) -> dict[int, tuple[str, Stat]]:
    """Return part and state of `leader`, its session and all descendants, by process id."""
    every = _every_stat()
    parts: dict[int, str | None] = {}

    def part_of(pid: int) -> str | None:
        if pid in parts or pid not in every:
            return parts.get(pid)
        parts[pid] = None  # ends a cycle of parents, read while it changed
        parts[pid] = names.get(pid) or part_of(every[pid].parent)
        if parts[pid] is None and leader in (every[pid].session, every[pid].group):
            parts[pid] = SERVER
        return parts[pid]

    return {pid: (part, stat) for pid, stat in every.items() if (part := part_of(pid)) is not None}


def cpu_between(before: Reading, after: Reading) -> ServerCpu:
    """Return the CPU time of a server between two readings."""
    if before.group_cpu_ns is not None and after.group_cpu_ns is not None:
        used_ns = after.group_cpu_ns - before.group_cpu_ns
        return ServerCpu(before.t_ns, after.t_ns, {SERVER: used_ns / 1e9}, None)
    parts = dict.fromkeys((p.part for p in after.processes.values()), 0)
    for process in after.processes.values():
        parts[process.part] += process.own_ns + process.ended_ns
    for process in before.processes.values():
        parts[process.part] = parts.get(process.part, 0) - process.own_ns - process.ended_ns
    reason = before.unseen or _unaccounted(before, after)
    seconds = {} if reason else {part: ns / 1e9 for part, ns in sorted(parts.items())}
    return ServerCpu(before.t_ns, after.t_ns, seconds, reason)


def _unaccounted(before: Reading, after: Reading) -> str | None:
    """Return why CPU time of ended processes is unknown, or None if all is accounted for."""
    ended = [p for pid, p in before.processes.items() if pid not in after.processes]
    both = [(p, after.processes[i]) for i, p in before.processes.items() if i in after.processes]
    known = sum(p.own_ns + p.ended_ns for p in ended)
    waited_for = sum(new.ended_ns - old.ended_ns for old, new in both)
    # The largest rounding error: ticks are truncated in two sums, at both readings, for each
    # process that has waited.
    cut = 2 * _NS_PER_TICK * (1 + sum(new.ended_ns > old.ended_ns for old, new in both))
    if known <= waited_for + cut:
        return None
    names = ", ".join(f"{p.name} ({p.pid})" for p in ended)
    return f"{names} ended, and no process of the server waited for it: its CPU time is not known"


def _cpu_clock(pid: int) -> int:
    """Return the id of a process's CPU clock, like clock_getcpuclockid(3)."""
    return ((~pid) << 3) | 2


# ---- the machine

TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")
# Fields of a `cpuN` line of /proc/stat.
_IDLE, _IOWAIT, _STEAL = 4, 5, 8
# CPUs that a process must have used to be named as a disturbance.
WORTH_NAMING = 0.02
# Share of requested CPU time that the host must have taken to be reported.
STOLEN_WORTH_SAYING = 0.02


def own_processes(driver: int, server: int) -> tuple[list[int], list[int]]:
    """Return the study's processes: the load generator's side, and the server's side. The first
    side is `driver` and its descendants; the second is `server`, its session or process group, and
    their descendants.
    """
    sides: dict[str, list[int]] = {_DRIVER: [], SERVER: []}
    for pid, (side, _) in _parts({driver: _DRIVER, server: SERVER}, server).items():
        sides[side].append(pid)
    return sides[_DRIVER], sides[SERVER]


def group_members(group: int) -> list[int]:
    """Return the processes of a process group that have not ended."""
    every = _every_stat().items()
    return [pid for pid, stat in every if stat.group == group and not stat.is_zombie]


def engine_cores(leader: int) -> dict[int, int]:
    """Return the start (clock ticks) of each engine core of a server, by process id."""
    parts = _parts({leader: SERVER}, leader)
    cores = {pid: stat for pid, (_, stat) in parts.items() if stat.name == ENGINE_CORE}
    return {pid: stat.started for pid, stat in cores.items() if not stat.is_zombie}


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped (SIGSTOP)."""
    stat = stat_of(pid)
    return stat is not None and stat.state == "T"


def every_cpu_ms() -> dict[int, float]:
    """Return the CPU time in ms of every visible process, without its children, by process id."""
    return {pid: stat.own_ticks * TICK_MS for pid, stat in _every_stat().items()}


def busiest_other(
    before: Mapping[int, float], excluded: Collection[int], seconds: float
) -> str | None:
    """Return name, id and CPUs of the busiest process outside the study; None if none is known.

    Processes that have ended since, or that run outside this machine or container, are not seen.

    Args:
        before: `every_cpu_ms` of `seconds` ago.
        excluded: process ids of the study.
    """
    used = {
        pid: cpu - before.get(pid, 0.0)
        for pid, cpu in every_cpu_ms().items()
        if pid not in excluded
    }
    pid = max(used, key=lambda pid: used[pid], default=0)
    cpus = used.get(pid, 0.0) / 1e3 / seconds
    if cpus < WORTH_NAMING:
        return None
    stat = stat_of(pid)
    return f"{stat.name} (process {pid}) used {cpus:.2f} CPUs" if stat else None


def cpu_ms(pids: Iterable[int]) -> int:
    """Return the CPU time in ms of living processes, including children they waited for."""
    stats = filter(None, map(stat_of, pids))
    return round(sum((stat.own_ticks + stat.ended_ticks) * TICK_MS for stat in stats))


def set_times(sets: Iterable[Collection[int]]) -> list[tuple[int, int]]:
    """Return idle time (with I/O wait) and stolen time in ms, summed over each set of CPUs."""
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


def throttled_file(root: Path = Path("/")) -> Path | None:
    """Return `cpu.stat` of this process's control group (version 2 or 1); None if missing."""
    groups = root / "proc/self/cgroup"
    if not groups.exists():
        return None
    for line in groups.read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        mount = root / "sys/fs/cgroup"
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = mount / controllers
        # Inside a container the path may be the host's; then the root of the mount is the group.
        for folder in (base / path.lstrip("/"), base, mount / "cpu"):
            candidate = folder / "cpu.stat"
            if candidate.exists() and "nr_throttled" in candidate.read_text(encoding="utf-8"):
                return candidate
    return None


def throttled(path: Path | None) -> int | None:
    """Return the number of periods in which the control group was throttled; None if unknown."""
    text = "" if path is None else path.read_text(encoding="utf-8")
    counted = re.search(r"^nr_throttled (\d+)", text, re.MULTILINE)
    return None if counted is None else int(counted[1])


def suspended_ms() -> int:
    """Return the time in ms for which the machine has been suspended since its boot."""
    boot = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return round((boot - time.clock_gettime_ns(time.CLOCK_MONOTONIC)) / 1e6)


def own_use() -> dict[str, int]:
    """Return this process's CPU time in us and page faults so far."""
    use = resource.getrusage(resource.RUSAGE_SELF)
    return {"self_us": round((use.ru_utime + use.ru_stime) * 1e6), "faults": use.ru_minflt}

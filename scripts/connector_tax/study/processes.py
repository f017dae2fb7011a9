"""The processes of a server, and the CPU time they have used, in ns.

The kernel keeps an account of each process: its CPU clock, in ns, in which threads that have ended
stay. A process that has ended is in the account of the parent that waited for it, which the kernel
tells in clock ticks (10 ms). So both are read, and a child's time only moves from one to the other
when it ends. What nobody of the server waited for (its parent ended first, or ignores its children)
is lost to the kernel's books; where such a process was there at the first of two readings, that is
noticed and told, not counted as no time at all.

How long the engine core's thread was ready to run and had no CPU is in the kernel's account too.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

SERVER = "server"
# The process of vLLM's engine core, as the kernel cuts its name; another engine has one process.
ENGINE_CORE = "VLLM::EngineCor"
_READINGS = 5
_NS_PER_TICK = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Process:
    """One process of a server.

    Attributes:
        part: `server`, or the companion it is or descends from.
        own_ns: CPU time of its threads, ended ones included.
        ended_ns: CPU time of the children it has waited for, to a clock tick.
        queued_ns: for how long its first thread was in a run queue; None: the kernel does not tell.
    """

    pid: int
    name: str
    part: str
    threads: int
    zombie: bool
    own_ns: int
    ended_ns: int
    queued_ns: int | None


@dataclass(frozen=True, slots=True)
class Reading:
    """The processes of a server at one moment (CLOCK_MONOTONIC, ns); `leader` is launch.sh's."""

    t_ns: int
    processes: Mapping[int, Process]
    leader: int

    @property
    def engine(self) -> Process | None:
        """The process whose first thread runs the engine's steps."""
        cores = [p for p in self.processes.values() if p.name == ENGINE_CORE]
        return cores[0] if cores else self.processes.get(self.leader)


@dataclass(frozen=True, slots=True)
class ServerCpu:
    """CPU seconds between two readings: of each part, or the reason why they are not known.

    Attributes:
        engine_queued_s: for how long the engine core's thread was ready and had no CPU; None where
            that is not known.
    """

    from_ns: int
    to_ns: int
    parts: dict[str, float]
    reason: str | None
    engine_queued_s: float | None

    @property
    def cpu_s(self) -> float | None:
        """Of all parts together."""
        return None if self.reason else sum(self.parts.values())


class ServerProcesses:
    """`leader`, every process of the session that it began, and every descendant of those.

    Args:
        leader: the process id of launch.sh, and then of the server.
        companions: their process ids by name.
    """

    def __init__(self, leader: int, companions: Mapping[str, int]) -> None:
        self._leader = leader
        self._companions = {pid: name for name, pid in companions.items()}

    def read(self) -> Reading:
        """Read them all; again where one ended meanwhile, whose time could be counted nowhere."""
        for left in reversed(range(_READINGS)):
            now = time.monotonic_ns()
            processes: dict[int, Process] = {}
            ended = False
            for pid, (name, part, fields) in self._members().items():
                try:
                    own_ns = time.clock_gettime_ns(_cpu_clock(pid))
                except OSError:
                    ended = True
                    continue
                ended_ns = (int(fields[13]) + int(fields[14])) * _NS_PER_TICK
                zombie = fields[0] == "Z"
                threads = 0 if zombie else int(fields[17])
                processes[pid] = Process(
                    pid, name, part, threads, zombie, own_ns, ended_ns, _queued_ns(pid)
                )
            if not ended or not left:
                break
        return Reading(now, processes, self._leader)

    def _members(self) -> dict[int, tuple[str, str, list[str]]]:
        """Process id to name, part and the fields of /proc/<pid>/stat from the state on."""
        every = {pid: (name, fields) for pid, name, fields in _all_processes()}
        parts: dict[int, str | None] = {}

        def part_of(pid: int) -> str | None:
            if pid in parts or pid not in every:
                return parts.get(pid)
            parts[pid] = None  # a loop of parents, read while it changed, ends here
            if pid in self._companions:
                parts[pid] = self._companions[pid]
            else:
                inherited = part_of(int(every[pid][1][1]))
                began = self._leader in (pid, int(every[pid][1][3]))
                parts[pid] = inherited or (SERVER if began else None)
            return parts[pid]

        return {
            pid: (name, part, fields)
            for pid, (name, fields) in every.items()
            if (part := part_of(pid)) is not None
        }


def cpu_between(before: Reading, after: Reading) -> ServerCpu:
    """The CPU time a server used between two readings."""
    parts = dict.fromkeys((p.part for p in after.processes.values()), 0)
    for process in after.processes.values():
        parts[process.part] += process.own_ns + process.ended_ns
    for process in before.processes.values():
        parts[process.part] = parts.get(process.part, 0) - process.own_ns - process.ended_ns
    reason = _lost(before, after)
    seconds = {} if reason else {part: ns / 1e9 for part, ns in sorted(parts.items())}
    return ServerCpu(before.t_ns, after.t_ns, seconds, reason, _engine_queued_s(before, after))


def _engine_queued_s(before: Reading, after: Reading) -> float | None:
    first, last = before.engine, after.engine
    if first is None or last is None or first.pid != last.pid:
        return None
    if first.queued_ns is None or last.queued_ns is None:
        return None
    return (last.queued_ns - first.queued_ns) / 1e9


def _lost(before: Reading, after: Reading) -> str | None:
    """Which ended process's time is in nobody's account; None where there is none."""
    gone = [p for pid, p in before.processes.items() if pid not in after.processes]
    both = [(p, after.processes[i]) for i, p in before.processes.items() if i in after.processes]
    known = sum(p.own_ns + p.ended_ns for p in gone)
    waited_for = sum(new.ended_ns - old.ended_ns for old, new in both)
    # Two sums, each cut to a tick at both readings, in every process that has waited.
    cut = 2 * _NS_PER_TICK * (1 + sum(new.ended_ns > old.ended_ns for old, new in both))
    if known <= waited_for + cut:
        return None
    names = ", ".join(f"{p.name} ({p.pid})" for p in gone)
    return f"{names} ended, and no process of the server waited for it: its CPU time is not known"


def threads_of(pid: int) -> Iterator[tuple[int, str, int]]:
    """Id, name and CPU time in ns of each thread of a process; none of one that has ended."""
    for folder in Path(f"/proc/{pid}/task").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            name = (folder / "comm").read_text(errors="replace").strip()
            yield int(folder.name), name, int((folder / "schedstat").read_text().split()[0])


def _queued_ns(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1])
    except (OSError, IndexError):
        return None


def _cpu_clock(pid: int) -> int:
    """The CPU clock of a process, as clock_getcpuclockid(3) makes it."""
    return ((~pid) << 3) | 2


def _all_processes() -> Iterator[tuple[int, str, list[str]]]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                head, _, rest = (folder / "stat").read_text(errors="replace").rpartition(")")
            except OSError:
                continue
            yield int(folder.name), head.partition("(")[2], rest.split()

"""The process that watches the machine while a launch runs; it writes one file for each cell.

It takes commands as JSON lines on standard input and answers each with one JSON line; between them
it samples (study.yardstick). `machine_<phase>_<cell>.jsonl` holds, in this order:

- `{"kind": "begin", ...}`: what is sampled and where, and the counters when sampling began;
- `{"kind": "chunk", ...}`: every `chunk_ms`, the samples since the line before, and the counters.

`t_ns` is CLOCK_MONOTONIC, when the counters were read.
`at_us` are the samples' times in us after the t_ns of the line before; `memory_ns` and `compute_ns`
are CPU time of each sample, `memory_ns` of `elements` loads. `counters` are totals: `idle_ms`,
`steal_ms` and `own_ms` (CPU time of the study's own processes) of both CPU sets, `pressure_us`,
`throttled` periods, `suspended_ms`, and this process's own CPU time and page faults. With GPUs,
`gpu` has the rows of nvidia-smi, once a second, and `foreign_gpu_pids` the processes seen on the
study's GPUs that are not the study's: null where none of the study's was seen there either, since
then nvidia-smi does not know this process's ids (a container of its own), or did not answer in the
chunk. Of GPUs of other studies nothing is told.

A sample of 300 loads every 50 ms costs 0.45% of a core of a busy 2-core guest: 0.17 ms each time,
most of it waking up, and 0.1% for the counters once a second.
"""

from __future__ import annotations

import csv
import gc
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypedDict

from connector_tax.analysis.machine import SIDES
from connector_tax.linux import die_with_parent, run_when_idle
from connector_tax.study.child import CommandChild
from connector_tax.study.processes import (
    cpu_ms,
    own_processes,
    own_use,
    pressure_us,
    set_times,
    suspended_ms,
    throttled,
    throttled_file,
)
from connector_tax.study.yardstick import Yardstick

if TYPE_CHECKING:
    from connector_tax.artifacts.study_records import QuietSection
    from connector_tax.loadgen.affinity import AffinityPlan


# ---- GPUs

# Names of `nvidia-smi --help-query-gpu`; in this order in every row.
FIELDS = (
    "uuid",
    "clocks.sm",
    "clocks.max.sm",
    "clocks_throttle_reasons.active",
    "clocks.mem",
    "temperature.gpu",
    "power.draw",
)
CLOCKS = f"--query-gpu={','.join(FIELDS)}"
# Names of `nvidia-smi --help-query-compute-apps`.
PROCESSES = "--query-compute-apps=gpu_uuid,pid"
PERIOD_MS = 1000
_READ = 65536


class GpuReadings:
    """A child that prints rows once a second.

    Args:
        uuids: the GPUs.
        query: CLOCKS, a row for each GPU, or PROCESSES, one for each process on each.

    Raises:
        OSError: there is no nvidia-smi.
    """

    def __init__(self, uuids: Collection[str], query: str = CLOCKS) -> None:
        self._uuids = uuids
        self._child = subprocess.Popen(
            [
                "nvidia-smi",
                query,
                "--format=csv,noheader,nounits",
                f"--loop-ms={PERIOD_MS}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            preexec_fn=die_with_parent,
        )
        assert self._child.stdout is not None
        self._pipe = self._child.stdout.fileno()
        os.set_blocking(self._pipe, False)
        self._rest = b""

    def take(self) -> list[list[Any]]:
        """The rows that have come since the last call; empty when none has."""
        while True:
            try:
                data = os.read(self._pipe, _READ)
            except BlockingIOError:
                break
            if not data:
                break
            self._rest += data
        whole, _, self._rest = self._rest.rpartition(b"\n")
        rows = csv.reader(whole.decode(errors="replace").splitlines(), skipinitialspace=True)
        return [[_number(value) for value in row] for row in rows if row and row[0] in self._uuids]

    def close(self) -> None:
        """End the child."""
        self._child.kill()
        self._child.wait()
        assert self._child.stdout is not None
        self._child.stdout.close()


class GpuProcesses(GpuReadings):
    """The processes on some GPUs."""

    def __init__(self, uuids: Collection[str]) -> None:
        super().__init__(uuids, PROCESSES)

    def pids(self) -> set[int]:
        """Those seen since the last call, by nvidia-smi: in many containers it names none."""
        return {int(row[1]) for row in self.take() if isinstance(row[1], float)}


def _number(text: str) -> float | str:
    """A number where the text is one; else the text (throttle reasons are a hexadecimal mask)."""
    try:
        return float(text)
    except ValueError:
        return text.strip()


# ---- the driver's end

WATCH_MODULE = "connector_tax.study.machine_watch"


class MachineWatch(CommandChild):
    """The driver's end of the watching process; a context manager.

    Args:
        quiet: the `quiet` section of the configuration.
        plan: where load generator and server run.
        gpus: the UUIDs of the GPUs that the engine runs on; empty: on none.
    """

    def __init__(self, quiet: QuietSection, plan: AffinityPlan, gpus: Sequence[str]) -> None:
        loadgen = {*plan.loadgen, *(cpu for cpus in plan.workers for cpu in cpus)}
        settings: WatchSettings = {
            "interval_ms": quiet["interval_ms"],
            "working_set_mib": quiet["working_set_mib"],
            "elements": quiet["elements"],
            "chunk_ms": quiet["chunk_ms"],
            "loadgen": sorted(loadgen),
            "server": sorted(plan.server),
            "home": sorted(plan.loadgen) if plan.enabled else [],
            "driver": os.getpid(),
            "gpus": list(gpus),
        }
        super().__init__(WATCH_MODULE, [json.dumps(settings)])

    def open(self, path: Path, server_group: int) -> None:
        """Begin to sample into a cell's file.

        Args:
            path: the file.
            server_group: the server's process group.
        """
        self.ask("open", path=str(path), server_group=server_group)

    def close(self) -> None:
        """End the cell's file."""
        self.ask("close")


# ---- the process


class WatchSettings(TypedDict):
    """What the driver asks for.

    Attributes:
        interval_ms, working_set_mib, elements, chunk_ms: of the `quiet` section.
        loadgen, server: the logical CPUs of both sides.
        home: those this process stays on; empty: not pinned.
        driver: the process whose descendants are the study's.
        gpus: UUIDs of the study's.
    """

    interval_ms: float
    working_set_mib: float
    elements: int
    chunk_ms: float
    loadgen: list[int]
    server: list[int]
    home: list[int]
    driver: int
    gpus: list[str]


class Watcher:
    """Samples while a cell's file is open; one file is open at a time."""

    def __init__(self, settings: WatchSettings) -> None:
        self._settings = settings
        self._sets = [settings["loadgen"], settings["server"]]
        self._interval_ns = round(settings["interval_ms"] * 1e6)
        self._chunk_ns = round(settings["chunk_ms"] * 1e6)
        self._yardstick = Yardstick(settings["working_set_mib"], settings["elements"])
        self._throttled = throttled_file()
        self._gpu = GpuReadings(settings["gpus"]) if settings["gpus"] else None
        self._gpu_users = GpuProcesses(settings["gpus"]) if settings["gpus"] else None
        self._file: TextIO | None = None
        self._own: tuple[list[int], list[int]] = ([], [])
        self._server_group = 0
        self._line_ns = 0
        self._due_ns = 0
        self._at_us: list[int] = []
        self._memory: list[int] = []
        self._compute: list[int] = []

    def serve(self, commands: TextIO) -> None:
        """Answer commands and sample until there are no more."""
        poll = select.poll()
        poll.register(commands, select.POLLIN)
        while True:
            timeout = None
            if self._file is not None:
                left_ns = self._due_ns - time.monotonic_ns()
                timeout = max(0.0, left_ns / 1e6)
            if poll.poll(timeout):
                line = commands.readline()
                if not line:
                    break
                print(json.dumps(self._answer(json.loads(line))), flush=True)
            elif self._file is not None:
                self._sample()
        for readings in filter(None, (self._gpu, self._gpu_users)):
            readings.close()

    def _answer(self, command: Mapping[str, Any]) -> dict[str, Any]:
        if command["do"] == "open":
            self._open(Path(command["path"]), command["server_group"])
        elif command["do"] == "close":
            self._close()
        return {}

    def _open(self, path: Path, server_group: int) -> None:
        self._file = path.open("w", encoding="utf-8", buffering=1)
        self._server_group = server_group
        self._own = own_processes(self._settings["driver"], server_group)
        for readings in filter(None, (self._gpu, self._gpu_users)):
            readings.take()
        names = ("interval_ms", "working_set_mib", "elements", "chunk_ms", *SIDES)
        self._write("begin", {k: v for k, v in self._settings.items() if k in names})
        self._due_ns = time.monotonic_ns()

    def _close(self) -> None:
        # Processes that came during the cell belong to it too.
        self._own = own_processes(self._settings["driver"], self._server_group)
        self._write_chunk()
        assert self._file is not None
        self._file.close()
        self._file = None

    def _sample(self) -> None:
        now_ns = time.monotonic_ns()
        at_us = (now_ns - self._line_ns) // 1000
        memory, compute = self._yardstick.sample()
        self._at_us.append(at_us)
        self._memory.append(memory)
        self._compute.append(compute)
        # What was missed is left out: never two samples in a row to catch up.
        late = max(0, now_ns - self._due_ns) // self._interval_ns
        self._due_ns += (late + 1) * self._interval_ns
        if now_ns - self._line_ns >= self._chunk_ns:
            self._write_chunk()

    def _write_chunk(self) -> None:
        samples = {"at_us": self._at_us, "memory_ns": self._memory, "compute_ns": self._compute}
        gpu = {} if self._gpu is None else {"gpu": self._gpu.take()}
        self._write("chunk", {**samples, **gpu, **self._foreign_gpu_pids()})
        self._at_us, self._memory, self._compute = [], [], []

    def _foreign_gpu_pids(self) -> dict[str, list[int] | None]:
        if self._gpu_users is None:
            return {}
        pids, own = self._gpu_users.pids(), {pid for side in self._own for pid in side}
        if pids - own:
            # The study's own may have come since the cell began.
            now = own_processes(self._settings["driver"], self._server_group)
            own = own.union(*now)
        return {"foreign_gpu_pids": sorted(pids - own) if pids & own else None}

    def _write(self, kind: str, content: Mapping[str, object]) -> None:
        times = set_times(self._sets)
        counters = {
            "idle_ms": [idle for idle, _ in times],
            "steal_ms": [steal for _, steal in times],
            "own_ms": [cpu_ms(pids) for pids in self._own],
            "pressure_us": [pressure_us(kind) for kind in ("cpu", "memory")],
            "throttled": throttled(self._throttled),
            "suspended_ms": suspended_ms(),
            **own_use(),
        }
        self._line_ns = time.monotonic_ns()
        record = {"kind": kind, "t_ns": self._line_ns, **content, "counters": counters}
        assert self._file is not None
        self._file.write(json.dumps(record, separators=(",", ":")) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Serve commands with the settings given as JSON text."""
    (text,) = argv if argv is not None else sys.argv[1:]
    settings = json.loads(text)
    # On a small machine it shares a core with the load generator, which never waits for it so.
    run_when_idle(settings["home"])
    try:
        watcher = Watcher(settings)
        # Nothing that is made from here on is a cycle.
        gc.disable()
        watcher.serve(sys.stdin)
    except OSError as error:
        print(f"machine watch: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

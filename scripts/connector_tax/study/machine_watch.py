"""Watch the machine while a launch runs, in a separate process; write one file for each cell.

A file begins with the logical CPUs of server and load generator. Each second a line with the
counters follows; counters are totals (docs/artifacts.md). With GPUs, `foreign_gpu_pids` lists
processes on the study's GPUs that do not belong to the study. It is null where nvidia-smi did not
answer in time, or lists no process of the study: in a container nvidia-smi may report other process
ids. Nothing is recorded about GPUs of other studies.
"""

from __future__ import annotations

import csv
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from connector_tax.artifacts.cell_records import SIDES
from connector_tax.linux import die_with_parent
from connector_tax.study.child import CommandChild, serve
from connector_tax.study.processes import (
    cpu_ms,
    is_stopped,
    own_processes,
    own_use,
    set_times,
    suspended_ms,
    throttled,
    throttled_file,
)

if TYPE_CHECKING:
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
    """A child process (nvidia-smi) that prints rows once a second and dies with this process.

    Args:
        query: CLOCKS (a row for each GPU) or PROCESSES (a row for each process on a GPU).

    Raises:
        OSError: there is no nvidia-smi.
    """

    def __init__(self, uuids: Collection[str], query: str = CLOCKS) -> None:
        self._uuids = uuids
        form = "--format=csv,noheader,nounits"
        self.child = subprocess.Popen(
            ["nvidia-smi", query, form, f"--loop-ms={PERIOD_MS}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            preexec_fn=die_with_parent,
        )
        assert self.child.stdout is not None
        self._pipe = self.child.stdout.fileno()
        os.set_blocking(self._pipe, False)
        self._rest = b""

    def take(self) -> list[list[Any]]:
        """Return the rows that were printed since the last call."""
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

    def pids(self) -> set[int]:
        """Return the processes seen since the last call; empty in many containers."""
        return {int(row[1]) for row in self.take() if isinstance(row[1], float)}


def _number(text: str) -> float | str:
    """Return the text as a number if it is one; throttle reasons are a hexadecimal mask."""
    try:
        return float(text)
    except ValueError:
        return text.strip()


# ---- the driver's end

WATCH_MODULE = "connector_tax.study.machine_watch"
CHUNK_MS = 1000.0


class MachineWatch(CommandChild):
    """The driver's interface to the watching process; a context manager.

    Args:
        gpus: UUIDs of the engine's GPUs; empty without GPUs.
        chunk_ms: interval of a file's lines in ms.
    """

    def __init__(self, plan: AffinityPlan, gpus: Sequence[str], chunk_ms: float = CHUNK_MS) -> None:
        loadgen = {*plan.loadgen, *(cpu for cpus in plan.workers for cpu in cpus)}
        sampled = {
            "chunk_ms": chunk_ms, "loadgen": sorted(loadgen), "server": sorted(plan.server),
        }  # fmt: skip
        home = sorted(plan.loadgen) if plan.enabled else []
        super().__init__(WATCH_MODULE, list(map(json.dumps, (sampled, home, os.getpid(), [*gpus]))))

    def open(self, path: Path, server_group: int) -> None:
        """Begin a cell's file; `server_group` is the leader of the server's session or process
        group.
        """
        self.ask("open", path=str(path), server_group=server_group)

    def close(self) -> None:
        """End the cell's file."""
        self.ask("close")


# ---- the process


class Watcher:
    """The task of the watching process: write the lines of a cell's file while the file is open.

    Args:
        sampled: `chunk_ms` and the logical CPUs of both SIDES, for a file's first line.
        driver: the process whose descendants belong to the study.
    """

    def __init__(self, sampled: Mapping[str, Any], driver: int, gpus: Sequence[str]) -> None:
        self._sampled = sampled
        self._driver = driver
        self._chunk_ns = round(sampled["chunk_ms"] * 1e6)
        self._throttled = throttled_file()
        self._gpu = GpuReadings(gpus) if gpus else None
        self._gpu_users = GpuReadings(gpus, PROCESSES) if gpus else None
        self._file: TextIO | None = None
        self._study_pids: tuple[list[int], list[int]] = ([], [])
        self._server_group = 0
        self.due_ns: int | None = None

    def open(self, path: str, server_group: int) -> None:
        """Begin the file of a cell."""
        self._file = Path(path).open("w", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._server_group = server_group
        self._study_pids = own_processes(self._driver, server_group)
        for readings in filter(None, (self._gpu, self._gpu_users)):
            readings.take()
        self._write("begin", self._sampled)
        self.due_ns = time.monotonic_ns() + self._chunk_ns

    def close(self) -> None:
        """End the file of a cell."""
        self.due_ns = None
        # Includes processes that started during the cell.
        self._study_pids = own_processes(self._driver, self._server_group)
        self._write_chunk()
        assert self._file is not None
        self._file.close()

    def work(self) -> None:
        """Write the line that is due, and set the time of the next one."""
        assert self.due_ns is not None
        # Missed lines are left out, and not written in a row to catch up.
        late = max(0, time.monotonic_ns() - self.due_ns) // self._chunk_ns
        self.due_ns += (late + 1) * self._chunk_ns
        self._write_chunk()

    def _write_chunk(self) -> None:
        gpu = {} if self._gpu is None else {"gpu": self._gpu.take()}
        self._write("chunk", {**gpu, **self._foreign_gpu_pids()})

    def _foreign_gpu_pids(self) -> dict[str, list[int] | None]:
        if self._gpu_users is None:
            return {}
        pids, study_pids = (
            self._gpu_users.pids(),
            {pid for side in self._study_pids for pid in side},
        )
        if pids - study_pids:
            # The study may have started processes since the cell began.
            study_pids = study_pids.union(*own_processes(self._driver, self._server_group))
        foreign = sorted(pid for pid in pids - study_pids if not is_stopped(pid))
        return {"foreign_gpu_pids": foreign if pids & study_pids else None}

    def _write(self, kind: str, content: Mapping[str, object]) -> None:
        times = set_times(self._sampled[side] for side in SIDES)
        counters = {
            "idle_ms": [idle for idle, _ in times],
            "steal_ms": [steal for _, steal in times],
            "own_ms": [cpu_ms(pids) for pids in self._study_pids],
            "throttled": throttled(self._throttled),
            "suspended_ms": suspended_ms(),
            **own_use(),
        }
        record = {"kind": kind, "t_ns": time.monotonic_ns(), **content, "counters": counters}
        assert self._file is not None
        self._file.write(json.dumps(record, separators=(",", ":")) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Serve the commands of `MachineWatch`, whose arguments are JSON texts."""
    sampled, home, driver, gpus = map(json.loads, argv if argv is not None else sys.argv[1:])

    def begin() -> Watcher:
        watcher = Watcher(sampled, driver, gpus)
        # No reference cycles are made from here on.
        gc.disable()
        return watcher

    return serve("machine watch", home, begin)


if __name__ == "__main__":
    sys.exit(main())

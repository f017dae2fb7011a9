"""Read the machine records of a cell; no request is excluded because of them.

The watching process (study.machine_watch) cuts a cell into chunks of about a second, one line each.
The checks of analysis.validity judge how much CPU and GPU other programs took.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from connector_tax.artifacts.cell_records import SIDES, MachineLine
from connector_tax.files import ArtifactError, check_sha256, read_jsonl

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class MachineUse(NamedTuple):
    """The disturbance of a cell by the hypervisor, other programs and low GPU clocks, as shares.

    Attributes:
        steal: share of CPU time that the hypervisor gave to others, of the side with the larger
            share.
        foreign_cpu: share of the server's CPUs that other processes used.
        gpu_clock_share: the slowest GPU's clock share (WatchedMachine); None without GPUs or if not
            reported.
    """

    steal: float
    foreign_cpu: float
    gpu_clock_share: float | None


def machine_use(machine: "WatchedMachine") -> MachineUse:
    """Return the shares computed from a cell's machine file."""
    return MachineUse(
        float(np.average(machine.steal, weights=np.diff(machine.edges_ns))),
        machine.cpus["server"].foreign,
        machine.gpu_clock_share,
    )


@dataclass(frozen=True)
class CpuUse:
    """Shares of a CPU set's time while a cell was sampled.

    Attributes:
        stolen: share of used or requested time that the hypervisor gave to others.
    """

    busy: float
    foreign: float
    stolen: float


# Reasons for a low clock in nvidia-smi's mask: idle; slowed by the hardware (heat, power brake) or
# by the driver for heat. A power cap under load is not included.
_IDLE = 0x1
_SLOWED = 0x8 | 0x20 | 0x40 | 0x80


@dataclass(frozen=True)
class WatchedMachine:
    """The content of a cell's machine file, of k chunks.

    Attributes:
        edges_ns: (k + 1,) times of the chunks' ends.
        steal: (k,) steal share of each chunk.
        cpus: use of the CPU sets of `loadgen` and `server`.
        throttled: number of periods in which the control group was throttled; None if not counted.
        foreign_gpu: number of other processes on the study's GPUs; None without GPUs or if
            not reported.
        gpu_slowed: number of readings of a busy GPU slowed by heat or power supply; None as above.
        gpu_clock_share: median SM clock while busy over the highest, of the slowest GPU.
    """

    edges_ns: Ints
    steal: Floats
    cpus: Mapping[str, CpuUse]
    throttled: int | None
    foreign_gpu: int | None
    gpu_slowed: int | None
    gpu_clock_share: float | None


def read_machine(path: Path, sha256: str | None) -> WatchedMachine:
    """Read `machine_<phase>_<cell>.jsonl`, whose lines study.machine_watch has written.

    Args:
        sha256: the hash its bytes must have; if None, it is not checked.

    Raises:
        ArtifactError: the file is missing, changed or malformed.
    """
    check_sha256(path, sha256)
    records = list(read_jsonl(path))
    try:
        (begin,) = (r for r in records if r["kind"] == "begin")
        lines = [r for r in records if r["kind"] == "chunk"]
        chunks = list(zip([begin, *lines], lines, strict=False))
        cpus = [len(begin[side]) for side in SIDES]
        # The side whose CPUs lost the larger share.
        steal = [
            float((grown / np.array(cpus)).max() / ((line["t_ns"] - before["t_ns"]) / 1e6))
            for before, line in chunks
            for grown in [np.subtract(*(of["counters"]["steal_ms"] for of in (line, before)))]
        ]
        edges = np.array([line["t_ns"] for line in (begin, *lines)], np.int64)
        if np.any(np.diff(edges) <= 0):
            raise ValueError("the lines are not in order of time")
        end = lines[-1]
        first, last = begin["counters"], end["counters"]
        gpu_slowed, gpu_clock_share = _gpu_use(lines)
        return WatchedMachine(
            edges_ns=edges,
            steal=np.array(steal),
            cpus=_cpu_use(begin, end),
            throttled=None
            if last["throttled"] is None
            else int(last["throttled"] - first["throttled"]),
            foreign_gpu=_foreign_gpu(lines),
            gpu_slowed=gpu_slowed,
            gpu_clock_share=gpu_clock_share,
        )
    except (KeyError, IndexError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ArtifactError(f"{path}: not a machine file: {error!r}") from None


def _foreign_gpu(lines: Sequence[MachineLine]) -> int | None:
    pid_lists = [pids for line in lines if (pids := line.get("foreign_gpu_pids")) is not None]
    return len({pid for pids in pid_lists for pid in pids}) if pid_lists else None


def _gpu_use(lines: Sequence[MachineLine]) -> tuple[int | None, float | None]:
    """Return `gpu_slowed` and `gpu_clock_share` of a WatchedMachine, from nvidia-smi's rows."""
    slowed = 0
    shares: dict[str, list[float]] = {}
    for uuid, clock, highest, reasons, *_ in (r for line in lines for r in line.get("gpu", [])):
        # Some GPUs do not report all fields; clocks of an idle GPU are low.
        numbers = isinstance(clock, int | float) and isinstance(highest, int | float)
        mask = int(reasons, 16) if numbers and str(reasons).startswith("0x") else _IDLE
        if not mask & _IDLE:
            slowed += bool(mask & _SLOWED)
            shares.setdefault(uuid, []).append(clock / highest)
    if not shares:
        return None, None
    return slowed, min(float(np.median(of_gpu)) for of_gpu in shares.values())


def _cpu_use(begin: MachineLine, end: MachineLine) -> dict[str, CpuUse]:
    first, last = begin["counters"], end["counters"]
    wall_ms = (end["t_ns"] - begin["t_ns"]) / 1e6
    idle = np.subtract(last["idle_ms"], first["idle_ms"])
    steal = np.subtract(last["steal_ms"], first["steal_ms"])
    # The CPU time of an ended process that no parent waited for is lost; it is not foreign.
    study_ms = np.maximum(0.0, np.subtract(last["own_ms"], first["own_ms"]))
    if begin["loadgen"] == begin["server"]:
        # Nothing is pinned: both sides use the same set.
        study_ms = np.full_like(study_ms, study_ms.sum())
    use: dict[str, CpuUse] = {}
    for side, name in enumerate(SIDES):
        whole = wall_ms * len(begin[name])
        busy = whole - idle[side] - steal[side]
        # A CPU that waits to be woken counts as stolen and as idle: the remainder can be too small.
        requested_ms = steal[side] + max(busy, study_ms[side])
        stolen = steal[side] / requested_ms if requested_ms else 0.0
        shares = (busy / whole, max(0.0, busy - study_ms[side]) / whole, stolen)
        use[name] = CpuUse(*map(float, shares))
    return use

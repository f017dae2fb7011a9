"""Test what a machine file shows about a cell, and what voids the cell."""

import json
from pathlib import Path
from typing import Any

import pytest

from connector_tax.analysis.machine import WatchedMachine, machine_use, read_machine
from connector_tax.analysis.validity import assess, void_reasons
from connector_tax.artifacts.cell_records import CheckRecord
from connector_tax.artifacts.checks import BOUNDS, CHECKS, DEVICE_BOUNDS, MACHINE_CHECKS
from connector_tax.files import ArtifactError

MS = 1_000_000
Row = dict[str, Any]


def lines(chunks: list[tuple[int, int]], length_ms: int = 100) -> list[Row]:
    """Return a machine file's lines; `chunks` has the stolen time of both sides in ms."""
    totals, t_ns = [0, 0], 1000 * MS
    line: Row = {"kind": "begin", "loadgen": [0], "server": [1, 2], "t_ns": t_ns}
    counters: Row = {"idle_ms": [0, 0], "own_ms": [0, 0], "self_us": 0, "faults": 0}
    counters["throttled"] = None
    written = [{**line, "counters": {**counters, "steal_ms": totals}}]
    for loadgen, server in chunks:
        t_ns += length_ms * MS
        totals = [totals[0] + loadgen, totals[1] + server]
        steal = {**counters, "steal_ms": totals}
        written.append({"kind": "chunk", "t_ns": t_ns, "counters": steal})
    return written


def machine(records: list[Row], folder: Path) -> WatchedMachine:
    path = folder / "machine.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return read_machine(path, None)


def test_steal_is_the_larger_share_of_the_two_sides_over_the_cell(tmp_path: Path) -> None:
    # In 100 ms, 10 ms of one CPU are 10%, and 50 ms of two CPUs are 25%.
    use = machine_use(machine(lines([(0, 0), (10, 50), (0, 0)]), tmp_path))
    assert use.steal == pytest.approx(0.25 / 3)
    assert use.gpu_clock_share is None


def test_file_of_release_0_3_with_its_samples_is_readable(tmp_path: Path) -> None:
    records = lines([(0, 0)] * 2)
    records[0] |= {"interval_ms": 50, "working_set_mib": 8, "elements": 300}
    for record in records[1:]:
        record |= {"at_us": [1, 2], "memory_ns": [3, 4], "compute_ns": [5, 6]}
    assert machine_use(machine(records, tmp_path)).steal == 0


@pytest.mark.parametrize(
    ("kept", "change"),
    [(0, {}), (1, {}), (3, {"counters": {}}), (3, {"t_ns": 10**12})],
)
def test_damaged_machine_file_is_refused(tmp_path: Path, kept: int, change: Row) -> None:
    records = lines([(0, 0)] * 2)
    records[1] |= change
    with pytest.raises(ArtifactError, match=r"machine\.jsonl: not a machine file"):
        machine(records[:kept], tmp_path)


def test_throttled_periods_of_the_control_group_are_counted(tmp_path: Path) -> None:
    records = lines([(0, 0)] * 3)
    for mark, total in zip(records, (4, 4, 5, 7), strict=True):
        mark["counters"] = {**mark["counters"], "throttled": total}
    assert machine(records, tmp_path).throttled == 3


def test_cpu_time_of_an_unseen_ended_study_process_is_not_foreign(tmp_path: Path) -> None:
    records = lines([(0, 0)])
    # In 100 ms the server's two CPUs were idle for 190 ms; the ended process had used 500 ms.
    records[0]["counters"] |= {"idle_ms": [0, 0], "own_ms": [10, 600]}
    records[1]["counters"] |= {"idle_ms": [100, 190], "own_ms": [10, 100]}
    seen = machine(records, tmp_path)
    assert seen.cpus["server"].foreign == pytest.approx(10 / 200)


def test_stolen_share_is_relative_to_cpu_time_requested(tmp_path: Path) -> None:
    # In 100 ms the load generator's CPU was idle for 70 ms, and 20 of the other 30 ms were stolen.
    # On the server's two CPUs idle and stolen time exceed the whole; 40 ms were used.
    records = lines([(20, 60)])
    records[1]["counters"] |= {"idle_ms": [70, 160], "own_ms": [9, 40]}
    use = machine(records, tmp_path).cpus
    assert use["loadgen"].stolen == pytest.approx(20 / 30)
    assert use["server"].stolen == pytest.approx(60 / 100)


@pytest.mark.parametrize(
    ("told", "value"),
    [([[], None, []], 0), ([[], [7], [7, 8]], 2), ([None] * 3, None), (None, None)],
    ids=["nobody else", "two others", "nobody told", "no GPU"],
)
def test_foreign_gpu_processes_void_the_cell(
    tmp_path: Path, told: list[list[int] | None] | None, value: int | None
) -> None:
    records = lines([(0, 0)] * 3)
    for chunk, pids in zip(records[1:], told or (), strict=False):
        chunk["foreign_gpu_pids"] = pids
    seen = machine(records, tmp_path)
    assert seen.foreign_gpu == value
    health = checks(seen)
    # The cell is not judged by an unknown value, and on CPUs there is no such check.
    assert ("foreign_gpu_processes" in health) == (value is not None)
    reasons = [r for r in void_reasons(health) if "on the study's GPUs" in r]
    assert reasons == (
        ["machine disturbed: processes of others were on the study's GPUs:"
         " foreign_gpu_processes 2, allowed 0"] if value else []
    )  # fmt: skip


OF_GPU = ["a GPU was slowed by its heat or its power supply: gpu_slowed 1, allowed 0",
          "a GPU ran far below its highest clock: gpu_clock_share 0.5, allowed 0.6"]  # fmt: skip


@pytest.mark.parametrize(
    ("readings", "found"),
    [
        ([(1980, "0x0"), (1800, "0x4"), (210, "0x1")], []),
        ([(990, "0x0"), (1000, "0x2"), (980, "0x2")], OF_GPU[1:]),
        ([(1980, "0x0"), (1400, "0x40"), (1980, "0x0")], OF_GPU[:1]),
        ([(900, "0x8"), (990, "0x0"), (1000, "0x0")], OF_GPU),
        ([(210, "0x1"), ("[N/A]", "0x0"), (990, "[N/A]")], None),
        ([], None),
    ],
    ids=["fast, one reading idle", "half", "hot", "hot and half", "not told", "no GPU"],
)
def test_a_slow_gpu_voids_the_cell(
    tmp_path: Path, readings: list[tuple[Any, str]], found: list[str] | None
) -> None:
    records = lines([(0, 0)] * 3)
    for chunk, (clock, reasons) in zip(records[1:], readings, strict=False):
        other = ["GPU-b", 1980, 1980, "0x0", 2619, 40, 90.0]
        chunk["gpu"] = [["GPU-a", clock, 1980, reasons, 2619, 40, 90.0]]
        chunk["gpu"] += [other] if found is not None else []
    seen = machine(records, tmp_path)
    health = checks(seen)
    assert ("gpu_clock_share" in health) == (found is not None)
    assert [r for r in void_reasons(health) if r.startswith("a GPU")] == (found or [])


def checks(machine: WatchedMachine | None, watched: bool = True) -> dict[str, CheckRecord]:
    """Return the checks of a cell that has no request."""
    cell = {"floor_s": 1, "cap_s": 1, "min_completed": 10}
    bounds = {**dict.fromkeys(BOUNDS, 1.0), **DEVICE_BOUNDS["cuda"]}
    process = {"processes": {"main": {}}, "workers": 0, "workers_died": []}
    record: Any = {
        "window": {"t_warmup_end_ns": 1, "t_stop_ns": 2}, "counts": {"planned": 0},
        "input_tokens": 1, "output_tokens": 1, "suspended_ms": 0, "clock": "worker",
        "server_counters": {"before": {}, "after": {}},
        "load_generator": process | {"connections_per_worker": 0, "connections": {}},
    }  # fmt: skip
    config: Any = {"cell": cell, "validity": bounds, "phase_a": {}}
    return assess(record, [], [], config, machine=machine, watched=watched)


@pytest.mark.parametrize("name", [n for n in MACHINE_CHECKS if CHECKS[n].device is None])
def test_missing_machine_record_voids_the_cell(name: str) -> None:
    assert name not in checks(None, watched=False)
    health = checks(None)
    assert health[name]["value"] is None
    assert any(f"{name} missing" in reason for reason in void_reasons(health))

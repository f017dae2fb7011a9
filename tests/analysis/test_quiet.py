"""The rule by which requests that met a disturbance are left out: exact, and twice the same."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from connector_tax.analysis.quiet import WatchedMachine, read_machine, undisturbed
from connector_tax.analysis.validity import Watched, assess, void_reasons
from connector_tax.artifacts.cell_records import CheckRecord
from connector_tax.artifacts.checks import BOUNDS, CHECKS, DEVICE_BOUNDS, MACHINE_CHECKS

RULE: Any = {
    "chunk_percentile": 50, "level_percentile": 10, "max_factor": 1.5, "max_chunk_steal": 0.05,
}  # fmt: skip
MS = 1_000_000
Row = dict[str, Any]


def lines(chunks: list[tuple[list[int], int, int]], length_ms: int = 100) -> list[Row]:
    """A machine file's lines: of each chunk its samples, and the steal of both sides in ms."""
    totals, t_ns = [0, 0], 1000 * MS
    line: Row = {"kind": "begin", "elements": 10, "loadgen": [0], "server": [1, 2], "t_ns": t_ns}
    counters: Row = {"idle_ms": [0, 0], "own_ms": [0, 0], "self_us": 0, "faults": 0}
    counters["throttled"] = None
    written = [{**line, "counters": {**counters, "steal_ms": totals}}]
    for memory, loadgen, server in chunks:
        t_ns += length_ms * MS
        totals = [totals[0] + loadgen, totals[1] + server]
        at_us = [10 + k for k in range(len(memory))]
        written.append({
            "kind": "chunk", "t_ns": t_ns, "at_us": at_us, "memory_ns": memory,
            "compute_ns": memory, "counters": {**counters, "steal_ms": totals},
        })  # fmt: skip
    looks = [{"kind": "look", "when": w, "memory_ns": [10]} for w in ("before", "after")]
    return [looks[0], *written, looks[1]]


def machine(records: list[Row], folder: Path) -> WatchedMachine:
    path = folder / "machine.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return read_machine(path, None)


def test_what_touches_a_disturbed_chunk_is_left_out_and_nothing_else(tmp_path: Path) -> None:
    levels = [100, 100, 100, 200, 100, 100]
    chunks = machine(lines([([level] * 3, 0, 0) for level in levels]), tmp_path).chunks(RULE)
    assert chunks.level_ns == 100
    assert chunks.disturbed.tolist() == [False, False, False, True, False, False]
    spans = {
        (1000, 1299): True,  # before it, to its last moment
        (1000, 1300): False,  # the last token falls in it
        (1350, 1360): False,  # within it
        (1250, 1450): False,  # across it
        (1399, 1500): False,  # begun in it
        (1400, 1600): True,  # after it, to the end
        (999, 1100): False,  # begun before anybody looked
        (1500, 1601): False,  # ended after the last look
    }
    starts, ends = MS * np.array(list(spans)).T
    assert undisturbed(chunks, starts, ends).tolist() == list(spans.values())


def test_a_chunk_is_disturbed_by_the_steal_of_either_side(tmp_path: Path) -> None:
    # Of 100 ms: 5 of one CPU are 5%; of two CPUs, 10 are.
    taken = [(0, 0), (5, 0), (6, 0), (0, 10), (0, 11), (5, 10)]
    seen = machine(lines([([100] * 3, *steal) for steal in taken]), tmp_path)
    wanted = [False, False, True, False, True, False]
    assert seen.chunks(RULE).disturbed.tolist() == wanted
    assert not seen.chunks(RULE | {"max_chunk_steal": None}).disturbed.any()


def test_the_periods_are_counted_that_the_group_was_throttled_in(tmp_path: Path) -> None:
    records = lines([([100] * 3, 0, 0)] * 3)
    marks = [r for r in records if r["kind"] in ("begin", "chunk")]
    for mark, total in zip(marks, (4, 4, 5, 7), strict=True):
        mark["counters"] = {**mark["counters"], "throttled": total}
    assert machine(records, tmp_path).throttled == 3


def test_a_process_of_the_study_that_ended_unseen_is_nobody_elses_time(tmp_path: Path) -> None:
    records = lines([([100] * 3, 0, 0)])
    # Of 100 ms the server's two CPUs were idle for 190; what ended takes 500 ms along.
    records[1]["counters"] |= {"idle_ms": [0, 0], "own_ms": [10, 600]}
    records[2]["counters"] |= {"idle_ms": [100, 190], "own_ms": [10, 100]}
    seen = machine(records, tmp_path)
    assert seen.cpus["server"].foreign == pytest.approx(10 / 200)


@pytest.mark.parametrize(
    ("told", "value"),
    [([[], None, []], 0), ([[], [7], [7, 8]], 2), ([None] * 3, None), (None, None)],
    ids=["nobody else", "two others", "nobody told", "no GPU"],
)
def test_processes_of_others_on_the_gpus_void_the_cell(
    tmp_path: Path, told: list[list[int] | None] | None, value: int | None
) -> None:
    records = lines([([100] * 3, 0, 0)] * 3)
    for chunk, pids in zip(records[2:-1], told or (), strict=False):
        chunk["foreign_gpu_pids"] = pids
    seen = machine(records, tmp_path)
    assert seen.foreign_gpu == value
    quiet = RULE | {"min_quiet_share": 0.5}
    health = checks(Watched(machine=seen, quiet=quiet, level_ns=50.0))
    # Where nobody can tell the cell is not judged by it, and on CPUs there is no such check.
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
    records = lines([([100] * 3, 0, 0)] * 3)
    for chunk, (clock, reasons) in zip(records[2:-1], readings, strict=False):
        other = ["GPU-b", 1980, 1980, "0x0", 2619, 40, 90.0]
        chunk["gpu"] = [["GPU-a", clock, 1980, reasons, 2619, 40, 90.0]]
        chunk["gpu"] += [other] if found is not None else []
    seen = machine(records, tmp_path)
    health = checks(Watched(machine=seen, quiet=RULE | {"min_quiet_share": 0.5}, level_ns=50.0))
    assert ("gpu_clock_share" in health) == (found is not None)
    assert [r for r in void_reasons(health) if r.startswith("a GPU")] == (found or [])


def test_a_chunk_nobody_watched_is_disturbed_whatever_the_rule(tmp_path: Path) -> None:
    seen = machine(lines([([100] * count, 0, 0) for count in (3, 2, 3, 0)]), tmp_path)
    for factor in (1.5, None):
        rule = RULE | {"max_factor": factor, "max_chunk_steal": None}
        assert seen.chunks(rule).disturbed.tolist() == [False, True, False, True]


def checks(watched: Watched | None) -> dict[str, CheckRecord]:
    """The checks of a cell without a single record."""
    cell: Any = {"floor_s": 1, "cap_s": 1}
    return assess(
        records=[], planned=0, shape=(1, 1), counters={"before": {}, "after": {}}, scrapes=[],
        window={"t_warmup_end_ns": 1, "t_stop_ns": 2}, cell=cell, wanted=10, suspended_ms=0,
        health={"processes": {"main": {}}}, clock="worker", watched=watched,
        bounds={**dict.fromkeys(BOUNDS, 1.0), **DEVICE_BOUNDS["cuda"]},
    )  # fmt: skip


@pytest.mark.parametrize("name", [n for n in MACHINE_CHECKS if CHECKS[n].device is None])
def test_a_machine_that_was_to_be_watched_and_was_not_voids_the_cell(name: str) -> None:
    assert name not in checks(None)
    quiet = RULE | {"min_quiet_share": 0.5}
    health = checks(Watched(machine=None, quiet=quiet, level_ns=50.0))
    assert health[name]["value"] is None
    assert any(f"{name} missing" in reason for reason in void_reasons(health))

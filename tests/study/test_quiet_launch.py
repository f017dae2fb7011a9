"""Launches with a watched machine: what is left out."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from connector_tax.analysis.ingest import Cell, load_cells
from connector_tax.analysis.measure import measure_machine, measure_requests
from connector_tax.analysis.quiet import undisturbed
from connector_tax.artifacts.names import Launch
from connector_tax.artifacts.study_file import load_study
from connector_tax.files import read_json, write_json
from connector_tax.provenance.claims import FAIL, Ledger
from connector_tax.provenance.remade import check_judged
from connector_tax.study.guard import PARENT_VARIABLE
from connector_tax.study.server_command import affinity_plan
from connector_tax.study.usage import busiest_other, every_cpu_ms
from tests.study.driving import arguments, launch_folder, write_study

RULE = {"interval_ms": 10, "elements": 100, "chunk_ms": 100, "min_quiet_share": 0.0,
        "max_chunk_steal": None}  # fmt: skip


def edit(study_file: Path, changes: dict[str, Any], connectors: dict[str, Any]) -> None:
    """Change study.json before anything is measured."""
    study = read_json(study_file)
    for section, values in changes.items():
        study["config"][section] |= values
    for name, values in connectors.items():
        study["config"]["engine"]["definition_content"]["connectors"][name] |= values
    write_json(study_file, study)


def drive(study_file: Path, config: str = "plain") -> None:
    """Run the driver of a Phase A launch to its end."""
    command = [sys.executable, "-m", "connector_tax.study.launch"]
    inherited = {k: v for k, v in os.environ.items() if k != PARENT_VARIABLE}
    subprocess.run(
        [*command, *arguments(study_file, config)],
        env=inherited, check=True, capture_output=True, timeout=120,
    )  # fmt: skip


def cells_of(study_file: Path, config: str) -> list[Cell]:
    return [c for c in load_cells(load_study(study_file), "A") if c.key.config == config]


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A launch judged so strictly that some of every cell is left out."""
    study_file = write_study(tmp_path_factory.mktemp("study"))
    edit(study_file, {"quiet": {**RULE, "max_factor": 1.01}}, {})
    drive(study_file)
    return study_file


def judged_again(study_file: Path) -> list[str]:
    """What is wrong with the cells of plain when they are judged again from their records."""
    ledger, study = Ledger(), load_study(study_file)
    for cell in cells_of(study_file, "plain"):
        check_judged(study, cell, ledger)
    return [claim.message for claim in ledger.claims if claim.verdict == FAIL]


def test_latencies_are_of_quiet_time_and_load_of_everything(disturbed: Path) -> None:
    for cell in cells_of(disturbed, "plain"):
        requests = measure_requests(cell)
        whole = measure_requests(cell, rule=False)
        assert requests.n_disturbed > 0
        assert requests.n + requests.n_disturbed == whole.n
        assert requests.everything.e2e_ms.tolist() == whole.e2e_ms.tolist()
        # Load is of everything; latencies are of what is left.
        assert requests.throughput_ratio == whole.throughput_ratio
        assert cell.record is not None
        assert cell.record["health"]["quiet_requests"]["value"] == requests.n
    assert judged_again(disturbed) == []


def test_the_cell_went_on_for_what_was_left_out(disturbed: Path) -> None:
    config = read_json(disturbed)["config"]["cell"]
    for cell in cells_of(disturbed, "plain"):
        assert cell.record is not None
        window = cell.record["window"]
        length_s = (window["t_stop_ns"] - window["t_warmup_end_ns"]) / 1e9
        enough = measure_requests(cell).n >= config["min_completed"] / 2
        # The quiet level settles as the cell goes on: what counted live may not count in the end.
        assert enough or length_s > config["floor_s"] + 0.05


def test_too_little_quiet_time_voids_the_cell(tmp_path: Path) -> None:
    study_file = write_study(tmp_path)
    # A chunk ends at the first sample after 100 ms and so holds two at most, however late the
    # watcher is woken: nobody saw that it was quiet.
    rule = {**RULE, "interval_ms": 1000, "max_factor": 1.01, "min_quiet_share": 1.0}
    edit(study_file, {"quiet": rule, "cell": {"cap_s": 1.0}}, {})
    drive(study_file)
    for cell in cells_of(study_file, "plain"):
        assert cell.status == "void"
        assert "machine disturbed: too few requests in quiet time" in str(cell.reason)


def levels_of(study_file: Path, config: str, block: int = 0) -> list[dict[str, float]]:
    """The quiet level of each attempt of a launch of Phase A."""
    folder = Launch(config, block, "A").folder(study_file.parent)
    return [attempt["quiet_level"] for attempt in read_json(folder / "attempts.json")]


def test_the_first_launch_of_a_block_has_a_level_of_its_own(tmp_path: Path) -> None:
    study_file = write_study(tmp_path)
    edit(study_file, {"validity": {"max_idle_memory_factor": 1.5}}, {})
    attempts = [{"attempt": 1, "quiet_level": {"memory_ns": 0.5, "compute_ns": 1.0, "looks": 2}}]
    # Of Phase B of the block: none of A's.
    write_json(Launch("noop_connector", 0, "B").folder(tmp_path) / "attempts.json", attempts)
    drive(study_file)
    (own,) = levels_of(study_file, "plain")
    assert own["memory_ns"] > 0.5


def test_a_machine_slower_than_the_level_of_the_blocks_first_launch_voids_the_cell(
    tmp_path: Path,
) -> None:
    study_file = write_study(tmp_path)
    edit(study_file, {"validity": {"max_idle_memory_factor": 1.5}}, {})
    level = {"memory_ns": 0.5, "compute_ns": 1.0, "looks": 2}
    first = Launch("noop_connector", 0, "A").folder(tmp_path) / "attempts.json"
    write_json(first, [{"attempt": 1, "quiet_level": level}])
    drive(study_file)
    assert levels_of(study_file, "plain") == [level]
    for cell in cells_of(study_file, "plain"):
        assert "slower than the quiet level, server idle" in str(cell.reason)
    assert judged_again(study_file) == []


@pytest.mark.long
def test_busy_neighbours_on_the_servers_cores_void_the_cells(tmp_path: Path) -> None:
    study_file = write_study(tmp_path)
    edit(study_file, {"validity": {"max_foreign_cpu": 0.1}}, {})
    plan = affinity_plan(read_json(study_file))
    if not plan.enabled:
        pytest.skip("on a single core nothing is pinned")
    busy = [
        subprocess.Popen(["taskset", "-c", str(cpu), sys.executable, "-c", "while True: pass"])
        for cpu in plan.server
    ]
    try:
        drive(study_file)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    cells = cells_of(study_file, "plain")
    assert {cell.status for cell in cells} == {"void"}
    for cell in cells:
        assert "other processes used the server's CPUs: foreign_cpu_server" in str(cell.reason)
    assert judged_again(study_file) == []


@pytest.fixture
def throttled_group() -> Iterator[Path]:
    """A control group that gets 15% of one CPU, in periods of 20 ms."""
    # Where version 1 is mounted, /sys/fs/cgroup is a folder like any other.
    if Path("/sys/fs/cgroup/cgroup.controllers").exists():
        base, quota = Path("/sys/fs/cgroup"), {"cpu.max": "3000 20000"}
    else:
        base, quota = (
            Path("/sys/fs/cgroup/cpu"),
            {"cpu.cfs_period_us": "20000", "cpu.cfs_quota_us": "3000"},
        )
    group = base / f"connector_tax_test_{os.getpid()}"
    try:
        group.mkdir()
        for name, value in quota.items():
            (group / name).write_text(value)
    except OSError:
        if group.is_dir():
            group.rmdir()
        pytest.skip("making a control group with a CPU quota needs root and the cpu controller")
    yield group
    for _ in range(100):
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.05)


@pytest.mark.long
def test_a_control_group_out_of_quota_voids_the_cells(
    tmp_path: Path, throttled_group: Path
) -> None:
    study_file = write_study(tmp_path)
    command = [sys.executable, "-m", "connector_tax.study.launch", *arguments(study_file)]
    inherited = {k: v for k, v in os.environ.items() if k != PARENT_VARIABLE}
    join = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(throttled_group)]
    subprocess.run([*join, *command], env=inherited, check=True, capture_output=True, timeout=280)
    for cell in cells_of(study_file, "plain"):
        assert cell.status == "void"
        assert "the control group's CPU quota was used up: throttled_periods" in str(cell.reason)
    assert judged_again(study_file) == []


def test_a_cell_without_its_machine_file_fails_the_audit(disturbed: Path, tmp_path: Path) -> None:
    study_file = shutil.copytree(disturbed.parent, tmp_path / "copy") / "study.json"
    folder = launch_folder(study_file)
    index = read_json(folder / "index.json")
    name = index["cells"][0]["cell"]
    (folder / name / f"machine_A_{name}.jsonl").unlink()
    assert any("health.quiet_requests" in message for message in judged_again(study_file))


@pytest.mark.long
def test_a_server_that_streams_through_memory_is_not_judged_by_it(tmp_path: Path) -> None:
    study_file = write_study(tmp_path)
    edit(
        study_file,
        {
            "quiet": {"interval_ms": 40, "chunk_ms": 500, "max_factor": 1.3},
            "cell": {"floor_s": 4.0, "cap_s": 8.0, "min_completed": 60},
        },
        {"noop_connector": {"stream_mib_per_step": 16, "build_meta_us": 800.0}},
    )
    logs: dict[float | None, dict[str, list[float]]] = {f: {} for f in (None, 1.3, 1.02)}
    left_out = 0
    for config in ("plain", "noop_connector"):
        drive(study_file, config)
        cells = cells_of(study_file, config)
        assert all(cell.status == "valid" for cell in cells)
        # At its own level its traffic is the usual thing, whatever it is.
        assert all(measure_requests(c).n > measure_requests(c).n_disturbed for c in cells)
        for factor, medians in logs.items():
            kept = [tpot_by_rule(cell, factor) for cell in cells]
            medians[config] = [float(np.log(np.median(values))) for values in kept]
            if factor == 1.02:
                whole = [measure_requests(cell, rule=False).n for cell in cells]
                left_out += sum(whole) - sum(map(len, kept))
    taxes = {f: np.subtract(m["noop_connector"], m["plain"]) for f, m in logs.items()}
    # The tax is about a quarter; no factor moves it by a thirtieth, also where much is left out.
    assert left_out > 0
    assert (taxes[None] > 0.1).all()
    for factor in (1.3, 1.02):
        assert np.abs(taxes[factor] - taxes[None]).max() < 0.03


def tpot_by_rule(cell: Cell, factor: float | None) -> Any:
    """TPOT in ms of the successes that a rule with this factor keeps."""
    whole = measure_requests(cell, rule=False)
    machine = measure_machine(cell)
    assert cell.record is not None
    assert machine is not None
    start = cell.record["window"]["t_warmup_end_ns"] + np.round(whole.since_warmup_s * 1e9)
    ends = start + np.round(whole.e2e_ms * 1e6)
    rule = cell.record["quiet"]["rule"] | {"max_factor": factor, "max_chunk_steal": None}
    kept = undisturbed(machine.chunks(rule), start.astype(np.int64), ends.astype(np.int64))
    return whole.tpot_ms[kept]


def test_the_third_void_cell_for_the_machines_sake_is_said_at_once(tmp_path: Path) -> None:
    """Two cells, each measured twice: four void measurements, and one line about them."""
    study_file = write_study(tmp_path)
    edit(study_file, {"validity": {"max_foreign_cpu": -1.0}}, {})
    with burning():
        drive(study_file)
    log = (study_file.parent / "logs" / "plain.block0.A.log").read_text().splitlines()
    (said,) = (number for number, line in enumerate(log) if "3 of the last 10 cells" in line)
    assert sum(" VOID: " in line for line in log[:said]) == 3
    assert "machine disturbed: other processes used the server's CPUs; " in log[said]
    assert f"connector-tax remeasure {study_file.parent}" in log[said]
    # Others may be busier; that it is found among all is the next test's.
    assert re.search(r"; \S.* \(process \d+\) used \d\.\d\d CPUs\. ", log[said])


def test_the_busiest_process_of_others_is_named() -> None:
    with burning() as hog:
        before = every_cpu_ms()
        process = psutil.Process(hog.pid)
        used_s = sum(process.cpu_times()[:2])
        began = time.monotonic()
        while sum(process.cpu_times()[:2]) < used_s + 0.2:
            time.sleep(0.01)
        seconds = time.monotonic() - began
        # Tests that run beside this one start processes of their own in the meantime.
        own = (before.keys() | every_cpu_ms().keys()) - {hog.pid}
        said = busiest_other(before, own, seconds)
        assert said is not None
        assert f"{process.name()} (process {hog.pid}) used " in said
        assert busiest_other(every_cpu_ms(), own, 1000.0) is None


@contextlib.contextmanager
def burning() -> Iterator[subprocess.Popen[bytes]]:
    """A process that uses all that others leave of a CPU."""
    hog = subprocess.Popen(["nice", "-n", "19", sys.executable, "-c", "while True: pass"])
    try:
        yield hog
    finally:
        hog.kill()
        hog.wait()

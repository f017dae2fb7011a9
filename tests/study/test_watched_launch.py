"""Test launches on a watched machine: which disturbances void cells, and who is named."""

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from connector_tax.artifacts.folder import CellFolder, StudyFolder
from connector_tax.artifacts.study_file import load_study
from connector_tax.files import read_json, write_json
from connector_tax.provenance.claims import FAIL, Ledger
from connector_tax.provenance.records import Records, check_cell
from connector_tax.study.processes import busiest_other, every_cpu_ms
from connector_tax.study.server_command import affinity_plan
from tests.study.driving import drive, launch_folder

pytestmark = pytest.mark.workflow


def edit(study_file: Path, changes: dict[str, Any]) -> None:
    """Change study.json before anything is measured."""
    study = read_json(study_file)
    for section, values in changes.items():
        study["config"][section] |= values
    write_json(study_file, study)


def measured(study_file: Path, *prefix: str) -> list[CellFolder]:
    """Measure plain's Phase A and return its cells."""
    done = drive(study_file, None, *prefix)
    assert done.returncode == 0, done.stdout
    return cells_of(study_file)


def cells_of(study_file: Path) -> list[CellFolder]:
    return [c for c in StudyFolder.load(study_file).cells("A") if c.key.config == "plain"]


def judged_again(study_file: Path) -> list[str]:
    """Return the problems of plain's cells when they are judged again from their records."""
    ledger, study = Ledger(), load_study(study_file)
    for cell in cells_of(study_file):
        check_cell(Records(study, cell), ledger)
    return [claim.message for claim in ledger.claims if claim.verdict == FAIL]


@pytest.mark.long
def test_busy_neighbours_on_the_servers_cores_void_the_cells(study_file: Path) -> None:
    edit(study_file, {"validity": {"max_foreign_cpu": 0.1}})
    plan = affinity_plan(read_json(study_file))
    if not plan.enabled:
        pytest.skip("on a single core nothing is pinned")
    busy = [
        subprocess.Popen(["taskset", "-c", str(cpu), sys.executable, "-c", "while True: pass"])
        for cpu in plan.server
    ]
    try:
        cells = measured(study_file)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert {cell.status for cell in cells} == {"void"}
    for cell in cells:
        assert "other processes used the server's CPUs: foreign_cpu_server" in str(cell.reason)
    assert judged_again(study_file) == []


@pytest.fixture
def throttled_group() -> Iterator[Path]:
    """Yield a control group that gets 15% of one CPU, in periods of 20 ms."""
    # Only with version 2 does /sys/fs/cgroup itself have this file.
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
def test_exhausted_cpu_quota_voids_the_cells(study_file: Path, throttled_group: Path) -> None:
    join = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(throttled_group)]
    for cell in measured(study_file, *join):
        assert cell.status == "void"
        assert "the control group's CPU quota was used up: throttled_periods" in str(cell.reason)
    assert judged_again(study_file) == []


def test_a_cell_without_its_machine_file_fails_the_audit(study_file: Path) -> None:
    measured(study_file)
    assert judged_again(study_file) == []
    folder = launch_folder(study_file)
    name = read_json(folder / "index.json")["cells"][0]["cell"]
    (folder / name / f"machine_A_{name}.jsonl").unlink()
    assert any("health.foreign_cpu_server" in message for message in judged_again(study_file))


def test_message_of_a_cell_void_by_the_machine_names_the_disturbing_process(
    study_file: Path,
) -> None:
    edit(study_file, {"validity": {"max_foreign_cpu": -1.0}})
    with burning():
        measured(study_file)
    log = (study_file.parent / "logs" / "plain.block0.A.log").read_text().splitlines()
    void_lines = [line for line in log if " VOID: " in line]
    # Two cells, each measured twice.
    assert len(void_lines) == 4
    assert log[-1].endswith("no cell is valid, and every tax is a comparison with this launch")
    for line in void_lines:
        assert "other processes used the server's CPUs: foreign_cpu_server" in line
        # Another process may be busier; the next test checks that the right one is named.
        assert re.search(
            r"; \S.* \(process \d+\) used \d+\.\d\d CPUs(; the host took \d+% .*)?$", line
        )


def test_busiest_foreign_process_is_named() -> None:
    with burning() as hog:
        before = every_cpu_ms()
        process = psutil.Process(hog.pid)
        used_s = sum(process.cpu_times()[:2])
        began = time.monotonic()
        while sum(process.cpu_times()[:2]) < used_s + 0.2:
            time.sleep(0.01)
        seconds = time.monotonic() - began
        # Processes that other tests start in the meantime are excluded.
        own = (before.keys() | every_cpu_ms().keys()) - {hog.pid}
        message = busiest_other(before, own, seconds)
        assert message is not None
        assert f"{process.name()} (process {hog.pid}) used " in message
        assert busiest_other(every_cpu_ms(), own, 1000.0) is None


@contextlib.contextmanager
def burning() -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that uses all that others leave of a CPU."""
    hog = subprocess.Popen(["nice", "-n", "19", sys.executable, "-c", "while True: pass"])
    try:
        yield hog
    finally:
        hog.kill()
        hog.wait()

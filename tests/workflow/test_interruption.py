"""Killed or interrupted: finished cells stay, nothing else, the next run completes."""

import os
import signal
from pathlib import Path

import pytest

from connector_tax.files import read_json, sha256_file
from tests.workflow.harness import gone, kill_tree, prepare, run, start, wait_for
from tests.workflow.small import smaller

pytestmark = [pytest.mark.workflow, pytest.mark.timeout(300)]
TARGET = "results/tiny/reference_rates.json"
# Of Phase A: plain, noop_connector, plain_2; two rates; the files of a cell.
LAUNCHES, CELLS, FILES = 3, 2, 5


def finished(folder: Path) -> dict[str, tuple[str, int]]:
    """Hash and modification time of every file of a finished Phase A cell."""
    return {
        str(path.relative_to(folder)): (sha256_file(path), path.stat().st_mtime_ns)
        for path in folder.glob("results/tiny/runs/*/block0/A/r[0-9]*/*")
        if path.parent.suffix == ""
    }


def in_second_launch(folder: Path) -> bool:
    """One launch is done, the next has a finished cell and is measuring another."""
    done = list(folder.glob("results/tiny/runs/*/block0/A/index.json"))
    partial = list(folder.glob("results/tiny/runs/*/block0/A/*.partial/metrics_*"))
    fresh = [p for p in partial if not (p.parents[1] / "index.json").exists()]
    return bool(done) and any(list(p.parents[1].glob("r*/cell_*.json")) for p in fresh)


def assert_complete(folder: Path, before: dict[str, tuple[str, int]]) -> None:
    after = finished(folder)
    assert before.items() <= after.items()
    assert len(after) == LAUNCHES * CELLS * FILES
    for path in folder.glob("results/tiny/runs/*/block0/A/index.json"):
        assert read_json(path)["status"] == "done"
    assert not list(folder.rglob("*.partial"))
    assert gone(folder, timeout_s=5) == []


@pytest.mark.parametrize("victim", ["tree", pytest.param("snakemake", marks=pytest.mark.long)])
def test_after_a_sigkill_the_study_resumes_at_the_lost_cell(tmp_path: Path, victim: str) -> None:
    folder = prepare(tmp_path / "study", smaller)
    process = start(folder, TARGET)
    wait_for(lambda: in_second_launch(folder), process)
    if victim == "tree":
        kill_tree(process)
    else:
        process.kill()
        process.wait()
    assert gone(folder) == []
    before = finished(folder)
    assert before
    assert run(folder, TARGET, options=("--unlock",)).returncode == 0
    done = run(folder, TARGET, options=("--rerun-incomplete",))
    assert done.returncode == 0, done.stdout + done.stderr
    assert_complete(folder, before)


def test_after_ctrl_c_the_same_command_resumes(tmp_path: Path) -> None:
    folder = prepare(tmp_path / "study", smaller)
    process = start(folder, TARGET)
    wait_for(lambda: in_second_launch(folder), process)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) != 0
    assert gone(folder) == []
    before = finished(folder)
    done = run(folder, TARGET)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_complete(folder, before)

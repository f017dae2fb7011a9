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


def launches_done(folder: Path) -> int:
    return len(list(folder.glob("results/tiny/runs/*/block0/A/index.json")))


def within_launch(folder: Path, after: int) -> bool:
    """`after` launches are done, and the next has a finished cell and is measuring another."""
    partial = folder.glob("results/tiny/runs/*/block0/A/*.partial/metrics_*")
    launches = [path.parents[1] for path in partial]
    return launches_done(folder) >= after and any(
        list(launch.glob("r*/cell_*.json"))
        for launch in launches
        if not (launch / "index.json").exists()
    )


def assert_complete(folder: Path, before: dict[str, tuple[str, int]]) -> None:
    after = finished(folder)
    assert before.items() <= after.items()
    assert len(after) == LAUNCHES * CELLS * FILES
    for path in folder.glob("results/tiny/runs/*/block0/A/index.json"):
        assert read_json(path)["status"] == "done"
    assert not list(folder.rglob("*.partial"))
    assert gone(folder, timeout_s=5) == []


def test_after_ctrl_c_and_a_sigkill_the_study_resumes_at_the_lost_cell(tmp_path: Path) -> None:
    """Ctrl-C in the second launch, then SIGKILL to the whole process group in the third."""
    folder = prepare(tmp_path / "study", smaller)
    process = start(folder, TARGET)
    wait_for(lambda: within_launch(folder, after=1), process)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) != 0
    assert gone(folder) == []
    after_ctrl_c = finished(folder)
    assert after_ctrl_c
    # The same command resumes.
    process = start(folder, TARGET)
    wait_for(lambda: within_launch(folder, after=2), process)
    kill_tree(process)
    assert gone(folder) == []
    after_kill = finished(folder)
    assert after_ctrl_c.items() <= after_kill.items()
    assert len(after_kill) > len(after_ctrl_c)
    resume_after_kill(folder)
    assert_complete(folder, after_kill)


@pytest.mark.long
def test_after_a_sigkill_to_snakemake_alone_the_study_resumes(tmp_path: Path) -> None:
    folder = prepare(tmp_path / "study", smaller)
    process = start(folder, TARGET)
    wait_for(lambda: within_launch(folder, after=1), process)
    process.kill()
    process.wait()
    assert gone(folder) == []
    before = finished(folder)
    assert before
    resume_after_kill(folder)
    assert_complete(folder, before)


def resume_after_kill(folder: Path) -> None:
    assert run(folder, TARGET, options=("--unlock",)).returncode == 0
    done = run(folder, TARGET, options=("--rerun-incomplete",))
    assert done.returncode == 0, done.stdout + done.stderr

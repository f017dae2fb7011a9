"""Test SIGKILL to the whole process group at 20 seeded moments spread over the study.

Each time the same command completes the study; what was finished stays byte for byte.
"""

import json
import random
import time
from pathlib import Path

import psutil
import pytest

from tests.workflow.harness import (
    complete_after_kill,
    finished,
    gone,
    kill_tree,
    prepare,
    run,
    smaller,
    start,
    temporary_folder,
)

pytestmark = [pytest.mark.workflow, pytest.mark.long, pytest.mark.timeout(600)]
SEED = 20260607
MOMENTS = 20
RUNS_TO_CATCH = 3


@pytest.fixture(scope="module")
def duration_s(tmp_path_factory: pytest.TempPathFactory) -> float:
    """Return the duration of the undisturbed study."""
    folder = prepare(tmp_path_factory.mktemp("undisturbed") / "study", smaller)
    started = time.monotonic()
    done = run(folder, "all")
    assert done.returncode == 0, done.stdout + done.stderr
    return time.monotonic() - started


def listening(results: Path) -> list[int]:
    """Return the ports of the study's launches on which a process still listens."""
    ports = {
        attempt.get("port")
        for path in results.glob("runs/*/block*/*/attempts.json")
        for attempt in json.loads(path.read_text())
    }
    connections = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    return [port for c in connections for port in c.laddr[1:2] if port in ports]


@pytest.mark.parametrize("moment", range(MOMENTS))
def test_study_completes_after_a_kill_at_any_moment(
    tmp_path: Path, duration_s: float, moment: int
) -> None:
    # Not up to the end, since durations differ between runs.
    share = 0.9 * (moment + random.Random(f"{SEED}/{moment}").random()) / MOMENTS
    for number in range(RUNS_TO_CATCH):
        folder = prepare(tmp_path / f"study{number}", smaller)
        process = start(folder, "all")
        started = time.monotonic()
        while time.monotonic() < started + share * duration_s and process.poll() is None:
            time.sleep(0.005)
        if process.poll() is None:
            break
        # The machine is faster now than during the undisturbed run.
        duration_s = time.monotonic() - started
    print(f"killed after {share * duration_s:.2f} s of about {duration_s:.1f} s")
    assert process.poll() is None, "every study was complete before the kill"
    results = folder / "results" / "tiny"
    kill_tree(process)
    assert gone(folder) == []
    assert listening(results) == []
    before = finished(results)

    complete_after_kill(folder)
    assert before.items() <= finished(results).items()
    assert (results / "patch" / "revert_status.json").exists()
    for path in results.rglob("*.json"):
        json.loads(path.read_text())
    # Snakemake leaves its own temporary folder, empty, when it is killed.
    assert [path for path in temporary_folder(folder).rglob("*") if path.is_file()] == []
    assert gone(folder, timeout_s=5) == []
    assert listening(results) == []
    assert "Nothing to be done" in (again := run(folder, "all")).stdout + again.stderr

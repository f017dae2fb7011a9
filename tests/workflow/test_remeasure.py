"""Nothing is measured again silently, and nothing that was measured is ever deleted.

One small study, up to its reference rates; then forced, in part and with a changed design.
"""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from connector_tax.files import read_json, sha256_file
from tests.workflow.harness import gone, prepare, run, start, wait_for
from tests.workflow.small import smaller

pytestmark = [pytest.mark.workflow, pytest.mark.timeout(300)]
PLAIN_A = "results/tiny/runs/plain/block0/A/index.json"


def two_launches(text: str) -> str:
    assert "plain_launches: 2" in text
    return smaller(text).replace("plain_launches: 2", "plain_launches: 1")


def hashes(folder: Path) -> dict[str, str]:
    return {p.name: sha256_file(p) for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of two launches in Phase A, measured."""
    folder = prepare(tmp_path_factory.mktemp("remeasure") / "study", two_launches)
    done = run(folder, PLAIN_A)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def text_of(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout + done.stderr


def test_a_forced_launch_is_measured_again_and_the_old_one_kept(folder: Path) -> None:
    launch = (folder / PLAIN_A).parent
    old = {cell: hashes(launch / cell) for cell in ("r20", "r40")}
    done = run(folder, PLAIN_A, options=("--forcerun", PLAIN_A))
    assert done.returncode == 0, text_of(done)
    assert "measured again on request; the old launch is kept in" in text_of(done)
    aside = launch.with_name("A.superseded1")
    for cell, files in old.items():
        assert hashes(aside / cell) == files
        assert hashes(launch / cell) != files
    assert read_json(launch / "index.json")["status"] == "done"
    (attempt,) = read_json(launch / "attempts.json")
    assert attempt["supersedes"] == "A.superseded1"


def test_without_force_nothing_is_measured_again(folder: Path) -> None:
    launch = (folder / PLAIN_A).parent
    before = hashes(launch)
    done = run(folder, PLAIN_A)
    assert "Nothing to be done" in text_of(done)
    (launch / "index.json").unlink()
    done = run(folder, PLAIN_A)
    assert done.returncode == 0
    assert "is there and intact; kept" in text_of(done)
    after = hashes(launch)
    assert {n: h for n, h in after.items() if n != "index.json"} == {
        n: h for n, h in before.items() if n != "index.json"
    }


def test_a_changed_design_is_refused_with_every_way_out(folder: Path) -> None:
    text = (folder / "study.yaml").read_text()
    try:
        (folder / "study.yaml").write_text(text.replace("floor_s: 0.6", "floor_s: 0.7"))
        refused = run(folder, PLAIN_A)
        partly = run(folder, PLAIN_A, options=("--forcerun", "phase_a"))
    finally:
        (folder / "study.yaml").write_text(text)
    for done in (refused, partly):
        assert done.returncode != 0
        assert "cell.floor_s: 0.6 -> 0.7" in text_of(done)
        assert "its own name (key `study`)" in text_of(done)
        assert "the old launches moved aside and kept: --forceall" in text_of(done)
    assert read_json(folder / "results/tiny/study.json")["config"]["cell"]["floor_s"] == 0.6


def test_forcing_what_snakemake_would_drop_is_refused(folder: Path) -> None:
    before = hashes((folder / PLAIN_A).parent)
    done = run(folder, PLAIN_A, options=("--forcerun", "preflight", PLAIN_A))
    assert done.returncode != 0
    assert "--forcerun: found preflight, phase_a; allowed: one of them at a time" in text_of(done)
    assert hashes((folder / PLAIN_A).parent) == before


def test_a_forced_new_design_moves_the_old_launch_aside(folder: Path) -> None:
    launch = (folder / PLAIN_A).parent
    old = {cell: hashes(launch / cell) for cell in ("r20", "r40")}
    text = (folder / "study.yaml").read_text()
    (folder / "study.yaml").write_text(text.replace("floor_s: 0.6", "floor_s: 0.7"))
    done = run(folder, PLAIN_A, options=("--forceall",))
    assert done.returncode == 0, text_of(done)
    asides = sorted(launch.parent.glob("A.superseded*"))
    assert {cell: hashes(asides[-1] / cell) for cell in old} == old
    results = folder / "results" / "tiny"
    assert read_json(results / "study.superseded1.json")["config"]["cell"]["floor_s"] == 0.6
    assert read_json(results / "study.json")["config"]["cell"]["floor_s"] == 0.7
    index = read_json(launch / "index.json")
    assert index["depends"]["design_sha256"] == read_json(results / "study.json")["design_sha256"]


def test_two_studies_at_once_in_one_folder_are_refused(folder: Path) -> None:
    (folder / PLAIN_A).unlink()
    first = start(folder, PLAIN_A)
    wait_for(lambda: any((folder / ".snakemake/locks").glob("*")), first)
    # Held with all it has started: it keeps the lock, and has no output yet, however long the
    # second takes to start.
    os.killpg(first.pid, signal.SIGSTOP)
    second = run(folder, PLAIN_A)
    os.killpg(first.pid, signal.SIGCONT)
    assert second.returncode != 0
    assert "cannot be locked" in text_of(second)
    assert first.wait(timeout=60) == 0
    assert gone(folder, timeout_s=5) == []

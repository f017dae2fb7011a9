"""Nothing is measured again silently, and nothing that was measured is ever deleted.

One small study's Phase A; then measured again, in part and with a changed design.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from connector_tax.files import read_json, sha256_file, write_json
from tests.workflow.harness import gone, prepare, run, start, wait_for
from tests.workflow.small import smaller

pytestmark = [pytest.mark.workflow, pytest.mark.timeout(300)]
PLAIN_A = "results/tiny/runs/plain/block0/A/index.json"
RATES = "results/tiny/reference_rates.json"


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


def remeasure(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a study's folder."""
    command = [sys.executable, "-m", "connector_tax", "remeasure", "results/tiny", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)


def make_void(launch: Path, cell: str) -> None:
    """Say of a valid cell that other processes used the server's CPUs."""
    record = launch / cell / f"cell_A_{cell}.json"
    content = read_json(record)
    check = content["health"]["foreign_cpu_server"]
    check |= {"value": 1.0, "bound": 0.1, "pass": False}
    write_json(record, content | {"valid": False, "void_reasons": ["machine disturbed"]})
    index = read_json(launch / "index.json")
    entry = next(entry for entry in index["cells"] if entry["cell"] == cell)
    entry |= {"status": "void", "reason": "machine disturbed"}
    entry["files"][record.name] = sha256_file(record)
    write_json(launch / "index.json", index)


def test_a_launch_with_a_void_cell_is_measured_again_and_the_old_one_kept(folder: Path) -> None:
    launch = (folder / PLAIN_A).parent
    make_void(launch, "r20")
    old = {cell: hashes(launch / cell) for cell in ("r20", "r40")}
    done = remeasure(folder)
    assert done.returncode == 0, text_of(done)
    assert done.stdout.endswith(
        "results/tiny: 1 launches moved aside and kept; the study's own command measures them\n"
    )
    aside = launch.with_name("A.superseded1")
    assert {cell: hashes(aside / cell) for cell in old} == old
    done = run(folder, PLAIN_A)
    assert done.returncode == 0, text_of(done)
    assert {cell: hashes(aside / cell) for cell in old} == old
    assert all(hashes(launch / cell) != files for cell, files in old.items())
    assert read_json(launch / "index.json")["status"] == "done"
    (attempt,) = read_json(launch / "attempts.json")
    assert attempt["supersedes"] == "A.superseded1"
    # The other launch of the block stands as it was.
    assert not list(folder.glob("results/tiny/runs/noop_connector/block0/A.superseded*"))


def test_nothing_is_moved_where_nothing_is_void(folder: Path) -> None:
    before = sorted(folder.glob("results/tiny/runs/*/*/*"))
    done = remeasure(folder)
    assert done.returncode == 0, text_of(done)
    assert done.stdout.endswith("0 launches moved aside and kept; nothing to measure\n")
    assert sorted(folder.glob("results/tiny/runs/*/*/*")) == before


def test_a_launch_that_is_not_the_studys_is_refused(folder: Path) -> None:
    done = remeasure(folder, "--launch", "plain/block7/A")
    assert done.returncode == 2
    assert "--launch: found plain/block7/A; allowed: <name>/block<k>/<phase>" in done.stderr


def test_unasked_nothing_is_measured_again(folder: Path) -> None:
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


def cut(launch: Path, cell: str) -> None:
    """Cut a finished cell's requests file short."""
    path = launch / cell / f"requests_A_{cell}.jsonl"
    path.chmod(0o644)
    os.truncate(path, path.stat().st_size // 2)


def test_a_cell_that_was_cut_short_is_measured_again_by_the_same_command(folder: Path) -> None:
    launch = (folder / PLAIN_A).parent
    kept = hashes(launch / "r40")
    cut(launch, "r20")
    done = run(folder, RATES)
    assert done.returncode != 0
    # Whatever finds it first, the end of the run names it and says what happens to it.
    assert (
        "DAMAGED plain/block0/A: results/tiny/runs/plain/block0/A/r20/requests_A_r20.jsonl is "
        "missing or not what index.json says; what is damaged is measured again by the same command"
    ) in text_of(done)
    done = run(folder, RATES)
    assert done.returncode == 0, text_of(done)
    assert (launch / "r20.damaged1").is_dir()
    assert hashes(launch / "r40") == kept


def test_a_cell_that_is_cut_short_before_its_launch_ends_is_named_too(folder: Path) -> None:
    launch = (folder / PLAIN_A).parent
    (launch / "index.json").unlink()
    (launch / "r40").rename(launch / "r40.away1")
    process = start(folder, PLAIN_A)
    wait_for(lambda: any(launch.glob("r40.partial/metrics_*")), process)
    cut(launch, "r20")
    assert process.wait(timeout=60) != 0
    said = "requests_A_r20.jsonl: missing or changed since it was measured; the same command"
    assert said in (folder / "snakemake.log").read_text()
    done = run(folder, PLAIN_A)
    assert done.returncode == 0, text_of(done)
    assert read_json(launch / "index.json")["status"] == "done"


def test_a_changed_design_is_refused_with_every_way_out(folder: Path) -> None:
    text = (folder / "study.yaml").read_text()
    try:
        (folder / "study.yaml").write_text(text.replace("floor_s: 0.6", "floor_s: 0.7"))
        refused = run(folder, PLAIN_A)
    finally:
        (folder / "study.yaml").write_text(text)
    assert refused.returncode != 0
    assert "cell.floor_s: 0.6 -> 0.7" in text_of(refused)
    assert "its own name (key `study`)" in text_of(refused)
    assert "connector-tax remeasure results/tiny --all" in text_of(refused)
    assert read_json(folder / "results/tiny/study.json")["config"]["cell"]["floor_s"] == 0.6


def test_a_new_design_is_measured_when_all_of_the_old_one_is_aside(folder: Path) -> None:
    launch = (folder / PLAIN_A).parent
    old = {cell: hashes(launch / cell) for cell in ("r20", "r40")}
    text = (folder / "study.yaml").read_text()
    (folder / "study.yaml").write_text(text.replace("floor_s: 0.6", "floor_s: 0.7"))
    done = remeasure(folder, "--all")
    assert done.returncode == 0, text_of(done)
    done = run(folder, PLAIN_A)
    assert done.returncode == 0, text_of(done)
    asides = sorted(launch.parent.glob("A.superseded*"))
    assert {cell: hashes(asides[-1] / cell) for cell in old} == old
    results = folder / "results" / "tiny"
    assert (results / "preflight.superseded1" / "preflight_status.json").exists()
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
    moved = remeasure(folder, "--all")
    os.killpg(first.pid, signal.SIGCONT)
    assert second.returncode != 0
    assert "cannot be locked" in text_of(second)
    assert moved.returncode == 2
    assert "results/tiny: found a run that holds it" in moved.stderr
    assert first.wait(timeout=60) == 0
    assert gone(folder, timeout_s=5) == []

"""Test interrupted, killed, failed and damaged launches: the same command completes the study.

One small study's Phase A, whose first run ends by Ctrl-C and whose second is killed; its tests use
it one after the other.
"""

import functools
import os
import signal
import subprocess
import sys
import warnings
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from connector_tax.artifacts.index import launch_index, write_index
from connector_tax.artifacts.names import Launch
from connector_tax.artifacts.study_file import read_study
from connector_tax.files import read_json, sha256_below, sha256_file, write_json
from connector_tax.study.design import cell_order
from tests.workflow.harness import (
    ended,
    finished,
    gone,
    kill_tree,
    of_this_study,
    prepare,
    resume_after_kill,
    run,
    smaller,
    start,
    wait_for,
)

pytestmark = [pytest.mark.workflow, pytest.mark.timeout(300)]
RESULTS = "results/tiny"
PLAIN_A = f"{RESULTS}/runs/plain/block0/A/index.json"
BOTH_A = (PLAIN_A, f"{RESULTS}/runs/noop_connector/block0/A/index.json")
RATES = f"{RESULTS}/reference_rates.json"
SHAPE_RATES = "\nshape_rates: {max_share: 0.4, probe_s: 1}\n"
# Of Phase A: plain, noop_connector; two rates; the files of a cell.
LAUNCHES, CELLS, FILES = 2, 2, 5
NOOP_A = Launch("noop_connector", 0, "A")
State = dict[str, tuple[str, int]]


def two_launches(text: str) -> str:
    assert "plain_launches: 2" in text
    return smaller(text).replace("plain_launches: 2", "plain_launches: 1")


def within_launch(folder: Path, after: int) -> bool:
    """Return whether `after` launches are done, and the next one is measuring its second cell."""
    partial = folder.glob("results/tiny/runs/*/block0/A/*.partial/metrics_*")
    launches = [path.parents[1] for path in partial]
    done = list(folder.glob("results/tiny/runs/*/block0/A/index.json"))
    return len(done) >= after and any(
        # On a busy machine a cell may be void and stand aside while it is measured again.
        any(not path.parent.suffix for path in launch.glob("r*/cell_*.json"))
        for launch in launches
        if not (launch / "index.json").exists()
    )


def assert_complete(folder: Path, before: State) -> None:
    after = finished(folder / RESULTS)
    assert before.items() <= after.items()
    assert len(after) == LAUNCHES * CELLS * FILES
    for path in folder.glob("results/tiny/runs/*/block0/A/index.json"):
        assert read_json(path)["status"] == "done"
    assert not list(folder.rglob("*.partial"))
    assert gone(folder, timeout_s=5) == []


def text_of(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout + done.stderr


def hashes(folder: Path) -> dict[str, str]:
    return {p.name: sha256_file(p) for p in folder.rglob("*") if p.is_file()}


def void_cells(folder: Path) -> dict[str, list[str]]:
    """Return each void cell of Phase A, and why."""
    records = folder.glob("results/tiny/runs/*/block0/A/r??/cell_*.json")
    return {str(p): c["void_reasons"] for p in records if not (c := read_json(p))["valid"]}


@dataclass
class Interrupted:
    """A study whose Phase A is measured, with its finished cells after each interruption."""

    folder: Path
    after_ctrl_c: State
    after_kill: State


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    """Press Ctrl-C in the second launch, then send SIGKILL to the whole process group."""
    folder = prepare(tmp_path_factory.mktemp("interrupted") / "study", two_launches)
    process = start(folder, PLAIN_A)
    wait_for(lambda: within_launch(folder, after=1), process)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) != 0
    assert gone(folder) == []
    assert "Traceback" not in (folder / "snakemake.log").read_text()
    after_ctrl_c = finished(folder / RESULTS)
    # The same command resumes.
    process = start(folder, PLAIN_A)
    wait_for(lambda: within_launch(folder, after=1), process)
    kill_tree(process)
    assert gone(folder) == []
    after_kill = finished(folder / RESULTS)
    resume_after_kill(folder, PLAIN_A)
    return Interrupted(folder, after_ctrl_c, after_kill)


@pytest.fixture
def folder(interrupted: Interrupted) -> Path:
    """Return the study with every Phase A cell valid, since an earlier test may have voided one."""
    folder = interrupted.folder
    for _ in range(3):
        if void := void_cells(folder):
            # Shown though nothing fails: what voids cells of so small a study is worth knowing.
            warnings.warn(f"measured again: {void}", stacklevel=1)
            assert remeasure(folder).returncode == 0
            done = run(folder, *BOTH_A)
            assert done.returncode == 0, text_of(done)
    assert void_cells(folder) == {}
    assert all((folder / index).exists() for index in BOTH_A)
    return folder


def test_study_resumes_at_the_lost_cell_after_ctrl_c_and_sigkill(
    interrupted: Interrupted,
) -> None:
    # The first launch and a cell of the second.
    assert len(interrupted.after_ctrl_c) == (CELLS + 1) * FILES
    assert interrupted.after_kill == interrupted.after_ctrl_c
    assert_complete(interrupted.folder, interrupted.after_kill)


@pytest.mark.long
def test_study_resumes_after_a_sigkill_to_snakemake_alone(tmp_path: Path) -> None:
    folder = prepare(tmp_path / "study", two_launches)
    process = start(folder, RATES)
    wait_for(lambda: within_launch(folder, after=1), process)
    process.kill()
    process.wait()
    assert gone(folder) == []
    before = finished(folder / RESULTS)
    assert before
    resume_after_kill(folder, RATES)
    assert_complete(folder, before)


# ---- nothing is measured again silently, and nothing that was measured is ever deleted


def remeasure(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a study's folder."""
    command = [sys.executable, "-m", "connector_tax", "remeasure", "results/tiny", *options]
    return ended(command, folder)


def make_void(launch: Path, cell: str) -> None:
    """Make a valid cell void: other processes used the server's CPUs."""
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


def test_resumed_run_continues_after_a_rule_killed_once_it_wrote_its_file(tmp_path: Path) -> None:
    folder = prepare(tmp_path / "study", lambda text: two_launches(text) + SHAPE_RATES)
    rates = f"{RESULTS}/preflight/shape_rates.json"
    assert run(folder, rates).returncode == 0
    # When a rule has ended, Snakemake turns its mark into a record.
    name = urlsafe_b64encode(rates.encode()).decode()
    (folder / ".snakemake/metadata" / name).unlink()
    (folder / ".snakemake/incomplete" / name).write_text('{"external_jobid": null}')
    assert run(folder, "all", options=("--rerun-incomplete", "-np")).returncode == 0
    assert (folder / rates).exists(), "a dry run removes nothing"
    resume_after_kill(folder)
    assert read_json(folder / RESULTS / "complete.json") == {"complete": True}


def test_launch_with_a_void_cell_is_remeasured_and_the_old_one_kept(folder: Path) -> None:
    launch = (folder / PLAIN_A).parent
    make_void(launch, "r20")
    old = {cell: hashes(launch / cell) for cell in ("r20", "r40")}
    others = set(folder.glob("results/tiny/runs/noop_connector/block0/*"))
    done = remeasure(folder)
    assert done.returncode == 0, text_of(done)
    assert done.stdout.endswith(
        "results/tiny: 1 launches moved aside and kept; rerun the study's command to measure them\n"
    )
    aside = sorted(launch.parent.glob("A.superseded*"))[-1]
    assert {cell: hashes(aside / cell) for cell in old} == old
    done = run(folder, PLAIN_A)
    assert done.returncode == 0, text_of(done)
    assert {cell: hashes(aside / cell) for cell in old} == old
    assert all(hashes(launch / cell) != files for cell, files in old.items())
    assert read_json(launch / "index.json")["status"] == "done"
    (attempt,) = read_json(launch / "attempts.json")
    assert attempt["supersedes"] == aside.name
    # The other launch of the block stands as it was.
    assert set(folder.glob("results/tiny/runs/noop_connector/block0/*")) == others


def test_remeasure_does_nothing_without_a_void_cell(folder: Path) -> None:
    before = sorted(folder.glob("results/tiny/runs/*/*/*"))
    done = remeasure(folder)
    assert done.returncode == 0, text_of(done)
    assert done.stdout.endswith("0 launches moved aside and kept; nothing to measure\n")
    assert sorted(folder.glob("results/tiny/runs/*/*/*")) == before
    assert "Nothing to be done" in text_of(run(folder, PLAIN_A))


def test_failed_audit_leaves_every_file_of_the_study_as_it_was(tmp_path: Path) -> None:
    folder = prepare(tmp_path / "study", two_launches)
    root = folder / RESULTS
    assert run(folder, f"{RESULTS}/study.json").returncode == 0
    applied = {"step_timing_available": True, "method": "probe", "reason": None, "targets": []}
    write_json(root / "patch/patch_status.json", applied)
    write_json(root / "patch/revert_status.json", {"reverted": True, "removed": ["probe.py"]})
    states = {"status": "failed", "reason": "no GPU", "started_utc": ""}
    write_index(
        NOOP_A.folder(root), launch_index(read_study(root / "study.json"), NOOP_A, [], **states)
    )
    before = sha256_below(root)
    done = run(folder, "audit")
    assert done.returncode != 0
    assert "FAIL" in text_of(done)
    after = sha256_below(root)
    assert {name: after.get(name) for name in before} == before
    assert {*after} - {*before} == {"audit.json", "logs/audit.log"}


def test_remeasuring_an_unknown_launch_is_refused(folder: Path) -> None:
    done = remeasure(folder, "--launch", "plain/block7/A")
    assert done.returncode == 2
    assert "--launch: found plain/block7/A; allowed: <name>/block<k>/<phase>" in done.stderr


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
        "missing or differs from index.json; rerun the same command to measure it again"
    ) in text_of(done)
    done = run(folder, RATES)
    assert done.returncode == 0, text_of(done)
    assert "cell r40 is already measured and intact; kept" in text_of(done)
    assert (launch / "r20.damaged1").is_dir()
    assert hashes(launch / "r40") == kept


def test_cell_cut_short_in_an_unfinished_launch_is_named(folder: Path) -> None:
    launch = (folder / PLAIN_A).parent
    (launch / "index.json").unlink()
    (launch / "r40").rename(launch / "r40.away1")
    process = start(folder, PLAIN_A)
    wait_for(lambda: any(launch.glob("r40.partial/metrics_*")), process)
    cut(launch, "r20")
    assert process.wait(timeout=60) != 0
    message = "requests_A_r20.jsonl: missing or changed since it was measured; rerun the same"
    assert message in (folder / "snakemake.log").read_text()
    done = run(folder, PLAIN_A)
    assert done.returncode == 0, text_of(done)
    assert read_json(launch / "index.json")["status"] == "done"


def test_changed_design_is_refused_with_every_remedy(folder: Path) -> None:
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


def test_new_design_is_measured_after_the_old_one_is_moved_aside(folder: Path) -> None:
    """Check that a second run and a second `remeasure` are refused meanwhile."""
    launch = (folder / PLAIN_A).parent
    old = {cell: hashes(launch / cell) for cell in ("r20", "r40")}
    text = (folder / "study.yaml").read_text()
    (folder / "study.yaml").write_text(text.replace("floor_s: 0.6", "floor_s: 0.7"))
    done = remeasure(folder, "--all")
    assert done.returncode == 0, text_of(done)
    first = start(folder, PLAIN_A)
    wait_for(lambda: any(folder.glob("results/tiny/runs/*/block0/A")), first)
    # Held with all it has started: it keeps the lock, and has no launch yet, however long the
    # second takes to start.
    os.killpg(first.pid, signal.SIGSTOP)
    second = run(folder, PLAIN_A)
    moved = remeasure(folder, "--all")
    os.killpg(first.pid, signal.SIGCONT)
    assert second.returncode != 0
    assert "cannot be locked" in text_of(second)
    assert moved.returncode == 2
    assert "results/tiny: a run holds the folder" in moved.stderr
    assert first.wait(timeout=120) == 0, (folder / "snakemake.log").read_text()
    assert gone(folder, timeout_s=5) == []
    asides = sorted(launch.parent.glob("A.superseded*"))
    assert {cell: hashes(asides[-1] / cell) for cell in old} == old
    results = folder / "results" / "tiny"
    assert (results / "preflight.superseded1" / "preflight_status.json").exists()
    assert read_json(results / "study.superseded1.json")["config"]["cell"]["floor_s"] == 0.6
    assert read_json(results / "study.json")["config"]["cell"]["floor_s"] == 0.7
    index = read_json(launch / "index.json")
    assert index["depends"]["design_sha256"] == read_json(results / "study.json")["design_sha256"]


# ---- a launch of Phase A that fails at each of its cells: no rate without it, no study is stuck


def processes(folder: Path, module: str) -> Iterator[psutil.Process]:
    """Yield the processes of the launch's driver, itself included, that run a module of the
    package.
    """
    named = {f"connector_tax.{module}"}
    driver = {"connector_tax.study.launch", NOOP_A.config, NOOP_A.phase}
    for process in of_this_study(folder):
        try:
            if driver <= {*process.cmdline()}:
                family = [process, *process.children(recursive=True)]
                yield from (member for member in family if named <= {*member.cmdline()})
        except psutil.Error:
            continue


def kill_in(folder: Path, cells: list[str], module: str, target: str = "all") -> tuple[int, str]:
    """Run the study, and kill a process of the launch in each of these cells, one per attempt.

    Returns:
        exit status and output of the run.
    """
    launch = NOOP_A.folder(folder / "results" / "tiny")
    victims: list[psutil.Process] = []

    def is_measuring(cell: str) -> bool:
        if not list(launch.glob(f"{cell}.partial/metrics_*")):
            return False
        new = [process for process in processes(folder, module) if process not in victims]
        victims.extend(new)
        return bool(new)

    process = start(folder, target)
    for cell in cells:
        wait_for(functools.partial(is_measuring, cell), process)
        victims[-1].kill()
    return process.wait(timeout=300), (folder / "snakemake.log").read_text()


def test_failed_launch_blocks_reference_rates_until_it_is_measured(
    folder: Path,
) -> None:
    results = folder / "results" / "tiny"
    assert remeasure(folder, "--launch", NOOP_A.name).returncode == 0

    def refused(status: int, output: str, why: str) -> None:
        assert status != 0
        assert why in output
        assert not (results / "reference_rates.json").exists()
        assert not list(results.glob("runs/*/block0/B"))
        assert not (NOOP_A.folder(results) / "index.json").exists()

    order = cell_order(read_study(results / "study.json"), NOOP_A)
    first, second = [cell["cell"] for cell in order]
    again = "noop_connector/block0/A failed; running it once more"
    # Killed in the first cell, and when it is run once more in the second.
    status, output = kill_in(folder, [first, second], "loadgen.worker")
    assert again in output
    refused(status, output, "not derived, since launches of Phase A failed")
    assert "  noop_connector/block0/A: " in output
    # Its driver.
    refused(*kill_in(folder, [second], "study.launch"), "Error in rule phase_a")
    # Once: the same run goes on, and derives the rates.
    status, output = kill_in(folder, [second], "loadgen.worker", RATES)
    assert status == 0, output
    assert again in output
    rates = read_json(results / "reference_rates.json")
    assert "derived_now" not in rates
    void = " ".join(void_cells(folder))
    for rate, criteria in rates["criteria"]["noop_connector"].items():
        assert criteria["n_launches"] == (f"noop_connector/block0/A/r{rate}/" not in void)
    assert gone(folder, timeout_s=5) == []

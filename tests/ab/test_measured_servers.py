"""Test dying servers, interruption by the user, and servers that were already running."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from connector_tax.artifacts.metrics import CLOSED_LOOP_METRICS
from connector_tax.artifacts.verdicts import CANNOT_TELL
from connector_tax.compare import bounds
from connector_tax.files import read_json, sha256_file
from connector_tax.provenance import verify
from connector_tax.servers.kinds import free_port
from connector_tax.study import remeasure
from tests.ab.commands import ENGINE, NO_NUMBER, SHORT, STOPPED, STOPPED_LINE, Ab
from tests.provenance.forged_archives import members_of
from tests.workflow.harness import environment, gone, server_of, wait_for

STUB = Path(__file__).with_name("stub_server.py")
pytestmark = [pytest.mark.workflow, pytest.mark.timeout(1200)]


def cells(command: Ab) -> dict[str, str]:
    """Return the hash of each record of a finished cell."""
    paths = command.results.glob("runs/*/block*/A/r20/*")
    return {str(path): sha256_file(path) for path in paths}


def test_same_command_resumes_after_a_dead_server_and_ctrl_c(
    tmp_path: Path,
) -> None:
    command, log = Ab(tmp_path), tmp_path / "log"
    launch = command.results / "runs" / "candidate" / "block0" / "A"

    def begun() -> subprocess.Popen[str]:
        with log.open("w") as stream:
            return command.start(stream)

    # The server dies, and again when its launch is run once more.
    def is_measured() -> bool:
        return any(launch.glob("*.partial/metrics_*")) and server_of(launch) is not None

    with begun() as process:
        for _ in range(2):
            wait_for(is_measured, process)
            victim = server_of(launch)
            assert victim is not None
            victim.kill()
            # Its worker process ends a moment later.
            wait_for(lambda: server_of(launch) is None, process)
    output = log.read_text()
    assert process.returncode == NO_NUMBER, output
    # A note after the first failure, and an error once the second run of the launch has failed.
    assert "note: candidate/block0/A failed: the server ended with status" in output, output
    assert "ab: candidate/block0/A failed: the server ended with status" in output, output
    assert "same command to resume there" in output
    assert gone(tmp_path, timeout_s=2) == []
    kept = cells(command)
    assert len({Path(name).parent for name in kept}) == 2, "the baseline's launches"

    # Ctrl-C in the second block, and again while the command cleans up.
    second = command.results / "runs"
    with begun() as process:
        wait_for(lambda: any(second.glob("*/block1/A/*.partial/metrics_*")), process)
        while STOPPED_LINE not in log.read_text() and process.poll() is None:
            # Sent to the whole foreground group, as a terminal does.
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.02)
    assert process.returncode == STOPPED, log.read_text()
    assert log.read_text().endswith(STOPPED_LINE)
    assert "Traceback" not in log.read_text()
    assert gone(tmp_path, timeout_s=2) == []
    assert kept.items() <= cells(command).items()
    kept = cells(command)

    # The rest is measured; then the command alone gets a signal.
    with begun() as process:
        wait_for(lambda: "making tables" in log.read_text(), process, timeout_s=550)
        process.terminate()
    assert process.returncode == STOPPED, log.read_text()
    assert kept.items() <= cells(command).items()
    indexes = [read_json(path) for path in command.results.glob("runs/*/block*/A/index.json")]
    assert [index["status"] for index in indexes] == ["done"] * 9, "three blocks of three launches"
    assert gone(tmp_path, timeout_s=2) == []


@contextlib.contextmanager
def engine(*arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Yield a running embedded engine that the test started, and its URL."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "connector_tax.engine", "--port", str(port), *arguments]
    with subprocess.Popen(command) as process:
        try:
            while process.poll() is None:
                with contextlib.suppress(httpx.HTTPError):
                    if httpx.get(f"{url}/v1/models").status_code == httpx.codes.OK:
                        break
            yield process, url
        finally:
            process.kill()


def test_baseline_that_leaves_requests_unanswered_ends_the_comparison(tmp_path: Path) -> None:
    stub = f"{sys.executable} {STUB} {{port}} silent=30"
    command = Ab(tmp_path, baseline=stub, candidate=f"{stub} same=1")
    command.command[2] = f"from connector_tax.ab import load\nload.SHORTEST_DRAIN_S = 3.0\n{SHORT}"
    done = command.run()
    assert done.returncode == NO_NUMBER, done.stdout + done.stderr
    refusal = done.stderr.splitlines()[-1]
    assert refusal.startswith("ab: --rate: found 20; "), done.stderr
    assert "requests to the baseline failed, mostly: the request was still running at" in refusal
    assert "; try --rate " in refusal
    assert " and another --name; requests: results/mine/runs/baseline" in refusal
    runs = command.results / "runs"
    assert not list(runs.glob("*/block*/A/*.void*")), "an overloaded cell is not measured again"
    measured = list(runs.glob("baseline*/block*/A/*/cell_*.json"))
    assert len(measured) == 1
    # The same command says so again, and measures nothing.
    again = command.run()
    assert again.stderr.splitlines()[-1] == refusal
    assert list(runs.glob("baseline*/block*/A/*/cell_*.json")) == measured
    assert gone(tmp_path, timeout_s=2) == []


def test_closed_loop_is_judged_on_throughput_and_its_archive_verifies(tmp_path: Path) -> None:
    dear = f"{ENGINE} --configuration nixl_both"
    more = ["--concurrency", "4", "--goodput", "ttft:5000,tpot:500", "--max", "goodput=900%"]
    done = Ab(tmp_path, "--json", *more, candidate=dear, rate="").run()
    # On a shared machine the interval may contain any bound.
    assert done.returncode in (0, bounds.STATUS[CANNOT_TELL]), done.stdout + done.stderr
    answer = json.loads(done.stdout)
    found = {finding["metric"]: finding for finding in answer["findings"]}
    assert [*found] == [*CLOSED_LOOP_METRICS, "goodput"]
    for metric in ("requests_per_s", "tokens_per_s", "goodput"):
        tax = found[metric]["base"] / found[metric]["own"] - 1
        assert found[metric]["estimate"] == pytest.approx(tax), "less is a cost"
    served = next(row for row in answer["latencies_ms"] if row["metric"] == "requests_per_s")
    value, lo, hi = served["difference"]
    assert lo < value < hi
    (tmp_path / "X").mkdir()
    archive = ["tar", "--zstd", "-xf", tmp_path / answer["archive"], "-C", tmp_path / "X"]
    subprocess.run(archive, check=True)
    verified = subprocess.run(
        [sys.executable, "-I", verify.__file__, tmp_path / "X"], stdout=subprocess.PIPE, text=True
    )
    assert verified.returncode == 0, verified.stdout[-3000:]
    assert "requests_per_s at" in verified.stdout
    # A remeasured study has a new answer and a new archive.
    assert remeasure.main([str(tmp_path / "results" / "mine"), "--phase", "A"]) == 0
    again = Ab(tmp_path, "--json", *more, candidate=dear, rate="").run()
    assert again.returncode in (0, bounds.STATUS[CANNOT_TELL]), again.stdout + again.stderr
    anew = json.loads(again.stdout)
    assert anew["findings"] != answer["findings"]
    members = {info.name for info, _ in members_of(tmp_path / anew["archive"])}
    assert "looks.superseded1.json" in members


def test_running_servers_are_compared_not_stopped_and_archived(tmp_path: Path) -> None:
    with engine() as (plain, baseline), engine("--configuration", "nixl_both") as (dear, candidate):
        done = Ab(tmp_path, "--json", baseline=baseline, candidate=f"dear={candidate}").run()
        assert done.returncode == 0, done.stdout + done.stderr
        assert plain.poll() is None
        assert dear.poll() is None
        # The answer is printed even if no archive can be written.
        (tmp_path / "results" / "archive").rename(tmp_path / "archive")
        (tmp_path / "results" / "archive").touch()
        again = Ab(tmp_path, "--json", baseline=baseline, candidate=f"dear={candidate}").run()
        (tmp_path / "results" / "archive").unlink()
        (tmp_path / "archive").rename(tmp_path / "results" / "archive")
        assert again.returncode == NO_NUMBER, again.stdout + again.stderr
        # So is the status of an answer that cannot be printed.
        command = Ab(tmp_path, "--json", baseline=baseline, candidate=f"dear={candidate}")
        with Path("/dev/full").open("w") as full:
            unread = subprocess.run(command.command, cwd=tmp_path, env=environment(tmp_path),
                                    stdout=full, stderr=subprocess.PIPE, text=True)  # fmt: skip
        assert unread.returncode == NO_NUMBER
        assert "ab: standard output: [Errno 28]" in unread.stderr
        # A reader that has read the answer may close the pipe.
        command = Ab(tmp_path, "--json", baseline=baseline, candidate=f"dear={candidate}")
        with command.start(subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.close()
            assert "BrokenPipe" not in process.stderr.read()
        assert process.returncode == 0
    answer = json.loads(done.stdout)
    assert {finding["config"] for finding in answer["findings"]} == {"dear"}
    assert json.loads(again.stdout) == {**answer, "archive": None}
    assert "ab: provenance.pack ended with status" in again.stderr
    tpot = next(f for f in answer["findings"] if f["metric"] == "tpot_p50")
    assert tpot["family_lo"] < tpot["estimate"] < tpot["family_hi"]
    study = read_json(tmp_path / "results" / answer["study"] / "study.json")
    assert study["engine_label"] == "embedded (emulated), launches not replicated"
    assert "startup_s" not in {row["resource"] for row in answer["resources"]}
    memory = next(r for r in answer["resources"] if r["resource"] == "memory_pss_mib")
    assert memory["difference"] > 1, "the memory is that of the process that waits"
    members = {info.name for info, _ in members_of(tmp_path / answer["archive"])}
    # No workflow has run, so the archive contains none.
    assert "ab.json" in members
    assert not any(name.startswith("workflow/") for name in members)
    assert gone(tmp_path, timeout_s=2) == []

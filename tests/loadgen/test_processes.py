"""Test the death of a worker or the main process: nothing hangs, spins, or is left behind."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from connector_tax.artifacts.checks import BOUNDS, generator_checks
from connector_tax.loadgen import dispatcher
from connector_tax.loadgen.generator import LoadGenerator, LoadGeneratorOptions
from connector_tax.loadgen.messages import LoadGeneratorError, Target
from connector_tax.loadgen.plan import Progress
from tests.loadgen.fault_server import FaultServer, Fin, Hang, Pause, Step, good_answer
from tests.loadgen.running import loading, run_scripts

SCRIPTS: dict[str, list[Step]] = {"good": [good_answer()], "hang": [Hang]}


def _gone(pids: list[int], timeout_s: float = 5.0) -> bool:
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    return not alive


def _kill_once(pid: int) -> Callable[[Progress], None]:
    """Return a progress callback that kills one worker once requests are in flight."""
    left = [pid]

    def kill(progress: Progress) -> None:
        if left and progress.inflight > 1:
            os.kill(left.pop(), signal.SIGKILL)

    return kill


def test_dead_worker_ends_the_run_and_is_reported_missing_in_the_next() -> None:
    with loading(SCRIPTS, workers=2, connections_per_worker=32) as generator:
        scripts = ["hang", "good", "good", "good"] * 500
        kill = _kill_once(generator.worker_pids[1])
        result = run_scripts(generator, scripts, kill, floor_s=20.0, cap_s=20.0, drain_s=0.3)
        assert result.t_stop_ns - result.t_origin_ns < 15e9
        assert len(result.records) < 2000
        assert all(r.t_intended_ns < result.t_stop_ns for r in result.records)
        hung = {r.error_kind for r in result.records if r.request_id == "hang"}
        assert hung == {"worker_died", "drain_timeout"}
        assert result.health["workers_died"] == [1]
        assert not psutil.pid_exists(generator.worker_pids[1])
        # The next cell runs on the remaining worker, and its checks fail.
        after = run_scripts(generator, ["good"] * 10)
    assert {r.status for r in after.records} == {"ok"}
    checks = generator_checks(after.health, after.clock, BOUNDS)
    for name in ("silent_workers", "workers_died", "unopened_connections"):
        assert not checks[name]["pass"]


def test_next_run_is_refused_after_the_only_worker_died() -> None:
    with loading(SCRIPTS, connections_per_worker=32) as generator:
        kill = _kill_once(generator.worker_pids[0])
        result = run_scripts(generator, ["hang"] * 1000, kill, floor_s=20.0, cap_s=20.0)
        assert {r.error_kind for r in result.records} == {"worker_died"}
        assert result.t_drained_ns - result.t_origin_ns < 15e9
        with pytest.raises(LoadGeneratorError, match="no worker is left"):
            run_scripts(generator, ["good"])


MAIN = """
import sys
from connector_tax.loadgen.generator import LoadGenerator, LoadGeneratorOptions
from connector_tax.loadgen.messages import Target
from tests.loadgen.running import run_scripts
options = LoadGeneratorOptions(workers=2, connections_per_worker=8)
with LoadGenerator(Target("127.0.0.1", int(sys.argv[1])), options) as generator:
    def report(progress):
        if progress.inflight > 2:
            print(*generator.worker_pids, flush=True)
    run_scripts(generator, ["hang"] * 600, report, floor_s=60, cap_s=60)
"""


def _start_main(port: int, folder: Path) -> "tuple[subprocess.Popen[str], list[int]]":
    """Start a run that would take a minute; return once requests are in flight."""
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    assert process.stdout is not None
    return process, [int(pid) for pid in process.stdout.readline().split()]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_workers_end_with_the_main_process(number: signal.Signals, tmp_path: Path) -> None:
    with FaultServer(SCRIPTS) as server:
        process, pids = _start_main(server.port, tmp_path)
        assert len(pids) == 2
        assert all(psutil.pid_exists(pid) for pid in pids)
        process.send_signal(number)
        process.communicate(timeout=10)
        assert process.returncode != 0
        assert _gone(pids)
    assert list(tmp_path.iterdir()) == []


def test_closing_leaves_no_process_socket_or_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = set(Path("/proc/self/fd").iterdir())
    with FaultServer(SCRIPTS) as server:
        target = Target("127.0.0.1", server.port)
        with LoadGenerator(target, LoadGeneratorOptions(workers=2)) as generator:
            pids = generator.worker_pids
            assert list(tmp_path.iterdir()) == []  # gone as soon as everyone is connected
    assert _gone(pids, 0)
    assert set(Path("/proc/self/fd").iterdir()) == before


def test_credentials_are_on_no_command_line_and_in_no_description() -> None:
    with FaultServer(SCRIPTS) as server:
        target = Target("127.0.0.1", server.port, headers={"Authorization": "Bearer hush"})
        with LoadGenerator(target, LoadGeneratorOptions()) as generator:
            lines = [" ".join(psutil.Process(pid).cmdline()) for pid in generator.worker_pids]
            assert all("hush" not in line for line in lines)
            assert "hush" not in repr(generator.describe()) + repr(target)
            assert generator.describe()["target"]["header_names"] == ["Authorization"]


def test_an_unknown_host_is_a_clear_error() -> None:
    generator = LoadGenerator(Target("no-such-host.invalid", 1), LoadGeneratorOptions())
    with pytest.raises(LoadGeneratorError, match=r"no-such-host\.invalid"):
        generator.__enter__()


def test_a_stalled_main_process_does_not_delay_the_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stall the main process for less than the lead; workers send by their own clock."""
    monkeypatch.setattr("connector_tax.loadgen.generator.LEAD_NS", 500_000_000)

    def stall(_progress: Progress) -> None:
        end = time.perf_counter() + 0.2
        while time.perf_counter() < end:
            sum(range(1000))

    with loading(SCRIPTS, connections_per_worker=32) as generator:
        result = run_scripts(generator, ["good"] * 100, stall)
    received = [(r.t_intended_ns - (r.t_worker_ns or 0)) / 1e6 for r in result.records]
    assert min(received) > 0, "a request reached its worker after it was due"


def test_suspended_worker_loses_no_request_and_no_connection() -> None:
    """Resume the worker after all deadlines, so that its requests start and time out in one
    turn."""
    with loading({"slow": [Pause(0.02), good_answer()]}, connections_per_worker=8) as generator:
        worker = psutil.Process(generator.worker_pids[0])
        stopped_s: list[float] = []

        def stand_still(progress: Progress) -> None:
            if not stopped_s:
                worker.suspend()
                stopped_s.append(progress.elapsed_s)
            elif progress.elapsed_s > stopped_s[0] + 1.0:
                worker.resume()

        result = run_scripts(
            generator, ["slow"] * 60, stand_still, request_timeout_s=0.3, inflight_cap=60
        )
        kinds = Counter(r.error_kind for r in result.records)
        assert kinds.keys() <= {None, "request_timeout"}
        assert kinds["request_timeout"] > 10
        again = run_scripts(generator, ["slow"] * 60, inflight_cap=8)
        assert {r.error_kind for r in again.records} == {None}


def test_worker_unresponsive_at_the_end_is_killed_and_loses_no_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatcher, "ANSWER_S", 0.2)
    with loading(SCRIPTS, workers=2, connections_per_worker=4) as generator:
        silent = psutil.Process(generator.worker_pids[0])

        def stop_at_the_end(progress: Progress) -> None:
            if progress.ok == 20:  # reported after the last answer
                silent.suspend()

        result = run_scripts(generator, ["good"] * 20, stop_at_the_end, floor_s=0.5, cap_s=0.5)
        assert {r.status for r in result.records} == {"ok"}
        assert not psutil.pid_exists(silent.pid)
        assert result.health["workers_died"] == [0]
        assert not generator_checks(result.health, result.clock, BOUNDS)["workers_died"]["pass"]


@pytest.mark.parametrize("script", ["busy", "cut"])
def test_failed_requests_do_not_keep_their_bodies_in_memory(script: str) -> None:
    body = b"x" * 216_000
    head = b"HTTP/1.1 503 Busy\r\ncontent-length: %d\r\n\r\n"
    scripts: dict[str, list[Step]] = {
        "busy": [head % len(body) + body],
        "cut": [head % (len(body) + 1) + body, Fin],
    }
    with loading(scripts) as generator:
        run_scripts(generator, [script] * 30)
        worker = psutil.Process(generator.worker_pids[0])
        before = worker.memory_info().rss
        during: list[int] = []
        result = run_scripts(
            generator,
            [script] * 400,
            lambda _: during.append(worker.memory_info().rss),
            floor_s=2.0,
            cap_s=2.0,
        )
    assert {r.status for r in result.records} == {"error"}
    assert max(during) - before < 20e6  # all of them together are 86 MB

"""Test the embedded engine's server: its launch, its child processes, its end."""

import asyncio
import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from connector_tax.engine.__main__ import main
from connector_tax.engine.connectors import BackgroundCpu
from connector_tax.engine.logs import LineLog, LogError
from connector_tax.servers.kinds import free_port
from tests.engine.serving import (
    EMBEDDED,
    Launched,
    command,
    completion,
    config_with,
    launched,
    post,
)


def tree(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def test_sigterm_with_requests_in_flight_stops_cleanly(tmp_path: Path) -> None:
    with launched(tmp_path, "nixl_both") as server:
        processes = tree(server.process.pid)
        assert len(processes) == 3  # the server, its worker, the background load
        body = json.dumps(completion(max_tokens=5000)).encode()
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
            connection.sendall(post(body))
            connection.recv(1 << 16)
            begin = time.monotonic()
            assert server.stop() == 0
            assert time.monotonic() - begin < 5  # the request takes longer
            while connection.recv(1 << 16):
                pass
        assert not any(p.is_running() for p in processes)
        assert server.records("truth.jsonl")[-1]["outcome"] == "stopped"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port))


def test_killed_server_leaves_no_child_process(tmp_path: Path) -> None:
    with launched(tmp_path, "nixl_both") as server:
        children = tree(server.process.pid)[1:]
        server.stop(signal.SIGKILL)
        _, alive = psutil.wait_procs(children, timeout=5)
        assert not alive


def test_a_dead_worker_fails_requests_and_ends_the_server(tmp_path: Path) -> None:
    with launched(tmp_path) as server:
        stream = server.raw(max_tokens=5000)
        next(stream)
        os.kill(tree(server.process.pid)[1].pid, signal.SIGKILL)
        rest = b"".join(stream)
        assert b"EngineDeadError" in rest
        assert b"[DONE]" not in rest
        assert server.process.wait(10) == 1
    assert any("EngineDeadError" in line for line in server.stderr)
    assert server.records("truth.jsonl")[-1]["outcome"] == "engine dead"


@pytest.mark.parametrize(
    ("changes", "configuration", "says"),
    [
        ({}, "nope", "found no configuration 'nope'; allowed: plain, noop_connector"),
        (
            {"scheduler": {"kv_bloks": 1}},
            "plain",
            "scheduler.kv_bloks: unknown key; did you mean kv_block",
        ),
        ({"scheduler": {"kv_blocks": 100}}, "plain", "kv_blocks: found 100; allowed: at least 512"),
        (
            {"scheduler": {"prefill_admission_policy": "lifo"}},
            "plain",
            "prefill_admission_policy: found 'lifo'; did you mean fifo? allowed: one of fifo",
        ),
        ({"step_cost": {"beta0_us": -1}}, "plain", "step_cost.beta0_us: found -1; allowed: >= 0"),
        (
            {"faults": {"seed": 1, "rules": [{"kind": "refuse_start"}]}},
            "plain",
            "refuse_start is set",
        ),
        (
            {"faults": {"seed": 1, "rules": [{"kind": "gremlin"}]}},
            "plain",
            "faults.rules[0].kind: found 'gremlin'",
        ),
    ],
)
def test_refused_launch_names_file_and_reason(
    tmp_path: Path,
    changes: dict[str, Any],
    configuration: str,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "engine.json"
    path.write_text(json.dumps(config_with(changes)))
    monkeypatch.setattr(sys, "argv", command(path, configuration, free_port(), tmp_path)[2:])
    assert main() == 1
    message = capsys.readouterr().err
    assert str(path) in message
    assert says in message


def test_error_names_the_port_in_use(server: Launched, tmp_path: Path) -> None:
    arguments = command(EMBEDDED, "plain", server.port, tmp_path)
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=20)
    assert done.returncode == 1
    assert f"127.0.0.1:{server.port}" in done.stderr
    assert "Traceback" not in done.stderr


def test_server_listens_on_loopback_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = command(EMBEDDED, "plain", free_port(), tmp_path)
    arguments[arguments.index("127.0.0.1")] = "0.0.0.0"
    monkeypatch.setattr(sys, "argv", arguments[2:])
    with pytest.raises(SystemExit) as refused:
        main()
    assert refused.value.code == 2
    assert "found 0.0.0.0; allowed: a loopback address" in capsys.readouterr().err


WINDOW_S = 1.0


@pytest.fixture
def one_core() -> Iterator[None]:
    """Confine this process and its children to one core, so that they compete for CPU time."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


def cpu_clock(pid: int) -> int:
    """Return the clock of a process's CPU time, for time.clock_gettime."""
    clock = ctypes.c_int()
    assert ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock)) == 0
    return clock.value


@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize("share", [0.1, 0.3])
def test_background_load_uses_its_share_of_a_core(share: float) -> None:
    async def measure() -> tuple[float, float, float]:
        load = BackgroundCpu(share)
        others = set(psutil.Process().children())
        await load.start()
        try:
            (child,) = set(psutil.Process().children()) - others
            clock = cpu_clock(child.pid)
            begin, own, burnt = time.monotonic(), time.process_time(), time.clock_gettime(clock)
            # This loop is the control: it takes all that the core grants beside the load.
            while True:
                spent = time.clock_gettime(clock) - burnt
                granted = spent + time.process_time() - own
                if granted >= WINDOW_S:
                    return spent, granted, time.monotonic() - begin
        finally:
            await load.stop()

    spent, granted, wall = asyncio.run(measure())
    assert spent <= 1.05 * share * wall
    # If other work or a hypervisor uses the core, the pair gets less than the wall time.
    assert spent >= 0.8 * share * granted


def test_background_load_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="ended with status 1 before it began"):
        asyncio.run(BackgroundCpu(0.1).start())


LIMIT = 2000  # bytes; a record of the step log has about 280


def whole_lines(path: Path) -> list[object]:
    """Return the records of a log; fail if its last line is cut off."""
    data = path.read_bytes()
    assert data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


def limit_files(server: Launched, size: int) -> None:
    """Limit each file of the server to `size` bytes, as on a full disk."""
    psutil.Process(server.process.pid).rlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.parametrize("log", ["step.scheduler.jsonl", "truth.jsonl"])
def test_unwritable_log_ends_the_launch_and_is_named(tmp_path: Path, log: str) -> None:
    steps = log.startswith("step")
    with launched(tmp_path, step_log=steps) as server:
        limit_files(server, LIMIT)
        # The step log grows during the request; the truth log gets its line at the end.
        with contextlib.suppress(ConnectionResetError):
            list(server.raw(max_tokens=5000 if steps else 200))
        assert server.process.wait(10) == 1
    assert any(f"{tmp_path / log}: " in line for line in server.stderr), server.stderr
    assert "Traceback" not in "".join(server.stderr)
    assert whole_lines(tmp_path / log)


def test_log_that_fails_on_close_raises(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    async def main() -> None:
        failures: list[LogError] = []
        log = LineLog(path, failures.append)
        for i in range(50):
            log.write({"i": i, "text": "x" * 90})
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, before[1]))
        try:
            with pytest.raises(LogError, match=r"log\.jsonl: .*File too large"):
                log.close()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert not failures

    asyncio.run(main())
    records = whole_lines(path)
    assert records == [{"i": i, "text": "x" * 90} for i in range(len(records))]
    assert 0 < len(records) < 50

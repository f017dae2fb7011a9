"""The embedded engine's server: how it is launched, and how it ends."""

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

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


def test_sigterm_ends_everything_orderly_with_requests_in_flight(tmp_path: Path) -> None:
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


def test_killing_the_server_takes_its_children(tmp_path: Path) -> None:
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


def refused(arguments: list[str], status: int = 1) -> str:
    """What a launch that ends with `status` says."""
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == status
    assert "Traceback" not in done.stderr
    return done.stderr


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
def test_a_bad_launch_says_why(
    tmp_path: Path, changes: dict[str, Any], configuration: str, says: str
) -> None:
    path = tmp_path / "engine.json"
    path.write_text(json.dumps(config_with(changes)))
    said = refused(command(path, configuration, free_port(), tmp_path))
    assert str(path) in said
    assert says in said


def test_a_port_in_use_is_named(server: Launched, tmp_path: Path) -> None:
    said = refused(command(EMBEDDED, "plain", server.port, tmp_path))
    assert f"127.0.0.1:{server.port}" in said


def test_only_loopback_is_served(tmp_path: Path) -> None:
    arguments = command(EMBEDDED, "plain", free_port(), tmp_path)
    arguments[arguments.index("127.0.0.1")] = "0.0.0.0"
    assert "found 0.0.0.0; allowed: a loopback address" in refused(arguments, 2)

"""Test servers whose command ends while they run: containers, and processes that fork."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from connector_tax.servers.kinds import ServerCommand, ServerError, free_port
from connector_tax.study import endpoint
from connector_tax.study.detached import find_detached
from connector_tax.study.guardian import CONTAINER_FILE, containers_of
from connector_tax.study.processes import ServerProcesses, cpu_between
from connector_tax.study.resources import snapshot
from connector_tax.study.server import Server
from tests.study.driving import ANSWERS

# A server that uses CPU time for every request, and 64 MiB of memory.
BUSY = "held = bytearray(64 << 20)\n" + ANSWERS.replace(
    "self.send_response(200)", "sum(range(3_000_000)); self.send_response(200)"
)


def words(*more: str) -> list[str]:
    return [sys.executable, "-c", BUSY, str(free_port()), *more]


def forked(before: str = "", by: str = "") -> list[str]:
    """Return a command that leaves a server running and ends; `before` is put before the server's
    command, `by` before setsid.
    """
    command = f"{before} {shlex.join(words())}"
    return ["bash", "-c", f"{by} setsid {command} >/dev/null 2>&1 & sleep 0.1"]


@contextlib.contextmanager
def started(folder: Path, argv: list[str]) -> Iterator[Server]:
    """Start a user's command."""
    port = int(next(word for part in argv for word in part.split() if word.isdigit()
                    and len(word) >= 4 and int(word) > 1024 and word != "3_000_000"))  # fmt: skip
    server = Server(folder, ServerCommand(argv, {}, callers=True), "test", port)
    server.start()
    try:
        yield server
    finally:
        server.stop(5)


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a stand-in for docker into PATH; return the folder with its state."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "docker"
    source = Path(__file__).with_name("stub_docker.py").read_text()
    script.write_text(f"#!{sys.executable}\n{source}")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder / "containers"


def is_up(server: Server) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(server.url, trust_env=False).is_success
    return False


@pytest.mark.parametrize("before", ["", "env -i PATH=$PATH"], ids=["inherits", "by its port"])
def test_forked_server_is_measured_and_stopped(tmp_path: Path, before: str) -> None:
    with started(tmp_path, forked(before)) as server:
        server.wait_ready(20)
        process = psutil.Process(server.pid)
        assert str(server.port) in process.cmdline()
        processes = ServerProcesses(server.pid, {})
        first = processes.read()
        assert is_up(server)
        assert (cpu_between(first, processes.read()).cpu_s or 0) > 0.01
        server.check_alive("while it is measured")
        assert server.stop(5) == "TERM"
        assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        assert not is_up(server)


def test_end_of_a_forked_server_is_detected(tmp_path: Path) -> None:
    with started(tmp_path, forked()) as server:
        server.wait_ready(20)
        psutil.Process(server.pid).kill()
        with pytest.raises(ServerError, match="the detached server ended while measured"):
            _until_raised(server)


def _until_raised(server: Server) -> None:
    while True:
        server.check_alive("while measured")
        time.sleep(0.01)


def test_command_that_leaves_no_process_is_reported(tmp_path: Path) -> None:
    with (
        started(tmp_path, ["bash", "-c", "echo ready at 18765"]) as server,
        pytest.raises(ServerError, match="status 0, and left no server"),
    ):
        server.wait_ready(20)


def test_server_at_another_address_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "PATIENCE_S", 0.1)
    messages: list[str] = []
    argv = [sys.executable, "-m", "http.server", "--bind", "::1", str(free_port())]
    with (
        started(tmp_path, argv) as server,
        pytest.raises(ServerError, match=r"listens only at ::1, not at .*; allowed: 127"),
    ):
        server.wait_ready(4, messages.append)
    assert "waiting for the server: the server listens only at ::1" in messages[0]


def test_container_is_inspected_with_the_options_of_the_users_command(
    tmp_path: Path, docker: Path
) -> None:
    (docker.parent / "context").touch()
    folder = tmp_path / "launch"
    folder.mkdir()
    with started(folder, ["docker", "--context", "mine", "run", "-d", *words()]) as server:
        server.wait_ready(20)
        (container,) = (path for path in docker.iterdir() if not path.suffix)
        assert server.pid == int(container.read_text())
    assert not container.exists()


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("docker run -d image", "docker"),
        ("sudo -E -n podman run -d image", "sudo -E -n podman"),
        ("sudo sync; docker -H tcp://h run -d image", "docker -H tcp://h"),
        ("env A=1 /usr/bin/nerdctl --namespace=k8s container run -d image",
         "/usr/bin/nerdctl --namespace=k8s"),
    ],
)  # fmt: skip
def test_container_engine_and_its_options_are_read_from_a_command_line(
    tmp_path: Path, line: str, command: str
) -> None:
    printed = "0123456789abcdef" * 4
    found = find_detached(tmp_path, ["bash", "-c", line], "driver", printed, [])
    assert found is not None
    assert found.engine == tuple(command.split())


@pytest.mark.parametrize("by_bash", [False, True])
def test_container_is_stopped_and_its_control_group_is_measured(
    tmp_path: Path, docker: Path, by_bash: bool
) -> None:
    argv = ["docker", "run", "-d", *words()]
    folder = tmp_path / "launch"
    folder.mkdir()
    with started(folder, ["bash", "-c", shlex.join(argv)] if by_bash else argv) as server:
        server.wait_ready(20)
        (container,) = (path for path in docker.iterdir() if not path.suffix)
        assert server.pid == int(container.read_text())
        group = server.control_group
        assert group is not None or os.getuid(), "root may make control groups here"
        processes = ServerProcesses(server.pid, {}, None, group)
        first = processes.read()
        assert is_up(server)
        assert 0.01 < (cpu_between(first, processes.read()).cpu_s or 0) < 5
        memory = snapshot(processes, "cpu")["memory_pss_mib"]["value"]
        assert memory is not None
        assert 64 < memory < 200
        assert (folder / CONTAINER_FILE).exists()
        assert server.stop(5) == "TERM"
        assert not is_up(server)
        assert not container.exists()
        assert not (folder / CONTAINER_FILE).exists()


def test_container_with_unseen_processes_is_followed_through_docker(
    tmp_path: Path, docker: Path
) -> None:
    (docker.parent / "hidden").touch()
    folder = tmp_path / "launch"
    folder.mkdir()
    with started(folder, ["docker", "run", "-d", *words()]) as server:
        server.wait_ready(20)
        assert server.unseen == "the processes of the container cannot be seen from here"
        (container,) = (path for path in docker.iterdir() if not path.suffix)
        os.kill(int(container.read_text()), signal.SIGKILL)
        with pytest.raises(ServerError, match="ended while measured"):
            _until_raised(server)


def test_container_that_prints_no_id_is_refused(tmp_path: Path, docker: Path) -> None:
    docker.mkdir()
    argv = ["bash", "-c", f"docker run -d {shlex.join(words())} >/dev/null"]
    try:
        with (
            started(tmp_path, argv) as server,
            pytest.raises(ServerError, match=r"printed no id.*docker run -d"),
        ):
            server.wait_ready(20)
    finally:
        for path in [path for path in docker.iterdir() if not path.suffix]:
            subprocess.run([docker.parent / "docker", "rm", "--force", path.name], check=True)


def test_truncated_container_file_does_not_stop_later_runs(tmp_path: Path) -> None:
    (tmp_path / CONTAINER_FILE).write_text("docker\n")
    assert list(containers_of(tmp_path)) == []


@pytest.mark.usefixtures("docker")
def test_container_ends_when_its_driver_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "launch"
    folder.mkdir()
    argv = ["docker", "run", "-d", *words()]
    code = (
        "import pathlib, sys, time; from connector_tax.study.server import *\n"
        f"s = Server(pathlib.Path({str(folder)!r}), ServerCommand({argv!r}, {{}}, callers=True),"
        f" 't', {argv[-1]})\n"
        "s.start(); s.wait_ready(20); print(s.pid, flush=True); time.sleep(100)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout is not None
        container = psutil.Process(int(driver.stdout.readline()))
        driver.kill()
    container.wait(20)
    assert not (folder / CONTAINER_FILE).exists()

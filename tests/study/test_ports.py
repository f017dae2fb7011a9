"""Test that a foreign listener is reported, never mistaken for the server, and causes no skip."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from connector_tax.files import read_json, write_json
from connector_tax.servers import kinds
from connector_tax.servers.kinds import ServerCommand
from connector_tax.study import launch, preflight
from connector_tax.study.server import PortTakenError, Server
from tests.study.driving import (
    ANSWERS,
    arguments,
    as_user,
    failed_index_of,
    index_of,
    launch_folder,
)

# Waits for a server on a port where another user's process answers.
WAIT = """
import sys
from pathlib import Path
from connector_tax.study.server import PortTakenError, Server
from connector_tax.servers.kinds import ServerCommand
server = Server(Path(sys.argv[1]), ServerCommand(["sleep", "100"], {}), "t", int(sys.argv[2]))
server.start()
try:
    server.wait_ready(5)
except PortTakenError as error:
    print(error)
else:
    print("taken for the server")
finally:
    server.stop(1)
"""


@pytest.fixture
def impostor() -> Iterator[tuple[int, int]]:
    """Yield process id and port of a process that answers 200 to everything."""
    command = [sys.executable, "-c", ANSWERS, "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process.pid, int(process.stdout.readline())
    process.kill()
    process.communicate()


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_listener_of_another_user_is_not_taken_for_the_server(impostor: tuple[int, int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        done = subprocess.run(
            [*as_user(65534), sys.executable, "-c", WAIT, folder, str(impostor[1])],
            env={**os.environ, "HOME": folder},
            capture_output=True,
            text=True,
        )
    assert done.stdout == f"port {impostor[1]} is in use by another user's process\n", done.stderr


def test_server_with_its_port_in_use_is_started_on_another(
    tmp_path: Path, impostor: tuple[int, int]
) -> None:
    """Start a server on a port in use; it may end before the port is checked."""
    code = "import socket, sys; socket.socket().bind(('127.0.0.1', int(sys.argv[1])))"
    command = ServerCommand(["python", "-c", code, str(impostor[1])], {})
    # The checked port is free; the port in use is a companion's.
    server = Server(tmp_path, command, "t", kinds.free_port())
    server.start()
    with pytest.raises(PortTakenError, match="Address already in use"):
        server.wait_ready(20)
    server.stop(1)


@pytest.fixture
def gated_study(study_file: Path) -> Path:
    """Return a study with one gate, of the no-op connector, and without a verdict yet."""
    study = read_json(study_file)
    study["configurations"] = [c for c in study["configurations"] if c["gate"]][:1]
    write_json(study_file, study)
    (study_file.parent / "preflight" / "preflight_status.json").unlink()
    return study_file


def test_port_in_use_at_a_gate_is_replaced(
    gated_study: Path, impostor: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    free, ports = kinds.free_port, iter([impostor[1]])
    monkeypatch.setattr(preflight, "free_port", lambda: next(ports, None) or free())
    assert preflight.main(["--study", str(gated_study)]) == 0
    status = read_json(gated_study.parent / "preflight" / "preflight_status.json")
    assert status["noop_connector"]["include"] is True
    log = (gated_study.parent / status["noop_connector"]["evidence"]).read_text()
    assert "trying another port" in log


def test_ports_in_use_at_a_gate_are_an_error_not_a_skip(
    gated_study: Path,
    impostor: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(preflight, "free_port", lambda: impostor[1])
    assert preflight.main(["--study", str(gated_study)]) == 2
    assert f"port {impostor[1]} is in use by process {impostor[0]}" in capsys.readouterr().err
    assert not (gated_study.parent / "preflight" / "preflight_status.json").exists()


@pytest.mark.workflow
def test_port_taken_during_the_start_is_replaced(
    study_file: Path, impostor: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let another program take the port between its choice and the server's listen."""
    free = kinds.free_port
    ports = iter([impostor[1]])
    monkeypatch.setattr(launch, "free_port", lambda: next(ports, None) or free())
    assert launch.main(arguments(study_file)) == 0
    index = index_of(study_file)
    assert index["status"] == "done", index["reason"]
    assert index["attempts"][0]["port"] != impostor[1]
    assert {entry["status"] for entry in index["cells"]} <= {"valid", "void"}
    argv = read_json(launch_folder(study_file) / "config.json")["argv"]
    assert str(index["attempts"][0]["port"]) in argv


@pytest.mark.workflow
def test_launch_fails_and_names_the_process_that_holds_its_port(
    study_file: Path, impostor: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "free_port", lambda: impostor[1])
    assert launch.main(arguments(study_file)) == 1
    index = failed_index_of(study_file)
    assert index["status"] == "failed"
    assert f"port {impostor[1]} is in use by process {impostor[0]}" in index["reason"]
    assert {entry["status"] for entry in index["cells"]} == {"missing"}

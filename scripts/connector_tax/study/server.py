"""One server launch: launch.sh, readiness, liveness, stop.

The study cannot tell which engine is behind a server except through what is recorded
(ARCHITECTURE.md); `command_for` is the one place that knows the engines.
"""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from connector_tax.files import write_json, write_text
from connector_tax.loadgen.affinity import format_cpus
from connector_tax.study.design import Launch, launch_seed
from connector_tax.study.guard import LAUNCH_VARIABLE, die_with_parent, kill_leftovers

STEP_LOG_PREFIX = "engine_step"
STEP_LOG_PROCESSES = ("scheduler", "worker")
LOGS = ("vllm_stdout.log", "vllm_stderr.log")


class ServerError(Exception):
    """The server did not start, died or did not stop; the text carries the end of its log."""


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """What launch.sh runs: arguments, added environment, and JSON files that lie beside it."""

    argv: list[str]
    environment: dict[str, str]
    files: dict[str, Any] = field(default_factory=dict)


def free_port(host: str) -> int:
    """A TCP port of `host` nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
    return port


def served_model(engine: Mapping[str, Any]) -> tuple[str, int]:
    """Served model name and vocabulary size of a resolved `engine` section."""
    if engine["kind"] == "embedded":
        model = engine["definition_content"]["model"]
        return model["served_name"], model["vocab_size"]
    return engine["served_model_name"], engine["vocab_size"]


def command_for(study: Mapping[str, Any], launch: Launch, port: int) -> ServerCommand:
    """The command that starts the launch's server on `port`.

    Raises:
        ServerError: this engine cannot be launched here; the text says what is missing.
    """
    engine = study["config"]["engine"]
    if engine["kind"] != "embedded":
        raise ServerError(
            f"engine.kind: found {engine['kind']!r}; this version can launch: embedded"
        )
    argv = ["python", "-m", "connector_tax.engine", "--config", "engine.json"]
    argv += ["--configuration", launch.configuration]
    argv += ["--host", study["config"]["server"]["host"], "--port", str(port)]
    argv += ["--launch-seed", str(launch_seed(study, launch))]
    return ServerCommand(
        argv,
        {"AGENTIC_STEP_LOG_PATH": STEP_LOG_PREFIX},
        {"engine.json": engine["definition_content"]},
    )


def launch_script(command: ServerCommand, title: str, cpus: tuple[int, ...] = ()) -> str:
    """The text of launch.sh; every value is quoted, so none is ever interpreted by the shell.

    Args:
        cpus: logical CPUs the server is pinned to; empty: not pinned.
    """
    pinned = ["taskset", "--cpu-list", format_cpus(cpus)] if cpus else []
    lines = [
        "#!/usr/bin/env bash",
        f"# {title}".replace("\n", " "),
        "set -euo pipefail",
        'cd -- "$(dirname -- "${BASH_SOURCE[0]}")"',
        *(f"export {name}={shlex.quote(value)}" for name, value in command.environment.items()),
        f"exec {shlex.join([*pinned, *command.argv])}",
    ]
    return "\n".join(lines) + "\n"


class Server:
    """A launched server process group in `folder`, from `start` to `stop`."""

    def __init__(
        self,
        folder: Path,
        command: ServerCommand,
        title: str,
        host: str,
        port: int,
        cpus: tuple[int, ...] = (),
    ) -> None:
        self.folder = folder
        self.host = host
        self.port = port
        self._command = command
        self._title = title
        self._cpus = cpus
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0

    @property
    def url(self) -> str:
        """The server's base address."""
        return f"http://{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        """The process id of the group's leader."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Write launch.sh and run it in a process group of its own; call from the main thread."""
        script = self.folder / "launch.sh"
        for name, content in self._command.files.items():
            write_json(self.folder / name, content)
        write_text(script, launch_script(self._command, self._title, self._cpus))
        script.chmod(0o755)
        environment = {
            **os.environ,
            LAUNCH_VARIABLE: str(self.folder.resolve()),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        self._started = time.monotonic()
        with contextlib.ExitStack() as stack:
            out, err = (stack.enter_context((self.folder / name).open("wb")) for name in LOGS)
            self._process = subprocess.Popen(
                ["bash", str(script)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environment,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def wait_ready(self, timeout_s: float) -> float:
        """Wait until /v1/models answers 200; the seconds that took since `start`.

        Raises:
            ServerError: the process ended first, or `timeout_s` passed.
        """
        with httpx.Client(trust_env=False, timeout=5.0) as client:
            while True:
                self.check_alive("before it was ready")
                with contextlib.suppress(httpx.TransportError):
                    if client.get(f"{self.url}/v1/models").status_code == httpx.codes.OK:
                        return time.monotonic() - self._started
                if time.monotonic() - self._started > timeout_s:
                    limit = f"{timeout_s:g} s (server.ready_timeout_s)"
                    raise ServerError(f"not ready after {limit}\n{self.log_tail()}")
                time.sleep(0.02)

    def check_alive(self, when: str) -> None:
        """Raise `ServerError` with the log's tail if the server process has ended."""
        assert self._process is not None
        status = self._process.poll()
        if status is not None:
            raise ServerError(f"the server ended with status {status} {when}\n{self.log_tail()}")

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of both logs."""
        parts = []
        for name in LOGS:
            path = self.folder / name
            text = path.read_text(errors="replace") if path.exists() else ""
            parts += [f"--- end of {name}", *text.splitlines()[-lines:]]
        return "\n".join(parts)

    def stop(self, grace_s: float) -> str:
        """Stop the whole process group and check that it is gone and its port free.

        Returns:
            How it ended: `TERM` or `KILL` (after `grace_s` seconds), or `dead` if it already was.

        Raises:
            ServerError: a process of the group or a listener on the port is still there.
        """
        assert self._process is not None
        how = "dead" if self._process.poll() is not None else "TERM"
        self._signal_group(signal.SIGTERM)
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            how = "KILL"
        self._signal_group(signal.SIGKILL)
        self._process.wait()
        kill_leftovers(self.folder)
        self._check_gone()
        return how

    def kill(self) -> None:
        """SIGKILL the process group without waiting; for a driver that must die at once."""
        if self._process is not None:
            self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def _check_gone(self) -> None:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            if not self._group_members() and not self._port_taken():
                return
            time.sleep(0.02)
        raise ServerError(
            f"after the stop: processes {self._group_members()} of the server's group are still "
            f"there, port {self.port} {'taken' if self._port_taken() else 'free'}"
        )

    def _group_members(self) -> list[int]:
        members = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if os.getpgid(process.pid) == self.pid and process.status() != psutil.STATUS_ZOMBIE:
                    members.append(process.pid)
        return members

    def _port_taken(self) -> bool:
        with socket.socket() as probe:
            probe.settimeout(1.0)
            return probe.connect_ex((self.host, self.port)) == 0

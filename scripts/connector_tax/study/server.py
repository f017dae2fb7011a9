"""Start one server, wait until it is ready, check that it is alive, and stop it."""

import contextlib
import functools
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import httpx
import psutil

from connector_tax.artifacts import paths
from connector_tax.config import ROOT
from connector_tax.files import write_bytes, write_json, write_text
from connector_tax.foreign import LogSecrets, printable
from connector_tax.linux import die_with_parent
from connector_tax.servers.kinds import (
    HOST,
    ServerCommand,
    ServerError,
    publishable,
    without_root,
)
from connector_tax.servers.vllm import DEAD_ENGINE
from connector_tax.study import guardian
from connector_tax.study.detached import Detached, family_of, find_detached
from connector_tax.study.endpoint import ElsewhereError, Endpoint, Waiting
from connector_tax.study.guard import (
    kill_started,
    process_name,
    remove_temporary_folder,
    temporary_folder,
)
from connector_tax.study.processes import (
    ControlGroup,
    control_group_of,
    engine_cores,
    group_members,
    stat_of,
)
from connector_tax.study.server_command import launch_script

Result = TypeVar("Result")
LOGS = (paths.STDOUT_LOG, paths.STDERR_LOG)
# A free port is chosen, but another program may take it before the server listens on it.
PORTS_TRIED = 5
ANSWER_S = 5.0
# Answers to /v1/models of a server, or a gateway, whose model is not ready.
_LOADING = (502, 503, 504)
# A command that has ended must leave a server process within this time.
LEFT_S = 2.0
# Longest time between the end of a server's companions and its exit status.
STATUS_S = 0.2
# Interval at which a starting server's processes are searched for engine cores.
CORES_S = 1.0
# Longest incomplete line of a log that is read again, bytes: a progress bar writes no line end.
LONGEST_LINE = 65536
# Lines of a log that an error quotes.
TAIL_LINES = 20
# Processes that pass connections on to a server elsewhere: a container, or another machine.
_FORWARDERS = frozenset(
    [
        "docker-proxy",
        "kubectl",
        "pasta",
        "rootlesskit",
        "rootlessport",
        "slirp4netns",
        "socat",
        "ssh",
        "sshd",
    ]
)
# A process of vLLM before what it prints.
_PROCESS = r"(?:\(\w+ pid=\d+\) )?"
# The last line of a traceback, after a logger's prefix; not a warning that names an exception. Then
# the one or two lines in which pydantic names the wrong value.
_ERROR = re.compile(
    rf"(?:^|\] ){_PROCESS}((?:\w+\.)*(?:[A-Z]\w*)?(?:Error|Exception): .+"
    r"(?:\n(?:.*\n)?.*(?= \[type=))?)",
    re.MULTILINE,
)
# launch.sh's `kill -0` of a companion that has ended before it was ready.
_NEVER_READY = re.compile(r"kill: \(\d+\)")
_IN_USE = re.compile("address already in use", re.IGNORECASE)


class PortTakenError(ServerError):
    """Another process listens on the port that was chosen for the server."""


def on_a_free_port(start: Callable[[], Result], say: Callable[[str], object]) -> Result:
    """Return the result of `start`, which chooses a port; repeat it if another program took the
    port.

    Raises:
        PortTakenError: PORTS_TRIED ports were taken.
    """
    for _ in range(PORTS_TRIED - 1):
        try:
            return start()
        except PortTakenError as error:
            say(f"{str(error).splitlines()[0]}; trying another port")
    return start()


def _accepts(host: str, port: int) -> bool:
    """Return whether a process accepts connections on the port."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), 1.0):
        return True
    return False


def make_publishable(folder: Path) -> dict[str, int]:
    """Remove the project's path and lines that look like secrets from a launch's logs.

    Call it only when nothing writes to the logs any more.

    Returns:
        The number of removed lines by log; logs without such lines are left out.
    """
    secrets, removed = LogSecrets(), {}
    for path in sorted(folder.glob("*.log")):
        text = os.fsdecode(path.read_bytes())
        hidden, count = secrets.redacted(without_root(text))
        if hidden != text:
            write_bytes(path, os.fsencode(hidden))
        if count:
            removed[path.name] = count
    return removed


def removed_lines(redacted: Mapping[str, int]) -> str:
    """Return a sentence on how many lines were removed from which logs."""
    counts = ", ".join(f"{count} of {name}" for name, count in redacted.items())
    return f"removed lines that looked like secrets: {counts}"


class Server:
    """The process group of a launched server in `folder`, which runs `command`."""

    def __init__(
        self,
        folder: Path,
        command: ServerCommand,
        title: str,
        port: int,
        cpus: tuple[int, ...] = (),
    ) -> None:
        self.folder = folder
        self.port = port
        self.endpoint = Endpoint(command.running or f"http://{HOST}:{port}", command.access or {})
        self.command = command
        self._listener: int | None = None
        self._forwarder = ""
        self._detached: Detached | None = None
        self._ended_at: float | None = None
        self._detached_at = 0.0
        self._ready = False
        self._title = title
        self._cpus = cpus
        self._process: subprocess.Popen[bytes] | None = None
        self._guardian: subprocess.Popen[bytes]
        self._foreign_port = False
        self._started = 0.0
        # Set by `stop`: number of lines removed from each log because they looked like secrets.
        self.redacted: dict[str, int] = {}
        self._log_read = dict.fromkeys(LOGS, 0)
        # Engine cores seen so far: process id -> start time.
        self.cores: dict[int, int] = {}
        self._cores_at = 0.0
        self._addresses: set[str] = set()
        self._http = self.endpoint.client(ANSWER_S)
        self._waiting = Waiting(self.url, starting=command.running is None)

    @property
    def url(self) -> str:
        """Return the server's base address."""
        return self.endpoint.url

    @property
    def unseen(self) -> str | None:
        """Return why the server's processes cannot be seen; None if they can."""
        if self._detached is not None and self._detached.pid is None:
            return "the processes of the container cannot be seen from here"
        if self._forwarder:
            where = f"{self._forwarder} listens at {self.url}"
            return f"{where}, and the server behind it cannot be seen"
        return None if self.endpoint.local else "the server is on another machine"

    @property
    def control_group(self) -> ControlGroup | None:
        """Return the container's control group; None if there is none or it is unreadable."""
        if self._detached is None or not self._detached.container or self._detached.pid is None:
            return None
        return control_group_of(self._detached.pid)

    @property
    def pid(self) -> int:
        """Return the process id of the server, the leader of its processes."""
        assert self._process is not None
        if self._detached is not None and self._detached.pid is not None:
            return self._detached.pid
        return self._listener or self._process.pid

    def companion_pids(self) -> dict[str, int]:
        """Return the companions' process ids by name, after launch.sh has started them."""
        pid_files = {c.name: self.folder / f"{c.name}.pid" for c in self.command.companions}
        return {name: int(path.read_text()) for name, path in pid_files.items()}

    def start(self) -> None:
        """Write launch.sh and run it in its own process group; call from the main thread."""
        script = self.folder / paths.LAUNCH_SCRIPT
        for companion in self.command.companions:
            (self.folder / f"{companion.name}.pid").unlink(missing_ok=True)
        for name, content in self.command.files.items():
            write_json(self.folder / name, content)
        root, caller = (os.path.relpath(p, self.folder.resolve()) for p in (ROOT, Path.cwd()))
        text = launch_script(self.command, self._title, root, self._cpus, caller)
        write_text(script, text)
        script.chmod(0o755)
        remove_temporary_folder(self.folder)
        temporary_folder(self.folder).mkdir(mode=0o700)
        environment = {
            **os.environ,
            "TMPDIR": str(temporary_folder(self.folder)),
            guardian.LAUNCH_VARIABLE: str(self.folder.resolve()),
            guardian.DRIVER_VARIABLE: process_name(os.getpid()),
            # A process that names itself keeps its environment, by which it is found.
            "SPT_NOENV": "1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        self._guardian = self._start_guardian(environment[guardian.DRIVER_VARIABLE])
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
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )

    def _start_guardian(self, driver: str) -> subprocess.Popen[bytes]:
        """Start the guardian, which ends the server's processes if this process ends first."""
        arguments = [str(self.folder.resolve()), driver]
        return subprocess.Popen(
            [sys.executable, "-I", guardian.__file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def wait_ready(self, timeout_s: float, say: Callable[[str], object] = lambda _: None) -> float:
        """Wait until /v1/models answers 200, and for a user's server also /health, if it exists.

        Args:
            say: called with each problem of the server's answers that has lasted five seconds; for
                a server that runs already such a problem is an error.

        Returns:
            The seconds since `start`.

        Raises:
            PortTakenError: another process listens on the port.
            ServerError: the process ended first, `timeout_s` passed, or a server that should run
                already has no visible process.
        """
        if self.command.running and self.endpoint.local:
            self._listener = self._find_listener()
            if self._forwarder:
                say(f"{self.unseen}: its memory is unknown, and its CPU time, if it runs on this"
                    " machine, counts as other processes' (--shared-machine)")  # fmt: skip
        while True:
            self._check_port()
            if time.monotonic() - self._cores_at > CORES_S:
                self._cores_at = time.monotonic()
                self.cores |= engine_cores(self.pid)
                self._addresses = self._listening()
            self.check_alive("before it was ready")
            if self._answers(say):
                ready_s = time.monotonic() - self._started
                self._settle()
                self.cores |= engine_cores(self.pid)
                return ready_s
            if time.monotonic() - self._started > timeout_s:
                name = "--ready-timeout" if self.command.callers else "server.ready_timeout_s"
                raise ServerError(
                    f"not ready after {timeout_s:g} s ({name}): {self._waiting.problem}\n"
                    + self.log_tail()
                )
            time.sleep(0.02)

    def _answers(self, say: Callable[[str], object]) -> bool:
        """Return whether the server serves; a listed model may still be loading."""
        answer = self._answer("/v1/models")
        status = answer.status_code if isinstance(answer, httpx.Response) else None
        if status in (401, 403):
            name = self.endpoint.access.get("variable")
            raise ServerError(
                f"/v1/models answers {status}: the server rejects the key in {name}, sent as"
                f" {self.endpoint.access.get('header', 'Authorization')} (--api-key-header)"
                if name
                else f"/v1/models answers {status}: the server requires a key, and none is sent"
                " (--api-key-env)"
            )
        if not self.command.callers:
            return status == httpx.codes.OK
        # Some servers cannot list their models, and some have no /health.
        health = self._answer("/health") if status is not None else answer
        if isinstance(answer, httpx.ConnectError) and self._addresses:
            addresses = ", ".join(sorted(self._addresses))
            allowed = f"{HOST} (--host {HOST})"
            if self.command.running:
                allowed = "a URL with such an address, as http://[::1]:8000"
            answer = ElsewhereError(
                f"the server listens only at {addresses}, not at {self.url}; allowed: {allowed}"
            )
        # Some servers are healthy while they load their model. A status below 500 other than 200
        # means that the path is absent or forbidden.
        if (
            isinstance(health, httpx.Response)
            and status not in _LOADING
            and (health.status_code == 200 or (status == 200 and not health.is_server_error))
        ):
            return True
        wrong = health if status == httpx.codes.OK else answer
        if (problem := self._waiting.take(wrong)) is not None:
            # A server that is still loading its model answers 503.
            loading = isinstance(wrong, httpx.Response) and wrong.status_code == 503
            if self.command.running and not loading:
                raise ServerError(problem)
            say(f"waiting for the server: {problem}")
        return False

    def _answer(self, path: str) -> httpx.Response | httpx.HTTPError:
        """Return the answer to a GET of `path`, or the error."""
        try:
            return self._http.get(path)
        except httpx.HTTPError as error:
            return error

    def get(self, path: str) -> str | None:
        """Return the body of a GET of `path`, or None for a status other than 2xx."""
        answer = self._answer(path)
        return answer.text if isinstance(answer, httpx.Response) and answer.is_success else None

    def check_alive(self, when: str) -> None:
        """Raise `ServerError` if the server, a companion or the server's engine has ended.

        An engine can be dead while its HTTP process still answers; then the log reports it, or its
        process is gone.
        """
        assert self._process is not None
        if self._listener is not None and not psutil.pid_exists(self._listener):
            raise ServerError(f"the server at {self.url} ended {when}")
        status = self._process.poll()
        if status == 0 and self.command.callers:
            self._follow(when)
        for companion in self.command.companions:
            if not self._runs(companion.name):
                # The kernel kills companions when the server ends, before its status is there.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = self._process.wait(STATUS_S)
                if status is None or _NEVER_READY.search(self.log_text()):
                    log = self.log_tail([f"{companion.name}.log"])
                    raise self._end_of_process(f"{companion.name} ended {when}\n{log}")
        if status is not None and self._ended_at is None:
            end = f"the server ended with status {status} {when}\n{self.log_tail()}"
            raise self._end_of_process(end)
        for pid, started in self.cores.items():
            core = stat_of(pid)
            if core is None or core.is_zombie or core.started != started:
                raise ServerError(f"the engine core (process {pid}) died {when}\n{self.log_tail()}")
        for name in LOGS:
            with (self.folder / name).open("rb") as stream:
                stream.seek(self._log_read[name])
                text = stream.read()
            # The last line may be incomplete; unless it is too long, it is read again next time.
            self._log_read[name] += max(text.rfind(b"\n") + 1, len(text) - LONGEST_LINE)
            if death := DEAD_ENGINE.search(text.decode(errors="replace")):
                raise ServerError(f"the engine died ({death[0]}) {when}\n{self.log_tail()}")

    def _settle(self) -> None:
        """Wait until a command has ended and left a server running, then follow that server."""
        if self.command.callers and not self.command.running:
            assert self._process is not None
            if not self._owners().intersection(self._group_members()):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(LEFT_S)
            self.check_alive("before it was ready")
        self._ready = True
        if self._detached is not None and not self._detached.container:
            self._detached = self._find_detached()

    def _follow(self, when: str) -> None:
        """Find the server that an ended command has left running; later, check that it still runs.

        Raises:
            ServerError: nothing runs LEFT_S after the command's end, or the server has ended since.
        """
        now = time.monotonic()
        if self._ended_at is None:
            self._ended_at = now
        if self.command.companions:
            raise ServerError(f"the command ended {when}; with --beside it must stay in the"
                              f" foreground\n{self.log_tail()}")  # fmt: skip
        if self._detached is not None:
            # The state of an unseen container is queried from its engine, which takes a while.
            if self._detached.pid is None and now - self._detached_at < CORES_S:
                return
            self._detached_at = now
            if self._detached.runs():
                return
            if self._ready or self._detached.container:
                raise ServerError(f"the detached server ended {when}\n"
                                  f"{self.log_tail()}")  # fmt: skip
            # The process that ended was a step on the way to the server.
            self._ended_at = now
        self._detached = self._find_detached()
        if self._detached is not None:
            self._detached.follow_log(self.folder / paths.STDERR_LOG)
        elif now - self._ended_at > LEFT_S:
            raise ServerError(f"the command ended {when} with status 0, and left no server: none of"
                              f" its processes runs or listens\n{self.log_tail()}")  # fmt: skip

    def _find_detached(self) -> Detached | None:
        """Return the server that the command has left running, or None."""
        printed = (self.folder / paths.STDOUT_LOG).read_text(errors="replace")
        driver = process_name(os.getpid())
        try:
            return find_detached(self.folder, self.command.argv, driver, printed, self._owners())
        except ServerError:
            # A server that cannot be stopped keeps the port.
            self._foreign_port = True
            raise

    def _end_of_process(self, text: str) -> ServerError:
        """Return the error for a server that ended by itself or lost its port."""
        if not _IN_USE.search(text):
            return ServerError(text)
        self._foreign_port = self._port_taken()
        return PortTakenError(text)

    def _check_port(self) -> None:
        """Raise `PortTakenError` if a process outside the group listens on the port.

        That process's answers would be mistaken for the server's.
        """
        # A user's command may listen in a process that is not its descendant, such as a container.
        if not self._port_taken() or self.command.callers:
            return
        foreign = self._owners() - set(self._group_members())
        if foreign:
            self._foreign_port = True
            names = ", ".join(
                "another user's process" if pid is None else f"process {pid}" for pid in foreign
            )
            raise PortTakenError(f"port {self.port} is in use by {names}")

    def _owners(self) -> set[int | None]:
        """Return the processes that listen on the port; None stands for another user's process."""
        port, hosts = self.port, {HOST, "0.0.0.0", "::", "::1"}  # noqa: S104
        if self.command.running:
            target = self.endpoint.target()
            port = target.port
            if self.endpoint.local:
                hosts |= {str(found[4][0]) for found in socket.getaddrinfo(target.host, port)}
        addresses = [(host, port) for host in hosts]
        return {
            connection.pid
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr in addresses
        }

    def _listening(self) -> set[str]:
        """Return the addresses on which processes of this machine listen at the server's port.

        Empty for https, whose errors may come from a server that listens there.
        """
        port = self.port
        if self.command.running:
            if not self.endpoint.local or not self.url.startswith("http:"):
                return set()
            port = self.endpoint.target().port
        every = psutil.net_connections("tcp")
        addresses = [c.laddr for c in every if c.status == psutil.CONN_LISTEN and c.laddr]
        return {address.ip for address in addresses if address.port == port}

    def _find_listener(self) -> int | None:
        """Return the listening process from which the other listening processes descend; None if
        the kernel passes connections on, as to a container.
        """
        owners = self._owners()
        if not owners:
            target = self.endpoint.target()
            if not _accepts(target.host, target.port):
                raise ServerError(f"nothing listens at {self.url}")
            self._forwarder = "no visible process"
            return None
        pids = [pid for pid in owners if pid is not None]
        if not pids:
            raise ServerError(
                f"The server at {self.url} belongs to another user. Run as that user or as root to"
                " measure its CPU and memory."
            )
        first = min(map(psutil.Process, pids), key=psutil.Process.create_time)
        if first.name() in _FORWARDERS:
            self._forwarder = first.name()
        return first.pid

    def _runs(self, companion: str) -> bool:
        """Return whether a companion runs; True until launch.sh has started it."""
        path = self.folder / f"{companion}.pid"
        text = path.read_text() if path.exists() else ""
        if not text.endswith("\n"):
            return True
        try:
            return psutil.Process(int(text)).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def log_text(self, names: Sequence[str] = LOGS) -> str:
        """Return the text of all logs of the server, or only of the named logs."""
        texts = ((self.folder / name).read_text(errors="replace") for name in names)
        return publishable("".join(texts))

    def log_tail(self, names: Sequence[str] = LOGS) -> str:
        """Return the first error and the paths of the logs; without an error the logs' last lines.

        vLLM's last lines are tracebacks of processes that waited for the failed one.
        """
        written = [name for name in names if (self.folder / name).stat().st_size]
        if not written:
            return "it printed nothing"
        if error := _ERROR.search(printable(self.log_text(written))):
            logs = ", ".join(without_root(str(self.folder / name)) for name in written)
            cause = re.sub(rf"\n{_PROCESS}\s*", " ", error[1])
            return f"first error: {cause}\nlog: {logs}"
        return "\n".join(map(self._tail_of, written))

    def _tail_of(self, name: str) -> str:
        path = self.folder / name
        text = path.read_text(errors="replace") if path.exists() else ""
        title = f"--- end of {without_root(str(self.folder / name))}"
        return "\n".join([title, *publishable(text).splitlines()[-TAIL_LINES:]])

    def stop(self, grace_s: float) -> str:
        """Stop the whole process group; check that the group has ended and the port is free.

        Returns:
            How it ended: `TERM` or `KILL` (after `grace_s` seconds), or `dead` if it already was.

        Raises:
            ServerError: a process of the group or a listener on the port is still there.
            LeftoverError: another process of the server is still there.
        """
        assert self._process is not None
        how = "dead" if self._process.poll() is not None else "TERM"
        self._signal_group(signal.SIGTERM)
        if self._detached is None and self.command.callers and self._process.poll() == 0:
            with contextlib.suppress(ServerError):
                self._detached = self._find_detached()
        if self._detached is not None:
            how = self._stop_detached(self._detached, grace_s)
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            how = "KILL"
        self._signal_group(signal.SIGKILL)
        self._process.wait()
        kill_started(self.folder)
        self._guardian.communicate()
        remove_temporary_folder(self.folder)
        try:
            self._check_gone()
        finally:
            self.redacted = make_publishable(self.folder)
        return how

    def _stop_detached(self, detached: Detached, grace_s: float) -> str:
        """Stop the server that the command has left running; return how the server ended."""
        if not detached.runs():
            return "dead"
        family = [] if detached.container or detached.pid is None else family_of(detached.pid)
        detached.stop(grace_s)
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.terminate()
        left = psutil.wait_procs(family, timeout=grace_s)[1]
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        return "KILL" if left else "TERM"

    def kill(self) -> None:
        """Send SIGKILL to the process group without waiting, for a driver that must die at once."""
        if self._process is not None:
            self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _check_gone(self) -> None:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            others = self._foreign_port or self.command.running
            if not self._group_members() and (others or not self._port_taken()):
                return
            time.sleep(0.02)
        raise ServerError(
            f"after the stop: processes {self._group_members()} of the server's group are still "
            f"there, port {self.port} {'taken' if self._port_taken() else 'free'}"
        )

    def _group_members(self) -> list[int]:
        assert self._process is not None
        return group_members(self._process.pid)

    def _port_taken(self) -> bool:
        return _accepts(HOST, self.port)

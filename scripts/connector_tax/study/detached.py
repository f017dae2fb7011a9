"""Follow a server whose command has ended while the server runs: a container, or a forked process.

`docker run -d` prints the container's id. A forked server is found by its environment, which names
the launch, or by its port. Neither works for a container: its processes have another environment,
and the port belongs to a process of the container engine.
"""

import contextlib
import re
import shlex
import subprocess
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import psutil

from connector_tax.files import write_text
from connector_tax.servers.kinds import ServerError
from connector_tax.study.guardian import CONTAINER_FILE, started_for
from connector_tax.study.processes import stat_of

# The last line that `docker run -d` prints.
_ID = re.compile(r"[0-9a-f]{64}")
_ENGINES = ("docker", "podman", "nerdctl")
# Publishes a container's port for a container that is not the command's.
_PROXIES = ("docker-proxy", "rootlessport")
ANSWER_S = 30.0


@dataclass(frozen=True, slots=True)
class Detached:
    """A server that outlives its command.

    Attributes:
        pid: its first process; None if it cannot be seen, as on another machine.
        started: start time of that process in clock ticks.
        engine: the command of its container engine; empty without a container.
        container: the container's id.
    """

    pid: int | None
    started: int | None
    engine: tuple[str, ...] = ()
    container: str = ""

    def runs(self) -> bool:
        """Return whether the server still runs."""
        if self.pid is None:
            return self._engine("inspect", "--format", "{{.State.Running}}") == "true"
        stat = stat_of(self.pid)
        return stat is not None and not stat.is_zombie and stat.started == self.started

    def stop(self, grace_s: float) -> None:
        """Stop a container within `grace_s` seconds."""
        if self.container:
            self._engine("stop", "-t", str(round(grace_s)), grace_s=grace_s)

    def follow_log(self, log: Path) -> None:
        """Append a container's output to a log until the container ends."""
        if self.container:
            with log.open("ab") as stream:
                subprocess.Popen(
                    [*self.engine, "logs", "--follow", self.container],
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=stream,
                )

    def _engine(self, command: str, *arguments: str, grace_s: float = 0.0) -> str:
        return _output([*self.engine, command, *arguments, self.container], grace_s)


def _output(command: list[str], grace_s: float = 0.0) -> str:
    """Return a command's output; "" if it fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=ANSWER_S + grace_s, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""


def find_detached(
    folder: Path, argv: list[str], driver: str, printed: str, owners: Collection[int | None]
) -> Detached | None:
    """Return the server that a command has left running; None while there is no such server.

    Args:
        folder: the launch's folder, where a file ensures the container's end.
        driver: the name of this process.
        printed: the command's standard output.
        owners: processes that listen on its port; None stands for another user's.

    Raises:
        ServerError: the server cannot be followed, so it could not be stopped.
    """
    last = printed.strip().rpartition("\n")[2].strip()
    words = [word for part in argv for word in _words(part)]
    names = [Path(word).name for word in words]
    engine = next((number for number, name in enumerate(names) if name in _ENGINES), None)
    if engine is not None and _ID.fullmatch(last):
        command = tuple(words[_first(words, engine) : _subcommand(words, engine)])
        content = "\n".join((" ".join(command), last, driver))
        write_text(folder / CONTAINER_FILE, content)
        text = _output([*command, "inspect", "--format", "{{.State.Pid}}", last])
        first_pid = int(text) if text.isdigit() else 0
        stat = stat_of(first_pid) if first_pid else None
        return Detached(first_pid if stat else None, stat and stat.started, command, last)
    if engine is not None:
        raise ServerError(
            "the command started a container and printed no id, so that it could not be stopped;"
            " allowed: docker run without -d, or docker run -d, which prints the id"
        )
    started_pids = {pid for pid, named in started_for(folder) if named == driver}
    candidates = (
        started_pids.intersection(owners)
        or started_pids
        or {pid for pid in owners if pid is not None}
    )
    stats = {pid: stat for pid in candidates if (stat := stat_of(pid)) and not stat.is_zombie}
    if not stats:
        return None
    pid = min(stats, key=lambda pid: stats[pid].started)
    if stats[pid].name in _PROXIES:
        raise ServerError(
            f"{stats[pid].name} listens on the port: the command left a container, which could not"
            " be stopped; allowed: docker run without -d, or docker run -d, which prints the id"
        )
    while (parent := stat_of(stats[pid].parent)) is not None and stats[pid].parent in started_pids:
        stats[stats[pid].parent], pid = parent, stats[pid].parent
    return Detached(pid, stats[pid].started)


def _first(words: list[str], engine: int) -> int:
    """Return the index of the word that starts the container engine: `sudo`, or its own name."""
    first = engine
    while first and words[first - 1].startswith("-"):
        first -= 1
    return first - 1 if first and Path(words[first - 1]).name == "sudo" else engine


def _subcommand(words: list[str], engine: int) -> int:
    """Return the index of the engine's subcommand, after options such as `--context NAME`."""
    behind = range(engine + 1, len(words))
    return next((at for at in behind if words[at] in ("run", "container")), engine + 1)


def _words(part: str) -> list[str]:
    """Return the words of an argument that is itself a command line, as after `bash -c`."""
    with contextlib.suppress(ValueError):
        return shlex.split(part)
    return [part]


def family_of(pid: int) -> list[psutil.Process]:
    """Return a process and its descendants."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []

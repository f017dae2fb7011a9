"""Run a helper process that executes commands: one JSON line in, one JSON line out."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol, Self

from connector_tax.linux import die_with_parent, run_when_idle

# A process of the lowest priority replies within milliseconds if its CPU has idle time.
ANSWER_S = 300.0
# Interval of `meanwhile` while a reply is awaited, s.
MEANWHILE_S = 2.0


class ChildError(Exception):
    """A helper process ended or did not reply; the text or the process's output gives the cause."""


class CommandChild:
    """The driver's interface to a helper process; a context manager. The process dies with the
    driver.

    Attributes:
        meanwhile: called every MEANWHILE_S while a reply is awaited; its errors end the wait.
    """

    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        self._module = module
        self._command = [sys.executable, "-m", module, *arguments]
        self.meanwhile: Callable[[], object] = lambda: None

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=_as_child,
        )
        return self

    def __exit__(self, *_: object) -> None:
        # Its last reply means that its work is done; killing it takes none of its CPU's time.
        self._process.kill()
        self._process.communicate()

    @property
    def pid(self) -> int:
        """Return the process id of the helper."""
        return self._process.pid

    def ask(self, do: str, **details: Any) -> dict[str, Any]:
        """Send one command and return the reply.

        Raises:
            ChildError: the process has ended, or does not reply within ANSWER_S.
            Exception: any error of `meanwhile`.
        """
        deadline = time.monotonic() + ANSWER_S
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **details}) + "\n")
            self._process.stdin.flush()
            while not select.select([self._process.stdout], [], [], min(MEANWHILE_S, ANSWER_S))[0]:
                self.meanwhile()
                if time.monotonic() > deadline:
                    raise ChildError(
                        f"{self._module} did not answer within {ANSWER_S:g} s: it has the lowest "
                        "priority, and other programs used its CPU all the time; end them and "
                        "rerun the same command"
                    )
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            status = self._process.wait()
            raise ChildError(f"{self._module} ended with status {status}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _as_child() -> None:
    """Prepare a helper process: ignore the terminal's Ctrl-C, and die with the parent."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class Task(Protocol):
    """The work of a helper process: a method for each command, and `work` between commands.

    Attributes:
        due_ns: when to call `work` next (CLOCK_MONOTONIC); None if not before the next command.
    """

    due_ns: int | None

    def work(self) -> None:
        """Do the work that is due."""


def serve(
    name: str, cpus: Collection[int], begin: Callable[[], Task], *, yields: bool = True
) -> int:
    """Execute commands until stdin ends, and `work` when due; return the exit status.

    Args:
        cpus: the logical CPUs it stays on; empty for all of its parent's.
        yields: run only while no other process wants the CPU.
    """
    if yields:
        # On a small machine it shares a core with the load generator, which must never wait for it.
        run_when_idle(cpus)
    elif cpus:
        os.sched_setaffinity(0, cpus)
    poll = select.poll()
    poll.register(sys.stdin, select.POLLIN)
    try:
        task = begin()
        while True:
            due_ns = task.due_ns
            left_ms = None if due_ns is None else max(0.0, (due_ns - time.monotonic_ns()) / 1e6)
            if not poll.poll(left_ms):
                task.work()
            elif line := sys.stdin.readline():
                details = json.loads(line)
                answer = getattr(task, details.pop("do"))(**details)
                print(json.dumps(answer or {}), flush=True)
            else:
                return 0
    except OSError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1

"""A process of the study's own that answers commands: one JSON line in, one JSON line out."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Self

from connector_tax.linux import die_with_parent


class ChildError(Exception):
    """A child ended while it was needed; what it printed says why."""


class CommandChild:
    """The driver's end of such a process; a context manager. It dies with the driver.

    Args:
        module: what it runs.
        arguments: its command line.
    """

    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        self._module = module
        self._command = [sys.executable, "-m", module, *arguments]

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=die_with_parent,
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        # What it was last told stays unwritten where it has ended.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ask(self, do: str, **details: Any) -> dict[str, Any]:
        """Give one command and return the answer.

        Raises:
            ChildError: the process has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **details}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            status = self._process.wait()
            raise ChildError(f"{self._module} ended with status {status}")
        answer: dict[str, Any] = json.loads(line)
        return answer

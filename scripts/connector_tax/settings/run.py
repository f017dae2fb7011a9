"""Run inside/resolve.py in vLLM's interpreter, and yield its messages as they come."""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from connector_tax.settings.request import Request

PROGRAM = Path(__file__).with_name("inside") / "resolve.py"
LOG_LINES = 8

Message = dict[str, Any]


class UnresolvedError(Exception):
    """vLLM's settings cannot be resolved; the text gives the cause."""


@contextmanager
def started(
    python: str, request: Request, packages: Path | None = None
) -> Iterator[Iterator[Message]]:
    """Run inside/resolve.py and yield its messages; the last message is `end`.

    Args:
        packages: a folder of packages that precede the interpreter's own.

    Raises:
        UnresolvedError: the interpreter does not run, or the program ended early.
    """
    # A process that is being killed may still write into the folder.
    with tempfile.TemporaryDirectory(
        prefix="connector-tax-settings-", ignore_cleanup_errors=True
    ) as name:
        folder = Path(name)
        (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        reading, writing = os.pipe()
        command = [python, str(PROGRAM), str(folder / "request.json"), str(writing)]
        # A separate cache: nothing is read from earlier runs, and nothing is left.
        environment = dict(os.environ)
        if request["gpu"] is not None:
            # Variables that the caller has set for another server would change the rows.
            environment = {key: value for key, value in environment.items()
                           if not key.startswith(("VLLM_", "LMCACHE_"))}  # fmt: skip
        environment |= {"VLLM_CACHE_ROOT": str(folder / "cache"), "TMPDIR": name}
        if packages is not None:
            environment["PYTHONPATH"] = str(packages)
        with (folder / "log").open("wb") as log:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[writing],
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                os.close(reading)
                raise UnresolvedError(f"{python}: does not run: {error.strerror}") from None
            finally:
                os.close(writing)
        try:
            with os.fdopen(reading, encoding="utf-8") as stream:
                yield _messages(stream, process, folder / "log", python)
        finally:
            # The whole session, with the forked processes of cells.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _messages(
    stream: Iterator[str], process: subprocess.Popen[bytes], log: Path, python: str
) -> Iterator[Message]:
    for line in stream:
        if not line.endswith("\n"):
            break  # the program was killed while it wrote
        message: Message = json.loads(line)
        if message["kind"] == "failed":
            error, at = f"{message['type']}: {message['text']}", message["frames"][-1]
            if message["type"] == "ModuleNotFoundError" and at.startswith(PROGRAM.name):
                raise UnresolvedError(f"{python}: has no vLLM, or not all of it: {error}")
            raise UnresolvedError(f"{python}: {error} ({at})")
        yield message
        if message["kind"] in ("end", "missing"):
            return
    status = process.wait()
    ending = f"signal {-status}" if status < 0 else f"status {status}"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    said = [f"{python}: ended with {ending} before its last answer", *lines[-LOG_LINES:]]
    raise UnresolvedError("\n".join(said))

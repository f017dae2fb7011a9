"""Start an engine as a child process and wait until it is ready; build its requests."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from connector_tax.servers.kinds import free_port


class Running(NamedTuple):
    """A ready engine's process id and port."""

    pid: int
    port: int


@contextlib.contextmanager
def running(config: Path, *, truth_log: Path | None = None) -> Iterator[Running]:
    """Yield a ready engine, configuration `plain`; its log goes to standard error.

    Raises:
        RuntimeError: the engine ended before it was ready.
    """
    port = free_port()
    command = [
        *(sys.executable, "-m", "connector_tax.engine", "--config", str(config)),
        *("--configuration", "plain", "--port", str(port), "--launch-seed", "1"),
        *(("--truth-log", str(truth_log)) if truth_log else ()),
    ]
    environment = {k: v for k, v in os.environ.items() if k != "AGENTIC_STEP_LOG_PATH"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        while "ready on port" not in (line := process.stderr.readline()):
            sys.stderr.write(line)
            if not line:
                raise RuntimeError("the engine did not start")
        yield Running(process.pid, port)
    finally:
        process.terminate()
        sys.stderr.write(process.communicate()[1])


def payload(prompt: list[int], tokens: int, headers: bytes = b"") -> bytes:
    """Return the bytes of a streamed completion request of `tokens` tokens."""
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\n%bcontent-length: %d\r\n\r\n"
    return head % (headers, len(data)) + data

"""Launch an engine as a child process, wait until it is ready, and what to ask it."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from connector_tax.servers.kinds import free_port

_READY_S = 20.0


class EngineStartError(Exception):
    """The engine did not become ready."""


@dataclass(frozen=True)
class Running:
    """A ready engine's process id and port."""

    pid: int
    port: int


@contextlib.asynccontextmanager
async def running(config: Path, *, truth_log: Path | None = None) -> AsyncIterator[Running]:
    """A ready engine, configuration `plain`; what it logs later goes to standard error at the end.

    Raises:
        EngineStartError: it ended, or was not ready in time.
    """
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "connector_tax.engine", "--config", str(config)),
        *("--configuration", "plain", "--port", str(port), "--launch-seed", "1"),
        *(("--truth-log", str(truth_log)) if truth_log else ()),
        env={k: v for k, v in os.environ.items() if k != "AGENTIC_STEP_LOG_PATH"},
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    seen = b""
    try:
        try:
            async with asyncio.timeout(_READY_S):
                while b"ready on port" not in (line := await process.stderr.readline()):
                    seen += line
                    if not line:
                        raise EngineStartError(f"the engine did not start: {seen.decode()}")
        except TimeoutError:
            raise EngineStartError(f"the engine was not ready in {_READY_S:g} s") from None
        yield Running(process.pid, port)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        _, rest = await process.communicate()
        sys.stderr.write(rest.decode())


def payload(prompt: list[int], tokens: int, headers: bytes = b"") -> bytes:
    """A streamed completion of so many tokens, as it goes over the wire."""
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\n%bcontent-length: %d\r\n\r\n"
    return head % (headers, len(data)) + data

"""Short runs of the real load generator for the tests, and single requests on a connection."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from connector_tax.loadgen import (
    CellResult,
    CellRule,
    LoadGenerator,
    PlannedRequest,
)
from connector_tax.loadgen.http import Connection, Reader
from connector_tax.loadgen.messages import RequestFailed


def rule(**changes: Any) -> CellRule:
    """Return a rule whose window is one second unless changed."""
    values = {
        "warmup_s": 0.0,
        "floor_s": 1.0,
        "min_completed": 0,
        "cap_s": 1.0,
        "drain_s": 5.0,
        "inflight_cap": 10_000,
        "request_timeout_s": 5.0,
    }
    return CellRule(**(values | changes))


def planned(script: str, request_id: str | None = None) -> PlannedRequest:
    """Return a request that asks the fault server for `script`; a good answer is 4 in, 3 out."""
    body = json.dumps({"script": script}).encode()
    return PlannedRequest(request_id or script, body, prompt_tokens=4, completion_tokens=3)


def spread(count: int, seconds: float) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """Return `count` offsets in ns, evenly over `seconds`."""
    return np.linspace(0, seconds * 1e9, count, endpoint=False).astype(np.int64)


def run_scripts(generator: LoadGenerator, scripts: Sequence[str], **changes: Any) -> CellResult:
    """Send one request per script, evenly over the window."""
    cell_rule = rule(**changes)
    window_s = cell_rule.warmup_s + cell_rule.cap_s
    return generator.run_cell(
        spread(len(scripts), window_s), [planned(script) for script in scripts], cell_rule
    )


class Response(Reader):
    """What a connection told of a response; `ended` once it is over."""

    def __init__(self) -> None:
        self.status = self.head_ns = self.end_ns = 0
        self.chunks: list[tuple[bytes, int]] = []
        self.failure: RequestFailed | None = None
        self.ended = asyncio.Event()

    @property
    def body(self) -> bytes:
        return b"".join(chunk for chunk, _ in self.chunks)

    def on_head(self, status: int, stamp: int) -> None:
        self.status, self.head_ns = status, stamp

    def on_body(self, chunk: bytes, stamp: int) -> None:
        self.chunks.append((chunk, stamp))

    def on_end(self, stamp: int) -> None:
        self.end_ns = stamp
        self.ended.set()

    def on_failure(self, failure: RequestFailed) -> None:
        self.failure = failure
        self.ended.set()


async def ask(connection: Connection, script: str) -> Response:
    """Send a request for `script`, and read the response."""
    body = json.dumps({"script": script}).encode()
    response = Response()
    head = b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body)
    connection.write(head, body, response)
    await asyncio.wait_for(response.ended.wait(), 5)
    return response

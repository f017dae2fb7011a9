"""Short runs of the real load generator, and single requests on a connection."""

import asyncio
import contextlib
import heapq
import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from connector_tax.loadgen.__main__ import main
from connector_tax.loadgen.generator import CellResult, LoadGenerator, LoadGeneratorOptions
from connector_tax.loadgen.http import Connection, Reader
from connector_tax.loadgen.messages import WAITS, RequestFailed, RequestRecord, Target, Window
from connector_tax.loadgen.plan import LEAD_NS, CellRule, Plan, PrecisionRule, Progress, open_loop
from connector_tax.loadgen.pool import Pool
from connector_tax.loadgen.sessions import PlannedRequest
from connector_tax.loadgen.traffic import Load
from tests.loadgen.fault_server import FaultServer, Step

ORIGIN_NS = 1_000_000_000


def command(
    port: int, folder: Path, options: str, *more: str
) -> tuple[int, dict[str, Any], list[dict[str, Any]]]:
    """Return the exit status, the summary and the records of a run against the server on `port`.

    `more`: further words of the command line, which may contain spaces.
    """
    summary, output = folder / "summary.json", folder / "out.jsonl"
    where = ("--url", f"http://127.0.0.1:{port}", "--no-affinity")
    files = ("--summary", str(summary), "--output", str(output))
    status = main([*where, *files, *options.split(), *more])
    return status, json.loads(summary.read_text()), list(map(json.loads, output.open()))


def write_sessions(folder: Path, *sessions: dict[str, Any]) -> str:
    """Write a session file; return its path."""
    path = folder / "sessions.jsonl"
    path.write_text("".join(json.dumps(session) + "\n" for session in sessions))
    return str(path)


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


def planned(script: str) -> PlannedRequest:
    """Return a request for the answer `script`; a good answer has 4 prompt, 3 output tokens."""
    body = json.dumps({"script": script}).encode()
    return PlannedRequest(script, body, prompt_tokens=4, completion_tokens=3)


@contextlib.contextmanager
def loading(
    scripts: Mapping[str, Sequence[Step]], *, stream: bool = True, **options: Any
) -> Iterator[LoadGenerator]:
    """Yield a load generator against a server that answers by `scripts`."""
    with FaultServer(scripts) as server:
        target = Target("127.0.0.1", server.port, stream=stream)
        with LoadGenerator(target, LoadGeneratorOptions(**options)) as generator:
            yield generator


def run_scripts(
    generator: LoadGenerator,
    scripts: Sequence[str],
    on_progress: Callable[[Progress], None] | None = None,
    **changes: Any,
) -> CellResult:
    """Send one request per script, evenly over warm-up and window."""
    cell_rule = rule(**changes)
    ends_ns = (cell_rule.warmup_s + cell_rule.cap_s) * 1e9
    offsets = np.linspace(0, ends_ns, len(scripts), endpoint=False).astype(np.int64)
    load = open_loop(offsets, [planned(script) for script in scripts], cell_rule)
    return generator.run(load, cell_rule, on_progress)


def play(
    load: Load,
    cell_rule: CellRule,
    service_s: Callable[[RequestRecord], float],
    precision: PrecisionRule | None = None,
) -> Plan:
    """Run a plan on a virtual clock to its end, with a check of its precision every 250 ms.

    `service_s` returns the duration of a request from its record, and may change the outcome.
    """
    plan = Plan(load, cell_rule, precision)
    now_ns, next_look_ns = ORIGIN_NS - LEAD_NS, ORIGIN_NS
    plan.start(ORIGIN_NS)
    running: list[tuple[int, int, RequestRecord]] = []
    waiting: deque[RequestRecord] = deque()
    free_ns: deque[int] = deque()
    closes_ns = [math.inf]

    def send(record: RequestRecord, sent_ns: int) -> None:
        record.t_done_ns = sent_ns + round(service_s(record) * 1e9)
        record.t_last_token_ns = record.t_done_ns
        heapq.heappush(running, (record.t_done_ns, record.seq, record))

    def take_places() -> None:
        """Use the places of a closed loop as a worker does."""
        while waiting and free_ns and free_ns[0] < closes_ns[0]:
            record = waiting.popleft()
            record.t_intended_ns = free_ns.popleft()
            send(record, record.t_intended_ns)

    def end(until_ns: float) -> None:
        while running and running[0][0] <= until_ns:
            end_ns, _, record = heapq.heappop(running)
            plan.take(record)
            free_ns.append(end_ns)
            take_places()

    while True:
        end(now_ns)
        while next_look_ns <= now_ns:
            plan.look()
            next_look_ns += 250_000_000
        items, next_ns = plan.step(now_ns, now_ns + LEAD_NS)
        for item in items:
            if isinstance(item, Window):
                if item.goes_on:
                    due = {record.seq: record.t_intended_ns for _, _, record in running}
                    plan.take_unanswered([s for s, due_ns in due.items() if due_ns < item.stop_ns])
                else:
                    closes_ns[0] = item.stop_ns
                continue
            assert isinstance(item, tuple)
            record = item[0]
            if record.t_intended_ns == WAITS:
                waiting.append(record)
                continue
            assert record.t_intended_ns <= now_ns + LEAD_NS, "handed out before its lead"
            send(record, max(now_ns, record.t_intended_ns))
        take_places()
        if next_ns is None:
            end(math.inf)
            for record in waiting:
                plan.take(record)
            assert plan.outstanding == 0
            return plan
        assert next_ns > now_ns, "the plan would be asked in a tight loop"
        wake_ns = next_ns - LEAD_NS
        if plan.wakes_on_result and running:
            wake_ns = min(wake_ns, running[0][0])
        now_ns = max(now_ns + 1, wake_ns)


class Response(Reader):
    """A reader of one response that stores the connection's reports; `ended` is set at its end."""

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

    def on_last(self, chunk: bytes, stamp: int) -> None:
        self.on_body(chunk, stamp)
        self.on_end(stamp)

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


async def answered(pool: Pool, script: str) -> Response:
    """Return the response to a request for `script` on a connection of the pool."""
    connection = await pool.acquire()
    response = await ask(connection, script)
    pool.release(connection)
    return response

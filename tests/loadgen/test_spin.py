"""The spin before a send must not keep the worker from reading and from its other work."""

import asyncio
import os
import socket
import time
from collections import Counter
from pathlib import Path

import uvloop

from connector_tax.loadgen.messages import Begin, RequestRecord, WorkerSettings
from connector_tax.loadgen.transport import InFlight, shared_memory
from connector_tax.loadgen.worker import Worker


def test_dense_requests_leave_turns_to_the_rest_of_the_loop(tmp_path: Path) -> None:
    """300 requests 0.3 ms apart, each within the spin of the one before it."""
    count = 300

    async def main() -> None:
        loop = asyncio.get_running_loop()
        descriptor = shared_memory(1)
        inflight = InFlight(descriptor, 1)
        inflight.limit(0)
        worker = Worker(loop, settings, inflight)
        worker._begin_run(Begin(1, 0, 10_000_000_000, False, "counts"))
        turn = 0
        sent_in_turn: Counter[int] = Counter()
        fire = worker._fire

        def counted(*request: object) -> None:
            sent_in_turn[turn] += 1
            fire(*request)  # type: ignore[arg-type]

        worker._fire = counted  # type: ignore[method-assign, assignment]
        start_ns = time.monotonic_ns() + 5_000_000
        for seq in range(count):
            due_ns = start_ns + 300_000 * seq
            record = RequestRecord(request_id=f"r{seq}", seq=seq, t_intended_ns=due_ns)
            worker._hold(record, b"{}")
        async with asyncio.timeout(10):
            while sent_in_turn.total() < count:
                await asyncio.sleep(0)
                turn += 1
        assert max(sent_in_turn.values()) <= 8
        # A context of ZMQ waits for ever, whenever it is collected, for a socket that is open.
        worker._results.close()
        worker._requests.close()
        os.close(descriptor)

    with socket.create_server(("127.0.0.1", 0), backlog=512) as listening:
        settings = WorkerSettings(
            worker=0, parent=os.getpid(), folder=str(tmp_path), inflight_fd=-1, workers=1,
            family=socket.AF_INET, host="127.0.0.1", port=listening.getsockname()[1],
            tls=None, strict=True, head="POST / HTTP/1.1\r\n", chat=False, stream=True,
            connections=count, kernel_stamps=True,
        )  # fmt: skip
        uvloop.run(main())

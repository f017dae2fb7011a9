"""Test a single worker: its spin, batched results, and the memory of a long run."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import msgspec
import pytest
import uvloop

from connector_tax.loadgen import worker as worker_module
from connector_tax.loadgen.answers import HeldRequest
from connector_tax.loadgen.http import FAR_NS, Poller
from connector_tax.loadgen.messages import (
    Begin,
    Ended,
    FromWorker,
    RequestRecord,
    Target,
    WorkerSettings,
)
from connector_tax.loadgen.sink import PENDING_BYTES, RecordSink
from connector_tax.loadgen.transport import InFlight, shared_memory
from connector_tax.loadgen.worker import Worker


@contextlib.contextmanager
def working(folder: Path, port: int, connections: int, begin: Begin) -> Iterator[Worker]:
    """Yield a worker that runs in this process's event loop."""
    descriptor = shared_memory(1)
    inflight = InFlight(descriptor, 1)
    inflight.limit(0)
    settings = WorkerSettings(
        worker=0, workers=1, family=socket.AF_INET, host="127.0.0.1",
        target=Target("127.0.0.1", port), strict=True, connections=connections, folder=str(folder),
    )  # fmt: skip
    worker = Worker(asyncio.get_running_loop(), settings, inflight)
    worker._begin_run(begin)
    yield worker
    # When a ZMQ context is collected, it waits forever for sockets that are still open.
    worker._results.close()
    worker._requests.close()
    os.close(descriptor)


def test_other_loop_callbacks_run_between_dense_requests(tmp_path: Path) -> None:
    """Send 300 requests 0.3 ms apart, each due during the spin of the previous one."""
    count = 300
    sent_in_turn: Counter[int] = Counter()

    async def main() -> None:
        begin = Begin(1, 0, 10_000_000_000, False, "counts")
        with working(tmp_path, listening.getsockname()[1], count, begin) as worker:
            await send_all(worker)

    async def send_all(worker: Worker) -> None:
        turn = 0
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

    with socket.create_server(("127.0.0.1", 0), backlog=512) as listening:
        uvloop.run(main())
    # A turn sends the late requests, then the ones that the timer fires.
    assert max(sent_in_turn.values()) <= 16


class Ready:
    """A socket with one byte to read, in place of a connection."""

    def __init__(self, number: int, served: list[int]) -> None:
        self.sock, self._peer = socket.socketpair()
        self._number, self._served = number, served
        self._peer.send(b".")

    def on_readable(self) -> None:
        self.sock.recv(1)
        self._served.append(self._number)

    def close(self) -> None:
        self.sock.close()
        self._peer.close()


def test_sends_precede_first_tokens_which_precede_later_reads() -> None:
    served: list[int] = []
    with contextlib.closing(uvloop.new_event_loop()) as loop:
        poller = Poller(loop)
        begun = Poller.BATCH + Poller.LEAST + 4
        with contextlib.ExitStack() as stack:
            for number in range(begun + 1):
                ready = stack.enter_context(contextlib.closing(Ready(number, served)))
                poller.add(ready)  # type: ignore[arg-type]
                if number < begun:
                    poller.move(ready, streams=True, writes=False)  # type: ignore[arg-type]
            poller.until_ns = 0
            poller.serve_ready()
            assert served == [begun, *range(Poller.LEAST - 1)]
            poller.until_ns = FAR_NS
            poller.serve_ready()
            poller.serve_one()
            assert sorted(served) == [*range(Poller.BATCH + Poller.LEAST), begun]
            poller.close()


def test_busy_poller_serves_all_polled_events_before_polling_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Keep a send due at all times: a wrong poller would poll unserved sockets again and again."""
    served: list[int] = []
    looked_at: list[int] = []
    with contextlib.closing(uvloop.new_event_loop()) as loop, contextlib.ExitStack() as stack:
        poller = Poller(loop)
        epoll = poller._streaming

        class Counting:
            def poll(self, timeout: float, most: int) -> list[tuple[int, int]]:
                events = epoll.poll(timeout, most)
                looked_at.append(len(events))
                return events

        for number in range(300):
            ready = stack.enter_context(contextlib.closing(Ready(number, served)))
            poller.add(ready)  # type: ignore[arg-type]
            poller.move(ready, streams=True, writes=False)  # type: ignore[arg-type]
        poller.until_ns = 0
        with monkeypatch.context() as patch:
            patch.setattr(poller, "_streaming", Counting())
            while len(served) < 300:
                poller.serve_ready()
        assert sum(looked_at) == 300
        poller.close()


@pytest.mark.parametrize(("most", "messages"), [(500, 3), (5000, 1)])
def test_results_share_a_message_up_to_its_size_limit(
    most: int, messages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = msgspec.msgpack.Decoder(FromWorker).decode
    frames: list[bytes] = []
    all_sent = asyncio.Event()

    def send(frame: bytes) -> bool:
        frames.append(frame)
        if len(frames) == messages:
            all_sent.set()
        return True

    async def main() -> None:
        begin = Begin(1, 0, 10_000_000_000, False, "text", prompt=False)
        with working(tmp_path, 1, 1, begin) as worker:
            worker._results.send = send  # type: ignore[method-assign, assignment]
            for seq in range(3):
                record = RequestRecord(request_id="r", seq=seq, t_intended_ns=1, output="x" * 300)
                request = HeldRequest(worker, record, b"")
                worker._requests_by_seq[seq] = request
                worker._finish(request, None)
            assert frames == []
            await asyncio.wait_for(all_sent.wait(), 5)

    monkeypatch.setattr(worker_module, "MAX_MESSAGE", most)
    uvloop.run(main())
    ended = [message for message in map(decode, frames) if isinstance(message, Ended)]
    assert len(ended) == len(frames) == messages
    assert [(done.seq, done.status) for message in ended for done in message.results] == [
        (seq, "ok") for seq in range(3)
    ]


def test_records_are_flushed_to_the_file_at_the_memory_limit(tmp_path: Path) -> None:
    """Deliver results faster than lines are written, and never show progress."""
    path = tmp_path / "out.jsonl"
    sink = RecordSink(path, {})
    # 5,000 reads with one token each: more than 50,000 bytes of a line.
    reads = array("q", chain.from_iterable((10**9 + n, 1) for n in range(5000))).tobytes()
    taken = 0
    while taken * 50_000 < 3 * PENDING_BYTES:
        sink.take(RequestRecord(request_id="r", seq=taken, t_intended_ns=0, raw_reads=reads))
        taken += 1
    assert path.stat().st_size > PENDING_BYTES
    sink.close()
    assert path.read_bytes().count(b"\n") == taken


def test_worker_process_starts_without_httpx_and_numpy() -> None:
    code = (
        "import connector_tax.loadgen.worker, sys;"
        "sys.exit(', '.join({'httpx', 'numpy'} & sys.modules.keys()) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")

"""Test shared state of processes: bounded ordered messages, places in flight, loop lag."""

import asyncio
import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any, cast

import msgspec
import pytest
import uvloop
import zmq
from hypothesis import given
from hypothesis import strategies as st

from connector_tax.loadgen import transport
from connector_tax.loadgen.dispatcher import PART_BYTES, _parts
from connector_tax.loadgen.messages import (
    Cancel,
    Ended,
    FromWorker,
    RequestRecord,
    Requests,
    ToWorker,
)
from connector_tax.loadgen.transport import (
    InFlight,
    LoopProbe,
    Receiver,
    Sender,
    private_socket,
    shared_memory,
)

encode = msgspec.msgpack.Encoder().encode


def issue(seq: int, body: bytes = b"") -> Requests:
    return Requests([(RequestRecord(request_id="r", seq=seq, t_intended_ns=2), body)])


class Received(Receiver):
    """A receiver that stores its messages."""

    def __init__(self, pull: "zmq.Socket[bytes]") -> None:
        self._messages: asyncio.Queue[ToWorker] = asyncio.Queue()
        decoder = msgspec.msgpack.Decoder(ToWorker)
        super().__init__(asyncio.get_running_loop(), pull, decoder, self._messages.put_nowait)

    async def take(self, count: int) -> list[ToWorker]:
        async with asyncio.timeout(10):
            return [await self._messages.get() for _ in range(count)]


def send_over(
    backlog: int, main: Callable[[Sender, Callable[[], Received]], Coroutine[Any, Any, None]]
) -> None:
    """Run `main` with a sender, and with a function that makes the receiver at the other end."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pull, push = private_socket(context, zmq.PULL), private_socket(context, zmq.PUSH)
    port = pull.bind_to_random_port("tcp://127.0.0.1")
    push.connect(f"tcp://127.0.0.1:{port}")

    async def with_sender() -> None:
        await main(Sender(asyncio.get_running_loop(), push, backlog), lambda: Received(pull))

    uvloop.run(with_sender())
    context.destroy()


def test_bad_messages_are_counted_and_good_messages_arrive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main(sender: Sender, receive: Callable[[], Received]) -> None:
        receiver = receive()
        sender.send(b"\xc1 not msgpack")
        sender.send(encode([99, "unknown tag"]))
        sender.send(encode([1, [["wrong", b"types"]]]))
        sender.send(b"x" * 5000)
        sender.send(encode(issue(1, b"y" * 5000)))
        sender.send(encode(issue(1, b"z" * 800)))
        sender.send(encode(Cancel("drain_timeout", None)))
        assert await receiver.take(2) == [issue(1, b"z" * 800), Cancel("drain_timeout", None)]
        assert (receiver.undecodable, receiver.oversized) == (3, 2)

    monkeypatch.setattr(transport, "MAX_MESSAGE", 1000)
    send_over(10, main)


@given(sizes=st.lists(st.integers(0, 3 * PART_BYTES // 2), min_size=1, max_size=8))
def test_requests_of_a_batch_share_messages_up_to_a_size(sizes: list[int]) -> None:
    batch = [issue(seq, bytes(size)).requests[0] for seq, size in enumerate(sizes)]
    parts = list(_parts(batch))
    assert [request for part in parts for request in part] == batch
    for part, later in itertools.pairwise([*parts, []]):
        size = sum(len(body) for _, body in part)
        assert len(part) == 1 or size <= PART_BYTES
        assert not later or size + len(later[0][1]) > PART_BYTES


def test_slow_peer_receives_everything_in_order() -> None:
    async def main(sender: Sender, receive: Callable[[], Received]) -> None:
        sent = [issue(seq, b"b" * 500) for seq in range(40_000)]  # over both high-water marks
        assert all(sender.send(encode(message)) for message in sent)
        assert await receive().take(len(sent)) == sent
        assert sender.dropped == 0

    send_over(50_000, main)


def test_a_peer_that_never_reads_costs_bounded_memory_and_is_counted() -> None:
    async def main(sender: Sender, _receive: Callable[[], Received]) -> None:
        loop = asyncio.get_running_loop()
        sent = [sender.send(b"x" * 1000) for _ in range(60_000)]
        refused = sent.count(False)
        assert refused == sender.dropped > 0
        assert sent[-1] is False
        # It does not spin either: the loop turns freely and nothing more happens.
        turns = 0
        end = loop.time() + 0.05
        while loop.time() < end:
            await asyncio.sleep(0.001)
            turns += 1
        assert turns > 10
        assert sender.dropped == refused

    send_over(100, main)


def test_result_is_unchanged_after_encoding_and_decoding() -> None:
    done = RequestRecord(
        request_id="r", seq=7, t_intended_ns=2, raw_reads=b"\0" * 32, output="tëxt", retries=1,
        parents=("a", "b"), wanted=(None, 3), tolerated="no_done",
    )  # fmt: skip
    done.fail("http_status", "500: tëxt")
    assert msgspec.msgpack.Decoder(FromWorker).decode(encode(Ended([done]))) == Ended([done])


def test_message_is_sent_when_its_peer_attaches_during_draining() -> None:
    """Attach the peer after the last try to send and before the socket's events are read."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pull, push = private_socket(context, zmq.PULL), private_socket(context, zmq.PUSH)
    push.bind("inproc://late")
    attached: list[int] = []

    class AttachingLate:
        def __getattr__(self, name: str) -> Any:
            return getattr(push, name)

        def getsockopt(self, option: int) -> Any:
            if not attached:
                attached.append(option)
                pull.connect("inproc://late")
            return push.getsockopt(option)

    async def main() -> None:
        late = cast("zmq.Socket[bytes]", AttachingLate())
        sender = Sender(asyncio.get_running_loop(), late, backlog=10)
        # Only one message, since sending a second one would also send the first.
        assert sender.send(encode(issue(7)))
        assert await Received(pull).take(1) == [issue(7)]
        assert attached == [zmq.EVENTS]

    try:
        uvloop.run(main())
    finally:
        context.destroy()


# Takes and frees all places as fast as it can; prints the highest count while it held all of them.
# While it holds fewer, other processes change the counts during the sum.
CONTENDER = """
import sys
from connector_tax.loadgen.transport import InFlight
descriptor, workers, worker, cap = map(int, sys.argv[1:])
inflight = InFlight(descriptor, workers)
print("up", flush=True)
sys.stdin.readline()
most = 0
for _ in range(20_000):
    held = 0
    while held < cap and inflight.enter(worker):
        held += 1
    if held == cap:
        most = max(most, inflight.count())
    for _ in range(held):
        inflight.leave(worker)
print(most)
"""


@pytest.mark.parametrize("cap", [1, 3])
def test_concurrent_workers_never_exceed_the_inflight_cap(cap: int) -> None:
    workers = 4
    descriptor = shared_memory(workers)
    inflight = InFlight(descriptor, workers)
    inflight.limit(cap)
    contenders = [
        subprocess.Popen(
            [sys.executable, "-c", CONTENDER, *map(str, (descriptor, workers, worker, cap))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=(descriptor,),
        )
        for worker in range(workers)
    ]
    for contender in contenders:
        assert contender.stdout is not None
        assert contender.stdout.readline() == "up\n"
    for contender in contenders:
        assert contender.stdin is not None
        contender.stdin.write("go\n")
        contender.stdin.flush()
    assert max(int(contender.communicate()[0]) for contender in contenders) == cap
    assert inflight.count() == 0
    assert [inflight.enter(0) for _ in range(cap + 1)] == [*[True] * cap, False]


def test_inflight_places_of_a_dead_worker_are_freed() -> None:
    inflight = InFlight(shared_memory(2), 2)
    inflight.limit(3)
    assert [inflight.enter(worker) for worker in (0, 0, 1, 1)] == [True, True, True, False]
    inflight.forget_worker(0)
    assert inflight.count() == 1
    assert [inflight.enter(1) for _ in range(3)] == [True, True, False]


def test_new_limit_counts_requests_still_in_flight() -> None:
    inflight = InFlight(shared_memory(1), 1)
    inflight.limit(0)
    assert all(inflight.enter(0) for _ in range(1000))
    for _ in range(998):
        inflight.leave(0)
    inflight.limit(3)
    assert [inflight.enter(0) for _ in range(2)] == [True, False]


def test_loop_lag_equals_the_time_that_the_loop_was_blocked() -> None:
    async def main() -> None:
        begin = time.monotonic()
        probe = LoopProbe(asyncio.get_running_loop())
        await asyncio.sleep(0.5)
        time.sleep(0.1)
        await asyncio.sleep(0.4)
        values = probe.values()
        probe.close()
        lasted_ms = (time.monotonic() - begin) * 1e3
        assert 80 < values["loop_lag_max_ms"] <= lasted_ms - 800
        assert values["loop_lag_p99_ms"] > 50  # a tenth of the time, not one tick of ninety
        assert len(probe.lags_ns) == pytest.approx(lasted_ms / 10, abs=5)

    uvloop.run(main())

"""Test that connections are passed between requests, and their reads are stamped."""

import asyncio
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import uvloop

from connector_tax.loadgen.messages import RequestFailed
from connector_tax.loadgen.pool import Pool
from tests.loadgen.fault_server import (
    HEAD,
    FaultServer,
    Pause,
    Step,
    chunked,
    good_events,
)
from tests.loadgen.running import answered, ask

CLOCK = "connector_tax.loadgen.http._time_ns"

BODY = b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n0123456789"
SCRIPTS: dict[str, list[Step]] = {
    "whole": [BODY],
    "late": [Pause(0.05), BODY],
    "halves": [BODY[:-5], Pause(0.05), BODY[-5:]],
    "stream": [
        HEAD,
        Pause(0.005),
        *(step for e in good_events() for step in (chunked(e, last=False), Pause(0.005))),
        b"0\r\n\r\n",
    ],
}


@pytest.fixture(scope="module")
def server() -> Iterator[FaultServer]:
    with FaultServer(SCRIPTS) as running:
        yield running


def run(main: Callable[[Pool], Coroutine[Any, Any, None]], port: int, limit: int = 2) -> None:
    async def with_pool() -> None:
        loop = asyncio.get_running_loop()
        pool = Pool(loop, socket.AF_INET, ("127.0.0.1", port), limit, strict=True)
        await main(pool)
        pool.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(with_pool())


def test_request_waits_only_without_an_idle_connection(server: FaultServer) -> None:
    async def main(pool: Pool) -> None:
        assert pool.take() is None
        pool.release(await pool.acquire())  # never used, hence not reusable: closed
        assert pool.take() is None
        assert await pool.open(2) is None
        a, b = pool.take(), pool.take()
        assert a is not None
        assert b is not None
        waiting = asyncio.ensure_future(pool.acquire())
        await asyncio.sleep(0)
        assert not waiting.done()
        await ask(a, "whole")
        pool.release(a)
        assert await waiting is a
        for connection in (a, b):
            await ask(connection, "whole")
            pool.release(connection)
        assert pool.idle == 2
        # Last in, first out: the working set stays warm.
        assert pool.take() is b
        pool.release(b)

    run(main, server.port)


def test_reads_are_stamped_in_user_space_without_kernel_stamps(
    server: FaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(pool: Pool) -> None:
        before = time.monotonic_ns()
        response = await answered(pool, "whole")
        assert before <= response.head_ns <= time.monotonic_ns()
        assert pool.stamps.unstamped == pool.stamps.reads == 1

    monkeypatch.setattr("connector_tax.loadgen.pool.enable_kernel_stamps", lambda _: False)
    run(main, server.port)


@pytest.mark.parametrize("step_s", [3600, -3600])
def test_a_step_of_the_wall_clock_never_reaches_a_stamp(
    server: FaultServer, monkeypatch: pytest.MonkeyPatch, step_s: int
) -> None:
    async def main(pool: Pool) -> None:
        monkeypatch.setattr(CLOCK, lambda: time.time_ns() + step_s * 10**9)
        before = time.monotonic_ns()
        response = await answered(pool, "whole")
        assert before <= response.head_ns <= time.monotonic_ns()
        assert pool.stamps.unstamped > 0

    run(main, server.port)


def test_pause_between_reading_two_clocks_does_not_shift_a_stamp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []

    def interrupted() -> int:
        calls.append(0)
        if len(calls) == 1:
            time.sleep(0.01)
        return time.time_ns()

    async def main(pool: Pool) -> None:
        connection = await pool.acquire()
        server, _ = await asyncio.get_running_loop().sock_accept(listening)
        with server:
            asked = asyncio.ensure_future(ask(connection, "any"))
            await asyncio.sleep(0.05)
            monkeypatch.setattr(CLOCK, interrupted)
            sent_ns = time.monotonic_ns()
            server.send(BODY)
            response = await asked
        assert len(calls) > 1
        assert sent_ns <= response.head_ns < sent_ns + 5_000_000
        assert (pool.stamps.reads, pool.stamps.unstamped, pool.stamps.clock_gaps) == (1, 0, 1)
        pool.release(connection)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        run(main, listening.getsockname()[1])


def test_each_chunk_carries_its_stamp(server: FaultServer) -> None:
    async def main(pool: Pool) -> None:
        for script in ("whole", "late"):
            response = await answered(pool, script)
            assert (response.status, response.body) == (200, b"0123456789")
        response = await answered(pool, "halves")
        assert [chunk for chunk, _ in response.chunks] == [b"01234", b"56789"]
        response = await answered(pool, "stream")
        # One chunk for each arrival, with its stamp; two events share one if the reader was
        # delayed.
        assert response.body == b"".join(good_events())
        times = [stamp for _, stamp in response.chunks]
        assert times == sorted(set(times))
        assert response.head_ns <= times[0] <= times[-1] <= response.end_ns

    run(main, server.port)


def test_cancelled_waiter_passes_its_connection_to_the_next(server: FaultServer) -> None:
    async def main(pool: Pool) -> None:
        held = await pool.acquire()
        first = asyncio.ensure_future(pool.acquire())
        second = asyncio.ensure_future(pool.acquire())
        await asyncio.sleep(0)
        await ask(held, "whole")
        pool.release(held)  # goes to the first waiter, which is cancelled in the same moment
        first.cancel()
        assert await asyncio.wait_for(second, 5) is held
        assert first.cancelled()
        held.close()

    run(main, server.port, limit=1)


def test_failed_connect_frees_a_place_for_the_next_waiter() -> None:
    async def main(pool: Pool) -> None:
        outcomes = await asyncio.gather(*(pool.acquire() for _ in range(5)), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [RequestFailed] * 5

    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        run(main, bound.getsockname()[1], limit=1)

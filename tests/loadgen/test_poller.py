"""Tasks that wait for bytes which are there are woken one by one, not all in one turn."""

import asyncio
import socket
import time

import uvloop

from connector_tax.loadgen import poller
from connector_tax.loadgen.poller import Poller


class _Unread:
    """A connection whose task waits; notes when it was woken."""

    def __init__(self) -> None:
        self.sock = socket.socket()
        self.woken_ns = 0
        self.woken = asyncio.Event()

    def on_readable(self) -> None: ...

    def on_writable(self) -> None: ...

    def wake(self) -> None:
        self.woken_ns = time.monotonic_ns()
        self.woken.set()


def test_each_task_is_woken_after_its_own_time() -> None:
    async def main() -> None:
        watching = Poller(asyncio.get_running_loop())
        connections = [_Unread(), _Unread()]
        asked_ns = []
        for connection in connections:
            asked_ns.append(time.monotonic_ns())
            watching.wake_later(connection)
            await asyncio.sleep(poller.UNREAD_NS / 2e9)
        async with asyncio.timeout(5):
            for connection in connections:
                await connection.woken.wait()
        for connection, since_ns in zip(connections, asked_ns, strict=True):
            assert connection.woken_ns - since_ns >= poller.UNREAD_NS
            connection.sock.close()
        watching.close()

    uvloop.run(main())

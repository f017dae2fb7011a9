"""The pool of connections to one address."""

import asyncio
import socket
import ssl
from collections import deque

from connector_tax.loadgen.http import Connection, os_text
from connector_tax.loadgen.messages import RequestFailed
from connector_tax.loadgen.poller import Poller
from connector_tax.loadgen.stamps import (
    KernelReader,
    PlainReader,
    StampCounts,
    enable_kernel_stamps,
)
from connector_tax.loadgen.tls import TlsClient, tls_text

READ_BYTES = 256 * 1024
FILL_S = 5.0
"""How long opening connections ahead may take, in all."""


class Pool:
    """At most `limit` connections to one address; the most recently used idle one goes first.

    Last in, first out keeps the working set warm. Waiters are served first in, first out.
    `connecting` limits how many handshakes run at once, so that a burst does not overflow the
    server's accept queue.
    """

    CONNECTING = 32

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        family: int,
        address: tuple[str, int],
        limit: int,
        kernel_stamps: bool,
        tls: TlsClient | None = None,
    ) -> None:
        self._loop = loop
        self._family = family
        self._address = address
        self._limit = limit
        self.stamps = StampCounts()
        self._kernel_stamps = kernel_stamps
        self._tls = tls
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._poller = Poller(loop)
        self._idle: list[Connection] = []
        self._size = 0
        self._waiters: deque[asyncio.Future[Connection | None]] = deque()
        self._connecting = asyncio.Semaphore(self.CONNECTING)
        self.waited = 0
        self.opened = 0

    @property
    def idle(self) -> int:
        """How many connections wait for a request."""
        return len(self._idle)

    def serve_ready(self, most: int) -> None:
        """Read from up to `most` connections that have something now."""
        self._poller.serve_ready(most)

    def take(self) -> Connection | None:
        """An idle connection, or None."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_stale():
                return connection
            self._discard(connection)
        return None

    async def acquire(self) -> Connection:
        """Return a connection; suspends only if none is idle.

        Raises:
            RequestFailed: `connect_refused` or `connect_failed`.
        """
        while True:
            idle = self.take()
            if idle is not None:
                return idle
            if self._size < self._limit:
                # The slot is taken before waiting, else the pool would overshoot its limit.
                self._size += 1
                return await self._connect()
            self.waited += 1
            waiter: asyncio.Future[Connection | None] = self._loop.create_future()
            self._waiters.append(waiter)
            try:
                connection_or_none = await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    # Handed over in the same moment: pass on what this waiter will not use.
                    handed = waiter.result()
                    if handed is None:
                        self._wake_next(None)
                    else:
                        self.put_back(handed)
                raise
            if connection_or_none is None:
                continue
            if not connection_or_none.is_stale():
                return connection_or_none
            self._discard(connection_or_none)

    def release(self, connection: Connection) -> None:
        """Take back a connection whose response has ended, for the next request if it can."""
        if connection.release():
            self.put_back(connection)
        else:
            self._discard(connection)

    async def fill(self) -> str | None:
        """Open connections up to the limit, for FILL_S at most; return what stopped it, or None."""
        missing = self._limit - self._size
        self._size += missing
        tasks = [self._loop.create_task(self._connect()) for _ in range(missing)]
        problem: str | None = None
        if tasks:
            _, pending = await asyncio.wait(tasks, timeout=FILL_S)
            for task in pending:
                task.cancel()
            if pending:
                problem = f"connect_failed: no answer from the server within {FILL_S:g} s"
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Connection):
                self.put_back(outcome)
            elif isinstance(outcome, RequestFailed):
                problem = f"{outcome.kind}: {outcome.detail}"
            elif not isinstance(outcome, asyncio.CancelledError):
                problem = f"connect_failed: {type(outcome).__name__}: {outcome}"
        # A server may close what it accepted before this connection was idle.
        self.drop_stale()
        return problem

    def drop_stale(self) -> None:
        """Close every idle connection that would not be reused."""
        for connection in [c for c in self._idle if c.is_stale()]:
            self._idle.remove(connection)
            self._discard(connection)

    def close(self) -> None:
        """Close the idle connections; none may be in use."""
        while self._idle:
            self._discard(self._idle.pop())
        self._poller.close()

    def put_back(self, connection: Connection) -> None:
        """Give a connection that carries no request to the next waiter, or keep it idle."""
        if not self._wake_next(connection):
            self._idle.append(connection)

    def _wake_next(self, connection: Connection | None) -> bool:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(connection)
                return True
        return False

    def _discard(self, connection: Connection) -> None:
        connection.close()
        self._size -= 1
        self._wake_next(None)  # there is room for a waiter to connect

    def _on_idle_data(self, connection: Connection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)
            self._discard(connection)

    async def _connect(self) -> Connection:
        sock: socket.socket | None = None
        try:
            async with self._connecting:
                sock = socket.socket(self._family, socket.SOCK_STREAM)
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._kernel_stamps:
                    enable_kernel_stamps(sock)
                await self._loop.sock_connect(sock, self._address)
                tls = None
                if self._tls is not None:
                    tls = await self._tls.handshake(self._loop, sock)
        except BaseException as error:
            if sock is not None:
                sock.close()
            self._size -= 1
            self._wake_next(None)
            if isinstance(error, ssl.SSLError):
                raise RequestFailed("tls_failed", tls_text(error)) from None
            if isinstance(error, ConnectionRefusedError):
                raise RequestFailed("connect_refused", os_text(error)) from None
            if isinstance(error, OSError):
                raise RequestFailed("connect_failed", os_text(error)) from None
            raise
        self.opened += 1
        read = (
            KernelReader(sock, self._buffer, self.stamps)
            if self._kernel_stamps
            else PlainReader(sock, self._buffer)
        )
        return Connection(self._loop, self._poller, sock, read, tls, self._on_idle_data)

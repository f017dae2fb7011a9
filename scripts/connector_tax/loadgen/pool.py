"""The pool of connections to one address."""

import asyncio
import errno
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from connector_tax.loadgen.http import (
    Connection,
    Poller,
    StampCounts,
    TlsSession,
    enable_kernel_stamps,
    os_text,
    tls_context,
    tls_text,
)
from connector_tax.loadgen.messages import RequestFailed, TlsSettings

READ_BYTES = 256 * 1024
FILL_S = 5.0
"""The longest time that opening connections ahead may take in total."""
MAX_IDLE_NS = 4_000_000_000
"""A connection that idled longer is not used. uvicorn, which serves vLLM, closes after 5 s, and a
request written in that moment fails although the server is healthy. Load balancers drop idle
connections too.
"""
YOUNG_NS = 1_000_000_000
"""A connection used this recently counts as alive, unless `strict`; if it is dead, the request is
sent again.
"""
SPARE = 4
SPARE_PART = 4
"""Spare connections to keep open: SPARE, or the number in use over SPARE_PART if that is more.
There are few, since a server may dedicate a thread to each.
"""
LOOK_S = 0.5


PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def connect_text(error: OSError) -> str:
    """Return the error of a failed connection, with advice if a limit of this machine caused it."""
    text = os_text(error)
    if error.errno == errno.EADDRNOTAVAIL and PORT_RANGE.exists():
        first, last = map(int, PORT_RANGE.read_text().split())
        text += (
            f"; all {last - first + 1} local ports to this address may be in use (sysctl "
            f"net.ipv4.ip_local_port_range is {first} {last}). Widen it, or lower the load. If "
            "the server closes each connection, a port is free again after 60 s"
        )
    elif error.errno in (errno.EMFILE, errno.ENFILE):
        text += "; raise the limit of open files (ulimit -n), or lower --connections"
    return text


class Pool:
    """A pool of at most `limit` connections to one address; idle connections form a stack.

    Last in, first out keeps the working set warm. Waiters are served first in, first out. At most
    CONNECTING handshakes run at once, so that a burst does not overflow the server's accept queue.

    Between `open` and `pause` some spare connections are kept open, and idle connections are
    replaced before they are too old. With `strict` neither happens: all connections are opened
    before a run, and only a connection that idled since its last use can be too old.
    """

    CONNECTING = 32

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        family: int,
        address: tuple[str, int],
        limit: int,
        tls: TlsSettings | None = None,
        strict: bool = False,
    ) -> None:
        self._loop = loop
        self._family = family
        self._address = address
        self._limit = limit
        self.stamps = StampCounts()
        self._tls = None if tls is None else (tls_context(tls), tls.name)
        self._strict = strict
        self._buffer = memoryview(bytearray(READ_BYTES))
        self.poller = Poller(loop)
        self._idle: deque[Connection] = deque()  # the right end is used first
        self._size = 0
        self._spares: set[asyncio.Task[None]] = set()
        self._look: asyncio.TimerHandle | None = None
        self._refused_ns = 0
        self._waiters: deque[asyncio.Future[Connection | None]] = deque()
        self._connecting = asyncio.Semaphore(self.CONNECTING)
        self.waited = 0

    @property
    def idle(self) -> int:
        return len(self._idle)

    def take(self) -> Connection | None:
        connection = self._take()
        if self._look is not None:
            self._open_spares()
        return connection

    def _take(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not self._is_stale(connection):
                return connection
            self._discard(connection)
        return None

    def _is_stale(self, connection: Connection) -> bool:
        idle_ns = time.monotonic_ns() - connection.idle_since_ns
        if connection.reused and idle_ns < YOUNG_NS and not self._strict:
            return False
        trusted = self._strict and not connection.reused
        return (idle_ns > MAX_IDLE_NS and not trusted) or connection.is_stale()

    async def acquire(self) -> Connection:
        """Return a connection; wait only if no connection is idle.

        Raises:
            RequestFailed: `connect_refused` or `connect_failed`.
        """
        while True:
            idle = self._take()
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
                    # A connection came in the same moment: pass it on.
                    handed = waiter.result()
                    if handed is None:
                        self._wake_next(None)
                    else:
                        self.put_back(handed)
                raise
            if connection_or_none is None:
                continue
            if not self._is_stale(connection_or_none):
                return connection_or_none
            self._discard(connection_or_none)

    def release(self, connection: Connection) -> None:
        """Take back a connection whose response has ended; reuse it if possible."""
        if connection.release():
            self.put_back(connection)
        else:
            self._discard(connection)

    async def open(self, count: int) -> str | None:
        """Open connections up to `count`, for FILL_S at most; return the error that stopped it, or
        None.
        """
        self.drop_idle(self._is_stale)
        missing = max(0, min(count, self._limit) - self._size)
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
        self.drop_idle(self._is_stale)
        if not self._strict and self._look is None:
            self._look = self._loop.call_later(LOOK_S, self._renew)
        return problem

    def pause(self) -> None:
        """Stop keeping spare connections open, until the next `open`."""
        if self._look is not None:
            self._look.cancel()
            self._look = None

    def drop_idle(self, which: Callable[[Connection], bool] = lambda _: True) -> None:
        for connection in [c for c in self._idle if which(c)]:
            self._idle.remove(connection)
            self._discard(connection)

    def _renew(self) -> None:
        """Replace idle connections before they are too old."""
        self._look = self._loop.call_later(LOOK_S, self._renew)
        at_ns = time.monotonic_ns() + round(LOOK_S * 1e9) - MAX_IDLE_NS
        self.drop_idle(lambda connection: connection.idle_since_ns < at_ns)
        self._open_spares()

    def _open_spares(self) -> None:
        """Open spare connections in the background."""
        opening = len(self._spares)
        busy = self._size - len(self._idle) - opening
        missing = max(SPARE, busy // SPARE_PART) - len(self._idle) - opening
        if missing <= 0 or time.monotonic_ns() < self._refused_ns:
            return
        for _ in range(min(missing, self._limit - self._size)):
            self._size += 1
            task = self._loop.create_task(self._open_spare())
            self._spares.add(task)
            task.add_done_callback(self._spares.discard)

    async def _open_spare(self) -> None:
        try:
            connection = await self._connect()
        except RequestFailed:  # the request that needs a connection reports the error
            self._refused_ns = time.monotonic_ns() + round(LOOK_S * 1e9)
            return
        if not self._wake_next(connection):
            connection.pooled = True
            self._idle.appendleft(connection)

    def close(self) -> None:
        """Close the idle connections; none may be in use."""
        self.pause()
        for task in self._spares:
            task.cancel()
        self.drop_idle()
        self.poller.close()

    def put_back(self, connection: Connection) -> None:
        """Give a connection that carries no request to the next waiter, or keep it idle."""
        if not self._wake_next(connection):
            connection.pooled = True
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
                enable_kernel_stamps(sock)
                await self._loop.sock_connect(sock, self._address)
                tls = None
                if self._tls is not None:
                    tls = TlsSession(*self._tls)
                    await tls.handshake(self._loop, sock)
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
                raise RequestFailed("connect_failed", connect_text(error)) from None
            raise
        return Connection(self.poller, sock, tls, self._buffer, self.stamps, self._on_idle_data)

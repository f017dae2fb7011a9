"""One epoll set for the sockets of a worker's connections."""

import asyncio
import select
import socket
import time
from collections import deque
from typing import Protocol

UNREAD_NS = 100_000_000
SWEEP_S = 0.005
"""How long a connection's task may wait for bytes that are stamped and buffered, and how often
that is looked at. All at once they would hold up the loop, 200 streams for 3 ms."""


class WatchedSocket(Protocol):
    """What the poller calls."""

    sock: socket.socket

    def on_readable(self) -> None:
        """Read what is there."""

    def on_writable(self) -> None:
        """Send more."""

    def wake(self) -> None:
        """Let the waiting task look at what is buffered."""


class Poller:
    """Watches the connections' sockets with one epoll set inside the event loop.

    uvloop's own add_reader would do but for one case: when bytes and a reset arrive together it
    calls the reader once and then stops watching (libuv ends a poll on POLLERR), so that the reset
    is never seen. One loop callback also serves every socket that is ready.
    """

    BATCH = 256

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._epoll = select.epoll()
        self._connections: dict[int, WatchedSocket] = {}
        self._unread: deque[tuple[int, WatchedSocket]] = deque()
        self._sweep: asyncio.TimerHandle | None = None
        loop.add_reader(self._epoll.fileno(), self._on_ready)

    def add(self, connection: WatchedSocket) -> None:
        """Call `connection.on_readable` whenever there is something to read."""
        descriptor = connection.sock.fileno()
        self._connections[descriptor] = connection
        self._epoll.register(descriptor, select.EPOLLIN)

    def want_write(self, connection: WatchedSocket, wanted: bool) -> None:
        """Also call, or stop calling, `connection.on_writable`."""
        mask = select.EPOLLIN | select.EPOLLOUT if wanted else select.EPOLLIN
        self._epoll.modify(connection.sock.fileno(), mask)

    def remove(self, connection: WatchedSocket) -> None:
        """Stop watching."""
        descriptor = connection.sock.fileno()
        if self._connections.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def wake_later(self, connection: WatchedSocket) -> None:
        """Wake the connection's task in UNREAD_NS, if it still waits then."""
        self._unread.append((time.monotonic_ns() + UNREAD_NS, connection))
        if self._sweep is None:
            self._sweep = self._loop.call_later(SWEEP_S, self._wake_unread)

    def _wake_unread(self) -> None:
        now_ns, unread = time.monotonic_ns(), self._unread
        while unread and unread[0][0] <= now_ns:
            unread.popleft()[1].wake()
        self._sweep = self._loop.call_later(SWEEP_S, self._wake_unread) if unread else None

    def close(self) -> None:
        """Let go of the loop."""
        if self._sweep is not None:
            self._sweep.cancel()
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()

    def _on_ready(self) -> None:
        self.serve_ready(self.BATCH)

    def serve_ready(self, most: int) -> None:
        """Serve up to `most` sockets that are ready now."""
        connections = self._connections
        for descriptor, events in self._epoll.poll(0, most):
            connection = connections.get(descriptor)
            if connection is None:
                continue
            if events & select.EPOLLOUT:
                connection.on_writable()
            if events & ~select.EPOLLOUT:
                connection.on_readable()

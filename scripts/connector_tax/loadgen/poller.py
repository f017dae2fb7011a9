"""One epoll set for the sockets of a worker's connections."""

import asyncio
import select
import socket
from typing import Protocol


class WatchedSocket(Protocol):
    """What the poller calls."""

    sock: socket.socket

    def on_readable(self) -> None:
        """Read what is there."""

    def on_writable(self) -> None:
        """Send more."""


class Poller:
    """Watches the connections' sockets with one epoll set inside the event loop.

    uvloop's own add_reader would do but for one case: when bytes and a reset arrive together it
    calls the reader once and then stops watching (libuv ends a poll on POLLERR), so that the reset
    is never seen. One loop callback also serves every socket that is ready.
    """

    BATCH = 64
    """Served in one turn of the loop: answers end and closed loops go on within it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._epoll = select.epoll()
        self._connections: dict[int, WatchedSocket] = {}
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

    def close(self) -> None:
        """Let go of the loop."""
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

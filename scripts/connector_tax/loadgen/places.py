"""The places of a closed loop in one worker: a request starts when another ends.

The main process hands on requests without a due time, some ahead. The ramp is its affair: its
requests have due times, and every request that ends leaves a place.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from connector_tax.loadgen.answer import HeldRequest

PAUSE_S = 1.0
PAUSE_AFTER = frozenset(
    (
        *("connect_refused", "connect_failed", "tls_failed"),
        *("reset_before_headers", "closed_before_headers"),
    )
)
"""After a failure of these kinds a place pauses, so that a dead server is not hammered."""


class Places:
    """Requests that wait for a place, and places that wait for a request.

    `stop_ns`: nothing that is due then or later is started.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, start: Callable[[HeldRequest, int], None]
    ) -> None:
        """`start`: called with the next request and its due time, which may be in the past."""
        self._loop = loop
        self._start = start
        self._waiting: deque[HeldRequest] = deque()
        self._free: deque[int] = deque()  # since when
        self.stop_ns: int | None = None

    def add(self, request: HeldRequest) -> None:
        """Take a request, which starts when there is a place."""
        self._waiting.append(request)
        if self._free:
            self._next(self._free.popleft())

    def free(self, since_ns: int, pauses: bool) -> None:
        """A place is free, or will be after a pause."""
        if not pauses:
            self._next(since_ns)
            return
        paused_ns = since_ns + round(PAUSE_S * 1e9)
        self._loop.call_later(PAUSE_S, self._next, paused_ns)

    def close(self) -> list[HeldRequest]:
        """Start nothing more; return what waits."""
        self.stop_ns = 0
        waiting, self._waiting = list(self._waiting), deque()
        return waiting

    def _next(self, since_ns: int) -> None:
        if not self._waiting:
            self._free.append(since_ns)
            return
        due_ns = since_ns + self._waiting[0].record.wait_after_ready_ns
        if self.stop_ns is None or due_ns < self.stop_ns:
            self._start(self._waiting.popleft(), due_ns)

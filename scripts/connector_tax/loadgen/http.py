"""HTTP/1.1 client: one connection's protocol and the pool of connections.

The protocol reads its socket itself (recvmsg) instead of through an asyncio transport, because only
so can the kernel's receive time come along with the bytes. Every read is stamped before parsing.
"""

import asyncio
import contextlib
import errno
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable

import httptools

from connector_tax.loadgen.messages import RequestFailed

READ_BYTES = 256 * 1024
MAX_BODY_BYTES = 64 * 1024 * 1024
MAX_IDLE_S = 4.0
"""A used connection that idled longer is not reused: uvicorn, which serves vLLM, closes after 5 s,
and a request written in that moment fails although the server is well."""

FILL_S = 5.0
"""How long opening connections ahead may take, in all."""

CLOCK_GAP_NS = 10_000
CLOCK_TRIES = 5
"""The two clocks are read between two readings of the one; further apart than CLOCK_GAP_NS, the
process was interrupted between them, and they are read again, up to CLOCK_TRIES times."""

WAKE_CHUNKS = 16
SWEEP_S = 0.05
"""A waiting response task is woken at once for headers, the end or a failure, else for every
WAKE_CHUNKS reads or after SWEEP_S: the stamps are already taken, and one wake-up per read would
cost as much as the read itself."""

_SO_TIMESTAMPNS = 35
_CONTROL_BYTES = socket.CMSG_SPACE(16)
_timespec = struct.Struct("qq").unpack_from
_monotonic_ns = time.monotonic_ns
_time_ns = time.time_ns

_WOULD_BLOCK = {errno.EAGAIN, errno.EWOULDBLOCK, errno.EINTR}


def enable_kernel_stamps(sock: socket.socket) -> bool:
    """Ask the kernel to stamp received segments (software, any interface); False if it cannot."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    except OSError:
        return False
    return True


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
        self._connections: dict[int, Connection] = {}
        self._unread: set[Connection] = set()
        self._sweep: asyncio.TimerHandle | None = None
        loop.add_reader(self._epoll.fileno(), self._on_ready)

    def add(self, connection: "Connection") -> None:
        """Call `connection.on_readable` whenever there is something to read."""
        descriptor = connection.sock.fileno()
        self._connections[descriptor] = connection
        self._epoll.register(descriptor, select.EPOLLIN)

    def want_write(self, connection: "Connection", wanted: bool) -> None:
        """Also call, or stop calling, `connection.on_writable`."""
        mask = select.EPOLLIN | select.EPOLLOUT if wanted else select.EPOLLIN
        self._epoll.modify(connection.sock.fileno(), mask)

    def remove(self, connection: "Connection") -> None:
        """Stop watching."""
        descriptor = connection.sock.fileno()
        if self._connections.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def wake_later(self, connection: "Connection") -> None:
        """Wake the connection's task with the next sweep."""
        self._unread.add(connection)
        if self._sweep is None:
            self._sweep = self._loop.call_later(SWEEP_S, self._wake_unread)

    def _wake_unread(self) -> None:
        self._sweep = None
        unread, self._unread = self._unread, set()
        for connection in unread:
            connection.wake()

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


class StampCounts:
    """What a pool's connections read: `reads`, those among them that were stamped by this process
    though the kernel was asked (`unstamped`), and those that read the clocks again (`clock_gaps`).
    """

    __slots__ = ("clock_gaps", "reads", "unstamped")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Count from zero."""
        self.reads = self.unstamped = self.clock_gaps = 0


class Connection:
    """One connection. At most one response at a time is read from it.

    The stamp of a read is when the kernel received the last segment in it, or, without kernel
    stamps, when the read returned. Chunks of the body that arrive together share it.
    """

    __slots__ = (
        "_chunks",
        "_complete",
        "_drained",
        "_failure",
        "_framed",
        "_headers_done",
        "_keep_alive",
        "_loop",
        "_not_before_ns",
        "_on_idle_data",
        "_parser",
        "_parts",
        "_poisoned",
        "_poller",
        "_read",
        "_status",
        "_unsent",
        "_waiter",
        "busy",
        "closed",
        "idle_since_ns",
        "sock",
        "t_done_ns",
        "t_headers_ns",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        poller: Poller,
        sock: socket.socket,
        stamps: StampCounts | None,
        buffer: memoryview,
        on_idle_data: "Callable[[Connection], None]",
    ) -> None:
        # Of the connection.
        self._loop = loop
        self._poller = poller
        self.sock = sock
        self._on_idle_data = on_idle_data
        self._parser = httptools.HttpResponseParser(self)
        self._read = (
            self._plain_reader(buffer) if stamps is None else self._kernel_reader(buffer, stamps)
        )
        self.closed = False
        self.idle_since_ns: int | None = None  # None until it has served a request
        self._not_before_ns = 0  # nothing read can have arrived before the last write or read
        self._unsent: memoryview | None = None
        # Of the response being read.
        self._reset()
        self.busy = False
        poller.add(self)

    def _reset(self) -> None:
        self._chunks: list[tuple[int, bytes]] = []
        self._parts: list[bytes] = []
        self._waiter: asyncio.Future[None] | None = None
        self._failure: RequestFailed | None = None
        self._status = 0
        self._framed = False
        self._headers_done = False
        self._complete = False
        self._keep_alive = False
        self._poisoned = False
        self.t_headers_ns: int | None = None
        self.t_done_ns: int | None = None

    # ---- request

    def write(self, head: bytes, body: bytes) -> int:
        """Begin a request: hand it to the kernel as far as it takes it; return the stamp before.

        Raises:
            RequestFailed: `reset_before_headers` if the peer is already gone.
        """
        self._reset()
        self.busy = True
        stamp = self._not_before_ns = _monotonic_ns()
        try:
            sent = self.sock.sendmsg((head, body))
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise RequestFailed("reset_before_headers", _os_text(error)) from None
        if sent < len(head) + len(body):
            self._unsent = memoryview(head + body)[sent:]
            self._poller.want_write(self, True)
        return stamp

    def on_writable(self) -> None:
        """Send more of a request that the kernel did not take at once."""
        if self._unsent is None:
            return
        try:
            sent = self.sock.send(self._unsent)
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(RequestFailed("reset_before_headers", _os_text(error)))
            return
        self._unsent = self._unsent[sent:] or None
        if self._unsent is None:
            self._poller.want_write(self, False)

    # ---- response: each await suspends only when nothing is buffered

    async def read_headers(self) -> int:
        """Return the response status.

        Raises:
            RequestFailed: the response did not begin, or is not HTTP.
        """
        while not self._headers_done:
            if self._failure is not None:
                raise self._failure
            await self._wait()
        return self._status

    async def read_chunks(self) -> list[tuple[int, bytes]]:
        """Return all body bytes buffered since the last call, as (stamp, bytes) per socket read.

        An empty list means the message is complete.

        Raises:
            RequestFailed: the connection failed in mid-response (all earlier bytes were returned).
        """
        while not self._chunks:
            if self._complete:
                return []
            if self._failure is not None:
                raise self._failure
            await self._wait()
        chunks, self._chunks = self._chunks, []
        return chunks

    async def read_body(self) -> bytes:
        """Return the whole body.

        Raises:
            RequestFailed: as `read_chunks`; `oversized_event` beyond MAX_BODY_BYTES.
        """
        size = 0
        body: list[bytes] = []
        while chunks := await self.read_chunks():
            for _, chunk in chunks:
                size += len(chunk)
                body.append(chunk)
            if size > MAX_BODY_BYTES:
                raise RequestFailed("oversized_event", f"body over {MAX_BODY_BYTES} bytes")
        return b"".join(body)

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    # ---- reading

    def _kernel_reader(
        self, buffer: memoryview, stamps: StampCounts
    ) -> Callable[[], tuple[memoryview, int]]:
        receive, buffers = self.sock.recvmsg_into, [buffer]

        def read() -> tuple[memoryview, int]:
            size, control, _, _ = receive(buffers, _CONTROL_BYTES)
            stamp = now = _monotonic_ns()
            stamps.reads += 1
            if control:
                # The kernel stamps in wall time; its age carries over to the monotonic clock.
                seconds, ns = _timespec(control[0][2])
                wall = _time_ns()
                if _monotonic_ns() - now > CLOCK_GAP_NS:
                    stamps.clock_gaps += 1
                    now, wall = _read_clocks()
                stamp = now - (wall - (seconds * 1_000_000_000 + ns))
            # A stamp out of these bounds was taken before a step of the wall clock.
            if size and (not control or not self._not_before_ns <= stamp <= now):
                stamps.unstamped += 1
                stamp = now
            self._not_before_ns = stamp
            return buffer[:size], stamp

        return read

    def _plain_reader(self, buffer: memoryview) -> Callable[[], tuple[memoryview, int]]:
        receive = self.sock.recv_into

        def read() -> tuple[memoryview, int]:
            size = receive(buffer)
            return buffer[:size], _monotonic_ns()

        return read

    def on_readable(self) -> None:
        """Read once, stamp, parse, wake the waiting task."""
        try:
            data, stamp = self._read()
        except OSError as error:
            if error.errno not in _WOULD_BLOCK:
                self._on_reset(error)
            return
        if not self.busy:
            self._on_idle_data(self)  # closed by the server, or bytes nobody asked for
            return
        if not data:
            self._on_end()
            return
        had_headers, urgent = self._headers_done, False
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._poisoned = True
            if not self._complete:
                self._fail(RequestFailed("malformed_http", str(error)))
        if self._headers_done and not had_headers:
            self.t_headers_ns = stamp
            urgent = True
        parts = self._parts
        if parts:
            self._chunks.append((stamp, parts[0] if len(parts) == 1 else b"".join(parts)))
            self._parts = []
        if self._complete and self.t_done_ns is None:
            self.t_done_ns = stamp
        if urgent or self._complete or len(self._chunks) >= WAKE_CHUNKS:
            self.wake()
        elif len(self._chunks) == 1:
            self._poller.wake_later(self)

    def _on_end(self) -> None:
        self._poisoned = True
        if self._headers_done and not self._framed and not self._complete:
            # Neither length nor chunks: the end of the connection is the end of the message.
            self._complete = True
            self.t_done_ns = _monotonic_ns()
            self.wake()
        else:
            self._fail(
                RequestFailed(
                    "closed_mid_response" if self._headers_done else "closed_before_headers"
                )
            )

    def _on_reset(self, error: OSError) -> None:
        if not self.busy:
            self._on_idle_data(self)
            return
        kind = "reset_mid_response" if self._headers_done else "reset_before_headers"
        self._fail(RequestFailed(kind, _os_text(error)))

    def _fail(self, failure: RequestFailed) -> None:
        self._poisoned = True
        # A dead socket stays readable for ever; without this the loop would spin on it.
        self._poller.remove(self)
        if not self._complete and self._failure is None:
            self._failure = failure
        self.wake()

    def wake(self) -> None:
        """Let the waiting task look at what is buffered."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # ---- parser callbacks

    def on_message_begin(self) -> None:
        """A second message while one is wanted is garbage; the connection is not reused."""
        if self._complete:
            self._poisoned = True

    def on_header(self, name: bytes, _value: bytes) -> None:
        """Note whether the message says where it ends."""
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._framed = True

    def on_headers_complete(self) -> None:
        """Take the status; interim (1xx) responses are skipped."""
        status = self._parser.get_status_code()
        if status >= 200 and not self._complete:
            self._status = status
            self._headers_done = True

    def on_body(self, part: bytes) -> None:
        """Collect what one read brings."""
        if not self._complete:
            self._parts.append(part)

    def on_message_complete(self) -> None:
        """The response is whole."""
        if self._headers_done and not self._complete:
            self._complete = True
            self._keep_alive = self._parser.should_keep_alive()

    # ---- end of use

    def release(self) -> bool:
        """End the response; True if the connection can carry another request."""
        self.busy = False
        self.idle_since_ns = _monotonic_ns()
        reusable = (
            self._complete
            and self._keep_alive
            and self._framed
            and not self._poisoned
            and self._unsent is None
        )
        return reusable and not self.closed

    def is_stale(self) -> bool:
        """True if the server has closed this idle connection, sent something, or soon may close."""
        if (
            self.idle_since_ns is not None
            and _monotonic_ns() - self.idle_since_ns > MAX_IDLE_S * 1e9
        ):
            return True
        try:
            self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def close(self) -> None:
        """Close the socket and let go of the loop."""
        if self.closed:
            return
        self.closed = True
        self._poller.remove(self)
        self.sock.close()
        # These refer back to the connection (a failure by the traceback of having been raised);
        # the collector does not run during a cell.
        del self._parser, self._read
        self._failure = None


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
    ) -> None:
        self._loop = loop
        self._family = family
        self._address = address
        self._limit = limit
        self.stamps = StampCounts()
        self._kernel_stamps = kernel_stamps
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
                raise outcome
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
        except BaseException as error:
            if sock is not None:
                sock.close()
            self._size -= 1
            self._wake_next(None)
            if isinstance(error, ConnectionRefusedError):
                raise RequestFailed("connect_refused", _os_text(error)) from None
            if isinstance(error, OSError):
                raise RequestFailed("connect_failed", _os_text(error)) from None
            raise
        self.opened += 1
        return Connection(
            self._loop,
            self._poller,
            sock,
            self.stamps if self._kernel_stamps else None,
            self._buffer,
            self._on_idle_data,
        )


def _read_clocks() -> tuple[int, int]:
    """Monotonic and wall time in ns, read as close together as some tries allow."""
    best = (1 << 62, 0, 0)
    for _ in range(CLOCK_TRIES):
        now, wall = _monotonic_ns(), _time_ns()
        best = min(best, (_monotonic_ns() - now, now, wall))
        if best[0] <= CLOCK_GAP_NS:
            break
    return best[1], best[2]


def _os_text(error: OSError) -> str:
    name = errno.errorcode.get(error.errno or 0, "")
    return f"{name} {error.strerror}".strip()


def kernel_stamps_offered() -> bool:
    """True if this kernel offers receive stamps on a TCP socket."""
    with contextlib.closing(socket.socket()) as sock:
        return enable_kernel_stamps(sock)

"""HTTP/1.1 client: the protocol of one connection, on a socket that it reads itself.

It uses no asyncio transport, because a transport does not pass on the kernel's receive time. Every
read is stamped first, then decrypted through memory (`ssl.MemoryBIO`), then parsed.
"""

import asyncio
import contextlib
import errno
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import httptools

from connector_tax.loadgen.messages import RequestFailed, TlsSettings

FAR_NS = 1 << 63
_monotonic_ns = time.monotonic_ns


class Poller:
    """A watch on the connections' sockets: two epoll sets inside the event loop.

    One set holds connections that wait for a first token, the other those whose answer streams. A
    busy worker reads first tokens one at a time and streaming answers in batches. `until_ns` is
    when the event loop has something else to do.

    uvloop's add_reader fails in one case: when bytes and a reset arrive together it calls the
    reader once and then stops watching (libuv ends a poll on POLLERR), so that the reset is never
    seen. One loop callback here also serves every socket that is ready.
    """

    READY = 128
    """Streaming sockets polled at once. Those not served in this turn are served in the next turns,
    before the next poll.
    """
    BATCH = 64
    """Sockets served in one turn of the event loop; answers end and closed loops continue within
    it.
    """
    LEAST = 12
    """Sockets that a turn always serves, even if a send is due. A turn can send fewer requests than
    that; otherwise answers would pile up.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting, self._streaming = select.epoll(), select.epoll()
        self._connections: dict[int, Connection] = {}
        self._streams: set[int] = set()  # descriptors in _streaming
        self._ready: list[tuple[int, int]] = []  # ready descriptors of _streaming and their events
        self._next = 0  # index of the next one to serve
        self.until_ns = FAR_NS
        for epoll in (self._waiting, self._streaming):
            loop.add_reader(epoll.fileno(), self.serve_ready)

    def add(self, connection: "Connection") -> None:
        """Call `connection.on_readable` whenever the connection has data to read."""
        descriptor = connection.sock.fileno()
        self._connections[descriptor] = connection
        self._waiting.register(descriptor, select.EPOLLIN)

    def move(self, connection: "Connection", streams: bool, writes: bool) -> None:
        """Move a connection to the set that streams, or to the set that waits for a first token.

        Args:
            streams: the answer has brought its first token.
            writes: also call `on_writable`.
        """
        descriptor = connection.sock.fileno()
        if (descriptor in self._streams) is streams or descriptor not in self._connections:
            return
        source, target = self._waiting, self._streaming
        if streams:
            self._streams.add(descriptor)
        else:
            self._streams.discard(descriptor)
            source, target = target, source
        source.unregister(descriptor)
        target.register(descriptor, select.EPOLLIN | (select.EPOLLOUT if writes else 0))

    def want_write(self, connection: "Connection", wanted: bool) -> None:
        """Start or stop calling `connection.on_writable`."""
        mask = select.EPOLLIN | select.EPOLLOUT if wanted else select.EPOLLIN
        descriptor = connection.sock.fileno()
        self._set_of(descriptor).modify(descriptor, mask)

    def remove(self, connection: "Connection") -> None:
        descriptor = connection.sock.fileno()
        if self._connections.pop(descriptor, None) is not None:
            self._set_of(descriptor).unregister(descriptor)
            self._streams.discard(descriptor)

    def close(self) -> None:
        for epoll in (self._waiting, self._streaming):
            self._loop.remove_reader(epoll.fileno())
            epoll.close()

    def _set_of(self, descriptor: int) -> select.epoll:
        return self._streaming if descriptor in self._streams else self._waiting

    def serve_ready(self) -> None:
        """Serve up to BATCH ready sockets, first those that wait for a first token.

        Ends early once `until_ns` has passed and LEAST sockets are served.
        """
        served = 0
        for descriptor, events in self._waiting.poll(0, self.BATCH):
            # This may send, and serve other sockets until the send is due.
            self._serve(descriptor, events)
            served += 1
            if served >= self.LEAST and _monotonic_ns() >= self.until_ns:
                return
        while served < self.BATCH and self._serve_streaming(self.READY):
            served += 1
            if served >= self.LEAST and _monotonic_ns() >= self.until_ns:
                return

    def serve_one(self) -> None:
        """Serve one ready socket, if any."""
        for descriptor, events in self._waiting.poll(0, 1):
            self._serve(descriptor, events)
            return
        self._serve_streaming(1)

    def _serve_streaming(self, most: int) -> bool:
        """Serve one streaming socket; poll for up to `most` if none is pending."""
        if self._next >= len(self._ready):
            if not self._streams:
                return False
            self._ready, self._next = self._streaming.poll(0, most), 0
            if not self._ready:
                return False
        self._next += 1
        self._serve(*self._ready[self._next - 1])
        return True

    def _serve(self, descriptor: int, events: int) -> None:
        # The connection may have been closed since the poll, or another one may have its descriptor
        # now. Then there is nothing to read, and a read does no harm.
        connection = self._connections.get(descriptor)
        if connection is None:
            return
        if events & select.EPOLLOUT:
            connection.on_writable()
        if events & ~select.EPOLLOUT:
            connection.on_readable()


CLOCK_GAP_NS = 10_000
CLOCK_TRIES = 5
"""The wall clock is read between two readings of the monotonic clock. If these are more than
CLOCK_GAP_NS apart, the process was interrupted, and the clocks are read again, up to CLOCK_TRIES
times.
"""
STAMPS_ON_NS = 2_000_000_000
"""The longest wait for the kernel's first stamp, which usually takes less than a millisecond."""

_SO_TIMESTAMPNS = 35
_CONTROL_BYTES = socket.CMSG_SPACE(16)
_timespec = struct.Struct("qq").unpack_from
_time_ns = time.time_ns


def enable_kernel_stamps(sock: socket.socket) -> bool:
    """Ask the kernel to stamp received segments (in software); return False if it cannot."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    except OSError:
        return False
    return True


def hold_kernel_stamps() -> socket.socket | None:
    """Keep the kernel's receive stamps switched on, so that even a new connection's first segment
    has one.

    The kernel switches stamps on a moment after the first socket has requested them, and off with
    the last (net/core/dev.c:net_enable_timestamp). Segments that arrive in that moment have none.

    Returns:
        A socket to keep open; None where the kernel does not stamp TCP.
    """
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        held = socket.create_connection(listener.getsockname())
        peer, _ = listener.accept()
    with contextlib.closing(peer):
        deadline_ns = _monotonic_ns() + STAMPS_ON_NS
        if enable_kernel_stamps(held):
            while _monotonic_ns() < deadline_ns:
                peer.send(b".")
                if held.recvmsg(1, _CONTROL_BYTES)[1]:
                    return held
                time.sleep(1e-4)
    held.close()
    return None


@dataclass(slots=True)
class StampCounts:
    """Counts of the reads of a connection pool.

    `unstamped`: reads without a kernel stamp. `clock_gaps`: reads that repeated the reading of the
    clocks, because the two readings lay too far apart.
    """

    reads: int = 0
    unstamped: int = 0
    clock_gaps: int = 0


def read_clocks() -> tuple[int, int]:
    """Return monotonic and wall time in ns, read as close together as CLOCK_TRIES tries allow."""
    best = (1 << 62, 0, 0)
    for _ in range(CLOCK_TRIES):
        now, wall = _monotonic_ns(), _time_ns()
        best = min(best, (_monotonic_ns() - now, now, wall))
        if best[0] <= CLOCK_GAP_NS:
            break
    return best[1], best[2]


RECORD_BYTES = 16 * 1024


class TlsSession:
    """The TLS layer of one connection. `ended`: the peer has closed it in order."""

    __slots__ = ("_incoming", "_outgoing", "_tls", "ended")

    def __init__(self, context: ssl.SSLContext, name: str) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=name)
        self.ended = False

    def encrypt(self, head: bytes, body: bytes) -> bytes:
        self._tls.write(head + body)
        return self._outgoing.read()

    def decrypt(self, data: bytes | memoryview) -> bytes:
        """Decrypt `data`; return the plaintext that is now complete (empty for TLS's own records).

        Raises:
            ssl.SSLError: `data` is damaged or is not TLS.
        """
        self._incoming.write(data)
        records: list[bytes] = []
        try:
            while record := self._tls.read(RECORD_BYTES):
                records.append(record)
            self.ended = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self.ended = True
        return records[0] if len(records) == 1 else b"".join(records)

    async def handshake(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        """Perform the TLS handshake on a connected, non-blocking socket.

        Raises:
            OSError: the connection failed; ssl.SSLError: the peer is not trusted, or does not speak
                TLS.
        """
        while True:
            try:
                self._tls.do_handshake()
                needs_more = False
            except ssl.SSLWantReadError:
                needs_more = True
            finally:  # includes an alert that names the failure
                if self._outgoing.pending:
                    await loop.sock_sendall(sock, self._outgoing.read())
            if not needs_more:
                return
            data = await loop.sock_recv(sock, RECORD_BYTES)
            if not data:
                reason = "the server closed the connection in the handshake"
                raise ssl.SSLError(ssl.SSL_ERROR_EOF, reason)
            self._incoming.write(data)


def tls_context(settings: TlsSettings) -> ssl.SSLContext:
    """Return the TLS context that all connections to one host share.

    Raises:
        OSError: `ca_file` cannot be read.
        ssl.SSLError: `ca_file` holds no certificate.
    """
    context = ssl.create_default_context(cafile=settings.ca_file)
    if settings.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def tls_text(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate: {error.verify_message}"
    # Only the errors of the C library have a reason.
    return getattr(error, "reason", None) or error.strerror or str(error)


_NAMED_HEADERS = {b"content-type", b"content-encoding", b"location", b"retry-after"}
_WOULD_BLOCK = {errno.EAGAIN, errno.EWOULDBLOCK, errno.EINTR}


class Reader(Protocol):
    """The receiver of one response as it arrives.

    Nothing is called after `on_end`, `on_last` or `on_failure`.
    """

    def on_head(self, status: int, stamp: int) -> None:
        """Handle the complete head of a response."""

    def on_body(self, chunk: bytes, stamp: int) -> None:
        """Handle the part of the body that came with one read."""

    def on_end(self, stamp: int) -> None:
        """Handle the end of the response."""

    def on_last(self, chunk: bytes, stamp: int) -> None:
        """Handle the last part of the body and the end of the response, from one read."""

    def on_failure(self, failure: RequestFailed) -> None:
        """Handle a failure of the connection before the response's end."""


class Connection:
    """One connection, from which `reader` reads at most one response at a time.

    The reader is called while a read is handled, and may release the connection then.

    A read's stamp is the time at which the kernel received its last segment or, without kernel
    stamps, at which the read returned. `_not_before_ns` is the lower limit of the next stamp: the
    last write or read.
    """

    __slots__ = (
        *("_buffer", "_complete", "_framed", "_headers_done", "_keep_alive", "_not_before_ns"),
        *("_on_idle_data", "_parser", "_parts", "_poisoned", "_poller", "_stamps", "_status"),
        *("_tls", "_unsent", "closed", "headers", "idle_since_ns", "pooled", "reader"),
        *("received", "reused", "sock"),
    )

    def __init__(
        self,
        poller: Poller,
        sock: socket.socket,
        tls: TlsSession | None,
        buffer: memoryview,
        stamps: StampCounts,
        on_idle_data: "Callable[[Connection], None]",
    ) -> None:
        """Wrap a connected socket.

        Args:
            buffer: receives every read.
            stamps: counts the reads.
        """
        # State of the connection.
        self._poller = poller
        self.sock = sock
        self._on_idle_data = on_idle_data
        self._parser = httptools.HttpResponseParser(self)
        self._buffer = buffer
        self._stamps = stamps
        self._not_before_ns = 0
        self._tls = tls
        self.closed = False
        self.idle_since_ns = _monotonic_ns()
        self.pooled = False  # has waited for a request
        self.reused = False  # has served one
        self._unsent: memoryview | None = None
        # State of the response being read.
        poller.add(self)
        self._begin(None)

    def _begin(self, reader: Reader | None) -> None:
        self.reader = reader
        self._poller.move(self, streams=False, writes=False)
        self._parts: list[bytes] = []
        self._framed = False
        self._status = 0
        self._headers_done = False
        self._complete = False
        self._keep_alive = False
        self._poisoned = False
        self.received = False  # any byte
        self.headers: dict[bytes, bytes] = {}

    # ---- request

    def write(self, head: bytes, body: bytes, reader: Reader) -> int:
        """Write a request as far as the kernel accepts it; return the time before the write (ns).

        The rest follows when the socket is writable. The response goes to `reader`.

        Raises:
            RequestFailed: `reset_before_headers` if the peer has already closed the connection.
        """
        self._begin(reader)
        parts = (head, body) if self._tls is None else (self._tls.encrypt(head, body),)
        stamp = self._not_before_ns = _monotonic_ns()
        try:
            sent = self.sock.sendmsg(parts)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise RequestFailed("reset_before_headers", os_text(error)) from None
        if sent < sum(map(len, parts)):
            self._unsent = memoryview(b"".join(parts))[sent:]
            self._poller.want_write(self, True)
        return stamp

    def on_writable(self) -> None:
        if self._unsent is None:
            return
        try:
            sent = self.sock.send(self._unsent)
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(RequestFailed("reset_before_headers", os_text(error)))
            return
        self._unsent = self._unsent[sent:] or None
        if self._unsent is None:
            self._poller.want_write(self, False)

    # ---- reading

    def has_begun(self) -> None:
        """Mark this response as past its first token, so that its reads get lower priority."""
        if not (self.closed or self._complete):
            self._poller.move(self, streams=True, writes=self._unsent is not None)

    def read(self) -> tuple[memoryview, int]:
        """Read once; return the bytes and their stamp (ns). Raises OSError."""
        size, control, _, _ = self.sock.recvmsg_into((self._buffer,), _CONTROL_BYTES)
        stamp = now = _monotonic_ns()
        stamps = self._stamps
        stamps.reads += 1
        if control:
            # The kernel stamps in wall time; the stamp's age is converted to the monotonic clock.
            seconds, ns = _timespec(control[0][2])
            wall = _time_ns()
            if _monotonic_ns() - now > CLOCK_GAP_NS:
                stamps.clock_gaps += 1
                now, wall = read_clocks()
            stamp = now - (wall - (seconds * 1_000_000_000 + ns))
        # A stamp outside these bounds means that the wall clock was stepped after the stamp was
        # taken.
        if size and (not control or not self._not_before_ns <= stamp <= now):
            stamps.unstamped += 1
            stamp = now
        self._not_before_ns = stamp
        return self._buffer[:size], stamp

    def on_readable(self) -> None:
        if self.closed:  # by an earlier socket of the same batch
            return
        try:
            data, stamp = self.read()
        except OSError as error:
            if error.errno not in _WOULD_BLOCK:
                self._on_reset(error)
            return
        if self.reader is None:
            if not self._is_control(data):
                self._on_idle_data(self)  # closed by the server, or unrequested bytes
        elif not data:
            self._on_end()
        elif self._tls is None:
            self._take(data, stamp)
        else:
            self._take_encrypted(self._tls, data, stamp)

    def _take_encrypted(self, tls: TlsSession, data: memoryview, stamp: int) -> None:
        try:
            plain = tls.decrypt(data)
        except ssl.SSLError as error:
            self._fail(RequestFailed("tls_failed", tls_text(error)))
            return
        if tls.ended:
            self._poisoned = True
        if plain:
            self._take(plain, stamp)
        if tls.ended and self.reader is not None:
            self._on_end()

    def _is_control(self, data: memoryview) -> bool:
        """Return whether an idle connection's data concern only its TLS layer (session tickets)."""
        if self._tls is None or not data:
            return False
        try:
            return not self._tls.decrypt(data) and not self._tls.ended
        except ssl.SSLError:
            return False

    def _take(self, data: bytes | memoryview, stamp: int) -> None:
        reader, had_headers = self.reader, self._headers_done
        assert reader is not None
        self.received = True
        malformed: RequestFailed | None = None
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._poisoned = True
            malformed = RequestFailed("malformed_http", str(error))
        if self._headers_done and not had_headers:
            reader.on_head(self._status, stamp)
        parts = self._parts
        if parts:
            self._parts = []
            chunk = parts[0] if len(parts) == 1 else b"".join(parts)
            if self._complete:
                reader.on_last(chunk, stamp)
                return
            reader.on_body(chunk, stamp)
        if self.reader is not reader:  # the reader has released the connection
            return
        if self._complete:
            reader.on_end(stamp)
        elif malformed is not None:
            self._fail(malformed)

    def _on_end(self) -> None:
        self._poisoned = True
        reader = self.reader
        if reader is not None and self._headers_done and not self._framed:
            # Neither length nor chunks: the end of the connection is the end of the message.
            self._complete = True
            reader.on_end(_monotonic_ns())
        else:
            kind = "closed_mid_response" if self._headers_done else "closed_before_headers"
            self._fail(RequestFailed(kind))

    def _on_reset(self, error: OSError) -> None:
        if self.reader is None:
            self._on_idle_data(self)
            return
        kind = "reset_mid_response" if self._headers_done else "reset_before_headers"
        self._fail(RequestFailed(kind, os_text(error)))

    def _fail(self, failure: RequestFailed) -> None:
        self._poisoned = True
        # A dead socket stays readable for ever; without this the loop would spin on it.
        self._poller.remove(self)
        if self.reader is not None:
            self.reader.on_failure(failure)

    # ---- parser callbacks

    def on_message_begin(self) -> None:
        """Fail on a second message in one response; the connection is not reused."""
        if self._complete:
            self._poisoned = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Record the headers that give the message's length, and those that an error may quote."""
        name = name.lower()
        if name == b"content-length" or (
            name == b"transfer-encoding" and value.lower().endswith(b"chunked")
        ):
            self._framed = True
        elif name in _NAMED_HEADERS and not self._complete:
            self.headers[name] = value

    def on_headers_complete(self) -> None:
        """Record the status; skip interim (1xx) responses."""
        status = self._parser.get_status_code()
        if status >= 200 and not self._complete:
            self._status = status
            self._headers_done = True

    def on_body(self, part: bytes) -> None:
        if not self._complete:
            self._parts.append(part)

    def on_message_complete(self) -> None:
        if self._headers_done and not self._complete:
            self._complete = True
            self._keep_alive = self._parser.should_keep_alive()

    # ---- end of use

    def release(self) -> bool:
        """End the response; return whether the connection can carry another request."""
        self.reader = None
        self.reused = True
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
        """Return whether the server has closed this idle connection or sent something on it."""
        try:
            return not self._is_control(self.read()[0])
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._poller.remove(self)
        self.sock.close()
        # These refer back to the connection; the collector does not run during a cell.
        del self._parser, self._tls


def os_text(error: OSError) -> str:
    name = errno.errorcode.get(error.errno or 0, "")
    return f"{name} {error.strerror}".strip()

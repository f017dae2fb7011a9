"""HTTP/1.1 client: the protocol of one connection.

It reads its socket itself instead of through an asyncio transport, because only so can the kernel's
receive time come along with the bytes. Every read is stamped before it is decrypted or parsed.
"""

import asyncio
import errno
import socket
import ssl
import time
from collections.abc import Callable

import httptools

from connector_tax.loadgen.messages import RequestFailed
from connector_tax.loadgen.poller import Poller
from connector_tax.loadgen.stamps import KernelReader, PlainReader
from connector_tax.loadgen.tls import TlsSession, tls_text

MAX_BODY_BYTES = 64 * 1024 * 1024
WAKE_CHUNKS = 16
"""A waiting response task is woken at once for headers, the end or a failure, else for every
WAKE_CHUNKS reads or with the poller's sweep: the stamps are already taken, and one wake-up per read
would cost as much as the read itself."""

_monotonic_ns = time.monotonic_ns
_WOULD_BLOCK = {errno.EAGAIN, errno.EWOULDBLOCK, errno.EINTR}


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
        "_on_idle_data",
        "_parser",
        "_parts",
        "_poisoned",
        "_poller",
        "_read",
        "_status",
        "_tls",
        "_unsent",
        "_waiter",
        "busy",
        "closed",
        "idle_since_ns",
        "location",
        "pooled",
        "received",
        "reused",
        "sock",
        "t_done_ns",
        "t_headers_ns",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        poller: Poller,
        sock: socket.socket,
        read: KernelReader | PlainReader,
        tls: TlsSession | None,
        on_idle_data: "Callable[[Connection], None]",
    ) -> None:
        # Of the connection.
        self._loop = loop
        self._poller = poller
        self.sock = sock
        self._on_idle_data = on_idle_data
        self._parser = httptools.HttpResponseParser(self)
        self._read = read
        self._tls = tls
        self.closed = False
        self.idle_since_ns = _monotonic_ns()
        self.pooled = False  # has waited for a request
        self.reused = False  # has served one
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
        self.received = False  # any byte
        self.location: bytes | None = None
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
        parts = (head, body) if self._tls is None else (self._tls.encrypt(head, body),)
        stamp = self._read.not_before_ns = _monotonic_ns()
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
        """Send more of a request that the kernel did not take at once."""
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

    def on_readable(self) -> None:
        """Read once, stamp, parse, wake the waiting task."""
        try:
            data, stamp = self._read()
        except OSError as error:
            if error.errno not in _WOULD_BLOCK:
                self._on_reset(error)
            return
        if not self.busy:
            if not self._is_control(data):
                self._on_idle_data(self)  # closed by the server, or bytes nobody asked for
            return
        if not data:
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
        if plain:
            self._take(plain, stamp)
        if tls.ended:
            self._on_end()

    def _is_control(self, data: memoryview) -> bool:
        """True if what an idle connection brought is only for its TLS layer (session tickets)."""
        if self._tls is None or not data:
            return False
        try:
            return not self._tls.decrypt(data) and not self._tls.ended
        except ssl.SSLError:
            return False

    def _take(self, data: bytes | memoryview, stamp: int) -> None:
        had_headers, urgent = self._headers_done, False
        self.received = True
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
        self._fail(RequestFailed(kind, os_text(error)))

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

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note whether the message says where it ends, and where else to ask."""
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self._framed = True
        elif name == b"location":
            self.location = value

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

    def give_up(self) -> None:
        """Wait no longer for the rest of the response; what is buffered can be read."""
        self._fail(RequestFailed("request_timeout"))

    def is_stale(self) -> bool:
        """True if the server has closed this idle connection, or sent something."""
        try:
            return not self._is_control(self._read()[0])
        except BlockingIOError:
            return False
        except OSError:
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
        del self._parser, self._read, self._tls
        self._failure = None


def os_text(error: OSError) -> str:
    """Return the name and the text of an error."""
    name = errno.errorcode.get(error.errno or 0, "")
    return f"{name} {error.strerror}".strip()

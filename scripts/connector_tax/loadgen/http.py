"""HTTP/1.1 client: the protocol of one connection.

It reads its socket itself instead of through an asyncio transport, because only so can the kernel's
receive time come along with the bytes. Every read is stamped before it is decrypted or parsed.
"""

import errno
import socket
import ssl
import time
from collections.abc import Callable
from typing import Protocol

import httptools

from connector_tax.loadgen.messages import RequestFailed
from connector_tax.loadgen.poller import Poller
from connector_tax.loadgen.stamps import KernelReader, PlainReader
from connector_tax.loadgen.tls import TlsSession, tls_text

_monotonic_ns = time.monotonic_ns
_WOULD_BLOCK = {errno.EAGAIN, errno.EWOULDBLOCK, errno.EINTR}


class Reader(Protocol):
    """Takes one response, as it arrives. After `on_end` or `on_failure` it hears nothing more."""

    def on_head(self, status: int, stamp: int) -> None:
        """The head is whole."""

    def on_body(self, chunk: bytes, stamp: int) -> None:
        """A read brought so much of the body."""

    def on_end(self, stamp: int) -> None:
        """The response is whole."""

    def on_failure(self, failure: RequestFailed) -> None:
        """The connection failed before that."""


class Connection:
    """One connection. At most one response at a time is read from it, by `reader`.

    The reader is called while a read is handled, and may release the connection then.

    The stamp of a read is when the kernel received the last segment in it, or, without kernel
    stamps, when the read returned.
    """

    __slots__ = (
        "_complete",
        "_framed",
        "_headers_done",
        "_keep_alive",
        "_on_idle_data",
        "_parser",
        "_parts",
        "_poisoned",
        "_poller",
        "_read",
        "_status",
        "_tls",
        "_unsent",
        "closed",
        "idle_since_ns",
        "location",
        "pooled",
        "reader",
        "received",
        "reused",
        "sock",
    )

    def __init__(
        self,
        poller: Poller,
        sock: socket.socket,
        read: KernelReader | PlainReader,
        tls: TlsSession | None,
        on_idle_data: "Callable[[Connection], None]",
    ) -> None:
        # Of the connection.
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
        self._begin(None)
        poller.add(self)

    def _begin(self, reader: Reader | None) -> None:
        self.reader = reader
        self._parts: list[bytes] = []
        self._framed = False
        self._status = 0
        self._headers_done = False
        self._complete = False
        self._keep_alive = False
        self._poisoned = False
        self.received = False  # any byte
        self.location: bytes | None = None

    # ---- request

    def write(self, head: bytes, body: bytes, reader: Reader) -> int:
        """Begin a request: hand it to the kernel as far as it takes it; return the stamp before.

        Its response goes to `reader`.

        Raises:
            RequestFailed: `reset_before_headers` if the peer is already gone.
        """
        self._begin(reader)
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

    # ---- reading

    def on_readable(self) -> None:
        """Read once, stamp, parse, tell the reader."""
        if self.closed:  # in the same batch, for another socket's sake
            return
        try:
            data, stamp = self._read()
        except OSError as error:
            if error.errno not in _WOULD_BLOCK:
                self._on_reset(error)
            return
        if self.reader is None:
            if not self._is_control(data):
                self._on_idle_data(self)  # closed by the server, or bytes nobody asked for
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
        """True if what an idle connection brought is only for its TLS layer (session tickets)."""
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
            reader.on_body(parts[0] if len(parts) == 1 else b"".join(parts), stamp)
        if self.reader is not reader:  # it has seen enough
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
        # These refer back to the connection; the collector does not run during a cell.
        del self._parser, self._read, self._tls


def os_text(error: OSError) -> str:
    """Return the name and the text of an error."""
    name = errno.errorcode.get(error.errno or 0, "")
    return f"{name} {error.strerror}".strip()

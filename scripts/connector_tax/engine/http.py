"""HTTP/1.1 server protocol on httptools: requests in order, responses as plain bytes.

A write calls the socket directly, so that its stamp is the time of the write; the transport sends
only the bytes that the kernel did not accept.
"""

import asyncio
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import cast

import httptools
import msgspec

# Most bytes of unanswered input per connection. A prompt of 200,000 token ids is about 1.4 MB.
_MAX_INPUT = 16 << 20
_STATUS = {s.value: b"HTTP/1.1 %d %b\r\n" % (s.value, s.phrase.encode()) for s in HTTPStatus}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_CLOSE = b"connection: close\r\n"
LAST_CHUNK = b"0\r\n\r\n"


@dataclass(slots=True)
class Request:
    """One complete request.

    Attributes:
        t_arrival_ns: CLOCK_MONOTONIC of the read with its last byte.
        chunked: whether the client accepts a chunked response (HTTP/1.1).
    """

    t_arrival_ns: int
    method: str = ""
    path: str = ""
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""
    keep_alive: bool = False
    chunked: bool = True


Handler = Callable[[Request, "HttpProtocol"], None]


class HttpProtocol(asyncio.Protocol):
    """One connection; one response at a time, and at most `_MAX_INPUT` bytes of unanswered input.

    The handler answers with `respond`, or with `begin_body`, `write` and `end`.
    """

    def __init__(self, handler: Handler, open_: set["HttpProtocol"]) -> None:
        # State of the server.
        self._handler = handler
        self._open = open_
        # State of the connection.
        self._transport: asyncio.Transport | None = None
        self._descriptor = -1
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[Request] = deque()
        self._unanswered = 0
        self._t_read_ns = 0
        # State of the request that is being read.
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._reading = False
        self._body = bytearray()
        # State of the request that is being answered.
        self._current: Request | None = None
        self.on_disconnect: Callable[[], None] | None = None

    # -- the connection -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._descriptor = transport.get_extra_info("socket").fileno()
        self._open.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._transport = None
        self._open.discard(self)
        self._waiting.clear()
        self._body = bytearray()
        callback, self.on_disconnect = self.on_disconnect, None
        if callback is not None:
            callback()

    def data_received(self, data: bytes) -> None:
        self._t_read_ns = time.monotonic_ns()
        self._unanswered += len(data)
        if self._unanswered > _MAX_INPUT:
            self._reject(413, f"a connection's unanswered input is larger than {_MAX_INPUT} bytes")
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._reject(400, f"Invalid HTTP request received: {error}")
        self._forget_answered()

    def _forget_answered(self) -> None:
        if self._current is None and not self._reading:
            self._unanswered = 0

    def _reject(self, status: int, message: str) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if self._current is None:
            self._current = Request(self._t_read_ns)
            self.respond(status, error_body(status, message))
        else:
            self._transport.close()

    # -- the parser's callbacks -----------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = {}
        self._reading = True
        self._body = bytearray()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if self._headers.get(b"expect", b"").lower() == b"100-continue" and not self._current:
            self.write(_CONTINUE)

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self._reading = False
        path = self._url.partition(b"?")[0].decode("latin-1")
        request = Request(
            self._t_read_ns,
            self._parser.get_method().decode(),
            path,
            self._headers,
            bytes(self._body),
            keep_alive=self._parser.should_keep_alive(),
            chunked=self._parser.get_http_version() != "1.0",
        )
        self._body = bytearray()
        if self._current is None:
            self._answer(request)
        else:
            self._waiting.append(request)

    def _answer(self, request: Request) -> None:
        self._current = request
        self._handler(request, self)
        # Freed now, since the handler has read the body and an answer can take minutes.
        request.body = b""

    # -- the response ---------------------------------------------------------------------------

    def respond(
        self,
        status: int,
        body: bytes,
        content_type: bytes = b"application/json",
    ) -> None:
        assert self._current is not None
        head = b"%bcontent-length: %d\r\ncontent-type: %b\r\n%b\r\n" % (
            _STATUS[status],
            len(body),
            content_type,
            b"" if self._current.keep_alive else _CLOSE,
        )
        self.write(head + (b"" if self._current.method == "HEAD" else body))
        self.end()

    def begin_body(self, content_type: bytes) -> int:
        """Send a response's head, before a body in pieces; return the time of the write (ns)."""
        request = self._current
        assert request is not None
        if not request.chunked:
            request.keep_alive = False
        framing = b"transfer-encoding: chunked\r\n" if request.chunked else b""
        head = b"%bcontent-type: %b\r\n%b%b\r\n" % (
            _STATUS[200],
            content_type,
            framing,
            b"" if request.keep_alive else _CLOSE,
        )
        return self.write(head)

    def write(self, data: bytes) -> int:
        """Send `data` now; return the time right before the system call (CLOCK_MONOTONIC, ns)."""
        stamp = time.monotonic_ns()
        transport = self._transport
        if transport is None or transport.is_closing():
            return stamp
        if not transport.get_write_buffer_size():
            try:
                sent = os.write(self._descriptor, data)
            except BlockingIOError:
                sent = 0
            except OSError:
                # The peer is gone; the transport reports it through `connection_lost`.
                transport.close()
                return stamp
            if sent == len(data):
                return stamp
            data = data[sent:]
        transport.write(data)
        return stamp

    def end(self) -> None:
        """End the response: close the connection, or serve the next request."""
        request, self._current = self._current, None
        self.on_disconnect = None
        if self._transport is None or request is None:
            return
        if not request.keep_alive:
            self._transport.close()
        elif self._waiting:
            self._answer(self._waiting.popleft())
        else:
            self._forget_answered()

    def drop(self, *, reset: bool) -> None:
        """End the connection in the middle of a response: with FIN, or with RST."""
        if self._transport is None:
            return
        if reset:
            with socket.socket(fileno=os.dup(self._descriptor)) as handle:
                handle.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()
        else:
            self._transport.close()


def error_body(status: int, message: str, param: str | None = None) -> bytes:
    """Return an error as the JSON object that vLLM sends."""
    kinds = {400: "BadRequestError", 404: "NotFoundError", 429: "TooManyRequestsError"}
    kind = kinds.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    error = {"message": message, "type": kind, "param": param, "code": status}
    return msgspec.json.encode({"error": error})

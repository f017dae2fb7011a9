"""What one connection can make the engine keep: unfinished and waiting input is bounded."""

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.engine.serving import Launched, completion, launched, post

OFFERED = 160 << 20  # bytes
KEPT = 48 << 20  # the limit, 16 MiB, once as it is read and once whole, and room


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Launched]:
    """A server whose peak of memory is this test's own."""
    with launched(tmp_path) as running:
        yield running


def peak_bytes(server: Launched) -> int:
    """The most memory the server's process has had resident."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    kib = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert kib is not None
    return int(kib[1]) << 10


def offer(connection: socket.socket, pieces: Iterator[bytes]) -> int:
    """Send until the server ends the connection; the bytes that went out."""
    sent = 0
    try:
        for piece in pieces:
            connection.sendall(piece)
            sent += len(piece)
    except (BrokenPipeError, ConnectionResetError):
        pass
    return sent


LONG_ANSWER = post(json.dumps(completion(max_tokens=8000)).encode())
PIECE = 1 << 20


@pytest.mark.parametrize(
    ("opening", "piece"),
    [
        pytest.param(LONG_ANSWER, post(b" " * PIECE), id="requests behind one being answered"),
        pytest.param(
            LONG_ANSWER + b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n",
            b"%x\r\n%b\r\n" % (PIECE, b" " * PIECE),
            id="a body behind one being answered",
        ),
        pytest.param(
            b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n",
            b"1\r\n \r\n" * (PIECE // 6),
            id="a body of one-byte chunks",
        ),
        pytest.param(b"GET /health HTTP/1.1\r\nx: ", b"x" * PIECE, id="a header without an end"),
        pytest.param(b"GET /", b"x" * PIECE, id="a path without an end"),
        pytest.param(
            b"GET /health HTTP/1.1\r\n", b"x:\r\n" * (PIECE // 4), id="headers without an end"
        ),
        pytest.param(
            LONG_ANSWER,
            b"GET /health HTTP/1.1\r\n" + b"x:\r\n" * 400 + b"\r\n",
            id="small requests with many headers",
        ),
    ],
)
def test_a_connection_that_offers_too_much_is_ended(
    fresh: Launched, opening: bytes, piece: bytes
) -> None:
    before = peak_bytes(fresh)
    with socket.create_connection(("127.0.0.1", fresh.port), timeout=20) as connection:
        connection.sendall(opening)
        pieces = (piece for _ in range(1 + OFFERED // len(piece)))
        assert offer(connection, pieces) < OFFERED
    assert peak_bytes(fresh) - before < KEPT
    assert fresh.stream().endswith(b"data: [DONE]\n\n")
    assert psutil.pid_exists(fresh.process.pid)


def test_input_is_counted_until_it_is_answered(fresh: Launched) -> None:
    """Many requests on one connection, together far beyond the limit, none of them waiting."""
    text = json.dumps({"prompt": "word " * 800_000}).encode()
    request = post(text)
    with socket.create_connection(("127.0.0.1", fresh.port), timeout=60) as connection:
        for _ in range(6):
            connection.sendall(request)
            reply = b""
            # The prompt is longer than the context.
            while not reply.endswith(b'"code":400}}'):
                data = connection.recv(1 << 16)
                assert data
                reply = (reply + data)[-64:]


def test_a_body_over_the_limit_is_refused_with_its_reason(fresh: Launched) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
    with socket.create_connection(("127.0.0.1", fresh.port), timeout=20) as connection:
        sent = offer(connection, iter([head, *[b"%x\r\n%b\r\n" % (PIECE, b" " * PIECE)] * 15]))
        rest = (16 << 20) - sent - len(b"fffff\r\n\r\n")
        connection.sendall(b"%x\r\n%b\r\n" % (rest, b" " * rest))
        # The last piece brings it over the limit: all of it is read before the answer.
        connection.sendall(b"1\r\n \r\n")
        reply = connection.recv(1 << 16)
    assert reply.split()[1] == b"413"
    assert b"16777216 bytes" in reply

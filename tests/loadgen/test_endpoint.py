"""Reaching an endpoint: its addresses, its name in the request, and one that never answers."""

import resource
import socket
import subprocess
import sys
from typing import Any

import pytest

from connector_tax.loadgen import (
    LoadGenerator,
    LoadGeneratorOptions,
    Target,
    endpoint,
)
from connector_tax.loadgen.health import check_processes
from tests.loadgen.fault_server import FaultServer, good_answer
from tests.loadgen.running import run_scripts

FEW = LoadGeneratorOptions(connections_per_worker=4, strict=True)


@pytest.mark.parametrize("first", ["::1", "127.0.0.9"])
def test_every_address_of_a_name_is_tried(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name may resolve to an address on which nobody listens before the one that serves."""
    resolve = socket.getaddrinfo

    def both(_host: str, port: int, **options: Any) -> list[Any]:
        numeric = {**options, "flags": socket.AI_NUMERICHOST}
        return [*resolve(first, port, **numeric), *resolve("127.0.0.1", port, **numeric)]

    with FaultServer({"good": [good_answer()]}) as server:
        monkeypatch.setattr(socket, "getaddrinfo", both)
        with LoadGenerator(Target("localhost", server.port), FEW) as running:
            result = run_scripts(running, ["good"] * 10)
    assert {r.status for r in result.records} == {"ok"}


def test_an_ipv6_address_stands_in_brackets() -> None:
    head = endpoint.request_head(Target("::1", 8000))
    assert "\r\nHost: [::1]:8000\r\n" in head


def test_a_server_that_never_answers_a_connect_is_named_and_fails_the_checks() -> None:
    with socket.socket() as listening, socket.socket() as first, socket.socket() as second:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        address = listening.getsockname()
        for filler in (first, second):  # the queue of connections is full, further SYNs are dropped
            filler.setblocking(False)
            filler.connect_ex(address)
        with LoadGenerator(Target(*address), FEW) as running:
            result = run_scripts(running, ["any"] * 4, request_timeout_s=0.5)
    assert {r.error_kind for r in result.records} == {"request_timeout"}
    assert result.health["connect_errors"] == [
        "connect_failed: no answer from the server within 5 s"
    ]
    failed = [c.name for c in check_processes(result.health, result.clock) if not c.passed]
    assert "unopened_connections" in failed


LIMITED = """
import resource, sys
from connector_tax.loadgen import LoadGenerator, LoadGeneratorError, LoadGeneratorOptions, Target
from tests.loadgen.running import run_scripts
soft, hard, port = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
try:
    with LoadGenerator(Target("127.0.0.1", port), LoadGeneratorOptions(strict=True)) as generator:
        result = run_scripts(generator, ["good"], floor_s=0.1, cap_s=0.1)
        print(result.health["connections"]["worker0"])
except LoadGeneratorError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("soft", "hard", "said"),
    [
        (100, 1024, "256"),
        (100, 200, "connections_per_worker 256 needs 320 open files; the hard limit is 200"),
    ],
)
def test_the_limit_of_open_files_is_raised_or_named(soft: int, hard: int, said: str) -> None:
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= hard
    with FaultServer({"good": [good_answer()]}) as server:
        done = subprocess.run(
            [sys.executable, "-c", LIMITED, str(soft), str(hard), str(server.port)],
            capture_output=True,
            text=True,
            check=True,
        )
    assert done.stdout.startswith(said)


@pytest.mark.parametrize(
    ("headers", "named"),
    [({"A": "b\r\nC: d"}, "line break"), ({"Authorization": "Bearer \u0161"}, "Latin-1")],
)
def test_headers_that_cannot_be_sent_are_refused_without_their_value(
    headers: dict[str, str], named: str
) -> None:
    with pytest.raises(ValueError, match=named) as caught:
        Target("host", 80, headers=headers)
    assert "Bearer" not in str(caught.value)

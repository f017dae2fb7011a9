"""The fault switches: each does its harm, to the request it is meant for, and is on record."""

import http.client
import itertools
import json
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from connector_tax.engine.faults import FaultKind, FaultPlan
from tests.engine.serving import Launched, completion, events, launched, texts


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    """A server that lets requests ask for faults."""
    with launched(tmp_path_factory.mktemp("faults"), fault_headers=True) as running:
        yield running


def truth_of(folder: Path, fault: dict[str, Any], count: int, **fields: Any) -> list[list[int]]:
    """The tokens of each write of so many requests with a fault; every body is still complete."""
    with launched(folder, fault_headers=True) as server:
        wanted = texts(server.stream(**fields))
        for at_byte in range(count):
            got = server.stream({**fault, "at_byte": at_byte}, **fields)
            assert texts(got) == wanted
            assert events(got)[-1] == "[DONE]"
        server.stop()
    return [[w[1] for w in record["writes"]] for record in server.records("truth.jsonl")[2:]]


def test_coalesced_tokens_share_a_write(tmp_path: Path) -> None:
    writes = truth_of(tmp_path, {"kind": "coalesce", "tokens": 3}, 1)
    assert writes == [[3, 3, 2, 0]]


def test_an_event_can_be_split_at_any_byte(tmp_path: Path) -> None:
    fault = {"kind": "split_event", "ms": 0.1}
    writes = truth_of(tmp_path, fault, 230, max_tokens=2, stream_options=None)
    # Each event in two writes, the token counted with its last byte.
    assert writes == [[0, 1, 0, 1, 0]] * 230


def test_crlf_line_ends(server: Launched) -> None:
    body = server.stream({"kind": "crlf"})
    assert body.count(b"\r\n\r\n") == body.count(b"data: ") == 10
    assert texts(body) == texts(server.stream())


def test_delayed_headers(server: Launched) -> None:
    begin = time.monotonic()
    first = next(
        server.raw(json.dumps(completion()).encode(), {"kind": "delay_headers", "ms": 150})
    )
    assert time.monotonic() - begin >= 0.15
    assert first.startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize(("kind", "status"), [("http_429", 429), ("http_500", 500)])
def test_error_statuses(server: Launched, kind: str, status: int) -> None:
    got, body = server.ask({"kind": kind})
    assert (got, json.loads(body)["error"]["code"]) == (status, status)


def test_an_error_event_in_the_stream(server: Launched) -> None:
    got = events(server.stream({"kind": "error_event", "after_tokens": 3}))
    assert len(got) == 5
    assert got[3]["error"]["message"] == "injected fault"
    assert got[4] == "[DONE]"


def test_fin_in_the_middle(server: Launched) -> None:
    with pytest.raises(http.client.IncompleteRead) as error:
        server.stream({"kind": "fin", "after_tokens": 2})
    assert len(texts(error.value.partial)) == 2


def test_rst_in_the_middle(server: Launched) -> None:
    with pytest.raises(ConnectionResetError):
        list(server.raw(json.dumps(completion()).encode(), {"kind": "rst", "after_tokens": 2}))


def test_missing_done(server: Launched) -> None:
    body = server.stream({"kind": "no_done"})
    assert b"[DONE]" not in body
    assert len(texts(body)) == 8


@pytest.mark.parametrize("delta", [-2, 3])
def test_a_wrong_output_length(server: Launched, delta: int) -> None:
    got = events(server.stream({"kind": "wrong_length", "tokens": delta}))
    assert got[-2]["usage"]["completion_tokens"] == 8 + delta
    assert len(got) == 8 + delta + 2


def test_a_stall(server: Launched) -> None:
    stamps = []
    fault = {"kind": "stall", "after_tokens": 4, "ms": 400}
    for read in server.raw(json.dumps(completion()).encode(), fault):
        stamps += [time.monotonic()] * read.count(b'"text"')
    gaps = [b - a for a, b in itertools.pairwise(stamps)]
    assert len(stamps) == 8
    assert gaps.index(max(gaps)) == 3
    assert gaps[3] >= 0.39


def test_a_prefix_hit_that_is_none(server: Launched) -> None:
    before = server.metrics()["vllm:prefix_cache_hits_total"]
    server.stream({"kind": "prefix_hit"}, prompt=[31000])
    assert server.metrics()["vllm:prefix_cache_hits_total"] == before + 16


def test_faults_of_an_answer_that_is_not_streamed(server: Launched) -> None:
    begin = time.monotonic()
    body = server.stream({"kind": "delay_headers", "ms": 120}, stream=False, stream_options=None)
    assert time.monotonic() - begin >= 0.12
    assert json.loads(body)["usage"]["completion_tokens"] == 8
    with pytest.raises(http.client.RemoteDisconnected):
        server.stream({"kind": "fin"}, stream=False, stream_options=None)


def test_a_fault_nobody_knows_is_refused(server: Launched) -> None:
    status, body = server.ask({"kind": "gremlin"})
    assert status == 400
    assert b"X-Embedded-Fault" in body


@pytest.mark.parametrize("kind", ["die", "gremlin"])
def test_fault_headers_are_refused_unless_switched_on(tmp_path: Path, kind: str) -> None:
    with launched(tmp_path) as server:
        status, body = server.ask({"kind": kind})
        assert status == 400
        assert b"--fault-headers" in body
        assert server.stream().endswith(b"data: [DONE]\n\n")


def test_every_fault_is_in_the_truth_log(tmp_path: Path) -> None:
    rules = [
        {"kind": "fin", "at": [1], "after_tokens": 2},
        {"kind": "http_500", "at": [2]},
        {"kind": "no_done", "at": [3]},
    ]
    with launched(tmp_path, changes={"faults": {"seed": 1, "rules": rules}}) as server:
        server.stream()
        with pytest.raises(http.client.IncompleteRead):
            server.stream()
        assert server.ask()[0] == 500
        assert b"[DONE]" not in server.stream()
        assert b"[DONE]" in server.stream()
        server.stop()
        truth = server.records("truth.jsonl")[1:]
    assert [(r["fault"], r["outcome"]) for r in truth] == [
        (None, "ok"),
        ("fin", "fin"),
        ("http_500", "http_500"),
        ("no_done", "ok"),
        (None, "ok"),
    ]
    assert truth[1]["completion_tokens"] == 2


def test_random_faults_follow_from_their_seed_and_their_probability() -> None:
    def kinds(seed: int) -> list[FaultKind | None]:
        rules = [{"kind": "rst", "probability": 0.1}, {"kind": "stall", "probability": 0.2}]
        plan = FaultPlan({"seed": seed, "rules": rules})
        faults = [plan.for_request() for _ in range(5000)]
        return [fault.kind if fault else None for fault in faults]

    counts = Counter(kinds(3))
    assert kinds(3) == kinds(3) != kinds(4)
    # Five standard deviations around 0.1 and 0.9 * 0.2.
    assert abs(counts[FaultKind.RST] - 500) < 5 * (5000 * 0.1 * 0.9) ** 0.5
    assert abs(counts[FaultKind.STALL] - 900) < 5 * (5000 * 0.18 * 0.82) ** 0.5


def test_metrics_can_be_slow_and_malformed(tmp_path: Path) -> None:
    rules = [
        {"kind": "slow_metrics", "at": [0], "ms": 150},
        {"kind": "malformed_metrics", "at": [1]},
    ]
    with launched(tmp_path, changes={"faults": {"seed": 1, "rules": rules}}) as server:
        begin = time.monotonic()
        assert "vllm:num_requests_running" in server.metrics()
        assert time.monotonic() - begin >= 0.15
        _, page = server.request("GET", "/metrics")
        with pytest.raises(UnicodeDecodeError):
            page.decode()
        server.metrics()


def test_the_server_can_die_under_load(tmp_path: Path) -> None:
    changes = {"faults": {"seed": 1, "rules": [{"kind": "die", "at": [1]}]}}
    with launched(tmp_path, changes=changes) as server:
        body = json.dumps(completion(max_tokens=5000)).encode()
        stream = server.raw(body)
        next(stream)
        with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
            server.stream()
        assert server.process.wait(10) == -9
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port))

"""Test that each injected fault affects its request and is recorded."""

import contextlib
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
from tests.engine.serving import Launched, events, launched, texts


@contextlib.contextmanager
def faulty(folder: Path, *rules: dict[str, Any]) -> Iterator[Launched]:
    """Yield a server with these rules; rule k applies to request k unless it names another."""
    numbered = [{"at": [number], **rule} for number, rule in enumerate(rules)]
    with launched(folder, changes={"faults": {"seed": 1, "rules": numbered}}) as running:
        yield running


def truth_of(folder: Path, *rules: dict[str, Any], **fields: Any) -> list[list[int]]:
    """Send a complete request for each rule; return the number of tokens of each write."""
    with faulty(folder, *rules) as server:
        got = [server.stream(**fields) for _ in rules]
        wanted = texts(server.stream(**fields))
        server.stop()
    assert all(texts(body) == wanted and events(body)[-1] == "[DONE]" for body in got)
    return [[w[1] for w in record["writes"]] for record in server.records("truth.jsonl")[1:-1]]


def test_coalesced_tokens_share_a_write(tmp_path: Path) -> None:
    assert truth_of(tmp_path, {"kind": "coalesce", "tokens": 3}) == [[3, 3, 2, 0]]


def test_split_fault_cuts_an_event_at_the_given_byte(tmp_path: Path) -> None:
    rules = [{"kind": "split_event", "ms": 0.1, "at_byte": byte} for byte in range(230)]
    writes = truth_of(tmp_path, *rules, max_tokens=2, stream_options=None)
    # Each event comes in two writes; its token counts with the last byte.
    assert writes == [[0, 1, 0, 1, 0]] * 230


def test_faults_in_line_ends_status_done_and_prefix_hits_reach_the_client(tmp_path: Path) -> None:
    rules = ("crlf", "http_429", "http_500", "no_done", "prefix_hit")
    with faulty(tmp_path, *({"kind": kind} for kind in rules)) as server:
        crlf = server.stream()
        assert crlf.count(b"\r\n\r\n") == crlf.count(b"data: ") == 10
        for status in (429, 500):
            got, body = server.ask()
            assert (got, json.loads(body)["error"]["code"]) == (status, status)
        without = server.stream()
        assert b"[DONE]" not in without
        assert len(texts(without)) == 8
        before = server.metrics()["vllm:prefix_cache_hits_total"]
        server.stream(prompt=[31000])
        assert server.metrics()["vllm:prefix_cache_hits_total"] == before + 16
        assert texts(server.stream()) == texts(crlf)


def test_faults_end_bodies_early_or_change_their_length(tmp_path: Path) -> None:
    rules: list[dict[str, Any]] = [
        {"kind": "error_event", "after_tokens": 3},
        {"kind": "fin", "after_tokens": 2},
        {"kind": "rst", "after_tokens": 2},
        {"kind": "wrong_length", "tokens": -2},
        {"kind": "wrong_length", "tokens": 3},
        {"kind": "fin"},
    ]
    with faulty(tmp_path, *rules) as server:
        got = events(server.stream())
        assert len(got) == 5
        assert got[3]["error"]["message"] == "injected fault"
        assert got[4] == "[DONE]"
        with pytest.raises(http.client.IncompleteRead) as error:
            server.stream()
        assert len(texts(error.value.partial)) == 2
        with pytest.raises(ConnectionResetError):
            list(server.raw())
        for delta in (-2, 3):
            got = events(server.stream())
            assert got[-2]["usage"]["completion_tokens"] == 8 + delta
            assert len(got) == 8 + delta + 2
        with pytest.raises(http.client.RemoteDisconnected):
            server.stream(stream=False, stream_options=None)


def test_faults_delay_headers_and_stall_streams(tmp_path: Path) -> None:
    delayed = {"kind": "delay_headers", "ms": 150}
    stalled = {"kind": "stall", "after_tokens": 4, "ms": 400}
    with faulty(tmp_path, delayed, delayed, stalled) as server:
        begin = time.monotonic()
        assert next(server.raw()).startswith(b"HTTP/1.1 200 OK\r\n")
        assert time.monotonic() - begin >= 0.15
        begin = time.monotonic()
        body = server.stream(stream=False, stream_options=None)
        assert time.monotonic() - begin >= 0.15
        assert json.loads(body)["usage"]["completion_tokens"] == 8
        stamps = []
        for read in server.raw():
            stamps += [time.monotonic()] * read.count(b'"text"')
    gaps = [b - a for a, b in itertools.pairwise(stamps)]
    assert len(stamps) == 8
    assert gaps.index(max(gaps)) == 3
    assert gaps[3] >= 0.39


def test_every_fault_is_in_the_truth_log(tmp_path: Path) -> None:
    rules: list[dict[str, Any]] = [
        {"kind": "fin", "at": [1], "after_tokens": 2},
        {"kind": "http_500", "at": [2]},
        {"kind": "no_done", "at": [3]},
    ]
    with faulty(tmp_path, *rules) as server:
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


def test_random_faults_depend_on_seed_and_probability_only() -> None:
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


def test_metrics_faults_delay_and_malform_the_page(tmp_path: Path) -> None:
    rules: list[dict[str, Any]] = [
        {"kind": "slow_metrics", "ms": 150},
        {"kind": "malformed_metrics"},
    ]
    with faulty(tmp_path, *rules) as server:
        begin = time.monotonic()
        assert "vllm:num_requests_running" in server.metrics()
        assert time.monotonic() - begin >= 0.15
        _, page = server.request("GET", "/metrics")
        with pytest.raises(UnicodeDecodeError):
            page.decode()
        server.metrics()


def test_die_fault_kills_the_server_under_load(tmp_path: Path) -> None:
    with faulty(tmp_path, {"kind": "die", "at": [1]}) as server:
        stream = server.raw(max_tokens=5000)
        next(stream)
        with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
            server.stream()
        assert server.process.wait(10) == -9
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port))

"""Test that every server fault gives its own failure kind, and never a success."""

from typing import Any

import pytest

from connector_tax.loadgen.messages import FAILURES, RequestRecord
from tests.loadgen.fault_server import (
    HEAD,
    Fin,
    Hang,
    Pause,
    Reset,
    Step,
    chunked,
    event,
    good_answer,
    good_events,
    token,
    usage,
)
from tests.loadgen.running import loading, run_scripts

STRICT: dict[str, Any] = {"connections_per_worker": 64, "strict": True}

GOOD = good_answer()
BARE_HEAD = b"HTTP/1.1 200 OK\r\n\r\n"
SWITCH = b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n"
TOKEN = event(token())
DONE = event("[DONE]")
DRIBBLE: list[Step] = [s for byte in GOOD[:400] for s in (bytes([byte]), Pause(0.02))]
ERROR_OBJECT = '{"error":{"message":"out of memory","type":"InternalServerError","code":500}}'
OLD_ERROR_OBJECT = '{"object":"error","message":"boom","code":400}'


def _stream(*events: bytes, last: bool = True) -> bytes:
    return HEAD + chunked(*events, last=last)


def _sized(body: bytes, status: str = "200 OK", extra: bytes = b"") -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n".encode()
    return head + extra + b"\r\n" + body


# script name -> (steps, expected failure kind; None is success)
FAULTS: dict[str, tuple[list[Step], str | None]] = {
    "good": ([GOOD], None),
    "crlf": ([good_answer("\r\n")], None),
    "cr": ([good_answer("\r")], None),
    "content-length": ([_sized(b"".join(good_events()))], None),
    "until-eof": ([BARE_HEAD, *good_events(), Fin], None),
    "until-eof-cut": (
        [b"HTTP/1.1 200 OK\r\n\r\n" + b"".join(good_events()[:3]), Fin],
        "missing_done",
    ),
    "interim": ([b"HTTP/1.1 100 Continue\r\n\r\n", Pause(0.01), GOOD], None),
    "comments": ([_stream(b": ping\n\n", *good_events(), b": bye\n\n")], None),
    "bom": ([_stream(b"\xef\xbb\xbf", *good_events())], None),
    "close-header": ([_sized(b"".join(good_events()), extra=b"connection: close\r\n"), Fin], None),
    "garbage-after": ([GOOD + b"unasked bytes", Hang], None),
    "slow": ([s for i in range(0, len(GOOD), 20) for s in (GOOD[i : i + 20], Pause(0.005))], None),
    "no-answer": ([Hang], "request_timeout"),
    "slow-loris": (DRIBBLE, "request_timeout"),
    "stall": ([GOOD[:-20], Hang], "request_timeout"),
    "reset-first": ([Reset], "reset_before_headers"),
    "reset-in-head": ([HEAD[:30], Pause(0.01), Reset], "reset_before_headers"),
    "close-first": ([Fin], "closed_before_headers"),
    "close-in-head": ([HEAD[:30], Fin], "closed_before_headers"),
    "reset-mid": ([_stream(TOKEN, last=False), Pause(0.01), Reset], "reset_mid_response"),
    "close-mid": ([_stream(TOKEN, last=False), Fin], "closed_mid_response"),
    "close-after-done": ([GOOD[:-5], Fin], "closed_mid_response"),
    "short-length": ([_sized(b"".join(good_events()))[:-7], Fin], "closed_mid_response"),
    "not-http": ([b"SSH-2.0-OpenSSH_9.2\r\n", Hang], "malformed_http"),
    "garbage-head": ([b"HTTP/1.1 200 OK\r\n\x00\x01\x02: x\r\n\r\n", Hang], "malformed_http"),
    "garbage-body": ([HEAD + b"not a chunk size\r\n", Hang], "malformed_http"),
    "garbage-chunk": ([_stream(TOKEN, last=False) + b"zz\r\n", Hang], "malformed_http"),
    "switch": ([SWITCH, Hang], "malformed_http"),
    "404": ([_sized(b'{"error":"no such model"}', "404 Not Found")], "http_status"),
    "429": ([_sized(b"slow down", "429 Too Many Requests")], "http_status"),
    "500": ([_sized(b"", "500 Internal Server Error")], "http_status"),
    "503-good-body": ([_sized(b"".join(good_events()), "503 Busy")], "http_status"),
    "204": ([b"HTTP/1.1 204 No Content\r\n\r\n"], "http_status"),
    "error-event": ([_stream(TOKEN, event(ERROR_OBJECT), DONE)], "error_event"),
    "error-only": ([_stream(event(ERROR_OBJECT), DONE)], "error_event"),
    "old-error": ([_stream(TOKEN, event(OLD_ERROR_OBJECT), DONE)], "error_event"),
    "named-error": (
        [_stream(*good_events()[:3], b"event: error\ndata: {}\n\n", *good_events()[3:])],
        "error_event",
    ),
    "error-after-done": ([_stream(*good_events(), event(ERROR_OBJECT))], "error_event"),
    "missing-done": ([_stream(*good_events()[:-1])], "missing_done"),
    "done-without-finish": (
        [_stream(*[event(token())] * 3, event(usage()), DONE)],
        "missing_finish",
    ),
    "half-done": ([_stream(*good_events()[:-1], b"data: [DO")], "missing_done"),
    "empty-stream": ([_stream()], "missing_done"),
    "tokens-after-done": ([_stream(*good_events(), TOKEN)], "data_after_done"),
    "not-json": ([_stream(TOKEN, event("{oops"), DONE)], "malformed_event"),
    "not-an-object": ([_stream(event("[1,2]"), DONE)], "malformed_event"),
    "wrong-type": ([_stream(event('{"choices":7}'), DONE)], "malformed_event"),
    "negative-usage": ([_stream(*good_events()[:3], event(usage(1, -5)), DONE)], "missing_usage"),
    "no-usage": ([_stream(*good_events()[:3], DONE)], "missing_usage"),
    "too-short": ([_stream(*good_events()[1:3], event(usage(4, 2)), DONE)], "wrong_length"),
    "wrong-prompt": ([_stream(*good_events()[:3], event(usage(5, 3)), DONE)], "wrong_length"),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, RequestRecord]:
    with loading({name: steps for name, (steps, _) in FAULTS.items()}, **STRICT) as generator:
        result = run_scripts(generator, list(FAULTS), request_timeout_s=1.0)
    return {record.request_id: record for record in result.records}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_has_its_error_kind(name: str, outcomes: dict[str, RequestRecord]) -> None:
    record, expected = outcomes[name], FAULTS[name][1]
    assert record.error_kind == expected, record
    assert record.status == ("ok" if expected is None else FAILURES[expected][0])
    assert record.t_done_ns is not None
    if expected is None:
        assert record.completion_tokens == 3
        assert record.reads is not None
        assert sum(events for _, events in record.reads) == 3


def test_every_stamp_of_a_success_is_in_order(outcomes: dict[str, RequestRecord]) -> None:
    for record in outcomes.values():
        if record.status == "ok":
            names = ("intended", "conn", "send", "headers", "first_token", "last_token", "done")
            stamps = [getattr(record, f"t_{name}_ns") for name in names]
            assert stamps == sorted(stamps), record


@pytest.mark.parametrize("ending", ["\n", "\r\n"], ids=["LF", "CRLF"])
def test_a_response_split_at_any_byte_is_the_same_response(ending: str) -> None:
    answer = good_answer(ending)
    scripts: dict[str, list[Step]] = {
        f"{k}": [answer[:k], Pause(0.003), answer[k:]] for k in range(1, len(answer))
    }
    with loading(scripts, **STRICT) as generator:
        result = run_scripts(generator, list(scripts))
    assert len(result.records) == len(answer) - 1
    bad = [r for r in result.records if r.status != "ok" or sum(n for _, n in r.reads or ()) != 3]
    assert not bad, bad[0]


@pytest.mark.parametrize("end", [Fin, Reset], ids=["FIN", "RST"])
def test_a_connection_cut_at_any_byte_is_a_failure(end: Step) -> None:
    scripts: dict[str, list[Step]] = {f"{k}": [GOOD[:k], end] for k in range(len(GOOD) + 1)}
    with loading(scripts, **STRICT) as generator:
        result = run_scripts(generator, list(scripts))
    word = "closed" if end is Fin else "reset"
    for record in result.records:
        k = int(record.request_id)
        allowed: set[str | None]
        if k < len(HEAD):
            allowed = {f"{word}_before_headers"}
        elif k < len(GOOD):
            allowed = {f"{word}_mid_response"}
        else:
            allowed = {None}
        if end is Reset and k > 0:
            # The reset may overtake the bytes before it; it never hides that the answer was cut.
            allowed |= {"reset_before_headers", "reset_mid_response"}
        assert record.error_kind in allowed, record


def test_request_longer_than_the_drain_is_a_timeout() -> None:
    with loading({"hang": [Hang], "good": [GOOD]}, **STRICT) as generator:
        result = run_scripts(generator, ["good", "hang", "good"], drain_s=0.2, request_timeout_s=60)
        assert [r.error_kind for r in result.records] == [None, "drain_timeout", None]
        assert result.records[1].status == "timeout"
        # Requests that are left over from the last cell do not disturb the next one.
        again = run_scripts(generator, ["good"] * 3, floor_s=0.3, cap_s=0.3)
        assert [r.status for r in again.records] == ["ok"] * 3


def test_non_streaming_bodies_succeed_and_fail_like_streams() -> None:
    counts = '"usage":{"prompt_tokens":4,"completion_tokens":3}'
    good = f'{{"choices":[{{"text":"abc","finish_reason":"length"}}],{counts}}}'.encode()
    unfinished = f'{{"choices":[{{"text":"abc","finish_reason":null}}],{counts}}}'.encode()
    scripts: dict[str, list[Step]] = {
        "good": [_sized(good)],
        "pieces": [_sized(good)[:70], Pause(0.01), _sized(good)[70:]],
        "cut": [_sized(good)[:-3], Fin],
        "unfinished": [_sized(unfinished)],
        "not-json": [_sized(b"<html>")],
        "error": [_sized(ERROR_OBJECT.encode())],
        "500": [_sized(b"no", "500 Oops")],
    }
    with loading(scripts, stream=False, **STRICT) as generator:
        result = run_scripts(generator, list(scripts), floor_s=0.3, cap_s=0.3)
    kinds = {r.request_id: r.error_kind for r in result.records}
    assert kinds == {
        "good": None,
        "pieces": None,
        "cut": "closed_mid_response",
        "unfinished": "missing_done",
        "not-json": "malformed_event",
        "error": "error_event",
        "500": "http_status",
    }


def test_a_connection_closed_while_idle_is_not_used_again() -> None:
    with loading({"bye": [GOOD, Pause(0.02), Fin]}, connections_per_worker=1) as generator:
        result = run_scripts(generator, ["bye"] * 10)
    assert [r.status for r in result.records] == ["ok"] * 10

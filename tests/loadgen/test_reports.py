"""Test the reported numbers, failures and notes, against servers that each differ from vLLM in one
respect.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.loadgen import running
from tests.loadgen.fault_server import (
    HEAD,
    FaultServer,
    Fin,
    Pause,
    Step,
    chunked,
    event,
    good_answer,
    good_events,
    serve,
    token,
    usage,
)

GOOD = good_answer()
STREAM = b"".join(good_events())


def command(port: int, folder: Path, options: str) -> tuple[int, dict[str, Any], list[Any]]:
    """Run with one prompt; return the exit status, the summary and the records."""
    prompt = "" if "--prompt" in options else "--prompt p"
    return running.command(port, folder, f"--model m --no-ready-check {prompt} {options}")


def json_of(**fields: Any) -> str:
    return json.dumps(fields, separators=(",", ":"))


def stream(*steps: str | Pause, end: bool = True) -> list[Step]:
    """Return a stream's steps: each text is the data of an event, sent at once."""
    script: list[Step] = [HEAD]
    for step in steps:
        script.append(step if isinstance(step, Pause) else chunked(event(step), last=False))
    if end:
        script.append(chunked(event("[DONE]")))
    return script


def counted(text: str, total: int, finish: str | None = None) -> str:
    """Return a completion chunk whose usage counts `total` tokens so far."""
    return json_of(
        choices=[{"index": 0, "text": text, "finish_reason": finish}],
        usage={"prompt_tokens": 4, "completion_tokens": total},
    )


def delta(finish: str | None = None, **fields: Any) -> str:
    """Return a chat chunk."""
    return json_of(choices=[{"index": 0, "delta": fields, "finish_reason": finish}])


# ---- how answers end


def answers(
    folder: Path, scripts: dict[str, list[Step]], options: str = ""
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Let each script answer one request, one after the other; return summary and records."""
    names = iter(scripts)
    with FaultServer(scripts, lambda _: next(names)) as server:
        load = f"--concurrency 1 --requests {len(scripts)} {options}"
        _, summary, records = command(server.port, folder, load)
    return summary, dict(zip(scripts, sorted(records, key=lambda r: r["seq"]), strict=True))


def test_finish_reason_that_is_not_accepted_fails_the_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scripts: dict[str, list[Step]] = {"good": [GOOD]}
    for reason in ("abort", "error", "repetition"):
        scripts[reason] = stream(token(), token(finish=reason), usage(completion=2))
    open_end = [token(finish=""), token(finish="length"), usage(completion=2)]
    scripts["empty, then good"] = stream(*open_end)
    scripts["bad, then good"] = stream(token(finish="cut"), token(finish="stop"))
    summary, records = answers(tmp_path, scripts, "--finish-reason repetition")
    kinds = [None, "bad_finish", "bad_finish", None, None, "bad_finish"]
    assert [r["error_kind"] for r in records.values()] == kinds
    texts = {f"finish_reason '{reason}'": 1 for reason in ("abort", "error", "cut")}
    assert summary["failed"]["bad_finish"]["texts"] == texts
    reasons = {"length": 2, "abort": 1, "error": 1, "repetition": 1, "cut": 1}
    assert summary["finish_reasons"] == reasons
    printed = capsys.readouterr().out
    assert "2 length, 1 abort, 1 error, 1 repetition, 1 cut" in printed
    assert "--finish-reason NAME" in printed


# ---- which events carry a token

WAIT = Pause(0.15)
NEVER_FIRST: dict[str, list[str | Pause]] = {
    "empty text": [token(""), WAIT, token(), token(finish="length"), usage(completion=2)],
    "empty content": [delta(content=""), WAIT, delta(content="a"), delta("stop", content="b")],
    "empty role": [
        *(delta(role="assistant", content=""), delta(content="")),
        *(WAIT, delta(content="a"), delta("stop", content="b")),
    ],
    "a total that may include an end without an event": [
        *(token(""), WAIT, token(), token(finish="length"), usage()),
    ],
    "blank call": [
        delta(tool_calls=[{"index": 0, "id": "7", "function": {"name": "", "arguments": ""}}]),
        *(delta(function_call={"name": None, "arguments": ""}), WAIT),
        delta("stop", content="b"),
    ],
    "blank parts": [
        delta(content=[{"type": "text", "text": ""}]),
        delta(reasoning_content=[{"type": "thinking", "thinking": [{"text": ""}]}]),
        *(WAIT, delta("stop", content=[{"type": "text", "text": "b"}])),
    ],
    "neither text nor delta": [
        json_of(choices=[{"index": 0, "delta": None}]),
        *(WAIT, token(finish="stop")),
    ],
    "usage of none": [counted("a", 0), WAIT, counted("b", 1), counted("c", 2, "length")],
    "no ids": [
        *(json_of(choices=[{"text": "a", "token_ids": [], "finish_reason": None}]), WAIT),
        json_of(choices=[{"text": "b", "token_ids": [5], "finish_reason": "stop"}]),
    ],
}


FIRST: dict[str, list[str | Pause]] = {
    "usage": [counted("", 1), WAIT, counted("b", 2, "length")],
    "refusal": [delta(refusal="N"), WAIT, delta("stop", refusal="o")],
    "function call": [
        *(delta(function_call={"name": "f"}), WAIT),
        delta("function_call", function_call={"arguments": "{}"}),
    ],
    "usage of none in all events": [counted("a", 0), WAIT, counted("b", 0, "length")],
    "ids": [
        *(json_of(choices=[{"text": "", "token_ids": [7], "finish_reason": None}]), WAIT),
        json_of(choices=[{"text": "b", "token_ids": [5], "finish_reason": "stop"}]),
    ],
    "logprobs": [
        json_of(choices=[{"delta": {"content": ""}, "logprobs": {"content": [{"token": "x"}]}}]),
        *(WAIT, delta("stop", content="b")),
    ],
    "end-of-sequence tokens": [token(""), WAIT, token("", "length"), usage(completion=2)],
}


def test_clock_starts_with_the_first_event_that_carries_a_token(tmp_path: Path) -> None:
    """Count half of a character and a counted end-of-sequence token as tokens, but not an opening
    event.
    """
    scripts = {name: stream(*steps) for name, steps in (NEVER_FIRST | FIRST).items()}
    summary, records = answers(tmp_path, scripts)
    assert summary["ok"] == len(scripts), summary["failed"]
    for name, record in records.items():
        ttft_ms = (record["t_first_token_ns"] - record["t_send_ns"]) / 1e6
        assert (ttft_ms > 150) == (name in NEVER_FIRST), (name, ttft_ms)
        assert record["t_first_answer_ns"] == record["t_first_token_ns"], name
        assert sum(tokens for _, tokens in record["reads"]) == record["token_events"], name


def test_empty_opening_event_is_the_first_token_of_a_fixed_length_answer(tmp_path: Path) -> None:
    steps = (token(""), WAIT, token(), token(finish="length"), usage())
    _, records = answers(tmp_path, {"x": stream(*steps)}, "--ignore-eos --max-tokens 3")
    record = records["x"]
    assert record["error_kind"] is None
    assert (record["t_first_token_ns"] - record["t_send_ns"]) / 1e6 < 150
    assert record["token_events"] == 3


def test_events_without_text_that_the_total_excludes_are_no_tokens(tmp_path: Path) -> None:
    """Check that such events end no answer, and belong to no read."""
    gap = Pause(0.05)
    text, end = delta(content="a"), json_of(choices=[{"delta": {"content": ""}}])
    steps: list[str | Pause] = [text, gap, end, gap, text, delta("stop", content=""), WAIT, end]
    scripts = {"total": stream(*steps, usage(completion=2)), "no total": stream(*steps)}
    summary, records = answers(tmp_path, scripts)
    assert summary["ok"] == 2, summary["failed"]
    ms = [(r["t_last_token_ns"] - r["t_first_token_ns"]) / 1e6 for r in records.values()]
    assert 100 <= ms[0] < 200 < 250 <= ms[1]
    assert [sum(tokens for _, tokens in r["reads"]) for r in records.values()] == [2, 5]
    assert [r["token_events"] for r in records.values()] == [2, 5]


PLACES: dict[str, list[str | Pause]] = {
    "choice": [json_of(choices=[{"text": "", "finish_reason": "stop", "usage": {
        "prompt_tokens": 4, "completion_tokens": 2}}])],
    "x_groq": [token(finish="stop"), json_of(choices=[], x_groq={"usage": {
        "prompt_tokens": 4, "completion_tokens": 2}})],
    "text": [token(finish="stop"), json_of(usage={
        "prompt_tokens": "4", "completion_tokens": 2.0, "prompt_cache_hit_tokens": 3})],
}  # fmt: skip


def test_usage_is_read_wherever_servers_put_it(tmp_path: Path) -> None:
    odd = [{"prompt_tokens": -1, "completion_tokens": None}, [], "none", 7]
    scripts = {name: stream(token(), token(), *steps) for name, steps in PLACES.items()}
    for usage_value in odd:
        name = str(usage_value)
        scripts[name] = stream(token(), token(finish="stop"), json_of(usage=usage_value))
    summary, records = answers(tmp_path, scripts)
    assert summary["ok"] == len(scripts), summary["failed"]
    for name, record in records.items():
        counts = (record["prompt_tokens"], record["completion_tokens"], record["counted_by"])
        assert counts == ((4, 2, "server") if name in PLACES else (None, 2, "client")), name
    assert summary["cached_tokens"] == 3


def test_an_answer_with_several_choices_fails(tmp_path: Path) -> None:
    two = json_of(choices=[{"index": 0, "text": "a"}, {"index": 1, "text": "b"}])
    second = json_of(choices=[{"index": 1, "text": "b", "finish_reason": "stop"}])
    scripts = {"two": stream(two), "in turn": stream(token(), token(), second, token())}
    _, records = answers(tmp_path, scripts)
    assert {r["error_kind"] for r in records.values()} == {"several_choices"}


def test_events_that_count_several_tokens_are_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Send four tokens every 20 ms, so that TPOT is 5 ms."""
    gap = Pause(0.02)
    steps: list[str | Pause] = []
    for k in range(1, 11):
        steps += [gap, counted("four", 4 * k, "length" if k == 10 else None)]
    with serve(*stream(*steps)) as server:
        _, summary, records = command(server.port, tmp_path, "--concurrency 1 --requests 3")
    assert {(r["completion_tokens"], r["token_events"]) for r in records} == {(40, 10)}
    assert {tokens for r in records for _, tokens in r["reads"]} == {4}
    for name in ("TPOT", "ITL"):
        assert 4.9 < summary["latency_ms"][name]["p50"] < 9, name
    assert summary["latency_ms"]["ITL"]["n"] == 3 * 36
    assert "an event brought" not in capsys.readouterr().out


def test_note_gives_tokens_per_event_when_events_bundle_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gap = Pause(0.02)
    hiding = stream(token(), gap, token(), gap, token(finish="length"), usage(completion=12))
    summary, _ = answers(
        tmp_path, {"hiding": hiding, "one event": stream(counted("all", 12, "length"))}
    )
    assert summary["tokens_per_event"] == 6
    assert summary["latency_ms"]["TPOT"]["n"] == 1
    printed = capsys.readouterr().out
    assert "an event brought 6.00 tokens on average" in printed
    assert "1 of 2 have no TPOT: they had one token, or all tokens in one read" in printed


# ---- throughput


def test_throughput_counts_requests_and_tokens_received_in_the_window(tmp_path: Path) -> None:
    """Answer 19 requests in a window of 1 s, and one after it."""
    slow: list[Step] = [HEAD, chunked(event(token()), last=False), Pause(1.2), *stream(token())[1:]]
    slow[-2:] = [chunked(*good_events()[1:])]
    scripts: dict[str, Sequence[Step]] = {"good": [GOOD], "slow": slow}
    several = iter(["good", "good", "slow", *["good"] * 17])
    with FaultServer(scripts, lambda _: next(several)) as server:
        load = "--rate 20 --arrivals fixed --duration 1"
        _, summary, _ = command(server.port, tmp_path, load)
    assert summary["ok"] == 20
    assert summary["requests_per_s"] == pytest.approx(19 / summary["window_s"])
    assert summary["tokens_per_s"] == pytest.approx(58 / summary["window_s"])
    assert summary["input_tokens_per_s"] == pytest.approx(76 / summary["window_s"])


def test_closed_loop_throughput_counts_requests_sent_in_warm_up(tmp_path: Path) -> None:
    """Use a closed loop of four and answers of 0.7 s, which end after the warm-up of 0.4 s."""
    with serve(Pause(0.7), GOOD) as server:
        load = "--concurrency 4 --warmup 0.4 --duration 1.2"
        _, summary, _ = command(server.port, tmp_path, load)
    assert summary["requests"] == 8
    assert summary["requests_per_s"] * summary["window_s"] == pytest.approx(8)


def test_run_with_a_fixed_number_of_requests_ends_with_the_last_answer(tmp_path: Path) -> None:
    with serve(Pause(0.05), GOOD) as server:
        _, summary, records = command(server.port, tmp_path, "--concurrency 2 --requests 8")
    last_ns = max(r["t_done_ns"] for r in records)
    first_ns = min(r["t_intended_ns"] for r in records)
    assert summary["window_s"] == pytest.approx((last_ns - first_ns) / 1e9, abs=1e-3)
    assert summary["requests_per_s"] == pytest.approx(8 / summary["window_s"])


# ---- what was not measured


def test_missing_latency_does_not_count_as_good(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = stream(token("", "stop"), usage(completion=0))
    scripts: dict[str, list[Step]] = {"empty": empty, "one read": [GOOD]}
    summary, _ = answers(tmp_path, scripts, "--goodput ttft:5000 tpot:5000")
    assert summary["ok"] == 2
    goodput = summary["goodput"]
    assert (goodput["good"], goodput["not_measured"]) == (0, {"TTFT": 1, "TPOT": 2})
    printed = capsys.readouterr().out
    assert "2 of 2 have no TPOT and are not counted as good" in printed
    assert "1 of 2 brought no token" in printed
    with serve(*empty) as server:
        load = "--rate 100 --duration 0.3 --stop-at-precision 5%"
        _, summary, _ = command(server.port, tmp_path, load)
    assert "of 0 successes are not known yet" in summary["notes"][-1]


def test_non_streaming_response_has_no_token_latency(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    choice = {"index": 0, "text": "a b c", "finish_reason": "stop"}
    counts = {"prompt_tokens": 4, "completion_tokens": 3}
    body = json_of(choices=[choice], usage=counts).encode()
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    load = "--no-stream --concurrency 1 --requests 3 --goodput"
    with serve(answer) as server:
        _, summary, _ = command(server.port, tmp_path, f"{load} e2e:5000")
        assert summary["latency_ms"].keys() == {"E2E"}
        assert summary["goodput"]["share"] == 1
        assert server.bodies[0]["stream"] is False
        assert "stream_options" not in server.bodies[0]
        assert summary["tokens_per_s"] == pytest.approx(9 / summary["window_s"])
        for option in ("--goodput ttft:50", "--stop-at-precision 5%"):
            with pytest.raises(SystemExit):
                command(server.port, tmp_path, f"--no-stream --rate 5 --duration 1 {option}")
    assert "a whole response" in capsys.readouterr().err


def test_requests_with_warmup_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command(1, tmp_path, "--rate 10 --requests 40 --warmup 2")
    assert "--requests counts every sent request" in capsys.readouterr().err


def test_summary_has_lengths_and_a_note_on_short_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary, _ = answers(tmp_path, {"a": [GOOD], "b": [GOOD]})
    assert summary["lengths"]["output"] == {"n": 2, "mean": 3, "p50": 3, "p90": 3}
    assert summary["lengths"]["input"]["mean"] == 4
    assert "answers have 3.0 tokens on average, not --max-tokens 64" in capsys.readouterr().out
    answers(tmp_path, {"a": [GOOD]}, "--max-tokens 3")
    assert "tokens on average" not in capsys.readouterr().out


# ---- prompts and bodies


def test_every_run_draws_fresh_prompts_unless_a_seed_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = "--prompt-words 30 --concurrency 1 --requests 3"
    with serve(GOOD) as server:
        _, summary, _ = command(server.port, tmp_path, load)
        command(server.port, tmp_path, load)
        seed = summary["configuration"]["seed"]
        assert f"--seed {seed} repeats this run's arrivals and prompts" in capsys.readouterr().out
        command(server.port, tmp_path, f"{load} --seed {seed}")
        prompts = [body["prompt"] for body in server.bodies]
        capsys.readouterr()
        command(server.port, tmp_path, "--concurrency 1 --requests 1")
        assert "--seed" not in capsys.readouterr().out  # nothing is drawn
    assert len(set(prompts[:6])) == 6
    assert prompts[6:] == prompts[:3]


def test_cached_prompt_tokens_are_summed_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = {"prompt_tokens": 4, "completion_tokens": 1}
    details = {"prompt_tokens_details": {"cached_tokens": 3, "audio_tokens": None}}
    cached = json_of(choices=[], usage=counts | details)
    answer = stream(token(finish="stop"), cached)
    summary, _ = answers(tmp_path, {"a": answer, "b": answer})
    assert summary["cached_tokens"] == 6
    assert "6 prompt tokens were in the server's cache" in capsys.readouterr().out


def test_null_in_body_removes_a_key(tmp_path: Path) -> None:
    with serve(GOOD) as server:
        load = '--rate 50 --requests 1 --body {"max_completion_tokens":16,"max_tokens":null}'
        command(server.port, tmp_path, load)
        assert "max_tokens" not in server.bodies[0]
        assert server.bodies[0]["max_completion_tokens"] == 16


# ---- events that carry nothing, and answers that are no stream


BEATS = (
    *(b"data:\n\n", b"data: \n\n", b"event: ping\ndata: hello\n\n", b"event: ping\n\n"),
    *(b'event: ping\ndata: {"type": "ping"}\n\n', b"event: keepalive\ndata: 1\n\n"),
    *(b": ping\n\n", b"data: ping\n\n", b"data: null\n\n", b"retry: 3000\n\n"),
    *(b"event: progress\ndata: 12%\n\n", b"id: 7\n\n"),
    *(b"data: [PING]\n\n", b"data: : keep-alive\n\n", b"data: []\n\n"),
    *(b'data: "ping"\n\n', b"data: PROCESSING 3\n\n", b"data: # pong\n\n", b"data: 0\n\n"),
    *(b'data: {"type": "ping"}\n\n', b"event: Ping\ndata: {oops\n\n"),
)


def test_unknown_events_of_a_stream_that_ends_badly_are_quoted(tmp_path: Path) -> None:
    scripts = {
        "text": stream(token(), "out of memory"),
        "object": stream(token(), json_of(detail="out of memory")),
    }
    _, records = answers(tmp_path, scripts)
    kinds = [record["error_kind"] for record in records.values()]
    assert kinds == ["malformed_event", "missing_finish"]
    assert all("out of memory" in record["error_detail"] for record in records.values())


def test_heartbeats_are_ignored_at_every_position(tmp_path: Path) -> None:
    scripts: dict[str, list[Step]] = {}
    for beat in BEATS:
        parts = [part for answer in good_events() for part in (beat, answer)]
        scripts[beat.decode()] = [HEAD + chunked(*parts, beat)]
    summary, records = answers(tmp_path, scripts)
    assert summary["ok"] == len(BEATS), summary["failed"]
    assert {r["token_events"] for r in records.values()} == {3}


PLAIN_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
LOOSE: dict[str, tuple[list[Step], str | None]] = {
    "[DONE] without a blank line": (
        [HEAD + chunked(*good_events()[:-1], b"data: [DONE]\n")],
        "no_done",
    ),
    "[DONE] without a line's end": (
        [HEAD + chunked(*good_events()[:-1], b"data:[DONE]")],
        "no_done",
    ),
    "identity until the end": (
        [PLAIN_HEAD + b"Transfer-Encoding: identity\r\n\r\n" + STREAM, Fin],
        None,
    ),
    "chunk extensions": (
        [HEAD + b"%x;a=b\r\n%b\r\n0\r\nX: y\r\n\r\n" % (len(STREAM), STREAM)],
        None,
    ),
}


def test_streams_with_a_tolerated_ending_are_successes(tmp_path: Path) -> None:
    summary, records = answers(tmp_path, {name: script for name, (script, _) in LOOSE.items()})
    assert summary["ok"] == len(LOOSE), summary["failed"]
    assert {name: record["tolerated"] for name, record in records.items()} == {
        name: tolerated for name, (_, tolerated) in LOOSE.items()
    }


def test_invalid_bytes_in_unread_fields_fail_no_request(tmp_path: Path) -> None:
    """Send half of a character, bytes that JSON forbids, and counts as text."""
    broken = event(token()).replace(b"tok", b"\xf0\x9f")
    odd = event(json_of(id=7, choices=[{"text": "a", "logprobs": "no", "stop": 3}], message=[1]))
    last = event(json_of(choices=None, usage={"prompt_tokens_details": "none"}))
    end = [event(token(finish="stop")), last, event("[DONE]")]
    beside = b'data: {"score":NaN,"note":"a\tb\xff\\ud83d","choices":[{"text":"a"}]}\n\n'
    script: list[Step] = [HEAD + chunked(broken, broken, odd, beside, *end)]
    summary, _ = answers(tmp_path, {"x": script})
    assert summary["ok"] == 1, summary["failed"]
    # If a session inherits texts, only the texts must be valid.
    nodes = [{"id": "a", "prompt": "p", "max_tokens": 3}]
    nodes.append({"id": "b", "prompt": "q", "max_tokens": 3, "parents": [{"node": "a"}]})
    sessions = running.write_sessions(tmp_path, {"id": "s", "nodes": nodes})
    load = f"--model m --no-ready-check --concurrency 1 --session-file {sessions}"
    for part, ok in ((beside, 2), (broken, 0)):
        with serve(HEAD + chunked(part, *end)) as server:
            _, summary, _ = running.command(server.port, tmp_path, load)
        assert summary["ok"] == ok, summary["failed"]


def whole(body: bytes, *headers: bytes) -> list[Step]:
    lines = b"".join(line + b"\r\n" for line in headers)
    return [b"HTTP/1.1 200 OK\r\n%bcontent-length: %d\r\n\r\n%b" % (lines, len(body), body)]


NO_STREAM: dict[str, tuple[list[Step], str]] = {
    "page": (
        whole(b"<html>\n\n<h1>Log in</h1>", b"Content-Type: text/html; charset=x"),
        "Content-Type text/html; charset=x, Content-Encoding identity: <html> <h1>Log in</h1>",
    ),
    "json": (
        whole(b'{"choices":[{"text":"a","finish_reason":"stop"}]}', b"Content-Type: a/json"),
        'Content-Type a/json, Content-Encoding identity: {"choices":[{"text":"a"',
    ),
    "lines": (
        whole(b'{"response":"a"}\n{"response":"b"}\n', b"Content-Type: application/x-ndjson"),
        'Content-Type application/x-ndjson, Content-Encoding identity: {"response":"a"} {"resp',
    ),
    "gzip": (
        whole(
            b"\x1f\x8b\x08\x00abc", b"Content-Type: text/event-stream", b"Content-Encoding: gzip"
        ),
        "Content-Type text/event-stream, Content-Encoding gzip: ",
    ),
    "no type": (whole(b"pong"), "Content-Type none, Content-Encoding identity: pong"),
    "until the end": (
        [b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<p>hello", Fin],
        "Content-Type text/html, Content-Encoding identity: <p>hello",
    ),
}


def test_response_that_is_not_a_stream_has_its_own_error_kind(tmp_path: Path) -> None:
    _, records = answers(tmp_path, {name: script for name, (script, _) in NO_STREAM.items()})
    assert {r["error_kind"] for r in records.values()} == {"not_a_stream"}
    for name, record in records.items():
        assert NO_STREAM[name][1] in record["error_detail"], name

"""Test vLLM's HTTP API over real sockets, and the limit on a connection's input."""

import itertools
import json
import re
import socket
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.serving import (
    MODEL,
    Launched,
    completion,
    events,
    launched,
    post,
    texts,
)


def test_models_endpoint_lists_the_model(server: Launched) -> None:
    listing = server.get_json("/v1/models")
    assert [card["id"] for card in listing["data"]] == [MODEL]
    assert listing["data"][0]["max_model_len"] == 8192
    assert server.request("GET", "/health") == (200, b"")
    assert "embedded" in server.get_json("/version")["version"]


def test_a_stream_has_one_event_for_each_token_then_usage_then_done(server: Launched) -> None:
    got = events(server.stream(prompt=list(range(40)), max_tokens=20))
    tokens, usage, done = got[:20], got[20], got[21:]
    assert all(len(e["choices"]) == 1 and e["choices"][0]["text"] for e in tokens)
    assert [e["choices"][0]["finish_reason"] for e in tokens] == [None] * 19 + ["length"]
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens"] == 40
    assert usage["usage"]["completion_tokens"] == 20
    assert done == ["[DONE]"]
    assert len({e["id"] for e in [*tokens, usage]}) == 1


def test_stream_has_no_usage_unless_requested(server: Launched) -> None:
    got = events(server.stream(stream_options=None))
    assert len(got) == 9
    assert got[-1] == "[DONE]"


def test_output_depends_on_the_prompt_only(server: Launched) -> None:
    first, again = server.stream(prompt=[5, 6]), server.stream(prompt=[5, 6])
    assert texts(first) == texts(again)
    assert texts(first) != texts(server.stream(prompt=[5, 7]))
    whole = json.loads(server.stream(prompt=[5, 6], stream=False, stream_options=None))
    assert whole["choices"][0]["text"] == "".join(texts(first))
    assert whole["usage"]["completion_tokens"] == 8


def test_text_prompt_gives_the_same_output_as_its_token_ids(server: Launched) -> None:
    hashed = zlib.crc32(b"hello") % 32000
    assert texts(server.stream(prompt="w5 hello w6")) == texts(server.stream(prompt=[5, hashed, 6]))


def test_output_ends_at_eos_without_ignore_eos(server: Launched) -> None:
    got = events(server.stream(ignore_eos=False, max_tokens=2000))
    assert got[-3]["choices"][0]["finish_reason"] == "stop"
    length = got[-2]["usage"]["completion_tokens"]
    assert length < 300
    longer = events(server.stream(ignore_eos=False, max_tokens=2000, min_tokens=300))
    assert longer[-2]["usage"]["completion_tokens"] == 300


def test_streamed_chat_equals_the_whole_response(server: Launched) -> None:
    import openai  # takes half a second, in each process that collects this file

    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none")
    messages: Any = [{"role": "user", "content": "good morning"}]
    whole = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=12)
    parts = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(parts)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12


def test_the_openai_client_completes(server: Launched) -> None:
    import openai

    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none")
    assert [model.id for model in client.models.list()] == [MODEL]
    answer = client.completions.create(model=MODEL, prompt="hello", max_tokens=5)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    asked: Any = {"model": MODEL, "prompt": "hello", "max_tokens": 5, "stream": True}
    chunks = list(client.completions.create(**asked, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == answer.choices[0].text
    assert chunks[-1].usage == answer.usage
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="other", prompt="hello")
    with pytest.raises(openai.BadRequestError, match="maximum context length is 8192"):
        client.completions.create(model=MODEL, prompt="hello", max_tokens=9000)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "says"),
    [
        ("GET", "/nowhere", None, 404, "Not Found"),
        ("GET", "/v1/completions", None, 405, "Method Not Allowed"),
        ("POST", "/v1/completions", b"{", 400, "Invalid request body"),
        ("POST", "/v1/completions", b"\xff\xfe", 400, "Invalid request body"),
        ("POST", "/v1/completions", completion(model="x"), 404, "`x` does not exist"),
        ("POST", "/v1/completions", completion(prompt=[]), 400, "at least one token"),
        ("POST", "/v1/completions", completion(prompt=[1, "a"]), 400, "list of token ids"),
        ("POST", "/v1/completions", completion(prompt=[40000]), 400, "40000 is out of vocab"),
        ("POST", "/v1/completions", completion(prompt=[-1]), 400, "-1 is out of vocab"),
        ("POST", "/v1/completions", completion(max_tokens=0), 400, "at least 1"),
        ("POST", "/v1/completions", completion(min_tokens=9), 400, "min_tokens must be"),
        ("POST", "/v1/completions", completion(max_tokens="x"), 400, "max_tokens"),
        ("POST", "/v1/completions", completion(n=2), 400, "n must be 1"),
        ("POST", "/v1/completions", completion(logprobs=3), 400, "logprobs is not supported"),
        ("POST", "/v1/completions", completion(prompt=[[1], [2]]), 400, "one prompt"),
        ("POST", "/v1/chat/completions", {"messages": []}, 400, "at least one message"),
    ],
)
def test_errors_have_the_same_json_as_vllm(
    server: Launched, method: str, path: str, body: Any, status: int, says: str
) -> None:
    got, answer = server.request(method, path, body)
    error = json.loads(answer)["error"]
    assert (got, error["code"]) == (status, status)
    assert says in error["message"]
    assert {"type", "param"} <= set(error)


def test_connection_answers_sequential_and_pipelined_requests_in_order(server: Launched) -> None:
    asked = [json.dumps(completion(prompt=[p], max_tokens=3)).encode() for p in range(5)]
    payload = b"".join(map(post, asked)) + b"GET /health HTTP/1.1\r\nconnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(payload)
        got = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert got.count(b"HTTP/1.1 200 OK") == 6
    alone = [texts(server.stream(prompt=[p], max_tokens=3)) for p in range(5)]
    assert texts(got) == [word for words in alone for word in words]


@settings(max_examples=25)
@given(cuts=st.lists(st.integers(1, 250), max_size=4))
def test_request_split_at_any_byte_is_answered(server: Launched, cuts: list[int]) -> None:
    payload = post(json.dumps(completion(max_tokens=2)).encode(), "connection: close")
    edges = [0, *sorted({c for c in cuts if c < len(payload)}), len(payload)]
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for begin, end in itertools.pairwise(edges):
            connection.sendall(payload[begin:end])
        got = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert got.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_malformed_http_is_refused(server: Launched) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(b"nonsense\r\n\r\n")
        assert connection.recv(1 << 16).split()[1] == b"400"


def test_http_1_0_gets_a_body_that_ends_with_the_connection(server: Launched) -> None:
    body = json.dumps(completion()).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(post(body, version="1.0"))
        got = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    head, _, rest = got.partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert rest.endswith(b"data: [DONE]\n\n")


def test_expect_100_continue_is_answered_before_the_body(server: Launched) -> None:
    body = json.dumps(completion()).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        whole = post(body, "expect: 100-continue", "connection: close")
        connection.sendall(whole.removesuffix(body))
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert b"[DONE]" in b"".join(iter(lambda: connection.recv(1 << 16), b""))


def test_counters_are_complete_when_the_client_has_received_done(server: Launched) -> None:
    for _ in range(5):
        before = server.metrics()
        server.stream(prompt=list(range(30)), max_tokens=6)
        after = server.metrics()
        delta = {name: after[name] - before[name] for name in after}
        assert delta["vllm:request_success_total{length}"] == 1
        assert delta["vllm:prompt_tokens_total"] == 30
        assert delta["vllm:generation_tokens_total"] == 6
        assert delta["vllm:e2e_request_latency_seconds_count"] == 1
        assert delta["vllm:time_to_first_token_seconds_count"] == 1
        assert delta["vllm:inter_token_latency_seconds_count"] == 5
        # The second time the same prompt is cached, except its last block.
    assert delta["vllm:prefix_cache_hits_total"] == 16


def test_metrics_page_has_every_metric_of_the_study(server: Launched) -> None:
    names = {name.partition("{")[0] for name in server.metrics()}
    assert {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:num_requests_waiting_by_reason",
        "vllm:kv_cache_usage_perc",
        "vllm:num_preemptions_total",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:external_prefix_cache_queries_total",
        "vllm:external_prefix_cache_hits_total",
        "vllm:prompt_tokens_total",
        "vllm:prompt_tokens_by_source_total",
        "vllm:generation_tokens_total",
        "vllm:request_success_total",
        "vllm:iteration_tokens_total_bucket",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:request_queue_time_seconds_sum",
        "vllm:request_prefill_time_seconds_count",
        "vllm:request_decode_time_seconds_count",
        "vllm:e2e_request_latency_seconds_bucket",
    } <= names


def test_disconnected_client_aborts_its_request(server: Launched) -> None:
    before = server.metrics()["vllm:request_success_total{abort}"]
    body = json.dumps(completion(max_tokens=5000)).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(post(body))
        connection.recv(1 << 16)
    deadline = time.monotonic() + 10
    usage = "vllm:kv_cache_usage_perc"
    # The blocks are released at the end of the step that the request takes part in.
    while (now := server.metrics())["vllm:request_success_total{abort}"] == before or now[usage]:
        assert time.monotonic() < deadline
    assert now["vllm:num_requests_running"] == 0


OFFERED = 160 << 20  # bytes
KEPT = 48 << 20  # twice the limit of 16 MiB (as read, and joined), with a margin


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Launched]:
    """Yield a server whose peak memory belongs to this test only."""
    with launched(tmp_path) as running:
        yield running


def peak_bytes(server: Launched) -> int:
    """Return the server process's peak resident memory in bytes."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    kib = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert kib is not None
    return int(kib[1]) << 10


def offer(connection: socket.socket, pieces: Iterator[bytes]) -> int:
    """Send until the server ends the connection; return the number of bytes sent."""
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
def test_connection_that_sends_too_much_input_is_closed(
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


def test_pipelined_input_limit_excludes_answered_requests(fresh: Launched) -> None:
    """Send requests that together exceed the limit, each after the answer to the last one."""
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

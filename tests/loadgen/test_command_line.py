"""Test the stand-alone command: sessions, output, checks and exit status."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from connector_tax.loadgen.__main__ import main
from tests.loadgen.fault_server import (
    HEAD,
    FaultServer,
    Step,
    chunked,
    event,
    serve,
    token,
    usage,
)
from tests.loadgen.running import command, write_sessions


def answer(text: str, prompt: int = 4) -> list[Step]:
    """Return a stream whose three tokens are `text`, "." and "!"."""
    chunks = [event(token(text)), event(token(".")), event(token("!", "stop"))]
    return [HEAD + chunked(*chunks, event(usage(prompt, 3)), event("[DONE]"))]


CHAIN: list[dict[str, Any]] = [
    {"id": "a", "prompt": "one", "max_tokens": 3},
    {"id": "b", "prompt": "two", "max_tokens": 3, "parents": [{"node": "a"}]},
    {"id": "c", "prompt": "three", "max_tokens": 3, "parents": [{"node": "b"}]},
]
CHAIN[1]["wait_after_ready_s"] = 0.05


def test_open_loop_traffic_is_recorded_summarised_and_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve(*answer("t", 5)) as server:
        load = "--rate 100 --arrivals fixed --duration 1 --prompt-tokens 5 --vocabulary 50"
        what = "--max-tokens 3 --ignore-eos"
        status, _, records = command(server.port, tmp_path, f"{load} {what}")
        bodies = server.bodies
    printed = capsys.readouterr()
    # On a busy machine the timing may be off; then a check of the run must fail.
    assert status == ("FAIL" in printed.out)
    assert len(records) == len(bodies) == 100
    assert all(len(body["prompt"]) == 5 and max(body["prompt"]) < 50 for body in bodies)
    assert all(body["ignore_eos"] and body["max_tokens"] == 3 for body in bodies)
    assert len({tuple(body["prompt"]) for body in bodies}) > 90  # the prompts differ
    assert {record["status"] for record in records} == {"ok"}
    assert {record["completion_tokens"] for record in records} == {3}
    assert "100 ok" in printed.out
    assert "of 13 checks pass" in printed.out
    assert " sent" in printed.err


@pytest.mark.parametrize("load", ["--rate 20 --arrivals fixed", "--concurrency 2 --rampup 0.2"])
def test_children_inherit_prompts_and_outputs(load: str, tmp_path: Path) -> None:
    scripts = {"one": answer("A"), "two": answer("B"), "three": answer("C")}
    with FaultServer(scripts, lambda body: body["messages"][-1]["content"]) as server:
        sessions = write_sessions(tmp_path, *({"id": f"s{i}", "nodes": CHAIN} for i in range(6)))
        options = f"{load} --chat --duration 5 --session-file {sessions}"
        status, _, records = command(server.port, tmp_path, options)
        last = [body for body in server.bodies if len(body["messages"]) == 5]
    assert status in (0, 1)  # 1: the machine was too busy to keep the timing
    assert len(records) == 18
    assert len(last) == 6
    assert [(m["role"], m["content"]) for m in last[0]["messages"]] == [
        ("user", "one"),
        ("assistant", "A.!"),
        ("user", "two"),
        ("assistant", "B.!"),
        ("user", "three"),
    ]
    by_key = {(r["session"], r["node"]): r for r in records}
    for i in range(6):
        a, b = by_key[f"s{i}", "a"], by_key[f"s{i}", "b"]
        assert b["t_intended_ns"] == a["t_done_ns"] + 50_000_000
        assert b["t_send_ns"] >= b["t_intended_ns"]


def test_token_ids_are_inherited_when_the_server_gives_them(tmp_path: Path) -> None:
    def chunk(*ids: int, finish: str | None = None) -> bytes:
        choice = {"index": 0, "text": "x", "token_ids": list(ids), "finish_reason": finish}
        return event(json.dumps({"choices": [choice]}))

    def script(prompt: int, *, ids: bool) -> list[Step]:
        plain = [event(token()), event(token()), event(token(finish="length"))]
        tokens = [chunk(7), chunk(8, 9, finish="length")] if ids else plain
        ending = [event(usage(prompt, 3)), event("[DONE]")]
        return [HEAD + chunked(*tokens, *ending)]

    nodes = [
        {"id": "a", "prompt": [1, 2], "max_tokens": 3},
        {"id": "b", "prompt": [3], "max_tokens": 3, "parents": [{"node": "a"}]},
    ]
    path = write_sessions(tmp_path, {"id": "s", "nodes": nodes})
    load = f"--rate 50 --arrivals fixed --duration 1 --session-file {path}"
    scripts = {"2": script(2, ids=True), "6": script(6, ids=True)}
    with FaultServer(scripts, lambda body: str(len(body["prompt"]))) as server:
        status, *_ = command(server.port, tmp_path, load)
        assert status in (0, 1)
        assert [body["prompt"] for body in server.bodies] == [[1, 2], [1, 2, 7, 8, 9, 3]]
        assert all(body["return_token_ids"] for body in server.bodies)
    with FaultServer({"2": script(2, ids=False)}, lambda body: str(len(body["prompt"]))) as server:
        status, _, records = command(server.port, tmp_path, load)
    assert status == 3
    assert [r["error_kind"] for r in records] == ["missing_token_ids", "session_failed"]


@pytest.mark.parametrize("keep_going", [False, True])
def test_failed_request_ends_its_session_unless_continue_is_set(
    keep_going: bool, tmp_path: Path
) -> None:
    bad: list[Step] = [b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n"]
    scripts = {"one": answer("A"), "two": bad, "three": answer("C")}
    names = {"one": "one", "oneA.!two": "two", "three": "three", "oneA.!three": "three"}
    with FaultServer(scripts, lambda body: names[body["prompt"]]) as server:
        sessions = write_sessions(tmp_path, *({"id": f"s{i}", "nodes": CHAIN} for i in range(2)))
        options = f"--rate 20 --duration 3 --session-file {sessions}"
        goes_on = " --keep-going" if keep_going else ""
        status, _, records = command(server.port, tmp_path, options + goes_on)
    assert status == 1  # a third of the requests failed
    kinds = sorted((r["node"], r["error_kind"]) for r in records)
    last = None if keep_going else "session_failed"
    assert kinds == sorted(
        [("a", None), ("b", "http_status"), ("c", last)] * 2, key=lambda k: (k[0], str(k[1]))
    )


GOOD = "--rate 1 --prompt p"
PLACES = "--concurrency 2 --prompt p"
DRAWN = "--rate 1 --prompt-tokens 4"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (f"{GOOD} --url ftp://x", "--url"),
        (f"{GOOD} --url http://x/#top", "--url"),
        (f"{GOOD} --url http://u:p@x", "user name"),
        (f"{GOOD} --url 'http://x/a b'", "%-encoded"),
        (f"{GOOD} --url http://x/v1/completions --chat", "--chat has no effect"),
        (f"{GOOD} --url https://x --ca-file /nonexistent.pem", "/nonexistent.pem"),
        (f"{GOOD} --ca-file x.pem", "need an https URL"),
        (f"{GOOD} --insecure", "need an https URL"),
        (f"{GOOD} --no-ready-check", "--model"),
        (f"{GOOD} --wait 10 --no-ready-check", "--wait"),
        (f"{GOOD} --wait nan", "--wait: found nan; allowed: 0 to 1e+08 s"),
        (f"{GOOD} --header no-colon", "'no-colon' is not a header"),
        (
            f"{GOOD} --header 'Content-Length: 3'",
            "'Content-Length' cannot be set: the load generator sets it",
        ),
        (f"{GOOD} --header 'bad name: 3'", "'bad name'"),
        (f"{GOOD} --header 'X-A: 1' --header 'x-a: 2'", "found x-a twice"),
        (f"{GOOD} --header 'A: b\r\nC: d'", "line break"),
        (f"{GOOD} --header 'A: \u0161'", "Latin-1"),
        (f"{GOOD} --api-key-env NO_SUCH", "NO_SUCH"),
        (f"{GOOD} --api-key-env FOREIGN_KEY", "FOREIGN_KEY holds characters"),
        (
            f"{GOOD} --api-key-env FOREIGN_KEY --header 'authorization: x'",
            "--api-key-env has no effect beside --header",
        ),
        (f"{GOOD} --api-key-header api-key", "--api-key-header has no effect without"),
        (f"{GOOD} --no-stream --no-usage", "--no-stream"),
        ("--prompt p", "--rate"),
        (f"{GOOD} --concurrency 1", "--concurrency"),
        ("--rate -1 --prompt p", "--rate"),
        ("--rate inf --prompt p", "--requests"),
        ("--rate 1e10 --prompt p", "found 6e+11 sessions; allowed: up to"),
        ("--rate inf --prompt p --requests 9 --arrivals fixed", "--arrivals has no effect"),
        (f"{PLACES} --arrivals fixed", "--arrivals"),
        (f"{PLACES} --seed 0", "--seed"),
        (f"{PLACES} --connections 1", "--concurrency 2 needs 2"),
        (f"{PLACES} --workers 3", "--workers: found 3; allowed: up to --concurrency (2)"),
        (
            f"{PLACES} --duration 9 --warmup 1 --rampup 11",
            "--rampup: found 11; allowed: up to 10 s",
        ),
        (f"{GOOD} --arrivals fixed --seed 1", "--seed has no effect"),
        (f"{GOOD} --arrivals gamma", "gamma_shape"),
        (f"{GOOD} --arrivals gamma --gamma-shape -1", "gamma_shape"),
        (f"{GOOD} --arrivals poisson --gamma-shape 2", "gamma_shape"),
        (f"{GOOD} --rampup 1", "--rampup"),
        (f"{GOOD} --duration 0", "--duration: found 0.0; allowed: above 0"),
        (f"{GOOD} --timeout inf", "--timeout: found inf; allowed: above 0"),
        (f"{GOOD} --warmup -1", "--warmup"),
        (f"{GOOD} --min-completed 5", "--max-duration"),
        (f"{GOOD} --min-completed 5 --max-duration 0.1 --duration 1", "--max-duration"),
        (f"{GOOD} --requests 9 --cooldown", "--cooldown has no effect"),
        ("--trace x --cooldown", "--cooldown has no effect when only --trace ends the run"),
        ("--trace x --chat --vocabulary 9", "--vocabulary has no effect where a trace is sent as"),
        ("--trace x --trace-speed inf", "--trace-speed: found inf; allowed: a finite number"),
        ("--rate 1 --rate nan --prompt p", "--rate: found nan; allowed: above 0"),
        (
            "--concurrency 2 --session-file x --inflight-cap 1",
            "--inflight-cap: found 1; allowed: at least --concurrency (2)",
        ),
        (f"{GOOD} --header 'Authorization Bearer abc'", "'Authorization ...' is not a header"),
        (f"{GOOD} --stop-overloaded", "--inflight-cap"),
        (f"{GOOD} --keep-going", "--keep-going"),
        (f"{GOOD} --vocabulary 9", "--vocabulary"),
        (f"{DRAWN} --vocabulary 0", "--vocabulary"),
        (f"{DRAWN} --vocabulary 99999999999", "2^31"),
        (f"{DRAWN} --chat", "a chat endpoint takes text"),
        ("--rate 1 --prompt-tokens 0", "--prompt-tokens: found 0"),
        ("--rate 1 --session-file x --max-tokens 3", "--max-tokens"),
        ("--rate 1 --session-file /nonexistent", "/nonexistent"),
        (GOOD + """ --body '{"prompt": "x"}'""", "--body: found 'prompt'"),
        (GOOD + """ --chat --body '{"messages": []}'""", "--body: found 'messages'"),
        (GOOD + """ --body '{"top_p": NaN}'""", "a JSON object"),
        (f"{GOOD} --body [1]", "a JSON object"),
        (GOOD + """ --body '{"a": 1, "a": 2}'""", "found key 'a' twice"),
        (GOOD + """ --body '{"n": 2}'""", "--body: found n 2"),
        (GOOD + """ --body '{"stream": false}'""", "--no-stream"),
        (f"{GOOD} --workers 257", "--workers: found 257; allowed: up to 256"),
        (f"{GOOD} --goodput tfft:3", "ttft:MS, ttfa:MS, tpot:MS"),
        (f"{GOOD} --output x --summary ./x", "same file given for two outputs"),
        (
            f"{GOOD} --summary /nonexistent/s.json",
            "/nonexistent/s.json: the folder is not writable",
        ),
    ],
)
def test_bad_arguments_are_named_and_exit_with_2(
    arguments: str,
    named: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FOREIGN_KEY", "s\u0161ecret")
    with pytest.raises(SystemExit) as caught:
        main(["--url", "http://127.0.0.1:1", *shlex.split(arguments)])
    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert named in message
    assert "\u0161" not in message


A: dict[str, Any] = {"id": "a", "prompt": "x", "max_tokens": 1}
B = {**A, "id": "b"}


def line(*nodes: dict[str, Any], **changes: Any) -> str:
    return json.dumps({"id": "s", "nodes": nodes, **changes}, ensure_ascii=False)


@pytest.mark.parametrize(
    ("second", "named"),
    [
        ("{", "truncated"),
        ("", "blank line"),
        (line(A, id="first"), "used twice"),
        (line(A, start_s=1e300), "<= 1"),
        (line(A, id="café"), "printable ASCII"),
        (line({**A, "id": "a\n"}), "printable ASCII"),
        (line(), "length >= 1"),
        (line({"id": "a", "prompt": "x"}), "max_tokens"),
        (line({**A, "max_tokens": 0}), ">= 1"),
        (line({**A, "parent": 1}), "parent"),
        (line({**A, "parents": [{"node": "b"}]}, B), "list parent 'b' before it"),
        (line(A, A), "defined twice"),
        (line(A, {**B, "prompt": [1], "parents": [{"node": "a"}]}), "both text and token ids"),
    ],
)
def test_a_bad_session_file_names_file_line_and_fault(
    second: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sessions.jsonl"
    path.write_text(f"{line(A, id='first')}\n{second}\n")
    with pytest.raises(SystemExit) as caught:
        main(["--url", "http://127.0.0.1:1", "--rate", "1", "--session-file", str(path)])
    assert caught.value.code == 2
    printed = capsys.readouterr().err
    assert f"{path}:2:" in printed
    assert named in printed


@pytest.mark.parametrize(
    ("url", "chat", "posted"),
    [
        ("", False, b"POST /v1/completions HTTP/1.1"),
        ("/", True, b"POST /v1/chat/completions HTTP/1.1"),
        ("/v1", False, b"POST /v1/completions HTTP/1.1"),
        ("/api/v1/", True, b"POST /api/v1/chat/completions HTTP/1.1"),
        ("/v1?key=a%20b&v=2", True, b"POST /v1/chat/completions?key=a%20b&v=2 HTTP/1.1"),
        ("/own/path?q=1", False, b"POST /own/path?q=1 HTTP/1.1"),
    ],
)
def test_url_path_selects_the_endpoint(url: str, chat: bool, posted: bytes) -> None:
    with serve(*answer("t")) as server:
        options = f"--url http://127.0.0.1:{server.port}{url} --model m --prompt p --no-affinity"
        load = " --concurrency 1 --requests 1" + " --chat" * chat
        main((options + load).split())
        assert server.heads[0].splitlines()[0] == posted
        assert f"Host: 127.0.0.1:{server.port}".encode() in server.heads[0].splitlines()


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("module", [["connector_tax", "loadgen"], ["connector_tax.loadgen"]])
def test_a_standard_stream_closed_before_the_start_loses_no_output(
    module: list[str], closed: str, tmp_path: Path
) -> None:
    summary = tmp_path / "summary.json"
    with serve(*answer("t")) as server:
        arguments = (
            *(sys.executable, "-m", *module, "--model", "m", "--no-ready-check"),
            *("--url", f"http://127.0.0.1:{server.port}", "--prompt", "p", "--concurrency", "1"),
            *("--requests", "2", "--no-affinity", "--summary", str(summary)),
        )
        done = subprocess.run(["sh", "-c", f'exec "$@" {closed}', "sh", *arguments], timeout=60)
    assert done.returncode in (0, 1)
    assert json.loads(summary.read_text())["ok"] == 2


def test_sessions_cut_by_the_end_of_the_run_leave_records(tmp_path: Path) -> None:
    slow = {"id": "slow", "nodes": [CHAIN[0], {**CHAIN[1], "wait_after_ready_s": 30.0}]}
    quick = {"id": "quick", "nodes": CHAIN[:1]}
    sessions = tmp_path / "session-records.jsonl"
    with serve(*answer("A")) as server:
        load = f"--concurrency 2 --duration 0.5 --session-output {sessions}"
        given = write_sessions(tmp_path, slow, quick)
        _, _, records = command(server.port, tmp_path, f"{load} --session-file {given}")
    assert [(r["session"], r["node"], r["status"], r["error_kind"]) for r in records] == [
        ("slow", "a", "ok", None),
        ("quick", "a", "ok", None),
        ("slow", "b", "cancelled", "run_ended"),
    ]
    outcomes = [json.loads(line) for line in sessions.read_text().splitlines()]
    assert [(o["session"], o["status"], o["requests"], o["ok"]) for o in outcomes] == [
        ("slow", "cut", 2, 1),
        ("quick", "ok", 1, 1),
    ]
    assert all(o["t_start_ns"] < o["t_end_ns"] for o in outcomes)

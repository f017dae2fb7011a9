"""Test features for using the command with a real endpoint."""

import json
import resource
import socket
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from connector_tax.artifacts.checks import BOUNDS, generator_checks
from connector_tax.loadgen import endpoint
from connector_tax.loadgen.__main__ import main
from connector_tax.loadgen.generator import LoadGenerator, LoadGeneratorOptions
from connector_tax.loadgen.http import enable_kernel_stamps, hold_kernel_stamps
from connector_tax.loadgen.messages import Target
from tests.loadgen.fault_server import (
    HEAD,
    FaultServer,
    Pause,
    Step,
    chunked,
    event,
    good_answer,
    refused_port,
    serve,
    token,
    usage,
)
from tests.loadgen.running import command, run_scripts

TOKENS = [event(token("a")), event(token("b")), event(token("c", "stop"))]
WITH_USAGE: list[Step] = [HEAD + chunked(*TOKENS, event(usage()), event("[DONE]"))]
LOAD = "--rate 40 --arrivals fixed --duration 0.5 --prompt p"


def header(head: bytes, name: str) -> str:
    lines = dict(line.split(": ", 1) for line in head.decode("latin-1").splitlines()[1:] if line)
    return lines[name]


def test_model_defaults_to_the_one_the_endpoint_lists(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve(*WITH_USAGE) as server:
        server.models = ["only-one"]
        assert command(server.port, tmp_path, LOAD)[0] in (0, 1)
        assert {body["model"] for body in server.bodies} == {"only-one"}
        assert command(server.port, tmp_path, f"{LOAD} --model other")[0] in (0, 1)
        assert "names only-one, not other" in capsys.readouterr().err
        assert server.bodies[-1]["model"] == "other"
        server.models = ["one", "two"]
        before = len(server.bodies)
        assert main(["--url", f"http://127.0.0.1:{server.port}/v1", *LOAD.split()]) == 3
        assert "lists one, two; give one with --model" in capsys.readouterr().err
        assert len(server.bodies) == before


def test_command_waits_for_a_starting_server(tmp_path: Path) -> None:
    with serve(*WITH_USAGE) as server:
        server.starting = 2
        assert command(server.port, tmp_path, LOAD)[0] in (0, 1)
        assert len(server.asked) == 3
        assert len(server.bodies) == 20


def test_error_names_an_endpoint_that_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with refused_port() as port:
        url = f"http://127.0.0.1:{port}"
        assert main(["--url", url, *LOAD.split(), "--wait", "0.3"]) == 3
    assert f"{url}/v1/models did not answer within 0.3 s" in capsys.readouterr().err


def test_headers_are_sent_as_given(tmp_path: Path) -> None:
    with serve(*WITH_USAGE) as server:
        given = ("X-Team: blue: sky", "host: name.example", "X-Name: caf\xe9")
        options = [word for line in given for word in ("--header", line)]
        assert command(server.port, tmp_path, LOAD, *options)[0] in (0, 1)
        for head in (server.heads[0], server.asked[0]):
            assert b"X-Team: blue: sky\r\n" in head
            assert b"X-Name: caf\xe9\r\n" in head
            assert head.lower().count(b"\r\nhost:") == 1
        assert server.heads[0].startswith(b"POST /v1/completions HTTP/1.1\r\n")
        assert header(server.heads[0], "host") == "name.example"
        assert header(server.heads[0], "Accept-Encoding") == "identity"


def test_request_ids_are_unique_across_runs(tmp_path: Path) -> None:
    with serve(*WITH_USAGE) as server:
        runs = []
        for source in ("--prompt p", "--prompt-tokens 3"):
            for _ in range(2):
                server.heads.clear()
                load = f"--rate 50 --requests 5 {source}"
                _, _, records = command(server.port, tmp_path, load)
                runs.append({header(head, "X-Request-Id") for head in server.heads})
                assert runs[-1] == {record["request_id"] for record in records}
                assert len(runs[-1]) == 5
    assert len(set.union(*runs)) == 20


@pytest.mark.parametrize(
    "counts",
    [
        None,
        {},
        {"prompt_tokens": None, "completion_tokens": None},
        {"prompt_tokens": 0, "completion_tokens": 0},
    ],
)
def test_client_counts_tokens_of_a_response_without_usage(
    counts: dict[str, Any] | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    end = [] if counts is None else [event(json.dumps({"choices": [], "usage": counts}))]
    with serve(HEAD + chunked(*TOKENS, *end, event("[DONE]"))) as server:
        _, _, records = command(server.port, tmp_path, f"{LOAD} --ignore-eos")
        assert server.bodies[-1]["stream_options"] == {"include_usage": True}
        assert {(r["status"], r["completion_tokens"], r["counted_by"]) for r in records} == {
            ("ok", 3, "client")
        }
    assert "20 of 20 have no usage" in capsys.readouterr().out


def test_unrequested_usage_is_used(tmp_path: Path) -> None:
    with serve(*WITH_USAGE) as server:
        _, _, records = command(server.port, tmp_path, f"{LOAD} --no-usage")
        assert "stream_options" not in server.bodies[-1]
    assert {r["counted_by"] for r in records} == {"server"}


def test_first_answer_token_and_first_reasoning_token_are_separate(tmp_path: Path) -> None:
    def delta(finish: str | None = None, **fields: Any) -> bytes:
        return event(json.dumps({"choices": [{"delta": fields, "finish_reason": finish}]}))

    script: list[Step] = [
        HEAD + chunked(delta(role="assistant", reasoning_content="h"), last=False),
        # Empty content is no answer yet.
        chunked(delta(reasoning_content="m"), delta(content=""), last=False),
        Pause(0.1),
        chunked(delta(content="a"), last=False),
        chunked(delta("stop", content="b"), event(usage(4, 4)), event("[DONE]")),
    ]
    with serve(*script) as server:
        _, summary, records = command(server.port, tmp_path, f"{LOAD} --chat")
    for record in records:
        assert record["status"] == "ok"
        waited_ms = (record["t_first_answer_ns"] - record["t_first_token_ns"]) / 1e6
        assert 90 < waited_ms < 2000
    latency = summary["latency_ms"]
    assert latency["TTFA"]["p50"] > latency["TTFT"]["p50"] + 90
    assert latency["ITL"]["p50_interval"] is None  # the gaps of a stream are not independent


def test_summary_contains_the_results_and_the_command_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TEST_KEY", "very-secret")
    before = datetime.now(UTC)
    with serve(*WITH_USAGE) as server:
        load = "--rate 100 --duration 1 --warmup 0.3 --prompt p --api-key-env TEST_KEY"
        secret = ("--header", "X-Secret: hidden")
        status, summary, records = command(server.port, tmp_path, load, *secret)
        headed = f"{load} --api-key-header x-api-key"
        status, summary, records = command(server.port, tmp_path, headed, *secret)
    assert b"Authorization: Bearer very-secret\r\n" in server.heads[0]
    assert b"x-api-key: very-secret\r\n" in server.heads[-1]
    assert b"Authorization" not in server.heads[-1]
    printed = capfd.readouterr()
    for word in ("hidden", "very-secret"):
        assert word not in printed.out + printed.err + json.dumps(summary)
    measured = [r for r in records if not (r["warmup"] or r["cooldown"])]
    assert 0 < summary["requests"] == len(measured) < len(records)
    assert summary["configuration"]["rate"] == 100
    assert summary["configuration"]["header"] == ["X-Secret", "x-api-key"]
    assert summary["version"]
    assert summary["clock"] == "kernel"
    assert status == (not all(check["passed"] for check in summary["checks"]))
    ttft = summary["latency_ms"]["TTFT"]
    low, high = ttft["p50_interval"]
    assert low < ttft["p50"] < high
    values = [(r["t_first_token_ns"] - r["t_intended_ns"]) / 1e6 for r in measured]
    assert low in [pytest.approx(value) for value in values]
    assert ttft["p90"] < ttft["p99"] < ttft["max"]
    assert ttft["p99_interval"] is None
    began = datetime.fromisoformat(summary["started_utc"])
    assert before <= began <= datetime.now(UTC) - timedelta(seconds=1.2)
    first_ns = min(r["t_intended_ns"] for r in records)
    offset_ns = summary["utc_minus_monotonic_ns"]["begin"]
    assert 0 <= (first_ns + offset_ns) / 1e9 - began.timestamp() < 0.2
    assert f"{len(measured)} requests in 1.0 s" in printed.out


def test_measurement_continues_until_enough_requests_succeeded(tmp_path: Path) -> None:
    enough = "--min-completed 60 --max-duration 20 --cooldown --warmup 0.2"
    with serve(*WITH_USAGE) as server:
        _, summary, records = command(server.port, tmp_path, f"{LOAD} {enough}")
        assert len(records) == len(server.bodies)
    measured = [r for r in records if not (r["warmup"] or r["cooldown"])]
    assert 60 <= len(measured) <= 75
    assert 1.4 < summary["window_s"] < 2  # 60 requests at 40 per second
    assert summary["traffic_ended_by"] == "answered"
    for record in records:
        assert record["t_send_ns"] >= record["t_intended_ns"], "sent early"
        assert record["t_issue_ns"] <= record["t_send_ns"]


@pytest.mark.parametrize("fixed", [True, False])
def test_closed_loop_with_fixed_lengths_warns_of_waves(
    fixed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = "--concurrency 2 --requests 4 --prompt p --max-tokens 3" + " --ignore-eos" * fixed
    with serve(*WITH_USAGE) as server:
        command(server.port, tmp_path, load)
    assert ("receives its work in waves" in capsys.readouterr().out) == fixed


def test_help_shows_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for words in ("in each answer [64]", "s per request [600.0]", "process of --rate [jittered]"):
        assert words in text
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.strip()


FEW = LoadGeneratorOptions(connections_per_worker=4, strict=True)


@pytest.mark.parametrize("first", ["::1", "127.0.0.9"])
def test_every_address_of_a_name_is_tried(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resolve a name to two addresses, of which only the second has a server."""
    resolve = socket.getaddrinfo

    def both(_host: str, port: int, **options: Any) -> list[Any]:
        numeric = {**options, "flags": socket.AI_NUMERICHOST}
        return [*resolve(first, port, **numeric), *resolve("127.0.0.1", port, **numeric)]

    with FaultServer({"good": [good_answer()]}) as server:
        monkeypatch.setattr(socket, "getaddrinfo", both)
        with LoadGenerator(Target("localhost", server.port), FEW) as running:
            result = run_scripts(running, ["good"] * 10)
    assert {r.status for r in result.records} == {"ok"}


def test_ipv6_address_is_written_in_brackets() -> None:
    head = endpoint.request_head(Target("::1", 8000))
    assert "\r\nHost: [::1]:8000\r\n" in head


def test_unreachable_server_is_named_and_fails_the_checks() -> None:
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
    checks = generator_checks(result.health, result.clock, BOUNDS)
    assert not checks["unopened_connections"]["pass"]


LIMITED = """
import resource, sys
from connector_tax.loadgen.generator import LoadGenerator, LoadGeneratorOptions
from connector_tax.loadgen.messages import LoadGeneratorError, Target
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
    ("soft", "hard", "output"),
    [
        (100, 1024, "256"),
        (100, 200, "connections_per_worker 256 needs 320 open files; the hard limit is 200"),
    ],
)
def test_open_files_limit_is_raised_or_reported(soft: int, hard: int, output: str) -> None:
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= hard
    with FaultServer({"good": [good_answer()]}) as server:
        done = subprocess.run(
            [sys.executable, "-c", LIMITED, str(soft), str(hard), str(server.port)],
            capture_output=True,
            text=True,
            check=True,
        )
    assert done.stdout.startswith(output)


def test_first_segment_of_a_connection_has_a_kernel_stamp() -> None:
    held = hold_kernel_stamps()
    assert held is not None
    with held:
        for _ in range(100):
            with socket.create_server(("127.0.0.1", 0)) as listener:
                ours = socket.create_connection(listener.getsockname())
                peer, _ = listener.accept()
            with ours, peer:
                assert enable_kernel_stamps(ours)
                peer.send(b"x")
                assert ours.recvmsg(1, socket.CMSG_SPACE(16))[1]

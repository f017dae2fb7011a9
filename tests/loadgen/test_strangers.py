"""Test servers that limit threads, drop idle connections, end streams oddly, or are dead."""

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import pytest
import uvloop

from connector_tax.loadgen import pool
from connector_tax.loadgen.__main__ import main
from connector_tax.loadgen.generator import LoadGenerator, LoadGeneratorOptions
from connector_tax.loadgen.messages import Target
from tests.loadgen import running
from tests.loadgen.fault_server import (
    HEAD,
    FaultServer,
    Fin,
    Hang,
    Pause,
    Step,
    chunked,
    good_answer,
    good_events,
    refused_port,
    serve,
)
from tests.loadgen.running import ask, loading, run_scripts, write_sessions

GOOD = good_answer()
MODEL = "--model m --no-ready-check"
ANY = f"{MODEL} --prompt p"


def command(port: int, folder: Path, options: str) -> tuple[int, dict[str, Any], list[Any]]:
    """Return the exit status, the summary and the records of a run with one prompt."""
    other = "--session-file" in options or "--prompt-words" in options
    return running.command(port, folder, f"{MODEL if other else ANY} {options}")


# ---- connections


@contextlib.contextmanager
def listening(serve_one: Callable[[socket.socket], None], threads: int) -> Iterator[int]:
    """Yield the port of a server that has `threads` threads and uses one for each connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pool = ThreadPoolExecutor(threads)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    pool.submit(serve_one, listener.accept()[0])

        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    pool.shutdown(wait=False, cancel_futures=True)


def answer(connection: socket.socket, times: int | None = None) -> None:
    """Answer `times` requests, or every request until the client disconnects."""
    with connection, connection.makefile("rb") as stream:
        while times is None or times > 0:
            length = 0
            while line := stream.readline():
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
                if line == b"\r\n":
                    break
            if not line:
                return
            stream.read(length)
            connection.sendall(GOOD)
            times = None if times is None else times - 1


def test_server_with_eight_threads_answers_every_request(tmp_path: Path) -> None:
    with listening(answer, 8) as port:
        _, summary, _ = command(port, tmp_path, "--rate 20 --requests 10 --timeout 5")
    assert (summary["ok"], summary["retried"]) == (10, 0)


def test_connection_dropped_by_a_balancer_is_retried_once(tmp_path: Path) -> None:
    """Reset an idle connection when a request is sent on it, as load balancers do."""

    def forgetful(connection: socket.socket) -> None:
        connection.settimeout(0.2)
        try:
            connection.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            connection.settimeout(None)
            if connection.recv(1, socket.MSG_PEEK):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
            return
        connection.settimeout(None)
        answer(connection, 1)

    nodes = [{"id": "a", "prompt": "p", "max_tokens": 3}]
    starts = [0.0, *[0.8] * 8]
    lines = [{"id": f"s{k}", "start_s": t, "nodes": nodes} for k, t in enumerate(starts)]
    sessions = write_sessions(tmp_path, *lines)
    with listening(forgetful, 64) as port:
        _, summary, _ = command(port, tmp_path, f"--session-file {sessions}")
        assert (summary["ok"], summary["failed"]) == (9, {})
        assert summary["retried"] >= 1
        # With `strict` a request is not sent a second time.
        options = LoadGeneratorOptions(connections_per_worker=2, strict=True)
        with LoadGenerator(Target("127.0.0.1", port), options) as generator:
            records = run_scripts(generator, ["x", "x"]).records  # half a second apart
    assert [r.error_kind for r in records] == [None, "reset_before_headers"]
    assert records[1].retries == 0


def test_idle_connections_are_replaced_before_the_server_drops_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that no TTFT includes a handshake."""
    monkeypatch.setattr(pool, "MAX_IDLE_NS", 200_000_000)
    monkeypatch.setattr(pool, "LOOK_S", 0.05)

    async def main_loop(server: FaultServer) -> None:
        loop = asyncio.get_running_loop()
        place = ("127.0.0.1", server.port)
        connections = pool.Pool(loop, socket.AF_INET, place, 8)
        assert await connections.open(2) is None
        opened_ns = time.monotonic_ns()
        async with asyncio.timeout(10):
            while server.connections < 2 + 2 * pool.SPARE or not connections.idle:
                await asyncio.sleep(0.01)
        connection = connections.take()
        assert connection is not None
        assert connection.idle_since_ns > opened_ns
        response = await ask(connection, "x")
        assert (response.status, response.failure) == (200, None)
        connections.release(connection)
        connections.close()

    with serve(GOOD) as server:
        uvloop.run(main_loop(server))


def test_dead_server_is_retried_with_pauses_and_can_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with refused_port() as port:
        load = "--concurrency 8 --duration 1.5"
        status, summary, _ = command(port, tmp_path, f"{load} --max-errors 1000")
        assert status == 3
        # A check without data does not blame the load generator.
        printed = capsys.readouterr().out
        assert "FAIL concurrent_sessions_max: no data\n" in printed
        assert "a fault of the load generator" not in printed
        assert summary["failed"]["connect_refused"]["count"] <= 16  # each place once a second
        assert summary["load_generator"]["connect_errors"]
        _, summary, records = command(port, tmp_path, "--concurrency 8 --max-errors 5")
        assert 5 <= len(records) <= 16
        assert summary["traffic_ended_by"] == "errors"
        # Sessions of several requests pause too.
        a = {"id": "a", "prompt": "p", "max_tokens": 3}
        nodes = [a, {**a, "id": "b", "parents": [{"node": "a"}]}]
        lines = [{"id": f"s{k}", "nodes": nodes} for k in range(1000)]
        sessions = write_sessions(tmp_path, *lines)
        _, summary, _ = command(port, tmp_path, f"{load} --session-file {sessions}")
        assert 8 <= summary["failed"]["connect_refused"]["count"] <= 16


# ---- ends


def test_stream_without_done_succeeds_with_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve(HEAD + chunked(*good_events()[:-1])) as server:
        status, summary, records = command(server.port, tmp_path, "--rate 50 --requests 5")
    assert status in (0, 1)
    assert summary["tolerated"] == {"no_done": 5}
    assert {r["tolerated"] for r in records} == {"no_done"}
    assert "5 of 5: the stream ended in order and with a finish reason" in capsys.readouterr().out


@pytest.mark.parametrize("end", [Hang, Fin])
def test_connection_is_free_after_done_while_the_stream_stays_open(
    end: Step, tmp_path: Path
) -> None:
    with serve(HEAD + chunked(*good_events(), last=False), end) as server:
        began = time.monotonic()
        _, summary, records = command(server.port, tmp_path, "--concurrency 2 --requests 4")
        assert time.monotonic() - began < 30  # not two time-outs of 600 s
    assert (summary["ok"], summary["tolerated"]) == (4, {"not_closed": 4})
    # The next request is due when its place is free.
    assert all(r["t_send_ns"] - r["t_intended_ns"] < 0.5e9 for r in records)


def test_hanging_stream_adds_nothing_to_the_next_requests_latency(tmp_path: Path) -> None:
    scripts: dict[str, list[Step]] = {"good": [GOOD], "hang": [GOOD[:-200], Hang]}
    load = "--concurrency 1 --requests 3 --timeout 1"
    several = iter(["hang", "good", "good"])
    with FaultServer(scripts, lambda _body: next(several)) as server:
        _, summary, records = command(server.port, tmp_path, load)
    assert [r["error_kind"] for r in records] == ["request_timeout", None, None]
    assert all(r["t_send_ns"] - r["t_intended_ns"] < 0.5e9 for r in records)
    assert summary["latency_ms"]["TTFT"]["max"] < 500
    # A hanging stream does not lower the rates either, which describe the window.
    steady = "--rate 20 --arrivals fixed --duration 0.2 --timeout 0.5"
    several = iter(["good", "good", "hang", "good"])
    with FaultServer(scripts, lambda _body: next(several)) as server:
        _, summary, _ = command(server.port, tmp_path, steady)
    assert (summary["ok"], summary["window_s"]) == (3, 0.2)


def test_requests_of_a_closed_loop_that_time_out_together_are_all_recorded(tmp_path: Path) -> None:
    with serve(Hang) as server:
        load = "--concurrency 8 --requests 24 --timeout 0.5 --drain 2"
        _, summary, records = command(server.port, tmp_path, load)
    assert [r["error_kind"] for r in records] == ["request_timeout"] * 24
    assert summary["ok"] == 0


# ---- what failures say


def status(code: str, body: bytes, extra: bytes = b"", cut: int = 0) -> list[Step]:
    head = f"HTTP/1.1 {code}\r\ncontent-length: {len(body) + cut}\r\n".encode()
    return [head + extra + b"\r\n" + body, *([Fin] if cut else [])]


SOON = b"Retry-After: 0.1\r\n"
SAID: dict[str, tuple[list[Step], str, str]] = {
    "429": (status("429 Slow", b'\x1b[2J{"error":"slow"}', SOON), "http_status", "429: "),
    "cut": (status("500 Oops", b"broken", SOON, 9), "http_status", "500: broken (closed_mid_resp"),
    "307": (status("307 Go", b"", b"Location: /v2/x\r\n"), "http_status", "307 to /v2/x"),
    "302": (status("302 Go", b""), "http_status", "302 without Location"),
    "json": (
        [HEAD + chunked(b'{"error":{"message":"no such model"}}')],
        "error_event",
        "no such model",
    ),
    "utf-8": ([HEAD + chunked(b"data: {\xff\n\n")], "malformed_event", ""),
}


def test_failure_message_quotes_the_servers_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scripts = {name: script for name, (script, *_) in SAID.items()}
    with loading(scripts) as generator:
        records = run_scripts(generator, list(SAID), floor_s=0.3, cap_s=0.3).records
    for record in records:
        _, kind, text = SAID[record.request_id]
        assert record.error_kind == kind, record
        assert text in (record.error_detail or "")
    several = iter(["429", "429", "307", "302", "cut", "429", "307"])
    with FaultServer(scripts, lambda _body: next(several)) as server:
        _, summary, _ = command(server.port, tmp_path, "--concurrency 1 --requests 7")
    failed = summary["failed"]["http_status"]
    assert failed["count"] == 7
    assert list(failed["texts"].values()) == [3, 2, 1]
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "7 http_status" in printed
    assert '3 x 429: {"error":"slow"}' in printed
    assert "1 x other texts" in printed


def test_ready_check_reports_missing_permission(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(b"HTTP/1.1 401 No\r\ncontent-length: 11\r\n\r\n\x1b[2Jwho? me")
        connection.close()

    with listening(refuse, 2) as port:
        url = f"http://127.0.0.1:{port}"
        assert main(["--url", url, "--model", "m", "--rate", "1", "--prompt", "p"]) == 3
    assert f"{url}/v1/models answers 401: who? me; give a key" in capsys.readouterr().err


def test_failure_during_the_drain_cancels_other_requests_of_its_session(tmp_path: Path) -> None:
    nodes = [{"id": name, "prompt": name, "max_tokens": 3} for name in ("slow", "bad")]
    sessions = write_sessions(tmp_path, {"id": "s", "nodes": nodes})
    scripts: dict[str, list[Step]] = {"slow": [Hang], "bad": [Pause(0.6), *status("500 No", b"")]}
    with FaultServer(scripts, lambda body: body["prompt"]) as server:
        began = time.monotonic()
        load = f"--rate 5 --arrivals fixed --duration 0.3 --drain 30 --session-file {sessions}"
        _, _, records = command(server.port, tmp_path, load)
        assert time.monotonic() - began < 20
    assert sorted(r["error_kind"] for r in records) == ["http_status", "session_failed"]


# ---- what is kept


def start(port: int, output: Path) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "connector_tax.loadgen", *ANY.split(), "--rate", "50"),
            *("--url", f"http://127.0.0.1:{port}", "--duration", "60", "--output", str(output)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(output.parent)},
    )


def until_kept(process: "subprocess.Popen[bytes]", output: Path, records: int) -> None:
    """Wait until the file has `records` lines while the run goes on."""
    deadline = time.monotonic() + 30
    while not output.exists() or output.read_bytes().count(b"\n") < records:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)  # the server runs in this process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_signal_to_the_process_group_loses_no_record(
    number: signal.Signals, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    scripts: dict[str, list[Step]] = {"good": [GOOD], "hang": [Hang]}
    with FaultServer(scripts, lambda _: "good" if len(server.requests) % 5 else "hang") as server:
        process = start(server.port, output)
        until_kept(process, output, 16)
        os.killpg(process.pid, number)
        printed, _ = process.communicate(timeout=20)
    lines = output.read_text().splitlines()
    if number == signal.SIGKILL:
        assert len(lines) > 5
        return
    assert process.returncode == 128 + number
    assert b"latency of successes" in printed
    kinds = Counter(json.loads(line)["error_kind"] for line in lines)
    assert kinds[None] > 5
    assert kinds.keys() == {None, "interrupted"}
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_full_disk_loses_the_file_but_not_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    with serve(GOOD) as server:
        load = "--rate 50 --requests 5 --output /dev/full"
        where = f"--url http://127.0.0.1:{server.port} {ANY}"
        assert main(f"{where} {load}".split()) == 4
    printed = capsys.readouterr()
    assert "5 requests" in printed.out
    assert f"/dev/full: {os.strerror(errno.ENOSPC)}" in printed.err
    assert Path("/dev/full").is_char_device()


def test_records_go_to_standard_output_and_the_table_elsewhere(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serve(GOOD) as server:
        where = f"--url http://127.0.0.1:{server.port} {ANY}"
        main(f"{where} --rate inf --requests 5 --output -".split())
    printed = capsys.readouterr()
    records = [json.loads(line) for line in printed.out.splitlines()]
    assert {r["status"] for r in records} == {"ok"}
    assert len({r["t_intended_ns"] for r in records}) == 1
    assert "5 requests" in printed.err


@pytest.mark.parametrize(("stdout", "status"), [("full", 4), ("nobody", 0), ("records", 0)])
def test_files_are_complete_with_unbuffered_standard_output(
    stdout: str, status: int, tmp_path: Path
) -> None:
    summary, kept = tmp_path / "summary.json", tmp_path / "kept"
    kept.write_text("before\n")
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(serve(GOOD)).port
        if stdout == "nobody":
            reader, out = os.pipe()
            os.close(reader)
        else:
            out = os.open("/dev/full" if stdout == "full" else kept, os.O_WRONLY | os.O_APPEND)
        stack.callback(os.close, out)
        process = subprocess.run(
            [
                *(sys.executable, "-u", "-m", "connector_tax.loadgen", *ANY.split()),
                *("--url", f"http://127.0.0.1:{port}", "--rate", "50"),
                *("--requests", "5", "--summary", str(summary)),
                *(("--output", "-") if stdout == "records" else ()),
            ],
            stdout=out,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert json.loads(summary.read_text())["ok"] == 5
    assert process.returncode in (status, status or 1)  # 1: the machine was too busy
    if stdout == "records":
        assert [line[:1] for line in kept.read_text().splitlines()] == ["b", *"{{{{{"]
        assert b"5 requests" in process.stderr


# ---- the command people expect


def test_run_ends_when_all_requests_have_been_sent(tmp_path: Path) -> None:
    with serve(GOOD) as server:
        for load in ("--rate 200", "--concurrency 3", "--rate inf"):
            _, summary, records = command(server.port, tmp_path, f"{load} --requests 70")
            assert summary["ok"] == len(records) == 70
        _, _, records = command(server.port, tmp_path, "--concurrency 2 --duration 0.3")
    assert len(records) > 70


def test_a_closed_loop_opens_no_more_connections_than_it_has_requests(tmp_path: Path) -> None:
    with serve(GOOD) as server:
        _, summary, _ = command(server.port, tmp_path, "--concurrency 90 --requests 3")
        assert summary["ok"] == 3
        assert server.connections <= 3 + pool.SPARE


def test_the_first_requests_of_a_closed_loop_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """Check that each request has its own due time: the first burst adds no lag and no latency."""
    with serve(Pause(0.05), GOOD) as server:
        load = "--concurrency 64 --requests 320"
        _, summary, records = command(server.port, tmp_path, load)
    assert summary["ok"] == 320
    first_ns = sorted(record["t_intended_ns"] for record in records)[:64]
    assert {later - before for before, later in pairwise(first_ns)} == {200_000}
    # Every other request is due when an earlier one ends.
    ends_ns = {record["t_done_ns"] for record in records}
    assert {r["t_intended_ns"] for r in records} - set(first_ns) <= ends_ns


def test_word_prompts_are_distinct_and_goodput_is_reported(tmp_path: Path) -> None:
    with serve(Pause(0.05), GOOD) as server:
        load = "--chat --prompt-words 12 --concurrency 4 --requests 20 --goodput "
        slos = ("ttft:10000 e2e:10000", "e2e:40")
        runs = [command(server.port, tmp_path, load + slo)[1] for slo in slos]
        all_good, none_good = (summary["goodput"] for summary in runs)
        prompts = [body["messages"][0]["content"] for body in server.bodies[:20]]
    assert {len(prompt.split()) for prompt in prompts} == {12}
    assert len(set(prompts)) == 20
    assert (all_good["share"], none_good["share"]) == (1, 0)
    assert all_good["requests_per_s"] > 0


def test_run_ends_when_it_is_precise_or_the_server_is_overloaded(tmp_path: Path) -> None:
    with serve(GOOD[:-200], Pause(0.005), GOOD[-200:]) as server:
        load = "--rate 300 --duration 30"
        # Any sample of a hundred has intervals as narrow as this.
        _, summary, _ = command(server.port, tmp_path, f"{load} --stop-at-precision 99.9%")
    assert summary["ok"] >= 100
    assert summary["window_s"] < 30
    assert "TTFT and TPOT p90 of" in summary["notes"][-1]
    assert "requested: ±99.9%" in summary["notes"][-1]
    with serve(Hang) as server:
        limit = "--inflight-cap 3 --stop-overloaded --warmup 0.5"
        _, summary, records = command(server.port, tmp_path, f"{load} {limit}")
    assert summary["traffic_ended_by"] == "overloaded"
    assert "inflight_cap" in {r["error_kind"] for r in records}
    # The run does not end before the warm-up is over.
    due_ns = [record["t_intended_ns"] for record in records]
    assert max(due_ns) - min(due_ns) > 0.4e9
    assert summary["window_s"] < 15


# ---- what a server asks for


def test_retry_after_of_a_busy_server_is_respected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run a closed loop of six requests for 1.5 s; one place pauses for long, the others 1 s.

    The pause follows Retry-After, or the default.
    """
    date = formatdate(time.time() + 1000, usegmt=True).encode()
    answers = [
        *(("429 No", b"Retry-After: 1.0\r\n"), ("503 Busy", b"Retry-After: soon\r\n")),
        *(("529 Overloaded", b""), ("500 Dead", b""), ("403 Wait", b"Retry-After: 1\r\n")),
        ("429 No", b"Retry-After: %b\r\n" % date),
    ]
    scripts = {f"{k}": status(code, b"", more) for k, (code, more) in enumerate(answers)}
    turns = cycle(scripts)
    with FaultServer(scripts, lambda _body: next(turns)) as server:
        load = "--concurrency 6 --duration 1.5"
        exit_code, summary, records = command(server.port, tmp_path, load)
    assert exit_code == 3
    # A place that did not pause would get a further answer at once.
    assert 6 <= len(records) <= 6 + 5
    assert summary["paused"] == len(records)
    printed = capsys.readouterr().out
    assert "failures paused their place in the closed loop" in printed
    (late,) = (c for c in summary["checks"] if c["name"] == "session_start_delay_p99_ms")
    assert late["value"] < 500  # the pause itself does not count as delay


def test_user_agent_is_sent_and_the_ready_check_names_the_key_or_the_path(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with serve(GOOD) as server:
        command(server.port, tmp_path, "--rate 50 --requests 1")
        assert b"\r\nUser-Agent: connector-tax/" in server.heads[0]

    def refuse(connection: socket.socket) -> None:
        request = connection.recv(4096)
        assert b"connector-tax/" in request
        body = b'{"error": "No API key given"}' if b"/v1/models" in request else b"not here"
        code = b"400 Bad" if b"/v1/models" in request else b"404 No"
        connection.sendall(b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (code, len(body), body))
        connection.close()

    with listening(refuse, 2) as port:
        url = f"http://127.0.0.1:{port}"
        load = ["--rate", "1", "--prompt", "p"]
        assert main(["--url", url, *load]) == 3
        assert "give a key with --api-key-env" in capsys.readouterr().err
        assert main(["--url", f"{url}/openai", *load]) == 3
    assert "if it is a base, append /v1" in capsys.readouterr().err


def test_error_for_exhausted_ports_or_files_names_limit_and_remedy() -> None:
    ports = pool.connect_text(OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address"))
    assert "net.ipv4.ip_local_port_range is" in ports
    assert "Widen it, or lower the load" in ports
    files = pool.connect_text(OSError(errno.EMFILE, "Too many open files"))
    assert "ulimit -n" in files


def test_note_names_which_of_several_addresses_was_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Resolve a name to two addresses, of which only the second listens."""
    resolve = socket.getaddrinfo

    def two(host: str, *where: Any, **more: Any) -> list[Any]:
        names = ("127.0.0.9", "127.0.0.1") if host == "127.0.0.1" else (host,)
        return [entry for name in names for entry in resolve(name, *where, **more)]

    monkeypatch.setattr(socket, "getaddrinfo", two)
    with serve(GOOD) as server:
        _, summary, _ = command(server.port, tmp_path, "--rate 50 --requests 2")
    assert (summary["ok"], summary["address"]) == (2, "127.0.0.1")
    note = "127.0.0.1 has 2 addresses; every request went to 127.0.0.1"
    assert note in capsys.readouterr().out

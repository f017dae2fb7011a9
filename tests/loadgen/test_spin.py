"""The spin before a send must not keep the worker from reading and from its other work."""

import asyncio
import os
import socket
import time
from collections import Counter
from pathlib import Path

import uvloop

from connector_tax.loadgen import LoadGenerator, LoadGeneratorOptions, Target
from connector_tax.loadgen.inflight import InFlight, shared_memory
from connector_tax.loadgen.messages import Begin, Issue, WorkerSettings
from connector_tax.loadgen.worker import Worker
from tests.loadgen.fault_server import FaultServer, Pause, good_answer
from tests.loadgen.running import run_scripts


def test_an_answer_is_read_while_the_next_send_is_awaited() -> None:
    """Stamped by the worker itself, so that the stamp says when it read."""
    options = LoadGeneratorOptions(
        connections_per_worker=4,
        spin_us=400_000,
        sleep_margin_us=400_000,
        lead_ms=500,
        kernel_stamps=False,
    )
    with (
        FaultServer({"good": [Pause(0.05), good_answer()]}) as server,
        LoadGenerator(Target("127.0.0.1", server.port), options) as generator,
    ):
        first, second = run_scripts(
            generator, ["good", "good"], floor_s=0.6, cap_s=0.6
        ).records  # 0.3 s apart
    assert (first.status, second.status) == ("ok", "ok")
    assert first.t_first_token_ns is not None
    assert second.t_send_ns is not None
    assert first.t_first_token_ns < second.t_send_ns


def test_an_answer_is_read_during_the_spin_that_the_time_between_two_sends_allows() -> None:
    """A quarter of 0.5 s, from 0.375 s on."""
    options = LoadGeneratorOptions(
        connections_per_worker=4, spin_us=400_000, sleep_margin_us=400_000, kernel_stamps=False
    )
    with (
        FaultServer({"good": [Pause(0.4), good_answer()]}) as server,
        LoadGenerator(Target("127.0.0.1", server.port), options) as generator,
    ):
        first, second = run_scripts(generator, ["good", "good"]).records
    assert first.t_first_token_ns is not None
    assert second.t_send_ns is not None
    assert first.t_first_token_ns < second.t_send_ns


def test_dense_requests_are_spun_for_a_part_of_the_time_between_them() -> None:
    """Every send lies within the spin of the one before it; the rest is for other work."""
    options = LoadGeneratorOptions(connections_per_worker=64, spin_us=5000, sleep_margin_us=5000)
    with (
        FaultServer({"good": [good_answer()]}) as server,
        LoadGenerator(Target("127.0.0.1", server.port), options) as generator,
    ):
        result = run_scripts(generator, ["good"] * 200, floor_s=0.5, cap_s=0.5)
    assert {r.status for r in result.records} == {"ok"}
    assert result.health["processes"]["worker0"]["spin_share"] < 0.3


def test_dense_requests_leave_turns_to_the_rest_of_the_loop(tmp_path: Path) -> None:
    """300 requests 0.3 ms apart, each within the spin of the one before it."""
    count = 300

    async def main() -> None:
        loop = asyncio.get_running_loop()
        descriptor = shared_memory(1)
        inflight = InFlight(descriptor, 1)
        inflight.limit(0)
        worker = Worker(loop, settings, inflight)
        worker._run = Begin(1, 0, 10_000_000_000, False, "counts")
        turn = 0
        sent_in_turn: Counter[int] = Counter()
        fire = worker._fire

        def counted(*request: object) -> None:
            sent_in_turn[turn] += 1
            fire(*request)  # type: ignore[arg-type]

        worker._fire = counted  # type: ignore[method-assign, assignment]
        start_ns = time.monotonic_ns() + 5_000_000
        for seq in range(count):
            issue = Issue(seq, start_ns + 300_000 * seq, f"r{seq}", None, None)
            worker._hold(issue, b"{}")
        async with asyncio.timeout(10):
            while sent_in_turn.total() < count:
                await asyncio.sleep(0)
                turn += 1
        assert max(sent_in_turn.values()) <= 8
        # A context of ZMQ waits for ever, whenever it is collected, for a socket that is open.
        worker._results.close()
        worker._requests.close()
        os.close(descriptor)

    with socket.create_server(("127.0.0.1", 0), backlog=512) as listening:
        settings = WorkerSettings(
            worker=0, parent=os.getpid(), folder=str(tmp_path), inflight_fd=-1, workers=1,
            family=socket.AF_INET, host="127.0.0.1", port=listening.getsockname()[1],
            tls=None, usage_required=True, head="POST / HTTP/1.1\r\n", chat=False, stream=True,
            connections=count, spin_ns=400_000, sleep_margin_ns=400_000, kernel_stamps=True,
        )  # fmt: skip
        uvloop.run(main())

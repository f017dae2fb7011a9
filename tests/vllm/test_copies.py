"""Test the emulated link: the end of copies, their records, and the gate that counts them."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector_tax.vllm.device_time.copies import Compute, Copy, Instead, Link, Stream, addresses
from connector_tax.vllm.evidence import uncounted_bytes
from connector_tax.vllm.step_probe.log import Log, mark
from connector_tax.vllm.step_records import copy_records, with_copies

GB = 10**9
NO_COST = {"link_bytes_s": 1.0 * GB, "copy_us": 0.0, "copy_piece_ns": 0.0}


def link(copies: list[Copy], free_ns: int = 0, **coefficients: float) -> Link:
    return Link(NO_COST | coefficients, Compute(lambda: free_ns), copies.append)


@given(st.lists(st.tuples(st.integers(1, GB), st.integers(0, 2), st.booleans()), max_size=20))
def test_copies_of_one_direction_or_stream_follow_each_other(
    wanted: list[tuple[int, int, bool]],
) -> None:
    copies: list[Copy] = []
    device, streams = link(copies), [Stream() for _ in range(3)]
    before_stream, before_link = [0, 0, 0], {True: 0, False: 0}
    for size, which, to_host in wanted:
        device.copy(size, 1, streams[which], to_host)
        copy = copies[-1]
        begin = max(copy.submitted_ns, before_stream[which], before_link[to_host])
        assert copy.end_ns == streams[which].when_ns == begin + size
        before_stream[which] = before_link[to_host] = copy.end_ns


def test_a_copy_waits_for_the_step_that_its_stream_waits_for() -> None:
    copies: list[Copy] = []
    soon = time.monotonic_ns() + 20_000_000
    device, stream = link(copies, soon), Stream()
    stream.wait_stream(device.current_stream())
    device.copy(1_000_000, 4, stream)
    event = device.event_class()()
    event.record(stream)
    assert copies[0].end_ns == event.when_ns == soon + 1_000_000
    assert not event.query()
    event.synchronize()
    assert event.query()
    assert time.monotonic_ns() >= event.when_ns


def test_an_event_records_the_stream_that_its_thread_has_entered() -> None:
    copies: list[Copy] = []
    device, stream = link(copies, 5), Stream()
    stream.when_ns = 7
    start, end = device.event_class()(), device.event_class()()
    start.record()
    with device.stream(stream):
        end.record()
        assert device.current_stream() is stream
    assert device.current_stream() is not stream
    assert start.elapsed_time(end) == pytest.approx(2e-6)


def test_submission_uses_cpu_for_each_piece_and_leaves_the_gil() -> None:
    copies: list[Copy] = []
    device = link(copies, copy_us=10_000.0, copy_piece_ns=10_000.0)
    beats = 0
    done = threading.Event()

    def count() -> None:
        nonlocal beats
        while not done.is_set():
            beats += 1
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    before = time.thread_time()
    device.copy(1, 4000, Stream())
    used = time.thread_time() - before
    done.set()
    thread.join()
    assert copies[0].host_ns >= 50_000_000
    assert used > 0.01
    assert beats > 3


def test_addresses_take_no_memory_until_they_are_written_to() -> None:
    with addresses(1 << 40) as area:
        area[1 << 39] = 1
        assert area[1 << 39] == 1


def test_replaced_names_precede_the_modules_own_names() -> None:
    replaced = Instead(time, sleep=len)
    assert replaced.sleep == len
    assert replaced.monotonic_ns is time.monotonic_ns


# ---- the log


def steps_at(*queued: int) -> Any:
    return [{"t_ns": t, "step_id": number} for number, t in enumerate(queued, 1)]


def test_copies_are_logged_with_the_step_that_was_queued_last(tmp_path: Path) -> None:
    log = Log(str(tmp_path / "engine_step"), "copies", print)
    written = [
        Copy(t, t + 50, size, 3, 1) for t, size in ((90, 1), (100, 10), (199, 100), (350, 5))
    ]
    for copy in written:
        log.add((*copy, mark(0)))
    log.write()
    read = list(copy_records((tmp_path / "engine_step.copies.steps").read_bytes()))
    assert read == written
    lines = with_copies(steps_at(100, 200, 300), read)
    assert [(line["copied_bytes"], line["copied_pieces"]) for line in lines] == [
        (111, 9), (0, 0), (5, 3),
    ]  # fmt: skip
    assert with_copies([], read) == []


def test_two_processes_that_copy_write_two_files(tmp_path: Path) -> None:
    for size in (1, 2):
        log = Log(str(tmp_path / "engine_step"), "copies", print)
        log.add((*Copy(1, 2, size, 1, 1), mark(0)))
    names = sorted(path.name for path in tmp_path.glob("*.steps"))
    assert names == ["engine_step.copies.steps", "engine_step.copies2.steps"]


# ---- the gate


@pytest.mark.parametrize(
    ("classes", "counted", "message"),
    [
        (["OffloadingConnector"], 30.0, None),
        (["MultiConnector", "NixlConnector", "OffloadingConnector"], 30.0, None),
        (["OffloadingConnector"], 20.0, "counted 20 bytes, but the emulated link 30"),
        (["MultiConnector", "NixlConnector", "OffloadingConnector"], 0.0, "counted 0 bytes"),
        (["MultiConnector", "OffloadingConnector", "LMCacheMPConnector"], 20.0, None),
        (["SimpleCPUOffloadConnector"], 0.0, None),
    ],
)  # fmt: skip
def test_gate_refuses_offloading_if_its_byte_count_differs_from_the_link(
    classes: list[str], counted: float, message: str | None
) -> None:
    name = 'vllm:kv_offload_total_bytes_total{engine="0",transfer_type="%s"}'
    values = {name % "GPU_to_CPU": counted, name % "CPU_to_GPU": 0.0, "vllm:other": 9.0}
    copies = [Copy(1, 2, 10, 1, 0), Copy(3, 4, 20, 1, 0)]
    found = uncounted_bytes(classes, values, copies)
    assert found is None if message is None else message in str(found)

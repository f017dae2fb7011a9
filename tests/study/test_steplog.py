"""Test which part of the engine's step log a cell gets."""

import json
import socket
import threading
from array import array
from pathlib import Path

import pytest

from connector_tax.servers.kinds import STEP_LOG_PREFIX, STEP_LOG_PROCESSES, ServerError
from connector_tax.study.steplog import LaunchStepLog
from connector_tax.vllm import step_records
from connector_tax.vllm.step_probe.log import mark
from connector_tax.vllm.step_probe.probe import Probe
from tests.shared import VLLM


def lines(*stamps: int) -> bytes:
    return b"".join(b'{"t_ns":%d}\n' % stamp for stamp in stamps)


def test_cell_reads_complete_step_records_since_its_start(tmp_path: Path) -> None:
    scheduler, worker = (tmp_path / f"{STEP_LOG_PREFIX}.{p}.jsonl" for p in STEP_LOG_PROCESSES)
    log = LaunchStepLog(tmp_path, {"kind": "embedded", "label": ""})
    before = lines(1, 2)
    scheduler.write_bytes(before)
    log.mark()
    scheduler.write_bytes(before + lines(8, 10, 9, 12) + b'{"t_ns":13')
    # The file did not exist at the cell's start, and its steps are from before the origin.
    worker.write_bytes(lines(8, 9))
    assert log.take(origin_ns=10, drained_ns=0) == lines(10, 9, 12)
    log.remove()
    assert not list(tmp_path.iterdir())


def probe_header(process: str) -> bytes:
    return json.dumps({"process": process, "groups": []}).encode() + b"\n"


def executed(at_s: float, step: int) -> bytes:
    return array("d", [at_s, at_s + 1e-3, step, 1, -1]).tobytes()


def test_vllm_flushes_its_step_log_at_both_ends_of_a_cell(tmp_path: Path) -> None:
    path = tmp_path / f"{STEP_LOG_PREFIX}.worker.steps"
    held = [probe_header("worker") + executed(1.0, 1), executed(2.0, 2) + executed(3.0, 3), b""]
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path.with_suffix(".socket")))
        server.listen()

        def serve() -> None:
            for data in held:
                peer, _ = server.accept()
                with peer, path.open("ab") as file:
                    order = peer.recv(1)
                    file.write(data)
                    file.flush()
                    peer.sendall(order)

        thread = threading.Thread(target=serve)
        thread.start()
        log = LaunchStepLog(tmp_path, VLLM)
        log.mark()
        taken = [json.loads(line)["step_id"] for line in log.take(0, 0).splitlines()]
        assert taken == [2, 3]
        log.mark()
        thread.join()
    # The process has ended, so its file is complete.
    assert log.take(0, 0) == b""
    log.remove()
    assert not list(tmp_path.iterdir())


def test_vllm_that_does_not_flush_its_step_log_is_a_failed_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_records, "ANSWER_S", 0.1)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / f"{STEP_LOG_PREFIX}.scheduler.socket"))
        silent.listen()
        with pytest.raises(ServerError, match=r"hangs: .*scheduler\.socket: no answer in 0\.1 s"):
            LaunchStepLog(tmp_path, VLLM).mark()


def test_step_files_of_all_worker_ranks_are_read(tmp_path: Path) -> None:
    prefix = tmp_path / STEP_LOG_PREFIX
    ranks = [Probe(str(prefix)).worker for _ in range(3)]
    log = LaunchStepLog(tmp_path, VLLM)
    log.mark()
    for number, rank in enumerate(ranks):
        rank.numbers.extend([1.0, 1.001 + number, 7.0, 1.0, mark(0)])
        rank.write()
    taken = [json.loads(line) for line in log.take(0, 0).splitlines()]
    assert [record["step_id"] for record in taken] == [7, 7, 7]
    assert sorted(record["step_duration_us"] for record in taken)[-1] == pytest.approx(2.001e6)
    log.mark()
    assert log.take(0, 0) == b""
    log.remove()
    assert not list(tmp_path.iterdir())

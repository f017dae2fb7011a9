"""Results that a plan does not wait for travel together, where one message holds them."""

import asyncio
import os
import socket
from pathlib import Path

import msgspec
import pytest
import uvloop

from connector_tax.loadgen import worker as worker_module
from connector_tax.loadgen.answer import HeldRequest
from connector_tax.loadgen.messages import (
    Begin,
    Ended,
    FromWorker,
    RequestRecord,
    WorkerSettings,
)
from connector_tax.loadgen.transport import InFlight, shared_memory
from connector_tax.loadgen.worker import Worker


@pytest.mark.parametrize(("most", "kinds"), [(500, [RequestRecord] * 3), (5000, [Ended])])
def test_results_leave_together_unless_that_is_too_much_for_a_message(
    most: int, kinds: list[type], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = msgspec.msgpack.Decoder(FromWorker).decode
    frames: list[bytes] = []
    all_sent = asyncio.Event()

    def send(frame: bytes) -> bool:
        frames.append(frame)
        if len(frames) == len(kinds):
            all_sent.set()
        return True

    async def main() -> None:
        descriptor = shared_memory(1)
        worker = Worker(asyncio.get_running_loop(), settings, InFlight(descriptor, 1))
        worker._begin_run(Begin(1, 0, 10_000_000_000, False, "text", prompt=False))
        worker._results.send = send  # type: ignore[method-assign, assignment]
        for seq in range(3):
            record = RequestRecord(request_id="r", seq=seq, t_intended_ns=1, output="x" * 300)
            request = HeldRequest(worker, record, b"")
            worker._requests_by_seq[seq] = request
            worker._finish(request, None)
        assert frames == []
        await asyncio.wait_for(all_sent.wait(), 5)
        # A context of ZMQ waits for ever, whenever it is collected, for a socket that is open.
        worker._results.close()
        worker._requests.close()
        os.close(descriptor)

    monkeypatch.setattr(worker_module, "MAX_MESSAGE", most)
    settings = WorkerSettings(
        worker=0, parent=os.getpid(), folder=str(tmp_path), inflight_fd=-1, workers=1,
        family=socket.AF_INET, host="127.0.0.1", port=1, tls=None, strict=True, head="",
        chat=False, stream=True, connections=1, kernel_stamps=True,
    )  # fmt: skip
    uvloop.run(main())
    messages = [decode(frame) for frame in frames]
    assert [type(message) for message in messages] == kinds
    results = messages[0].results if isinstance(messages[0], Ended) else messages
    assert [done.seq for done in results if isinstance(done, RequestRecord)] == [0, 1, 2]

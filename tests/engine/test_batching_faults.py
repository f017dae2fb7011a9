"""The batched service when something goes wrong: every fault is named, and only its own fail."""

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from connector_tax.engine.batching import BatchedService
from connector_tax.engine.service_errors import (
    ServiceError,
    ServiceStopped,
    TransformError,
    WorkerDied,
    WorkerTimeout,
)
from connector_tax.engine.transformer import VectorTransformer
from tests.engine import transformers as t

LIMIT_S = 0.5


def run(
    body: Callable[[BatchedService], Awaitable[None]],
    worker_class: type[VectorTransformer],
    kwargs: dict[str, Any] | None = None,
    service: BatchedService | None = None,
) -> None:
    """Start the service, run `body`, stop; no task and no child process may be left over."""

    async def main() -> None:
        ours = service or BatchedService(max_batch_size=4, timeout_seconds=0.02)
        await ours.start(worker_class, kwargs)
        try:
            await asyncio.wait_for(body(ours), 20)
        finally:
            await asyncio.wait_for(ours.stop(), 20)
        assert not psutil.Process().children()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


async def outcomes(service: BatchedService, items: list[Any]) -> list[Any]:
    return await asyncio.gather(*(service.do_one(x) for x in items), return_exceptions=True)


@pytest.mark.parametrize("unread", [True, False])
def test_a_worker_whose_main_process_goes_ends_without_an_error(unread: bool) -> None:
    ours, workers = socket.socketpair()
    with workers:
        worker = threading.Thread(target=t.Squares().run, args=(workers,))
        raised: list[BaseException] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(threading, "excepthook", lambda said: raised.append(said.exc_value))
            worker.start()
            ours.recv(1, socket.MSG_PEEK)
            if not unread:
                ours.recv(1000)
            # What was not read makes the close a reset.
            ours.close()
            worker.join(10)
    assert not worker.is_alive()
    assert raised == []


class Abandon(BaseException):
    """Not an Exception, as CancelledError is none."""


@pytest.mark.parametrize("hook", ["preprocess", "postprocess"])
@pytest.mark.parametrize("error", [asyncio.CancelledError, Abandon])
def test_a_hook_that_ends_in_no_ordinary_error_fails_its_batch_alone(
    hook: str, error: type[BaseException]
) -> None:
    async def failing(batch: list[Any]) -> list[Any]:
        if 1 in batch:
            raise error
        return batch

    service = BatchedService(4, 0.02)
    setattr(service, hook, failing)

    async def body(service: BatchedService) -> None:
        got = await outcomes(service, [1, 2, 3, 4, 5, 6, 7, 8])
        assert all(
            isinstance(e, ServiceError) and f"ended in {error.__name__}" in str(e) for e in got[:4]
        )
        assert got[4:] == [25, 36, 49, 64]

    run(body, t.Squares, service=service)


@pytest.mark.parametrize("hook", ["preprocess", "postprocess"])
def test_a_hook_that_ignores_its_cancellation_does_not_hold_up_stop(hook: str) -> None:
    async def main() -> None:
        entered = asyncio.Event()

        async def ignoring(batch: list[Any]) -> list[Any]:
            entered.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            return batch

        service = BatchedService(1, 0.02)
        setattr(service, hook, ignoring)
        await service.start(t.Squares)
        call = asyncio.create_task(service.do_one(2))
        await entered.wait()
        await asyncio.wait_for(service.stop(), 10)
        with pytest.raises(ServiceStopped):
            await call

    asyncio.run(main())


def test_a_stopped_service_can_be_started_again(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    async def main() -> None:
        deaths: list[WorkerDied] = []
        service = BatchedService(4, 0.02, 2)
        service.on_worker_death = deaths.append
        for _ in range(3):
            await service.start(t.Gated, {"gate": str(gate)})
            # Left in every stage: at the worker, in the pipeline, in the buffer.
            waiting = [asyncio.create_task(service.do_one(0)) for _ in range(15)]
            while not service._at_worker:
                await asyncio.sleep(0)
            await service.stop()
            assert {type(e) for e in await asyncio.gather(*waiting, return_exceptions=True)} == {
                ServiceStopped
            }
            await service.start(t.Squares)
            assert await asyncio.wait_for(outcomes(service, list(range(40))), 10) == [
                x * x for x in range(40)
            ]
            await service.stop()
        assert not deaths

    asyncio.run(main())


def test_a_service_whose_worker_died_can_be_started_again() -> None:
    async def main() -> None:
        service = BatchedService(1, 0.02)
        died: asyncio.Future[WorkerDied] = asyncio.get_running_loop().create_future()
        service.on_worker_death = died.set_result
        await service.start(t.Squares)
        os.kill(service.worker_pid, 9)
        await died
        with pytest.raises(WorkerDied):
            await service.do_one(1)
        await service.stop()
        await service.start(t.Squares)
        assert await service.do_one(3) == 9
        await service.stop()

    asyncio.run(main())


def test_a_service_is_started_once() -> None:
    async def body(service: BatchedService) -> None:
        pid = service.worker_pid
        with pytest.raises(ServiceError, match="started already"):
            await service.start(t.Squares)
        assert service.worker_pid == pid
        assert await service.do_one(3) == 9

    run(body, t.Squares)


def test_a_start_that_is_stopped_or_cancelled_leaves_no_worker() -> None:
    async def main() -> None:
        service = BatchedService(1)
        for end in ("stop", "cancel"):
            starting = asyncio.create_task(service.start(t.NeverReady))
            while not psutil.Process().children():
                await asyncio.sleep(0.01)
            if end == "stop":
                await service.stop()
                with pytest.raises(ServiceStopped):
                    await starting
            else:
                starting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await starting
            assert not psutil.Process().children()

    asyncio.run(main())


@pytest.mark.parametrize(("bad", "kind"), [("bad", "TypeError"), ("huge", "OverflowError")])
def test_a_result_that_cannot_be_sent_fails_alone(bad: str, kind: str) -> None:
    async def body(service: BatchedService) -> None:
        got = await outcomes(service, ["a", bad, "b", "surrogate"])
        assert [got[0], got[2]] == ["a", "b"]
        assert isinstance(got[1], TransformError)
        assert got[1].kind == kind
        assert isinstance(got[3], TransformError)
        assert str(got[3]) == "ValueError: \\udcff"

    run(body, t.Unsendable)


@pytest.mark.parametrize(
    ("item", "says"), [("surrogate", "ValueError: \\udcff"), ("textless", "Textless: (no text)")]
)
def test_an_error_that_cannot_be_told_is_still_named(item: str, says: str) -> None:
    async def body(service: BatchedService) -> None:
        got = await outcomes(service, [item, "a", "b", "c", "d", "e", "f", "g"])
        assert all(isinstance(e, TransformError) and str(e) == says for e in got[:4])
        assert got[4:] == ["d", "e", "f", "g"]

    run(body, t.RaisesUnprintable)


def test_a_worker_that_is_not_ready_in_time_is_named_and_ended() -> None:
    async def main() -> None:
        service = BatchedService(1, start_limit_s=LIMIT_S)
        with pytest.raises(WorkerTimeout, match=r"was not ready in 0\.5 s"):
            await asyncio.wait_for(service.start(t.NeverReady), 20)
        assert not psutil.Process().children()

    asyncio.run(main())


def test_a_batch_that_takes_too_long_ends_the_worker_and_is_named(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    deaths: list[WorkerDied] = []

    async def body(service: BatchedService) -> None:
        service.on_worker_death = deaths.append
        # Two batches at the worker: the limit is each one's own, counted from when its turn comes.
        calls = [asyncio.create_task(service.do_one(0)) for _ in range(8)]
        while len(service._at_worker) < 2:
            await asyncio.sleep(0)
        await asyncio.sleep(0.6 * LIMIT_S)
        gate.write_bytes(b"x")
        assert await asyncio.gather(*calls[:4]) == [4] * 4
        await asyncio.sleep(0.6 * LIMIT_S)
        assert not any(call.done() for call in calls[4:])
        late = await asyncio.gather(*calls[4:], return_exceptions=True)
        assert all(isinstance(e, WorkerTimeout) for e in late)
        assert "did not answer a batch in 0.5 s" in str(late[0])
        with pytest.raises(WorkerTimeout):
            await service.do_one(0)
        assert len(deaths) == 1

    run(body, t.Gated, {"gate": str(gate)}, BatchedService(4, 0.02, 2, transform_limit_s=LIMIT_S))


def test_an_idle_service_has_no_limit() -> None:
    async def body(service: BatchedService) -> None:
        assert await service.do_one(2) == 4
        await asyncio.sleep(2 * 0.05)
        assert await service.do_one(3) == 9

    run(body, t.Squares, service=BatchedService(1, 0.02, transform_limit_s=0.05))


@pytest.mark.parametrize("option", ["start_limit_s", "transform_limit_s"])
def test_limits_out_of_range_are_named(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option}: found 0; allowed: over 0, or None"):
        BatchedService(1, **{option: 0})

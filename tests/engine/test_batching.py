"""Test the batched service: each request gets its result, even if others fail."""

import asyncio
import os
import socket
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from connector_tax.engine import batching
from connector_tax.engine.batching import (
    BatchedService,
    ServiceError,
    ServiceStopped,
    TransformError,
    WorkerDied,
)
from connector_tax.engine.transformer import VectorTransformer
from tests.engine import transformers as t

Run = Callable[..., None]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop])
def run(request: pytest.FixtureRequest) -> Run:
    """Return a function that starts a service on a kind of event loop, runs `body`, and stops it.

    It checks that no task or child process is left.
    """

    def started(
        body: Callable[[BatchedService], Awaitable[None]],
        worker_class: type[VectorTransformer],
        kwargs: dict[str, Any] | None = None,
        service: BatchedService | None = None,
    ) -> None:
        async def main() -> None:
            ours = service or BatchedService(max_batch_size=4, timeout_seconds=0.02)
            await ours.start(worker_class, kwargs)
            try:
                await asyncio.wait_for(body(ours), 30)
            finally:
                await asyncio.wait_for(ours.stop(), 20)
            assert not psutil.Process().children()
            assert asyncio.all_tasks() == {asyncio.current_task()}

        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(main())

    return started


async def outcomes(service: BatchedService, items: list[Any]) -> list[Any]:
    return await asyncio.gather(*(service.do_one(x) for x in items), return_exceptions=True)


def test_every_request_gets_its_own_result(run: Run) -> None:
    async def body(service: BatchedService) -> None:
        assert await outcomes(service, list(range(880))) == [x * x for x in range(880)]

    run(body, t.Squares, {"pause_s": 0.0005}, BatchedService(200, 0.1, 32))


def test_partial_batch_is_sent_when_its_oldest_request_reaches_the_wait_limit(run: Run) -> None:
    async def body(service: BatchedService) -> None:
        assert await outcomes(service, [0, 0, 0]) == [3, 3, 3]
        assert await outcomes(service, [0] * 9) == [4] * 8 + [1]

    run(body, t.BatchSizes)


def test_stages_run_in_order_around_the_hooks(run: Run) -> None:
    class Hooked(BatchedService):
        async def preprocess(self, batch: list[Any]) -> Any:
            return [f"pre {x}" for x in batch]

        async def postprocess(self, results: list[Any]) -> list[Any]:
            return [f"{x} post" for x in results]

    async def body(service: BatchedService) -> None:
        assert await outcomes(service, ["a", "b"]) == ["pre a<T> post", "pre b<T> post"]

    run(body, t.Stages, service=Hooked(4, 0.02))


@pytest.mark.parametrize("stage", ["worker-pre", "transform", "worker-post"])
def test_worker_error_fails_only_its_batch(stage: str, run: Run) -> None:
    async def body(service: BatchedService) -> None:
        got = await outcomes(service, ["a", stage, "b", "c", "d", "e", "f", "g"])
        assert all(isinstance(e, TransformError) and f"{stage} raised" in str(e) for e in got[:4])
        assert got[0].kind == "RuntimeError"
        assert "transformers.py" in got[0].remote_traceback
        assert got[4:] == ["d<T>", "e<T>", "f<T>", "g<T>"]

    run(body, t.Stages)


def test_cancelled_requests_do_not_shift_other_results(run: Run) -> None:
    async def body(service: BatchedService) -> None:
        tasks = [asyncio.create_task(service.do_one(x)) for x in range(40)]
        await asyncio.sleep(0)
        for task in tasks[::3]:
            task.cancel()
        got = await asyncio.gather(*tasks, return_exceptions=True)
        for x, result in enumerate(got):
            if x % 3 == 0:
                assert isinstance(result, asyncio.CancelledError)
            else:
                assert result == x * x

    run(body, t.Squares, {"pause_s": 0.002})


def test_request_cancelled_in_the_buffer_joins_no_batch(run: Run) -> None:
    async def body(service: BatchedService) -> None:
        tasks = [asyncio.create_task(service.do_one(0)) for _ in range(3)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.sleep(0)
        rest = await asyncio.gather(*tasks[1:], service.do_one(0), service.do_one(0))
        assert rest == [4, 4, 4, 4]

    run(body, t.BatchSizes)


def test_back_pressure_holds_requests_in_the_buffer(tmp_path: Path, run: Run) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    async def body(service: BatchedService) -> None:
        tasks = [asyncio.create_task(service.do_one(1)) for _ in range(8)]
        # Two batches fill the pipeline; eight more wait although their batches are due.
        while len(service._at_worker) < 2:
            await asyncio.sleep(0)
        late = [asyncio.create_task(service.do_one(1)) for _ in range(7)]
        await asyncio.sleep(3 * service.timeout_seconds)
        assert len(service._buffer) == 7
        assert service._in_flight == 2
        gate.write_bytes(b"xxxx")
        assert await asyncio.gather(*tasks, *late) == [4] * 12 + [3] * 3

    run(body, t.Gated, {"gate": str(gate)}, BatchedService(4, 0.02, 2))


def test_a_dead_worker_fails_its_requests_at_once_and_is_reported(tmp_path: Path, run: Run) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    reported: list[WorkerDied] = []

    async def body(service: BatchedService) -> None:
        service.on_worker_death = reported.append
        got = await outcomes(service, [1, 2, 3, -1, 5, 6])
        assert all(isinstance(e, WorkerDied) for e in got)
        assert str(service.worker_pid) in str(got[0])
        with pytest.raises(WorkerDied):
            await service.do_one(7)
        assert len(reported) == 1

    run(body, t.Gated, {"gate": str(gate)})


def test_death_of_an_idle_worker_is_reported(run: Run) -> None:
    async def body(service: BatchedService) -> None:
        died: asyncio.Future[WorkerDied] = asyncio.get_running_loop().create_future()
        service.on_worker_death = died.set_result
        os.kill(service.worker_pid, 9)
        assert isinstance(await died, WorkerDied)

    run(body, t.Squares)


def test_stop_fails_waiting_requests(tmp_path: Path, run: Run) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    async def body(service: BatchedService) -> None:
        tasks = [asyncio.create_task(service.do_one(1)) for _ in range(20)]
        while not service._at_worker:
            await asyncio.sleep(0)
        await service.stop()
        got = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(e, ServiceStopped) for e in got)
        with pytest.raises(ServiceStopped):
            await service.do_one(1)

    run(body, t.Gated, {"gate": str(gate)})


def test_worker_that_ignores_stop_is_killed(run: Run) -> None:
    async def body(service: BatchedService) -> None:
        assert psutil.pid_exists(service.worker_pid)

    run(body, t.Stubborn)


def test_submitting_to_a_service_that_never_started_raises() -> None:
    async def main() -> None:
        with pytest.raises(ServiceStopped, match="not been started"):
            await BatchedService(1).do_one(1)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("worker_class", "error", "text"),
    [
        (t.FailsToBuild, TransformError, "OSError: no such weights"),
        (t.DiesWhenBuilt, WorkerDied, "ended unexpectedly"),
    ],
)
def test_failed_start_raises_with_its_cause(
    worker_class: type[VectorTransformer], error: type[Exception], text: str
) -> None:
    async def main() -> None:
        service = BatchedService(1)
        with pytest.raises(error, match=text):
            await service.start(worker_class)
        assert not psutil.Process().children()

    asyncio.run(main())


def test_a_class_the_worker_cannot_import_is_refused() -> None:
    class Local(t.Squares):
        pass

    with pytest.raises(ValueError, match="top level of a module"):
        asyncio.run(BatchedService(1).start(Local))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_batch_size", 0),
        ("max_batch_size", 10001),
        ("timeout_seconds", 0),
        ("timeout_seconds", 1.5),
        ("max_queue_size", 0),
        ("max_queue_size", 129),
    ],
)
def test_options_out_of_range_are_named(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{option}: found {value}; allowed"):
        BatchedService(**{"max_batch_size": 1, option: value})  # type: ignore[arg-type]


def test_the_worker_ends_with_its_parent(tmp_path: Path) -> None:
    script = (
        "import asyncio, os\n"
        "from connector_tax.engine.batching import BatchedService\n"
        "from tests.engine.transformers import Stubborn\n"
        "async def main():\n"
        "    service = BatchedService(1)\n"
        "    await service.start(Stubborn)\n"
        f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(service.worker_pid))\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )

    async def main() -> None:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", script)
        assert await process.wait() == -9

    asyncio.run(main())
    worker = int((tmp_path / "pid").read_text())
    if psutil.pid_exists(worker):
        psutil.wait_procs([psutil.Process(worker)], timeout=5)
    assert not psutil.pid_exists(worker) or psutil.Process(worker).status() == "zombie"


@pytest.mark.parametrize("unread", [True, False])
def test_worker_exits_cleanly_when_its_main_process_ends(unread: bool) -> None:
    ours, workers = socket.socketpair()
    with workers:
        worker = threading.Thread(target=t.Squares().run, args=(workers,))
        raised: list[BaseException] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(threading, "excepthook", lambda failure: raised.append(failure.exc_value))
            worker.start()
            ours.recv(1, socket.MSG_PEEK)
            if not unread:
                ours.recv(1000)
            # Unread bytes turn the close into a reset.
            ours.close()
            worker.join(10)
    assert not worker.is_alive()
    assert raised == []


@pytest.mark.parametrize("hook", ["preprocess", "postprocess"])
def test_hook_error_fails_only_its_batch(hook: str, run: Run) -> None:
    async def failing(batch: list[Any]) -> list[Any]:
        if 1 in batch:
            raise KeyError(hook)
        return batch

    service = BatchedService(4, 0.02)
    setattr(service, hook, failing)

    async def body(service: BatchedService) -> None:
        got = await outcomes(service, [1, 2, 3, 4, 5, 6, 7, 8])
        assert all(isinstance(e, KeyError) for e in got[:4])
        assert got[4:] == [25, 36, 49, 64]

    run(body, t.Squares, service=service)


@pytest.mark.parametrize(
    ("worker_class", "item", "kind", "message"),
    [
        (t.Squares, object(), TypeError, "object"),
        (t.WrongCount, "a", TransformError, "ValueError: 3 results for a batch of 4"),
        (t.Troubled, "bad", TransformError, "TypeError: "),
        (t.Troubled, "huge", TransformError, "OverflowError: "),
        (t.Troubled, "surrogate", TransformError, "ValueError: \\udcff"),
        (t.Troubled, "textless", TransformError, "Textless: <exception str() failed>"),
    ],
)
def test_batch_that_cannot_be_pickled_fails_with_its_reason(
    worker_class: type[VectorTransformer], item: Any, kind: type[Exception], message: str, run: Run
) -> None:
    async def body(service: BatchedService) -> None:
        got = await outcomes(service, [item, 1, 2, 3])
        assert all(isinstance(e, kind) and message in str(e) for e in got), got

    run(body, worker_class)


def test_service_refuses_a_second_start(run: Run) -> None:
    async def body(service: BatchedService) -> None:
        pid = service.worker_pid
        with pytest.raises(ServiceError, match="started only once"):
            await service.start(t.Squares)
        assert service.worker_pid == pid
        assert await service.do_one(3) == 9

    run(body, t.Squares)


def test_stopped_or_cancelled_start_leaves_no_worker() -> None:
    async def main() -> None:
        for end in ("stop", "cancel"):
            service = BatchedService(1)
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


def test_worker_not_ready_in_time_is_reported_and_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        service = BatchedService(1)
        with pytest.raises(WorkerDied, match=r"was not ready in 0\.5 s"):
            await asyncio.wait_for(service.start(t.NeverReady), 20)
        assert not psutil.Process().children()

    monkeypatch.setattr(batching, "_START_S", 0.5)
    asyncio.run(main())

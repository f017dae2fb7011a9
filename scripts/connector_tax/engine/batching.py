"""Batch single requests, process each batch at once in a worker process, and return the results.

A request waits in the buffer until the buffer holds `max_batch_size` requests or its first request
has waited `timeout_seconds`; the batch then passes the preprocessor, the worker process and the
postprocessor, each strictly in order, and each result is handed to the future of the request it
belongs to. At most `max_queue_size` batches are in flight; while they are, requests wait in the
buffer. Every wait is for an event: a timer, a frame, a future.

    do_one -> buffer -> preprocess -> worker process -> postprocess -> future of do_one
                \\__________ futures, in the order of the batches __________/

The service can be used on its own. The engine passes it one element at a time, a whole step: the
scheduler has already batched the step's requests, and a step cannot wait for the next one. So the
engine uses only the worker process, the order of results, and the errors.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any

from connector_tax.engine.transformer import (
    VectorTransformer,
    class_path,
    pack,
    split_frames,
    unpack,
)
from connector_tax.linux import TimerFd

_LOG = logging.getLogger(__name__)
_START_S = 60.0
_STOP_GRACE_S = 0.5
# Not `-m`, which would import the transformer's class twice.
_WORKER = "from connector_tax.engine.transformer import main; main()"

_Future = asyncio.Future[Any]


class ServiceError(Exception):
    """The batched service could not answer a request."""


class ServiceStopped(ServiceError):
    """The service is not running."""


class WorkerDied(ServiceError):
    """The worker process ended while the service was running, or was not ready in time."""


class TransformError(ServiceError):
    """The transformer raised in the worker process, for a whole batch.

    Attributes:
        kind: the name of the exception's type in the worker.
        remote_traceback: the worker's traceback.
    """

    def __init__(self, kind: str, message: str, remote_traceback: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.remote_traceback = remote_traceback


class BatchedService:
    """A service that batches the elements given to `do_one` and processes them in a worker process.

    Args:
        max_batch_size: most elements in a batch, 1 to 10000.
        timeout_seconds: longest wait of the first element of a partial batch, above 0 to 1.
        max_queue_size: most batches in flight, 1 to 128.

    Raises:
        ValueError: an option is out of range; names the option.
    """

    def __init__(
        self,
        max_batch_size: int,
        timeout_seconds: float = 0.1,
        max_queue_size: int = 32,
    ) -> None:
        _check("max_batch_size", max_batch_size, 1 <= max_batch_size <= 10000, "1 to 10000")
        _check("timeout_seconds", timeout_seconds, 0 < timeout_seconds <= 1, "over 0, at most 1")
        _check("max_queue_size", max_queue_size, 1 <= max_queue_size <= 128, "1 to 128")
        self.max_batch_size = max_batch_size
        self.timeout_seconds = timeout_seconds
        self.max_queue_size = max_queue_size
        self._timeout_ns = round(timeout_seconds * 1e9)
        # Called once when the worker process ends by itself, even if no request waits.
        self.on_worker_death: Callable[[WorkerDied], None] | None = None

        self._buffer: dict[_Future, tuple[Any, int]] = {}
        self._timer: TimerFd | None = None
        self._unanswered: set[_Future] = set()
        self._refusal: ServiceError | None = ServiceStopped("the service has not been started")
        self._process: asyncio.subprocess.Process | None = None
        self._connection: WorkerConnection | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._in_flight = 0
        self._batches: asyncio.Queue[list[tuple[_Future, Any]]] = asyncio.Queue()
        self._at_worker: deque[list[_Future]] = deque()
        self._results: asyncio.Queue[bytes] = asyncio.Queue()

    # -- the user's side ------------------------------------------------------------------------

    async def do_one(self, x: Any) -> Any:
        """Return the result for the single element `x` (anything msgpack carries).

        Raises:
            TransformError: the transformer raised for this element's batch.
            WorkerDied, ServiceStopped: no worker is left to answer.
            Exception: an exception of the hooks for this element's batch; TypeError if msgpack
                cannot carry it.
        """
        if self._refusal is not None:
            raise self._refusal
        loop = asyncio.get_running_loop()
        future: _Future = loop.create_future()
        self._buffer[future] = (x, time.monotonic_ns() + self._timeout_ns)
        self._unanswered.add(future)
        self._submit()
        try:
            return await future
        finally:
            self._unanswered.discard(future)
            if self._buffer.pop(future, None) is not None:
                self._submit()

    async def preprocess(self, batch: list[Any]) -> Any:
        """Return the message to the worker for a batch; runs for one batch at a time."""
        return batch

    async def postprocess(self, results: list[Any]) -> list[Any]:
        """Return one final result for each of the worker's results, in the same order."""
        return results

    # -- the batcher ----------------------------------------------------------------------------

    def _submit(self) -> None:
        """Send every due batch that the pipeline has room for; set the timer for the rest."""
        now = time.monotonic_ns()
        while self._buffer and self._in_flight < self.max_queue_size:
            due = next(iter(self._buffer.values()))[1] <= now
            if not due and len(self._buffer) < self.max_batch_size:
                break
            futures = list(islice(self._buffer, self.max_batch_size))
            self._in_flight += 1
            self._batches.put_nowait([(future, self._buffer.pop(future)[0]) for future in futures])
        self._arm()

    def _arm(self) -> None:
        # With the pipeline full no timer is needed: the end of a batch calls `_submit`.
        if self._timer is None:
            return
        if self._buffer and self._in_flight < self.max_queue_size:
            self._timer.arm(next(iter(self._buffer.values()))[1])
        else:
            self._timer.disarm()

    def _end_batch(self) -> None:
        self._in_flight -= 1
        self._submit()

    # -- the preprocessor and the postprocessor -------------------------------------------------

    async def _run_preprocess(self) -> None:
        while True:
            batch = [item for item in await self._batches.get() if not item[0].done()]
            futures = [future for future, _ in batch]
            try:
                frame = pack(await self.preprocess([x for _, x in batch]) if batch else [])
            except Exception as error:
                _fail(futures, error)
                futures = []
            if not futures:
                self._end_batch()
                continue
            assert self._connection is not None
            self._at_worker.append(futures)
            self._connection.write(frame)

    async def _run_postprocess(self) -> None:
        while True:
            body = await self._results.get()
            futures = self._at_worker.popleft()
            try:
                await self._distribute(futures, unpack(body))
            except Exception as error:
                _fail(futures, error)
            self._end_batch()

    async def _distribute(self, futures: list[_Future], answer: list[Any]) -> None:
        if answer[0] == "error":
            raise TransformError(*answer[1:])
        results = await self.postprocess(answer[1])
        if len(results) != len(futures):
            raise ServiceError(f"postprocess: {len(results)} results for {len(futures)} elements")
        for future, result in zip(futures, results, strict=True):
            if not future.done():
                future.set_result(result)

    # -- the worker process ---------------------------------------------------------------------

    async def start(
        self, worker_class: type[VectorTransformer], kwargs: dict[str, Any] | None = None
    ) -> None:
        """Launch the worker process and wait until it is ready.

        Raises:
            ValueError: the class cannot be imported by the worker process.
            TransformError: the transformer's constructor raised.
            WorkerDied: the worker process ended before it was ready, or was not ready in time.
            ServiceStopped: `stop` was called meanwhile.
            ServiceError: the service was started before.
        """
        if self._connection is not None:
            raise ServiceError("a service can be started only once")
        first = pack({"class": class_path(worker_class), "kwargs": kwargs or {}})
        self._connection = WorkerConnection(self._results.put_nowait, self._on_worker_closed)
        try:
            self._process = await self._connection.launch()
            self._connection.write(first)
            async with asyncio.timeout(_START_S):
                answer = unpack(await self._connection.first)
            if answer[0] == "error":
                raise TransformError(*answer[1:])
        except TimeoutError:
            await self.stop()
            raise WorkerDied(
                f"worker process {self.worker_pid} was not ready in {_START_S:g} s"
            ) from None
        except BaseException:
            await self.stop()
            raise
        self._refusal = None
        self._timer = TimerFd(asyncio.get_running_loop(), self._submit)
        self._tasks = [
            asyncio.create_task(self._run_preprocess()),
            asyncio.create_task(self._run_postprocess()),
        ]

    @property
    def worker_pid(self) -> int:
        """Return the worker's process id; valid once it has been launched."""
        assert self._process is not None
        return self._process.pid

    def _on_worker_closed(self) -> None:
        if self._refusal is not None:
            return
        error = WorkerDied(f"worker process {self.worker_pid} ended unexpectedly")
        self._refuse(error)
        _LOG.error("%s", error)
        if self.on_worker_death is not None:
            self.on_worker_death(error)

    def _refuse(self, error: ServiceError) -> None:
        """Fail every waiting request, and every later one, with `error`."""
        self._refusal = error
        if self._timer is not None:
            self._timer.close()
            self._timer = None
        self._buffer.clear()
        _fail(list(self._unanswered), error)

    async def stop(self) -> None:
        """Fail waiting requests, end the worker process and both tasks; may be called twice."""
        self._refuse(ServiceStopped("the service has been stopped"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._connection is not None:
            self._connection.close()
        if self._process is not None and self._process.returncode is None:
            # In a cancelled task Python 3.11.2's asyncio.timeout() raises CancelledError.
            ended = asyncio.ensure_future(self._process.wait())
            if not (await asyncio.wait({ended}, timeout=_STOP_GRACE_S))[0]:
                with contextlib.suppress(ProcessLookupError):
                    self._process.send_signal(signal.SIGKILL)
                await ended


class WorkerConnection(asyncio.Protocol):
    """The socket to one worker process; neither callback is called after `close`.

    Args:
        on_frame: called with the body of each frame except the first, in sending order.
        on_lost: called when the worker process closes its end after its first frame.

    Attributes:
        first: a future for the body of the first frame; ServiceStopped or WorkerDied if no frame
            comes.
    """

    def __init__(self, on_frame: Callable[[bytes], None], on_lost: Callable[[], None]) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._closed = False
        self._buffer = bytearray()
        self.first: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def launch(self) -> asyncio.subprocess.Process:
        """Start the worker process at the other end of the socket."""
        parent_end, child_end = socket.socketpair()
        with child_end:
            parent_end.setblocking(False)
            self._transport, _ = await asyncio.get_running_loop().create_unix_connection(
                lambda: self, sock=parent_end
            )
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", _WORKER),
                *(str(child_end.fileno()), str(os.getpid())),
                pass_fds=(child_end.fileno(),),
            )

    def write(self, frame: bytes) -> None:
        assert self._transport is not None
        self._transport.write(frame)

    def close(self) -> None:
        self._closed = True
        if not self.first.done():
            self.first.set_exception(ServiceStopped("the service has been stopped"))
            self.first.exception()  # No caller may be waiting for it any more.
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        for body in split_frames(self._buffer):
            if not self.first.done():
                self.first.set_result(body)
            elif not self._closed:
                self._on_frame(body)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        if not self.first.done():
            self.first.set_exception(WorkerDied("the worker process ended unexpectedly"))
        elif not self._closed:
            self._on_lost()


def _fail(futures: list[_Future], error: BaseException) -> None:
    for future in futures:
        if not future.done():
            future.set_exception(error)


def _check(name: str, value: float, in_range: bool, allowed: str) -> None:
    if not in_range:
        raise ValueError(f"{name}: found {value!r}; allowed: {allowed}")

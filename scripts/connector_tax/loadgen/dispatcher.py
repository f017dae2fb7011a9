"""The event-loop thread of the main process: sends requests to the workers and receives results.

It owns the worker processes. Requests go round-robin to the living workers, each over its own PUSH
socket, so that a request's worker is always known; all results arrive on one PULL socket. The end
of a worker is noticed through its process descriptor.
"""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import uvloop
import zmq

from connector_tax.loadgen.messages import (
    WAITS,
    Begin,
    Begun,
    End,
    Ended,
    FromRun,
    FromWorker,
    Health,
    Item,
    LoadGeneratorError,
    RequestRecord,
    Requests,
    ToWorker,
    Unanswered,
    WorkerSettings,
)
from connector_tax.loadgen.transport import (
    InFlight,
    LoopProbe,
    Receiver,
    Sender,
    private_socket,
    shared_memory,
)

START_S = 60.0
ANSWER_S = 10.0
DEATH_GRACE_S = 0.05
PART_BYTES = 1 << 20
"""Bytes of request bodies in one message; a message holds at most MAX_MESSAGE."""

_T = TypeVar("_T")


class WorkerProcess:
    """A worker process, started by the constructor and pinned to `cpus` if given.

    `sender` sends to the worker once it is connected; `pidfd` becomes readable when it ends;
    `outstanding` are the requests sent to it whose results have not come back; `answer` will hold
    its reply to the last question, or None if it dies before.
    """

    def __init__(self, settings: WorkerSettings, cpus: tuple[int, ...] | None) -> None:
        self.settings = settings
        self.index = settings.worker
        self.sender: Sender | None = None
        self.outstanding = 0
        self.answer: asyncio.Future[Any] | None = None
        allowed_cpus = os.sched_getaffinity(0)
        if cpus is not None:
            # Inherited, so that even the worker's first pages lie on its own NUMA node.
            os.sched_setaffinity(0, cpus)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "connector_tax.loadgen.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(settings.inflight_fd,),
            )
        finally:
            os.sched_setaffinity(0, allowed_cpus)
        self.pidfd = os.pidfd_open(self.process.pid)

    async def wait_up(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait for the worker's first line, which it writes when it is ready for its settings.

        Raises:
            LoadGeneratorError: the worker ended, or wrote nothing within START_S.
        """
        assert self.process.stdout is not None
        descriptor, readable = self.process.stdout.fileno(), asyncio.Event()
        loop.add_reader(descriptor, readable.set)
        try:
            await asyncio.wait_for(readable.wait(), START_S)
        except TimeoutError:
            raise LoadGeneratorError(f"worker {self.index} did not start") from None
        finally:
            loop.remove_reader(descriptor)
        if self.process.stdout.readline() != b"up\n":
            raise LoadGeneratorError(f"worker {self.index} ended at its start; see its stderr")

    def tell_settings(self, folder: str) -> None:
        self.settings.folder = folder
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(self.settings) + b"\n")
        self.process.stdin.flush()

    def close(self) -> None:
        os.close(self.pidfd)
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        if self.sender is not None:
            self.sender.close()


class Dispatcher:
    """An event loop in a separate thread; every public method may be called from any thread."""

    def __init__(
        self,
        settings: list[WorkerSettings],
        cpus: tuple[int, ...] | None,
        worker_cpus: Sequence[tuple[int, ...]] | None,
    ) -> None:
        """Store the settings of each worker and the CPUs to use; None allows any CPU.

        Args:
            cpus: for the threads of this process.
            worker_cpus: a set of CPUs for each worker.
        """
        self._settings = settings
        self._cpus = cpus
        self._worker_cpus = worker_cpus
        self._loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="loadgen-loop", daemon=True)
        self._encode = msgspec.msgpack.Encoder().encode
        self._workers: list[WorkerProcess] = []
        self._living: list[WorkerProcess] = []
        self._next = 0
        self._outstanding: dict[int, tuple[WorkerProcess, RequestRecord]] = {}
        self._inbox: deque[Item] = deque()
        self._wake_pending = False
        self._run_number = 0
        self._on_done: Callable[[FromRun], None] = lambda _: None
        self._on_death: Callable[[], None] = lambda: None
        self.late_results = 0
        self.died: list[int] = []

    # ---- life

    def start(self) -> None:
        """Start the thread and the workers; return when every worker can send and receive.

        Raises:
            LoadGeneratorError: a worker ended or did not answer in time; nothing is left running.
        """
        self._thread.start()
        try:
            self._call(self._start())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        if self._cpus is not None:
            os.sched_setaffinity(0, self._cpus)  # this thread, and the ZMQ thread it will start
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def _call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _start(self) -> None:
        self._folder = ""
        self._results: Receiver | None = None
        self._probe = LoopProbe(self._loop)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        descriptor = shared_memory(len(self._settings))
        self._inflight = InFlight(descriptor, len(self._settings))
        for settings in self._settings:
            settings.inflight_fd = descriptor
            cpus = None if self._worker_cpus is None else self._worker_cpus[settings.worker]
            worker = WorkerProcess(settings, cpus)
            self._workers.append(worker)
            self._living.append(worker)
            self._loop.add_reader(worker.pidfd, self._on_exit, worker)
        os.close(descriptor)
        await asyncio.gather(*(worker.wait_up(self._loop) for worker in self._workers))
        # The folder exists only from here until both directions work, so that a main process that
        # is killed at any later time leaves no socket behind.
        self._folder = tempfile.mkdtemp(prefix="connector-tax-loadgen-")
        pull = private_socket(self._context, zmq.PULL)
        try:
            pull.bind(f"ipc://{self._folder}/results")
        except zmq.ZMQError as error:
            raise LoadGeneratorError(
                f"cannot make a socket in {self._folder}: {error}; TMPDIR must name a folder that "
                "is writable and whose path is short (a Unix socket's path holds 107 bytes)"
            ) from None
        decoder = msgspec.msgpack.Decoder(FromWorker)
        self._results = Receiver(self._loop, pull, decoder, self._on_message)
        for worker in self._workers:
            push = private_socket(self._context, zmq.PUSH)
            push.bind(f"ipc://{self._folder}/requests-{worker.index}")
            worker.sender = Sender(self._loop, push)
            worker.tell_settings(self._folder)
        await self._begin(Begin(0, 0, 0, False, "counts"), START_S)  # both directions work
        self._remove_folder()

    async def _close(self) -> None:
        for worker in self._workers:
            self._loop.remove_reader(worker.pidfd)
            worker.close()
        if self._results is not None:
            self._results.close()
        self._remove_folder()
        self._probe.close()
        # Also closes a socket whose bind failed; term() would wait for it for ever.
        self._context.destroy(linger=0)
        self._inflight.close()

    def _remove_folder(self) -> None:
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    # ---- a run

    def begin(
        self, begin: Begin, on_done: Callable[[FromRun], None], on_death: Callable[[], None]
    ) -> list[Begun]:
        """Prepare every living worker for a run; results then go to `on_done`, in this thread.

        `on_death` is called when a worker dies, after its requests were failed.

        Raises:
            LoadGeneratorError: no worker is left, or one does not answer.
        """
        self._on_done, self._on_death = on_done, on_death
        self._outstanding.clear()
        for worker in self._workers:
            worker.outstanding = 0
        self.late_results = 0
        return self._call(self._begin(begin, ANSWER_S))

    async def _begin(self, begin: Begin, timeout_s: float) -> list[Begun]:
        if not self._living:
            raise LoadGeneratorError(f"no worker is left: {self.died} died")
        self._run_number = begin.run
        self._probe.reset()
        self._inflight.limit(begin.inflight_cap)
        pending = self._ask(begin)
        await asyncio.wait(pending.values(), timeout=timeout_s)
        silent = [worker.index for worker, answer in pending.items() if not answer.done()]
        if silent:
            raise LoadGeneratorError(f"worker {silent} did not answer Begin in {timeout_s:.0f} s")
        return [answer.result() for answer in pending.values() if answer.result() is not None]

    def end(self) -> list[Health]:
        """End the run; return the health report of every living worker.

        A worker that does not reply is killed and counts as dead: its results are kept, but void.
        """
        return self._call(self._end()) if self._living else []

    async def _end(self) -> list[Health]:
        pending = self._ask(End())
        await asyncio.wait(pending.values(), timeout=ANSWER_S)
        for worker, answer in pending.items():
            if not answer.done():
                worker.process.kill()
        answers = await asyncio.gather(*pending.values())
        return [health for health in answers if health is not None]

    def submit(self, items: Iterable[Item]) -> None:
        self._inbox.extend(items)
        if not self._wake_pending:  # one wake-up serves all items that were appended meanwhile
            self._wake_pending = True
            self._loop.call_soon_threadsafe(self._flush)

    def values(self) -> dict[str, float]:
        """Return the health of this process and its counters since `begin`."""
        assert self._results is not None
        senders = [worker.sender for worker in self._workers if worker.sender is not None]
        return self._probe.values() | {
            "undecodable": self._results.undecodable,
            "oversized": self._results.oversized,
            "dropped_messages": sum(sender.dropped for sender in senders),
            "late_results": self.late_results,
        }

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    def _flush(self) -> None:
        self._wake_pending = False
        requests: list[tuple[RequestRecord, bytes]] = []
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, tuple):
                requests.append(item)
                continue
            self._send_requests(requests)
            requests = []
            self._broadcast(item)
        self._send_requests(requests)

    def _send_requests(self, requests: list[tuple[RequestRecord, bytes]]) -> None:
        """Distribute requests to the workers in turn."""
        if not self._living:
            for record, _ in requests:
                self._fail(record, "worker_died", "no worker is left")
            return
        batches: dict[WorkerProcess, list[tuple[RequestRecord, bytes]]] = {}
        for record, body in requests:
            worker = self._next_worker(record)
            worker.outstanding += 1
            batches.setdefault(worker, []).append((record, body))
        for worker, batch in batches.items():
            for part in _parts(batch):
                self._send_part(worker, part)

    def _send_part(self, worker: WorkerProcess, part: list[tuple[RequestRecord, bytes]]) -> None:
        for record, _ in part:
            record.run = self._run_number
            self._outstanding[record.seq] = worker, record
        assert worker.sender is not None
        if worker.sender.send(self._encode(Requests(part))):
            return
        for record, _ in part:
            del self._outstanding[record.seq]
            worker.outstanding -= 1
            self._fail(record, "send_buffer_full")

    def _next_worker(self, record: RequestRecord) -> WorkerProcess:
        if record.t_intended_ns == WAITS:
            # The request waits for a place: a worker whose requests end faster needs more requests.
            return min(self._living, key=lambda worker: worker.outstanding)
        self._next = (self._next + 1) % len(self._living)
        return self._living[self._next]

    def _broadcast(self, message: ToWorker) -> None:
        frame = self._encode(message)
        for worker in self._living:
            assert worker.sender is not None
            worker.sender.send(frame)

    def _ask(self, message: Begin | End) -> "dict[WorkerProcess, asyncio.Future[Any]]":
        """Send a message to each living worker; return futures of replies (None if it dies)."""
        pending: dict[WorkerProcess, asyncio.Future[Any]] = {}
        for worker in self._living:
            worker.answer = pending[worker] = self._loop.create_future()
        self._broadcast(message)
        return pending

    # ---- from the workers

    def _on_message(self, message: Any) -> None:
        if type(message) is Ended:
            for record in message.results:
                self._take(record)
        elif type(message) is Unanswered:
            self._on_done(message)
        else:
            _resolve(self._workers[message.worker].answer, message)

    def _take(self, record: RequestRecord) -> None:
        held = self._outstanding.get(record.seq)
        if record.run != self._run_number or held is None:
            self.late_results += 1
            return
        del self._outstanding[record.seq]
        held[0].outstanding -= 1
        self._on_done(record)

    def _on_exit(self, worker: WorkerProcess) -> None:
        self._loop.remove_reader(worker.pidfd)
        self._living.remove(worker)
        self.died.append(worker.index)
        # Results that it sent before it died are still on their way through ZMQ.
        self._loop.call_later(DEATH_GRACE_S, self._end_of_worker, worker)

    def _end_of_worker(self, worker: WorkerProcess) -> None:
        code = worker.process.wait()
        in_flight = self._inflight.forget_worker(worker.index)
        orphans = [record for holder, record in self._outstanding.values() if holder is worker]
        # Requests that waited for a place start in order; only the worker knew which had started.
        in_flight -= sum(record.t_intended_ns != WAITS for record in orphans)
        now_ns = time.monotonic_ns()
        for record in [record for record in orphans if record.t_intended_ns == WAITS]:
            if in_flight > 0:
                record.t_intended_ns = now_ns
                in_flight -= 1
        for record in orphans:
            del self._outstanding[record.seq]
            self._fail(record, "worker_died", f"worker exit status {code}")
        _resolve(worker.answer, None)
        self._on_death()

    def _fail(self, record: RequestRecord, kind: str, detail: str | None = None) -> None:
        record.fail(kind, detail)
        record.t_done_ns = time.monotonic_ns()
        self._on_done(record)


def _parts(
    batch: list[tuple[RequestRecord, bytes]],
) -> Iterator[list[tuple[RequestRecord, bytes]]]:
    """Split a batch into parts of at most PART_BYTES of bodies; a larger body is a part alone."""
    part: list[tuple[RequestRecord, bytes]] = []
    size = 0
    for request in batch:
        if part and size + len(request[1]) > PART_BYTES:
            yield part
            part, size = [], 0
        part.append(request)
        size += len(request[1])
    yield part


def _resolve(answer: "asyncio.Future[Any] | None", message: Begun | Health | None) -> None:
    if answer is not None and not answer.done():
        answer.set_result(message)

"""The worker process: receives requests over ZMQ, sends them over HTTP, and returns results over
ZMQ.

    _on_message -> hold until due -> fire: write -> answer, read by read -> result

A request has a task only while it waits for a connection; the next request is received meanwhile.
Stamps are taken in this process and nowhere else. `answers.HeldRequest` reads an answer as it
arrives and judges it; `Places` holds what waits in a closed loop; `Worker` does the rest.

Started as `python -m connector_tax.loadgen.worker`, with its settings as one line of JSON on stdin
(headers may hold credentials, which a command line would show to every user). The pipe stays open;
its end means that the main process has ended.
"""

import asyncio
import gc
import heapq
import itertools
import os
import resource
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
import uvloop
import zmq

from connector_tax.linux import TimerFd, set_time_slice
from connector_tax.loadgen.answers import HeldRequest, as_failure
from connector_tax.loadgen.endpoint import request_head
from connector_tax.loadgen.http import FAR_NS, Connection, hold_kernel_stamps
from connector_tax.loadgen.messages import (
    DEAD,
    GOOD_ENDS,
    WAITS,
    Begin,
    Begun,
    Cancel,
    Clock,
    End,
    Ended,
    Health,
    RequestFailed,
    RequestRecord,
    Requests,
    ToWorker,
    Unanswered,
    Window,
    WorkerSettings,
)
from connector_tax.loadgen.pool import Pool
from connector_tax.loadgen.transport import (
    MAX_MESSAGE,
    InFlight,
    LoopProbe,
    Receiver,
    Sender,
    private_socket,
)


class Places:
    """Requests that wait for a place in a closed loop, and places that wait for a request.

    Nothing that is due at `stop_ns` or later is started.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, start: Callable[[HeldRequest, int], None]
    ) -> None:
        """Store `start`, which is called with the next request and its due time, possibly in the
        past.
        """
        self._loop = loop
        self._start = start
        self._waiting: deque[HeldRequest] = deque()
        self._free: deque[int] = deque()  # free since (ns)
        self.stop_ns: int | None = None

    def add(self, request: HeldRequest) -> None:
        self._waiting.append(request)
        if self._free:
            self._next(self._free.popleft())

    def free(self, since_ns: int, pause_ns: int) -> None:
        """Take back a place, which becomes free after `pause_ns`."""
        if pause_ns:
            self._loop.call_later(pause_ns / 1e9, self._next, since_ns + pause_ns)
        else:
            self._next(since_ns)

    def close(self) -> list[HeldRequest]:
        """Start no further request; return the waiting requests."""
        self.stop_ns = 0
        waiting, self._waiting = list(self._waiting), deque()
        return waiting

    def _next(self, since_ns: int) -> None:
        if not self._waiting:
            self._free.append(since_ns)
            return
        due_ns = since_ns + self._waiting[0].record.wait_after_ready_ns
        if self.stop_ns is None or due_ns < self.stop_ns:
            self._start(self._waiting.popleft(), due_ns)


SPIN_NS = 400_000
"""The timer fires this long before a due time; the worker spins for the rest."""
# The shortest there is: main-process threads on the same CPU let the worker go first.
_TIME_SLICE_NS = 100_000
# A spin reads answers one at a time, as long as one fits before the next send.
_READ_MARGIN_NS = 80_000
_FIRES_PER_TURN = 8
# Largest share of the time between two sends to spin: dense requests need CPU for other work.
_SPIN_PART = 4
# How long a result may wait to be batched, if no plan waits for it.
_HOLD_S = 0.005
_monotonic_ns = time.monotonic_ns


class Worker:
    """The worker's main loop, and the handling of each request."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, settings: WorkerSettings, inflight: InFlight
    ) -> None:
        self.loop = loop
        self._index, target = settings.worker, settings.target
        self.chat, self.stream, self.strict = target.chat, target.stream, settings.strict
        self.ends = GOOD_ENDS.union(target.finish_reasons)
        self._head = request_head(target).encode("latin-1").replace(b"%", b"%%") + (
            b"X-Request-Id: %b\r\nContent-Length: %d\r\n\r\n"
        )
        self._encode = msgspec.msgpack.Encoder().encode
        # Set before ZMQ makes its thread, which inherits the time slice.
        self._time_slice_ns = set_time_slice(_TIME_SLICE_NS)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        push = private_socket(context, zmq.PUSH)
        push.connect(f"ipc://{settings.folder}/results")
        pull = private_socket(context, zmq.PULL)
        pull.connect(f"ipc://{settings.folder}/requests-{settings.worker}")
        self._results = Sender(loop, push)
        decoder = msgspec.msgpack.Decoder(ToWorker)
        self._requests = Receiver(loop, pull, decoder, self._on_message)
        self._stamps = hold_kernel_stamps()
        self._clock: Clock = "kernel" if self._stamps is not None else "worker"
        self._pool = Pool(
            loop,
            settings.family,
            (settings.host, target.port),
            settings.connections,
            target.tls,
            settings.strict,
        )
        self._inflight = inflight
        self._timer = TimerFd(loop, self._on_timer)
        self._probe = LoopProbe(loop)
        self._fires_soon = False
        self._expiry: asyncio.TimerHandle | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._begin_run(Begin(0, 0, 0, False, "counts"))

    def _begin_run(self, run: Begin) -> None:
        self.run = run
        self._places = Places(self.loop, self._take_place) if run.closed else None
        self._held: list[tuple[int, int]] = []  # heap of (due_ns, seq)
        self._requests_by_seq: dict[int, HeldRequest] = {}
        self._deadlines: dict[int, int] = {}  # by seq, in the order of firing
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        self._ended: list[RequestRecord] = []
        self._spun_ns = 0
        self._fired_due_ns = 0

    # ---- messages from the main process

    def _on_message(self, message: ToWorker) -> None:
        match message:
            case Requests():
                for record, body in message.requests:
                    self._hold(record, body)
            case Begin():
                task = self.loop.create_task(self._begin(message))
                self._background.add(task)
                task.add_done_callback(self._background.discard)
            case Cancel():
                self._cancel(message)
            case Window():
                self._end_window(message)
            case End():
                self._end()

    async def _begin(self, begin: Begin) -> None:
        problem = await self._pool.open(begin.connections)
        self._begin_run(begin)
        gc.collect()
        gc.freeze()
        gc.disable()
        self._requests.undecodable = self._requests.oversized = self._results.dropped = 0
        self._pool.waited = 0
        stamps = self._pool.stamps
        stamps.reads = stamps.unstamped = stamps.clock_gaps = 0
        self._probe.reset()
        begun = Begun(self._index, self._pool.idle, problem, self._clock)
        self._results.send(self._encode(begun))

    def _end(self) -> None:
        self._pool.pause()
        self._send_ended()
        values = self._probe.values()
        wall_ns = max(_monotonic_ns() - self._probe.start_ns, 1)
        values |= {
            "spin_share": self._spun_ns / wall_ns,
            "time_slice_us": self._time_slice_ns / 1000,
            "undecodable": self._requests.undecodable,
            "oversized": self._requests.oversized,
            "dropped_messages": self._results.dropped,
            "pool_waits": self._pool.waited,
            "reads": self._pool.stamps.reads,
            "unstamped_reads": self._pool.stamps.unstamped,
            "clock_gaps": self._pool.stamps.clock_gaps,
            "max_rss_mb": peak_memory_mb(),
        }
        gc.enable()
        gc.unfreeze()
        self._results.send(self._encode(Health(self._index, values)))

    def _cancel(self, cancel: Cancel) -> None:
        if cancel.seqs is None and self._places is not None:
            self._places.close()
        seqs = list(self._requests_by_seq) if cancel.seqs is None else cancel.seqs
        for seq in seqs:
            request = self._requests_by_seq.get(seq)
            if request is not None:
                self._abort(request, cancel.kind)

    def _end_window(self, window: Window) -> None:
        places, seen = self._places, self._requests_by_seq
        assert places is not None

        def at_end() -> None:
            if window.goes_on:
                due = {seq: held.record.t_intended_ns for seq, held in seen.items()}
                seqs = [seq for seq, due_ns in due.items() if WAITS < due_ns < window.stop_ns]
                self._results.send(self._encode(Unanswered(self._index, seqs)))
                return
            for request in places.close():
                self._finish(request, RequestFailed("run_ended"))

        if not window.goes_on:
            places.stop_ns = window.stop_ns
        # Timers of the loop have steps of a millisecond, and may be early.
        left_s = (window.stop_ns - _monotonic_ns()) / 1e9
        self.loop.call_later(max(0.0, left_s) + 0.002, at_end)

    # ---- due times

    def _hold(self, record: RequestRecord, body: bytes) -> None:
        record.t_worker_ns, record.worker = _monotonic_ns(), self._index
        request = self._requests_by_seq[record.seq] = HeldRequest(self, record, body)
        if record.t_intended_ns == WAITS:
            assert self._places is not None
            self._places.add(request)
            return
        heapq.heappush(self._held, (record.t_intended_ns, record.seq))
        if self._held[0][1] == record.seq:
            self._fire_due()

    def _take_place(self, request: HeldRequest, due_ns: int) -> None:
        """Send the next request of a closed loop now, or hold it until it is due."""
        request.record.t_intended_ns = due_ns
        if due_ns <= _monotonic_ns():
            self._fire(request, due_ns)
        else:
            heapq.heappush(self._held, (due_ns, request.record.seq))
            self._fire_due()

    def _fire_due(self) -> None:
        """Fire the requests that are due or nearly due; set the timer for the next request.

        At most one spin and _FIRES_PER_TURN requests run in a turn of the event loop, so that
        results and messages are served between dense requests.
        """
        held, spun = self._held, False
        self._pool.poller.until_ns = FAR_NS
        for _ in range(_FIRES_PER_TURN):
            if not held:
                return
            due_ns, seq = held[0]
            part_ns = max(due_ns - self._fired_due_ns, 0) // _SPIN_PART
            spin_ns = min(SPIN_NS, part_ns)
            ahead_ns = due_ns - _monotonic_ns()
            if ahead_ns > spin_ns:
                self._wake_at(due_ns - spin_ns)
                return
            if ahead_ns > 0 and spun:
                break
            spun = ahead_ns > 0
            heapq.heappop(held)
            self._fired_due_ns = due_ns
            request = self._requests_by_seq.get(seq)
            if request is not None:  # None: cancelled while it was held
                self._fire(request, due_ns)
        if held:
            self._wake_at(held[0][0] - SPIN_NS)

    def _on_timer(self) -> None:
        if not self._fires_soon:
            self._fire_due()

    def _fire_soon(self) -> None:
        self._fires_soon = False
        self._fire_due()

    def _wake_at(self, at_ns: int) -> None:
        """Set the timer for `at_ns`; the worker also stops reading answers at that time."""
        self._pool.poller.until_ns = at_ns
        if at_ns > _monotonic_ns():
            self._timer.arm(at_ns)
        elif not self._fires_soon:  # the next turn, without the timer's system calls
            self._fires_soon = True
            self.loop.call_soon(self._fire_soon)

    def _fire(self, request: HeldRequest, due_ns: int) -> None:
        """Send the request at `due_ns`: prepare it, then spin and read answers until it is due."""
        run = self.run
        self._deadlines[request.record.seq] = due_ns + run.request_timeout_ns
        if self._expiry is None:
            self._expire_at(due_ns + run.request_timeout_ns)
        connection = self._pool.take()
        record = request.record
        request.head = self._head % (record.request_id.encode(), len(request.body))
        begin_ns = now_ns = _monotonic_ns()
        while now_ns < due_ns:
            if due_ns - now_ns > _READ_MARGIN_NS:
                self._pool.poller.serve_one()
            now_ns = _monotonic_ns()
        self._spun_ns += now_ns - begin_ns
        request.sent = True
        # Checked at the due time, because the cap limits requests in flight, not prepared ones.
        if not self._inflight.enter(self._index):
            if connection is not None:
                self._pool.put_back(connection)
            self._finish(request, RequestFailed("inflight_cap", f"{run.inflight_cap} in flight"))
            return
        record.inflight_at_send = self._inflight.count() - 1
        if connection is None:
            self._connect(request)
        else:
            self._write(request, connection)

    def _expire(self) -> None:
        """Fail requests that have taken too long, and set the timer for the next deadline.

        Requests of a run have one time-out and are fired in the order of their due times: the
        oldest has the next deadline.
        """
        now_ns = _monotonic_ns()
        due = itertools.takewhile(lambda item: item[1] <= now_ns, self._deadlines.items())
        for seq, _ in list(due):
            # In a closed loop the end of one request starts the next, which may end others.
            if (request := self._requests_by_seq.get(seq)) is not None:
                self._abort(request, "request_timeout")
        self._expiry = None
        if self._deadlines:
            self._expire_at(next(iter(self._deadlines.values())))

    def _expire_at(self, deadline_ns: int) -> None:
        left_s = (deadline_ns - _monotonic_ns()) / 1e9
        self._expiry = self.loop.call_later(max(left_s, 0), self._expire)

    def _abort(self, request: HeldRequest, kind: str) -> None:
        if self.holds(request):
            request.fail(RequestFailed(kind))

    # ---- one request

    def _connect(self, request: HeldRequest) -> None:
        """Send once there is a connection."""

        async def connect() -> None:
            try:
                connection = await self._pool.acquire()
            except Exception as error:  # whatever it is must reach the record
                request.task = None
                self._finish(request, as_failure(error))
                return
            request.task = None
            self._write(request, connection)

        request.task = self.loop.create_task(connect())

    def _write(self, request: HeldRequest, connection: Connection) -> None:
        record, request.connection = request.record, connection
        record.t_conn_ns = _monotonic_ns()
        try:
            sent_ns = connection.write(request.head, request.body, request)
        except Exception as error:  # whatever it is must reach the record
            self.on_answered(request, as_failure(error))
            return
        record.t_send_ns = record.t_send_ns or sent_ns

    def on_answered(self, request: HeldRequest, failure: RequestFailed | None) -> None:
        """Finish an ended request, or send it again if its connection was already dead."""
        record, connection = request.record, request.connection
        if connection is None or not self._may_retry(record, connection, failure):
            self._finish(request, failure)
            return
        record.t_send_ns = record.t_send_ns or record.t_conn_ns
        record.retries += 1
        self._pool.release(connection)
        self._pool.drop_idle()  # the other idle connections are as old
        request.connection = None
        self._connect(request)

    def _may_retry(
        self, record: RequestRecord, connection: Connection, failure: RequestFailed | None
    ) -> bool:
        """Return True at most once per request, if its pooled connection was already dead.

        The server has not seen such a request. Never True for `strict`.
        """
        dead = failure is not None and failure.kind in DEAD
        dead = dead and connection.pooled and not connection.received
        return dead and record.retries == 0 and not self.strict

    def leave(self, request: HeldRequest) -> None:
        """Release the request's connection and its place among those in flight.

        In a closed loop the next request starts here, before this answer is checked.
        """
        if not request.sent:
            return
        request.sent = False
        record = request.record
        if request.task is not None:
            request.task.cancel()
        if request.connection is not None:
            self._pool.release(request.connection)
            request.connection = None
        if record.inflight_at_send is not None:
            self._inflight.leave(self._index)
        if self._places is not None:
            assert record.t_done_ns is not None
            self._places.free(record.t_done_ns, record.pause_ns)

    def holds(self, request: HeldRequest) -> bool:
        """Return whether the request has not ended yet."""
        return self._requests_by_seq.get(request.record.seq) is request

    def _finish(self, request: HeldRequest, failure: RequestFailed | None) -> None:
        record = request.record
        if not self.holds(request):
            return
        del self._requests_by_seq[record.seq]
        self._deadlines.pop(record.seq, None)
        request.stop()
        if failure is not None:
            record.fail(failure.kind, failure.detail)
            record.tolerated = None
            record.t_done_ns = record.t_done_ns or _monotonic_ns()
        self.leave(request)
        if self.run.prompt:
            self._send_results([record])
            return
        self._ended.append(record)
        if len(self._ended) == 1:
            self.loop.call_later(_HOLD_S, self._send_ended)

    def _send_ended(self) -> None:
        ended, self._ended = self._ended, []
        if ended:
            self._send_results(ended)

    def _send_results(self, ended: list[RequestRecord]) -> None:
        """Send results in one message, or one by one if the message is too long or unencodable."""
        try:
            frame = self._encode(Ended(ended))
        except UnicodeEncodeError as error:
            if len(ended) > 1:
                for record in ended:
                    self._send_results([record])
                return
            (record,) = ended
            if record.error_kind is None:
                record.fail("internal_error", f"its output cannot be sent: {error}")
            record.output = record.finish_reason = record.tolerated = None
            frame = self._encode(Ended(ended))
        if len(frame) <= MAX_MESSAGE:
            self._results.send(frame)
        elif len(ended) > 1:
            for record in ended:
                self._send_results([record])
        else:
            (record,) = ended
            record.fail("oversized_message", f"{len(frame)} bytes")
            record.raw_reads = record.output = None
            self._results.send(self._encode(Ended(ended)))


# ---- the process


def peak_memory_mb() -> float:
    """Return the peak memory in MB; getrusage's maximum would include the parent's memory."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak_kb = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(peak_kb) / 1024


def main() -> None:
    """Run the worker until the main process sends its end or exits."""
    # Only the main process handles them, even if the whole process group receives them.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.write(sys.stdout.fileno(), b"up\n")  # a single write, independent of Python's buffering
    settings = msgspec.json.decode(sys.stdin.readline(), type=WorkerSettings)
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    inflight = InFlight(settings.inflight_fd, settings.workers)
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)

    def leave() -> None:
        # The main process removes the folder, unless it was killed before that.
        shutil.rmtree(Path(settings.folder), ignore_errors=True)
        os._exit(0)

    loop.add_reader(sys.stdin.fileno(), leave)
    Worker(loop, settings, inflight)
    loop.run_forever()


if __name__ == "__main__":
    main()

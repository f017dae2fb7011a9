"""The worker process: requests in over ZMQ, HTTP out and back, results out over ZMQ.

    await requests.recv -> hold until due -> fire: write -> answer, read by read -> result

A request has a task only while it waits for a connection; the next one is received meanwhile.
Stamps are taken here and nowhere else. `HeldRequest` reads an answer as it arrives and judges it;
`Places` holds what waits in a closed loop; `Worker` does the rest.

Started as `python -m connector_tax.loadgen.worker`, with its settings as one line of JSON on stdin
(headers may hold credentials, which a command line would show to every user). The pipe stays open:
its end is the sign that the main process is gone.
"""

import asyncio
import gc
import heapq
import os
import resource
import shutil
import signal
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
import uvloop
import zmq

from connector_tax.linux import TimerFd, set_time_slice
from connector_tax.loadgen.endpoint import request_head
from connector_tax.loadgen.http import FAR_NS, Connection, hold_kernel_stamps
from connector_tax.loadgen.messages import (
    DEAD,
    PAUSE_AFTER,
    PAUSE_NS,
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
    ToWorker,
    Unanswered,
    Window,
    WorkerSettings,
)
from connector_tax.loadgen.pool import Pool
from connector_tax.loadgen.sse import (
    StreamAccumulator,
    Usage,
    decode_response,
    excerpt,
    text_of,
    whole_ids,
)
from connector_tax.loadgen.transport import (
    MAX_MESSAGE,
    InFlight,
    LoopProbe,
    Receiver,
    Sender,
    private_socket,
)

# ---- a request and its answer

DONE_GRACE_S = 1.0
"""How long the end of a stream may take after [DONE], where the load generator is not strict."""
ERROR_BYTES = 1000
MAX_BODY_BYTES = 64 * 1024 * 1024


def as_failure(error: Exception) -> RequestFailed:
    """How a request failed: a copy, which was never raised.

    A traceback holds frames with their bodies, and the collector does not run during a cell.
    """
    if isinstance(error, RequestFailed):
        return RequestFailed(error.kind, error.detail)
    return RequestFailed("internal_error", f"{type(error).__name__}: {error}")


class HeldRequest:
    """A request while a worker holds it; takes its answer, as the `Reader` of a connection.

    `connection` and `head`: since it was fired; `sent`: it holds a place among those in flight;
    `task` opens its connection.
    """

    __slots__ = (
        *("_accumulator", "_body", "_owner", "_patience", "_reads", "_size", "_status"),
        *("body", "connection", "head", "record", "sent", "task", "timeout"),
    )

    def __init__(self, owner: "Worker", record: RequestRecord, body: bytes) -> None:
        self._owner = owner
        self.record = record
        self.body = body
        self.head = b""
        self.connection: Connection | None = None
        self.sent = False
        self.task: asyncio.Task[None] | None = None
        self.timeout: asyncio.TimerHandle | None = None
        self._accumulator: StreamAccumulator | None = None
        self._reads = array("q") if owner.run.keep_reads else None
        self._patience: asyncio.TimerHandle | None = None
        self._status = 0
        self._body: list[bytes] = []
        self._size = 0

    # ---- what the connection tells

    def on_head(self, status: int, stamp: int) -> None:
        self._status, self.record.t_headers_ns = status, stamp
        owner = self._owner
        if status == 200 and owner.stream:
            self._accumulator = StreamAccumulator(owner.chat, owner.run.capture)

    def on_body(self, chunk: bytes, stamp: int) -> None:
        """Take what one read brought: count its token events, or keep it for the end."""
        accumulator = self._accumulator
        if accumulator is None:
            self._keep(chunk)
            return
        try:
            events = accumulator.feed(chunk)
        except Exception as error:  # whatever it is must reach the record
            self.fail(as_failure(error))
            return
        if events:
            record = self.record
            if record.t_first_token_ns is None:
                record.t_first_token_ns = stamp
                record.first_read_tokens = events
                if self.connection is not None:
                    self.connection.has_begun()
            if record.t_first_answer_ns is None and accumulator.answered:
                record.t_first_answer_ns = stamp
            record.t_last_token_ns = stamp
            if self._reads is not None:
                self._reads.append(stamp)
                self._reads.append(events)
        if accumulator.done and self._patience is None and not self._owner.strict:
            self._patience = self._owner.loop.call_later(
                DONE_GRACE_S, self.on_failure, RequestFailed("request_timeout")
            )

    def on_end(self, stamp: int) -> None:
        """The answer is whole: let go of the connection, then check what came."""
        if self._status != 200:
            self.fail(RequestFailed("http_status", self._error_text("")))
            return
        self.record.t_done_ns = stamp
        self._check()

    def on_failure(self, failure: RequestFailed) -> None:
        """The connection failed, or the end of a stream that is over did not come."""
        accumulator = self._accumulator
        if self._status not in (0, 200):
            text = self._error_text(f" ({failure.kind})")
            self.fail(RequestFailed("http_status", text))
        elif accumulator is None or self._owner.strict or not accumulator.ended_well:
            self.fail(failure)
        else:
            self.record.tolerated = "not_closed"
            self.record.t_done_ns = _monotonic_ns()
            self._check()

    def fail(self, failure: RequestFailed) -> None:
        self._owner.on_answered(self, failure)

    def stop(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
        if self._reads:
            self.record.raw_reads = self._reads.tobytes()

    # ---- inside

    def _keep(self, chunk: bytes) -> None:
        if self._status != 200:
            chunk = chunk[: ERROR_BYTES - self._size]
        self._size += len(chunk)
        self._body.append(chunk)
        if self._size > MAX_BODY_BYTES:
            self.fail(RequestFailed("oversized_event", f"body over {MAX_BODY_BYTES} bytes"))

    def _error_text(self, cut: str) -> str:
        """What an answer with another status says, cut off as it may be."""
        where = ""
        if 300 <= self._status < 400:
            assert self.connection is not None
            location = self.connection.location
            where = " to " + location.decode("latin-1") if location else " without Location"
        return f"{self._status}{where}: {excerpt(b''.join(self._body))}{cut}"

    def _check(self) -> None:
        self._owner.leave(self)
        failure = None
        try:
            if self._accumulator is None:
                self._check_body()
            else:
                self._check_stream(self._accumulator)
        except Exception as error:  # whatever it is must reach the record
            failure = as_failure(error)
        self._owner.on_answered(self, failure)

    def _check_stream(self, accumulator: StreamAccumulator) -> None:
        record, owner = self.record, self._owner
        if accumulator.lacks_done(owner.strict):
            record.tolerated = "no_done"
        if owner.run.capture == "text":
            record.output = "".join(accumulator.text)
        elif owner.run.capture == "token_ids":
            record.output = whole_ids(accumulator.token_ids, accumulator.usage)
        self._count(accumulator.usage, accumulator.token_events)

    def _check_body(self) -> None:
        record, capture = self.record, self._owner.run.capture
        response = decode_response(b"".join(self._body))
        choice = response.choices[0] if response.choices else None
        if choice is None or choice.finish_reason is None:
            raise RequestFailed("missing_done", "no choice with a finish reason")
        record.t_first_token_ns = record.t_last_token_ns = record.t_first_answer_ns = (
            record.t_done_ns
        )
        if capture == "text":
            record.output = text_of(choice)
        elif capture == "token_ids":
            record.output = whole_ids(choice.token_ids or [], response.usage)
        self._count(response.usage, None)

    def _count(self, usage: Usage | None, events: int | None) -> None:
        """Compare the server's count of tokens with what was asked for.

        Without one, unless strict, the number of token events of a stream is taken; some servers
        count none where tokens came.
        """
        record, strict = self.record, self._owner.strict
        completion = None if usage is None else usage.completion_tokens
        if usage is None or completion is None or (completion == 0 and events and not strict):
            if strict:
                raise RequestFailed("missing_usage")
            record.completion_tokens, record.counted_by = events, "client"
            return
        prompt = usage.prompt_tokens
        record.prompt_tokens, record.completion_tokens = prompt, completion
        record.counted_by = "server"
        wanted_prompt, wanted = record.wanted
        if wanted is not None and wanted != completion:
            raise RequestFailed("wrong_length", f"{completion} completion tokens, not {wanted}")
        if wanted_prompt is not None and wanted_prompt != prompt:
            if strict:
                raise RequestFailed("wrong_length", f"{prompt} prompt tokens, not {wanted_prompt}")
            record.tolerated = "prompt_length"


class Places:
    """Requests that wait for a place, and places that wait for a request.

    `stop_ns`: nothing that is due then or later is started.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, start: Callable[[HeldRequest, int], None]
    ) -> None:
        """`start`: called with the next request and its due time, which may be in the past."""
        self._loop = loop
        self._start = start
        self._waiting: deque[HeldRequest] = deque()
        self._free: deque[int] = deque()  # since when
        self.stop_ns: int | None = None

    def add(self, request: HeldRequest) -> None:
        self._waiting.append(request)
        if self._free:
            self._next(self._free.popleft())

    def free(self, since_ns: int, pauses: bool) -> None:
        """A place is free, or will be after a pause."""
        if pauses:
            self._loop.call_later(PAUSE_NS / 1e9, self._next, since_ns + PAUSE_NS)
        else:
            self._next(since_ns)

    def close(self) -> list[HeldRequest]:
        """Start nothing more; return what waits."""
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
"""The timer is set so much before a due time; what is left is spun, not slept."""
# The shortest there is: main-process threads on the same CPU let the worker go first.
_TIME_SLICE_NS = 100_000
# A spin reads answers one at a time, while there is time for one before the next send.
_READ_MARGIN_NS = 80_000
_FIRES_PER_TURN = 8
# At most this part of the time between two sends is spun: dense requests bring other work.
_SPIN_PART = 4
# How long a result may wait for others, where no plan waits for it.
_HOLD_S = 0.005
_monotonic_ns = time.monotonic_ns


class Worker:
    """The worker's main loop and the life of each request."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, settings: WorkerSettings, inflight: InFlight
    ) -> None:
        self.loop = loop
        self._index, target = settings.worker, settings.target
        self.chat, self.stream, self.strict = target.chat, target.stream, settings.strict
        self._head = request_head(target).encode("latin-1").replace(b"%", b"%%") + (
            b"X-Request-Id: %b\r\nContent-Length: %d\r\n\r\n"
        )
        self._encode = msgspec.msgpack.Encoder().encode
        # Before ZMQ makes its thread, which takes it over.
        self._time_slice_ns = set_time_slice(_TIME_SLICE_NS)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        push = private_socket(context, zmq.PUSH)
        push.connect(f"ipc://{settings.folder}/results")
        pull = private_socket(context, zmq.PULL)
        pull.connect(f"ipc://{settings.folder}/requests-{settings.worker}")
        self._results = Sender(loop, push)
        self._requests = Receiver(loop, pull, msgspec.msgpack.Decoder(ToWorker))
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
        self._timer = TimerFd(loop, self._fire_due)
        self._probe = LoopProbe(loop)
        self._background: set[asyncio.Task[None]] = set()
        self._begin_run(Begin(0, 0, 0, False, "counts"))

    def _begin_run(self, run: Begin) -> None:
        self.run = run
        self._places = Places(self.loop, self._take_place) if run.closed else None
        self._held: list[tuple[int, int]] = []  # heap of (due_ns, seq)
        self._requests_by_seq: dict[int, HeldRequest] = {}
        self._ended: list[RequestRecord] = []
        self._spun_ns = 0
        self._fired_due_ns = 0

    # ---- messages from the main process

    async def main_loop(self) -> None:
        """Serve messages for ever; suspends only when none is buffered."""
        while True:
            message, body = await self._requests.recv()
            match message:
                case RequestRecord():
                    self._hold(message, body or b"")
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
        """Send the next request of a closed loop, which is due now, or in a while."""
        request.record.t_intended_ns = due_ns
        if due_ns <= _monotonic_ns():
            self._fire(request, due_ns)
        else:
            heapq.heappush(self._held, (due_ns, request.record.seq))
            self._fire_due()

    def _fire_due(self) -> None:
        """Fire what is due, or will be in a moment; set the timer for the next.

        At most one spin and _FIRES_PER_TURN requests in a turn of the loop: where requests are
        dense, results and messages are served between them.
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
            if request is not None:  # else cancelled while it was held
                self._fire(request, due_ns)
        if held:
            self._wake_at(held[0][0] - SPIN_NS)

    def _wake_at(self, at_ns: int) -> None:
        """Look for what is due then; reading answers ends for it."""
        self._pool.poller.until_ns = at_ns
        self._timer.arm(at_ns)

    def _fire(self, request: HeldRequest, due_ns: int) -> None:
        """Send at `due_ns`: make ready, then spin the rest, reading what answers come meanwhile."""
        run = self.run
        left_s = (due_ns + run.request_timeout_ns - _monotonic_ns()) / 1e9
        request.timeout = self.loop.call_later(
            max(left_s, 0), self._abort, request, "request_timeout"
        )
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
        # Judged at the due time, as the cap is on requests in flight and not on those prepared.
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

    def _abort(self, request: HeldRequest, kind: str) -> None:
        if self._requests_by_seq.get(request.record.seq) is request:
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
        """Take the end of a request; send it again if it met a dead connection."""
        record, connection = request.record, request.connection
        if connection is None or not self._may_retry(record, connection, failure):
            self._finish(request, failure)
            return
        record.t_send_ns = record.t_send_ns or record.t_conn_ns
        record.retries += 1
        self._pool.release(connection)
        self._pool.drop_idle()  # the others have waited too
        request.connection = None
        self._connect(request)

    def _may_retry(
        self, record: RequestRecord, connection: Connection, failure: RequestFailed | None
    ) -> bool:
        """Once, where a connection from the pool was dead already: the server saw no request.

        Never against a server that is judged (`strict`).
        """
        dead = failure is not None and failure.kind in DEAD
        dead = dead and connection.pooled and not connection.received
        return dead and record.retries == 0 and not self.strict

    def leave(self, request: HeldRequest) -> None:
        """Give up what a request holds: its connection, and its place among those in flight.

        In closed loop the next request goes here, before the answer of this one is checked.
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
            self._places.free(record.t_done_ns, record.error_kind in PAUSE_AFTER)

    def _finish(self, request: HeldRequest, failure: RequestFailed | None) -> None:
        record = request.record
        if self._requests_by_seq.get(record.seq) is not request:
            return
        del self._requests_by_seq[record.seq]
        if request.timeout is not None:
            request.timeout.cancel()
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
        """Send as one message or, where that is too long, each by itself."""
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
    """Not getrusage, whose maximum begins with that of the process which started this one."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak_kb = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(peak_kb) / 1024


def main() -> None:
    """Run until the main process says or shows that it is over."""
    # They are for the main process to handle, whether the group gets them or it alone.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.write(sys.stdout.fileno(), b"up\n")  # one write, whatever buffering the user has set
    settings = msgspec.json.decode(sys.stdin.readline(), type=WorkerSettings)
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    inflight = InFlight(settings.inflight_fd, settings.workers)
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)

    def leave() -> None:
        # The main process removes the folder itself, unless it was killed before that.
        shutil.rmtree(Path(settings.folder), ignore_errors=True)
        os._exit(0)

    loop.add_reader(sys.stdin.fileno(), leave)
    loop.run_until_complete(Worker(loop, settings, inflight).main_loop())


if __name__ == "__main__":
    main()

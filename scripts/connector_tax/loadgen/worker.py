"""The worker process: requests in over ZMQ, HTTP out and back, results out over ZMQ.

    await requests.recv -> hold until due -> fire -> [eager task: acquire, write, respond] -> result

The receive loop never awaits the pool: a request that has to wait for a connection waits in its own
task, and the next one is received meanwhile. Stamps are taken here and nowhere else.

Started as `python -m connector_tax.loadgen.worker`, with its settings as one line of JSON on stdin
(headers may hold credentials, which a command line would show to every user). The pipe stays open:
its end is one of two signs that the main process is gone, the other is PR_SET_PDEATHSIG.
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
from pathlib import Path

import msgspec
import uvloop
import zmq

from connector_tax.linux import TimerFd, set_time_slice
from connector_tax.loadgen import eager
from connector_tax.loadgen.held import HeldRequest
from connector_tax.loadgen.http import Connection
from connector_tax.loadgen.inflight import InFlight
from connector_tax.loadgen.loop_probe import LoopProbe
from connector_tax.loadgen.messages import (
    Begin,
    Begun,
    Cancel,
    Clock,
    Done,
    End,
    Ended,
    FromWorker,
    Health,
    Issue,
    RequestFailed,
    ToWorker,
    Up,
    WorkerSettings,
)
from connector_tax.loadgen.pool import Pool
from connector_tax.loadgen.process import die_with, peak_memory_mb
from connector_tax.loadgen.sse import (
    StreamAccumulator,
    decode_response,
    excerpt,
    text_of,
    whole_ids,
)
from connector_tax.loadgen.stamps import kernel_stamps_offered
from connector_tax.loadgen.tls import TlsClient
from connector_tax.loadgen.transport import MAX_MESSAGE, Receiver, Sender, private_socket

# The shortest there is: main-process threads on the same CPU let the worker go first.
_TIME_SLICE_NS = 100_000
# A spin reads answers a few at a time, while there is time for them before the next send.
_READ_MARGIN_NS = 80_000
_READS_PER_LOOK = 4
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
        self._loop = loop
        self._settings = settings
        self._index = settings.worker
        self._head = settings.head.encode("latin-1").replace(b"%", b"%%") + (
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
        self._results = Sender(loop, push, backlog=65536)
        self._requests = Receiver(loop, pull, msgspec.msgpack.Decoder(ToWorker))
        self._kernel_stamps = settings.kernel_stamps and kernel_stamps_offered()
        tls = settings.tls
        self._pool = Pool(
            loop,
            settings.family,
            (settings.host, settings.port),
            settings.connections,
            self._kernel_stamps,
            None if tls is None else TlsClient(tls.name, tls.ca_file, tls.insecure),
        )
        self._inflight = inflight
        self._timer = TimerFd(loop, self._fire_due)
        self._probe = LoopProbe(loop)
        self._background: set[asyncio.Task[None]] = set()
        # Of the run.
        self._run = Begin(0, 0, 0, False, "counts")
        self._held: list[tuple[int, int]] = []  # heap of (due_ns, seq)
        self._requests_by_seq: dict[int, HeldRequest] = {}
        self._ended: list[Done] = []
        self._spun_ns = 0
        self._fired_due_ns = 0

    # ---- messages from the main process

    async def main_loop(self) -> None:
        """Serve messages for ever; suspends only when none is buffered."""
        self._send(Up(self._index))
        while True:
            message, body = await self._requests.recv()
            match message:
                case Issue():
                    self._hold(message, body or b"")
                case Begin():
                    task = self._loop.create_task(self._begin(message))
                    self._background.add(task)
                    task.add_done_callback(self._background.discard)
                case Cancel():
                    self._cancel(message)
                case End():
                    self._end()

    async def _begin(self, begin: Begin) -> None:
        self._pool.drop_stale()
        problem = await self._pool.fill()
        self._run = begin
        self._spun_ns = 0
        gc.collect()
        gc.freeze()
        gc.disable()
        self._requests.undecodable = self._requests.oversized = self._results.dropped = 0
        self._pool.waited = 0
        self._pool.stamps.reset()
        self._probe.reset()
        clock: Clock = "kernel" if self._kernel_stamps else "worker"
        self._send(Begun(self._index, begin.run, self._pool.idle, problem, clock))

    def _end(self) -> None:
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
        self._send(Health(self._run.run, self._index, values))

    def _cancel(self, cancel: Cancel) -> None:
        seqs = list(self._requests_by_seq) if cancel.seqs is None else cancel.seqs
        for seq in seqs:
            request = self._requests_by_seq.get(seq)
            if request is not None:
                self._abort(request, cancel.kind)

    # ---- due times

    def _hold(self, issue: Issue, body: bytes) -> None:
        done = Done(self._run.run, self._index, issue.seq, t_worker_ns=_monotonic_ns())
        self._requests_by_seq[issue.seq] = HeldRequest(issue, body, done)
        heapq.heappush(self._held, (issue.due_ns, issue.seq))
        if self._held[0][1] == issue.seq:
            self._fire_due()

    def _fire_due(self) -> None:
        """Fire what is due, or will be in a moment; set the timer for the next.

        At most one spin and _FIRES_PER_TURN requests in a turn of the loop: where requests are
        dense, results and messages are served between them.
        """
        held, settings = self._held, self._settings
        spun = False
        for _ in range(_FIRES_PER_TURN):
            if not held:
                return
            due_ns, seq = held[0]
            part_ns = max(due_ns - self._fired_due_ns, 0) // _SPIN_PART
            spin_ns = min(settings.spin_ns, part_ns)
            ahead_ns = due_ns - _monotonic_ns()
            if ahead_ns > spin_ns:
                margin_ns = min(settings.sleep_margin_ns, part_ns)
                self._timer.arm(due_ns - (margin_ns if ahead_ns > margin_ns else spin_ns))
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
            self._timer.arm(held[0][0] - settings.spin_ns)

    def _fire(self, request: HeldRequest, due_ns: int) -> None:
        """Send at `due_ns`: make ready, then spin the rest, reading what answers come meanwhile."""
        run = self._run
        left_s = (due_ns + run.request_timeout_ns - _monotonic_ns()) / 1e9
        request.timeout = self._loop.call_later(
            max(left_s, 0), self._abort, request, "request_timeout"
        )
        connection = self._pool.take()
        head = self._head % (request.request_id.encode(), len(request.body))
        begin_ns = now_ns = _monotonic_ns()
        while now_ns < due_ns:
            if due_ns - now_ns > _READ_MARGIN_NS:
                self._pool.serve_ready(_READS_PER_LOOK)
            now_ns = _monotonic_ns()
        self._spun_ns += now_ns - begin_ns
        # Judged at the due time, as the cap is on requests in flight and not on those prepared.
        if not self._inflight.enter(self._index):
            if connection is not None:
                self._pool.put_back(connection)
            self._finish(request, RequestFailed("inflight_cap", f"{run.inflight_cap} in flight"))
            return
        request.done.inflight_at_send = self._inflight.count() - 1
        request.task = eager.start(self._loop, self._serve(request, head, connection))

    def _abort(self, request: HeldRequest, kind: str) -> None:
        if request.done.seq not in self._requests_by_seq:
            return
        request.abort = kind
        if request.task is None:
            self._finish(request, RequestFailed(kind))
        else:
            request.task.cancel()

    # ---- one request

    async def _serve(
        self, request: HeldRequest, head: bytes, connection: Connection | None
    ) -> None:
        failure: RequestFailed | None = None
        done = request.done
        try:
            if connection is None:
                connection = await self._pool.acquire()
            done.t_conn_ns = _monotonic_ns()
            done.t_send_ns = connection.write(head, request.body)
            await self._respond(request, connection)
        except RequestFailed as error:
            # A copy, which was never raised: the traceback of `error` holds this frame and those
            # below with their bodies, and the collector does not run during a cell.
            failure = RequestFailed(error.kind, error.detail)
        except asyncio.CancelledError:
            failure = RequestFailed(request.abort or "internal_error", "cancelled")
        except Exception as error:  # whatever it is must reach the record, or the run would wait
            failure = RequestFailed("internal_error", f"{type(error).__name__}: {error}")
        finally:
            if connection is not None:
                done.t_headers_ns = connection.t_headers_ns
                if failure is None:
                    done.t_done_ns = connection.t_done_ns
                if connection.busy:
                    self._pool.release(connection)
        self._inflight.leave(self._index)
        self._finish(request, failure)

    async def _respond(self, request: HeldRequest, connection: Connection) -> None:
        status = await connection.read_headers()
        if status != 200:
            body = await connection.read_body()
            raise RequestFailed("http_status", f"{status}: {excerpt(body)}")
        if self._settings.stream:
            await self._consume_stream(request, connection)
        else:
            await self._consume_body(request, connection)

    async def _consume_stream(self, request: HeldRequest, connection: Connection) -> None:
        done, run, settings = request.done, self._run, self._settings
        accumulator = StreamAccumulator(settings.chat, run.capture)
        reads = array("q") if run.keep_reads else None
        try:
            while chunks := await connection.read_chunks():
                for stamp, chunk in chunks:
                    events = accumulator.feed(chunk)
                    if events:
                        if done.t_first_token_ns is None:
                            done.t_first_token_ns = stamp
                        if done.t_first_answer_ns is None and accumulator.answered:
                            done.t_first_answer_ns = stamp
                        done.t_last_token_ns = stamp
                        if reads is not None:
                            reads.append(stamp)
                            reads.append(events)
        finally:
            if reads is not None:
                done.reads = reads.tobytes()
            done.t_done_ns = connection.t_done_ns
        self._pool.release(connection)  # early: the next request need not wait for the checks
        accumulator.finish()
        if run.capture == "text":
            done.text = "".join(accumulator.text)
        elif run.capture == "token_ids":
            done.token_ids = whole_ids(accumulator.token_ids, accumulator.usage)
        request.count(accumulator.usage, accumulator.token_events, settings.usage_required)

    async def _consume_body(self, request: HeldRequest, connection: Connection) -> None:
        done, run, settings = request.done, self._run, self._settings
        body = await connection.read_body()
        done.t_done_ns = connection.t_done_ns
        self._pool.release(connection)
        response = decode_response(body)
        choice = response.choices[0] if response.choices else None
        if choice is None or choice.finish_reason is None:
            raise RequestFailed("missing_done", "no choice with a finish reason")
        done.t_first_token_ns = done.t_last_token_ns = done.t_first_answer_ns = done.t_done_ns
        if run.capture == "text":
            done.text = text_of(choice)
        elif run.capture == "token_ids":
            done.token_ids = whole_ids(choice.token_ids or [], response.usage)
        request.count(response.usage, None, settings.usage_required)

    def _finish(self, request: HeldRequest, failure: RequestFailed | None) -> None:
        done = request.done
        if self._requests_by_seq.pop(done.seq, None) is None:
            return
        if request.timeout is not None:
            request.timeout.cancel()
        if failure is not None:
            done.error_kind, done.error_detail = failure.kind, failure.detail
            if done.t_done_ns is None:
                done.t_done_ns = _monotonic_ns()
        if self._run.prompt:
            self._send(done)
            return
        self._ended.append(done)
        if len(self._ended) == 1:
            self._loop.call_later(_HOLD_S, self._send_ended)

    def _send_ended(self) -> None:
        ended, self._ended = self._ended, []
        if not ended:
            return
        frame = self._encode(Ended(ended))
        if len(frame) <= MAX_MESSAGE:
            self._results.send(frame)
            return
        for done in ended:
            self._send(done)

    def _send(self, message: FromWorker) -> None:
        frame = self._encode(message)
        if len(frame) > MAX_MESSAGE and isinstance(message, Done):
            size = f"{len(frame)} bytes"
            message = Done(message.run, message.worker, message.seq, "oversized_message", size)
            frame = self._encode(message)
        self._results.send(frame)


def main() -> None:
    """Run until the main process says or shows that it is over."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process to handle
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

    die_with(settings.parent, leave, loop)
    loop.run_until_complete(Worker(loop, settings, inflight).main_loop())


if __name__ == "__main__":
    main()

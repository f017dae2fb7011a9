"""The issuing thread: walks a plan of due times and hands requests on, a little ahead.

It sleeps on an absolute schedule, so that one late wake-up never shifts the next. It does not spin:
each request travels to its worker LEAD_NS before it is due and the worker fires it
(docs/decisions/loadgen.md has the measurement of the alternatives). While there is time it makes
request bodies ahead.
"""

import os
import threading
import time
from collections import deque

from connector_tax.loadgen.dispatcher import Dispatcher, FromRun
from connector_tax.loadgen.messages import Cancel, Unanswered
from connector_tax.loadgen.plan import LEAD_NS, Plan

ABORT_GRACE_S = 2.0
POLL_NS = 10_000_000
# No body is begun so shortly before the next look at the plan.
BODY_NS = 2_000_000


class IssuingThread:
    """Runs one plan to its end in a thread of its own."""

    def __init__(self, plan: Plan, dispatcher: Dispatcher, cpus: tuple[int, ...] | None) -> None:
        self._plan = plan
        self._dispatcher = dispatcher
        self._cpus = cpus
        self._results: deque[FromRun] = deque()
        self._wake = threading.Event()
        self._ended = threading.Event()
        self.interrupted = False
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="loadgen-issue", daemon=True)
        self._error: BaseException | None = None
        self.t_drained_ns = 0

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end; True if it is over. Raises what the thread raised."""
        # Not Thread.join: interrupted by Ctrl-C, Python 3.11 takes the running thread for ended.
        if not self._ended.wait(timeout_s):
            return False
        if self._error is not None:
            raise self._error
        return True

    def put(self, result: FromRun) -> None:
        """Deliver a result (event-loop thread)."""
        self._results.append(result)
        if self._plan.wakes_on_result:
            self._wake.set()

    def stop(self) -> None:
        """Send nothing more, drain, and end (any thread)."""
        self._stop = True
        self._wake.set()

    def interrupt(self) -> None:
        """As `stop`, and cancel what is outstanding (any thread)."""
        self.interrupted = True
        self.stop()

    def _run(self) -> None:
        try:
            if self._cpus is not None:
                os.sched_setaffinity(0, self._cpus)
            self._issue()
            self._drain()
            self.t_drained_ns = time.monotonic_ns()
        except BaseException as error:  # handed to the thread that joins
            self._error = error
        finally:
            self._ended.set()

    def _take_results(self) -> None:
        while self._results:
            result = self._results.popleft()
            if isinstance(result, Unanswered):
                self._plan.take_unanswered(result.seqs)
            else:
                self._plan.take(result)

    def _sleep(self, until_ns: int) -> None:
        left_ns = until_ns - time.monotonic_ns()
        if left_ns > 0:
            self._wake.wait(left_ns / 1e9)

    def _issue(self) -> None:
        while True:
            self._wake.clear()  # before looking, so that what comes meanwhile wakes the sleep
            self._take_results()
            now_ns = time.monotonic_ns()
            if self._stop:
                self._plan.stop(now_ns)
            items, next_ns = self._plan.step(now_ns, now_ns + LEAD_NS)
            if items:
                self._dispatcher.submit(items)
            if next_ns is None:
                return
            # Several at a time, each at least three quarters of the lead ahead: to wake two threads
            # and the worker for each request costs as much as the rest of this process's work.
            wake_ns = max(next_ns - LEAD_NS, now_ns + LEAD_NS // 4)
            while time.monotonic_ns() < wake_ns - BODY_NS and not self._wake.is_set():
                if not self._plan.prepare():
                    break
            self._sleep(wake_ns)

    def _drain(self) -> None:
        assert self._plan.stop_ns is not None
        deadline_ns = self._plan.stop_ns + round(self._plan.drain_s * 1e9)
        if self._wait_for_outstanding(deadline_ns, interruptible=True):
            return
        kind = "interrupted" if self.interrupted else "drain_timeout"
        self._dispatcher.submit([Cancel(kind, None)])
        grace_ns = time.monotonic_ns() + round(ABORT_GRACE_S * 1e9)
        if not self._wait_for_outstanding(grace_ns, interruptible=False):
            self._plan.give_up(kind)

    def _wait_for_outstanding(self, deadline_ns: int, interruptible: bool) -> bool:
        while True:
            self._wake.clear()
            self._take_results()
            if cancels := self._plan.take_cancels():
                self._dispatcher.submit(cancels)
            if self._plan.outstanding == 0:
                return True
            now_ns = time.monotonic_ns()
            if now_ns >= deadline_ns or (interruptible and self.interrupted):
                return False
            self._sleep(min(deadline_ns, now_ns + POLL_NS))

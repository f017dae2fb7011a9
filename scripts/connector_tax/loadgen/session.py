"""The session thread: walks a plan of due times and hands requests on, a little ahead.

It sleeps on an absolute schedule, so that one late wake-up never shifts the next. It does not spin:
each request travels to its worker `lead_ns` before it is due and the worker fires it (DESIGN.md has
the measurement of the alternatives).
"""

import os
import threading
import time
from collections import deque
from typing import Protocol

from connector_tax.loadgen.dispatcher import Dispatcher
from connector_tax.loadgen.messages import Cancel, Done, Issue

ABORT_GRACE_S = 2.0
POLL_NS = 10_000_000


class Plan(Protocol):
    """What to send when. Called by the session thread only."""

    outstanding: int
    """Requests handed out whose result has not been taken."""

    stop_ns: int | None
    """End of the window; set once `step` has returned None."""

    drain_s: float
    """How long outstanding requests may take after the end of the window."""

    wakes_on_result: bool
    """True if a result can make a request due."""

    def step(
        self, now_ns: int, horizon_ns: int
    ) -> tuple[list[tuple[Issue, bytes] | Cancel], int | None]:
        """Return what is due before `horizon_ns`, and when to ask again; None: no more to send."""

    def take(self, done: Done) -> None:
        """Take the result of a request."""

    def stop(self, now_ns: int) -> None:
        """Send nothing more; the next `step` says so."""

    def give_up(self, kind: str) -> None:
        """End every outstanding request with failure `kind`: its worker did not answer."""


class SessionThread:
    """Runs one plan to its end in a thread of its own."""

    def __init__(
        self, plan: Plan, dispatcher: Dispatcher, lead_ns: int, cpus: tuple[int, ...] | None
    ) -> None:
        self._plan = plan
        self._dispatcher = dispatcher
        self._lead_ns = lead_ns
        self._cpus = cpus
        self._results: deque[Done] = deque()
        self._wake = threading.Event()
        self._ended = threading.Event()
        self._interrupted = False
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="loadgen-session", daemon=True)
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

    def put(self, done: Done) -> None:
        """Deliver a result (event-loop thread)."""
        self._results.append(done)
        if self._plan.wakes_on_result:
            self._wake.set()

    def stop(self) -> None:
        """Send nothing more, drain, and end (any thread)."""
        self._stop = True
        self._wake.set()

    def interrupt(self) -> None:
        """As `stop`, and cancel what is outstanding (any thread)."""
        self._interrupted = True
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
            self._plan.take(self._results.popleft())

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
            items, next_ns = self._plan.step(now_ns, now_ns + self._lead_ns)
            if items:
                self._dispatcher.submit(items)
            if next_ns is None:
                return
            self._sleep(next_ns - self._lead_ns)

    def _drain(self) -> None:
        assert self._plan.stop_ns is not None
        deadline_ns = self._plan.stop_ns + round(self._plan.drain_s * 1e9)
        if self._wait_for_outstanding(deadline_ns, interruptible=True):
            return
        kind = "interrupted" if self._interrupted else "drain_timeout"
        self._dispatcher.submit([Cancel(kind, None)])
        grace_ns = time.monotonic_ns() + round(ABORT_GRACE_S * 1e9)
        if not self._wait_for_outstanding(grace_ns, interruptible=False):
            self._plan.give_up(kind)

    def _wait_for_outstanding(self, deadline_ns: int, interruptible: bool) -> bool:
        while True:
            self._wake.clear()
            self._take_results()
            if self._plan.outstanding == 0:
                return True
            now_ns = time.monotonic_ns()
            if now_ns >= deadline_ns or (interruptible and self._interrupted):
                return False
            self._sleep(min(deadline_ns, now_ns + POLL_NS))

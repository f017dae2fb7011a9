# CONNECTOR_TAX_PATCH
"""Emulate the device as a single-server queue, and events as moments in it.

Nothing is executed. The end of a step is known when it is queued, and a waiter sleeps until then
without using the CPU.
"""

import ctypes
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

_now = time.monotonic_ns
_PR_SET_TIMERSLACK = 29
_set_process = ctypes.CDLL(None).prctl


class Batch(NamedTuple):
    """A step's batch, the input of `roofline.device_us`."""

    prefill_tokens: int
    decode_seqs: int
    kv_tokens: int
    prefill_pairs: int


@dataclass(slots=True)
class Step:
    """A step in the queue; times are CLOCK_MONOTONIC ns.

    Attributes:
        since_ns: when the engine had the step's work; 0 means at the end of the previous step.
        wait_ns: when the host began to wait for its end; 0 before.
        woken_ns: when the host continued.
    """

    step_id: int
    batch: Batch
    since_ns: int
    queued_ns: int
    start_ns: int
    end_ns: int
    wait_ns: int = 0
    woken_ns: int = 0

    def numbers(self) -> tuple[int, ...]:
        """Return the step's numbers in the order of its log."""
        return (self.queued_ns, self.end_ns, self.step_id, self.start_ns, self.since_ns,
                *self.batch, self.wait_ns, self.woken_ns)  # fmt: skip


class Device:
    """The queue of one engine.

    Args:
        launch_us: the host's CPU time for launching a step's kernels.
        record: called with each step, in order, once the host has waited for it or a later one.
    """

    def __init__(self, launch_us: float, record: Callable[[Step], Any]) -> None:
        self._launch_ns = round(launch_us * 1000)
        self._record = record
        self._unrecorded: deque[Step] = deque()
        self.free_ns = 0
        self.last: Step | None = None

    def begin(self, step_id: int, batch: Batch, since_ns: int, duration_us: float) -> None:
        """Queue a step: the host has launched its first kernel."""
        queued = _now()
        start = max(queued, self.free_ns)
        self.free_ns = start + round(duration_us * 1000)
        self.last = Step(step_id, batch, since_ns, queued, start, self.free_ns)
        self._unrecorded.append(self.last)

    def launched(self) -> None:
        """Record that the host has launched the step's last kernel, before which it cannot end."""
        step = self.last
        assert step is not None
        until = step.queued_ns + self._launch_ns
        while (now := _now()) < until:
            pass
        step.end_ns = self.free_ns = max(step.end_ns, now)

    def waited(self, step: Step, wait_ns: int) -> None:
        """Record that the host has waited for a step, and pass on all steps up to it."""
        if step.woken_ns:
            return
        step.wait_ns, step.woken_ns = wait_ns, _now()
        while self._unrecorded:
            done = self._unrecorded.popleft()
            self._record(done)
            if done is step:
                break


def event_class(device: Device) -> type:
    """Return a replacement for torch.cuda.Event that uses the emulated device.

    `record` stores the time at which the device's queue ends, and `synchronize` waits until then.
    """

    class Event:
        __slots__ = ("step", "when_ns")
        slack_set = False

        def __init__(self, *_args: Any, **_options: Any) -> None:
            self.step: Step | None = None
            self.when_ns = 0

        def record(self, _stream: Any = None) -> None:
            self.step, self.when_ns = device.last, device.free_ns

        def wait(self, _stream: Any = None) -> None:
            pass

        def query(self) -> bool:
            return _now() >= self.when_ns

        def elapsed_time(self, other: "Event") -> float:
            return (other.when_ns - self.when_ns) / 1e6

        def synchronize(self) -> None:
            if not Event.slack_set:
                # Timer slack of this thread: the default of 50 us would prolong each step.
                _set_process(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
                Event.slack_set = True
            begin = _now()
            if (left := self.when_ns - begin) > 0:
                time.sleep(left / 1e9)
            if self.step is not None:
                device.waited(self.step, begin)

    return Event

"""Kernel timers for an event loop: nanosecond deadlines, and the loop's own lateness.

Timers of uvloop and asyncio have millisecond steps (0.6 to 1.8 ms late; uvloop's can fire early);
a timerfd is a high-resolution kernel timer that wakes the loop like any readable file. Linux only.
"""

import asyncio
import contextlib
import ctypes
import os
import time
from collections.abc import Callable

_CLOCK_MONOTONIC = 1
_TIMER_ABSTIME = 1
_NS = 1_000_000_000

_libc = ctypes.PyDLL(None, use_errno=True)


class _ITimerSpec(ctypes.Structure):
    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class TimerFd:
    """Calls `callback` in `loop` once CLOCK_MONOTONIC has reached an armed time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._spec = _ITimerSpec()
        self._spec_pointer = ctypes.byref(self._spec)
        self._fd = _libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            error = ctypes.get_errno()
            raise OSError(error, f"timerfd_create: {os.strerror(error)}")
        loop.add_reader(self._fd, self._on_readable)

    def arm(self, at_ns: int, interval_ns: int = 0) -> None:
        """Fire at the absolute time `at_ns`, replacing any earlier deadline; then periodically."""
        spec = self._spec
        spec.value_s, spec.value_ns = divmod(max(at_ns, 1), _NS)  # zero would disarm the timer
        spec.interval_s, spec.interval_ns = divmod(interval_ns, _NS)
        _libc.timerfd_settime(self._fd, _TIMER_ABSTIME, self._spec_pointer, None)

    def close(self) -> None:
        """Release the descriptor."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _on_readable(self) -> None:
        with contextlib.suppress(BlockingIOError):  # re-armed between the wake-up and this read
            os.read(self._fd, 8)
        self._callback()


class LoopProbe:
    """Measures an event loop's lag: how late it serves a tick that is due every 10 ms."""

    INTERVAL_NS = 10_000_000

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = TimerFd(loop, self._tick)
        self.reset()

    def reset(self) -> None:
        """Start a new series."""
        self.lags_ns: list[int] = []
        self._cpu_ns = time.process_time_ns()
        self.start_ns = time.monotonic_ns()
        self._due_ns = self.start_ns + self.INTERVAL_NS
        self._timer.arm(self._due_ns, self.INTERVAL_NS)

    def values(self) -> dict[str, float]:
        """Return lag p99 and max in ms (0 before the first tick) and the process's CPU share."""
        lags = sorted(self.lags_ns) or [0]
        wall_ns = max(time.monotonic_ns() - self.start_ns, 1)
        return {
            "loop_lag_p99_ms": lags[min(len(lags) - 1, int(len(lags) * 0.99))] / 1e6,
            "loop_lag_max_ms": lags[-1] / 1e6,
            "cpu_share": (time.process_time_ns() - self._cpu_ns) / wall_ns,
        }

    def close(self) -> None:
        """Stop measuring."""
        self._timer.close()

    def _tick(self) -> None:
        late_ns = max(time.monotonic_ns() - self._due_ns, 0)
        # Every tick that a stuck loop missed counts, as late as it was: a hold-up of a second among
        # sixty is 1.7% of the samples.
        self.lags_ns += range(late_ns, -1, -self.INTERVAL_NS)
        self._due_ns += self.INTERVAL_NS * (1 + late_ns // self.INTERVAL_NS)

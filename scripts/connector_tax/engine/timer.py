"""A timer of the kernel's own resolution for an event loop.

uvloop's timers tick in milliseconds and may fire early; a timerfd is exact to some tens of
microseconds. Python has it in `os` from 3.13 on, so the C library is called here.
"""

import asyncio
import contextlib
import ctypes
import os
import time
from collections.abc import Callable

_TFD_TIMER_ABSTIME = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _TimeSpec), ("value", _TimeSpec))


class Timer:
    """Calls `callback` in the running loop once each time its deadline passes.

    Args:
        callback: called without arguments.

    Raises:
        OSError: the kernel gives no timer.
    """

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._descriptor = _LIBC.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._expired)
        self._deadline_ns: int | None = None

    def set(self, deadline_ns: int | None) -> None:
        """Expire at `deadline_ns` (CLOCK_MONOTONIC), at once if it has passed; None never."""
        if deadline_ns == self._deadline_ns:
            return
        self._deadline_ns = deadline_ns
        value = _TimeSpec(*divmod(deadline_ns or 0, 1_000_000_000))
        spec = _TimerSpec(_TimeSpec(0, 0), value)
        if _LIBC.timerfd_settime(self._descriptor, _TFD_TIMER_ABSTIME, ctypes.byref(spec), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def _expired(self) -> None:
        # A deadline that was moved after the wake-up leaves nothing to read.
        with contextlib.suppress(BlockingIOError):
            os.read(self._descriptor, 8)
            self._deadline_ns = None
            self._callback()

    def close(self) -> None:
        """Give the timer back; it will not call again."""
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)

"""Linux features that Python lacks: exact timers, time slices, death signals, CPU lists."""

import asyncio
import contextlib
import ctypes
import math
import os
import platform
import resource
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

# Schedulers send it to a job's processes, or to the first, some time before the job's time limit.
WARNING = signal.SIGUSR1
_PR_SET_PDEATHSIG = 1
_PR_SET_TIMERSLACK = 29
_CLOCK_MONOTONIC = 1
_TIMER_ABSTIME = 1
_NS = 1_000_000_000
# sched_setattr and sched_getattr, which glibc has only from 2.41 on.
_SYSCALLS = {"x86_64": (314, 315), "aarch64": (274, 275), "riscv64": (274, 275)}
_FAIR = (os.SCHED_OTHER, os.SCHED_BATCH)
# The calls take a microsecond, so the interpreter lock is kept. Loaded at import, because a forked
# process must not load libraries before it runs a program.
_libc = ctypes.PyDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def die_with_parent(parent: int | None = None) -> None:
    """Make the kernel kill this process when the thread that started it ends; a pre-exec hook.

    Args:
        parent: pid of the parent, to detect that it ended before this call.

    Raises:
        SystemExit: the parent has ended.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        sys.exit(f"parent process {parent} is gone")


def ignore_warning() -> None:
    """Ignore the signal WARNING in this process and its children; only a block's driver handles it.

    Exception: libuv (asyncio's subprocesses under uvloop) resets all signals of its children.
    """
    signal.signal(WARNING, signal.SIG_IGN)


@contextlib.contextmanager
def limited(memory_bytes: int, cpu_s: float, message: str, status: int) -> Iterator[None]:
    """Limit the memory and CPU time that this process may use inside the block.

    Earlier use does not count. More memory raises MemoryError; more CPU time ends the process.

    Args:
        message: printed at that end.
        status: the exit status at that end.
    """

    def give_up(*_: object) -> None:
        print(message, file=sys.stderr, flush=True)
        os._exit(status)

    pages = int(Path("/proc/self/statm").read_text().split()[5])
    most = {
        resource.RLIMIT_DATA: pages * resource.getpagesize() + memory_bytes,
        resource.RLIMIT_CPU: math.ceil(time.process_time() + cpu_s),
    }
    before = {kind: resource.getrlimit(kind) for kind in most}
    handler = signal.signal(signal.SIGXCPU, give_up)
    try:
        for kind, (_, hard) in before.items():
            unlimited = hard == resource.RLIM_INFINITY
            resource.setrlimit(kind, (most[kind] if unlimited else min(most[kind], hard), hard))
        yield
    finally:
        for kind, limits in before.items():
            resource.setrlimit(kind, limits)
        signal.signal(signal.SIGXCPU, handler)


def sharpen_timers() -> None:
    """Reduce the timer slack of this thread from the default 50 us to 1 ns."""
    _prctl(_PR_SET_TIMERSLACK, 1)


def run_when_idle(cpus: Collection[int]) -> None:
    """Run this process only when no other process wants the CPU, on `cpus` (empty: all)."""
    if cpus:
        os.sched_setaffinity(0, cpus)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


class _SchedAttr(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime_ns", ctypes.c_uint64),
        ("deadline_ns", ctypes.c_uint64),
        ("period_ns", ctypes.c_uint64),
    )


def set_time_slice(slice_ns: int) -> int:
    """Request slices of `slice_ns` (100 us to 100 ms) for this thread and those it starts.

    For a process with little work that must be done at once when it wakes. From Linux 6.12 on the
    fair scheduler supports a slice per task (sched_setattr(2), `sched_runtime`); a waking task with
    a shorter slice preempts the running one. Unlike a higher priority this gives it no larger share
    of the processor. Policy and nice value are kept; a thread that is not scheduled fairly, such as
    a real-time thread, has no slice.

    Returns:
        The slice in ns that the kernel stored; 0 if it has none, refuses to change it, or the
            system call is unknown.
    """
    calls = _SYSCALLS.get(platform.machine())
    policy = os.sched_getscheduler(0)
    if calls is None or policy not in _FAIR:
        return 0
    size = ctypes.sizeof(_SchedAttr)
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = _SchedAttr(size, policy, 0, nice, 0, slice_ns, 0, 0)
    if _libc.syscall(calls[0], 0, ctypes.byref(attributes), 0) != 0:
        return 0
    if _libc.syscall(calls[1], 0, ctypes.byref(attributes), size, 0) != 0:
        return 0
    return int(attributes.runtime_ns)


class _ITimerSpec(ctypes.Structure):
    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class TimerFd:
    """A timer that calls `callback` in `loop` once CLOCK_MONOTONIC has reached an armed time.

    Timers of uvloop and asyncio have millisecond steps (0.6 to 1.8 ms late; uvloop's can fire
    early). A timerfd is a high-resolution kernel timer that wakes the loop like a readable file.
    Python has it in `os` from 3.13 on. If the timer is re-armed just when the loop wakes up, the
    callback may be called once too often.
    """

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

    def disarm(self) -> None:
        """Stop firing until the timer is armed again."""
        spec = self._spec
        spec.value_s = spec.value_ns = 0
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


def parse_cpus(text: str) -> set[int]:
    """Parse a CPU list such as "0-3,8,10-11"; empty text is the empty set.

    Raises:
        ValueError: not a CPU list.
    """
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        try:
            numbers.update(range(int(first), int(last or first) + 1))
        except ValueError:
            raise ValueError(f"{text!r} is not a CPU list such as 0-3,8") from None
    return numbers


def format_cpus(cpus: tuple[int, ...]) -> str:
    """Return the kernel's short form of a CPU list."""
    parts: list[str] = []
    numbers = sorted(cpus)
    start = 0
    for i, cpu in enumerate(numbers):
        if i + 1 == len(numbers) or numbers[i + 1] != cpu + 1:
            parts.append(f"{cpu}" if cpu == numbers[start] else f"{numbers[start]}-{cpu}")
            start = i + 1
    return ",".join(parts)

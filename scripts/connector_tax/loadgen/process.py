"""This process: its memory, its collector, its event loop's lateness, its end with its parent."""

import asyncio
import contextlib
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from connector_tax.linux import TimerFd, signal_at_parents_end

# Not SIGTERM, which whoever ends a job sends to all of its processes.
PARENT_ENDED = signal.SIGRTMIN


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Keep Python's cyclic collector out of a run."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def peak_memory_mb() -> float:
    """Not getrusage, whose maximum begins with that of the process which started this one."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak_kb = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(peak_kb) / 1024


def die_with(parent: int, leave: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
    """Have the kernel signal this process when its parent ends; also watch the stdin pipe."""
    loop.add_signal_handler(PARENT_ENDED, leave)
    signal_at_parents_end(PARENT_ENDED)
    loop.add_reader(sys.stdin.fileno(), leave)
    if os.getppid() != parent:  # it ended before prctl took effect
        leave()


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

"""This process: its memory, its garbage collector, and its end with its parent."""

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from connector_tax.linux import signal_at_parents_end

# Not SIGTERM, which whoever ends a job sends to all of its processes.
PARENT_ENDED = signal.SIGRTMIN


class CollectorPause:
    """Keeps Python's cyclic collector out of a run."""

    def __enter__(self) -> None:
        self._was_enabled = gc.isenabled()
        gc.collect()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self._was_enabled:
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

"""How fast the machine is at this moment: the latency of its memory and the speed of a core.

What slows a CPU server down without any counter of the guest showing it are neighbours in the
memory system. They are seen by loading scattered elements of a working set of about the share a
core has of the last-level cache. Every cache line of the set is loaded once before one is loaded
again, so that what a sample finds in the cache is what others left there.

Samples are timed by the thread's CPU clock: while another thread has the core that clock stands
still, so being preempted by the load generator is not taken for slow memory. What stays of it is
the small caches being cold, which they are after every pause anyway. Measured on a busy guest
beside a process that burned the same core without a break: the median latency 94.6 against 89.7 ns
a load, the 90th percentile 110.8 against 112.7, with wall times of single samples up to 4 ms.
"""

import itertools
import time
from collections.abc import Iterator

import numpy as np

CACHE_LINE = 64
# Fits the first-level cache with room to spare; a few microseconds of arithmetic.
COMPUTE_ELEMENTS = 256


class Yardstick:
    """The arrays the samples need, made once: a sample allocates no memory.

    Args:
        working_set_mib: size of the memory that is loaded from.
        elements: loads of one sample.

    Raises:
        ValueError: the working set has fewer cache lines than a sample loads.
    """

    def __init__(self, working_set_mib: float, elements: int) -> None:
        per_line = CACHE_LINE // np.dtype(np.int64).itemsize
        lines = int(working_set_mib * 2**20) // CACHE_LINE
        if lines < elements:
            raise ValueError(
                f"a working set of {working_set_mib:g} MiB has {lines} cache lines, "
                f"fewer than the {elements} loads of a sample"
            )
        # Written, so that every page is there.
        self._memory = np.ones(lines * per_line, np.int64)
        order = np.random.default_rng(1).permutation(lines)[: lines // elements * elements]
        self._rows: Iterator[np.ndarray] = itertools.cycle(
            list((order * per_line).reshape(-1, elements))
        )
        self._loaded = np.zeros(elements, np.int64)
        self._angles = np.linspace(0.1, 2.0, COMPUTE_ELEMENTS)
        self._results = np.zeros(COMPUTE_ELEMENTS)

    def sample(self) -> tuple[int, int]:
        """Nanoseconds of CPU time that one sample's loads took, and its arithmetic."""
        row = next(self._rows)
        # Once untimed: the code and its operands are in the caches then.
        np.arctan2(self._angles, self._angles, out=self._results)
        started = time.thread_time_ns()
        # "clip" takes without a buffer in between.
        self._memory.take(row, out=self._loaded, mode="clip")
        loaded = time.thread_time_ns()
        np.arctan2(self._angles, self._angles, out=self._results)
        return loaded - started, time.thread_time_ns() - loaded

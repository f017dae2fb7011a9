"""The yardstick measures memory, and not who else wants its core."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest

from connector_tax.study.machine_watch import Yardstick

BURN = (
    "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nprint(flush=True)\nwhile 1: pass"
)


@pytest.fixture
def one_cpu() -> Iterator[int]:
    """This process on a single CPU, which is given."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield min(before)
    os.sched_setaffinity(0, before)


def series(yardstick: Yardstick, count: int) -> tuple[list[int], list[int]]:
    """CPU time of the loads by sample, and the wall time each sample took."""
    loads, wall = [], []
    for _ in range(count):
        time.sleep(0.002)
        started = time.monotonic_ns()
        loads.append(yardstick.sample()[0])
        wall.append(time.monotonic_ns() - started)
    return loads, wall


def test_being_preempted_is_not_slow_memory(one_cpu: int) -> None:
    # Long samples: the scheduler takes the core away within one.
    yardstick = Yardstick(32, 250_000)
    with subprocess.Popen(
        [sys.executable, "-c", BURN, str(one_cpu)], stdout=subprocess.PIPE
    ) as burner:
        assert burner.stdout is not None
        burner.stdout.readline()
        ratios: list[float] = []
        while len(ratios) < 100 and max(ratios, default=0) < 1.5:
            (loads,), (wall,) = series(yardstick, 1)
            ratios.append(wall / loads)
        burner.kill()
    # A sample that was preempted took a multiple of what it says by the wall clock.
    assert max(ratios) > 1.5


def test_scattered_loads_of_more_memory_than_the_caches_take_longer(one_cpu: int) -> None:
    assert one_cpu >= 0
    # 64 KiB fits the second-level cache of any core, 256 MiB no last-level cache it can share.
    small, large = Yardstick(1 / 16, 1000), Yardstick(256, 1000)
    for yardstick in (small, large):
        series(yardstick, 20)
    times = [[y.sample()[0] for y in (small, large)] for _ in range(200)]
    in_cache, in_memory = np.median(times, axis=0)
    assert in_memory > 2 * in_cache

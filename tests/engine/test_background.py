"""The background CPU tax takes its share of a core: never more, and less only of a busy one."""

import asyncio
import ctypes
import os
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from connector_tax.engine.connectors import BackgroundCpu

WINDOW_S = 1.0


@pytest.fixture
def one_core() -> Iterator[None]:
    """This process and its children share one core, so that one's CPU time is taken from both."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


def cpu_clock(pid: int) -> int:
    """The clock of a process's CPU time, for time.clock_gettime."""
    clock = ctypes.c_int()
    assert ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock)) == 0
    return clock.value


@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize("share", [0.1, 0.3])
def test_the_background_load_takes_its_share_of_a_core(share: float) -> None:
    async def measure() -> tuple[float, float, float]:
        load = BackgroundCpu(share)
        others = set(psutil.Process().children())
        await load.start()
        try:
            (child,) = set(psutil.Process().children()) - others
            clock = cpu_clock(child.pid)
            begin, own, burnt = time.monotonic(), time.process_time(), time.clock_gettime(clock)
            # This loop is the control: it takes all that the core grants beside the load.
            while True:
                spent = time.clock_gettime(clock) - burnt
                granted = spent + time.process_time() - own
                if granted >= WINDOW_S:
                    return spent, granted, time.monotonic() - begin
        finally:
            await load.stop()

    spent, granted, wall = asyncio.run(measure())
    assert spent <= 1.05 * share * wall
    # A core that other work or a hypervisor takes away grants the pair less than the wall time.
    assert spent >= 0.8 * share * granted


def test_a_load_that_does_not_begin_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="ended with status 1 before it began"):
        asyncio.run(BackgroundCpu(0.1).start())

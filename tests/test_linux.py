"""Test timers, time slices, death with the parent, CPU lists; lasting effects in a subprocess."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector_tax.linux import TimerFd, format_cpus, parse_cpus

ASK = """
import os, sys
os.setpriority(os.PRIO_PROCESS, 0, 19)
from connector_tax.linux import set_time_slice
print(set_time_slice(int(sys.argv[1])), os.getpriority(os.PRIO_PROCESS, 0))
"""


def ask(slice_ns: int) -> tuple[int, int]:
    command = [sys.executable, "-c", ASK, str(slice_ns)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    noted, nice = done.stdout.split()
    return int(noted), int(nice)


@pytest.mark.parametrize("policy", ["SCHED_FIFO", "SCHED_BATCH", "SCHED_IDLE"])
def test_nice_value_keeps_the_scheduling_policy(policy: str) -> None:
    code = (
        "import os\n"
        "from connector_tax.linux import set_time_slice\n"
        f"wanted = os.{policy}\n"
        "least = os.sched_param(os.sched_get_priority_min(wanted))\n"
        "os.sched_setscheduler(0, wanted, least)\n"
        "noted = set_time_slice(100_000)\n"
        "assert os.sched_getscheduler(0) == wanted, os.sched_getscheduler(0)\n"
        "assert noted == 0 or wanted == os.SCHED_BATCH, noted\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if "PermissionError" in done.stderr:
        pytest.skip(f"{policy} is not allowed here")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("slice_ns", [100_000, 700_000])
def test_kernel_reports_the_requested_slice_or_zero(slice_ns: int) -> None:
    noted, nice = ask(slice_ns)
    # Linux before 6.12 has no slices, and a sandbox may forbid the call: both give 0.
    assert noted in (slice_ns, 0)
    assert nice == 19


def fired(use: Callable[[TimerFd], None], times: int) -> list[int]:
    """Call `use` on a timer; return the delays since then of the next `times` callbacks, in ns."""

    async def wait() -> list[int]:
        called: asyncio.Queue[int] = asyncio.Queue()
        timer = TimerFd(asyncio.get_running_loop(), lambda: called.put_nowait(time.monotonic_ns()))
        try:
            started = time.monotonic_ns()
            use(timer)
            async with asyncio.timeout(5):
                return [await called.get() - started for _ in range(times)]
        finally:
            timer.close()

    return asyncio.run(wait())


def test_a_timer_fires_once_its_time_has_come_and_at_once_if_it_is_past() -> None:
    (late,) = fired(lambda timer: timer.arm(time.monotonic_ns() + 2_000_000), 1)
    assert late >= 2_000_000
    fired(lambda timer: timer.arm(0), 1)
    ticks = fired(lambda timer: timer.arm(time.monotonic_ns() + 1_000_000, 1_000_000), 3)
    assert ticks[2] >= 3_000_000


def test_a_timer_that_is_disarmed_does_not_fire_until_it_is_armed_again() -> None:
    def use(timer: TimerFd) -> None:
        timer.arm(1)
        timer.disarm()
        timer.arm(time.monotonic_ns() + 20_000_000)

    (late,) = fired(use, 1)
    assert late >= 20_000_000


def test_process_whose_parent_already_ended_exits() -> None:
    code = (
        f"from connector_tax.linux import die_with_parent; die_with_parent({os.getpid()}); print(1)"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert child.stdout == "1\n"
    orphan = subprocess.run(
        ["bash", "-c", f"{sys.executable} -c '{code}'; exit $?"], capture_output=True, text=True
    )
    assert orphan.returncode == 1
    assert orphan.stderr == f"parent process {os.getpid()} is gone\n"


@given(st.sets(st.integers(0, 300)))
def test_cpu_list_is_unchanged_after_formatting_and_parsing(cpus: set[int]) -> None:
    assert parse_cpus(format_cpus(tuple(cpus))) == cpus

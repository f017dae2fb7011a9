"""The worker's time slice: asked for in a process of its own, so that the tests keep theirs."""

import subprocess
import sys

import pytest

ASK = """
import os, sys
os.setpriority(os.PRIO_PROCESS, 0, 19)
from connector_tax.loadgen.timeslice import set_time_slice
print(set_time_slice(int(sys.argv[1])), os.getpriority(os.PRIO_PROCESS, 0))
"""


def ask(slice_ns: int) -> tuple[int, int]:
    command = [sys.executable, "-c", ASK, str(slice_ns)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    noted, nice = done.stdout.split()
    return int(noted), int(nice)


@pytest.mark.parametrize("policy", ["SCHED_FIFO", "SCHED_BATCH", "SCHED_IDLE"])
def test_the_scheduling_policy_is_kept(policy: str) -> None:
    code = (
        "import os\n"
        "from connector_tax.loadgen.timeslice import set_time_slice\n"
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
def test_the_kernel_notes_the_slice_or_says_that_it_has_none(slice_ns: int) -> None:
    noted, nice = ask(slice_ns)
    # Linux before 6.12 has no slices, and a sandbox may forbid the call: both are said by 0.
    assert noted in (slice_ns, 0)
    assert nice == 19

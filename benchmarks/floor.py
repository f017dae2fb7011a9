"""The machine's own lateness: one process that does nothing but wait for absolute deadlines.

It waits as the engine's step device does, on deadlines as far apart as the benchmark's steps, and
writes no byte: what it is late by is the machine's, and no server on that core can be earlier. Run
as `python -m benchmarks.floor CORE STEP_S SECONDS`; prints the latenesses in ns.
"""

import json
import os
import sys
import time

from connector_tax.linux import sharpen_timers

# A sleep ends some tens of microseconds late; the last stretch before a deadline is spun.
_SPIN_NS = 70_000


def wait_until(deadline_ns: int) -> int:
    """Return at `deadline_ns` (CLOCK_MONOTONIC), with the time it then is."""
    ahead = deadline_ns - time.monotonic_ns() - _SPIN_NS
    if ahead > 0:
        time.sleep(ahead / 1e9)
    while (now := time.monotonic_ns()) < deadline_ns:
        pass
    return now


def late_ns(step_ns: int, steps: int) -> list[int]:
    """How late each of `steps` deadlines was met; a stall makes every one it covers late."""
    late = []
    deadline = time.monotonic_ns()
    for _ in range(steps):
        deadline += step_ns
        late.append(wait_until(deadline) - deadline)
    return late


if __name__ == "__main__":
    os.sched_setaffinity(0, {int(sys.argv[1])})
    sharpen_timers()
    step_s, seconds = float(sys.argv[2]), float(sys.argv[3])
    json.dump(late_ns(round(step_s * 1e9), round(seconds / step_s)), sys.stdout)

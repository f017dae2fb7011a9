"""The cap on the requests in flight holds over all workers, whenever they fire."""

import subprocess
import sys

import pytest

from connector_tax.loadgen.transport import InFlight, shared_memory

# Takes and leaves every place as fast as it can; prints the most it counted while it held them
# all. With fewer the others move, and a sum is not of one instant.
CONTENDER = """
import sys
from connector_tax.loadgen.transport import InFlight
descriptor, workers, worker, cap = map(int, sys.argv[1:])
inflight = InFlight(descriptor, workers)
print("up", flush=True)
sys.stdin.readline()
most = 0
for _ in range(20_000):
    held = 0
    while held < cap and inflight.enter(worker):
        held += 1
    if held == cap:
        most = max(most, inflight.count())
    for _ in range(held):
        inflight.leave(worker)
print(most)
"""


@pytest.mark.parametrize("cap", [1, 3])
def test_workers_that_enter_at_once_never_exceed_the_cap(cap: int) -> None:
    workers = 4
    descriptor = shared_memory(workers)
    inflight = InFlight(descriptor, workers)
    inflight.limit(cap)
    contenders = [
        subprocess.Popen(
            [sys.executable, "-c", CONTENDER, *map(str, (descriptor, workers, worker, cap))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=(descriptor,),
        )
        for worker in range(workers)
    ]
    for contender in contenders:
        assert contender.stdout is not None
        assert contender.stdout.readline() == "up\n"
    for contender in contenders:
        assert contender.stdin is not None
        contender.stdin.write("go\n")
        contender.stdin.flush()
    assert max(int(contender.communicate()[0]) for contender in contenders) == cap
    assert inflight.count() == 0
    assert [inflight.enter(0) for _ in range(cap + 1)] == [*[True] * cap, False]


def test_the_places_of_a_worker_that_died_are_free_again() -> None:
    inflight = InFlight(shared_memory(2), 2)
    inflight.limit(3)
    assert [inflight.enter(worker) for worker in (0, 0, 1, 1)] == [True, True, True, False]
    inflight.forget_worker(0)
    assert inflight.count() == 1
    assert [inflight.enter(1) for _ in range(3)] == [True, True, False]


def test_a_new_limit_counts_what_is_still_in_flight() -> None:
    inflight = InFlight(shared_memory(1), 1)
    inflight.limit(0)
    assert all(inflight.enter(0) for _ in range(1000))
    for _ in range(998):
        inflight.leave(0)
    inflight.limit(3)
    assert [inflight.enter(0) for _ in range(2)] == [True, False]

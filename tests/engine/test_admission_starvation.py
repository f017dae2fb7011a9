"""No request is passed for ever: whatever the slots, the periods and the KV pool do."""

from itertools import count

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from connector_tax.engine.scheduler import Scheduler, SchedulerOptions, Sequence

LONG = 515
SHORT = 4
BLOCK = 16
MODEL_LEN = 1024


def passed_by(
    *, slots: int, every: int, decode: int | None, output: int, batch: int | None, blocks: int
) -> int:
    """How many of an endless queue of short requests start before a long one ahead of them.

    Returns -1 if the long one has not started after 1,500 steps.
    """
    options = SchedulerOptions(
        max_num_batched_tokens=8192,
        max_num_seqs=slots,
        max_decode_seqs_per_step=decode,
        kv_blocks=blocks,
        kv_block_size=BLOCK,
        enable_prefix_caching=False,
        prefill_admission_policy="pack",
        prefill_force_fifo_every=every,
        prefill_max_tokens=256,
        prefill_max_batch_size=batch,
    )
    scheduler = Scheduler(options, MODEL_LEN)
    arrivals = count()
    # The slots are taken when the long one comes.
    for _ in range(slots):
        scheduler.add(Sequence(next(arrivals), SHORT, output, []))
    scheduler.commit(scheduler.plan())
    long = Sequence(next(arrivals), LONG, output, [])
    scheduler.add(long)
    passed = 0
    for _ in range(1500):
        while len(scheduler.waiting) < 32:
            scheduler.add(Sequence(next(arrivals), SHORT, output, []))
        plan = scheduler.plan()
        if long in plan.admitted:
            return passed
        passed += sum(sequence.arrival > long.arrival for sequence in plan.admitted)
        scheduler.commit(plan)
    return -1


ROOM = 64 * 70  # KV blocks for any of these loads


def test_rounds_without_a_free_slot_do_not_use_up_the_forced_ones() -> None:
    # A slot is free in every second step only; each forced round would fall on the other.
    assert 0 <= passed_by(slots=8, every=2, decode=8, output=2, batch=None, blocks=ROOM) <= 64


@settings(max_examples=60, deadline=None)
@given(
    slots=st.integers(1, 48),
    every=st.integers(1, 12),
    decode=st.none() | st.integers(1, 16),
    output=st.integers(1, 12),
    batch=st.none() | st.integers(1, 16),
)
@example(slots=128, every=8, decode=8, output=32, batch=8)
def test_a_long_request_is_passed_a_bounded_number_of_times(
    slots: int, every: int, decode: int | None, output: int, batch: int | None
) -> None:
    passed = passed_by(
        slots=slots, every=every, decode=decode, output=output, batch=batch, blocks=ROOM
    )
    # Between two forced rounds there are `every - 1` others, each of at most a budget's worth.
    assert 0 <= passed <= every * min(slots, batch or slots, 256 // SHORT)


@settings(max_examples=60, deadline=None)
@given(
    slots=st.integers(36, 60),
    every=st.integers(1, 12),
    decode=st.integers(4, 8),
    output=st.integers(1, 12),
    spare=st.integers(0, 8),
)
@example(slots=48, every=8, decode=4, output=8, spare=0)
def test_a_forced_round_that_finds_no_blocks_stays_due(
    slots: int, every: int, decode: int, output: int, spare: int
) -> None:
    # The long one needs half the pool, and the short ones leave at different times.
    blocks = MODEL_LEN // BLOCK + spare
    passed = passed_by(
        slots=slots, every=every, decode=decode, output=output, batch=None, blocks=blocks
    )
    assert 0 <= passed <= every * min(slots, 256 // SHORT)


@pytest.mark.parametrize("every", [1, 2, 8])
def test_the_head_goes_first_when_its_turn_is_due(every: int) -> None:
    assert passed_by(slots=1, every=every, decode=None, output=1, batch=None, blocks=ROOM) < every

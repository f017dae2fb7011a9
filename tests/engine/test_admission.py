"""Prefill admission: order, budget, progress, fairness."""

import itertools
from collections import deque
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from connector_tax.engine.scheduler import (
    Admission,
    AdmissionOptions,
    Scheduler,
    SchedulerOptions,
    Sequence,
    put_back,
)

CONTEXT = 1024


def prompts(*lengths: int) -> deque[Sequence]:
    return deque(Sequence(i, n, 1, []) for i, n in enumerate(lengths))


PACK: dict[str, Any] = {"prefill_admission_policy": "pack", "prefill_admission_lookahead": 16}


@pytest.mark.parametrize(
    ("lengths", "budget", "options", "rounds"),
    [
        pytest.param((2, 3, 4, 1), 6, {}, [[0, 1], [2, 3]], id="fifo stops at what does not fit"),
        pytest.param((100, 1, 1), 4, {}, [[0], [1, 2]], id="fifo takes an oversized head alone"),
        pytest.param((900, 900, 900), None, {}, [[0, 1, 2]], id="fifo without a budget takes all"),
        pytest.param((100, 2, 2), 4, PACK, [[1, 2], [0]], id="pack passes an oversized head"),
        pytest.param((100, 100), 4, PACK, [[0], [1]], id="pack takes one where all are oversized"),
        pytest.param((5, 3, 4, 1, 2), 6, PACK, [[1, 3, 4], [2], [0]], id="pack takes the cheapest"),
        pytest.param((5, 3, 1), None, PACK, [[0, 1, 2]], id="pack without a budget is fifo"),
        pytest.param(
            (4, 4, 1, 1),
            4,
            {**PACK, "prefill_admission_lookahead": 2},
            [[0], [2], [3], [1]],
            id="pack looks no further than its window",
        ),
        pytest.param(
            (5000, 1), CONTEXT + 1, {}, [[0, 1]], id="beyond the context counts as the context"
        ),
    ],
)
def test_the_rounds_of_a_policy(
    lengths: tuple[int, ...], budget: int | None, options: dict[str, Any], rounds: list[list[int]]
) -> None:
    admission = Admission(AdmissionOptions(prefill_max_tokens=budget, **options), CONTEXT)
    waiting = prompts(*lengths)
    taken = []
    while waiting:
        taken.append([p.arrival for p in admission.take(waiting, 8)])
    assert taken == rounds


def test_every_nth_round_is_fifo() -> None:
    options = AdmissionOptions("pack", 16, 3, 4)
    admission = Admission(options, CONTEXT)
    waiting = prompts(100, 4, 4, 4, 4)
    rounds = [[p.arrival for p in admission.take(waiting, 8)] for _ in range(3)]
    assert rounds == [[1], [2], [0]]


def test_put_back_restores_the_order_of_arrival() -> None:
    waiting = prompts(1, 1, 1, 1, 1)
    taken = [waiting[0], waiting[2], waiting[4]]
    for prompt in taken:
        waiting.remove(prompt)
    put_back(waiting, taken)
    assert [p.arrival for p in waiting] == [0, 1, 2, 3, 4]


OPTIONS = st.builds(
    AdmissionOptions,
    prefill_admission_policy=st.sampled_from(["fifo", "pack"]),
    prefill_admission_lookahead=st.integers(1, 12),
    prefill_force_fifo_every=st.integers(0, 5),
    prefill_max_tokens=st.none() | st.integers(1, 60),
    prefill_max_batch_size=st.none() | st.integers(1, 6),
)
LENGTHS = st.lists(st.integers(1, 80), max_size=40)


@given(OPTIONS, LENGTHS, st.integers(1, 10))
def test_nothing_lost_nothing_doubled_order_kept_budget_held(
    options: AdmissionOptions, lengths: list[int], max_reqs: int
) -> None:
    admission = Admission(options, CONTEXT)
    waiting = prompts(*lengths)
    admitted: list[int] = []
    while waiting:
        before = len(waiting)
        head = waiting[0].arrival
        taken = admission.take(waiting, max_reqs)
        # Progress in every round, and no more than asked for.
        assert 1 <= len(taken) <= min(max_reqs, options.prefill_max_batch_size or max_reqs)
        assert len(waiting) == before - len(taken)
        order = [p.arrival for p in taken]
        assert order == sorted(order)
        assert [p.arrival for p in waiting] == sorted(p.arrival for p in waiting)
        if options.prefill_max_tokens is not None:
            cost = sum(p.prefill_len for p in taken)
            assert cost <= options.prefill_max_tokens or order == [head]
        admitted += order
    assert sorted(admitted) == list(range(len(lengths)))


@given(st.integers(1, 6), st.lists(st.lists(st.integers(1, 30), max_size=3), max_size=60))
def test_no_one_starves_while_some_rounds_are_fifo(every: int, later: list[list[int]]) -> None:
    admission = Admission(AdmissionOptions("pack", 8, every, 10), CONTEXT)
    waiting = prompts(500, 500)
    rounds_at_the_head = 0
    count = 2
    for lengths in later:
        for n in lengths:
            waiting.append(Sequence(count, n, 1, []))
            count += 1
        if not waiting:
            continue
        head = waiting[0]
        taken = admission.take(waiting, 4)
        rounds_at_the_head = 0 if head in taken else rounds_at_the_head + 1
        assert rounds_at_the_head < every


# ---- no request is passed for ever, whatever the slots, the periods and the KV pool do

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
    arrivals = itertools.count()
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


@settings(max_examples=60, deadline=None)
@given(
    slots=st.integers(1, 48),
    every=st.integers(1, 12),
    decode=st.none() | st.integers(1, 16),
    output=st.integers(1, 12),
    batch=st.none() | st.integers(1, 16),
)
@example(slots=128, every=8, decode=8, output=32, batch=8)
# A slot is free in every second step only; each forced round would fall on the other.
@example(slots=8, every=2, decode=8, output=2, batch=None)
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

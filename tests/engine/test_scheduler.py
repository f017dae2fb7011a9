"""Test continuous batching: admission, step limits, KV blocks, preemption, prefix cache."""

import itertools
from collections import deque
from collections.abc import Sequence as Seq
from typing import Any, Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from connector_tax.engine.kv import BlockPool, Holding, block_digests
from connector_tax.engine.scheduler import (
    Admission,
    AdmissionOptions,
    Scheduler,
    SchedulerOptions,
    Sequence,
    put_back,
)

MAX_LEN = 64
BLOCK = 4


def options(**changes: Any) -> SchedulerOptions:
    values: dict[str, Any] = {
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "max_decode_seqs_per_step": None,
        "kv_blocks": 64,
        "kv_block_size": BLOCK,
        "enable_prefix_caching": True,
        "decode_first": True,
    }
    return SchedulerOptions(**{**values, **changes})


def sequence(arrival: int, prompt_len: int, output_len: int, text: bytes = b"") -> Sequence:
    prompt = (text or bytes([arrival % 256])) * prompt_len
    return Sequence(arrival, prompt_len, output_len, block_digests(prompt[:prompt_len], 1, BLOCK))


def step(scheduler: Scheduler) -> list[int]:
    """Run one step; return the arrivals that got a token."""
    return [s.arrival for s in scheduler.commit(scheduler.plan())]


def test_long_prompt_is_prefilled_in_chunks() -> None:
    scheduler = Scheduler(options(max_num_batched_tokens=8), MAX_LEN)
    scheduler.add(sequence(0, 20, 2))
    chunks = []
    while scheduler.has_work:
        plan = scheduler.plan()
        chunks.append((plan.prefill_tokens, plan.decode_seqs, plan.kv_tokens))
        scheduler.commit(plan)
    assert chunks == [(8, 0, 0), (8, 0, 0), (4, 0, 0), (0, 1, 20)]


def test_decodes_and_prefill_share_a_step() -> None:
    scheduler = Scheduler(options(max_num_batched_tokens=10), MAX_LEN)
    scheduler.add(sequence(0, 4, 5))
    step(scheduler)
    scheduler.add(sequence(1, 20, 1))
    plan = scheduler.plan()
    assert (plan.decode_seqs, plan.prefill_tokens) == (1, 9)


@pytest.mark.parametrize(("decode_first", "prefill"), [(True, 3), (False, 4)])
def test_decode_first_lets_decodes_use_the_last_tokens_of_a_step(
    decode_first: bool, prefill: int
) -> None:
    scheduler = Scheduler(options(max_num_batched_tokens=4, decode_first=decode_first), MAX_LEN)
    scheduler.add(sequence(0, 4, 5))
    step(scheduler)
    scheduler.add(sequence(1, 8, 1))
    assert scheduler.plan().prefill_tokens == prefill


def test_decodes_alternate_under_a_token_limit() -> None:
    scheduler = Scheduler(options(max_decode_seqs_per_step=2), MAX_LEN)
    for arrival in range(3):
        scheduler.add(sequence(arrival, 1, 9))
    step(scheduler)
    assert [step(scheduler) for _ in range(3)] == [[0, 1], [2, 0], [1, 2]]


def test_at_most_max_num_seqs_sequences_run() -> None:
    scheduler = Scheduler(options(max_num_seqs=2), MAX_LEN)
    for arrival in range(3):
        scheduler.add(sequence(arrival, 4, 2))
    step(scheduler)
    assert (scheduler.running, len(scheduler.waiting)) == (2, 1)
    assert step(scheduler) == [0, 1]
    assert step(scheduler) == [2]


def test_latest_arrival_is_preempted_and_resumes() -> None:
    scheduler = Scheduler(options(kv_blocks=16), MAX_LEN)
    first, second = sequence(0, 28, 20), sequence(1, 28, 20)
    scheduler.add(first)
    scheduler.add(second)
    tokens: dict[int, int] = {0: 0, 1: 0}
    while scheduler.has_work:
        for arrival in step(scheduler):
            tokens[arrival] += 1
    assert tokens == {0: 20, 1: 20}
    assert (first.preemptions, second.preemptions > 0) == (0, True)
    assert scheduler.preemptions == second.preemptions


def test_repeated_prompt_hits_the_prefix_cache_except_its_last_token() -> None:
    scheduler = Scheduler(options(), MAX_LEN)
    for arrival in range(2):
        scheduler.add(sequence(arrival, 16, 1, b"same"))
        plan = scheduler.plan()
        assert plan.prefill_tokens == (16 if arrival == 0 else 4)
        scheduler.commit(plan)
    assert (scheduler.prefix_queries, scheduler.prefix_hits) == (32, 12)


def test_different_prompts_never_hit_the_prefix_cache() -> None:
    scheduler = Scheduler(options(), MAX_LEN)
    for arrival in range(20):
        scheduler.add(sequence(arrival, 16, 2))
        while scheduler.has_work:
            step(scheduler)
    assert scheduler.prefix_hits == 0
    assert scheduler.pool.cached > 0


def test_a_pool_smaller_than_one_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="kv_blocks: found 15; allowed: at least 16"):
        Scheduler(options(kv_blocks=15), MAX_LEN)


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 24)), min_size=1, max_size=25),
    st.integers(1, 40),
    st.integers(1, 6),
    st.none() | st.integers(1, 4),
    st.integers(16, 40),
    st.booleans(),
    st.sampled_from(["fifo", "pack"]),
    st.none() | st.integers(4, 60),
    st.sets(st.integers(0, 24)),
    st.sampled_from([b"", b"a", b"ab"]),
)
@settings(max_examples=300)
def test_every_request_gets_its_number_of_tokens_within_the_limits(
    shapes: Seq[tuple[int, int]],
    budget: int,
    seqs: int,
    decodes: int | None,
    blocks: int,
    decode_first: bool,
    policy: Literal["fifo", "pack"],
    prefill_budget: int | None,
    aborted: set[int],
    text: bytes,
) -> None:
    scheduler = Scheduler(
        options(
            max_num_batched_tokens=budget,
            max_num_seqs=seqs,
            max_decode_seqs_per_step=decodes,
            kv_blocks=blocks,
            prefill_admission_policy=policy,
            prefill_admission_lookahead=4,
            prefill_force_fifo_every=3,
            prefill_max_tokens=prefill_budget,
            decode_first=decode_first,
        ),
        MAX_LEN,
    )
    sequences = [sequence(i, p, o, text) for i, (p, o) in enumerate(shapes)]
    tokens = dict.fromkeys(range(len(shapes)), 0)
    steps = 0
    pending = list(sequences)
    while scheduler.has_work or pending:
        if pending:
            scheduler.add(pending.pop(0))
        plan = scheduler.plan()
        assert sum(plan.tokens.values()) <= budget
        assert scheduler.running <= seqs
        if decodes is not None:
            assert plan.decode_seqs <= decodes
        for victim in list(plan.tokens):
            if victim.arrival in aborted and steps % 2:
                scheduler.abort(victim)
        for emitted in scheduler.commit(plan):
            tokens[emitted.arrival] += 1
        held = sum(s.holding.uncached for s in sequences)
        assert scheduler.pool.available + held <= blocks
        steps += 1
        assert steps < 20_000
    for s in sequences:
        assert s.aborted or tokens[s.arrival] == s.output_len
        assert s.holding.blocks == 0
    # Every block is free again.
    assert scheduler.pool.available == blocks


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), max_size=60))
def test_pool_allocates_no_block_twice(moves: list[tuple[int, int]]) -> None:
    pool = BlockPool(20, BLOCK, prefix_caching=True)
    holdings = [Holding() for _ in range(4)]
    for who, tokens in moves:
        holding = holdings[who]
        if holding.blocks and tokens % 3 == 0:
            pool.release(holding)
        elif pool.grow(holding, tokens) and tokens % 2:
            pool.publish(holding, block_digests(bytes([who]) * tokens, 1, BLOCK))
        shared = {digest for h in holdings for digest in h.shared}
        in_use = sum(h.uncached for h in holdings) + len(shared)
        assert pool.available + in_use == pool.total
    for holding in holdings:
        pool.release(holding)
    assert pool.available == pool.total


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
def test_admission_policy_gives_the_expected_rounds(
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
def test_admission_takes_each_prompt_once_in_order_within_the_budget(
    options: AdmissionOptions, lengths: list[int], max_reqs: int
) -> None:
    admission = Admission(options, CONTEXT)
    waiting = prompts(*lengths)
    admitted: list[int] = []
    while waiting:
        before = len(waiting)
        head = waiting[0].arrival
        taken = admission.take(waiting, max_reqs)
        # Every round takes at least one request and at most the requested number.
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


# ---- no request is passed for ever, whatever the slots, the periods and the KV pool do

LONG = 515
SHORT = 4
KV_BLOCK = 16
MODEL_LEN = 1024


def passed_by(
    *, slots: int, every: int, decode: int | None, output: int, batch: int | None, blocks: int
) -> int:
    """Return how many short requests of an endless queue start before a long one at its head.

    Returns -1 if the long one has not started after 1,500 steps.
    """
    options = SchedulerOptions(
        max_num_batched_tokens=8192,
        max_num_seqs=slots,
        max_decode_seqs_per_step=decode,
        kv_blocks=blocks,
        kv_block_size=KV_BLOCK,
        enable_prefix_caching=False,
        prefill_admission_policy="pack",
        prefill_force_fifo_every=every,
        prefill_max_tokens=256,
        prefill_max_batch_size=batch,
    )
    scheduler = Scheduler(options, MODEL_LEN)
    arrivals = itertools.count()
    # The slots are taken when the long request arrives.
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
# A slot is free only in every second step, and forced rounds could always miss these steps.
@example(slots=8, every=2, decode=8, output=2, batch=None)
def test_long_request_is_overtaken_a_bounded_number_of_times(
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
def test_fifo_round_without_free_blocks_stays_due(
    slots: int, every: int, decode: int, output: int, spare: int
) -> None:
    # The long one needs half the pool, and the short ones leave at different times.
    blocks = MODEL_LEN // KV_BLOCK + spare
    passed = passed_by(
        slots=slots, every=every, decode=decode, output=output, batch=None, blocks=blocks
    )
    assert 0 <= passed <= every * min(slots, 256 // SHORT)

"""Prefill admission: order, budget, progress, fairness."""

from collections import deque
from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from connector_tax.engine.admission import Admission, AdmissionOptions, put_back

CONTEXT = 1024


@dataclass(frozen=True)
class Prompt:
    arrival: int
    prefill_len: int


def prompts(*lengths: int) -> deque[Prompt]:
    return deque(Prompt(i, n) for i, n in enumerate(lengths))


def take(waiting: deque[Prompt], max_reqs: int = 8, **options: Any) -> list[int]:
    admission = Admission(AdmissionOptions(**options), CONTEXT)
    return [p.arrival for p in admission.take(waiting, max_reqs)]


PACK: dict[str, Any] = {"prefill_admission_policy": "pack", "prefill_admission_lookahead": 16}


def test_fifo_stops_at_the_first_that_does_not_fit() -> None:
    waiting = prompts(2, 3, 4, 1)
    assert take(waiting, prefill_max_tokens=6) == [0, 1]
    assert [p.arrival for p in waiting] == [2, 3]


def test_fifo_takes_an_oversized_head_alone() -> None:
    waiting = prompts(100, 1, 1)
    assert take(waiting, prefill_max_tokens=4) == [0]
    assert take(waiting, prefill_max_tokens=4) == [1, 2]


def test_fifo_without_a_budget_takes_all_it_may() -> None:
    assert take(prompts(900, 900, 900), max_reqs=2) == [0, 1]


def test_pack_passes_an_oversized_head() -> None:
    waiting = prompts(100, 2, 2)
    assert take(waiting, prefill_max_tokens=4, **PACK) == [1, 2]
    assert [p.arrival for p in waiting] == [0]


def test_pack_takes_the_head_when_all_are_oversized() -> None:
    waiting = prompts(100, 100)
    assert take(waiting, prefill_max_tokens=4, **PACK) == [0]
    assert [p.arrival for p in waiting] == [1]


def test_pack_takes_the_cheapest_and_gives_them_in_order_of_arrival() -> None:
    waiting = prompts(5, 3, 4, 1, 2)
    assert take(waiting, prefill_max_tokens=6, **PACK) == [1, 3, 4]
    assert [p.arrival for p in waiting] == [0, 2]


def test_pack_looks_no_further_than_its_window() -> None:
    options = {**PACK, "prefill_admission_lookahead": 2}
    assert take(prompts(4, 4, 1, 1), prefill_max_tokens=4, **options) == [0]


def test_pack_without_a_budget_is_fifo() -> None:
    assert take(prompts(5, 3, 1), max_reqs=2, **PACK) == [0, 1]


def test_a_prompt_beyond_the_context_counts_as_the_context() -> None:
    assert take(prompts(5000, 1), prefill_max_tokens=CONTEXT + 1) == [0, 1]


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
            waiting.append(Prompt(count, n))
            count += 1
        if not waiting:
            continue
        head = waiting[0]
        taken = admission.take(waiting, 4)
        rounds_at_the_head = 0 if head in taken else rounds_at_the_head + 1
        assert rounds_at_the_head < every

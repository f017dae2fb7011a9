"""A cell that goes on until enough of its successes may be counted."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from connector_tax.loadgen import (
    LoadGenerator,
    LoadGeneratorOptions,
    Plan,
    Target,
    make_offsets,
    open_loop,
)
from connector_tax.loadgen.precision import PrecisionRule
from tests.loadgen.fault_server import FaultServer, Pause, good_answer
from tests.loadgen.running import planned, rule
from tests.loadgen.test_cell import REQUEST
from tests.loadgen.test_precision import play, ranks

Spans = Sequence[tuple[int, int]]
WANTED = 50
RATE = 50


def simulate(
    may_count: Callable[[Spans], Sequence[bool]], precision: PrecisionRule | None = None
) -> Plan:
    """A cell on a virtual clock, every answer after 20 ms."""
    cell_rule = rule(warmup_s=0.5, floor_s=1.0, cap_s=8.0, min_completed=WANTED)
    offsets = make_offsets("fixed", RATE, 8.5, "unused")
    load = open_loop(offsets, [REQUEST] * len(offsets), cell_rule)
    cell = Plan(load, cell_rule, precision, may_count)
    return play(
        cell, lambda record: (record.t_intended_ns + 10**7, record.t_intended_ns + 2 * 10**7)
    )


def measured_s(cell: Plan) -> float:
    assert cell.stop_ns is not None
    return (cell.stop_ns - cell.warmup_end_ns) / 1e9


def test_it_goes_on_until_enough_may_be_counted() -> None:
    everything = simulate(lambda spans: [True] * len(spans))
    half = simulate(lambda spans: [k % 2 == 0 for k in range(len(spans))])
    # 50 at 50 a second; a look comes four times a second.
    assert 1.0 <= measured_s(everything) <= 1.4
    assert 2.0 <= measured_s(half) <= 2.4


def test_what_was_counted_may_be_taken_back() -> None:
    begun = 1_000_000_000 + 500_000_000

    def late_level(spans: Spans) -> list[bool]:
        # The first second counts until something later shows that it was disturbed.
        over = bool(spans) and spans[-1][0] > begun + 900_000_000
        return [not over or due > begun + 1_000_000_000 for due, _ in spans]

    assert 2.0 <= measured_s(simulate(late_level)) <= 2.6


def test_it_ends_at_the_cap_when_nothing_counts() -> None:
    assert measured_s(simulate(lambda spans: [False] * len(spans))) == 8.0


def test_the_precision_is_that_of_what_counts() -> None:
    precision = PrecisionRule(1e9, ranks)
    cell = simulate(lambda spans: [k % 2 == 0 for k in range(len(spans))], precision)
    assert cell.precise is not None
    assert WANTED <= cell.precise.n <= cell.measured_ok / 2 + 1


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_real_cell_asks_for_every_measured_success(share: float) -> None:
    answer = good_answer()
    cut = len(answer) * 2 // 3
    asked: list[Spans] = []

    def may_count(spans: Spans) -> list[bool]:
        asked.append(spans)
        return [k < share * len(spans) for k in range(len(spans))]

    cell_rule = rule(warmup_s=0.1, floor_s=0.3, cap_s=8.0, min_completed=40)
    offsets = make_offsets("fixed", 80, 8.1, "1/counting")
    with (
        FaultServer({"good": [answer[:cut], Pause(0.01), answer[cut:]]}) as server,
        LoadGenerator(Target("127.0.0.1", server.port), LoadGeneratorOptions()) as generator,
    ):
        requests = [planned("good")] * len(offsets)
        result = generator.run_cell(offsets, requests, cell_rule, None, None, may_count)
    lives = [(r.t_intended_ns, r.t_last_token_ns) for r in result.records if not r.warmup]
    assert 40 / share <= len(lives) < len(offsets) - 8
    assert set(asked[-1]) <= set(lives)
    assert np.all(np.diff([len(spans) for spans in asked]) >= 0)

"""A cell that stops at a precision: within its bounds, by what it saw, each time the same."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector_tax.analysis.percentiles import quantile
from connector_tax.loadgen import (
    CellRule,
    LoadGenerator,
    LoadGeneratorOptions,
    Plan,
    PrecisionRule,
    Target,
    make_offsets,
    open_loop,
)
from connector_tax.loadgen.messages import RequestRecord
from connector_tax.loadgen.plan import LEAD_NS
from connector_tax.loadgen.rule import relative_half_width
from connector_tax.ranks import order_statistic_ranks
from connector_tax.seeds import named_generator
from tests.loadgen.fault_server import FaultServer, Pause, good_answer
from tests.loadgen.running import planned, rule
from tests.loadgen.test_cell import REQUEST

LOOK_NS = 250_000_000
TOKENS = 9


def ranks(n: int) -> tuple[int | None, int | None]:
    return order_statistic_ranks(n, 90, 0.95)


def play(cell: Plan, answer: Callable[[RequestRecord], tuple[int, int]]) -> Plan:
    """Run a cell on a virtual clock, a look every 250 ms.

    `answer` gives the times of a request's first and last token in ns.
    """
    now_ns, next_look_ns = 1_000_000_000, 1_000_000_000 + LOOK_NS
    cell.start(now_ns)
    running: list[RequestRecord] = []
    while True:
        for done in [d for d in running if (d.t_done_ns or 0) <= now_ns]:
            running.remove(done)
            cell.take(done)
        while next_look_ns <= now_ns:
            cell.look()
            next_look_ns += LOOK_NS
        items, next_ns = cell.step(now_ns, now_ns + LEAD_NS)
        for item in items:
            assert isinstance(item, tuple)
            record = item[0]
            record.t_first_token_ns, record.t_last_token_ns = answer(record)
            record.t_done_ns, record.completion_tokens = record.t_last_token_ns, TOKENS
            running.append(record)
        if next_ns is None:
            return cell
        now_ns = max(now_ns + 1, next_ns - LEAD_NS)


def simulate(
    rate: float, cell_rule: CellRule, target: float | None, sigma: float, seed: int
) -> Plan:
    """A cell whose TTFT and TPOT are lognormal."""
    offsets = make_offsets("fixed", rate, cell_rule.schedule_s, "unused")
    precision = None if target is None else PrecisionRule(target, ranks)
    rng = named_generator(f"{seed}/precision")
    ttft = np.exp(rng.normal(np.log(2e7), sigma, len(offsets))).astype(int)
    tpot = np.exp(rng.normal(np.log(1e6), sigma, len(offsets))).astype(int)

    def answer(record: RequestRecord) -> tuple[int, int]:
        first_ns = record.t_intended_ns + int(ttft[record.seq])
        return first_ns, first_ns + int(tpot[record.seq]) * (TOKENS - 1)

    load = open_loop(offsets, [REQUEST] * len(offsets), cell_rule)
    return play(Plan(load, cell_rule, precision), answer)


@given(
    rate=st.floats(20, 100),
    warmup_s=st.floats(0, 1),
    floor_s=st.floats(0.1, 3),
    more_s=st.floats(0, 5),
    count=st.integers(36, 200),
    target=st.floats(0.001, 0.5),
    sigma=st.floats(0.01, 1),
    seed=st.integers(0, 5),
)
def test_it_stops_by_its_rule_within_its_bounds_and_again_at_the_same_moment(
    rate: float,
    warmup_s: float,
    floor_s: float,
    more_s: float,
    count: int,
    target: float,
    sigma: float,
    seed: int,
) -> None:
    cell_rule = rule(
        warmup_s=warmup_s, floor_s=floor_s, cap_s=floor_s + more_s, min_completed=count
    )
    cell = simulate(rate, cell_rule, target, sigma, seed)
    cap_ns = cell.warmup_end_ns + round(cell_rule.cap_s * 1e9)
    assert cell.stop_ns is not None
    assert cell.floor_ns <= cell.stop_ns <= cap_ns
    if cell.precise is None:
        assert cell.stop_ns == cap_ns
    else:
        assert cell.measured_ok >= cell.precise.n >= count
        assert all(w is not None and w <= target for w in cell.precise[1:])
    again = simulate(rate, cell_rule, target, sigma, seed)
    assert (again.stop_ns, again.precise) == (cell.stop_ns, cell.precise)
    # Without the rule the cell stops on its count alone, and never later.
    by_count = simulate(rate, cell_rule, None, sigma, seed)
    assert by_count.stop_ns is not None
    assert by_count.stop_ns <= cell.stop_ns
    assert by_count.precise is None


def test_a_noisier_server_is_measured_longer() -> None:
    cell_rule = rule(floor_s=1.0, cap_s=120.0, min_completed=50)
    stops = []
    for sigma in (0.05, 0.3, 0.6):
        cell = simulate(20, cell_rule, 0.05, sigma, seed=1)
        assert cell.stop_ns is not None
        stops.append(cell.stop_ns - cell.warmup_end_ns)
    assert stops[0] < stops[1] < stops[2]
    assert stops[2] < 120e9


@given(st.lists(st.floats(0.001, 1e6), min_size=1, max_size=400))
def test_the_half_width_is_that_of_the_analysis(values: list[float]) -> None:
    width = relative_half_width(sorted(values), ranks)
    wanted = quantile(np.array(values), 90, 0.95)
    if width is None:
        assert wanted.lo is None or wanted.hi is None
    elif wanted.lo is not None and wanted.hi is not None and wanted.value is not None:
        # The analysis widens the interval of a tiny sample to hold its percentile.
        ends = (wanted.hi - wanted.lo) / (2 * wanted.value)
        assert width <= ends + 1e-9
        if len(values) >= 50:
            assert width == pytest.approx(ends, rel=1e-9, abs=1e-12)


def test_all_tokens_in_one_read_are_no_precision() -> None:
    assert relative_half_width([0.0] * 100, ranks) is None


def test_a_real_cell_stops_at_its_target() -> None:
    answer = good_answer()
    half = len(answer) * 2 // 3
    with (
        FaultServer({"good": [answer[:half], Pause(0.01), answer[half:]]}) as server,
        LoadGenerator(Target("127.0.0.1", server.port), LoadGeneratorOptions()) as generator,
    ):
        cell_rule = rule(warmup_s=0.1, floor_s=0.3, cap_s=8.0, min_completed=40)
        offsets = make_offsets("fixed", 80, 8.1, "1/precision")
        requests = [planned("good")] * len(offsets)
        # A target that every sample of 40 reaches: what is tested is that it is looked at.
        wide = PrecisionRule(1e9, ranks)
        result = generator.run_cell(offsets, requests, cell_rule, None, wide)
        narrow = PrecisionRule(1e-9, ranks)
        short = rule(warmup_s=0.1, floor_s=0.3, cap_s=1.0, min_completed=40)
        until = offsets[offsets < 1.1e9]
        capped = generator.run_cell(until, requests[: len(until)], short, None, narrow)
    measured = [r for r in result.records if r.measured]
    assert result.precise is not None
    assert 40 <= result.precise.n <= len(measured)
    assert result.t_stop_ns - result.t_warmup_end_ns < 8e9
    assert capped.precise is None
    assert capped.t_stop_ns - capped.t_warmup_end_ns == 1_000_000_000

"""Test plans under the rule that ends a cell: windows, ramps, precision."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector_tax.analysis.measure import quantile
from connector_tax.loadgen.generator import LoadGenerator, LoadGeneratorOptions
from connector_tax.loadgen.messages import RequestRecord, Target
from connector_tax.loadgen.plan import (
    LEAD_NS,
    CellRule,
    Plan,
    PrecisionRule,
    Progress,
    open_loop,
    relative_half_width,
)
from connector_tax.loadgen.sessions import (
    AHEAD,
    History,
    LookAhead,
    Node,
    Parent,
    PlannedRequest,
    Session,
    Singles,
)
from connector_tax.loadgen.traffic import Load, make_offsets
from connector_tax.seeds import named_generator
from tests.loadgen.fault_server import FaultServer, Hang, Pause, Step, good_answer
from tests.loadgen.running import ORIGIN_NS, loading, planned, play, rule, run_scripts

ONE = Node("0", "", 1)


def build(session: int, node: int, _history: History) -> PlannedRequest:
    return PlannedRequest(f"{session}/{node}", b"{}", None, None)


def rules(
    longest_floor_s: float, enough: st.SearchStrategy[int], **others: Any
) -> st.SearchStrategy[CellRule]:
    """Return rules with a cap of at most five seconds beyond the floor."""

    def made(floor_s: float, more_s: float, **changes: Any) -> CellRule:
        return rule(floor_s=floor_s, cap_s=floor_s + more_s, **changes)

    window = {"floor_s": st.floats(0.1, longest_floor_s), "more_s": st.floats(0, 5)}
    return st.builds(made, **window, warmup_s=st.floats(0, 2), min_completed=enough, **others)


@given(
    concurrency=st.integers(1, 8),
    cell_rule=rules(2, st.integers(0, 100), cooldown=st.booleans()),
    rampup_s=st.floats(0, 2),
    service_ms=st.integers(20, 300),
)
def test_closed_loop_keeps_its_load_until_the_stopping_rule_ends_it(
    concurrency: int, cell_rule: CellRule, rampup_s: float, service_ms: int
) -> None:
    load = Load(Singles(10_000, ONE), build, concurrency=concurrency, rampup_s=rampup_s)
    plan = play(load, cell_rule, lambda r: service_ms * (1 + r.seq % 3) / 1000)
    assert plan.stop_ns is not None
    cap_ns = plan.warmup_end_ns + round(cell_rule.cap_s * 1e9)
    assert plan.floor_ns <= plan.stop_ns <= cap_ns
    assert plan.stop_ns == cap_ns or plan.measured_ok >= cell_rule.min_completed
    records = plan.requests()
    spans = [(r.t_intended_ns, r.t_done_ns or 0) for r in records]
    for due_ns, _ in spans:
        at_once = sum(begin <= due_ns < done for begin, done in spans)
        assert at_once <= concurrency
        # The load is kept up until every measured request is answered, with a cool-down.
        if due_ns > ORIGIN_NS + rampup_s * 1e9 + 1e9 and due_ns < plan.stop_ns:
            assert at_once == concurrency
    after = [r for r in records if r.cooldown]
    if not cell_rule.cooldown:
        assert all(r.t_intended_ns < plan.stop_ns for r in records)
    assert [r.measured for r in after] == [False] * len(after)


def test_run_ends_with_its_last_session() -> None:
    plan = play(
        Load(Singles(10, ONE), build, concurrency=2), rule(floor_s=60.0, cap_s=60.0), lambda _: 0.1
    )
    assert plan.stop_ns is not None
    assert (plan.stop_ns - ORIGIN_NS) / 1e9 == pytest.approx(0.5, abs=0.05)
    assert plan.measured_ok == 10


def test_window_lasts_its_full_length_after_the_last_arrival() -> None:
    """Check the window's length: a window that ends with the last answer gives too high a rate."""
    load = Load(Singles(2, ONE), build, np.array([0, 10**8]), horizon_s=1.0)
    plan = play(load, rule(floor_s=1.0, cap_s=1.0), lambda _: 0.01)
    assert plan.stop_ns == ORIGIN_NS + 10**9


def test_sessions_continue_in_cool_down_until_measured_requests_are_answered() -> None:
    chain = [Node("n0", "p", 1)]
    chain += [Node(f"n{k}", "p", 1, 0.0, (Parent(f"n{k - 1}"),)) for k in range(1, 6)]
    sessions = [Session("long", tuple(chain)), Session("slow", (Node("a", "p", 1),))]
    plan = play(
        Load(sessions, build, concurrency=2),
        rule(floor_s=0.5, cap_s=0.5, drain_s=60.0),
        lambda r: 1.0 if r.seq == 1 else 0.3,
    )
    assert plan.cooldown_ended_by == "answered"
    entries = plan.requests()
    assert [entry.node for entry in entries] == ["n0", "a", "n1", "n2", "n3", "n4", "n5"]
    assert [entry.cooldown for entry in entries] == [False] * 3 + [True] * 4
    assert [entry.error_kind for entry in entries] == [None] * 5 + ["run_ended"] * 2


@pytest.mark.parametrize("cooldown", [True, False])
def test_closed_loop_over_sockets_follows_the_stopping_rule(cooldown: bool) -> None:
    cell_rule = rule(warmup_s=0.3, floor_s=0.3, cap_s=5.0, min_completed=40, cooldown=cooldown)
    # Some take longer, so that they do not all end together: one is open when the window ends.
    scripts: dict[str, list[Step]] = {
        "good": [Pause(0.05), good_answer()],
        "slow": [Pause(0.35), good_answer()],
    }
    load = Load(
        Singles(10_000, ONE),
        lambda session, *_: planned("good" if session % 4 else "slow"),
        concurrency=4,
    )
    with (
        FaultServer(scripts) as server,
        LoadGenerator(Target("127.0.0.1", server.port), LoadGeneratorOptions()) as generator,
    ):
        seen: list[Progress] = []
        result = generator.run(load, cell_rule, seen.append)
        arrived = len(server.requests)
    assert arrived == len(result.records) == seen[-1].issued
    assert max(glance.issued - glance.ok for glance in seen) <= 4  # waiting requests are not sent
    measured = [r for r in result.records if r.measured]
    assert 40 <= sum(r.status == "ok" for r in measured) <= 100  # some 250 up to the cap
    assert any(r.warmup for r in result.records)
    assert any(r.cooldown for r in result.records) == cooldown
    assert result.cooldown_ended_by == ("answered" if cooldown else "off")
    for record in result.records:
        assert (record.inflight_at_send or 0) < 4


def test_request_bodies_are_built_once_and_a_bounded_number_ahead() -> None:
    made: list[int] = []

    def count(session: int, _node: int, _history: History) -> PlannedRequest:
        made.append(session)
        return build(session, 0, ())

    ahead = LookAhead(Singles(3 * AHEAD, ONE), count)
    while ahead.make_one():
        pass
    assert made == list(range(AHEAD))
    for session in range(3 * AHEAD):
        assert ahead.take(session, 0, ()).request_id == f"{session}/0"
        ahead.make_one()
        assert len(made) <= session + 1 + AHEAD
    assert made == list(range(3 * AHEAD))
    assert not ahead.make_one()


REQUEST = PlannedRequest("r", b"{}", 1, 1)


@given(
    rate=st.floats(1, 200),
    cell_rule=rules(4, st.integers(0, 400)),
    service_s=st.floats(0.001, 2),
    fail_every=st.integers(0, 3),
    seed=st.integers(0, 5),
)
def test_window_ends_by_floor_cap_and_minimum_of_completed_requests(
    rate: float, cell_rule: CellRule, service_s: float, fail_every: int, seed: int
) -> None:
    enough = cell_rule.min_completed
    offsets = make_offsets("poisson", rate, cell_rule.schedule_s, f"{seed}/w")

    def service(record: RequestRecord) -> float:
        if fail_every and record.seq % fail_every == 0:
            record.fail("http_status")
        return service_s

    try:
        load = open_loop(offsets, [REQUEST] * len(offsets), cell_rule)
        cell = play(load, cell_rule, service)
    except ValueError:  # too few arrivals for a schedule
        assert len(offsets) < 12
        return
    assert cell.stop_ns is not None
    cap_ns = cell.warmup_end_ns + round(cell_rule.cap_s * 1e9)
    assert cell.floor_ns <= cell.stop_ns <= cap_ns
    records = cell.requests()
    # Exactly the requests due before the end of arrivals, each once.
    due = offsets + cell.origin_ns
    assert cell.cooldown_end_ns >= cell.stop_ns
    assert [r.t_intended_ns for r in records] == due[due < cell.cooldown_end_ns].tolist()
    assert [r.seq for r in records] == list(range(len(records)))
    assert all(r.warmup == (r.t_intended_ns < cell.warmup_end_ns) for r in records)
    assert all(r.cooldown == (r.t_intended_ns >= cell.stop_ns) for r in records)
    assert cell.ok + cell.failed + cell.dropped == len(records)
    measured = [r for r in records if r.measured]
    assert cell.measured_ok == sum(r.status == "ok" for r in measured)
    # Arrivals continue until the window's last request is answered, and not much longer.
    answered_ns = max((r.t_done_ns or 0 for r in measured), default=0)
    unsent = due[due >= cell.cooldown_end_ns]
    if cell.cooldown_ended_by == "answered":
        assert cell.cooldown_end_ns <= max(cell.stop_ns, answered_ns + LEAD_NS + 10_000_001)
        assert len(unsent) == 0 or unsent[0] > answered_ns
    else:
        assert cell.cooldown_ended_by == "schedule"
        assert len(unsent) == 0
    done = sorted(r.t_done_ns or 0 for r in measured if r.status == "ok")
    # The window ends when enough have succeeded, up to the lead and one check interval of 10 ms.
    reached_ns = done[enough - 1] if 0 < enough <= len(done) else None
    if enough == 0 or (reached_ns is not None and reached_ns <= cell.floor_ns - LEAD_NS):
        assert cell.stop_ns == cell.floor_ns
    elif reached_ns is None or reached_ns >= cap_ns:
        assert cell.stop_ns == cap_ns
    else:
        late_ns = cell.stop_ns - max(cell.floor_ns, reached_ns)
        assert 0 <= late_ns <= LEAD_NS + 10_000_001 or cell.stop_ns == cap_ns


@pytest.mark.parametrize(
    ("offsets", "count", "named"),
    [
        ([0, 10, 5], 3, "ascending"),
        ([-1, 10], 2, "not negative"),
        ([], 0, "empty"),
        ([0, 10_000_000, 20_000_000], 3, r"must reach warmup_s \+ cap_s = 1.000 s"),
    ],
)
def test_offsets_that_do_not_fit_requests_or_window_are_refused(
    offsets: list[int], count: int, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        open_loop(np.array(offsets, np.int64), [REQUEST] * count, rule())


def test_error_for_too_few_requests_is_raised_when_the_first_missing_request_is_built() -> None:
    load = open_loop(np.arange(10) * 100_000_000, [REQUEST] * 2, rule())
    assert [load.build(k, 0, ()) for k in range(2)] == [REQUEST] * 2
    with pytest.raises(ValueError, match="10 offsets for 2 requests"):
        load.build(2, 0, ())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"cap_s": 0.5}, "cap_s 0.5 is below floor_s"),
        ({"inflight_cap": 0}, "inflight_cap"),
        ({"warmup_s": -1.0}, "warmup_s"),
        ({"request_timeout_s": 0.0}, "request_timeout_s"),
        ({"drain_s": float("nan")}, "drain_s"),
    ],
)
def test_contradictory_stopping_rule_is_refused(changes: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        replace(rule(), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [1, 2])
def test_requests_due_beyond_the_inflight_cap_are_dropped_and_recorded(workers: int) -> None:
    options = LoadGeneratorOptions(workers=workers, connections_per_worker=16)
    with (
        FaultServer({"slow": [Pause(0.4), good_answer()]}) as server,
        LoadGenerator(Target("127.0.0.1", server.port), options) as generator,
    ):
        result = run_scripts(generator, ["slow"] * 50, inflight_cap=4)
        arrived = len(server.requests)
    sent = [r for r in result.records if r.t_send_ns is not None]
    dropped = [r for r in result.records if r.status == "dropped"]
    assert len(sent) + len(dropped) == 50
    assert len(sent) == arrived
    assert {r.status for r in sent} == {"ok"}
    assert {r.error_kind for r in dropped} == {"inflight_cap"}
    assert len(sent) == 12  # four at a time, every 0.4 s
    assert max(r.inflight_at_send or 0 for r in sent) == 3


def test_read_stamps_are_kept_only_if_requested() -> None:
    with loading({"good": [good_answer()]}, keep_reads=False) as generator:
        result = run_scripts(generator, ["good"] * 3, floor_s=0.2, cap_s=0.2)
    assert {r.reads for r in result.records} == {None}


def test_request_without_a_free_connection_waits_and_delays_no_other() -> None:
    with loading({"good": [good_answer()], "hang": [Hang]}, connections_per_worker=2) as generator:
        scripts = ["hang", *["good"] * 20, "hang", *["good"] * 20]
        result = run_scripts(generator, scripts, request_timeout_s=1.3, floor_s=2.0, cap_s=2.0)
    by_kind = [r.error_kind for r in result.records]
    assert by_kind.count("request_timeout") == 2
    # The second hanging request takes the last connection; time-outs free both connections.
    assert by_kind[1:21] == [None] * 20
    assert by_kind[22:] == [None] * 20
    assert result.health["processes"]["worker0"]["pool_waits"] > 0


TOKENS = 9


def noisy(
    rate: float, cell_rule: CellRule, target: float | None, sigma: float, seed: int
) -> tuple[Plan, PrecisionRule | None]:
    """Return a cell whose TTFT and TPOT are lognormal."""
    offsets = make_offsets("fixed", rate, cell_rule.schedule_s, "unused")
    precision = None if target is None else PrecisionRule(target)
    rng = named_generator(f"{seed}/precision")
    ttft = np.exp(rng.normal(np.log(2e7), sigma, len(offsets))).astype(int)
    tpot = np.exp(rng.normal(np.log(1e6), sigma, len(offsets))).astype(int)

    def service(record: RequestRecord) -> float:
        record.t_first_token_ns = record.t_intended_ns + int(ttft[record.seq])
        record.completion_tokens = TOKENS
        return (int(ttft[record.seq]) + int(tpot[record.seq]) * (TOKENS - 1)) / 1e9

    load = open_loop(offsets, [REQUEST] * len(offsets), cell_rule)
    return play(load, cell_rule, service, precision), precision


@given(
    rate=st.floats(20, 100),
    cell_rule=rules(3, st.integers(36, 200)),
    target=st.floats(0.001, 0.5),
    sigma=st.floats(0.01, 1),
    seed=st.integers(0, 5),
)
def test_precision_rule_stops_between_floor_and_cap_at_a_repeatable_time(
    rate: float, cell_rule: CellRule, target: float, sigma: float, seed: int
) -> None:
    cell, precision = noisy(rate, cell_rule, target, sigma, seed)
    assert precision is not None
    cap_ns = cell.warmup_end_ns + round(cell_rule.cap_s * 1e9)
    assert cell.stop_ns is not None
    assert cell.floor_ns <= cell.stop_ns <= cap_ns
    n, half_width = precision.seen
    if cell.stop_ns < cap_ns:
        assert cell.measured_ok >= n >= cell_rule.min_completed
        assert half_width <= target
    again, precision = noisy(rate, cell_rule, target, sigma, seed)
    assert precision is not None
    assert (again.stop_ns, precision.seen) == (cell.stop_ns, (n, half_width))
    # Without the rule the cell stops on its count alone, and never later.
    by_count, _ = noisy(rate, cell_rule, None, sigma, seed)
    assert by_count.stop_ns is not None
    assert by_count.stop_ns <= cell.stop_ns


@given(st.lists(st.floats(0.001, 1e6), min_size=1, max_size=400))
def test_half_width_equals_the_analysis_interval(values: list[float]) -> None:
    width = relative_half_width(sorted(values))
    wanted = quantile(np.array(values), 90, 0.95)
    if math.isinf(width):
        assert wanted.lo is None or wanted.hi is None
    elif wanted.lo is not None and wanted.hi is not None and wanted.value is not None:
        # The analysis widens the interval of a tiny sample to hold its percentile.
        ends = (wanted.hi - wanted.lo) / (2 * wanted.value)
        assert width <= ends + 1e-9
        if len(values) >= 50:
            assert width == pytest.approx(ends, rel=1e-9, abs=1e-12)


def test_half_width_is_infinite_when_all_latencies_are_zero() -> None:
    assert relative_half_width([0.0] * 100) == math.inf

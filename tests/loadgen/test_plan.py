"""One plan for every traffic: closed loop, ramps and sessions under the rule that ends a cell."""

import heapq
import math
from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector_tax.loadgen import (
    CellRule,
    LoadGenerator,
    LoadGeneratorOptions,
    Plan,
    PlannedRequest,
    RandomPrompts,
    RandomTokens,
    Target,
    open_loop,
)
from connector_tax.loadgen.messages import WAITS, RequestRecord, Window
from connector_tax.loadgen.plan import LEAD_NS
from connector_tax.loadgen.sessions import AHEAD, History, LookAhead, Node, Parent, Session, Singles
from connector_tax.loadgen.traffic import Load
from tests.loadgen.fault_server import FaultServer, Pause, Step, good_answer
from tests.loadgen.running import planned, rule

ORIGIN_NS = 1_000_000_000
ONE = Node("0", "", 1)


def build(session: int, node: int, _history: History) -> PlannedRequest:
    return PlannedRequest(f"{session}/{node}", b"{}", None, None)


def play(load: Load, cell_rule: CellRule, service_s: Callable[[int], float]) -> Plan:
    """Run a plan on a virtual clock to its end; request `seq` takes `service_s(seq)`."""
    plan = Plan(load, cell_rule)
    now_ns = ORIGIN_NS - LEAD_NS
    plan.start(ORIGIN_NS)
    running: list[tuple[int, int, RequestRecord]] = []
    waiting: deque[RequestRecord] = deque()
    free_ns: deque[int] = deque()
    closes_ns = [math.inf]

    def send(record: RequestRecord, sent_ns: int) -> None:
        record.t_done_ns = sent_ns + round(service_s(record.seq) * 1e9)
        record.t_last_token_ns = record.t_done_ns
        heapq.heappush(running, (record.t_done_ns, record.seq, record))

    def take_places() -> None:
        """What a worker does with the places of a closed loop."""
        while waiting and free_ns and free_ns[0] < closes_ns[0]:
            record = waiting.popleft()
            record.t_intended_ns = free_ns.popleft()
            send(record, record.t_intended_ns)

    def end(until_ns: float) -> None:
        while running and running[0][0] <= until_ns:
            end_ns, _, record = heapq.heappop(running)
            plan.take(record)
            free_ns.append(end_ns)
            take_places()

    while True:
        end(now_ns)
        items, next_ns = plan.step(now_ns, now_ns + LEAD_NS)
        for item in items:
            if isinstance(item, Window):
                if item.goes_on:
                    due = {record.seq: record.t_intended_ns for _, _, record in running}
                    plan.take_unanswered([s for s, due_ns in due.items() if due_ns < item.stop_ns])
                else:
                    closes_ns[0] = item.stop_ns
                continue
            assert isinstance(item, tuple)
            record = item[0]
            if record.t_intended_ns == WAITS:
                waiting.append(record)
                continue
            assert record.t_intended_ns <= now_ns + LEAD_NS, "handed out before its lead"
            send(record, max(now_ns, record.t_intended_ns))
        take_places()
        if next_ns is None:
            end(np.inf)
            for record in waiting:
                plan.take(record)
            assert plan.outstanding == 0
            return plan
        assert next_ns > now_ns, "the plan would be asked in a tight loop"
        wake_ns = next_ns - LEAD_NS
        if plan.wakes_on_result and running:
            wake_ns = min(wake_ns, running[0][0])
        now_ns = max(now_ns + 1, wake_ns)


@given(
    concurrency=st.integers(1, 8),
    warmup_s=st.floats(0, 1),
    floor_s=st.floats(0.1, 2),
    more_s=st.floats(0, 3),
    enough=st.integers(0, 100),
    rampup_s=st.floats(0, 2),
    cooldown=st.booleans(),
    service_ms=st.integers(20, 300),
)
def test_a_closed_loop_ends_by_the_same_rule_and_keeps_its_load_until_then(
    concurrency: int,
    warmup_s: float,
    floor_s: float,
    more_s: float,
    enough: int,
    rampup_s: float,
    cooldown: bool,
    service_ms: int,
) -> None:
    cell_rule = rule(
        warmup_s=warmup_s, floor_s=floor_s, cap_s=floor_s + more_s, min_completed=enough,
        cooldown=cooldown,
    )  # fmt: skip
    load = Load(Singles(10_000, ONE), build, concurrency=concurrency, rampup_s=rampup_s)
    plan = play(load, cell_rule, lambda seq: service_ms * (1 + seq % 3) / 1000)
    assert plan.stop_ns is not None
    cap_ns = plan.warmup_end_ns + round(cell_rule.cap_s * 1e9)
    assert plan.floor_ns <= plan.stop_ns <= cap_ns
    assert plan.stop_ns == cap_ns or plan.measured_ok >= enough
    records = plan.requests()
    spans = [(r.t_intended_ns, r.t_done_ns or 0) for r in records]
    for due_ns, _ in spans:
        at_once = sum(begin <= due_ns < done for begin, done in spans)
        assert at_once <= concurrency
        # The load is kept up until every measured request is answered, with a cool-down.
        if due_ns > ORIGIN_NS + rampup_s * 1e9 + 1e9 and due_ns < plan.stop_ns:
            assert at_once == concurrency
    after = [r for r in records if r.cooldown]
    if not cooldown:
        assert all(r.t_intended_ns < plan.stop_ns for r in records)
    assert [r.measured for r in after] == [False] * len(after)


def test_a_run_ends_when_all_sessions_are_over() -> None:
    plan = play(
        Load(Singles(10, ONE), build, concurrency=2),
        rule(floor_s=60.0, cap_s=60.0),
        lambda _seq: 0.1,
    )
    assert plan.stop_ns is not None
    assert (plan.stop_ns - ORIGIN_NS) / 1e9 == pytest.approx(0.5, abs=0.05)
    assert plan.measured_ok == 10


def test_a_schedule_that_has_no_arrival_left_is_measured_to_its_end() -> None:
    """Not to the last answer: the rate would be too high."""
    load = Load(Singles(2, ONE), build, np.array([0, 10**8]), horizon_s=1.0)
    plan = play(load, rule(floor_s=1.0, cap_s=1.0), lambda _seq: 0.01)
    assert plan.stop_ns == ORIGIN_NS + 10**9


def test_sessions_go_on_in_the_cool_down_until_what_was_measured_is_answered() -> None:
    chain = [Node("n0", "p", 1)]
    chain += [Node(f"n{k}", "p", 1, 0.0, (Parent(f"n{k - 1}"),)) for k in range(1, 6)]
    sessions = [Session("long", tuple(chain)), Session("slow", (Node("a", "p", 1),))]
    plan = play(
        Load(sessions, build, concurrency=2),
        rule(floor_s=0.5, cap_s=0.5, drain_s=60.0),
        lambda seq: 1.0 if seq == 1 else 0.3,
    )
    assert plan.cooldown_ended_by == "answered"
    entries = plan.requests()
    assert [(e.node, e.cooldown, e.error_kind) for e in entries] == [
        ("n0", False, None),
        ("a", False, None),
        ("n1", False, None),
        ("n2", True, None),
        ("n3", True, None),
        ("n4", True, "run_ended"),
        ("n5", True, "run_ended"),
    ]


@pytest.mark.parametrize("cooldown", [True, False])
def test_a_closed_loop_really_runs_by_the_rule(cooldown: bool) -> None:
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
        result = generator.run(load, cell_rule)
        arrived = len(server.requests)
    assert arrived == len(result.records)
    measured = [r for r in result.records if r.measured]
    assert 40 <= sum(r.status == "ok" for r in measured) <= 100  # of some 250 until the cap
    assert any(r.warmup for r in result.records)
    assert any(r.cooldown for r in result.records) == cooldown
    assert result.cooldown_ended_by == ("answered" if cooldown else "off")
    for record in result.records:
        assert (record.inflight_at_send or 0) < 4


def test_bodies_are_made_ahead_in_bounded_number_and_each_once() -> None:
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


def test_random_prompts_are_the_same_every_time_and_fresh_in_each_request() -> None:
    made = partial(RandomTokens, "1/p", 8, 10, 1000)
    prompts = RandomPrompts("n", 50, made, False, {"model": "m"}, {"max_tokens": 3}, 8, 3)
    first, second = list(prompts), list(prompts)
    assert first == second
    assert len({request.body for request in first}) == len(prompts) == 50
    assert first[3].body.startswith(b'{"model":"m","prompt":[')
    assert first[3].request_id == "n/3"


@pytest.mark.parametrize("end_overloaded", [False, True])
def test_a_drop_ends_an_overloaded_cell_at_once_where_asked(end_overloaded: bool) -> None:
    limits = CellRule(1.0, 2.0, 10, 30.0, 30.0, 1, 60.0, end_overloaded=end_overloaded)
    offsets = (np.arange(0, limits.schedule_s, 0.1) * 1e9).astype(np.int64)
    requests = [PlannedRequest("r", b"{}", 1, 1)] * len(offsets)
    plan = Plan(open_loop(offsets, requests, limits), limits)
    plan.start(0)
    items, _ = plan.step(0, 500_000_000)
    assert len(items) == 6
    # Dropped in the warm-up: the cell lasts until the first measured moment, and ends there.
    record = items[1][0]  # type: ignore[index]
    record.fail("inflight_cap")
    plan.take(record)
    assert plan.step(900_000_000, 950_000_000)[1] is not None
    _, next_ns = plan.step(1_200_000_000, 1_200_000_000)
    if not end_overloaded:
        assert next_ns is not None
        assert plan.stop_ns is None
        return
    assert next_ns is None
    assert plan.cooldown_ended_by == "overloaded"
    assert plan.stop_ns == 1_200_000_000
    assert plan.drain_s == 0.0

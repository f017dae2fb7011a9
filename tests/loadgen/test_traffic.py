"""Test open- and closed-loop traffic over session graphs, on a virtual clock."""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from connector_tax.loadgen.sessions import Node, Parent, Session, Singles
from connector_tax.loadgen.traffic import (
    ArrivalKind,
    OpenSingles,
    Ready,
    SessionScheduler,
    at_places,
    at_starts,
    make_offsets,
)

S = 1_000_000_000


@dataclass
class Log:
    """The events of a simulated run."""

    sent: list[Ready] = field(default_factory=list)
    ended: dict[tuple[int, int], tuple[int, str]] = field(default_factory=dict)
    given_up: set[tuple[int, int]] = field(default_factory=set)
    active: list[tuple[int, int]] = field(default_factory=list)  # (time, sessions)


def simulate(
    scheduler: SessionScheduler,
    service_ns: Callable[[int, int], int],
    failing: set[tuple[int, int]],
    lead_ns: int,
) -> Log:
    """Run the traffic to its end: each request takes its service time, or until it is cancelled."""
    log = Log()
    now = 0
    running: list[tuple[int, int, int]] = []
    cancelled: set[tuple[int, int]] = set()
    while not scheduler.finished:
        for ready in scheduler.pop_ready(now, now + lead_ns):
            assert ready.due_ns <= now + lead_ns
            log.sent.append(ready)
            # Requests are handed out ahead, so sessions that start within the lead count as active.
            log.active.append((now + lead_ns, scheduler.active))
            end = ready.due_ns + service_ns(ready.session, ready.node_index)
            heapq.heappush(running, (end, ready.session, ready.node_index))
        times = [running[0][0]] if running else []
        due = scheduler.next_ns(now)
        if due is not None:
            times.append(max(due - lead_ns, now))
        assert times, "nothing to wait for, yet not finished: the run would hang"
        now = max(now, min(times))
        while running and running[0][0] <= now:
            end, session, node = heapq.heappop(running)
            key = (session, node)
            how = "cancelled" if key in cancelled else "failed" if key in failing else "ok"
            log.ended[key] = (end, how)
            output = f"<{session}.{node}>" if how == "ok" else None
            outcome = scheduler.complete(session, node, end, output)
            log.given_up |= {(session, i) for i in outcome.given_up}
            for i in outcome.cancel:
                cancelled.add((session, i))
                running = [
                    (end, s, n) if (s, n) == (session, i) else (e, s, n) for e, s, n in running
                ]
            heapq.heapify(running)
    return log


def service_times(seed: int) -> Callable[[int, int], int]:
    """Return deterministic service times between 1 ms and 3 s, different per request."""
    return lambda session, node: (
        1_000_000 + (seed * 7919 + session * 104_729 + node * 1_299_709) % 3000 * 1_000_000
    )


@st.composite
def session_lists(draw: st.DrawFn) -> list[Session]:
    """Return random sessions: up to 6 nodes, each with any earlier nodes as parents."""
    sessions = []
    for s in range(draw(st.integers(1, 12))):
        nodes: list[Node] = []
        for n in range(draw(st.integers(1, 6))):
            chosen = draw(st.lists(st.integers(0, n - 1), unique=True, max_size=3)) if n else []
            parents = tuple(Parent(f"n{p}", draw(st.booleans())) for p in chosen)
            wait = draw(st.sampled_from([0.0, 0.1, 1.5]))
            nodes.append(Node(f"n{n}", f"p{n}", 4, wait, parents))
        sessions.append(Session(f"s{s}", tuple(nodes)))
    return sessions


def check(sessions: list[Session], log: Log, started: int, cancel: bool) -> None:
    sent = {(ready.session, ready.node_index): ready for ready in log.sent}
    assert len(sent) == len(log.sent), "a request was sent twice"
    # sent = ok + failed + cancelled, and every other request of a started session was given up.
    assert set(sent) == set(log.ended)
    everything = {(s, n) for s in range(started) for n in range(len(sessions[s].nodes))}
    assert set(sent) | log.given_up == everything
    assert set(sent).isdisjoint(log.given_up)
    for (s, _), ready in sent.items():
        ends = []
        for parent in ready.node.parents:
            index = next(i for i, n in enumerate(sessions[s].nodes) if n.id == parent.node)
            end, how = log.ended[s, index]
            ends.append(end)
            assert how == "ok" or not cancel, "sent although its session had failed"
            inherited = {turn.node for turn in ready.history}
            if parent.history:
                assert (parent.node in inherited) == (how == "ok")
        if ends:
            assert ready.due_ns == max(ends) + round(ready.node.wait_after_ready_s * S)
        assert len({turn.node for turn in ready.history}) == len(ready.history)
        for turn in ready.history:
            index = int(turn.node[1:])
            assert turn.output == f"<{s}.{index}>"
    if not cancel:
        assert not log.given_up
        assert "cancelled" not in {how for _, how in log.ended.values()}


RUN: Any = {
    "sessions": session_lists(),
    "seed": st.integers(0, 100),
    "failing": st.sets(st.tuples(st.integers(0, 11), st.integers(0, 5)), max_size=8),
    "cancel": st.booleans(),
    "lead_ns": st.sampled_from([0, 20_000_000]),
}


@given(**RUN, gaps=st.lists(st.integers(0, 2 * S), min_size=12, max_size=12))
def test_rate_traffic_keeps_its_invariants(
    sessions: list[Session],
    gaps: list[int],
    seed: int,
    failing: set[tuple[int, int]],
    cancel: bool,
    lead_ns: int,
) -> None:
    starts = [sum(gaps[: k + 1]) for k in range(len(sessions))]
    scheduler = SessionScheduler(sessions, at_starts(starts), cancel)
    log = simulate(scheduler, service_times(seed), failing, lead_ns)
    assert scheduler.started == len(sessions)
    check(sessions, log, scheduler.started, cancel)
    for ready in log.sent:
        if not ready.node.parents:  # open loop: nothing that runs delays a session's start
            wait = round(ready.node.wait_after_ready_s * S)
            assert ready.due_ns == starts[ready.session] + wait


@given(gaps=st.lists(st.integers(0, 3), max_size=12), horizons=st.lists(st.integers(0, 30)))
def test_single_requests_are_handed_out_like_sessions_of_one_request(
    gaps: list[int], horizons: list[int]
) -> None:
    starts = [sum(gaps[: k + 1]) for k in range(len(gaps))]
    singles = Singles(len(starts), Node("0", "p", 1), [1, 2, 3])
    one, other = OpenSingles(singles, starts), SessionScheduler(singles, at_starts(starts), True)
    for horizon_ns in sorted(horizons):
        assert one.next_ns(0) == other.next_ns(0)
        ready = one.pop_ready(0, horizon_ns)
        assert ready == other.pop_ready(0, horizon_ns)
        assert (one.active, one.exhausted) == (other.active, other.exhausted)
        for request in ready[::2]:
            assert one.complete() == other.complete(request.session, 0, horizon_ns, "")
        assert (one.active, one.finished) == (other.active, other.finished)


@given(**RUN, target=st.integers(1, 8), rampup_ns=st.sampled_from([0, S, 10 * S]))
def test_concurrent_traffic_keeps_its_invariants(
    sessions: list[Session],
    target: int,
    rampup_ns: int,
    seed: int,
    failing: set[tuple[int, int]],
    cancel: bool,
    lead_ns: int,
) -> None:
    scheduler = SessionScheduler(sessions, at_places(target, 0, rampup_ns), cancel)
    log = simulate(scheduler, service_times(seed), failing, lead_ns)
    assert scheduler.started == len(sessions)
    check(sessions, log, scheduler.started, cancel)
    for latest_ns, active in log.active:
        assert active <= target
        if latest_ns < rampup_ns:
            assert active <= target * latest_ns // rampup_ns, "more active than the ramp allows"


def _endless(count: int) -> list[Session]:
    return [Session(f"s{i}", (Node("n0", "p", 1),)) for i in range(count)]


def test_ramp_is_linear_for_sessions_longer_than_the_ramp() -> None:
    scheduler = SessionScheduler(_endless(50), at_places(8, 0, 10 * S), True)
    log = simulate(scheduler, lambda _s, _n: 60 * S, set(), 0)
    first = [ready.due_ns / S for ready in log.sent[:8]]
    assert first == [1.25 * (k + 1) for k in range(8)]  # int(8 t / 10) steps up each 1.25 s
    assert [ready.due_ns / S for ready in log.sent[8:16]] == [t + 60 for t in first]


def test_paused_session_resumes_before_the_next_step_of_the_ramp() -> None:
    scheduler = SessionScheduler(_endless(5), at_places(10, 0, 100 * S), True)
    assert [ready.due_ns for ready in scheduler.pop_ready(10 * S, 10 * S)] == [10 * S]
    scheduler.complete(0, 0, 11 * S, None, S)
    assert scheduler.next_ns(11 * S) == 12 * S
    assert [ready.due_ns for ready in scheduler.pop_ready(12 * S, 12 * S)] == [12 * S]
    assert scheduler.next_ns(12 * S) == 20 * S


def test_ready_queue_keeps_the_order_of_equal_due_times() -> None:
    nodes = tuple(Node(f"n{i}", "p", 1) for i in range(6))
    scheduler = SessionScheduler(
        [Session("a", nodes), Session("b", nodes)], at_starts([S, S]), True
    )
    ready = scheduler.pop_ready(S, S)
    assert [(r.session, r.node_index) for r in ready] == [
        (s, n) for s in range(2) for n in range(6)
    ]


def test_history_of_several_parents_contains_each_turn_once() -> None:
    nodes = (
        Node("root", "r", 1),
        Node("left", "l", 1, 0.0, (Parent("root"),)),
        Node("right", "x", 1, 0.0, (Parent("root"),)),
        Node("side", "s", 1, 0.0, (Parent("root", history=False),)),
        Node("join", "j", 1, 0.0, (Parent("left"), Parent("right"), Parent("side", False))),
    )
    scheduler = SessionScheduler([Session("a", nodes)], at_starts([0]), True)
    scheduler.pop_ready(0, 0)
    scheduler.complete(0, 0, 1, "R")
    assert len(scheduler.pop_ready(1, 1)) == 3
    for node, output in ((3, "S"), (2, "X"), (1, "L")):
        scheduler.complete(0, node, 2, output)
    (join,) = scheduler.pop_ready(2, 2)
    assert [(turn.node, turn.output) for turn in join.history] == [
        ("root", "R"),
        ("left", "L"),
        ("right", "X"),
    ]


RATE = 50.0
HORIZON_S = 4000.0  # 200,000 arrivals


def test_fixed_arrivals_lie_on_an_absolute_grid() -> None:
    offsets = make_offsets("fixed", 3.0, 1000.0, "unused")
    assert len(offsets) == 3000
    assert offsets[0] == 0
    # Never more than rounding away from k / rate: no drift by adding up gaps.
    assert np.abs(offsets - np.arange(3000) / 3.0 * 1e9).max() <= 0.5


def test_jittered_process_has_one_arrival_in_each_interval() -> None:
    offsets = make_offsets("jittered", 4.0, 10_000.0, "7/j") / 1e9 * 4
    assert (offsets.astype(int) == np.arange(40_000)).all()
    assert stats.kstest(offsets % 1, stats.uniform.cdf).pvalue > 0.001
    assert np.diff(offsets).std() == pytest.approx(6**-0.5, rel=0.02)


@pytest.mark.parametrize(
    ("kind", "shape"), [("poisson", None), ("gamma", 0.25), ("gamma", 2.5), ("gamma", 4.0)]
)
def test_gaps_follow_their_distribution_including_its_tail(
    kind: ArrivalKind, shape: float | None
) -> None:
    gaps = np.diff(make_offsets(kind, RATE, HORIZON_S, "7/moments", shape), prepend=0) / 1e9
    law = stats.gamma(shape or 1.0, scale=1 / (RATE * (shape or 1.0)))  # of 1.0: exponential
    assert gaps.mean() == pytest.approx(law.mean(), abs=4 * law.std() / math.sqrt(len(gaps)))
    assert gaps.std() == pytest.approx(law.std(), rel=0.03)
    # The largest of so many gaps lies far out, and not at 3/rate.
    assert law.sf(gaps.max()) * len(gaps) < 50
    if shape != 0.25:  # with 0.25 one gap in a hundred is below a nanosecond
        assert stats.kstest(gaps, law.cdf).pvalue > 0.001


@given(
    st.sampled_from(["fixed", "jittered", "poisson"]),
    st.floats(0.05, 500),
    st.floats(0.1, 60),
    st.floats(0.1, 60),
)
def test_a_longer_horizon_extends_the_same_process(
    kind: ArrivalKind, rate: float, horizon_s: float, more_s: float
) -> None:
    short = make_offsets(kind, rate, horizon_s, "1/a")
    long = make_offsets(kind, rate, horizon_s + more_s, "1/a")
    assert (long[: len(short)] == short).all()
    assert (long[len(short) :] >= round(horizon_s * 1e9)).all()
    assert (np.diff(long) >= 0).all()
    assert (long >= 0).all()


def test_every_character_of_the_seed_changes_the_arrivals() -> None:
    first = make_offsets("poisson", 10, 10, "7/A/r10/arrivals")
    assert (make_offsets("poisson", 10, 10, "7/A/r10/arrivals") == first).all()
    for other in ("8/A/r10/arrivals", "7/A/r1/0arrivals", "7/A/r10/arrivals/"):
        changed = make_offsets("poisson", 10, 10, other)
        assert len(changed) != len(first) or (changed != first).any()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (
            ("uniform", 1.0, 1.0, "s", None),
            "arrival kind is 'uniform'; allowed: fixed, jittered, poisson",
        ),
        (("poisson", 0.0, 1.0, "s", None), "rate_rps"),
        (("poisson", math.nan, 1.0, "s", None), "rate_rps"),
        (("fixed", 1.0, math.inf, "s", None), "horizon_s"),
        (("gamma", 1.0, 1.0, "s", None), "gamma_shape"),
        (("gamma", 1.0, 1.0, "s", -1.0), "gamma_shape"),
        (("poisson", 1.0, 1.0, "s", 2.0), "gamma_shape"),
    ],
)
def test_bad_arguments_are_named(arguments: tuple[object, ...], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make_offsets(*arguments)  # type: ignore[arg-type]

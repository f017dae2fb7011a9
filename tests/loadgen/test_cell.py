"""Open-loop cells: when the window ends, which requests it holds, and what becomes of each."""

from dataclasses import replace
from typing import Any

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
    Progress,
    Target,
    make_offsets,
    open_loop,
)
from connector_tax.loadgen.messages import RequestRecord
from connector_tax.loadgen.plan import LEAD_NS
from tests.loadgen.fault_server import FaultServer, Hang, Pause, good_answer
from tests.loadgen.running import planned, rule, run_scripts

REQUEST = PlannedRequest("r", b"{}", 1, 1)


def simulate(
    offsets_ns: "np.ndarray[Any, np.dtype[np.int64]]",
    cell_rule: CellRule,
    service_s: float,
    fail_every: int = 0,
) -> Plan:
    """Run a cell on a virtual clock, against a server that answers after `service_s`."""
    cell = Plan(open_loop(offsets_ns, [REQUEST] * len(offsets_ns), cell_rule), cell_rule)
    now_ns = 1_000_000_000
    cell.start(now_ns)
    running: list[RequestRecord] = []
    while True:
        while running and (running[0].t_done_ns or 0) <= now_ns:
            record = running.pop(0)
            if fail_every and record.seq % fail_every == 0:
                record.fail("http_status")
            cell.take(record)
        items, next_ns = cell.step(now_ns, now_ns + LEAD_NS)
        for item in items:
            assert isinstance(item, tuple)
            record = item[0]
            assert record.t_intended_ns <= now_ns + LEAD_NS, "handed out before its lead"
            record.t_done_ns = record.t_intended_ns + round(service_s * 1e9)
            running.append(record)
        if next_ns is None:
            break
        assert next_ns > now_ns, "the plan would be asked in a tight loop"
        now_ns = max(now_ns + 1, next_ns - LEAD_NS)
    for record in running:
        cell.take(record)
    return cell


@given(
    rate=st.floats(1, 200),
    warmup_s=st.floats(0, 2),
    floor_s=st.floats(0.1, 4),
    more_s=st.floats(0, 5),
    enough=st.integers(0, 400),
    service_s=st.floats(0.001, 2),
    fail_every=st.integers(0, 3),
    seed=st.integers(0, 5),
)
def test_the_window_ends_as_the_rule_says(
    rate: float,
    warmup_s: float,
    floor_s: float,
    more_s: float,
    enough: int,
    service_s: float,
    fail_every: int,
    seed: int,
) -> None:
    cell_rule = rule(
        warmup_s=warmup_s, floor_s=floor_s, cap_s=floor_s + more_s, min_completed=enough
    )
    offsets = make_offsets("poisson", rate, cell_rule.schedule_s, f"{seed}/w")
    try:
        cell = simulate(offsets, cell_rule, service_s, fail_every)
    except ValueError:  # so few arrivals that the schedule looks, or is, empty
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
    # Arrivals go on until the last of the window is answered, and not much longer.
    answered_ns = max((r.t_done_ns or 0 for r in measured), default=0)
    unsent = due[due >= cell.cooldown_end_ns]
    if cell.cooldown_ended_by == "answered":
        assert cell.cooldown_end_ns <= max(cell.stop_ns, answered_ns + LEAD_NS + 10_000_001)
        assert len(unsent) == 0 or unsent[0] > answered_ns
    else:
        assert cell.cooldown_ended_by == "schedule"
        assert len(unsent) == 0
    done = sorted(r.t_done_ns or 0 for r in measured if r.status == "ok")
    # The first moment with enough successes, up to the lead and one look of 10 ms.
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
        ([0, 10], 3, "2 offsets for 3 requests"),
        ([], 0, "empty"),
        ([0, 10_000_000, 20_000_000], 3, r"must reach warmup_s \+ cap_s = 1.000 s"),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused(
    offsets: list[int], count: int, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        open_loop(np.array(offsets, np.int64), [REQUEST] * count, rule())


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
def test_a_rule_that_makes_no_sense_is_refused(changes: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        replace(rule(), **changes)  # type: ignore[arg-type]


def test_a_real_cell_extends_until_enough_have_completed() -> None:
    progress: list[Progress] = []
    with (
        FaultServer({"good": [good_answer()]}) as server,
        LoadGenerator(Target("127.0.0.1", server.port), LoadGeneratorOptions()) as generator,
    ):
        cell_rule = rule(warmup_s=0.2, floor_s=0.3, cap_s=8.0, min_completed=100)
        offsets = make_offsets("poisson", 80, 8.2, "1/real")
        result = generator.run_cell(
            offsets, [planned("good")] * len(offsets), cell_rule, progress.append
        )
        arrived = len(server.requests)
    assert arrived == len(result.records)  # nothing was sent without a record
    assert 0.3 < result.extended_s < 7.7
    measured = [r for r in result.records if r.measured]
    assert 100 <= len(measured) <= 300  # of 640 until the cap
    assert result.t_stop_ns > max(r.t_intended_ns for r in measured)
    assert result.t_cooldown_end_ns - result.t_stop_ns < 4e9  # a good answer comes at once
    assert result.cooldown_ended_by == "answered"
    assert result.t_warmup_end_ns - result.t_origin_ns == 200_000_000
    for record in result.records:
        assert record.t_send_ns is not None
        assert record.t_issue_ns is not None
        assert record.t_send_ns >= record.t_intended_ns, "sent early"
        assert record.t_issue_ns <= record.t_send_ns
    assert progress[-1].ok == len(result.records)
    assert progress[-1].measured_ok == len(measured)
    assert [p.issued for p in progress] == sorted(p.issued for p in progress)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_inflight_cap_drops_what_is_due_beyond_it_and_records_it(workers: int) -> None:
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
    assert len(sent) == 12  # every 0.4 s four at a time
    assert max(r.inflight_at_send or 0 for r in sent) == 3


def test_stamps_come_from_the_kernel_where_it_offers_them_and_say_so() -> None:
    with FaultServer({"good": [good_answer()]}) as server:
        target = Target("127.0.0.1", server.port)
        for asked, clock in ((True, "kernel"), (False, "worker")):
            with LoadGenerator(target, LoadGeneratorOptions(kernel_stamps=asked)) as generator:
                result = run_scripts(generator, ["good"] * 20)
            assert result.clock == clock
            assert {r.status for r in result.records} == {"ok"}
            assert result.health["processes"]["worker0"]["unstamped_reads"] == 0
            for record in result.records:
                assert record.t_send_ns is not None
                assert record.t_first_token_ns is not None
                assert record.t_send_ns < record.t_first_token_ns


def test_reads_are_kept_only_when_asked_for() -> None:
    with FaultServer({"good": [good_answer()]}) as server:
        options = LoadGeneratorOptions(keep_reads=False)
        with LoadGenerator(Target("127.0.0.1", server.port), options) as generator:
            assert {r.reads for r in run_scripts(generator, ["good"] * 3).records} == {None}


def test_a_request_that_finds_no_connection_waits_without_holding_up_the_others() -> None:
    options = LoadGeneratorOptions(workers=1, connections_per_worker=2)
    with (
        FaultServer({"good": [good_answer()], "hang": [Hang]}) as server,
        LoadGenerator(Target("127.0.0.1", server.port), options) as generator,
    ):
        scripts = ["hang", *["good"] * 20, "hang", *["good"] * 20]
        result = run_scripts(generator, scripts, request_timeout_s=1.3, floor_s=2.0, cap_s=2.0)
    by_kind = [r.error_kind for r in result.records]
    assert by_kind.count("request_timeout") == 2
    # The second hanging request takes the last connection; the timed out ones free them again.
    assert by_kind[1:21] == [None] * 20
    assert by_kind[22:] == [None] * 20
    assert result.health["processes"]["worker0"]["pool_waits"] > 0

"""Test the timing checks: they are two-sided, and missing data fail."""

from typing import Any, cast

import pytest

from connector_tax.analysis.validity import assess
from connector_tax.artifacts.cell_records import RequestLine
from connector_tax.artifacts.checks import BOUNDS, generator_checks
from connector_tax.loadgen.checks import (
    check_concurrency,
    check_intra_session,
    check_requests,
    check_sent_rate,
)
from connector_tax.loadgen.messages import STUDY_FIELDS, RequestRecord
from connector_tax.loadgen.summary import Checks

MS = 1_000_000
GOOD = {"loop_lag_p99_ms": 0.1, "loop_lag_max_ms": 1.0, "cpu_share": 0.2, "reads": 100,
        "unstamped_reads": 1, "undecodable": 0, "oversized": 0, "dropped_messages": 0,
        "late_results": 0}  # fmt: skip
UNTOLD = {key: value for key, value in GOOD.items() if key != "oversized"}
WHOLE: Any = {
    "processes": {"main": GOOD, "worker0": GOOD},
    "workers": 1,
    "workers_died": [],
    "connections_per_worker": 8,
    "connections": {"worker0": 8},
}


def record(k: int = 0, **changes: Any) -> RequestRecord:
    """Return a success due at 10 ms x k, sent 0.1 ms late, first token 20 ms after."""
    due, fields = 10 * k * MS, {"seq": k, "prompt_tokens": 1, "completion_tokens": 3, "worker": 0}
    fields |= dict.fromkeys(("t_intended_ns", "t_issue_ns", "t_worker_ns", "t_conn_ns"), due)
    fields |= dict.fromkeys(("t_headers_ns", "t_first_token_ns"), due + 20 * MS)
    fields |= dict.fromkeys(("t_last_token_ns", "t_done_ns"), due + 40 * MS)
    fields |= {"t_send_ns": due + MS // 10, "inflight_at_send": 0}
    return RequestRecord(**({"request_id": f"r{k}"} | fields | changes))


def entry(k: int, session: str, node: str, *parents: str, **changes: Any) -> RequestRecord:
    return record(k, session=session, node=node, parents=parents, **changes)


def failed(checks: Checks) -> list[str]:
    return [name for name, check in checks.items() if not check["pass"]]


def test_late_early_and_failed_requests_each_fail_their_check() -> None:
    good = [record(k) for k in range(50)]
    late = [*good, *(record(k, t_send_ns=10 * k * MS + 5 * MS) for k in range(50, 53))]
    assert failed(check_requests(late)) == ["schedule_lag_p99_ms"]
    # Two late requests of 52 may be chance: if 1% are late, 9 of 100 runs have as many.
    held_up = check_requests(late[:-1])
    assert failed(held_up) == []
    assert held_up["schedule_lag_p99_ms"]["value"] == pytest.approx(5)
    for changes, check in (
        ({"t_send_ns": 500 * MS - 1}, "early_send_ms"),
        ({"status": "error", "error_kind": "http_status"}, "error_rate"),
        ({"status": "dropped", "t_send_ns": None}, "dropped"),
    ):
        assert failed(check_requests([*good, record(50, **changes)])) == [check]


def test_lag_is_judged_against_two_percent_of_a_long_ttft() -> None:
    slow = [
        record(k, t_send_ns=10 * k * MS + 5 * MS, t_first_token_ns=10 * k * MS + 400 * MS)
        for k in range(20)
    ]
    assert failed(check_requests(slow)) == []  # 2% of 400 ms is 8 ms


def test_checks_fail_without_the_data_they_need() -> None:
    checks = check_requests([])
    assert failed(checks) == ["schedule_lag_p99_ms", "early_send_ms", "error_rate"]
    assert {checks[name]["value"] for name in failed(checks)} == {None}
    assert not check_sent_rate([], [0, 1])["pass"]
    for nothing in (check_concurrency([], 3, (3, 0, 0), MS), check_intra_session([])):
        assert failed(nothing) == list(nothing)
    processes = generator_checks(WHOLE | {"processes": {"main": {}}}, "worker", BOUNDS)
    assert "loop_lag_p99_ms" in failed(processes)


@pytest.mark.parametrize(
    ("stretch", "every", "passed"),
    [(1.0, 1, True), (1.005, 1, True), (1.02, 1, False), (0.98, 1, False), (1.0, 2, False)],
)
def test_session_rate_check_fails_above_and_below_the_target(
    stretch: float, every: int, passed: bool
) -> None:
    """Shift the starts by the factor `stretch`, and start only every `every`-th session."""
    planned = [k * 10 * MS for k in range(200)]
    entries = [
        entry(k, f"s{k}", "a", t_send_ns=round(planned[k] * stretch)) for k in range(0, 200, every)
    ]
    assert check_sent_rate(entries, planned)["pass"] is passed
    # A request that is dropped when it is due was dispatched in time.
    for dropped in entries[::2]:
        dropped.status, dropped.t_send_ns, dropped.t_done_ns = "dropped", None, dropped.t_send_ns
    assert check_sent_rate(entries, planned)["pass"] is passed


def test_check_fails_for_children_before_or_long_after_their_parents() -> None:
    def chain(sent_after_ms: float) -> list[RequestRecord]:
        done = 40 * MS
        child = entry(1, "s", "b", "a", t_send_ns=done + round(sent_after_ms * MS))
        return [entry(0, "s", "a"), child]

    assert failed(check_intra_session(chain(1))) == []
    assert failed(check_intra_session(chain(50))) == ["intra_session_delay_p99_ms"]
    assert failed(check_intra_session(chain(-0.001))) == ["intra_session_early_ms"]
    orphan = check_intra_session(chain(1)[1:])
    assert failed(orphan) == list(orphan)


def test_overlapping_sessions_are_counted() -> None:
    entries = [entry(k, f"s{k}", "a") for k in range(10)]  # 10 ms apart, each about 40 ms long
    assert "concurrent_sessions_max" not in judge_closed_loop(entries, 10, 4)
    assert "concurrent_sessions_max" in judge_closed_loop(entries, 10, 3)


def judge_closed_loop(entries: list[RequestRecord], sessions: int, target: int) -> list[str]:
    """Return the failed checks of a run that was stopped after the last request."""
    stop_ns = max(entry.t_done_ns or 0 for entry in entries)
    return failed(check_concurrency(entries, sessions, (target, 0, 0), stop_ns))


def test_concurrency_check_fails_below_the_requested_number_of_sessions() -> None:
    def one_by_one(at_once: int) -> list[RequestRecord]:
        """Return sessions of 40 ms, `at_once` of them at a time, each sent 0.1 ms after a place
        became free.
        """
        begins = [41 * MS * (k // at_once) for k in range(20)]
        return [
            entry(k, f"s{k}", "a", t_send_ns=begin + MS // 10, t_done_ns=begin + 41 * MS)
            for k, begin in enumerate(begins)
        ]

    assert judge_closed_loop(one_by_one(5), 20, 5) == []
    assert judge_closed_loop(one_by_one(20), 20, 100) == []
    for at_once, target in ((1, 100), (1, 5), (4, 5)):
        late = judge_closed_loop(one_by_one(at_once), 20, target)
        assert late == ["session_start_delay_p99_ms"]
    # One session of a hundred started, and nothing else until the end.
    alone = judge_closed_loop(one_by_one(1)[:1], 100, 100)
    assert alone == ["session_start_delay_p99_ms"]


@pytest.mark.parametrize(("kind", "after_s"), [("connect_failed", 1), ("reset_mid_response", 0)])
def test_next_session_is_due_after_the_pause_that_follows_a_failure(
    kind: str, after_s: int
) -> None:
    first = entry(0, "s0", "a", t_done_ns=20 * MS)
    first.fail(kind)
    for late_s in (0, 1):
        begin = (20 + 1000 * (after_s + late_s)) * MS
        following = entry(1, "s1", "a", t_send_ns=begin, t_done_ns=begin + MS)
        late = judge_closed_loop([first, following], 2, 1)
        assert late == ["session_start_delay_p99_ms"] * late_s


def test_session_cancelled_at_the_end_of_the_run_expects_no_successor() -> None:
    first = entry(0, "s0", "a", t_done_ns=20 * MS)
    cut = entry(1, "s0", "b", "a", t_send_ns=None, t_done_ns=90 * MS, status="cancelled",
                error_kind="run_ended")  # fmt: skip
    assert failed(check_concurrency([first, cut], 2, (1, 0, 0), 90 * MS)) == []


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"workers": 2, "connections": {"worker0": 8, "worker1": 8}}, "silent_workers"),
        ({"connections": {"worker0": 7}}, "unopened_connections"),
        ({"processes": {"main": GOOD, "worker0": {**GOOD, "unstamped_reads": 2}}},
         "unstamped_reads"),
        ({"processes": {"main": {**GOOD, "loop_lag_max_ms": 101.0}, "worker0": GOOD}},
         "loop_lag_max_ms"),
        ({"processes": {"main": {**GOOD, "late_results": 1}, "worker0": GOOD}}, "lost_messages"),
        ({"workers_died": [0]}, "workers_died"),
        ({"processes": {"main": GOOD, "worker0": UNTOLD}}, "lost_messages"),
        *(({"processes": {"main": GOOD, "worker0": {**GOOD, counter: 1}}}, "lost_messages")
          for counter in ("undecodable", "oversized", "dropped_messages")),
    ],
)  # fmt: skip
def test_cell_and_command_report_the_same_failed_check(changes: dict[str, Any], check: str) -> None:
    assert judged(WHOLE) == []
    assert judged({**WHOLE, **changes}) == [check]
    assert failed(generator_checks(WHOLE | changes, "kernel", BOUNDS)) == [check]


def judged(health: Any, cell: Any = (), hits: int = 0, traffic: Any = None,
           **changes: Any) -> list[str]:  # fmt: skip
    """Return the failed checks of a cell of ten successes in a window of 100 ms."""
    totals: dict[str, float | None] = {"success": 10, "prompt_tokens": 10, "generation_tokens": 30,
              "prefix_cache_hits": hits, "external_prefix_cache_hits": 0}  # fmt: skip
    seen: Any = {
        "window": {"t_warmup_end_ns": 0, "t_stop_ns": 100 * MS}, "counts": {"planned": 10},
        "input_tokens": 1, "output_tokens": 3, "suspended_ms": 0, "clock": "kernel",
        "server_counters": {"before": dict.fromkeys(totals, 0), "after": totals},
        "load_generator": health, **changes,
    }  # fmt: skip
    requests = [cast(RequestLine, record(k).fields(STUDY_FIELDS)) for k in range(10)]
    cell = {"floor_s": 0.1, "cap_s": 1.0, "min_completed": 10, **dict(cell)}
    phase_a = {} if traffic is None else {"traffic": traffic}
    config: Any = {"cell": cell, "validity": BOUNDS, "phase_a": phase_a}
    return failed(assess(seen, requests, [{"t_ns": 10 * MS, "ok": True}], config))


def test_a_window_ends_between_floor_and_cap_with_enough_successes_or_at_the_cap() -> None:
    assert judged(WHOLE, {"cap_s": 0.1, "min_completed": 1000}) == []
    assert judged(WHOLE, {"floor_s": 0.1000001}) == ["window_s"]
    assert judged(WHOLE, {"floor_s": 0.01, "cap_s": 0.09}) == ["window_s"]
    assert judged(WHOLE, {"min_completed": 11}) == ["measured_ok"]
    # A worker's death in the middle of a window ends it.
    cut = {"t_warmup_end_ns": 0, "t_stop_ns": 95 * MS}
    assert judged(WHOLE, window=cut) == ["window_s"]


def test_more_prefix_hits_than_repeated_tokens_void_a_cell() -> None:
    assert judged(WHOLE, hits=1) == ["prefix_cache_hits"]
    trace = {"kind": "trace", "longest": [1, 3], "most_hits": 4}
    assert judged(WHOLE, hits=4, traffic=trace) == []
    assert judged(WHOLE, hits=5, traffic=trace) == ["prefix_cache_hits"]
    # Repetition in text is unknown, but hits never exceed the tokens sent.
    prompts = {"kind": "prompts", "longest": [1, 3]}
    assert judged(WHOLE, hits=10, traffic=prompts) == []
    assert judged(WHOLE, hits=11, traffic=prompts) == ["prefix_cache_hits"]


def test_suspend_of_the_machine_voids_the_cell() -> None:
    assert judged(WHOLE, suspended_ms=99) == []
    assert judged(WHOLE, suspended_ms=2000) == ["suspended_ms"]

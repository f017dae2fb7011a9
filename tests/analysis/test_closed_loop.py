"""Test throughput and goodput of a cell, and the checks of a closed loop."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector_tax.analysis.measure import Requests, requests_of
from connector_tax.analysis.records import RequestRow
from connector_tax.analysis.validity import assess, void_reasons
from connector_tax.artifacts.checks import BOUNDS
from connector_tax.artifacts.metrics import change_of
from connector_tax.artifacts.names import CLOSED

LIFE_NS, TOKENS = 700_000_000, 8


def cell(start: int, stop: int, kind: str = CLOSED) -> Any:
    window = {"t_warmup_end_ns": start, "t_stop_ns": stop}
    return {"window": window, "schedule": {"kind": kind}}


def lockstep(places: int, gap_ns: int, until_ns: int) -> list[RequestRow]:
    """Return closed-loop requests, of which `places` at a time begin and end together."""
    return [
        RequestRow(
            seq, "ok", sent, sent, sent + LIFE_NS // 2, sent + LIFE_NS, sent + LIFE_NS, TOKENS
        )
        for sent in range(0, until_ns, LIFE_NS + gap_ns)
        for seq in range(places)
    ]


@given(st.integers(0, 3 * LIFE_NS), st.integers(1, 64), st.integers(2, 40))
def test_throughput_of_a_closed_loop_does_not_depend_on_where_the_window_lies(
    start: int, places: int, tenths: int
) -> None:
    stop = start + tenths * LIFE_NS // 4
    measured = requests_of(Path(), lockstep(places, 0, stop), cell(start, stop))
    assert measured.requests_per_s == pytest.approx(places / (LIFE_NS / 1e9))
    assert measured.tokens_per_s == pytest.approx(TOKENS * measured.requests_per_s)


def test_goodput_counts_requests_within_every_limit() -> None:
    slow, fast = lockstep(4, 0, 1)[:2]
    fast.t_first_token_ns = 1_000_000
    fast.completion_tokens = 2
    measured = requests_of(Path(), [slow, fast], cell(0, LIFE_NS, "jittered"))

    def goodput(**limits: float) -> float:
        return measured.throughputs(limits)["goodput"] / measured.requests_per_s

    assert goodput(ttft=10) == 0.5
    # The request with a fast first token has a slow second one. Half a request counts, since a
    # ratio needs more than 0.
    assert goodput(ttft=10, tpot=60) == 0.25
    assert goodput(tpot=60) == 0.5
    assert goodput(e2e=700) == 1
    one = np.ones(1)
    single = Requests(one, one, np.full(1, np.nan), one, one, 1.0, 1, 0, 0, 1.0)
    assert single.throughputs({"tpot": 60})["goodput"] == 0.5, "one token has no TPOT"


def test_cost_of_throughput_is_shown_as_a_decrease() -> None:
    assert change_of("requests_per_s", 0.25) == pytest.approx(-0.2)
    assert change_of("ttft_p50", 0.25) == 0.25


@pytest.mark.parametrize(("gap_ns", "void"), [(LIFE_NS // 100, False), (LIFE_NS // 10, True)])
def test_closed_loop_with_empty_places_is_void_and_has_no_checks_of_a_schedule(
    gap_ns: int, void: bool
) -> None:
    rows = lockstep(4, gap_ns, 20 * LIFE_NS)
    keys = ("t_intended_ns", "t_send_ns", "t_first_token_ns", "t_done_ns", "completion_tokens")
    requests = [{key: getattr(row, key) for key in keys} | {"status": "ok", "prompt_tokens": 1}
                for row in rows]  # fmt: skip
    process: Any = {"processes": {"main": {}}, "workers": 0, "workers_died": []}
    record: Any = cell(LIFE_NS, 18 * LIFE_NS) | {
        "suspended_ms": 0, "clock": "kernel", "counts": {"planned": len(rows)},
        "load_generator": process | {"connections_per_worker": 0, "connections": {}},
    }  # fmt: skip
    section = {"floor_s": 1, "cap_s": 60, "min_completed": 1}
    config: Any = {"cell": section, "validity": BOUNDS, "phase_a": {"concurrency": 4}}
    checks = assess(record, requests, [], config, counted_by_server=False)  # type: ignore[arg-type]
    assert any("fewer requests in flight" in why for why in void_reasons(checks)) is void
    assert not {"schedule_lag_p99_ms", "early_send_ms", "sent_rate_ratio"} & checks.keys()

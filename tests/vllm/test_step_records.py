"""The step probe's records on their way to JSON lines."""

import json
from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector_tax.vllm.step_probe import mark
from connector_tax.vllm.step_records import step_records

AT = 1000.0


def header(process: str = "worker", groups: Any = ()) -> bytes:
    counts = ["num_running", "num_waiting", "prefill_tokens", "decode_tokens"]
    known = counts if process == "scheduler" else []
    spans = ["update", "engine_step"]
    fields = {"process": process, "counts": known, "spans": spans, "groups": groups}
    return json.dumps(fields).encode() + b"\n"


def packed(at: float, step: int, *numbers: float) -> bytes:
    return array("d", [2 + len(numbers), at, step, *numbers]).tobytes()


def calls_at(at: float, *microseconds_or_marks: float) -> list[float]:
    return [at + n / 1e6 if n >= 0 else n for n in microseconds_or_marks]


@given(
    st.lists(st.floats(0, 1e7), min_size=1, max_size=8),
    st.data(),
)
def test_a_file_cut_anywhere_gives_its_whole_records(starts: list[float], data: Any) -> None:
    file = header() + b"".join(packed(t, step, 5e-6) for step, t in enumerate(starts, 1))
    whole = list(step_records(file))
    assert [r["step_id"] for r in whole] == list(range(1, len(starts) + 1))
    assert all(-2 < t * 1e9 - r["t_ns"] < 10_002 for t, r in zip(starts, whole, strict=True))
    record = (len(file) - len(header())) // len(starts)
    cut = file[: data.draw(st.integers(0, len(file)))]
    seen = list(step_records(cut))
    assert seen == whole[: max(0, len(cut) - len(header())) // record]
    # What was not there at the cut is there from the cut on, if the cut was between two records.
    at = len(header()) + record * data.draw(st.integers(0, len(starts)))
    assert [*step_records(file[:at]), *step_records(file, at)] == whole


def test_a_file_of_something_else_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        list(step_records(b'{"t_ns":1}\n'))


def test_a_hook_within_a_hook_of_its_object_is_the_outer_ones_time_and_a_childs_is_not() -> None:
    own = ["get_finished", "get_transfer_results", "wait_for_save"]
    groups = [(None, own, 2), ("Child", ["get_finished"], 5)]
    # get_transfer_results (3) for 9 us: get_finished (2) of the same object for 7, in it the
    # child's (5) for 5; then get_finished alone for 1, and wait_for_save (4) for 3.
    calls = calls_at(AT, 0, 1, 2, 7, mark(5), 8, mark(2), 9, mark(3), 20, 21, mark(2))
    calls += calls_at(AT, 30, 33, mark(4))
    (record,) = step_records(header(groups=groups) + packed(AT, 1, 50e-6, *calls))
    assert record["hooks_us"] == {"wait_for_save": 3.0}
    assert record["get_finished_us"] == 10.0
    assert record["children_us"] == {"Child": {"get_finished": 5.0}}
    assert record["start_load_kv_us"] is None
    assert record["num_running"] is None


def test_two_children_of_one_name_are_one_sum() -> None:
    groups = [(None, [], 2), ("Twin", ["start_load_kv"], 2), ("Twin", ["start_load_kv"], 3)]
    calls = calls_at(AT, 0, 1, mark(2), 2, 5, mark(3))
    (record,) = step_records(header(groups=groups) + packed(AT, 1, 9e-6, *calls))
    assert record["children_us"] == {"Twin": {"start_load_kv": 4.0}}
    assert record["hooks_us"] == {}


def test_the_schedulers_own_spans_are_its_fields_and_null_where_a_step_has_none() -> None:
    counts = {"num_running": 3, "num_waiting": 2, "prefill_tokens": 100, "decode_tokens": 7}
    update = calls_at(AT, 0, 2.5, mark(0))
    first = packed(AT, 1, 1.234e-6, *counts.values(), *update)
    step = calls_at(AT, 0, 0.099, mark(1))
    second = packed(AT, 2, 1.234e-6, *counts.values(), *update, *step)
    one, two = step_records(header("scheduler") + first + second)
    assert (one["update_us"], one["engine_step_us"]) == (2.5, None)
    assert (two["update_us"], two["engine_step_us"]) == (2.5, 0.1)
    assert {name: one[name] for name in counts} == counts
    assert one["step_duration_us"] == 1.2


@given(st.floats(1e-7, 1e3))
def test_a_span_is_given_to_four_digits_or_a_tenth_of_a_microsecond(seconds: float) -> None:
    (record,) = step_records(header() + packed(AT, 1, seconds))
    exact = seconds * 1e6
    given_us = record["step_duration_us"]
    assert abs(given_us - exact) <= max(0.0501, 0.000501 * exact)
    assert len(f"{given_us:.1f}".replace(".", "").lstrip("0").rstrip("0")) <= 4

"""The step probe's records on their way to JSON lines."""

import json
from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector_tax.vllm.step_records import step_records

SECOND = 1_000_000_000


def header(process: str = "worker", groups: Any = ()) -> bytes:
    counts = ["num_running", "num_waiting", "prefill_tokens", "decode_tokens"]
    known = counts if process == "scheduler" else []
    spans = ["update", "engine_step"]
    fields = {"process": process, "counts": known, "spans": spans, "groups": groups}
    return json.dumps(fields).encode() + b"\n"


def packed(*numbers: int) -> bytes:
    return array("q", [len(numbers), *numbers]).tobytes()


@given(
    st.lists(st.integers(0, 2**40).map(lambda ns: SECOND + ns), min_size=1, max_size=8),
    st.data(),
)
def test_a_file_cut_anywhere_gives_its_whole_records(starts: list[int], data: Any) -> None:
    file = header() + b"".join(packed(t, step, 5000) for step, t in enumerate(starts, 1))
    whole = list(step_records(file))
    assert [r["step_id"] for r in whole] == list(range(1, len(starts) + 1))
    assert all(0 <= t - r["t_ns"] < 1000 for t, r in zip(starts, whole, strict=True))
    cut = file[: data.draw(st.integers(0, len(file)))]
    seen = list(step_records(cut))
    assert seen == whole[: len(seen)]
    # What was not there at the cut is there from the cut on, if the cut was between two records.
    record = (len(file) - len(header())) // len(starts)
    at = len(header()) + record * data.draw(st.integers(0, len(starts)))
    assert [*step_records(file[:at]), *step_records(file, at)] == whole


def test_a_file_of_something_else_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        list(step_records(b'{"t_ns":1}\n'))


def test_a_hook_within_a_hook_of_its_object_is_the_outer_ones_time_and_a_childs_is_not() -> None:
    groups = [(None, ["get_finished", "get_transfer_results"], 2), ("Child", ["get_finished"], 4)]
    # get_transfer_results (3) for 9 us: get_finished (2) of the same object for 7, in it the
    # child's (4) for 5; then get_finished alone for 1.
    at = SECOND
    calls = [at, at + 1000, at + 2000, at + 7000, 4, at + 8000, 2, at + 9000, 3]
    calls += [at + 20_000, at + 21_000, 2]
    (record,) = step_records(header(groups=groups) + packed(at, 1, 50_000, *calls))
    assert record["hooks_us"] == {"get_finished": 1.0, "get_transfer_results": 9.0}
    assert record["get_finished_us"] == 10.0
    assert record["children_us"] == {"Child": {"get_finished": 5.0}}
    assert record["start_load_kv_us"] is None
    assert record["num_running"] is None


def test_two_children_of_one_name_are_one_sum() -> None:
    groups = [(None, [], 2), ("Twin", ["start_load_kv"], 2), ("Twin", ["start_load_kv"], 3)]
    calls = [SECOND, SECOND + 1000, 2, SECOND + 2000, SECOND + 5000, 3]
    (record,) = step_records(header(groups=groups) + packed(SECOND, 1, 9000, *calls))
    assert record["children_us"] == {"Twin": {"start_load_kv": 4.0}}
    assert record["hooks_us"] == {}


def test_the_schedulers_own_spans_are_its_fields_and_null_where_a_step_has_none() -> None:
    first = packed(SECOND, 1, 1234, 3, 2, 100, 7, SECOND, SECOND + 2500, 0)
    second = packed(SECOND, 2, 1234, 3, 2, 100, 7, SECOND, SECOND + 2500, 0, SECOND, SECOND + 99, 1)
    one, two = step_records(header("scheduler") + first + second)
    assert (one["update_us"], one["engine_step_us"]) == (2.5, None)
    assert (two["update_us"], two["engine_step_us"]) == (2.5, 0.1)
    counts = ("num_running", "num_waiting", "prefill_tokens", "decode_tokens")
    assert [one[name] for name in counts] == [3, 2, 100, 7]
    assert one["step_duration_us"] == 1.2

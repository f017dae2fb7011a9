"""The step probe's records on their way to JSON lines."""

import json
from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector_tax.vllm.step_probe.log import mark
from connector_tax.vllm.step_records import step_records

AT = 1000.0
SCHEDULE, UPDATE, STEP = mark(0), mark(1), mark(2)
EXECUTE, SAMPLE = mark(0), mark(1)


def header(process: str = "worker", groups: Any = ()) -> bytes:
    return json.dumps({"process": process, "groups": groups}).encode() + b"\n"


def packed(*numbers: float) -> bytes:
    return array("d", numbers).tobytes()


def executed(at: float, step: int, seconds: float, complete: bool = True) -> list[float]:
    return [at, at + seconds, step, complete, EXECUTE]


def calls_at(at: float, *microseconds_or_marks: float) -> list[float]:
    return [at + n / 1e6 if n >= 0 else n for n in microseconds_or_marks]


@given(st.lists(st.floats(0, 1e7), min_size=1, max_size=8), st.data())
def test_a_file_cut_anywhere_gives_its_whole_steps(starts: list[float], data: Any) -> None:
    packs = [packed(*executed(t, step, 5e-6)) for step, t in enumerate(starts, 1)]
    file = header() + b"".join(packs)
    whole = list(step_records(file))
    assert [r["step_id"] for r in whole] == list(range(1, len(starts) + 1))
    assert all(-2 < t * 1e9 - r["t_ns"] < 10_002 for t, r in zip(starts, whole, strict=True))
    cut = data.draw(st.integers(0, len(file)))
    left = max(0, cut - len(header())) // len(packs[0])
    assert list(step_records(file[:cut])) == whole[:left]
    # What was not there at the end of one reading is there from there on.
    end = len(header()) + left * len(packs[0])
    assert list(step_records(file, end)) == whole[left:]


def test_a_file_of_something_else_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        list(step_records(b'{"t_ns":1}\n'))


def test_a_hook_within_a_hook_of_its_object_is_the_outer_ones_time_and_a_childs_is_not() -> None:
    own = ["get_finished", "get_transfer_results", "wait_for_save"]
    groups = [(None, own, 3), ("Child", ["get_finished"], 6)]
    # get_transfer_results (4) for 9 us: get_finished (3) of the same object for 7, in it the
    # child's (6) for 5; then get_finished alone for 1, and wait_for_save (5) for 3 and for 4.
    calls = calls_at(AT, 2, 7, mark(6), 1, 8, mark(3), 0, 9, mark(4), 20, 21, mark(3))
    calls += calls_at(AT, 30, 33, mark(5), 40, 44, mark(5))
    content = header(groups=groups) + packed(*calls, *executed(AT, 1, 50e-6))
    (record,) = step_records(content)
    assert record["hooks_us"] == {"wait_for_save": 7.0}
    assert record["get_finished_us"] == 10.0
    assert record["children_us"] == {"Child": {"get_finished": 5.0}}
    assert record["start_load_kv_us"] is None
    assert record["num_running"] is None


def test_two_children_of_one_name_are_one_sum() -> None:
    groups = [(None, [], 3), ("Twin", ["start_load_kv"], 3), ("Twin", ["start_load_kv"], 4)]
    calls = calls_at(AT, 0, 1, mark(3), 2, 5, mark(4))
    (record,) = step_records(header(groups=groups) + packed(*calls, *executed(AT, 1, 9e-6)))
    assert record["children_us"] == {"Twin": {"start_load_kv": 4.0}}
    assert record["hooks_us"] == {}


def test_a_workers_step_is_both_its_calls_and_a_warm_up_is_none() -> None:
    groups = [(None, ["wait_for_save"], 3)]
    hook, sampling = calls_at(AT, 11, 12, mark(3)), calls_at(AT, 10, 14, SAMPLE)
    both = [*executed(AT, 1, 9e-6, complete=False), *hook, *sampling]
    warm_up = [*hook, *executed(AT, 0, 9e-6, complete=False), *hook, *sampling]
    # The last one's call for the next step comes without sampling.
    alone = [*executed(AT, 2, 7e-6, complete=False), *executed(AT, 3, 5e-6)]
    records = list(step_records(header(groups=groups) + packed(*warm_up, *both, *warm_up, *alone)))
    assert [record["step_duration_us"] for record in records] == [13.0, 7.0, 5.0]
    assert [record["hooks_us"] for record in records] == [{"wait_for_save": 1.0}, {}, {}]


def test_an_update_belongs_to_the_step_it_names_wherever_it_runs() -> None:
    counts = {"num_running": 3, "num_waiting": 2, "prefill_tokens": 100, "decode_tokens": 7}
    groups = [(None, ["on_new_request", "build_connector_meta", "take_events"], 3)]

    def schedule(step: int) -> list[float]:
        return [AT, AT + 1.234e-6, step, *counts.values(), SCHEDULE]

    def hook(position: int, microseconds: float) -> list[float]:
        return calls_at(AT + position, 0, microseconds, mark(position))

    def update(step: int, microseconds: float) -> list[float]:
        return [AT, AT + microseconds / 1e6, step, UPDATE]

    engine_step = calls_at(AT, 0, 0.099, STEP)
    content = header("scheduler", groups)
    content += packed(*hook(3, 5), *hook(4, 1), *schedule(1), *engine_step)
    # The second engine step schedules step 2 and updates step 1, with a hook in each; then a hook
    # before the third, which updates a step that nobody has seen.
    content += packed(*hook(4, 2), *schedule(2), *hook(5, 9), *update(1, 2.5), *engine_step)
    content += packed(*hook(3, 6), *schedule(3), *update(77, 1), *engine_step)
    content += packed(*update(2, 3.5), *engine_step)
    one, two = step_records(content)
    assert (one["step_id"], one["update_us"], one["engine_step_us"]) == (1, 2.5, 0.1)
    assert (one["build_meta_us"], one["hooks_us"]) == (1.0, {"on_new_request": 5, "take_events": 9})
    assert (two["step_id"], two["update_us"], two["engine_step_us"]) == (2, 3.5, 0.1)
    assert (two["build_meta_us"], two["hooks_us"]) == (2.0, {})
    assert {name: number for name, number in one.items() if name in counts} == counts
    assert one["step_duration_us"] == 1.2


def test_a_step_that_is_never_updated_is_a_record_without_an_update() -> None:
    content = header("scheduler")
    for step in range(1, 70):
        content += packed(AT, AT + 1e-6, step, 1, 0, 0, 1, SCHEDULE, AT, AT + 2e-6, STEP)
    records = list(step_records(content))
    assert [record["step_id"] for record in records] == [1, 2, 3, 4, 5]
    assert [record["update_us"] for record in records] == [None] * 5


@given(st.floats(1e-7, 1e3))
def test_a_span_is_given_to_four_digits_or_a_tenth_of_a_microsecond(seconds: float) -> None:
    (record,) = step_records(header() + packed(*executed(0.0, 1, seconds)))
    exact = seconds * 1e6
    given_us = record["step_duration_us"]
    assert abs(given_us - exact) <= max(0.0501, 0.000501 * exact)
    assert len(f"{given_us:.1f}".replace(".", "").lstrip("0").rstrip("0")) <= 4

"""Test the join of scheduler and worker steps by step id."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector_tax.analysis import steps as analysis_steps
from connector_tax.analysis.steps import Floats, Hook, Steps, read_steps, step_cdf, step_columns
from connector_tax.artifacts.folder import CellFolder
from connector_tax.artifacts.names import CellKey
from connector_tax.files import ArtifactError
from connector_tax.vllm.step_probe import probe

START, STOP = 1000, 2000
TOTAL = "connector_total_us"
OWN = ("scheduler", "")


def scheduler(step_id: int, **changes: Any) -> dict[str, Any]:
    """Return a scheduler's record of a step inside the window."""
    return {
        "t_ns": 1500,
        "step_id": step_id,
        "process": "scheduler",
        "step_duration_us": 100.0,
        "engine_step_us": 1000.0,
        "build_meta_us": 10.0,
        "get_finished_us": 5.0,
        "start_load_kv_us": None,
        "num_running": 1,
        "num_waiting": 0,
        "prefill_tokens": 0,
        "decode_tokens": 1,
        **changes,
    }


def worker(step_id: int, **changes: Any) -> dict[str, Any]:
    """Return the worker's record of a step."""
    nothing = dict.fromkeys(("build_meta_us", "get_finished_us", "prefill_tokens", "decode_tokens"))
    nothing |= dict.fromkeys(("num_running", "num_waiting"))
    own = {"process": "worker", "step_duration_us": 80.0, "start_load_kv_us": 2.0}
    record = {**scheduler(step_id), **nothing, **own, **changes}
    del record["engine_step_us"]  # a worker's record does not have the field
    return record


def steps_of(folder: Path, records: list[dict[str, Any]]) -> Steps:
    """Write the records as a valid cell's step file and read it."""
    data = "".join(json.dumps(record) + "\n" for record in records).encode()
    path = folder / "engine_step_A_r1.jsonl"
    path.write_bytes(data)
    record: Any = {"window": {"t_warmup_end_ns": START, "t_stop_ns": STOP}}
    files = {path.name: hashlib.sha256(data).hexdigest()}
    key = CellKey("x", 0, "A", "r1")
    return read_steps(CellFolder(key, "valid", None, folder, files, record, 1.0, 1, 1))


def test_empty_polling_steps_are_counted_separately(tmp_path: Path) -> None:
    idle = scheduler(3, decode_tokens=0, step_duration_us=1.0)
    steps = steps_of(tmp_path, [scheduler(1), idle, worker(1), worker(3)])
    assert (len(steps.kinds), steps.n_empty) == (1, 1)
    assert steps.known("step_duration_us").tolist() == [100.0]


def test_steps_outside_the_measured_window_do_not_count(tmp_path: Path) -> None:
    edges = [scheduler(i, t_ns=t) for i, t in enumerate((START - 1, START, STOP - 1, STOP))]
    assert len(steps_of(tmp_path, edges).kinds) == 2


def test_callback_median_is_the_median_of_sums_per_step(tmp_path: Path) -> None:
    builds, loads = [1.0, 100.0, 2.0], [90.0, 3.0, 4.0]
    records = [scheduler(i, build_meta_us=b) for i, b in enumerate(builds)]
    records += [worker(i, start_load_kv_us=x) for i, x in enumerate(loads)]
    row = step_columns(steps_of(tmp_path, records))
    assert row["connector_total_us_p50"] == np.median([1 + 5 + 90, 100 + 5 + 3, 2 + 5 + 4])
    assert (
        row["connector_total_us_p50"] != row["build_meta_us_p50"] + 5 + row["start_load_kv_us_p50"]
    )


def test_a_step_without_a_worker_record_has_no_sum_of_callback_times(tmp_path: Path) -> None:
    steps = steps_of(tmp_path, [scheduler(1), scheduler(2), worker(2), worker(9)])
    assert (len(steps.kinds), len(steps.known(TOTAL))) == (2, 1)


def test_hook_timed_in_either_process_is_listed(tmp_path: Path) -> None:
    steps = steps_of(tmp_path, [scheduler(1, get_finished_us=None), worker(1, get_finished_us=7.0)])
    assert steps.known(TOTAL).tolist() == [10.0 + 7.0 + 2.0]


def test_hooks_are_assigned_to_their_steps_by_kind(tmp_path: Path) -> None:
    records = [
        scheduler(7, prefill_tokens=9, decode_tokens=0, hooks_us={"take_events": 3.0}),
        scheduler(3, prefill_tokens=9),
        scheduler(5, engine_step_us=None),
        worker(3, hooks_us={"wait_for_save": 900.0}), worker(3, hooks_us={"wait_for_save": 950.0}),
        worker(4, hooks_us={"wait_for_save": 7.0}),
    ]  # fmt: skip
    steps = steps_of(tmp_path, records)
    assert steps.kinds.tolist() == ["prefill", "mixed", "decode"]
    assert steps.known("engine_step_us").tolist() == [1000.0, 1000.0]
    assert steps.hooks[Hook("scheduler", "", "take_events")].tolist() == [3.0, 0.0, 0.0]
    assert steps.hooks[Hook("worker", "", "wait_for_save")].tolist() == [0.0, 950.0, 0.0]


def test_step_of_several_ranks_takes_the_slowest_one(tmp_path: Path) -> None:
    ranks = [worker(1, start_load_kv_us=2.0), worker(1, start_load_kv_us=8.0)]
    assert steps_of(tmp_path, [scheduler(1), *ranks]).known(TOTAL).tolist() == [23.0]


def test_two_scheduler_records_of_one_step_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="two records of step_id 4"):
        steps_of(tmp_path, [scheduler(4), scheduler(4)])


def test_step_of_plain_has_a_duration_and_no_callbacks(tmp_path: Path) -> None:
    nothing = dict.fromkeys(("build_meta_us", "get_finished_us"))
    steps = steps_of(tmp_path, [scheduler(1, **nothing), worker(1, start_load_kv_us=None)])
    assert step_columns(steps)["connector_total_us_p50"] is None


def test_an_empty_file_gives_empty_columns(tmp_path: Path) -> None:
    row = step_columns(steps_of(tmp_path, []))
    assert (row["n_steps"], row["step_duration_us_p50"]) == (0, None)


def test_records_without_whole_steps_have_no_engine_step_tax(tmp_path: Path) -> None:
    old = scheduler(1)
    del old["engine_step_us"]
    steps = steps_of(tmp_path, [old, worker(1)])
    values = step_columns(steps)
    assert (values["step_duration_us_p50"], values["engine_step_us_p50"]) == (100.0, None)
    points = step_cdf(
        {"schedule": [steps.known("step_duration_us")], "engine": [steps.known("engine_step_us")]}
    )
    assert {(point["schedule"], point["engine"]) for point in points} == {(100.0, None)}


def test_a_cell_without_steps_has_no_distribution() -> None:
    assert step_cdf({"schedule": [np.zeros(0)]}) == []


samples = st.lists(st.floats(0, 1e6), min_size=1, max_size=900).map(np.array)


@given(st.lists(samples, min_size=1, max_size=4))
def test_median_of_the_step_cdf_is_the_mean_of_launch_medians(launches: list[Any]) -> None:
    points = step_cdf({"us": launches})
    assert [point["cdf"] for point in points] == [i / 400 for i in range(1, 401)]
    by_share = {point["cdf"]: point["us"] for point in points}
    assert by_share[0.5] == pytest.approx(np.mean([np.median(launch) for launch in launches]))
    assert by_share[1.0] == pytest.approx(np.mean([launch.max() for launch in launches]))


# ---- hooks


def times(hook_times: Mapping[Hook, Floats], *hook: str) -> list[float]:
    """Return a hook's times in the steps with tokens, 0 where it did not run."""
    of_steps: list[float] = hook_times[Hook(*hook)].tolist()
    return of_steps


def test_the_three_callbacks_are_hooks_like_the_others(tmp_path: Path) -> None:
    hook_times = steps_of(tmp_path, [scheduler(1), worker(1)]).hooks
    assert times(hook_times, *OWN, "build_meta") == [10.0]
    assert times(hook_times, "worker", "", "start_load_kv") == [2.0]
    assert Hook(*OWN, "start_load_kv") not in hook_times


def test_hook_that_runs_in_both_processes_has_two_entries(tmp_path: Path) -> None:
    records = [scheduler(1, hooks_us={"stats": 1.0}), worker(1, hooks_us={"stats": 7.0})]
    hook_times = steps_of(tmp_path, records).hooks
    assert times(hook_times, *OWN, "stats") == [1.0]
    assert times(hook_times, "worker", "", "stats") == [7.0]


def test_child_callbacks_have_the_same_names_as_the_parents(tmp_path: Path) -> None:
    children = {
        "A": {"build_connector_meta": 3.0, "get_num_new_matched_tokens": 5.0},
        "B": {"get_finished": 1.0, "get_transfer_results": 2.0},
    }
    hook_times = steps_of(tmp_path, [scheduler(1, children_us=children, hooks_us={})]).hooks
    assert times(hook_times, "scheduler", "A", "build_meta") == [3.0]
    assert times(hook_times, "scheduler", "A", "get_num_new_matched_tokens") == [5.0]
    assert times(hook_times, "scheduler", "B", "get_finished") == [3.0]


def test_hook_time_in_empty_polling_steps_counts_in_no_step(tmp_path: Path) -> None:
    idle = {"decode_tokens": 0, "hooks_us": {"get_num_new_matched_tokens": 400.0}}
    records = [scheduler(1, hooks_us={}), scheduler(2, **idle), scheduler(3, **idle)]
    hook_times = steps_of(tmp_path, records).hooks
    assert Hook(*OWN, "get_num_new_matched_tokens") not in hook_times
    assert times(hook_times, *OWN, "build_meta") == [10.0]


def test_hooks_outside_the_measured_window_do_not_count(tmp_path: Path) -> None:
    before = {"t_ns": START - 1, "hooks_us": {"on_new_request": 9.0}}
    after = worker(1, hooks_us={"wait_for_save": 9.0})
    hook_times = steps_of(tmp_path, [scheduler(1, **before), after, scheduler(2)]).hooks
    assert {hook.name for hook in hook_times} == {"build_meta", "get_finished"}


def test_field_names_equal_those_of_the_step_probe() -> None:
    assert analysis_steps.FIELDS == probe.FIELDS

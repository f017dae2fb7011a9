"""Hooks in the steps of a cell: which ran, how often, how long, and whose they are."""

from pathlib import Path
from typing import Any

import pytest

from connector_tax.analysis import hooks
from connector_tax.analysis.hooks import Floats, Hook
from connector_tax.files import ArtifactError
from connector_tax.vllm.step_probe import probe
from tests.analysis.test_steps import START, scheduler, steps_of, worker

OWN = ("scheduler", "")


def hooks_of(folder: Path, records: list[dict[str, Any]]) -> dict[Hook, Floats]:
    """The hooks of a cell with these records."""
    return dict(steps_of(folder, records).hooks)


def times(hook_times: dict[Hook, Floats], *hook: str) -> list[float]:
    """A hook's times in the steps with tokens, 0 where it did not run."""
    of_steps: list[float] = hook_times[Hook(*hook)].tolist()
    return of_steps


def test_a_hook_that_ran_in_some_steps_took_nothing_in_the_others(tmp_path: Path) -> None:
    records = [scheduler(i, hooks_us={"take_events": 1.5}) for i in (1, 2, 3)]
    records[1]["hooks_us"]["on_new_request"] = 40.0
    hook_times = hooks_of(tmp_path, records)
    assert times(hook_times, *OWN, "on_new_request") == [0.0, 40.0, 0.0]
    assert times(hook_times, *OWN, "take_events") == [1.5, 1.5, 1.5]


def test_the_three_callbacks_are_hooks_like_the_others(tmp_path: Path) -> None:
    hook_times = hooks_of(tmp_path, [scheduler(1), worker(1)])
    assert times(hook_times, *OWN, "build_meta") == [10.0]
    assert times(hook_times, "worker", "", "start_load_kv") == [2.0]
    assert Hook(*OWN, "start_load_kv") not in hook_times


def test_a_hook_of_both_processes_is_two_hooks(tmp_path: Path) -> None:
    records = [scheduler(1, hooks_us={"stats": 1.0}), worker(1, hooks_us={"stats": 7.0})]
    hook_times = hooks_of(tmp_path, records)
    assert times(hook_times, *OWN, "stats") == [1.0]
    assert times(hook_times, "worker", "", "stats") == [7.0]


def test_a_child_s_callbacks_have_the_names_of_the_parent_s(tmp_path: Path) -> None:
    children = {
        "A": {"build_connector_meta": 3.0, "get_num_new_matched_tokens": 5.0},
        "B": {"get_finished": 1.0, "get_transfer_results": 2.0},
    }
    hook_times = hooks_of(tmp_path, [scheduler(1, children_us=children, hooks_us={})])
    assert times(hook_times, "scheduler", "A", "build_meta") == [3.0]
    assert times(hook_times, "scheduler", "A", "get_num_new_matched_tokens") == [5.0]
    assert times(hook_times, "scheduler", "B", "get_finished") == [3.0]


def test_what_a_hook_takes_in_empty_polling_steps_is_of_no_step(tmp_path: Path) -> None:
    idle = {"decode_tokens": 0, "hooks_us": {"get_num_new_matched_tokens": 400.0}}
    records = [scheduler(1, hooks_us={}), scheduler(2, **idle), scheduler(3, **idle)]
    hook_times = hooks_of(tmp_path, records)
    assert Hook(*OWN, "get_num_new_matched_tokens") not in hook_times
    assert times(hook_times, *OWN, "build_meta") == [10.0]


def test_hooks_outside_the_measured_window_do_not_count(tmp_path: Path) -> None:
    before = {"t_ns": START - 1, "hooks_us": {"on_new_request": 9.0}}
    after = worker(1, hooks_us={"wait_for_save": 9.0})
    hook_times = hooks_of(tmp_path, [scheduler(1, **before), after, scheduler(2)])
    assert {hook.name for hook in hook_times} == {"build_meta", "get_finished"}


def test_the_slowest_tensor_parallel_rank_counts_hook_by_hook(tmp_path: Path) -> None:
    ranks = [
        worker(1, hooks_us={"wait_for_save": 2.0, "bind": 9.0}),
        worker(1, hooks_us={"wait_for_save": 8.0, "bind": 1.0}),
    ]
    hook_times = hooks_of(tmp_path, [scheduler(1), *ranks])
    assert times(hook_times, "worker", "", "wait_for_save") == [8.0]
    assert times(hook_times, "worker", "", "bind") == [9.0]


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        ({"hooks_us": [1.0]}, "Expected `object`, got `array`"),
        ({"hooks_us": {"take_events": "1"}}, "Expected `float`, got `str`"),
        ({"hooks_us": {"take_events": None}}, "Expected `float`, got `null`"),
        ({"hooks_us": {"take_events": -1.0}}, "Expected `float` >= 0"),
        ({"children_us": {"A": 1.5}}, "Expected `object`, got `float`"),
    ],
)
def test_malformed_hooks_stop_with_file_and_step(
    tmp_path: Path, bad: dict[str, Any], what: str
) -> None:
    with pytest.raises(ArtifactError) as error:
        hooks_of(tmp_path, [scheduler(1, hooks_us={}), scheduler(7, **bad)])
    assert "engine_step_A_r1.jsonl: step_id 7, scheduler" in str(error.value)
    assert what in str(error.value)
    assert "allowed:" in str(error.value)


def test_records_from_before_hooks_were_kept_have_the_callbacks(tmp_path: Path) -> None:
    hook_times = hooks_of(tmp_path, [scheduler(1), worker(1)])
    assert {hook.name for hook in hook_times} == {"build_meta", "get_finished", "start_load_kv"}


def test_the_names_are_the_step_probes() -> None:
    assert hooks.FIELDS == probe.FIELDS

"""The fit gives back the cost a log was made with."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from connector_tax.engine.fit import fit, read_steps
from connector_tax.engine.model import StepClock, StepCost
from connector_tax.files import ArtifactError

COST = StepCost(300.0, 2000.0, 15.0, 40.0, 0.05, 0.01, 0.0)


def write_log(path: Path, *, kv: bool = True, steps: int = 2000) -> Path:
    shapes = random.Random(1)
    clock = StepClock(COST, 1)
    lines = []
    for step_id in range(steps):
        prefill = shapes.choice([0, 0, 0, 128, 512])
        decodes = shapes.randint(0, 40)
        tokens = decodes * shapes.randint(100, 900)
        host, device = clock.draw_us(prefill, decodes, tokens)
        shared: dict[str, Any] = {"step_id": step_id, "prefill_tokens": prefill}
        shared |= {"decode_tokens": decodes, "t_ns": step_id}
        shared |= {"kv_tokens": tokens} if kv else {}
        lines += [
            {
                **shared,
                "process": "scheduler",
                "step_duration_us": host + 40.0,
                "engine_step_us": host + 70.0 + 55.0 + device,
                "build_meta_us": 40.0,
                "get_finished_us": 30.0,
                "start_load_kv_us": None,
            },
            {
                **shared,
                "process": "worker",
                "step_duration_us": device + 55.0,
                "build_meta_us": None,
                "get_finished_us": None,
                "start_load_kv_us": 55.0,
            },
        ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_every_coefficient_comes_back_without_the_tax(tmp_path: Path) -> None:
    result = fit(read_steps([write_log(tmp_path / "log.jsonl")]))
    assert result.coefficients == {
        "delta_us": pytest.approx(300, rel=0.01),
        "beta0_us": pytest.approx(2000, rel=0.02),
        "beta1_us_per_prefill_token": pytest.approx(15, rel=0.02),
        "beta2_us_per_decode_seq": pytest.approx(40, rel=0.1),
        "beta3_us_per_kv_token": pytest.approx(0.05, rel=0.1),
    }
    assert result.r2 > 0.99
    assert result.relative_sd == pytest.approx(0.01, rel=0.1)


def test_what_the_log_does_not_tell_costs_nothing(tmp_path: Path) -> None:
    result = fit(read_steps([write_log(tmp_path / "log.jsonl", kv=False)]))
    assert result.coefficients["beta3_us_per_kv_token"] == 0


def test_a_callback_the_worker_runs_is_not_part_of_the_cost(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl")
    records = [json.loads(line) for line in log.read_text().splitlines()]
    for record in records:
        in_worker = record["process"] == "worker"
        record["get_finished_us"] = 30.0 if in_worker else None
        record["step_duration_us"] += 30.0 if in_worker else 0.0
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    result = fit(read_steps([log]))
    assert result.coefficients["delta_us"] == pytest.approx(300, rel=0.01)
    assert result.coefficients["beta0_us"] == pytest.approx(2000, rel=0.02)


def test_a_step_without_tokens_says_nothing_of_the_cost(tmp_path: Path) -> None:
    whole = write_log(tmp_path / "log.jsonl")
    expected = fit(read_steps([whole]))
    lines = [json.loads(line) for line in whole.read_text().splitlines()]
    empty = {"prefill_tokens": 0, "decode_tokens": 0, "kv_tokens": 0}
    # As in a vLLM, which runs no model in such a step.
    short = {"step_duration_us": 100.0, "engine_step_us": 200.0}
    added = [{**line, **empty, **short, "step_id": 10_000 + line["step_id"]} for line in lines]
    whole.write_text("".join(json.dumps(line) + "\n" for line in [*lines, *added]))
    result = fit(read_steps([whole]))
    assert result.coefficients == expected.coefficients
    assert result.steps == expected.steps


def test_of_several_ranks_of_a_worker_the_slowest_counts(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl")
    slower = []
    for record in map(json.loads, log.read_text().splitlines()):
        if record["process"] == "worker":
            slower.append(record | {"step_duration_us": record["step_duration_us"] + 400})
    log.write_text("".join(json.dumps(r) + "\n" for r in slower) + log.read_text())
    assert fit(read_steps([log])).coefficients["beta0_us"] == pytest.approx(2400, rel=0.02)


@pytest.mark.parametrize(
    ("steps", "change", "said"),
    [
        (20, lambda text: text.replace("engine_step_us", "other"),
         "no scheduler record has engine_step_us"),
        (20, lambda text: text * 2, r"log\.jsonl:41: step 0 of scheduler a second time"),
        (20, lambda text: text + '{"process": "scheduler"}\n',
         r"log\.jsonl:41: not a step record"),
        (5, lambda text: text, "found 5 steps"),
    ],
)  # fmt: skip
def test_a_log_that_cannot_be_fitted_says_why(
    tmp_path: Path, steps: int, change: Callable[[str], str], said: str
) -> None:
    log = write_log(tmp_path / "log.jsonl", steps=steps)
    log.write_text(change(log.read_text()))
    with pytest.raises(ArtifactError, match=said):
        fit(read_steps([log]))

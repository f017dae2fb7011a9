"""Fit the step's cost to the step log of one launch.

    t = delta + beta0 + beta1 * prefill tokens + beta2 * decoding sequences + beta3 * KV tokens

A step without tokens is left out: vLLM runs no model in it.

Works on any log in the format of docs/artifacts.md (engine_step) whose scheduler records have
`engine_step_us`, the whole step, as the step probe and the embedded engine write it. The callbacks
of the connector are known in the log and taken off first. The betas are fitted to the worker's
records by non-negative least squares, delta is the mean of what the whole step has beyond the
worker's record.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from connector_tax.files import ArtifactError, read_jsonl

_COLUMNS = ("prefill_tokens", "decode_tokens", "kv_tokens")
_NAMES = (
    "beta0_us",
    "beta1_us_per_prefill_token",
    "beta2_us_per_decode_seq",
    "beta3_us_per_kv_token",
)
_CALLBACKS = ("build_meta_us", "get_finished_us", "start_load_kv_us")
_MIN_STEPS = 10

Array = NDArray[np.float64]
# A line of a step log: a StepRecord, or what the step probe writes in its place.
Step = Mapping[str, Any]


@dataclass(frozen=True)
class Fit:
    """The fitted cost.

    Attributes:
        coefficients: microseconds by the name the configuration gives them; a beta is 0 where the
            log says nothing of it.
        steps: steps fitted.
        r2: share of the variance explained.
        relative_sd: standard deviation of the residuals relative to the fitted time.
    """

    coefficients: dict[str, float]
    steps: int
    r2: float
    relative_sd: float


def read_steps(paths: Sequence[Path]) -> dict[str, dict[int, Step]]:
    """The records of one launch by process and step id.

    Raises:
        ArtifactError: a file that does not parse, a record without its fields, a scheduler's step
            that stands twice; names file and line.
    """
    steps: dict[str, dict[int, Step]] = {"scheduler": {}, "worker": {}}
    for path in paths:
        for number, record in enumerate(read_jsonl(path), 1):
            try:
                process = steps[record["process"]]
                known = process.get(record["step_id"])
                duration = float(record["step_duration_us"])
                float(record.get("engine_step_us") or 0.0)
            except (KeyError, TypeError, ValueError) as error:
                raise ArtifactError(f"{path}:{number}: not a step record: {error!r}") from error
            if known is not None and process is steps["scheduler"]:
                raise ArtifactError(
                    f"{path}:{number}: step {record['step_id']} of scheduler a second time; give "
                    "the files of one launch"
                )
            # Of the ranks of a worker the slowest holds the step up.
            if known is None or duration > known["step_duration_us"]:
                process[record["step_id"]] = record
    return steps


def fit(steps: Mapping[str, Mapping[int, Step]]) -> Fit:
    """Fit the cost to the steps of one launch.

    Raises:
        ArtifactError: no whole step, or fewer than 10 steps of both processes.
    """
    worker = {i: r for i, r in steps["worker"].items() if not _is_empty(r)}
    scheduler = {i: r for i, r in steps["scheduler"].items() if r.get("engine_step_us") is not None}
    if steps["scheduler"] and not scheduler:
        raise ArtifactError(
            "no scheduler record has engine_step_us: the fit needs the whole step, and "
            "step_duration_us is schedule() alone"
        )
    scheduler = {i: r for i, r in scheduler.items() if not _is_empty(r)}
    joined = sorted(scheduler.keys() & worker.keys())
    if len(joined) < _MIN_STEPS:
        raise ArtifactError(
            f"found {len(joined)} steps of both processes; a fit needs at least {_MIN_STEPS}"
        )
    rows = [{**scheduler[i], **_known(worker[i])} for i in joined]
    durations = np.array([_without_callbacks_us(worker[i], "step_duration_us") for i in joined])
    whole = np.array([_without_callbacks_us(scheduler[i], "engine_step_us") for i in joined])
    executing = np.array([worker[i]["step_duration_us"] for i in joined], dtype=float)
    delta = max(0.0, float((whole - executing).mean()))
    return _least_squares(rows, durations, delta)


def _is_empty(record: Step) -> bool:
    """Whether the record says that its step had no tokens."""
    return record.get("prefill_tokens") == 0 == record.get("decode_tokens")


def _known(record: Step) -> dict[str, Any]:
    return {key: value for key, value in record.items() if value is not None}


def _without_callbacks_us(record: Step, column: str) -> float:
    """A time of the record without the callbacks that its process ran in it."""
    return float(record[column]) - sum(record[name] or 0.0 for name in _CALLBACKS)


def _least_squares(rows: Sequence[Step], durations: Array, delta: float) -> Fit:
    columns: dict[str, Array] = {_NAMES[0]: np.ones(len(rows))}
    for name, key in zip(_NAMES[1:], _COLUMNS, strict=True):
        values = np.array([row.get(key) for row in rows], dtype=float)
        if not np.isnan(values).any() and np.ptp(values) > 0:
            columns[name] = values
    matrix = np.column_stack(list(columns.values()))
    scale = np.abs(matrix).max(axis=0)
    solution, _ = nnls(matrix / scale, durations)
    fitted = matrix @ (solution / scale)
    residuals = durations - fitted
    spread = float(((durations - durations.mean()) ** 2).sum())
    costs = dict(zip(columns, (float(value) for value in solution / scale), strict=True))
    return Fit(
        coefficients={"delta_us": delta, **{name: costs.get(name, 0.0) for name in _NAMES}},
        steps=len(rows),
        r2=1.0 - float((residuals**2).sum()) / spread if spread else float("nan"),
        relative_sd=float((residuals / np.maximum(fitted, 1.0)).std()),
    )

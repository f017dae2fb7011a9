"""Engine steps of a cell: scheduler and worker records joined by step id.

Source: design, "Step-level timing instrumentation" and "Substrate tax definition"; docs/method.md.
Empty polling steps (no token scheduled) are counted apart: a connector that polls adds steps, and
with them a median that is not the cost of a step that does work.

The design's step duration is schedule(), entry to exit. The whole engine step stands beside it: a
connector whose cost lies in the worker, or between the processes, shows there alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from connector_tax.analysis.hooks import CALLBACKS, Hook, hook_calls, hook_times
from connector_tax.analysis.ingest import Cell
from connector_tax.analysis.records import STEPS, empty_frame, read_records
from connector_tax.artifacts import paths
from connector_tax.artifacts.record_reader import read_record
from connector_tax.artifacts.stage_records import PatchStatus
from connector_tax.artifacts.study_file import Study
from connector_tax.artifacts.tables import DECODE, MIXED, PREFILL, Row
from connector_tax.files import ArtifactError

DURATIONS = ("step_duration_us", "engine_step_us")
TOKENS = ("prefill_tokens", "decode_tokens")
CDF_POINTS = 400

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Steps:
    """The steps of one cell that started in its measured window and scheduled tokens.

    Attributes:
        kind: (n,) which of KINDS each is.
        duration_us: (n,) durations of schedule().
        engine_us: (n,) durations of the whole engine step; NaN where the record lacks it.
        callbacks_us: each callback's durations, over the steps whose record has it.
        total_us: per-step sum of the three callbacks, over the steps where all three are known.
        hooks: (n,) the time of every timed hook in each step, 0 where it did not run.
        n_empty: polling steps in the window, in none of the samples above.
        n_incomplete: steps with tokens for which a callback is unknown (always all of plain's).
    """

    kind: NDArray[np.str_]
    duration_us: Floats
    engine_us: Floats
    callbacks_us: dict[str, Floats]
    total_us: Floats
    hooks: Mapping[Hook, Floats]
    n_empty: int
    n_incomplete: int

    @property
    def known_engine_us(self) -> Floats:
        """Durations of the whole engine step, over the steps whose record has it."""
        return self.engine_us[~np.isnan(self.engine_us)]


def kinds(prefill: NDArray[np.bool_], decode: NDArray[np.bool_]) -> NDArray[np.str_]:
    """The kind of each step, by whether it has tokens of prompts and of answers."""
    return np.where(prefill, np.where(decode, MIXED, PREFILL), DECODE)


def step_timing_reason(study: Study) -> str | None:
    """Why the study has no step timing; None when it has.

    Raises:
        ArtifactError: patch/patch_status.json is missing or does not say.
    """
    path = study.root / paths.PATCH_STATUS
    status = read_record(path, PatchStatus)
    if not isinstance(status, dict) or not isinstance(status.get("step_timing_available"), bool):
        raise ArtifactError(f"{path}: step_timing_available must be true or false")
    if status["step_timing_available"]:
        return None
    return f"step timing is not available: {status.get('reason') or 'the patch did not apply'}"


def read_steps(cell: Cell) -> Steps:
    """Read and join the step records of a valid cell.

    Raises:
        ArtifactError: the index does not list the file, a record is malformed, or the scheduler has
            two records of one step.
    """
    assert cell.record is not None
    path, digest = cell.file("engine_step"), cell.sha256("engine_step")
    if digest is None:
        raise ArtifactError(
            f"{cell.folder.parent / 'index.json'}: no hash of {path.name}, though"
            " patch_status.json says that step timing is available"
        )
    window = cell.record["window"]
    start, stop = window["t_warmup_end_ns"], window["t_stop_ns"]
    schedulers, workers, calls = [], [], []
    for frame in read_records(path, STEPS, digest):
        is_scheduler = pl.col("process") == "scheduler"
        inside = (pl.col("t_ns") >= start) & (pl.col("t_ns") < stop)
        schedulers.append(
            frame.filter(is_scheduler & inside).select(
                "step_id",
                *DURATIONS,
                *CALLBACKS,
                *TOKENS,
            )
        )
        workers.append(frame.filter(~is_scheduler).select("step_id", *CALLBACKS))
        calls.append(hook_calls(path, frame))
    empty = empty_frame(STEPS)
    scheduler = pl.concat(schedulers or [empty.select("step_id", *DURATIONS, *CALLBACKS, *TOKENS)])
    worker = pl.concat(workers or [empty.select("step_id", *CALLBACKS)])
    every_call = pl.concat(calls or [hook_calls(path, empty)])
    if scheduler["step_id"].n_unique() != scheduler.height:
        twice = scheduler.filter(scheduler["step_id"].is_duplicated())["step_id"][0]
        raise ArtifactError(f"{path}: the scheduler has two records of step_id {twice}")
    return _join(scheduler, worker, every_call)


def _join(scheduler: pl.DataFrame, worker: pl.DataFrame, calls: pl.DataFrame) -> Steps:
    if worker["step_id"].n_unique() != worker.height:
        # One record per tensor-parallel rank: the slowest rank holds the step up.
        worker = worker.group_by("step_id", maintain_order=True).max()
    busy = scheduler.filter(pl.sum_horizontal(*TOKENS) > 0)
    joined = busy.join(
        worker, on="step_id", how="left", suffix="_worker", maintain_order="left"
    ).select(
        *DURATIONS,
        *TOKENS,
        *(
            # A hook is timed where it runs; if both processes run it, the step pays for both.
            pl.when(pl.col(name).is_null() & pl.col(f"{name}_worker").is_null())
            .then(None)
            .otherwise(pl.sum_horizontal(name, f"{name}_worker"))
            .alias(name)
            for name in CALLBACKS
        ),
    )
    complete = joined.drop_nulls(CALLBACKS)
    total = complete.select(pl.sum_horizontal(*CALLBACKS).alias("total"))["total"]
    prefill, decode = (joined[name].to_numpy() > 0 for name in TOKENS)
    return Steps(
        kind=kinds(prefill, decode),
        duration_us=joined["step_duration_us"].to_numpy(),
        engine_us=joined["engine_step_us"].fill_null(float("nan")).to_numpy(),
        callbacks_us={name: joined[name].drop_nulls().to_numpy() for name in CALLBACKS},
        total_us=total.to_numpy(),
        hooks=hook_times(calls, busy["step_id"]),
        n_empty=scheduler.height - busy.height,
        n_incomplete=joined.height - complete.height,
    )


def step_columns(steps: Steps) -> Row:
    """The tables' step columns of one cell: p50 and p90 in us, counts; None for an empty sample."""
    samples = {
        "step_duration_us": steps.duration_us,
        "engine_step_us": steps.known_engine_us,
        **steps.callbacks_us,
        "connector_total_us": steps.total_us,
    }
    row: Row = {}
    for name, values in samples.items():
        for percent in (50, 90):
            row[f"{name}_p{percent}"] = (
                float(np.percentile(values, percent)) if len(values) else None
            )
    row["n_steps"] = len(steps.duration_us)
    row["n_empty_steps"] = steps.n_empty
    row["n_incomplete_steps"] = steps.n_incomplete
    return row


def step_cdf(samples: Mapping[str, Sequence[Floats]]) -> list[Row]:
    """CDF_POINTS shares of the steps, and the mean over launches of what each launch has there.

    The curve's value at one half is thus the mean of the launches' medians, which is what step
    taxes are made of; a curve of all steps together is another thing where launches differ.

    Args:
        samples: the durations in us of each launch, by column; a column without steps is None.
    """
    shares = np.arange(1, CDF_POINTS + 1) / CDF_POINTS
    columns = {}
    for name, launches in samples.items():
        quantiles = [np.quantile(sample, shares) for sample in launches if len(sample)]
        columns[name] = np.mean(quantiles, axis=0).tolist() if quantiles else [None] * CDF_POINTS
    if all(values[0] is None for values in columns.values()):
        return []
    return [
        {**{name: values[i] for name, values in columns.items()}, "cdf": float(share)}
        for i, share in enumerate(shares)
    ]

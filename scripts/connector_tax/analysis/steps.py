"""Engine steps of a cell: scheduler and worker records joined by step id.

Source: design, "Step-level timing instrumentation" and "Substrate tax definition"; METHOD.md.
Empty polling steps (no token scheduled) are counted apart: a connector that polls adds steps, and
with them a median that is not the cost of a step that does work.

The design's step duration is schedule(), entry to exit. The whole engine step stands beside it: a
connector whose cost lies in the worker, or between the processes, shows there alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from connector_tax.analysis.ingest import Cell, Study
from connector_tax.analysis.records import STEPS, empty_frame, read_records
from connector_tax.files import ArtifactError, read_json

DURATIONS = ("step_duration_us", "engine_step_us")
CALLBACKS = ("build_meta_us", "get_finished_us", "start_load_kv_us")
CDF_POINTS = 400
STEP_COLUMNS = tuple(
    f"{name}_{percent}"
    for name in (*DURATIONS, *CALLBACKS, "connector_total_us")
    for percent in ("p50", "p90")
)

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Steps:
    """The steps of one cell that started in its measured window and scheduled tokens.

    Attributes:
        duration_us: (n,) durations of schedule().
        engine_us: durations of the whole engine step, over the steps whose record has it.
        callbacks_us: each callback's durations, over the steps whose record has it.
        total_us: per-step sum of the three callbacks, over the steps where all three are known.
        n_empty: polling steps in the window, in none of the above.
        n_incomplete: steps with tokens for which a callback is unknown (always all of plain's).
    """

    duration_us: Floats
    engine_us: Floats
    callbacks_us: dict[str, Floats]
    total_us: Floats
    n_empty: int
    n_incomplete: int


def step_timing_reason(study: Study) -> str | None:
    """Why the study has no step timing; None when it has.

    Raises:
        ArtifactError: patch/patch_status.json is missing or does not say.
    """
    path = study.root / "patch" / "patch_status.json"
    status = read_json(path)
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
    start, stop = (cell.record["window"][key] for key in ("t_warmup_end_ns", "t_stop_ns"))
    schedulers, workers = [], []
    for frame in read_records(path, STEPS, digest):
        is_scheduler = pl.col("process") == "scheduler"
        inside = (pl.col("t_ns") >= start) & (pl.col("t_ns") < stop)
        schedulers.append(
            frame.filter(is_scheduler & inside).select(
                "step_id",
                *DURATIONS,
                *CALLBACKS,
                tokens=pl.col("prefill_tokens") + pl.col("decode_tokens"),
            )
        )
        workers.append(frame.filter(~is_scheduler).select("step_id", *CALLBACKS))
    empty = empty_frame(STEPS)
    scheduler = pl.concat(
        schedulers or [empty.select("step_id", *DURATIONS, *CALLBACKS, tokens="step_id")]
    )
    worker = pl.concat(workers or [empty.select("step_id", *CALLBACKS)])
    if scheduler["step_id"].n_unique() != scheduler.height:
        twice = scheduler.filter(scheduler["step_id"].is_duplicated())["step_id"][0]
        raise ArtifactError(f"{path}: the scheduler has two records of step_id {twice}")
    return _join(scheduler, worker)


def _join(scheduler: pl.DataFrame, worker: pl.DataFrame) -> Steps:
    if worker["step_id"].n_unique() != worker.height:
        # One record per tensor-parallel rank: the slowest rank holds the step up.
        worker = worker.group_by("step_id", maintain_order=True).max()
    busy = scheduler.filter(pl.col("tokens") > 0)
    joined = busy.join(worker, on="step_id", how="left", suffix="_worker").select(
        *DURATIONS,
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
    return Steps(
        duration_us=joined["step_duration_us"].to_numpy(),
        engine_us=joined["engine_step_us"].drop_nulls().to_numpy(),
        callbacks_us={name: joined[name].drop_nulls().to_numpy() for name in CALLBACKS},
        total_us=total.to_numpy(),
        n_empty=scheduler.height - busy.height,
        n_incomplete=joined.height - complete.height,
    )


def step_columns(steps: Steps) -> dict[str, Any]:
    """The tables' step columns of one cell: p50 and p90 in us, counts; None for an empty sample."""
    samples = {
        "step_duration_us": steps.duration_us,
        "engine_step_us": steps.engine_us,
        **steps.callbacks_us,
        "connector_total_us": steps.total_us,
    }
    row: dict[str, Any] = {}
    for name, values in samples.items():
        for percent in (50, 90):
            row[f"{name}_p{percent}"] = (
                float(np.percentile(values, percent)) if len(values) else None
            )
    row["n_steps"] = len(steps.duration_us)
    row["n_empty_steps"] = steps.n_empty
    row["n_incomplete_steps"] = steps.n_incomplete
    return row


def step_taxes(row: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, float | None]:
    """The step taxes of a row against plain's, in us: schedule(), the whole step, the callbacks.

    `unattributed` is the design's tax_step - tax_callback; only build_meta runs inside schedule(),
    so it is negative for a connector whose other callbacks cost more than schedule() does.
    """
    step, engine = (
        None if row[name] is None or plain[name] is None else row[name] - plain[name]
        for name in (f"{duration}_p50" for duration in DURATIONS)
    )
    callback = row["connector_total_us_p50"]
    if row["configuration"] == "plain":
        callback = 0.0  # plain has no connector, hence no callbacks
    return {
        "tax_step_p50": step,
        "tax_engine_step_p50": engine,
        "tax_callback_p50": callback,
        "unattributed": None if step is None or callback is None else step - callback,
    }


def step_cdf(duration_us: Floats, engine_us: Floats) -> list[dict[str, Any]]:
    """At most CDF_POINTS shares of the steps, and what that share of each sample is at or below.

    Both samples are in us, of the same steps; `engine_step_us` is None where the second is empty.
    """
    if len(duration_us) == 0:
        return []
    points = min(CDF_POINTS, len(duration_us))
    shares = np.arange(1, points + 1) / points
    columns = [
        np.quantile(sample, shares, method="inverted_cdf").tolist()
        if len(sample)
        else [None] * points
        for sample in (duration_us, engine_us)
    ]
    return [
        {**dict(zip(DURATIONS, values, strict=True)), "cdf": float(share)}
        for *values, share in zip(*columns, shares, strict=True)
    ]

"""Join scheduler and worker records of a cell's engine steps by step id, with their hooks.

Source: design, "Step-level timing instrumentation" and "Substrate tax definition"; docs/method.md,
"Steps". Polling steps (no token scheduled) are counted separately: a connector that polls adds such
steps, which would move the median away from the cost of a step that does work.

The design's step duration is schedule(), entry to exit. The whole engine step is reported too,
because only it includes costs in the worker or between the processes. The design's three callbacks
have their own fields in a step record. The step probe adds the connector's other hooks (`hooks_us`)
and the hooks of a MultiConnector's children (`children_us`), by method name.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from connector_tax.analysis.measure import Requests
from connector_tax.analysis.records import STEPS, StepRow, Table, in_window, taken, whole_table
from connector_tax.artifacts import paths
from connector_tax.artifacts.cell_records import MeasuredWindow
from connector_tax.artifacts.folder import CellFolder
from connector_tax.artifacts.record_reader import read_record
from connector_tax.artifacts.stage_records import PatchStatus
from connector_tax.artifacts.study_file import Study
from connector_tax.artifacts.tables import DECODE, MIXED, PREFILL, STEP_SAMPLES, Row
from connector_tax.files import ArtifactError

CALLBACKS = ("build_meta_us", "get_finished_us", "start_load_kv_us")
TOKENS = ("prefill_tokens", "decode_tokens")
CDF_POINTS = 400

Floats = NDArray[np.float64]
# Name in children_us -> own field in the step records. Repeats connector_tax.vllm.step_probe, which
# is not needed to replot an archive.
FIELDS = {
    "build_connector_meta": "build_meta_us",
    "get_finished": "get_finished_us",
    "get_transfer_results": "get_finished_us",
    "start_load_kv": "start_load_kv_us",
}


class Hook(NamedTuple):
    """A timed hook: its process, its connector and its name.

    `child` is empty for the configured connector itself, else the name of a MultiConnector's child.
    The three callbacks have the names of the design's fields, without the unit.
    """

    process: str
    child: str
    name: str


@dataclass(frozen=True)
class Steps:
    """The steps of one cell that started in its measured window and scheduled tokens.

    Attributes:
        kinds: (n,) kind of each step.
        samples: (n,) each of STEP_SAMPLES in us, NaN if unknown; the callbacks' total only where
            all three are known.
        hooks: (n,) time of every timed hook in each step in us, 0 if it did not run.
        n_empty: number of polling steps in the window, which the arrays leave out.
        prefill_ns: start times of steps with prompt tokens in the whole cell, in order.
    """

    kinds: NDArray[np.str_]
    samples: Mapping[str, Floats]
    hooks: Mapping[Hook, Floats]
    n_empty: int
    prefill_ns: NDArray[np.int64]

    def known(self, sample: str) -> Floats:
        """Return the column `name` of `samples` without unknown values."""
        values = self.samples[sample]
        return values[~np.isnan(values)]


def kinds_of(prefill: NDArray[np.bool_], decode: NDArray[np.bool_]) -> NDArray[np.str_]:
    """Return the kind of each step, by its prompt tokens and decoding sequences."""
    return np.where(prefill & decode, MIXED, np.where(prefill, PREFILL, DECODE))


def step_timing_reason(study: Study) -> str | None:
    """Return why the study has no step timing, or None if it has.

    Raises:
        ArtifactError: patch/patch_status.json is missing or incomplete.
    """
    status = read_record(study.root / paths.PATCH_STATUS, PatchStatus)
    if status["step_timing_available"]:
        return None
    return f"step timing is not available: {status.get('reason') or 'the patch did not apply'}"


def read_steps(cell: CellFolder) -> Steps:
    """Read and join the step records of a valid cell.

    Raises:
        ArtifactError: the index does not list the file, a record is malformed, or the scheduler has
            two records of one step.
    """
    assert cell.record is not None
    path, calls = cell.file("engine_step"), _Calls()
    blocks = STEPS.rows(path, cell.blocks("engine_step"))
    records = whole_table(STEPS, map(calls.taken, blocks))
    step_times(cell, records)
    of_scheduler = records["process"] == "scheduler"
    of_window = in_window(records["t_ns"], cell.record["window"])
    scheduler = taken(records, of_scheduler & of_window)
    ids, counts = np.unique(scheduler["step_id"], return_counts=True)
    if (counts > 1).any():
        twice = ids[counts > 1][0]
        raise ArtifactError(f"{path}: the scheduler has two records of step_id {twice}")
    busy = taken(scheduler, np.sum([scheduler[name] for name in TOKENS], axis=0) > 0)
    worker = taken(records, ~of_scheduler)
    samples = {name: _paid(busy, worker, name) for name in CALLBACKS}
    samples["connector_total_us"] = sum(samples.values(), np.zeros(len(busy["step_id"])))
    prefill = records["prefill_tokens"] > 0
    return Steps(
        kinds=kinds_of(*(busy[name] > 0 for name in TOKENS)),
        samples={name: samples[name] if name in samples else busy[name] for name in STEP_SAMPLES},
        hooks=calls.times(busy["step_id"]),
        n_empty=len(scheduler["step_id"]) - len(busy["step_id"]),
        prefill_ns=np.sort(records["t_ns"][of_scheduler & prefill]),
    )


def step_times(cell: CellFolder, records: Table | None = None) -> tuple[Floats, Floats]:
    """Return the complete engine steps with tokens of a whole cell; the result is cached.

    Args:
        records: all of the cell's step records; if None, they are read.

    Returns:
        when each began, in ns, and how long it took, in us: schedule() if no whole step is
        recorded.

    Raises:
        ArtifactError: as `read_steps`, except for two records of one step.
    """

    def times() -> tuple[Floats, Floats]:
        path, table = cell.file("engine_step"), records
        if table is None:
            table = whole_table(STEPS, STEPS.rows(path, cell.blocks("engine_step")))
        tokens = table["prefill_tokens"] + table["decode_tokens"]
        busy = taken(table, (table["process"] == "scheduler") & (tokens > 0))
        whole, schedule = busy["engine_step_us"], busy["step_duration_us"]
        return busy["t_ns"].astype(float), np.where(np.isnan(whole), schedule, whole)

    return cell.kept("step times", times)


def _paid(busy: Table, worker: Table, name: str) -> Floats:
    """Return a callback's time in each step, NaN if no record of the step has it.

    It is timed where it runs; if both processes run it, both times count.
    """
    steps, place = np.unique(worker["step_id"], return_inverse=True)
    # One record per tensor-parallel rank: the slowest rank determines the step.
    slowest = np.full(len(steps) + 1, np.nan)
    np.fmax.at(slowest, place, worker[name])
    at = np.searchsorted(steps, busy["step_id"])
    at[~np.isin(busy["step_id"], steps)] = len(steps)
    first_rank: Floats = busy[name]
    total: Floats = first_rank + slowest[at]
    return np.where(np.isnan(total), np.fmax(first_rank, slowest[at]), total)


def prefill_wait_ms(requests: Requests, steps: Steps, window: MeasuredWindow) -> float | None:
    """Return the median time from a request's due time to the step that computes its prompt.

    TTFT is split at the start of the step that computes the prompt (the first with prompt tokens
    after the request's due time). A request that arrives while others decode waits for the end of
    the current step. If requests always arrive at nearly the same moment of a step, as with fixed
    arrivals, that wait differs between configurations by up to a step, whatever they cost.

    Returns:
        The median over a cell's measured successes in ms; None if no such step follows a request.
    """
    due_ns = window["t_warmup_end_ns"] + np.rint(requests.since_warmup_s * 1e9).astype(np.int64)
    place = np.searchsorted(steps.prefill_ns, due_ns)
    known = place < len(steps.prefill_ns)
    if not known.any():
        return None
    return float(np.median(steps.prefill_ns[place[known]] - due_ns[known])) / 1e6


def step_columns(steps: Steps) -> Row:
    """Return one cell's step columns in the tables: p50 and p90 in us (None if empty), counts."""
    row: Row = {}
    for name in STEP_SAMPLES:
        values = steps.known(name)
        for percent in (50, 90):
            row[f"{name}_p{percent}"] = (
                float(np.percentile(values, percent)) if len(values) else None
            )
    row["n_steps"], row["n_empty_steps"] = len(steps.kinds), steps.n_empty
    # Steps with an unknown callback time: for plain always all.
    row["n_incomplete_steps"] = int(np.isnan(steps.samples["connector_total_us"]).sum())
    return row


def step_cdf(samples: Mapping[str, Sequence[Floats]]) -> list[Row]:
    """Return CDF_POINTS shares of steps, and at each share the mean of the launches' quantiles.

    The value at one half is the mean of the launches' medians, from which step taxes are computed.
    A curve over all steps together would differ if launches differ.

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


# ---- hooks


class _Calls:
    """The hooks of all step records: step ids, and times in us."""

    def __init__(self) -> None:
        # Keyed by the fields of a Hook: making a tuple takes a fifth of the time.
        self._calls: defaultdict[tuple[str, str, str], tuple[list[int], list[float]]] = defaultdict(
            lambda: ([], [])
        )

    def taken(self, rows: list[StepRow]) -> list[StepRow]:
        """Store the hooks of these rows and return the rows."""
        for row in rows:
            for field, hook in _CALLBACK_HOOKS.items():
                if (us := getattr(row, field)) is not None:
                    self._add((row.process, "", hook), row.step_id, us)
            if row.hooks_us:
                self._add_all(row, "", row.hooks_us)
            for child, times in (row.children_us or {}).items():
                self._add_all(row, child, times)
        return rows

    def _add_all(self, row: StepRow, child: str, times: Mapping[str, float]) -> None:
        # Entries of a child have method names; its callbacks get the names of their fields.
        named: dict[str, float] = {}
        for name, us in times.items():
            if (hook := _METHOD_HOOKS.get(name)) is None:
                self._add((row.process, child, name), row.step_id, us)
            else:
                named[hook] = named.get(hook, 0.0) + us
        for hook, us in named.items():
            self._add((row.process, child, hook), row.step_id, us)

    def _add(self, hook: tuple[str, str, str], step_id: int, us: float) -> None:
        ids, times = self._calls[hook]
        ids.append(step_id)
        times.append(us)

    def times(self, steps: NDArray[np.int64]) -> dict[Hook, Floats]:
        """Return, by hook, the time that the hook took in each step, in us; 0 if it did not run.

        Args:
            steps: ids of the steps in the window that scheduled tokens, without duplicates.
        """
        order = np.argsort(steps)
        times: dict[Hook, Floats] = {}
        for hook in sorted(self._calls):
            ids, us = map(np.array, self._calls[hook])
            place = np.minimum(np.searchsorted(steps, ids, sorter=order), len(steps) - 1)
            place = order[place] if len(steps) else place
            known = steps[place] == ids if len(steps) else np.zeros(len(ids), bool)
            if known.any():
                of_hook = times[Hook(*hook)] = np.zeros(len(steps))
                # One record per tensor-parallel rank: the slowest rank determines the step.
                np.maximum.at(of_hook, place[known], us[known])
        return times


def _hook(field: str) -> str:
    return field.removesuffix("_us")


_CALLBACK_HOOKS = {field: _hook(field) for field in CALLBACKS}
_METHOD_HOOKS = {hook: hook for hook in _CALLBACK_HOOKS.values()} | {
    method: _hook(field) for method, field in FIELDS.items()
}

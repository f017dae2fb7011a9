"""The steps of an emulated device: what the host's work adds to them.

`exposed_us` is for how long the device had nothing to do though the engine had: from the end of the
step before, or from when the engine core was given the first request, to the step's start.
`host_busy_us` is what the host's thread worked for a step: from when it went on after the step
before to when it waited for this one. Time in which it was ready and had no CPU is in both; both
need no other configuration to compare with.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from connector_tax.analysis.ingest import Cell
from connector_tax.analysis.records import DEVICE, read_records
from connector_tax.artifacts import paths
from connector_tax.artifacts.cell_records import DeviceLine
from connector_tax.files import ArtifactError

Floats = NDArray[np.float64]
# A double holds ns exactly for 104 days after the machine's start, then every second one.
CLOCK_NS = 4


@dataclass(frozen=True)
class DeviceSteps:
    """Steps in order; NaN where a value has no meaning.

    Attributes:
        begun_ns: when a step was queued.
        prefill: whether it computes tokens of a prompt.
        decode_seqs: sequences that decode.
        continued: whether the engine had work for it since the step before ended, or earlier.
        device_us: what the device took.
        period_us: from the end of the step before; of continued steps only.
        woken_late_us: from its end to when the host went on, where the host waited for it.
        misplaced: steps that are not where the queue has them.
    """

    begun_ns: NDArray[np.int64]
    prefill: NDArray[np.bool_]
    decode_seqs: NDArray[np.int64]
    continued: NDArray[np.bool_]
    device_us: Floats
    period_us: Floats
    exposed_us: Floats
    host_busy_us: Floats
    woken_late_us: Floats
    misplaced: int

    def __len__(self) -> int:
        return len(self.begun_ns)


def device_steps(frame: pl.DataFrame) -> DeviceSteps:
    """The steps of one cell's device log, whole and in order."""
    if frame.is_empty():
        none, whole = np.empty(0), np.empty(0, np.int64)
        no = np.empty(0, bool)
        return DeviceSteps(whole, no, whole, no, none, none, none, none, none, 0)
    queued, start, end = (frame[f"t_{name}ns"].to_numpy() for name in ("", "start_", "end_"))
    since, wait, woken = (
        frame[f"t_{name}_ns"].cast(pl.Float64).fill_null(float("nan")).to_numpy()
        for name in ("since", "wait", "woken")
    )
    # Nothing is known of what was before the first.
    ended, went_on = (np.concatenate(([np.nan], times[:-1])) for times in (end, woken))
    continued = np.isnan(since)
    exposed = (start - np.fmax(ended, since)) / 1e3
    exposed[0] = np.nan if continued[0] else exposed[0]
    began = np.where(continued, went_on, np.fmax(went_on, since))
    misplaced = np.abs(start[1:] - np.maximum(queued[1:], end[:-1])) > CLOCK_NS
    return DeviceSteps(
        begun_ns=queued,
        prefill=frame["prefill_tokens"].to_numpy() > 0,
        decode_seqs=frame["decode_seqs"].to_numpy(),
        continued=continued,
        device_us=(end - start) / 1e3,
        period_us=np.where(continued, (end - ended) / 1e3, np.nan),
        exposed_us=exposed,
        host_busy_us=(wait - began) / 1e3,
        woken_late_us=np.where(wait < end, (woken - end) / 1e3, np.nan),
        misplaced=int(misplaced.sum()),
    )


def of_lines(lines: Sequence[DeviceLine]) -> DeviceSteps:
    """The steps of a device log that has just been taken."""
    return device_steps(pl.DataFrame(lines, schema=DEVICE.columns))


def read_device(cell: Cell) -> DeviceSteps:
    """The steps of a valid cell that were queued in its measured window.

    Raises:
        ArtifactError: the index does not list the device's log, or a line of it is malformed.
    """
    assert cell.record is not None
    path, digest = cell.file(paths.DEVICE_LOG), cell.sha256(paths.DEVICE_LOG)
    if digest is None:
        raise ArtifactError(f"{cell.folder.parent / paths.INDEX}: no hash of {path.name}")
    steps = device_steps(pl.concat(list(read_records(path, DEVICE, digest))))
    window = cell.record["window"]
    start, stop = window["t_warmup_end_ns"], window["t_stop_ns"]
    return only(steps, (steps.begun_ns >= start) & (steps.begun_ns < stop))


def only(steps: DeviceSteps, kept: NDArray[np.bool_]) -> DeviceSteps:
    """Those of the steps that are `kept`."""
    columns = {name: value[kept] for name, value in vars(steps).items() if name != "misplaced"}
    return DeviceSteps(**columns, misplaced=steps.misplaced)


def device_values(
    lines: Sequence[DeviceLine], step_lines: Iterable[Mapping[str, Any]], is_baseline: bool
) -> dict[str, float | None]:
    """What DEVICE_CHECKS judge of one cell, by check; None where nothing is known.

    Args:
        lines: of its device log.
        step_lines: of its step log.
        is_baseline: whether it is of the baseline, whose exposed steps alone are bounded: those of
            a connector are what it costs.
    """
    steps = of_lines(lines)
    late, exposed = steps.woken_late_us, steps.exposed_us[steps.continued]
    late, exposed = late[~np.isnan(late)], exposed[~np.isnan(exposed)]
    worked = {
        line["step_id"]
        for line in step_lines
        if line["process"] == "scheduler" and line["prefill_tokens"] + line["decode_tokens"]
    }
    recorded = [line["step_id"] for line in lines]
    unknown = len(worked.symmetric_difference(recorded)) + len(recorded) - len(set(recorded))
    values: dict[str, float | None] = {
        "device_log_faults": steps.misplaced + unknown if len(steps) else None,
        "device_woken_late_ms": float(np.median(late)) / 1e3 if len(late) else None,
    }
    if is_baseline:
        share = float((exposed > 0).mean()) if len(exposed) else None
        values["device_exposed_share"] = share
    return values

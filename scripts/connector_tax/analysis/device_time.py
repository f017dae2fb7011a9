"""Read the steps of an emulated device and the time that the host adds to them.

`exposed_us` is the time in which the device was idle although the engine had work: from the end of
the previous step, or from when the engine core received the first request, to the step's start.
`host_busy_us` is the host thread's work for a step: from when it continued after the previous step
to when it waited for this one. Both include time in which the thread was ready but had no CPU, and
neither needs a second configuration for comparison.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from connector_tax.analysis.records import DEVICE, DeviceRow, Table, in_window, taken, whole_table
from connector_tax.artifacts import paths
from connector_tax.artifacts.cell_records import DeviceLine
from connector_tax.artifacts.folder import CellFolder

# A double is exact to the ns for 104 days after the machine's start.
CLOCK_NS = 4


def device_steps(log: Table) -> Table:
    """Return the steps of one cell's device log, whole and in order; NaN where a value has no
    meaning.

    Columns:
        t_ns: when a step was queued.
        prefill_tokens, decode_seqs: tokens of prompts that it computes, sequences that decode.
        continued: whether the engine had the step's work when the previous step ended.
        device_us: the device's time for the step.
        period_us: from the end of the step before; of continued steps only.
        exposed_us, host_busy_us: see above.
        woken_late_us: from the step's end to when the host continued, if the host waited.
        misplaced: whether the start is wrong, being neither the queueing time nor the previous
            step's end.
    """
    start, end, since, wait, woken = (
        log[f"t_{name}_ns"] for name in ("start", "end", "since", "wait", "woken")
    )
    # The step before the first is not known.
    ended, went_on = (np.concatenate([[np.nan], of])[: len(of)] for of in (end, woken))
    continued = np.isnan(since)
    return {
        **{name: log[name] for name in ("t_ns", "prefill_tokens", "decode_seqs")},
        "continued": continued,
        "device_us": (end - start) / 1e3,
        "period_us": np.where(continued, (end - ended) / 1e3, np.nan),
        "exposed_us": (start - np.fmax(ended, since)) / 1e3,
        "host_busy_us": (wait - np.fmax(went_on, since)) / 1e3,
        "woken_late_us": np.where(wait < end, (woken - end) / 1e3, np.nan),
        "misplaced": np.abs(start - np.fmax(log["t_ns"], ended)) * ~np.isnan(ended) > CLOCK_NS,
    }


def of_lines(lines: Sequence[DeviceLine]) -> Table:
    """Return the steps of a device log that was just collected."""
    return device_steps(DEVICE.table(msgspec.convert(lines, list[DeviceRow])))


def read_device(cell: CellFolder) -> Table:
    """Return the steps of a valid cell that were queued in its measured window.

    Raises:
        ArtifactError: the index does not list the device log, or a line is malformed.
    """
    assert cell.record is not None
    blocks = cell.blocks(paths.DEVICE_LOG)
    steps = device_steps(whole_table(DEVICE, DEVICE.rows(cell.file(paths.DEVICE_LOG), blocks)))
    return taken(steps, in_window(steps["t_ns"], cell.record["window"]))


def device_values(
    lines: Sequence[DeviceLine], step_lines: Iterable[Mapping[str, Any]], is_baseline: bool
) -> dict[str, float | None]:
    """Return the values of one cell for DEVICE_CHECKS, by check; None for unknown values.

    Args:
        is_baseline: whether it is a cell of the baseline. Only the baseline's exposed steps are
            bounded, since a connector's exposed steps are its cost.
    """
    steps = of_lines(lines)
    worked = {
        line["step_id"]
        for line in step_lines
        if line["process"] == "scheduler" and line["prefill_tokens"] + line["decode_tokens"]
    }
    recorded = [line["step_id"] for line in lines]
    unknown = len(worked.symmetric_difference(recorded)) + len(recorded) - len(set(recorded))
    late_us, exposed_us = (
        of[~np.isnan(of)]
        for of in (steps["woken_late_us"], steps["exposed_us"][steps["continued"]])
    )
    # A host that is always slower than the device never waits, so it is never woken late.
    never_waited = None if np.isnan(steps["host_busy_us"]).all() else 0.0
    exposed_share = float(np.mean(exposed_us > 0)) if len(exposed_us) else None
    values: dict[str, float | None] = {
        "device_log_faults": int(steps["misplaced"].sum()) + unknown if len(lines) else None,
        "device_woken_late_ms": float(np.median(late_us)) / 1e3 if len(late_us) else never_waited,
    }
    return values | ({"device_exposed_share": exposed_share} if is_baseline else {})

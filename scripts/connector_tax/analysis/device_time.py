"""The steps of an emulated device: what the host's work adds to them.

`exposed_us` is for how long the device had nothing to do though the engine had: from the end of the
step before, or from when the engine core was given the first request, to the step's start.
`host_busy_us` is what the host's thread worked for a step: from when it went on after the step
before to when it waited for this one. Time in which it was ready and had no CPU is in both; both
need no other configuration to compare with.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import polars as pl

from connector_tax.analysis.records import DEVICE, in_window, whole_table
from connector_tax.artifacts import paths
from connector_tax.artifacts.cell_records import DeviceLine
from connector_tax.artifacts.folder import CellFolder

# A double holds ns exactly for 104 days after the machine's start, then every second one.
CLOCK_NS = 4


def device_steps(log: pl.DataFrame) -> pl.DataFrame:
    """Return the steps of one cell's device log, whole and in order; null where a value has no
    meaning.

    Columns:
        t_ns: when a step was queued.
        prefill_tokens, decode_seqs: tokens of prompts that it computes, sequences that decode.
        continued: whether the engine had work for it since the step before ended, or earlier.
        device_us: what the device took.
        period_us: from the end of the step before; of continued steps only.
        exposed_us, host_busy_us: see above.
        woken_late_us: from its end to when the host went on, where the host waited for it.
        misplaced: whether it is not where the queue has it.
    """
    start, end, since, wait = (pl.col(f"t_{name}_ns") for name in ("start", "end", "since", "wait"))
    # Nothing is known of what was before the first.
    ended, went_on = end.shift(), pl.col("t_woken_ns").shift()
    continued = since.is_null()
    return log.select(
        "t_ns",
        "prefill_tokens",
        "decode_seqs",
        continued=continued,
        device_us=(end - start) / 1e3,
        period_us=pl.when(continued).then((end - ended) / 1e3),
        exposed_us=(start - pl.max_horizontal(ended, since)) / 1e3,
        host_busy_us=(wait - pl.max_horizontal(went_on, since)) / 1e3,
        woken_late_us=pl.when(wait < end).then((pl.col("t_woken_ns") - end) / 1e3),
        misplaced=((start - pl.max_horizontal("t_ns", ended)).abs() > CLOCK_NS)
        & ended.is_not_null(),
    )


def of_lines(lines: Sequence[DeviceLine]) -> pl.DataFrame:
    """Return the steps of a device log that has just been taken."""
    return device_steps(pl.DataFrame(lines, schema=DEVICE.columns))


def read_device(cell: CellFolder) -> pl.DataFrame:
    """Return the steps of a valid cell that were queued in its measured window.

    Raises:
        ArtifactError: the index does not list the device's log, or a line of it is malformed.
    """
    assert cell.record is not None
    blocks = cell.blocks(paths.DEVICE_LOG)
    steps = device_steps(whole_table(DEVICE, DEVICE.rows(cell.file(paths.DEVICE_LOG), blocks)))
    return steps.filter(in_window("t_ns", cell.record["window"]))


def device_values(
    lines: Sequence[DeviceLine], step_lines: Iterable[Mapping[str, Any]], is_baseline: bool
) -> dict[str, float | None]:
    """Return one cell's values for DEVICE_CHECKS, by check; None where nothing is known.

    Args:
        lines: of its device log.
        step_lines: of its step log.
        is_baseline: whether it is of the baseline, whose exposed steps alone are bounded: those of
            a connector are what it costs.
    """
    steps = of_lines(lines)
    worked = {
        line["step_id"]
        for line in step_lines
        if line["process"] == "scheduler" and line["prefill_tokens"] + line["decode_tokens"]
    }
    recorded = [line["step_id"] for line in lines]
    unknown = len(worked.symmetric_difference(recorded)) + len(recorded) - len(set(recorded))
    of_continued = pl.col("exposed_us").filter(pl.col("continued"))
    # A host that is always slower than the device waits for no step, and is late after none.
    never_waited = pl.when(pl.col("host_busy_us").is_not_null().any()).then(0.0)
    faults, late_ms, exposed_share = steps.select(
        pl.col("misplaced").sum(),
        pl.coalesce(pl.col("woken_late_us").median() / 1e3, never_waited),
        (of_continued > 0).mean(),
    ).row(0)
    values: dict[str, float | None] = {
        "device_log_faults": faults + unknown if len(steps) else None,
        "device_woken_late_ms": late_ms,
    }
    return values | ({"device_exposed_share": exposed_share} if is_baseline else {})

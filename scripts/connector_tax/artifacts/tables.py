"""The tables of the analysis: their columns, typed rows, how they are written.

Times are milliseconds or microseconds as the column's name says, rates requests per second, taxes
fractions of plain (0.1 = +10 %). An empty CSV field is None: the number does not exist. What each
column means: docs/artifacts.md.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from connector_tax.artifacts import paths

# One line of a table that is being made, by column: COLUMNS has them, ROW_TYPES their types.
Row = dict[str, Any]
# The pooled rows' value in the column `block` of aggregate.csv.
POOLED = "all"
PERCENTS = (50, 90, 99)
# Which cell a row is of, and how it ended: known without a number.
CELL_COLUMNS = (
    "config",
    "configuration",
    "block",
    "phase",
    "cell",
    "rate_rps",
    "input_tokens",
    "output_tokens",
    "status",
    "reason",
    "label",
)
QUANTILES = tuple(f"{m}_p{p}" for m in ("ttft", "tpot", "e2e") for p in PERCENTS)
STEP_COLUMNS = tuple(
    f"{name}_p{percent}"
    for name in (
        "step_duration_us",
        "engine_step_us",
        "build_meta_us",
        "get_finished_us",
        "start_load_kv_us",
        "connector_total_us",
    )
    for percent in (50, 90)
)
STEP_COUNTS = ("n_steps", "n_empty_steps", "n_incomplete_steps")
STEP_TAXES = ("tax_step_p50", "tax_engine_step_p50", "tax_callback_p50", "unattributed")


@dataclass(frozen=True)
class AggregateRow:
    """One (configuration, block, phase, cell) of analysis/aggregate.csv; block `all` is pooled."""

    config: str
    configuration: str
    block: str
    phase: str
    cell: str
    rate_rps: float | None
    input_tokens: int
    output_tokens: int
    status: str
    reason: str
    n: int | None
    ttft_p50_ms: float | None
    ttft_p50_lo_ms: float | None
    ttft_p50_hi_ms: float | None
    ttft_p90_ms: float | None
    ttft_p90_lo_ms: float | None
    ttft_p90_hi_ms: float | None
    tpot_p50_ms: float | None
    tpot_p50_lo_ms: float | None
    tpot_p50_hi_ms: float | None
    tpot_p90_ms: float | None
    tpot_p90_lo_ms: float | None
    tpot_p90_hi_ms: float | None
    e2e_p90_ms: float | None
    e2e_p90_lo_ms: float | None
    e2e_p90_hi_ms: float | None
    requested_throughput_rps: float | None
    effective_throughput_rps: float | None
    throughput_ratio: float | None
    error_rate: float | None
    memory_ns_p50: float | None
    saturated: bool | None
    saturation_criteria: str
    warming_up: bool | None
    n_steps: int | None


@dataclass(frozen=True)
class TaxRow:
    """One (configuration, cell, metric) of analysis/taxes.csv, against plain in the same cell."""

    config: str
    phase: str
    cell: str
    rate_rps: float | None
    reference: str
    input_tokens: int
    output_tokens: int
    metric: str
    family: str
    tax: float | None
    tax_lo: float | None
    tax_hi: float | None
    abs_ms: float | None
    abs_lo_ms: float | None
    abs_hi_ms: float | None
    plain_ms: float | None
    config_ms: float | None
    n_blocks: int | None
    n_config: int | None
    n_plain: int | None
    interval_method: str
    error_df: float | None
    verdict: str
    p_value: float | None
    p_adjusted: float | None
    blocks_needed: int | None
    margin: float | None
    aa_tax: float | None
    aa_lo: float | None
    aa_hi: float | None
    tax_all: float | None
    tax_all_lo: float | None
    tax_all_hi: float | None
    mark: str
    capacity_ratio: float | None
    step_tax_us: float | None
    engine_step_tax_us: float | None
    callback_us: float | None
    unattributed_us: float | None
    status: str
    reason: str


@dataclass(frozen=True)
class DeviceTaxRow:
    """One tax on one of several devices (analysis/devices.csv), with the error of all launches."""

    device: str
    config: str
    phase: str
    cell: str
    metric: str
    tax: float | None
    tax_lo: float | None
    tax_hi: float | None
    p_value: float | None
    same_p: float | None
    n_blocks: int
    interval_method: str
    error_df: float | None
    mark: str
    reason: str


@dataclass(frozen=True)
class AmplificationRow:
    """tax(ref_load) - tax(ref_safe) of a configuration and metric (analysis/amplification.csv)."""

    config: str
    metric: str
    ref_safe_rps: float
    ref_load_rps: float
    tax_ref_safe: float | None
    tax_ref_load: float | None
    gap: float | None
    gap_lo: float | None
    gap_hi: float | None
    n_blocks: int
    interval_method: str
    error_df: float | None
    mark: str
    status: str
    reason: str


@dataclass(frozen=True)
class StepTaxRow:
    """One step tax of analysis/step_taxes.csv, in µs, with the A/A comparison of plain."""

    config: str
    phase: str
    cell: str
    metric: str
    us: float | None
    lo_us: float | None
    hi_us: float | None
    p: float | None
    n_blocks: int | None
    method: str
    aa_us: float | None
    aa_lo_us: float | None
    aa_hi_us: float | None
    reason: str


@dataclass(frozen=True)
class HookRow:
    """One timed hook of a configuration in one cell (analysis/hooks.csv); `child` may be empty."""

    config: str
    phase: str
    cell: str
    process: str
    child: str
    hook: str
    p50_us: float | None
    p50_lo_us: float | None
    p50_hi_us: float | None
    p50_method: str
    mean_us: float
    mean_lo_us: float | None
    mean_hi_us: float | None
    mean_method: str
    share: float | None
    share_lo: float | None
    share_hi: float | None
    share_method: str
    empty_us: float
    n_steps: int
    n_ran: int
    n_launches: int


@dataclass(frozen=True)
class DeviceStepRow:
    """Steps of an emulated device that are alike, in one configuration (device_time.csv)."""

    config: str
    phase: str
    cell: str
    kind: str
    batch: str
    device_time_us: float | None
    n_launches: int
    n_steps: int
    device_us: float
    period_us: float | None
    period_lo_us: float | None
    period_hi_us: float | None
    exposed_us: float | None
    exposed_lo_us: float | None
    exposed_hi_us: float | None
    exposed_share: float | None
    host_busy_us: float | None
    host_busy_lo_us: float | None
    host_busy_hi_us: float | None
    over_plain_us: float | None
    over_plain_lo_us: float | None
    over_plain_hi_us: float | None


@dataclass(frozen=True)
class StepPoint:
    """One quantile of schedule() and of the whole engine step (analysis/step_cdf.csv).

    Means over the launches of a configuration, in µs.
    """

    config: str
    step_duration_us: float
    engine_step_us: float | None
    cdf: float


@dataclass(frozen=True)
class ResourceRow:
    """One resource of a configuration against plain's (analysis/resources.csv)."""

    config: str
    resource: str
    unit: str
    scale: str
    plain_mean: float | None
    config_mean: float | None
    difference: float | None
    difference_lo: float | None
    difference_hi: float | None
    tax: float | None
    tax_lo: float | None
    tax_hi: float | None
    p_value: float | None
    interval_method: str
    aa_difference: float | None
    aa_difference_lo: float | None
    aa_difference_hi: float | None
    aa_tax: float | None
    aa_tax_lo: float | None
    aa_tax_hi: float | None
    n_blocks: int
    n_launches: int
    companions: str
    status: str
    reason: str


@dataclass(frozen=True)
class EngineRow:
    """One setting of a configuration's engine beside plain's (analysis/engine.csv)."""

    config: str
    setting: str
    value: str
    plain: str
    differs: bool | None
    source: str
    reason: str
    also_differs: str


# The row class of each table that is read; AggregateRow names some of its columns only.
ROW_TYPES: Mapping[str, type] = {
    paths.AGGREGATE: AggregateRow,
    paths.TAXES: TaxRow,
    paths.DEVICE_TAXES: DeviceTaxRow,
    paths.DEVICE_STEPS: DeviceStepRow,
    paths.AMPLIFICATION: AmplificationRow,
    paths.STEP_TAXES: StepTaxRow,
    paths.HOOKS: HookRow,
    paths.STEP_CDF: StepPoint,
    paths.RESOURCE_TABLE: ResourceRow,
    paths.ENGINE_TABLE: EngineRow,
}
# The columns of each table, in order.
COLUMNS: Mapping[str, tuple[str, ...]] = {
    paths.AGGREGATE: (
        *CELL_COLUMNS,
        "n",
        "window_s",
        *(f"{q}{bound}_ms" for q in QUANTILES for bound in ("", "_lo", "_hi")),
        "p99_reason",
        "ttft_from_send_p90_ms",
        "requested_throughput_rps",
        "effective_throughput_rps",
        "throughput_ratio",
        "error_rate",
        "dropped",
        "n_disturbed",
        "quiet_share",
        "memory_ns_p50",
        "waiting_p50",
        "saturated",
        "saturation_criteria",
        "warming_up",
        "mser5_discard",
        "start_change",
        "start_p",
        *STEP_COLUMNS,
        *STEP_COUNTS,
    ),
    paths.STEPS: (
        *("config", "block", "phase", "cell", "configuration", "status", "reason"),
        *STEP_COLUMNS,
        *STEP_COUNTS,
        *STEP_TAXES,
    ),
} | {
    name: tuple(field.name for field in fields(row_type))
    for name, row_type in ROW_TYPES.items()
    if name != paths.AGGREGATE
}
# What a table has behind these in a study on several devices.
DEVICE_COLUMNS: Mapping[str, tuple[str, ...]] = {
    paths.AGGREGATE: ("device",),
    paths.TAXES: ("device",),
}


def empty_row(table: str) -> Row:
    """A row of a table without any value."""
    return dict.fromkeys(COLUMNS[table])


def columns_of(table: str, rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The columns of a table of these rows; DEVICE_COLUMNS are among them where a row has them."""
    further = DEVICE_COLUMNS.get(table, ())
    return COLUMNS[table] + tuple(name for name in further if any(name in row for row in rows))


def table_text(table: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """A table as CSV; None is empty, booleans are `true` and `false`, floats round-trip.

    Raises:
        ValueError: a row has other columns than the table.
    """
    stream, columns = io.StringIO(), columns_of(table, rows)
    writer = csv.DictWriter(stream, columns, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        if missing := set(columns) - row.keys():
            raise ValueError(f"{table}: a row has no column {min(missing)!r}")
        writer.writerow({k: str(v).lower() if isinstance(v, bool) else v for k, v in row.items()})
    return stream.getvalue()

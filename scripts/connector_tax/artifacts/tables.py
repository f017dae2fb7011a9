"""The tables of the analysis: columns, typed rows, writing and reading.

`cells.csv` has what was measured, `effects.csv` every estimate. Times are in ms or us, as the
column's name or unit states; rates are requests/s; taxes are fractions of plain (0.1 is 10%). An
empty CSV field is None: the number does not exist. Each column: docs/artifacts.md.
"""

import csv
import io
import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path
from typing import Any, TextIO, TypeVar

import msgspec

from connector_tax.artifacts import paths
from connector_tax.artifacts.metrics import LATENCY_METRICS, THROUGHPUT_METRICS, change_of
from connector_tax.files import ArtifactError, reading

# The version of the method behind the tables, hypotheses.json, reference_rates.json and looks.json.
# It rises if a value that an older version also computes can change; a new column, row or file does
# not raise it.
METHOD = 2
# The method of studies that record none.
FIRST_METHOD = 1
Typed = TypeVar("Typed")
# One row of a table before it is written, by column.
Row = dict[str, Any]
# The pooled rows' value in the column `block` of cells.csv.
POOLED = "all"
# The quantities of effects.csv.
TAX, GAP, STEP, HOOK, WAIT, DEVICE, RESOURCE = (
    "tax", "gap", "step", "hook", "wait", "device", "resource",
)  # fmt: skip
# Scale of a comparison: logs, which give a tax, or values, which give a difference.
LOG, RAW = "log", "raw"
STEP_SAMPLES = (
    "step_duration_us",
    "engine_step_us",
    "build_meta_us",
    "get_finished_us",
    "start_load_kv_us",
    "connector_total_us",
)
STEP_COLUMNS = tuple(f"{name}_p{percent}" for name in STEP_SAMPLES for percent in (50, 90))
QUANTILE_COLUMNS = tuple(
    f"{metric}{bound}_ms" for metric in LATENCY_METRICS for bound in ("", "_lo", "_hi")
)


@dataclass(frozen=True)
class CellRow:
    """A row of cells.csv: a configuration's cell in one block, or pooled (block `all`).

    QUANTILE_COLUMNS and STEP_COLUMNS, medians and so on of latencies and steps, follow these.
    """

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
    remark: str
    label: str
    device: str
    n: int | None
    window_s: float | None
    ttft_from_send_p90_ms: float | None
    requested_throughput_rps: float | None
    effective_throughput_rps: float | None
    throughput_ratio: float | None
    error_rate: float | None
    dropped: int | None
    steal: float | None
    foreign_cpu: float | None
    gpu_clock_share: float | None
    waiting_p50: float | None
    saturated: bool | None
    saturation_criteria: str
    warming_up: bool | None
    n_steps: int | None
    n_empty_steps: int | None
    n_incomplete_steps: int | None

    def number(self, column: str) -> float | None:
        """Return the value of a column from QUANTILE_COLUMNS or STEP_COLUMNS."""
        value: float | None = getattr(self, column)
        return value


@dataclass(frozen=True)
class EffectRow:
    """One estimate of effects.csv: a quantity and metric of a configuration in a cell.

    `error` is the standard error on `scale` (LOG: of the log of 1 + estimate), with `df` degrees of
    freedom; `analysis.effect.effect_of` computes with it. `family_lo` and `family_hi` bound the
    interval behind a tax's verdict, which holds jointly for all configurations of its cell and
    metric. `narrow_lo` and `narrow_hi` bound the 90% interval of the equivalence test; the upper
    end is a one-sided upper bound of the effect. `huber_differs` is a robustness check of a
    confirmatory tax. `item` is the group of steps. `base` and `own` are the levels of plain and of
    the configuration, in `unit`; for a gap they are the taxes at ref_safe and ref_load. The tax of
    a throughput is the baseline's over the configuration's, minus 1.
    """

    quantity: str
    config: str
    phase: str
    cell: str
    rate_rps: float | None
    reference: str
    metric: str
    item: str
    unit: str
    scale: str
    estimate: float | None
    error: float | None
    lo: float | None
    hi: float | None
    family_lo: float | None
    family_hi: float | None
    narrow_lo: float | None
    narrow_hi: float | None
    huber_differs: bool | None
    base: float | None
    own: float | None
    p: float | None
    p_adjusted: float | None
    df: float | None
    method: str
    n_blocks: int | None
    n: int | None
    n_base: int | None
    n_cell: int | None
    family: str
    margin: float | None
    verdict: str
    blocks_needed: int | None
    mark: str
    status: str
    reason: str

    @property
    def shown(self) -> tuple[float | None, float | None, float | None]:
        """Return the estimate with the interval behind its verdict, or with the 95% interval."""
        if self.family_lo is None:
            return self.estimate, self.lo, self.hi
        return self.estimate, self.family_lo, self.family_hi

    @property
    def change(self) -> tuple[float | None, float | None, float | None]:
        """Return the metric's relative change (negative if it falls), with the `shown` interval."""
        estimate, *ends = (None if of is None else change_of(self.metric, of) for of in self.shown)
        lo, hi = ends[::-1] if self.metric in THROUGHPUT_METRICS else ends
        return estimate, lo, hi

    @property
    def difference(self) -> tuple[float | None, float | None, float | None]:
        """Return the configuration's level minus plain's level, with the interval, in `unit`."""
        if self.scale == RAW:
            return self.estimate, self.lo, self.hi
        if self.own is None or self.base is None:
            return None, None, None
        ends = [None if end is None else change_of(self.metric, end) for end in (self.lo, self.hi)]
        # A higher cost means a lower throughput, so the ends change places.
        lo, hi = (
            None if end is None else self.base * end
            for end in (ends[::-1] if self.metric in THROUGHPUT_METRICS else ends)
        )
        return self.own - self.base, lo, hi


# Kinds of steps, by the tokens that they compute: of answers, of prompts, or both.
DECODE, PREFILL, MIXED = KINDS = ("decode", "prefill", "mixed")
# The size class of all sizes together.
ALL_SIZES = "all"


@dataclass(frozen=True)
class StepGroup:
    """A group of steps of one kind and number of decoding sequences, such as `decode/4-7/`."""

    kind: str
    batch: str = ALL_SIZES

    @classmethod
    def of(cls, item: str) -> "StepGroup":
        """Parse the group from an effect's `item`."""
        kind, batch, _ = item.split("/")
        return cls(kind, batch)

    @property
    def item(self) -> str:
        """Return the group as an effect's `item`."""
        return f"{self.kind}/{self.batch}/"


@dataclass(frozen=True)
class StepPoint:
    """One quantile of schedule() and of the whole engine step (step_cdf.csv).

    Means over the launches of a configuration, in µs.
    """

    config: str
    step_duration_us: float
    engine_step_us: float | None
    cdf: float


@dataclass(frozen=True)
class EngineRow:
    """One setting of a configuration's engine, with plain's value (engine.csv)."""

    config: str
    setting: str
    value: str
    plain: str
    differs: bool | None
    source: str
    reason: str
    also_differs: str


ROW_TYPES: Mapping[str, type[Any]] = {
    paths.CELLS: make_dataclass(
        "WholeCellRow",
        [(name, float | None) for name in (*QUANTILE_COLUMNS, *STEP_COLUMNS)],
        bases=(CellRow,),
        frozen=True,
    ),
    paths.EFFECTS: EffectRow,
    paths.STEP_CDF: StepPoint,
    paths.ENGINE_TABLE: EngineRow,
}
# The columns of each table, in order.
COLUMNS: Mapping[str, tuple[str, ...]] = {
    name: tuple(field.name for field in fields(row_type)) for name, row_type in ROW_TYPES.items()
}
# The key columns of each table.
KEYS: Mapping[str, tuple[str, ...]] = {
    paths.CELLS: ("config", "block", "phase", "cell"),
    paths.EFFECTS: ("quantity", "config", "phase", "cell", "metric", "item"),
    paths.STEP_CDF: ("config", "cdf"),
    paths.ENGINE_TABLE: ("config", "setting"),
}
# The columns that define kinds of rows, of which other versions may write further ones.
KIND_OF_ROW: Mapping[str, tuple[str, ...]] = {
    paths.EFFECTS: ("quantity", "metric"),
    paths.ENGINE_TABLE: ("setting",),
}


def table_text(table: str, rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a table as CSV; None and missing columns are empty, floats round-trip.

    Raises:
        ValueError: a row has a column that the table does not have.
    """
    stream = io.StringIO()
    writer = csv.DictWriter(stream, COLUMNS[table], restval="", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: str(v).lower() if isinstance(v, bool) else v for k, v in row.items()})
    return stream.getvalue()


# ---- reading

_ALLOWED = {str: "text", int: "an integer", float: "a finite number", bool: "true or false"}


def _value(text: str, scalar: type, optional: bool) -> Any:
    """Return a CSV field as a value of its column; None if it is empty and optional.

    Raises:
        ValueError: `text` is no such value; the message names what is allowed.
    """
    if text == "" and optional:
        return None
    try:
        value: Any = msgspec.convert(text, scalar, strict=False)
    except msgspec.ValidationError:
        value = math.nan
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{text!r}; allowed: {_ALLOWED[scalar]}")
    return value


def column_types(row_type: type) -> dict[str, tuple[type, bool]]:
    """Return, by column, its scalar type and whether it may be empty, from a row class."""
    hints = typing.get_type_hints(row_type)
    columns = {}
    for field in fields(row_type):
        hint = hints[field.name]
        optional = isinstance(hint, types.UnionType)
        scalar = typing.get_args(hint)[0] if optional else hint
        columns[field.name] = (scalar, optional)
    return columns


def read_table(path: Path, row_type: type[Typed]) -> list[Typed]:
    """Read a CSV into rows of `row_type`; columns the class does not name are ignored.

    A line without values marks an empty table and is not a row.

    Raises:
        ArtifactError: the file or a column is missing, or a value does not parse; names file, line
            and column, what was found and what is allowed.
    """
    try:
        with reading(path), path.open(encoding="utf-8", newline="") as stream:
            return _rows(path, stream, row_type)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ArtifactError(f"{path}: not a CSV in UTF-8: {error}") from None


def _rows(path: Path, stream: TextIO, row_type: type[Typed]) -> list[Typed]:
    columns = column_types(row_type)
    reader = csv.DictReader(stream)
    missing = [name for name in columns if name not in (reader.fieldnames or ())]
    if missing:
        raise ArtifactError(f"{path}:1: missing column(s): {', '.join(missing)}")
    rows = []
    for record in reader:
        if not any(record.values()):
            continue
        values: dict[str, Any] = {}
        for name, (scalar, optional) in columns.items():
            if record[name] is None:
                raise ArtifactError(f"{path}:{reader.line_num}: fewer values than columns")
            try:
                values[name] = _value(record[name], scalar, optional)
            except ValueError as error:
                raise ArtifactError(f"{path}:{reader.line_num}: {name}: {error}") from None
        rows.append(msgspec.convert(values, row_type))
    return rows

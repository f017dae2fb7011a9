"""The finished study as the figures and the report read it: typed rows of the analysis tables.

Times are milliseconds or microseconds as the field name says, rates requests per second, taxes
fractions of plain (0.1 = +10 %). An empty CSV field is None: the number does not exist.
"""

import csv
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from connector_tax.artifacts import paths
from connector_tax.artifacts.names import PLAIN, launched_plains
from connector_tax.artifacts.study_file import read_study
from connector_tax.files import ArtifactError, read_json

POOLED = "all"


@dataclass(frozen=True)
class Configuration:
    """One configuration of the study, or the launch of plain that is compared with the others."""

    id: str
    label: str
    connector: str | None
    purpose: str


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
    ttft_p90_ms: float | None
    ttft_p90_lo_ms: float | None
    ttft_p90_hi_ms: float | None
    tpot_p50_ms: float | None
    tpot_p90_ms: float | None
    tpot_p90_lo_ms: float | None
    tpot_p90_hi_ms: float | None
    requested_throughput_rps: float | None
    effective_throughput_rps: float | None
    throughput_ratio: float | None
    error_rate: float | None
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
    verdict: str
    p_adjusted: float | None
    blocks_needed: int | None
    margin: float | None
    aa_tax: float | None
    aa_lo: float | None
    aa_hi: float | None
    mark: str
    capacity_ratio: float | None
    step_tax_us: float | None
    engine_step_tax_us: float | None
    callback_us: float | None
    unattributed_us: float | None
    status: str
    reason: str


@dataclass(frozen=True)
class AmplificationRow:
    """tax(ref_load) - tax(ref_safe) of a configuration and metric (analysis/amplification.csv)."""

    config: str
    metric: str
    tax_ref_safe: float | None
    tax_ref_load: float | None
    gap: float | None
    gap_lo: float | None
    gap_hi: float | None
    n_blocks: int
    interval_method: str
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
    mean_us: float
    mean_lo_us: float | None
    mean_hi_us: float | None
    share: float | None
    share_lo: float | None
    share_hi: float | None
    empty_us: float
    n_steps: int
    n_ran: int
    n_launches: int


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
    n_blocks: int
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


Row = TypeVar(
    "Row",
    AggregateRow,
    TaxRow,
    AmplificationRow,
    StepTaxRow,
    HookRow,
    StepPoint,
    ResourceRow,
    EngineRow,
)


def _boolean(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


_PARSERS: Mapping[type, tuple[Callable[[str], Any], str]] = {
    str: (str, "text"),
    int: (int, "an integer"),
    float: (_finite, "a finite number"),
    bool: (_boolean, "true or false"),
}


def _column_types(row_type: type) -> dict[str, tuple[type, bool]]:
    """Column name -> (scalar type, may be empty) from the annotations of a row class."""
    hints = typing.get_type_hints(row_type)
    columns = {}
    for field in fields(row_type):
        hint = hints[field.name]
        optional = isinstance(hint, types.UnionType)
        scalar = typing.get_args(hint)[0] if optional else hint
        columns[field.name] = (scalar, optional)
    return columns


def read_table(path: Path, row_type: type[Row]) -> list[Row]:
    """Read a CSV into rows of `row_type`; columns the class does not name are ignored.

    A line without any value stands for an empty table and is no row.

    Raises:
        ArtifactError: the file or a column is missing, or a value does not parse; names file, line
            and column, what was found and what is allowed.
    """
    columns = _column_types(row_type)
    try:
        stream = path.open(encoding="utf-8", newline="")
    except FileNotFoundError:
        raise ArtifactError(f"{path}: no such file") from None
    with stream:
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
                text = record[name]
                if text is None:
                    raise ArtifactError(f"{path}:{reader.line_num}: fewer values than columns")
                if text == "" and optional:
                    values[name] = None
                    continue
                parse, allowed = _PARSERS[scalar]
                try:
                    values[name] = parse(text)
                except (ValueError, KeyError):
                    raise ArtifactError(
                        f"{path}:{reader.line_num}: {name}: {text!r}; allowed: {allowed}"
                    ) from None
            rows.append(row_type(**values))
    return rows


class Study:
    """A finished study's folder; each table is read once, when first asked for.

    Raises:
        ArtifactError: study.json is missing, unreadable, or lacks a key.
    """

    def __init__(self, study_file: Path) -> None:
        self.root = study_file.parent
        self.document: dict[str, Any] = read_study(study_file)
        try:
            self.name: str = self.document["study"]
            self.engine_label: str = self.document["engine_label"]
            self.emulated: bool = self.document["emulated"]
            self.blocks: int = self.document["blocks"]
            self.settings: dict[str, Any] = self.document["config"]
            self.configurations = [
                Configuration(row["id"], row["label"], row["connector"], row["purpose"])
                for row in self.document["configurations"]
            ]
        except KeyError as error:
            raise ArtifactError(f"{study_file}: missing key {error}") from None
        plains = launched_plains(
            launch["config"]
            for launches in self.document["run_order"].values()
            for launch in launches
        )
        # The launch of plain that is compared with the others; None where plain is launched once.
        self.aa: str | None = plains[-1] if len(plains) > 1 else None

    @property
    def connectors(self) -> list[Configuration]:
        """Every configuration but plain, in the study's order."""
        return [configuration for configuration in self.configurations if configuration.id != PLAIN]

    @property
    def launched(self) -> list[Configuration]:
        """Every configuration in the study's order, and the A/A launch of plain if there is one."""
        if self.aa is None:
            return self.configurations
        again = Configuration(self.aa, "plain again (A/A)", None, "A/A comparison")
        return [*self.configurations, again]

    @cached_property
    def aggregate(self) -> list[AggregateRow]:
        return read_table(self.root / paths.ANALYSIS / paths.AGGREGATE, AggregateRow)

    @cached_property
    def taxes(self) -> list[TaxRow]:
        return read_table(self.root / paths.ANALYSIS / paths.TAXES, TaxRow)

    @cached_property
    def amplification(self) -> list[AmplificationRow]:
        return read_table(self.root / paths.ANALYSIS / paths.AMPLIFICATION, AmplificationRow)

    @cached_property
    def step_taxes(self) -> list[StepTaxRow]:
        return read_table(self.root / paths.ANALYSIS / paths.STEP_TAXES, StepTaxRow)

    @cached_property
    def hooks(self) -> list[HookRow]:
        return read_table(self.root / paths.ANALYSIS / paths.HOOKS, HookRow)

    @cached_property
    def step_cdf(self) -> list[StepPoint]:
        return read_table(self.root / paths.ANALYSIS / paths.STEP_CDF, StepPoint)

    @cached_property
    def resources(self) -> list[ResourceRow]:
        return read_table(self.root / paths.ANALYSIS / paths.RESOURCE_TABLE, ResourceRow)

    @cached_property
    def engine(self) -> list[EngineRow]:
        return read_table(self.root / paths.ANALYSIS / paths.ENGINE_TABLE, EngineRow)

    @cached_property
    def hypotheses(self) -> dict[str, Any]:
        return typing.cast(dict[str, Any], read_json(self.root / paths.ANALYSIS / paths.HYPOTHESES))

    @cached_property
    def reference(self) -> dict[str, Any]:
        return typing.cast(dict[str, Any], read_json(self.root / paths.REFERENCE_RATES))

    @cached_property
    def patch(self) -> dict[str, Any]:
        return typing.cast(dict[str, Any], read_json(self.root / paths.PATCH_STATUS))

    @cached_property
    def preflight(self) -> dict[str, Any]:
        path = self.root / paths.PREFLIGHT_STATUS
        return typing.cast(dict[str, Any], read_json(path))

    def pooled(self, phase: str) -> dict[tuple[str, str], AggregateRow]:
        """(configuration, cell) -> the row pooled over blocks, for one phase."""
        return {
            (row.config, row.cell): row
            for row in self.aggregate
            if row.phase == phase and row.block == POOLED
        }

    def noise_at(self, reference: str, metric: str) -> TaxRow | None:
        """The A/A row of Phase A at a reference rate; None where plain is launched once."""
        return None if self.aa is None else self.taxes_at(reference, metric).get(self.aa)

    def taxes_at(self, reference: str, metric: str) -> dict[str, TaxRow]:
        """Configuration -> its Phase A tax row at a reference rate; empty without such a cell."""
        return {
            row.config: row
            for row in self.taxes
            if row.phase == "A" and row.reference == reference and row.metric == metric
        }

    def cell_at(self, reference: str) -> str | None:
        """The name of the Phase A cell at a reference rate; None when it is not in the grid."""
        return next((row.cell for row in self.taxes_at(reference, "ttft_p90").values()), None)

    def step_taxes_at(self, reference: str, metric: str) -> dict[str, StepTaxRow]:
        """Configuration -> its Phase A step tax at a reference rate; empty without such a cell."""
        cell = self.cell_at(reference)
        return {
            row.config: row
            for row in self.step_taxes
            if (row.phase, row.cell, row.metric) == ("A", cell, metric)
        }

    def skip_reason(self, config: str) -> str | None:
        """Why pre-flight left a configuration out, or None if it was run."""
        status = self.preflight.get(config)
        return None if status is None or status["include"] else str(status["reason"])

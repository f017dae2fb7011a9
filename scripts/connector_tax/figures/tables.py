"""Read a finished study for the figures and the report."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from connector_tax.artifacts import paths, tables
from connector_tax.artifacts.folder import StudyFolder
from connector_tax.artifacts.looks import Look, read_looks
from connector_tax.artifacts.names import PHASES, PLAIN, launched_plains
from connector_tax.artifacts.record_reader import read_record
from connector_tax.artifacts.saturation import unsaturated
from connector_tax.artifacts.stage_records import (
    GateRecord,
    HypothesesRecord,
    PatchStatus,
    RatesRecord,
)
from connector_tax.artifacts.study_file import load_study
from connector_tax.artifacts.tables import POOLED, ROW_TYPES, CellRow, EffectRow, read_table

Row = TypeVar("Row")


@dataclass(frozen=True)
class Configuration:
    """A configuration of the study, or the launch of plain that is compared with the others."""

    id: str
    label: str


def frame(rows: Sequence[object], row_type: type) -> pd.DataFrame:
    """Return rows as a frame with the columns of their class; None for missing values."""
    columns = [field.name for field in fields(row_type)]
    return pd.DataFrame([vars(row) for row in rows], columns=columns, dtype=object)


def steps_over_plain(
    study: "StudyTables", metric: str = "step_us"
) -> dict[str, dict[str, EffectRow]]:
    """Return step time above plain's at ref_safe, by kind and configuration."""
    rows = study.of(tables.STEP, "A")
    return _by_kind(row for row in rows if (row.reference, row.metric) == ("ref_safe", metric))


def exposed_over_plain(study: "StudyTables") -> tuple[float, dict[str, dict[str, EffectRow]]]:
    """Return the lowest rate, and how much longer an emulated device waits for the host than with
    plain.

    By kind of step, at that rate, where steps are shortest and hide least of the host's work. Empty
    without an emulated device.
    """
    whole = {tables.StepGroup(kind).item for kind in tables.KINDS}
    rows = [row for row in study.of(tables.DEVICE, "A")
            if row.metric == "over_plain_us" and row.item in whole]  # fmt: skip
    lowest = min((row.rate_rps or 0.0 for row in rows), default=0.0)
    return lowest, _by_kind(row for row in rows if row.rate_rps == lowest)


def _by_kind(rows: Iterable[EffectRow]) -> dict[str, dict[str, EffectRow]]:
    rows_by_kind: dict[str, dict[str, EffectRow]] = {}
    for row in rows:
        rows_by_kind.setdefault(tables.StepGroup.of(row.item).kind, {})[row.config] = row
    return rows_by_kind


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a table as mappings to Python values; None for missing values."""
    # A missing number differs from itself; pandas takes five times as long for a few rows.
    names = [*map(str, table.columns)]
    columns = [[None if value != value else value for value in table[name]] for name in names]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def _table(name: str, _: type[Row]) -> "cached_property[list[Row]]":
    """Return a property that reads a table of analysis/ on first use."""
    return cached_property(
        lambda study: read_table(study.root / paths.ANALYSIS / name, ROW_TYPES[name])
    )


def _document(name: str, kind: type[Row]) -> "cached_property[Row]":
    """Return a property that reads a JSON file of the study on first use."""
    return cached_property(lambda study: read_record(study.root / name, kind))


class StudyTables:
    """The folder of a finished study; each table is read once, on first use.

    Raises:
        ArtifactError: study.json is missing, unreadable, or lacks a key.
    """

    def __init__(self, study_file: Path) -> None:
        study = load_study(study_file)
        self.folder = StudyFolder(study)
        self.root = study.root
        self.document = study.document
        self.name: str = self.document["study"]
        self.engine_label: str = self.document["engine_label"]
        self.emulated: bool = self.document["emulated"]
        self.settings = study.config
        self.saturation = study.saturation
        self.configurations = [
            Configuration(row["id"], row.get("label", row["id"]))
            for row in self.document["configurations"]
        ]
        self.baseline = study.baseline
        plains = launched_plains(
            (name for phase in PHASES for name in study.plains(phase)), study.baseline
        )
        # The baseline's launch that is compared with its others; None if there is only one.
        self.aa: str | None = plains[-1] if len(plains) > 1 else None

    @cached_property
    def blocks(self) -> int:
        """Return the number of measured blocks, or of planned blocks if nothing was launched."""
        launches = self.folder.of_phase("A")
        measured = {launch.launch.block for launch in launches if launch.status == "done"}
        return len(measured) or self.document["blocks"]

    @cached_property
    def judged_rates(self) -> list[float]:
        """Return the rates that the taxes over all rates include, ascending."""
        baseline = [row for row in self.pooled if row.config == self.baseline and row.rate_rps]
        overloaded = [
            (row.config, row.cell)
            for row in self.cell_rows
            if (row.phase, row.status) == ("A", "valid") and (row.saturated or row.dropped)
            if row.block != POOLED
        ]
        kept = unsaturated({row.cell: row.rate_rps for row in baseline}, overloaded)
        return sorted(row.rate_rps or 0.0 for row in baseline if row.cell in kept)

    @property
    def connectors(self) -> list[Configuration]:
        """Return every configuration except the baseline, in the study's order."""
        return [item for item in self.configurations if item.id != self.baseline]

    @property
    def compared(self) -> list[Configuration]:
        """Return the compared configurations: the connectors, and the A/A launch."""
        return [item for item in self.launched if item.id != self.baseline]

    @property
    def launched(self) -> list[Configuration]:
        """Return every configuration in the study's order, and the A/A launch if any."""
        if self.aa is None:
            return self.configurations
        again = Configuration(self.aa, self.against("plain again (A/A)"))
        return [*self.configurations, again]

    def against(self, words: str) -> str:
        """Return text with "plain" replaced by the baseline's label, if that is not plain."""
        if self.baseline == PLAIN:
            return words
        labels = {item.id: item.label for item in self.configurations}
        return re.sub(r"\bplain\b", lambda _: labels[self.baseline], words)

    def label(self, config: str) -> str:
        """Return the label of a configuration or the A/A launch; return another name unchanged."""
        return next((item.label for item in self.launched if item.id == config), config)

    def labelled(self, words: str) -> str:
        """Return a sentence with the configurations' ids replaced by labels."""
        ids = "|".join(re.escape(item.id) for item in self.launched)
        return re.sub(rf"\b({ids})\b", lambda match: self.label(match[0]), words)

    cell_rows = _table(paths.CELLS, CellRow)
    effects = _table(paths.EFFECTS, EffectRow)
    step_cdf = _table(paths.STEP_CDF, tables.StepPoint)
    engine = _table(paths.ENGINE_TABLE, tables.EngineRow)
    hypotheses = _document(f"{paths.ANALYSIS}/{paths.HYPOTHESES}", HypothesesRecord)
    reference = _document(paths.REFERENCE_RATES, RatesRecord)
    patch = _document(paths.PATCH_STATUS, PatchStatus)
    preflight = _document(paths.PREFLIGHT_STATUS, dict[str, GateRecord])

    @cached_property
    def looks(self) -> list[Look]:
        """Return the interim analyses of the study."""
        return read_looks(self.root)

    def of(self, quantity: str, phase: str | None = None) -> list[EffectRow]:
        """Return the estimates of a quantity, optionally of one phase."""
        return [
            row for row in self.effects if row.quantity == quantity and phase in (None, row.phase)
        ]

    def at(self, reference: str, metric: str, quantity: str = tables.TAX) -> dict[str, EffectRow]:
        """Return the Phase A estimate at a reference rate by configuration; empty without such a
        cell.

        A reference rate that equals ref_safe is listed only under the name ref_safe.
        """
        return {
            row.config: row
            for row in self.of(quantity, "A")
            if row.reference == reference and row.metric == metric
        }

    def cell_at(self, reference: str) -> str | None:
        """Return the name of the Phase A cell at a reference rate; None if not in the grid."""
        return next((row.cell for row in self.at(reference, "ttft_p90").values()), None)

    @property
    def pooled(self) -> list[CellRow]:
        """Return the Phase A rows that are pooled over blocks."""
        return [row for row in self.cell_rows if (row.phase, row.block) == ("A", POOLED)]

    def skip_reason(self, config: str) -> str | None:
        """Return why pre-flight skipped a configuration, or None if it was run."""
        status = self.preflight.get(config)
        return None if status is None or status["include"] else str(status["reason"])

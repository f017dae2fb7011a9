"""study.json as its readers take it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from connector_tax.artifacts.names import (
    PHASES,
    Launch,
    baseline_of,
    launched_plains,
)
from connector_tax.artifacts.record_reader import read_record

if TYPE_CHECKING:
    from connector_tax.artifacts.study_records import CellPlan, StudyConfig, StudyDocument


@dataclass(frozen=True)
class Study:
    """`study.json` and the folder it lies in."""

    root: Path
    document: StudyDocument

    @property
    def config(self) -> StudyConfig:
        """The resolved configuration."""
        return self.document["config"]

    @property
    def seed(self) -> int:
        """The number every random choice is derived from."""
        return self.document["seed"]

    @property
    def baseline(self) -> str:
        """The configuration that taxes are against."""
        return baseline_of(self.config)

    @property
    def bare_baseline(self) -> bool:
        """Whether the baseline has no connector, and so no callbacks: their time is zero."""
        entries = {entry["id"]: entry for entry in self.document["configurations"]}
        return entries[self.baseline].get("connector") is None

    @property
    def configurations(self) -> list[str]:
        """Configuration ids in the study's order."""
        return [entry["id"] for entry in self.document["configurations"]]

    def plains(self, phase: str) -> list[str]:
        """The baseline's launches in each block of a phase: `plain`, `plain_2` and so on."""
        launched = (entry["config"] for entry in self.document["run_order"][phase])
        return launched_plains(launched, self.baseline)

    def configs(self, phase: str) -> list[str]:
        """The launches of a block in the study's order, further ones of the baseline at the end."""
        launched = {entry["config"] for entry in self.document["run_order"][phase]}
        further = self.plains(phase)[1:]
        return [c for c in self.configurations if c in launched] + further

    def cells(self, phase: str) -> Sequence[CellPlan]:
        """The planned cells of a phase; rate_rps is null in B and Bp."""
        return self.document["cells"][phase]


def read_study(path: Path) -> StudyDocument:
    """The content of study.json.

    Raises:
        ArtifactError: the file is missing or not JSON, or a key is missing or of another type.
    """
    # Imported late: Snakemake plans without msgspec.
    from connector_tax.artifacts.study_records import StudyDocument

    return read_record(path, StudyDocument)


def every_launch(study: StudyDocument) -> list[Launch]:
    """The launches of all phases in run order."""
    return [launch for phase in PHASES for launch in launches(study, phase)]


def load_study(path: Path) -> Study:
    """Read `study.json`; raises as `read_study`."""
    return Study(path.parent, read_study(path))


def launches(study: StudyDocument, phase: str) -> list[Launch]:
    """The launches of a phase in run order."""
    return [Launch(e["config"], e["block"], phase) for e in study["run_order"][phase]]

"""Read study.json, and compute the rate of every cell.

In Phase A the rate is the cell's own; in later phases it is the phase's reference rate, or lower
for its shape. In a study with a `shape_rates` section the throughput of plain for each shape is
measured after Phase A (study.shape_rates); all configurations get at most `max_share` of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from connector_tax.artifacts import paths
from connector_tax.artifacts.names import PHASES, Launch, baseline_of, launched_plains
from connector_tax.artifacts.record_reader import read_record
from connector_tax.files import ArtifactError

if TYPE_CHECKING:
    from connector_tax.artifacts.study_records import CellPlan, StudyConfig, StudyDocument


@dataclass(frozen=True)
class Study:
    """The content of `study.json`, and its folder."""

    root: Path
    document: StudyDocument

    @property
    def config(self) -> StudyConfig:
        """Return the resolved configuration."""
        return self.document["config"]

    @property
    def baseline(self) -> str:
        """Return the configuration that taxes are relative to."""
        return baseline_of(self.config)

    @property
    def bare_baseline(self) -> bool:
        """Return whether the baseline has no connector, so that callbacks take no time in it."""
        entries = {entry["id"]: entry for entry in self.document["configurations"]}
        return entries[self.baseline].get("connector") is None

    @property
    def borrows(self) -> bool:
        """Return whether configurations share an error estimate; in `ab` they do not.

        Source: docs/method.md, "The error model".
        """
        return self.config["engine"]["kind"] != "command"

    @property
    def concurrency(self) -> int | None:
        """Return the requests that a closed loop keeps in flight; None in an open loop."""
        return self.config["phase_a"].get("concurrency")

    @property
    def saturation(self) -> dict[str, float]:
        """Return the bounds of saturation; empty in a closed loop, which has no schedule."""
        return {} if self.concurrency else self.config["saturation"]

    @property
    def configurations(self) -> list[str]:
        """Return the configuration ids in the study's order."""
        return [entry["id"] for entry in self.document["configurations"]]

    def plains(self, phase: str) -> list[str]:
        """Return the baseline's launches in each block of a phase: `plain`, `plain_2` and so on."""
        launched = (entry["config"] for entry in self.document["run_order"][phase])
        return launched_plains(launched, self.baseline)

    def configs(self, phase: str) -> list[str]:
        """Return the launch names of a block; repeated launches of the baseline come last."""
        launched = {entry["config"] for entry in self.document["run_order"][phase]}
        further = self.plains(phase)[1:]
        return [c for c in self.configurations if c in launched] + further

    def cells(self, phase: str) -> Sequence[CellPlan]:
        """Return the planned cells of a phase; rate_rps is null in B and Bp."""
        return self.document["cells"][phase]


def read_study(path: Path) -> StudyDocument:
    """Return the content of study.json.

    Raises:
        ArtifactError: the file is missing or not JSON, or a key is missing or of another type.
    """
    # Imported late: Snakemake plans without msgspec.
    from connector_tax.artifacts.study_records import StudyDocument

    return read_record(path, StudyDocument)


def every_launch(study: StudyDocument) -> list[Launch]:
    """Return the launches of all phases in run order."""
    return [launch for phase in PHASES for launch in launches(study, phase)]


def load_study(path: Path) -> Study:
    """Read `study.json`; raises as `read_study`."""
    return Study(path.parent, read_study(path))


def launches(study: StudyDocument, phase: str) -> list[Launch]:
    """Return the launches of a phase in run order."""
    return [Launch(e["config"], e["block"], phase) for e in study["run_order"][phase]]


# ---- rates


def shape_limits(study: StudyDocument, root: Path, phase: str) -> dict[str, float]:
    """Return the highest allowed requests/s for the shape of each cell, by cell name.

    Empty for Phase A, after which the shapes are probed, and in a study without `shape_rates`.

    Raises:
        ArtifactError: shape_rates.json is missing, or of another design.
    """
    if phase == "A" or study["config"].get("shape_rates") is None:
        return {}
    # Imported late: Snakemake plans without msgspec.
    from connector_tax.artifacts.stage_records import ShapeRatesRecord

    path = root / paths.SHAPE_RATES
    content = read_record(path, ShapeRatesRecord)
    if content["design_sha256"] != study["design_sha256"]:
        raise ArtifactError(f"{path}: made for another design than {paths.STUDY}; delete it")
    return {name: shape["most_rps"] for name, shape in content["shapes"].items()}


def cell_rates(
    study: StudyDocument, phase: str, reference_rps: float | None, limits: Mapping[str, float]
) -> dict[str, float | None]:
    """Return the requests/s of each cell of a phase, by name; None if no rate was chosen.

    Args:
        reference_rps: the phase's reference rate; None in Phase A, and before it is known.
        limits: `shape_limits`.
    """
    rates = {}
    for planned in study["cells"][phase]:
        name, rate = planned["cell"], planned["rate_rps"]
        if rate is None and reference_rps is not None:
            rate = min(reference_rps, limits.get(name, reference_rps))
        rates[name] = rate
    return rates


def most_of_shape(max_share: float, completed_s: Sequence[float]) -> float:
    """Return the highest allowed requests/s of a shape (3 digits), a share of its throughput.

    Args:
        max_share: from the `shape_rates` section.
        completed_s: completion times of requests that arrived at 0 s; at least one.
    """
    return float(f"{max_share * len(completed_s) / max(completed_s):.3g}")

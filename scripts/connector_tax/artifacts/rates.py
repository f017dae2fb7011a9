"""The rate of every cell: its own in Phase A, else the phase's reference rate, or its shape's.

In a study with a `shape_rates` section plain is asked, once Phase A is over, how much of each shape
it can serve (study.shape_rates); `max_share` of that is the most that any configuration is offered.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from connector_tax.artifacts import paths
from connector_tax.artifacts.record_reader import read_record
from connector_tax.artifacts.stage_records import ShapeRatesRecord
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.files import ArtifactError


def shape_limits(study: StudyDocument, root: Path, phase: str) -> dict[str, float]:
    """Cell name to the most requests/s of that shape.

    Empty for Phase A, after which the shapes are probed, and in a study without `shape_rates`.

    Raises:
        ArtifactError: shape_rates.json is missing, or of another design.
    """
    if phase == "A" or study["config"].get("shape_rates") is None:
        return {}
    path = root / paths.SHAPE_RATES
    content = read_record(path, ShapeRatesRecord)
    if content["design_sha256"] != study["design_sha256"]:
        raise ArtifactError(f"{path}: of another design than {paths.STUDY}; delete it")
    return {name: shape["most_rps"] for name, shape in content["shapes"].items()}


def cell_rates(
    study: StudyDocument, phase: str, reference_rps: float | None, limits: Mapping[str, float]
) -> dict[str, float | None]:
    """Cell name to requests/s, for each cell of a phase; None where no rate was chosen.

    Args:
        study: study.json.
        phase: A, B or Bp.
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
    """The most requests/s of a shape, to three digits: a share of what was served of it.

    Args:
        max_share: of the `shape_rates` section.
        completed_s: when requests that had arrived at 0 s had all their tokens; at least one.
    """
    return float(f"{max_share * len(completed_s) / max(completed_s):.3g}")

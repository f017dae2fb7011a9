"""looks.json: what looks at a study's first blocks said, and whom they decided."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from connector_tax.artifacts import paths
from connector_tax.artifacts.record_reader import converted
from connector_tax.artifacts.verdicts import CANNOT_TELL, TOO_FEW
from connector_tax.files import read_json


@dataclass(frozen=True)
class Finding:
    """What a look says of one configuration in one metric.

    Attributes:
        tax: a fraction; lo and hi bound it at the look's level; None: nothing repeats yet.
        verdict: of `artifacts.verdicts.VERDICTS`.
        base_ms: the baseline's geometric mean.
        blocks_needed: with which a tax of this size would be decided in POWER of the cases; None
            where it is, or where MOST_BLOCKS would not do.
    """

    config: str
    metric: str
    tax: float | None
    lo: float | None
    hi: float | None
    verdict: str
    base_ms: float | None
    blocks_needed: int | None


class Look(TypedDict):
    """One entry of looks.json."""

    blocks: int
    level: float
    findings: list[Finding]


def read_looks(folder: Path) -> list[Look]:
    """The looks that were taken in a study's folder; none before the second block."""
    path = folder / paths.LOOKS
    return converted(read_json(path), list[Look], str(path)) if path.exists() else []


def decided(findings: Sequence[Finding]) -> set[str]:
    """The configurations of which every metric has a verdict."""
    open_ = {f.config for f in findings if f.verdict in (CANNOT_TELL, TOO_FEW)}
    return {finding.config for finding in findings} - open_


def decided_in(taken: Look) -> dict[str, dict[str, Finding]]:
    """The findings of the configurations that a look decided, by metric."""
    return {
        name: {finding.metric: finding for finding in taken["findings"] if finding.config == name}
        for name in decided(taken["findings"])
    }

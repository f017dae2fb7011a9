"""looks.json: results of the interim analyses of a study's first blocks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from connector_tax.artifacts import paths
from connector_tax.artifacts.names import Launch
from connector_tax.artifacts.record_reader import converted
from connector_tax.artifacts.verdicts import CANNOT_TELL, TOO_FEW
from connector_tax.files import read_json

# The blocks of the first look where `statistics.first_look` does not say.
FIRST_LOOK = 2
# Begins the reason of a launch that a look has left out.
LEFT_OUT = "decided after"


def first_look(statistics: Mapping[str, Any]) -> int:
    """Return the number of blocks that the first look is taken after, whose level comes first."""
    return int(statistics.get("first_look", FIRST_LOOK))


@dataclass(frozen=True)
class Finding:
    """An interim analysis's result for one configuration in one metric.

    Attributes: the columns of effects.csv (`artifacts.tables.EffectRow`), of the launches there
        were; `family_lo` to `family_hi` and `narrow_lo` to `narrow_hi` at the analysis' levels.
    """

    config: str
    metric: str
    n_blocks: int
    n: int
    n_base: int
    status: str
    estimate: float | None = None
    error: float | None = None
    df: float | None = None
    lo: float | None = None
    hi: float | None = None
    family_lo: float | None = None
    family_hi: float | None = None
    narrow_lo: float | None = None
    narrow_hi: float | None = None
    p: float | None = None
    base: float | None = None
    own: float | None = None
    method: str = ""
    verdict: str = ""
    blocks_needed: int | None = None
    mark: str = ""
    reason: str = ""
    n_cell: int | None = None


class Look(TypedDict):
    """One entry of looks.json."""

    blocks: int
    level: float
    findings: list[Finding]


def read_looks(folder: Path) -> list[Look]:
    """Return the interim analyses in a study's folder; there is none before the second block."""
    path = folder / paths.LOOKS
    return converted(read_json(path), list[Look], str(path)) if path.exists() else []


def decided(findings: Sequence[Finding]) -> set[str]:
    """Return the configurations for which the analysis decided every metric.

    What is marked is decided too: a server that fell behind does so in later blocks.
    """
    open_ = {f.config for f in findings if f.verdict in (CANNOT_TELL, TOO_FEW, "")}
    return {finding.config for finding in findings} - open_


def decided_in(taken: Look) -> dict[str, dict[str, Finding]]:
    """Return the findings of the decided configurations, by metric, in the study's order."""
    done = decided(taken["findings"])
    findings: dict[str, dict[str, Finding]] = {}
    for finding in taken["findings"]:
        if finding.config in done:
            findings.setdefault(finding.config, {})[finding.metric] = finding
    return findings


def decided_earlier(folder: Path, launch: Launch) -> str | None:
    """Return the earlier interim analysis that decided a launch's configuration, or None.

    The baseline is run as long as a candidate is; looks are at Phase A alone.
    """
    for taken in read_looks(folder) if launch.phase == "A" else ():
        if taken["blocks"] <= launch.block:
            every = {finding.config for finding in taken["findings"]}
            done = decided_in(taken).keys()
            if launch.configuration in done or (
                launch.configuration not in every and done == every
            ):
                return f"{LEFT_OUT} {taken['blocks']} blocks"
    return None

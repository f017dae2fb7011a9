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

# Default of `statistics.first_look`.
FIRST_LOOK = 2
# Beginning of the reason of a launch that an interim analysis has skipped.
LEFT_OUT = "decided after"


def first_look(statistics: Mapping[str, Any]) -> int:
    """Return the number of blocks after which the first interim analysis is due."""
    return int(statistics.get("first_look", FIRST_LOOK))


@dataclass(frozen=True)
class Finding:
    """An interim analysis's result for one configuration in one metric.

    Its attributes are columns of effects.csv (`artifacts.tables.EffectRow`) over the blocks so far.
    `family_lo` to `family_hi` and `narrow_lo` to `narrow_hi` are at the analysis's levels.
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
    """The results of one interim analysis: an entry of looks.json."""

    blocks: int
    level: float
    findings: list[Finding]


def read_looks(folder: Path) -> list[Look]:
    """Return the interim analyses in a study's folder; there is none before the second block."""
    path = folder / paths.LOOKS
    return converted(read_json(path), list[Look], str(path)) if path.exists() else []


def decided(findings: Sequence[Finding]) -> set[str]:
    """Return the configurations for which the analysis decided every metric.

    A marked metric counts as decided, since a server that fell behind will do so in later blocks,
    and so does a configuration that its gate left out.
    """
    undecided = (CANNOT_TELL, TOO_FEW, "")
    open_ = {f.config for f in findings if f.status != "skipped" and f.verdict in undecided}
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
    """Return text on the earlier interim analysis that decided a launch's configuration, or None.

    The baseline runs as long as a candidate does. Interim analyses judge Phase A; later phases
    leave out what any of them decided.
    """
    for taken in read_looks(folder):
        if launch.phase != "A" or taken["blocks"] <= launch.block:
            every = {finding.config for finding in taken["findings"]}
            done = decided_in(taken).keys()
            if launch.configuration in done or (
                launch.configuration not in every and done == every
            ):
                return f"{LEFT_OUT} {taken['blocks']} blocks"
    return None

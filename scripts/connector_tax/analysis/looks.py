"""Looks while a study is measured: after a block, which configurations are decided.

A look takes the median of each launch, in the mean over the rates of Phase A at which nothing was
saturated, and compares configurations within blocks (docs/method.md, "The error model"). Its level
stands in `statistics.looks`, one for each look from the second block on; their sum is the family's.
Candidates and metrics share a level (Bonferroni).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypedDict

from connector_tax.analysis.block_model import Estimate, Launches, LaunchId
from connector_tax.artifacts import paths
from connector_tax.artifacts.index import read_index
from connector_tax.artifacts.metrics import margin_of
from connector_tax.artifacts.names import Launch, configuration_of, launched_plains
from connector_tax.artifacts.study_file import Study, launches
from connector_tax.files import read_json, write_json

FIRST_LOOK = 2
# Begins the reason of a launch that a look has left out.
DECIDED = "decided after"
METRICS = ("ttft_p50", "tpot_p50")
COSTS, GAINS, LESS, CANNOT_TELL = "costs", "is faster", "less than the margin", "cannot tell"
SATURATED = "saturated"
# What a planned number of blocks is to reach, as the method has it.
POWER = 0.8
MOST_BLOCKS = 100


@dataclass(frozen=True)
class Finding:
    """What a look says of one configuration in one metric.

    Attributes:
        tax: a fraction; lo and hi bound it at the look's level; None: nothing repeats yet.
        verdict: COSTS or GAINS (the interval off zero), LESS (within the margin), CANNOT_TELL,
            SATURATED (no rate is left at which nothing was).
        within: the interval of the equivalence test lies within the margin.
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
    within: bool
    base_ms: float | None
    blocks_needed: int | None


class Look(TypedDict):
    """One entry of looks.json."""

    blocks: int
    level: float
    findings: list[dict[str, object]]


def look(study: Study, blocks: int) -> list[Finding]:
    """What the first `blocks` blocks say; without an interval before FIRST_LOOK.

    Args:
        study: Phase A of its first blocks has ended.
    """
    statistics = study.config["statistics"]
    values, saturated = _launch_medians(study, blocks)
    margins = {metric: margin_of(statistics["margins"], metric) for metric in METRICS}
    return findings_of(
        values, study.baseline, [name for name in study.configurations if name != study.baseline],
        blocks, statistics["looks"], margins, saturated=bool(saturated),
    )  # fmt: skip


def findings_of(
    values: Mapping[str, Mapping[LaunchId, float]],
    baseline: str,
    candidates: Sequence[str],
    blocks: int,
    levels: Sequence[float],
    margins: Mapping[str, float],
    *,
    saturated: bool = False,
) -> list[Finding]:
    """What the log medians of the launches say, by metric, of each candidate.

    Args:
        levels: of all looks; this one is after `blocks` blocks.
        saturated: whether launches were left out since a server was.
    """
    level = levels[max(blocks - FIRST_LOOK, 0)]
    findings = []
    for metric in METRICS:
        medians = Launches.of(values[metric])
        names = {launch.name: configuration_of(launch.name) for launch in values[metric]}
        plains = launched_plains(names, baseline)
        base = [v for (name, _), v in values[metric].items() if names[name] == baseline]
        base_ms = math.exp(sum(base) / len(base)) if base else None
        for config in candidates:
            estimate = medians.contrast(config, plains)
            if estimate is None:
                verdict = SATURATED if saturated else CANNOT_TELL
                missing = Finding(config, metric, None, None, None, verdict, False, base_ms, None)
                findings.append(missing)
                continue
            lo, hi, verdict, within = _judged(estimate, level, len(candidates), margins[metric])
            needed = None
            if verdict == CANNOT_TELL and estimate.error is not None:
                needed = _blocks_needed(
                    estimate, medians.added_df, levels[-1], len(candidates), margins[metric]
                )
            tax = math.expm1(estimate.point)
            findings.append(Finding(config, metric, tax, lo, hi, verdict, within, base_ms, needed))
    return findings


def decided(findings: Sequence[Finding]) -> set[str]:
    """The configurations of which every metric has a verdict."""
    open_ = {finding.config for finding in findings if finding.verdict == CANNOT_TELL}
    return {finding.config for finding in findings} - open_


def _launch_medians(
    study: Study, blocks: int
) -> tuple[dict[str, dict[LaunchId, float]], list[str]]:
    """Mean log median of each launch by metric, and the cells left out since one was saturated."""
    rows: dict[LaunchId, Mapping[str, Mapping[str, float | None]]] = {}
    for launch in launches(study.document, "A"):
        folder = launch.folder(study.root)
        index = read_index(folder) if launch.block < blocks else None
        if index is not None and index.status == "done":
            valid = {entry.cell for entry in index.cells if entry.status == "valid"}
            summary = read_json(folder / paths.SUMMARY)
            of_cells = {cell: row for cell, row in summary.items() if cell in valid}
            rows[LaunchId(launch.config, launch.block)] = of_cells
    cells = [cell["cell"] for cell in study.cells("A")]
    least = study.config["saturation"]["throughput_ratio_min"]
    saturated = [
        cell for cell in cells if any(_saturated(r.get(cell), least) for r in rows.values())
    ]
    kept = [cell for cell in cells if cell not in saturated]
    values: dict[str, dict[LaunchId, float]] = {metric: {} for metric in METRICS}
    for launch_id, row in rows.items():
        for metric in METRICS:
            medians = [m for cell in kept if (m := row.get(cell, {}).get(f"{metric}_ms"))]
            if kept and len(medians) == len(kept):
                values[metric][launch_id] = sum(map(math.log, medians)) / len(kept)
    return values, saturated


def _saturated(row: Mapping[str, float | None] | None, least: float) -> bool:
    ratio = None if row is None else row["throughput_ratio"]
    return row is not None and (bool(row["dropped"]) or (ratio is not None and ratio < least))


def _judged(
    estimate: Estimate, level: float, candidates: int, margin: float
) -> tuple[float | None, float | None, str, bool]:
    """Interval, verdict, and whether it lies within the margin.

    All metrics must lie within it, so that they share no level for that (intersection-union).
    """
    half = estimate.half_width(1 - level / (candidates * len(METRICS)))
    narrow = estimate.half_width(1 - 2 * level / candidates)
    if half is None or narrow is None:
        return None, None, CANNOT_TELL, False
    lo, hi = math.expm1(estimate.point - half), math.expm1(estimate.point + half)
    ends = math.expm1(estimate.point - narrow), math.expm1(estimate.point + narrow)
    within = -margin < ends[0] and ends[1] < margin
    verdict = COSTS if lo > 0 else GAINS if hi < 0 else LESS if within else CANNOT_TELL
    return lo, hi, verdict, within


def _blocks_needed(
    estimate: Estimate, added_df: int, level: float, candidates: int, margin: float
) -> int | None:
    """The blocks after which the interval would probably exclude zero or lie within the margin.

    A tax below half the margin is taken to be none; POWER by the quantile of the t distribution.
    """
    from scipy.stats import t as student

    small = abs(estimate.point) < math.log1p(margin) / 2
    away = math.log1p(margin) - abs(estimate.point) if small else abs(estimate.point)
    share = 2 * level / candidates if small else level / (candidates * len(METRICS))
    for blocks in range(len(estimate.blocks) + 1, MOST_BLOCKS + 1):
        later = estimate.with_blocks(added_df, blocks)
        half = later.half_width(1 - share)
        assert half is not None
        assert later.error is not None
        if half + float(student.ppf(POWER, later.df)) * later.error <= away:
            return blocks
    return None


def read_looks(folder: Path) -> list[Look]:
    """The looks that were taken in a study's folder; none before the second block."""
    path = folder / paths.LOOKS
    looks: list[Look] = read_json(path) if path.exists() else []
    return looks


def decided_earlier(folder: Path, launch: Launch) -> str | None:
    """Why a launch is not run any more: a look at earlier blocks has decided; None: it is run.

    The baseline is run as long as a candidate is.
    """
    for taken in read_looks(folder):
        if taken["blocks"] <= launch.block:
            every = {finding.config for finding in _findings(taken)}
            done = decided_in(taken).keys()
            if launch.configuration in done or (
                launch.configuration not in every and done == every
            ):
                return f"{DECIDED} {taken['blocks']} blocks"
    return None


def _findings(taken: Look) -> list[Finding]:
    return [Finding(**finding) for finding in taken["findings"]]  # type: ignore[arg-type]


def decided_in(taken: Look) -> dict[str, dict[str, Finding]]:
    """The findings of the configurations that a look decided, by metric."""
    findings = _findings(taken)
    return {
        name: {finding.metric: finding for finding in findings if finding.config == name}
        for name in decided(findings)
    }


def take_look(study: Study, blocks: int) -> list[Finding]:
    """Look once after `blocks` blocks, and keep what was seen: looks.json.

    A look that was taken stays as it is: a second one at the same data would be no other, and one
    at changed data would have no level left. So does what an earlier look has decided.
    """
    looks = read_looks(study.root)
    taken = next((entry for entry in looks if entry["blocks"] == blocks), None)
    if taken is not None:
        return _findings(taken)
    kept = {name: found for entry in looks for name, found in decided_in(entry).items()}
    findings = [kept.get(f.config, {}).get(f.metric, f) for f in look(study, blocks)]
    levels = study.config["statistics"]["looks"]
    looks.append(
        {
            "blocks": blocks,
            "level": levels[blocks - FIRST_LOOK],
            "findings": [asdict(finding) for finding in findings],
        }
    )
    write_json(study.root / paths.LOOKS, looks)
    return findings


def take_due_look(study: Study, block: int) -> list[Finding] | None:
    """Take the look that is due when a block of Phase A has ended; None where none is.

    Not while a launch up to it is missing or failed; nor where a later block has begun: what the
    look would have left out is measured then, and its level stays unspent.
    """
    blocks = block + 1
    if blocks < FIRST_LOOK or "looks" not in study.config["statistics"]:
        return None
    for launch in launches(study.document, "A"):
        index = read_index(launch.folder(study.root))
        ended = index is not None and index.status != "failed"
        if ended is not (launch.block < blocks):
            return None
    return take_look(study, blocks)

"""Estimate the smallest cost that the planned blocks can prove, and the time to prove half of it.

A candidate is judged by its own block differences, whose error falls with the square root of the
number of blocks, at the level of the last interim analysis (docs/method.md, "The error model").
"""

import math
from collections.abc import Mapping, Sequence

from connector_tax.ab.design import FAMILY_LEVEL, FIRST_ANALYSIS
from connector_tax.analysis.effect import MOST_BLOCKS, POWER, Effect, fewest_blocks
from connector_tax.analysis.looks import shared
from connector_tax.artifacts.looks import Finding
from connector_tax.artifacts.metrics import word_of


def smallest_cost(finding: Finding, blocks: int, candidates: int, metrics: int) -> float:
    """Return the smallest cost (a fraction) that `blocks` blocks prove with probability POWER.

    Args:
        finding: an interim result with an error.
        candidates, metrics: the numbers of candidates and of metrics, which share alpha.
    """
    levels = shared(FAMILY_LEVEL / (blocks - FIRST_ANALYSIS + 1), candidates, metrics)
    present = tuple(range(finding.n_blocks))
    effect = Effect(0.0, finding.error, finding.df or 0, present, added_df=1)
    planned = effect.with_blocks(blocks, levels)
    return math.expm1(planned.half_width(levels.wide) + planned.reach(POWER))


def forecast(
    findings: Sequence[Finding], blocks: int, block_s: float, labels: Mapping[str, str]
) -> list[str]:
    """Return the forecast as a line of text for each candidate that has an interval.

    Args:
        findings: results of the last interim analysis.
        blocks: number of planned blocks.
        block_s: duration of a block in seconds.
        labels: the candidates' labels by name.
    """
    lines = []
    names = list(dict.fromkeys(finding.config for finding in findings))
    sizes = len(names), len({finding.metric for finding in findings})
    for name in names:
        known = [f for f in findings if f.config == name and f.error is not None]
        costs = [(f, smallest_cost(f, blocks, *sizes)) for f in known]
        if not costs:
            continue
        words = " and ".join(f"{100 * cost:.1f}% of {word_of(f.metric)}" for f, cost in costs)

        def halved(count: int, of: Sequence[tuple[Finding, float]] = costs) -> bool:
            return all(smallest_cost(f, count, *sizes) <= cost / 2 for f, cost in of)

        needed = fewest_blocks(blocks, halved)
        half = (
            f"over {MOST_BLOCKS} blocks"
            if needed is None
            else f"{needed} blocks, about {math.ceil(needed * block_s / 60)} min"
        )
        lines.append(
            f"{labels[name]}: {blocks} blocks prove a cost of at least {words} (in {POWER:.0%} of"
            f" such comparisons); proving half of this cost takes {half}"
        )
    return lines

"""How many blocks an inconclusive tax would take to be decided.

Source: docs/method.md, "Verdicts". The point estimate stays, the standard error shrinks with the
root of the number of blocks, the degrees of freedom grow with the launches; with three or more
devices with their number, each with as many blocks as now.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from connector_tax.analysis.block_model import OWN, Estimate, dunnett_p
from connector_tax.analysis.effects import Effect

MOST_BLOCKS = 100


def with_blocks(estimate: Estimate, added_df: int, blocks: int) -> Estimate:
    """The estimate as it would be in a study of so many blocks, each of which adds `added_df`."""
    assert estimate.error is not None
    present = len(estimate.blocks)
    units = estimate.devices or present
    df = estimate.df + added_df * (blocks - present)
    grown = estimate.df * (units * blocks / present - 1) / (units - 1)
    return replace(
        estimate,
        error=estimate.error * float(np.sqrt(present / blocks)),
        df=grown if estimate.method == OWN or estimate.devices else df,
    )


def blocks_needed(
    effect: Effect, family: Sequence[Estimate], margin: float, confidence: float
) -> int | None:
    """The smallest number of blocks, above the present one, at which it would be TAX or NO TAX.

    Args:
        effect: an inconclusive tax.
        family: the estimates it is compared with one baseline together with, itself included.
        margin: of its metric.
        confidence: of its interval.

    Returns:
        None when MOST_BLOCKS would not decide it.
    """

    def no_tax(blocks: int) -> bool:
        estimate = with_blocks(effect.estimate, effect.added_df, blocks)
        half = estimate.half_width(confidence)
        assert half is not None
        low, high = np.expm1(estimate.point - half), np.expm1(estimate.point + half)
        return bool(-margin < low and high < margin)

    def tax(blocks: int) -> bool:
        estimate = with_blocks(effect.estimate, effect.added_df, blocks)
        half = estimate.half_width(confidence)
        assert half is not None
        return estimate.point > half and dunnett_p(estimate, family) < 1 - confidence

    counts = range(effect.n_blocks + 1, MOST_BLOCKS + 1)
    # Each becomes true once, as the interval shrinks: bisection, Dunnett's integral being slow.
    first = min(bisect_left(counts, True, key=decided) for decided in (no_tax, tax))
    return counts[first] if first < len(counts) else None

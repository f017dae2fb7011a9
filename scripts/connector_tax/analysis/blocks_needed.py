"""How many blocks an inconclusive tax, or a hypothesis, would take to be decided.

Source: docs/method.md, "Verdicts". The point estimate stays, the standard error shrinks with the
root of the number of blocks, the degrees of freedom grow with the launches; with three or more
devices with their number, each with as many blocks as now.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np

from connector_tax.analysis.block_model import Estimate
from connector_tax.analysis.effects import Effect
from connector_tax.analysis.multiplicity import dunnett_p

MOST_BLOCKS = 100


def fewest_blocks(present: int, decided: Callable[[int], bool]) -> int | None:
    """The smallest number of blocks above `present` that decides; None where MOST_BLOCKS do not.

    Args:
        present: the blocks there are.
        decided: whether so many decide; true of every number above one of which it is true.
    """
    counts = range(present + 1, MOST_BLOCKS + 1)
    first = bisect_left(counts, True, key=decided)
    return counts[first] if first < len(counts) else None


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
        estimate = effect.estimate.with_blocks(effect.added_df, blocks)
        half = estimate.half_width(confidence)
        assert half is not None
        low, high = np.expm1(estimate.point - half), np.expm1(estimate.point + half)
        return bool(-margin < low and high < margin)

    def tax(blocks: int) -> bool:
        estimate = effect.estimate.with_blocks(effect.added_df, blocks)
        half = estimate.half_width(confidence)
        assert half is not None
        return estimate.point > half and dunnett_p(estimate, family) < 1 - confidence

    # Each becomes true once, as the interval shrinks: bisection, Dunnett's integral being slow.
    counts = [fewest_blocks(effect.n_blocks, decided) for decided in (no_tax, tax)]
    return min((count for count in counts if count is not None), default=None)

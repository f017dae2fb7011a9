"""How many blocks would decide a tax that is inconclusive, a second time (docs/method.md)."""

import math
from collections.abc import Sequence

import numpy as np

from connector_tax.provenance.distributions import largest_above, t_quantile, t_two_sided
from connector_tax.provenance.recompute_taxes import (
    MOST_BLOCKS,
    VERDICT_BLOCKS,
    Compared,
    Effect,
    sidak,
)


def blocks_wanted(
    found: Effect,
    margin: float,
    family: Sequence[Compared],
    plains: int,
    confidence: float,
) -> int | None:
    """The smallest number of blocks at which the same estimate and error would be decided.

    Args:
        found: the tax as it is, its standard error that of `found.n_blocks` blocks.
        margin: of NO TAX.
        family: the taxes compared with it, itself included; none for the A/A comparison.
        plains: launches of plain of a block.
        confidence: of the interval.
    """
    point = math.log1p(found.point)
    one_block = found.variance * found.n_blocks
    for blocks in range(max(found.n_blocks + 1, VERDICT_BLOCKS), MOST_BLOCKS + 1):
        error = math.sqrt(one_block / blocks)
        df = _freedom(found, blocks)
        half = t_quantile(confidence, df) * error
        if -margin < math.expm1(point - half) and math.expm1(point + half) < margin:
            return blocks
        if point > half and _adjusted(found, point / error, df, family, plains) < 1 - confidence:
            return blocks
    return None


def _freedom(found: Effect, blocks: int) -> float:
    """Degrees of freedom of the error with that many blocks."""
    assert found.df is not None
    if found.own_error:
        return found.df * (blocks - 1) / (found.n_blocks - 1)
    return found.df + (blocks - found.n_blocks) * (len(found.behind) - 1)


def _adjusted(found: Effect, t: float, df: float, family: Sequence[Compared], plains: int) -> float:
    p, count = t_two_sided(t, df), len(family)
    if found.own_error or not family:
        return sidak(p, max(count, 1))
    pooled = sum(not member.effect.own_error for member in family)
    among = largest_above(t, np.full(pooled, 1 / (1 + plains)), round(df))
    return 1 - (1 - among) * (1 - p) ** (count - pooled)

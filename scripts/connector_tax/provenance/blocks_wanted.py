"""How many blocks would decide a tax that is inconclusive, a second time (docs/method.md)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from connector_tax.provenance.distributions import largest_above, t_quantile, t_two_sided
from connector_tax.provenance.recompute_taxes import (
    MOST_BLOCKS,
    VERDICT_BLOCKS,
    Compared,
    Effect,
    sidak,
)


@dataclass(frozen=True)
class Sizes:
    """Launches of a block that enter the pooled error, their configurations, launches of plain."""

    launches: int
    configs: int
    plains: int


def blocks_wanted(
    found: Effect,
    margin: float,
    family: Sequence[Compared],
    sizes: Sizes,
    confidence: float,
) -> int | None:
    """The smallest number of blocks at which the same estimate and error would be decided.

    Args:
        found: the tax as it is, its standard error that of `found.n_blocks` blocks.
        margin: of NO TAX.
        family: the taxes compared with it, itself included; none for the A/A comparison.
        sizes: of a block as it is designed.
        confidence: of the interval.
    """
    point = math.log1p(found.point)
    one_block = found.variance * found.n_blocks
    for blocks in range(max(found.n_blocks + 1, VERDICT_BLOCKS), MOST_BLOCKS + 1):
        error = math.sqrt(one_block / blocks)
        df = _freedom(found, blocks, sizes)
        half = t_quantile(confidence, df) * error
        if -margin < math.expm1(point - half) and math.expm1(point + half) < margin:
            return blocks
        if point > half and _adjusted(found, point / error, df, family, sizes) < 1 - confidence:
            return blocks
    return None


def _freedom(found: Effect, blocks: int, sizes: Sizes) -> int:
    """Degrees of freedom of the error with every launch of that many blocks."""
    pooled = (blocks - 1) * (sizes.launches - 1) + sizes.launches - sizes.configs
    return blocks - 1 if found.own_error else pooled


def _adjusted(
    found: Effect, t: float, df: int, family: Sequence[Compared], sizes: Sizes
) -> float:
    p, count = t_two_sided(t, df), len(family)
    if found.own_error or not family:
        return sidak(p, max(count, 1))
    pooled = sum(not member.effect.own_error for member in family)
    shared = np.full((pooled, 1), 1 / math.sqrt(sizes.plains))
    among = largest_above(t, np.ones(pooled), shared, df)
    return 1 - (1 - among) * (1 - p) ** (count - pooled)

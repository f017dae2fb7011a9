"""How many blocks would decide what cannot be told, a second time (docs/method.md)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from connector_tax.provenance.distributions import largest_above, t_quantile, t_two_sided
from connector_tax.provenance.recompute_taxes import (
    MOST_BLOCKS,
    VERDICT_BLOCKS,
    Compared,
    Taxes,
    TaxEstimate,
    Term,
    Where,
    sidak,
)


class Ahead(Taxes):
    """The same points, with the intervals that a study of `blocks` blocks would have."""

    def __init__(self, now: Taxes) -> None:
        super().__init__(
            now.samples, now.loads, now.statistics, len(now.all_blocks), now.baseline, now.devices
        )
        self.blocks = len(now.all_blocks)
        self._present: dict[object, TaxEstimate | None] = {}

    def tax(self, where: Where, metric: str) -> TaxEstimate | None:
        """The tax, its interval formed on the log ratio."""
        effect = self._once((where, metric), lambda: Taxes.tax(self, where, metric))
        if effect is None or effect.df is None:
            return effect
        return self._later(replace(effect, point=math.log1p(effect.point)), None).as_tax()

    def combination(
        self, terms: Sequence[Term], metric: str, confidence: float | None = None
    ) -> TaxEstimate | None:
        """The weighted sum of taxes."""
        effect = self._once(
            (tuple(terms), metric, confidence),
            lambda: Taxes.combination(self, terms, metric, confidence),
        )
        if effect is None or effect.df is None:
            return effect
        return self._later(effect, confidence)

    def _once(self, key: object, effect: Callable[[], TaxEstimate | None]) -> TaxEstimate | None:
        if key not in self._present:
            self._present[key] = effect()
        return self._present[key]

    def _later(self, effect: TaxEstimate, confidence: float | None) -> TaxEstimate:
        error = math.sqrt(effect.variance * effect.n_blocks / self.blocks)
        half = error * t_quantile(confidence or self.confidence, _freedom(effect, self.blocks))
        return replace(effect, lo=effect.point - half, hi=effect.point + half)


def blocks_wanted(
    tax: TaxEstimate,
    margin: float,
    family: Sequence[Compared],
    plains: int,
    confidence: float,
) -> int | None:
    """The smallest number of blocks at which the same estimate and error would be decided.

    Args:
        tax: as it is, its standard error that of `tax.n_blocks` blocks.
        margin: of NO TAX.
        family: the taxes compared with it, itself included; none for the A/A comparison.
        plains: launches of plain of a block.
        confidence: of the interval.
    """
    point = math.log1p(tax.point)
    one_block = tax.variance * tax.n_blocks
    for blocks in range(max(tax.n_blocks + 1, VERDICT_BLOCKS), MOST_BLOCKS + 1):
        error = math.sqrt(one_block / blocks)
        df = _freedom(tax, blocks)
        half = t_quantile(confidence, df) * error
        if -margin < math.expm1(point - half) and math.expm1(point + half) < margin:
            return blocks
        if point > half and _adjusted(tax, point / error, df, family, plains) < 1 - confidence:
            return blocks
    return None


def _freedom(tax: TaxEstimate, blocks: int) -> float:
    """Degrees of freedom of the error with that many blocks."""
    assert tax.df is not None
    if tax.devices:
        return tax.df * (tax.devices * blocks / tax.n_blocks - 1) / (tax.devices - 1)
    if tax.own_error:
        return tax.df * (blocks - 1) / (tax.n_blocks - 1)
    return tax.df + (blocks - tax.n_blocks) * (len(tax.behind) - 1)


def _adjusted(
    tax: TaxEstimate, t: float, df: float, family: Sequence[Compared], plains: int
) -> float:
    p, count = t_two_sided(t, df), len(family)
    if tax.own_error or not family:
        return sidak(p, max(count, 1))
    pooled = sum(not member.effect.own_error for member in family)
    share = 0.0 if tax.devices else 1 / (1 + plains)
    among = largest_above(t, np.full(pooled, share), df)
    return 1 - (1 - among) * (1 - p) ** (count - pooled)

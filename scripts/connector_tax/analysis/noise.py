"""The error model: the error of a contrast when some configurations may be noisier.

y = block + configuration + error. The standard deviation of a launch's error is sigma times its
configuration's ratio. The ratio is 1 or, with probability NOISY, one of RATIOS, which the noisy
configurations of a study share. Blocks, means and sigma are integrated out under flat priors (of
log sigma), which leaves the restricted likelihood. A contrast is then a mixture of t distributions,
one for each model of which configurations are noisier.

Sources: docs/method.md, "The error model"; Patterson & Thompson, Biometrika 58 (1971) 545
(restricted likelihood); Harville, Biometrika 61 (1974) 383 (as a posterior); Abramowitz & Stegun,
26.7.3 and 26.7.4 (tails of t).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import gammaln, stdtr, stdtrit

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# The prior: docs/decisions.md, "Error model".
NOISY, MOST_NOISY = 0.15, 3
RATIOS = (2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
# Posterior probability of being noisier above which a configuration's own spread is used too.
SUSPECT = 0.25
# Range of the equivalent t's degrees of freedom, and the weight below which a model is ignored.
LEAST_DF, MOST_DF, NEGLIGIBLE = 0.3, 1e5, 1e-16
TOLERANCE, SMALL_STEP, ROUNDS = 1e-12, 1e-7, 200
# Degrees of freedom up to which the tail's series is faster than the incomplete beta function.
SERIES_UP_TO = 100


@dataclass(frozen=True)
class Spread:
    """A t distribution: standard error and degrees of freedom."""

    error: float
    df: float

    def half_width(self, confidence: float) -> float:
        """Return half the width of the interval."""
        return float(stdtrit(self.df, (1 + confidence) / 2)) * self.error


@lru_cache(maxsize=64)
def models(configurations: int) -> tuple[Floats, Floats]:
    """Return the ratios (models, configurations) and the log of each model's prior probability."""
    rows, weights = [np.ones(configurations)], [(1 - NOISY) ** configurations]
    for size in range(1, min(MOST_NOISY, configurations) + 1):
        weight = NOISY**size * (1 - NOISY) ** (configurations - size) / len(RATIOS)
        for noisy in itertools.combinations(range(configurations), size):
            for ratio in RATIOS:
                row = np.ones(configurations)
                row[list(noisy)] = ratio
                rows.append(row)
                weights.append(weight)
    prior = np.array(weights)
    return np.array(rows), np.log(prior / prior.sum())


@dataclass(frozen=True)
class Layout:
    """The launches per configuration and block, and the matrices of each error model for them.

    Attributes:
        counts: number of launches (configurations, blocks).
        ratios: (models, configurations).
        weights: 1 / ratio squared (models, configurations).
        log_prior: log of the prior probability (models).
        log_det: half the log of |V| / |X'VX|, up to a constant of all models (models).
        of_block: summed weights of a block's launches (models, blocks).
        kept: the configurations whose means are free. The others are fixed, one for each group of
            configurations that share blocks.
        inverse: inverse of X'VX with blocks eliminated (models, kept, kept).
        df: launches minus the rank of X.
    """

    counts: Floats
    ratios: Floats
    weights: Floats
    log_prior: Floats
    log_det: Floats
    of_block: Floats
    kept: Integers
    inverse: Floats
    df: int


@lru_cache(maxsize=8)
def _layout(configurations: int, blocks: int, launches: tuple[int, ...]) -> Layout:
    counts = np.array(launches, float).reshape(configurations, blocks)
    ratios, log_prior = models(configurations)
    weights = 1 / ratios**2
    weighted = weights[:, :, None] * counts
    of_block = weighted.sum(1)
    # The weighted Laplacian; its diagonal is summed without cancellation.
    system = -np.matmul(weighted / of_block[:, None, :], weighted.transpose(0, 2, 1))
    diagonal = np.arange(configurations)
    system[:, diagonal, diagonal] = 0
    system[:, diagonal, diagonal] = -system.sum(2)
    fixed = _first_of_groups(counts)
    kept = np.setdiff1d(diagonal, fixed)
    system = system[:, kept[:, None], kept]
    factor = np.linalg.cholesky(system)
    log_system = 2 * np.log(np.diagonal(factor, axis1=1, axis2=2)).sum(1)
    log_det = 0.5 * (np.log(weights) @ counts.sum(1) - np.log(of_block).sum(1) - log_system)
    df = int(counts.sum()) - blocks - len(kept)
    inverse = np.linalg.inv(system)
    return Layout(counts, ratios, weights, log_prior, log_det, of_block, kept, inverse, df)


def _first_of_groups(counts: Floats) -> Integers:
    """Return one configuration of each group that shares blocks, directly or indirectly."""
    linked = (counts @ counts.T) > 0
    while not np.array_equal(further := (linked.astype(int) @ linked.astype(int)) > 0, linked):
        linked = further
    return np.unique(linked.argmax(1))


@dataclass(frozen=True)
class Mixture:
    """The posterior distribution over the error models.

    Attributes:
        rss: weighted residual sum of squares (models).
        log_det: as in the layout (models).
        df: degrees of freedom, equal for all models.
    """

    layout: Layout
    rss: Floats
    log_det: Floats
    df: int

    @classmethod
    def of(cls, config: Integers, block: Integers, residual: Floats) -> "Mixture":
        """Return the posterior of the error models, given the launches.

        Args:
            config: number of each launch's configuration, from 0 without gaps.
            block: number of each launch's block, from 0 without gaps.
            residual: least-squares residuals; not all zero.
        """
        k, blocks = int(config.max()) + 1, int(block.max()) + 1
        counts, sums = np.zeros((k, blocks), int), np.zeros((k, blocks))
        np.add.at(counts, (config, block), 1)
        np.add.at(sums, (config, block), residual)
        layout = _layout(k, blocks, tuple(counts.ravel().tolist()))
        squares = np.bincount(config, residual**2, k)
        of_block = layout.weights @ sums
        means = of_block / layout.of_block
        rest = layout.weights * (sums.sum(1) - means @ layout.counts.T)
        rest = rest[:, layout.kept]
        fitted = (np.matmul(layout.inverse, rest[:, :, None])[:, :, 0] * rest).sum(1)
        rss = layout.weights @ squares - (of_block * means).sum(1) - fitted
        # With weights >= w the sum is at least w times the unweighted one, except for rounding.
        least = layout.weights.min(1) * squares.sum()
        return cls(layout, np.maximum(rss, least), layout.log_det, layout.df)

    @cached_property
    def weights(self) -> Floats:
        """Return the posterior probability of each error model."""
        log = self.layout.log_prior + self.log_det - 0.5 * self.df * np.log(self.rss)
        weights = np.exp(log - log.max())
        return np.asarray(weights / weights.sum())

    @cached_property
    def _counted(self) -> tuple[Floats, Floats, Floats]:
        """Return weight, squared ratios and squared sigma of models heavier than NEGLIGIBLE."""
        counted = self.weights > NEGLIGIBLE
        variances = self.rss[counted] / self.df
        return self.weights[counted], self.layout.ratios[counted] ** 2, variances

    def noisier(self, config: int) -> float:
        """Return the posterior probability that a configuration is noisier than others."""
        return float(self.weights @ (self.layout.ratios[:, config] > 1))

    def spread(self, squares: Floats, levels: tuple[float, float]) -> Spread:
        """Return the t distribution with the mixture's quantiles at two levels.

        If no t distribution has both quantiles, the second is matched.

        Args:
            squares: squared weights of a contrast, summed by configuration.
            levels: one-sided, the lower first.
        """
        weights, ratios, variances = self._counted
        errors = np.sqrt(variances * (ratios @ squares))
        return equivalent(quantiles(weights, errors, self.df, levels), levels)

    def tails(self, squares: Floats, errors: Floats) -> Floats:
        """Return the probability of a contrast's error above each of `errors`; see `spread`."""
        weights, ratios, variances = self._counted
        scales = np.sqrt(variances * (ratios @ squares))
        return np.asarray(upper_tail(self.df, errors[:, None] / scales) @ weights)

    def planned(self, present: int, blocks: int) -> "Mixture":
        """Return the mixture expected with `blocks` blocks, extrapolated from `present` blocks.

        Each further block is assumed complete, with residuals as in the present blocks.
        """
        per_block, more = self.layout.counts.max(1), blocks - present
        of_block = np.log(self.layout.weights) @ per_block - np.log(self.layout.weights @ per_block)
        return replace(
            self,
            rss=self.rss * (blocks - 1) / (present - 1),
            log_det=self.log_det + 0.5 * more * of_block,
            df=self.df + more * (int(per_block.sum()) - 1),
        )


@dataclass(frozen=True)
class Noise:
    """The error of one contrast, from which its t distribution at any two levels follows.

    Attributes:
        mixture: the posterior over the models.
        squares: squared weights of the contrast, summed by configuration.
        blocks: number of blocks of the contrast.
        own_spread: the spread by the contrast's own block differences.
        config: number of its configuration; None for several.
    """

    mixture: Mixture
    squares: Floats
    blocks: int
    own_spread: Spread
    config: int | None = None

    def spread(self, levels: tuple[float, float]) -> Spread:
        """Return the t distribution with the quantiles at two one-sided levels."""
        return self.mixture.spread(self.squares, levels)

    def exceeds(self, errors: tuple[float, float], levels: tuple[float, float]) -> bool:
        """Return whether the quantiles at two one-sided levels are above `errors`."""
        tails = self.mixture.tails(self.squares, np.array(errors))
        return bool((tails > 1 - np.array(levels)).all())

    @cached_property
    def noisier(self) -> float | None:
        """Return the posterior probability that the configuration is noisier.

        None for a contrast of several configurations.
        """
        return None if self.config is None else self.mixture.noisier(self.config)

    @property
    def suspect(self) -> Spread | None:
        """Return `own_spread` if the configuration may be noisier than it seems, else None."""
        return self.own_spread if (self.noisier or 0.0) > SUSPECT else None

    def planned(self, blocks: int) -> "Noise":
        """Return the noise expected in a study of `blocks` blocks."""
        more = self.blocks / blocks
        planned_spread = Spread(self.own_spread.error * more**0.5, blocks - 1)
        mixture = self.mixture.planned(self.blocks, blocks)
        return replace(
            self,
            mixture=mixture,
            squares=self.squares * more,
            blocks=blocks,
            own_spread=planned_spread,
        )


def upper_tail(df: int, x: Floats) -> Floats:
    """Return P(T > x) of Student's t, x at least 0, to about 1e-15.

    Source: Abramowitz & Stegun, 26.7.3 and 26.7.4, series in the cosine of atan(x / sqrt(df)).
    """
    if df > SERIES_UP_TO:
        return np.asarray(stdtr(df, -x))
    cos2 = df / (df + x * x)
    series = np.ones_like(x)
    for j in range(df - 2, 1 + df % 2, -2):
        series = 1 + series * cos2 * ((j - 1) / j)
    sine = x / np.sqrt(df + x * x)
    if df % 2 == 0:
        return np.asarray((1 - sine * series) / 2)
    inner = sine * np.sqrt(cos2) * series if df > 1 else 0.0
    return np.asarray(0.5 - (np.arctan(x / np.sqrt(df)) + inner) / np.pi)


def quantiles(weights: Floats, errors: Floats, df: int, levels: Sequence[float]) -> Floats:
    """Return the quantiles of a mixture of t distributions about 0, to TOLERANCE.

    Newton's method on the logs of tail and quantile, bracketed by ends that each step narrows.

    Args:
        weights: weights of the distributions.
        errors: their standard errors.
        levels: one-sided, above 0.5.
    """
    alphas = 1 - np.array(levels)
    of_one = np.log(stdtrit(df, levels))
    low, high = of_one + np.log(errors.min()), of_one + np.log(errors.max())
    at, step = of_one + weights @ np.log(errors), high - low
    scale = gamma_ratio(df)
    for _ in range(ROUNDS):
        x = np.exp(at)[:, None] / errors
        tail = upper_tail(df, x) @ weights
        slope = (x * (1 + x * x / df) ** (-(df + 1) / 2)) @ weights * scale / tail
        miss = np.log(tail / alphas)
        low, high = np.where(miss > 0, at, low), np.where(miss > 0, high, at)
        newton = at + miss / slope
        settled = np.abs(newton - at) <= SMALL_STEP
        slow = (newton <= low) | (newton >= high) | (np.abs(newton - at) > 0.5 * np.abs(step))
        following = np.where(slow & ~settled, (low + high) / 2, newton)
        step, at = following - at, following
        # A further step would change the result by about the square of this change.
        if settled.all():
            return np.asarray(np.exp(at))
    raise ArithmeticError(f"no quantile of the mixture at {levels} in {ROUNDS} rounds")


def gamma_ratio(df: int) -> float:
    """Return the density of Student's t at 0."""
    return float(np.exp(gammaln((df + 1) / 2) - gammaln(df / 2)) / np.sqrt(df * np.pi))


def equivalent(ends: Floats, levels: tuple[float, float]) -> Spread:
    """Return the t distribution with these two quantiles, or the second if df is at a limit."""
    ratio = np.log(ends[1] / ends[0])

    def above(log_df: float) -> float:
        low, high = stdtrit(np.exp(log_df), levels)
        return float(np.log(high / low) - ratio)

    bounds = np.log(LEAST_DF), np.log(MOST_DF)
    if above(bounds[0]) <= 0:
        df = LEAST_DF
    elif above(bounds[1]) >= 0:
        df = MOST_DF
    else:
        df = float(np.exp(brentq(above, *bounds, xtol=TOLERANCE, rtol=4 * np.finfo(float).eps)))
    return Spread(float(ends[1] / stdtrit(df, levels[1])), df)

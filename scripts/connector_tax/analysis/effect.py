"""One effect: a contrast of launches, its standard error, its intervals and its verdict.

Every estimate of a study is an `Effect`: taxes and their combinations, steps, resources, interim
analyses, and differences between two studies. `effects.csv` holds its contrast (as `estimate`),
`error`, `df` and `scale`, so that every reader computes with the same numbers (`effect_of`).

Source: docs/method.md, "The error model" and "Verdicts".
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

from connector_tax.analysis.noise import Noise, Spread
from connector_tax.artifacts.tables import LOG, RAW, EffectRow, Row
from connector_tax.artifacts.verdicts import (
    MARKED,
    MIN_BLOCKS_FOR_VERDICT,
    TOO_FEW,
    verdict_of,
)
from connector_tax.text import signed

Floats = NDArray[np.float64]

# The power that a planned number of blocks must reach, and the most blocks to plan.
POWER = 0.8
MOST_BLOCKS = 100
# Above that, only round numbers of blocks are tried.
PLANNED = (*range(1, 21), *range(25, 51, 5), *range(60, MOST_BLOCKS + 1, 10))
# A t distribution of at most MOST_DF has the mixture's lower quantile to this factor.
SLACK = 1.001
ONE_LAUNCH = "one launch; launches not included"
EXACT = "exact"


class Ends(NamedTuple):
    """The ends of an interval; an end is infinite if the interval is unbounded there."""

    lo: float
    hi: float


class Levels(NamedTuple):
    """The confidences of the two intervals that decide an effect.

    Attributes:
        wide: of the interval that is tested for containing zero.
        narrow: of the interval of the equivalence test.
    """

    wide: float
    narrow: float

    @property
    def one_sided(self) -> tuple[float, float]:
        """Return the one-sided levels that belong to the narrow and to the wide interval."""
        return (1 + self.narrow) / 2, (1 + self.wide) / 2


@dataclass(frozen=True)
class Effect:
    """A contrast of launches, whose error follows Student's t distribution.

    Attributes:
        contrast: the weighted sum of the launches' values, on `scale`.
        error: its standard error; None without repetition, as in a single block.
        df: degrees of freedom of the error; 0 without an error, infinite if it is exactly 0.
        blocks: the blocks that it uses.
        scale: LOG: the values are logs, and the effect is exp(contrast) - 1; RAW: in their unit.
        method: the source of the spread behind the error.
        confidence: confidence of the displayed interval.
        added_df: degrees of freedom that one more block adds.
        mark: why it gets no verdict (saturation, dropped arrivals, few requests); "" for none.
        taxes: for a combination, its taxes in the order of its terms.
        combined: for a combination, the sum of its weighted taxes, the centre of its interval.
        noise: source of error and df at other levels or with more blocks.
        own_spread: the spread by the configuration's own blocks, if it may be noisier than it
            seems; the interval of the equivalence test is at least as wide as this spread gives.
    """

    contrast: float
    error: float | None
    df: float
    blocks: tuple[int, ...]
    scale: str = LOG
    method: str = ONE_LAUNCH
    confidence: float = 0.95
    added_df: int = 0
    mark: str = ""
    taxes: tuple[float, ...] = ()
    combined: float | None = None
    noise: Noise | None = None
    own_spread: Spread | None = None

    @property
    def point(self) -> float:
        """Return the effect: a fraction on scale LOG (0.45 is +45%), else in the values' unit."""
        if self.combined is not None:
            return self.combined
        return float(np.expm1(self.contrast)) if self.scale == LOG else self.contrast

    @property
    def n_blocks(self) -> int:
        """Return the number of blocks that the effect uses."""
        return len(self.blocks)

    @property
    def repeats(self) -> bool:
        """Return whether the effect has a standard error, and so an interval."""
        return self.error is not None

    @property
    def p(self) -> float | None:
        """Return the two-sided p-value of a zero effect; None without a standard error."""
        middle = self.contrast if self.combined is None else self.combined
        if not self.error:
            return None if self.error is None else float(middle == 0)
        return 2 * float(self.below(-abs(middle)))

    def below(self, errors: float | Floats) -> Floats:
        """Return, for each of `errors`, the probability that the signed error is below it."""
        assert self.error
        return np.asarray(stdtr(self.df, errors / self.error), np.float64)

    def reach(self, share: float) -> float:
        """Return the error distribution's quantile at `share`; infinite if the error is unknown."""
        if self.error is None:
            return np.inf
        return float(stdtrit(self.df, share)) * self.error if self.error else 0.0

    def half_width(self, confidence: float) -> float:
        """Return half the width of the interval with this confidence, on `scale`."""
        return self.reach((1 + confidence) / 2)

    def interval(self, confidence: float, power: float | None = None) -> Ends:
        """Return the ends of the interval with this confidence.

        Args:
            confidence: confidence of the interval.
            power: if given, return the ends that this share of such studies reaches.
        """
        half = self.half_width(confidence)
        if power is not None:
            half += self.reach(power)
        return self._around(half)

    def inner(self, confidence: float) -> float:
        """Return half the width of the equivalence test's interval, on `scale`."""
        half_width = 0.0 if self.own_spread is None else self.own_spread.half_width(confidence)
        return max(self.half_width(confidence), half_width)

    def narrow(self, confidence: float) -> Ends:
        """Return the ends of the equivalence test's interval."""
        return self._around(self.inner(confidence))

    def _around(self, half: float) -> Ends:
        if self.error is None:
            return Ends(-np.inf, np.inf)
        if self.scale == LOG:
            return Ends(*(float(np.expm1(self.contrast + side * half)) for side in (-1, 1)))
        return Ends(self.point - half, self.point + half)

    @property
    def lo(self) -> float:
        """Return the lower end of the displayed interval."""
        return self.interval(self.confidence).lo

    @property
    def hi(self) -> float:
        """Return the upper end of the displayed interval."""
        return self.interval(self.confidence).hi

    @property
    def ends(self) -> tuple[float | None, float | None]:
        """Return the ends of the displayed interval; None for a missing end."""
        return (self.lo, self.hi) if self.repeats else (None, None)

    def columns(self) -> Row:
        """Return the numeric columns of a row of effects.csv; the interval may be missing."""
        row: Row = {"estimate": self.point, "n_blocks": self.n_blocks, "method": self.method}
        if self.error is None:
            return row
        row["error"] = self.error
        if self.method == EXACT:
            return row
        return row | {"lo": self.lo, "hi": self.hi, "p": self.p, "df": self.df}

    # ---- more blocks

    def with_blocks(self, blocks: int, levels: Levels) -> "Effect":
        """Return the effect expected from a study of `blocks` blocks."""
        assert self.error is not None
        if self.noise is not None:
            noise = self.noise.planned(blocks)
            spread = noise.spread(levels.one_sided)
            return replace(
                self, error=spread.error, df=spread.df, noise=noise, own_spread=noise.suspect
            )
        df = self.df + self.added_df * (blocks - self.n_blocks)
        return replace(self, error=self.error * float(np.sqrt(self.n_blocks / blocks)), df=df)

    def ahead(self, blocks: int) -> Ends:
        """Return interval ends that a study of `blocks` blocks reaches with probability POWER."""
        if not self.repeats:
            return Ends(-np.inf, np.inf)
        levels = family_levels(self.confidence, 1)
        return self.with_blocks(blocks, levels).interval(self.confidence, POWER)

    def power(self, margin: float, levels: Levels) -> float:
        """Return the probability of a verdict if the contrast is the true effect.

        A verdict is reached if the wide interval excludes zero, or the narrow one lies within the
        margin (a fraction).
        """
        reach, inner = self.half_width(levels.wide), self.inner(levels.narrow)
        least, most = np.log1p(-margin) + inner, np.log1p(margin) - inner
        if self.error == 0:
            return float(abs(self.contrast) > reach or least < self.contrast < most)
        # Probability of lying within the margin without excluding zero.
        ends = np.array([-reach, max(least, -reach), min(most, reach), reach])
        below, lower, upper, above = self.below(ends - self.contrast)
        return float(below + max(0.0, upper - lower) + 1 - above)

    def blocks_needed(self, margin: float, levels: Levels) -> int | None:
        """Return the number of blocks needed for a `power` of POWER; None if no number suffices."""

        # Above these half-widths no interval is within the margin, and half of the intervals
        # contain zero.
        inner = SLACK * float(np.log1p(margin) - np.log1p(-margin)) / 2
        hopeless = (inner, abs(self.contrast))

        def decided(blocks: int) -> bool:
            # One tail of the mixture is a tenth of the work of its quantiles.
            noise = None if self.noise is None else self.noise.planned(blocks)
            if noise is not None and noise.exceeds(hopeless, levels.one_sided):
                return False
            return self.with_blocks(blocks, levels).power(margin, levels) >= POWER

        return fewest_blocks(self.n_blocks, decided)

    def __format__(self, unit: str) -> str:
        """Return text such as `+12.3% [+10.1%, +14.6%]`.

        Format `pp` gives percentage points, `point` leaves out the interval.
        """

        def text(value: float) -> str:
            return f"{signed(100 * value, 1)}{' pp' if unit == 'pp' else '%'}"

        if unit == "point":
            return text(self.point)
        if not self.repeats:
            return f"{text(self.point)} ({self.method})"
        return f"{text(self.point)} [{text(self.lo)}, {text(self.hi)}]"


def effect_of(row: EffectRow, confidence: float) -> Effect:
    """Return the effect in a row of effects.csv that has an estimate.

    It has no `added_df`, so it cannot plan further blocks.
    """
    assert row.estimate is not None
    contrast = float(np.log1p(row.estimate)) if row.scale == LOG else row.estimate
    df = np.inf if row.method == EXACT else row.df or 0
    blocks = tuple(range(row.n_blocks or 0))
    return Effect(contrast, row.error, df, blocks, row.scale, row.method, confidence, mark=row.mark)


def mean_of(
    values: Sequence[float],
    blocks: tuple[int, ...],
    method: str,
    confidence: float,
    scale: str = RAW,
) -> Effect:
    """Return the mean of one value per block; the spread of the values gives its error."""
    mean, n = float(np.mean(values)), len(values)
    if n < 2:
        return Effect(mean, None, 0, blocks, scale, "", confidence)
    error = float(np.std(values, ddof=1)) / n**0.5
    return Effect(mean, error, n - 1, blocks, scale, method, confidence)


def fewest_blocks(present: int, decided: Callable[[int], bool]) -> int | None:
    """Return the smallest number of blocks in PLANNED that is above `present` and decides.

    Args:
        present: the present number of blocks.
        decided: returns whether a number of blocks decides. A larger number may fail to decide,
        since more blocks may show that a configuration is noisier.

    Returns:
        The number of blocks; None if none decides.
    """
    return next((blocks for blocks in PLANNED if blocks > present and decided(blocks)), None)


def sidak(p: float, comparisons: int) -> float:
    """Return Sidak's adjustment of a p-value for a number of comparisons (JASA 62 (1967) 626)."""
    return float(-np.expm1(comparisons * np.log1p(-min(p, 1 - 1e-16))))


# ---- verdicts


class Judged(NamedTuple):
    """The verdict on an effect, and the intervals behind it."""

    verdict: str
    family_lo: float | None = None
    family_hi: float | None = None
    narrow_lo: float | None = None
    narrow_hi: float | None = None


def family_levels(confidence: float, comparisons: int) -> Levels:
    """Return the confidences for effects of which `comparisons` share one baseline.

    The wide interval excludes zero if Sidak's adjusted p is below 1 - confidence.
    """
    return Levels(confidence ** (1 / max(1, comparisons)), 2 * confidence - 1)


def judge(
    effect: Effect,
    margin: float,
    levels: Levels,
    fewest: int = MIN_BLOCKS_FOR_VERDICT,
) -> Judged:
    """Return the verdict on an effect; no other function derives a verdict from an estimate.

    Args:
        effect: an effect on scale LOG.
        margin: the margin of its metric, a fraction.
        levels: the confidences of its intervals, for which its error and df hold.
        fewest: the blocks that a verdict needs.
    """
    narrow = effect.narrow(levels.narrow) if effect.repeats else (None, None)
    if effect.mark:
        return Judged(MARKED, None, None, *narrow)
    if not effect.repeats or effect.n_blocks < fewest:
        return Judged(TOO_FEW, None, None, *narrow)
    wide, inner = effect.interval(levels.wide), effect.narrow(levels.narrow)
    return Judged(verdict_of(wide, inner, margin), *wide, *inner)

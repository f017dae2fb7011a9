"""The verdicts on a cost, derived from its interval, and their texts.

Source: docs/method.md, "Verdicts". "The cost is not zero" and "the cost is below the margin" are
two statements, and both may hold. Only the second depends on the margin, which a reader can change
without measuring again.
"""

from collections.abc import Iterable

COSTS, GAINS, LESS, CANNOT_TELL = "costs", "gains", "less", "cannot tell"
# For a marked tax (saturated, dropped arrivals, few requests), and for too few launches.
MARKED, TOO_FEW = "marked", "too few blocks"
COSTS_LESS, GAINS_LESS = f"{COSTS}, {LESS}", f"{GAINS}, {LESS}"
VERDICTS = (COSTS, COSTS_LESS, GAINS, GAINS_LESS, LESS, CANNOT_TELL, MARKED, TOO_FEW)
# Verdicts that answer the question.
DECIDED = VERDICTS[:5]
# Verdicts that follow from an interval and a margin, and so can change with the margin.
JUDGED = VERDICTS[:6]
MIN_BLOCKS_FOR_VERDICT = 3


def verdict_of(interval: tuple[float, float], narrow: tuple[float, float], margin: float) -> str:
    """Return the verdict on a tax, one of VERDICTS.

    Args:
        interval: the displayed interval, which holds jointly for all comparisons with the same
            baseline; the tax costs or gains if it excludes zero.
        narrow: the 90% interval; the tax is less than the margin if it lies within the margin.
        margin: a fraction, in both directions.
    """
    lo, hi = interval
    sign = COSTS if lo > 0 else GAINS if hi < 0 else ""
    less = LESS if -margin <= narrow[0] and narrow[1] <= margin else ""
    return _joined((sign, less)) or CANNOT_TELL


def in_words(verdict: str, margin: float | None) -> str:
    """Return a verdict as text: `costs, less than 10%`; without a margin the second part is
    omitted.
    """
    within = "equal" if margin is None else f"less than {100 * margin:g}%"
    return _joined(within if part == LESS else part for part in verdict.split(", "))


def costs(verdict: str) -> bool:
    """Return whether a cost is proven."""
    return verdict in (COSTS, COSTS_LESS)


def gains(verdict: str) -> bool:
    """Return whether the configuration is proven to be faster than its baseline."""
    return verdict in (GAINS, GAINS_LESS)


def sign_of(verdict: str) -> str:
    """Return a verdict's sign, ignoring the margin: costs, gains, or nothing."""
    sign = verdict.partition(",")[0]
    return sign if sign in (COSTS, GAINS) else ""


def less(verdict: str) -> bool:
    """Return whether the tax is proven to be less than the margin."""
    return LESS in verdict.split(", ")


def _joined(parts: Iterable[str]) -> str:
    return ", ".join(filter(None, parts))

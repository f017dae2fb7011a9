"""Define the verdicts on a cost, from its interval, and their words.

Source: docs/method.md, "Verdicts". A cost off zero and a cost below the margin are two statements,
and both may hold. Only the second depends on the margin: a reader who moves it measures nothing
again.
"""

from collections.abc import Iterable

COSTS, GAINS, LESS, CANNOT_TELL = "costs", "gains", "less", "cannot tell"
# Where a tax carries a mark (saturated, dropped arrivals, few requests), and where too few
# launches repeat.
MARKED, TOO_FEW = "marked", "too few blocks"
COSTS_LESS, GAINS_LESS = f"{COSTS}, {LESS}", f"{GAINS}, {LESS}"
VERDICTS = (COSTS, COSTS_LESS, GAINS, GAINS_LESS, LESS, CANNOT_TELL, MARKED, TOO_FEW)
# Those that answer the question.
DECIDED = VERDICTS[:5]
# Those that follow from an interval and a margin; another margin may make another of them.
JUDGED = VERDICTS[:6]
MIN_BLOCKS_FOR_VERDICT = 3


def verdict_of(interval: tuple[float, float], narrow: tuple[float, float], margin: float) -> str:
    """Return the verdict on a tax, one of VERDICTS.

    Args:
        interval: the one that is shown, which holds jointly with the intervals of all compared
            with the same baseline; the tax costs or gains where it excludes zero.
        narrow: its 90% interval; the tax is less than the margin where that lies within it.
        margin: a fraction, to either side.
    """
    lo, hi = interval
    sign = COSTS if lo > 0 else GAINS if hi < 0 else ""
    less = LESS if -margin <= narrow[0] and narrow[1] <= margin else ""
    return _joined((sign, less)) or CANNOT_TELL


def in_words(verdict: str, margin: float | None) -> str:
    """Return a verdict in words: `costs, less than 10%`; without a margin nothing is less than
    it.
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
    """Return a verdict's sign without regard to the margin: costs, gains, or nothing."""
    sign = verdict.partition(",")[0]
    return sign if sign in (COSTS, GAINS) else ""


def less(verdict: str) -> bool:
    """Return whether the tax is proven to be less than the margin."""
    return LESS in verdict.split(", ")


def _joined(parts: Iterable[str]) -> str:
    return ", ".join(filter(None, parts))

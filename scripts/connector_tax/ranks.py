"""Distribution-free confidence intervals of percentiles, from order statistics."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray


def percentile_of(ordered: "Sequence[float] | NDArray[np.floating[Any]]", percent: float) -> float:
    """Return a percentile of an ascending sample by numpy's `linear` method, without a copy."""
    position = (len(ordered) - 1) * percent / 100
    below, above = ordered[int(position)], ordered[min(int(position) + 1, len(ordered) - 1)]
    return float(below + (above - below) * (position % 1))


def at_least(ordered: "Sequence[float]", percent: float) -> float:
    """Return the lower end of the 95% interval of a percentile of an ascending sample.

    A sample too small for that end gives its least value; the end is never above the percentile.
    """
    low, _ = order_statistic_ranks(len(ordered), percent, 0.95)
    return min(ordered[(low or 1) - 1], percentile_of(ordered, percent))


@lru_cache(maxsize=4096)
def order_statistic_ranks(
    n: int, percent: float, confidence: float
) -> tuple[int | None, int | None]:
    """Return the ranks (1 to n) whose order statistics enclose a percentile.

    For n independent draws the number below the percentile is Binomial(n, percent/100); the ranks
    cut at most (1 - confidence)/2 from each of its tails, so [x_(lo), x_(hi)] covers the
    percentile with probability at least `confidence`. None: no order statistic of so small a
    sample is far enough out on that side.
    """
    tail = (1 - confidence) / 2
    p = percent / 100
    k = np.arange(n + 1.0)
    # log n!; the rest equals scipy's binom.ppf, whose import takes half a second.
    factorial = np.concatenate(([0.0], np.cumsum(np.log(k[1:]))))
    ways = factorial[n] - factorial - factorial[::-1]
    cumulative = np.cumsum(np.exp(ways + k * np.log(p) + (n - k) * np.log1p(-p)))
    low, high = np.searchsorted(cumulative, [tail, 1 - tail])
    high += 1
    return (int(low) if low >= 1 else None), (int(high) if high <= n else None)

"""Distribution-free confidence intervals of percentiles, from order statistics.

This module does without numpy, whose import would nearly double the start of a load generator's
worker.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def percentile_of(ordered: "Sequence[float] | NDArray[np.floating[Any]]", percent: float) -> float:
    """Return a percentile of an ascending sample by numpy's `linear` method, without a copy."""
    position = (len(ordered) - 1) * percent / 100
    below, above = ordered[int(position)], ordered[min(int(position) + 1, len(ordered) - 1)]
    return float(below + (above - below) * (position % 1))


def at_least(ordered: "Sequence[float]", percent: float) -> float:
    """Return the lower end of the 95% interval of a percentile of an ascending sample.

    If the sample is too small for that end, its smallest value is returned. The end is never above
    the percentile.
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

    def chance(k: int) -> float:
        """Return the chance that k of the draws are below the percentile."""
        # scipy's binom takes half a second to import.
        ways = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
        return math.exp(ways + k * math.log(p) + (n - k) * math.log1p(-p))

    # Numbers farther out have a chance below 1e-18.
    reach = 10 * math.sqrt(n * p * (1 - p)) + 10
    first, last = max(0, int(n * p - reach)), min(n, int(n * p + reach))
    cumulative = [*accumulate(map(chance, range(first, last + 1)))]
    low = first + bisect_left(cumulative, tail)
    high = first + bisect_left(cumulative, 1 - tail) + 1
    return (low if low >= 1 else None), (high if high <= n else None)

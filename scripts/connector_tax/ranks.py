"""The order statistics of a sample that enclose a percentile, whatever the distribution."""

from functools import lru_cache

import numpy as np


@lru_cache(maxsize=4096)
def order_statistic_ranks(
    n: int, percent: float, confidence: float
) -> tuple[int | None, int | None]:
    """The ranks (1 to n) whose order statistics enclose a percentile.

    For n independent draws the number below the percentile is Binomial(n, percent/100); the ranks
    cut at most (1 - confidence)/2 from each of its tails, so [x_(lo), x_(hi)] covers the
    percentile with probability at least `confidence`. None: no order statistic of so small a
    sample is far enough out on that side.
    """
    tail = (1 - confidence) / 2
    p = percent / 100
    k = np.arange(n + 1.0)
    # log n!; scipy's binom.ppf does the same as the rest, and takes half a second to import.
    factorial = np.concatenate(([0.0], np.cumsum(np.log(k[1:]))))
    ways = factorial[n] - factorial - factorial[::-1]
    cumulative = np.cumsum(np.exp(ways + k * np.log(p) + (n - k) * np.log1p(-p)))
    low, high = np.searchsorted(cumulative, [tail, 1 - tail])
    high += 1
    return (int(low) if low >= 1 else None), (int(high) if high <= n else None)

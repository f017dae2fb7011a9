"""Percentiles, and their distribution-free intervals from order statistics.

Sources: Hyndman & Fan (1996), definition 7 (numpy's `linear`); Le Boudec, "Performance Evaluation
of Computer and Communication Systems", theorem 2.1 (exact binomial ranks);
docs/method.md, "Clocks, latencies, success".
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from connector_tax.ranks import order_statistic_ranks


class Quantile(NamedTuple):
    """A percentile and its interval, in the unit of the data; None where the sample cannot tell."""

    value: float | None
    lo: float | None
    hi: float | None


def quantile(values: NDArray[np.float64], percent: float, confidence: float) -> Quantile:
    """A percentile of `values` (any order, no NaN) with its order-statistic interval."""
    n = len(values)
    if n == 0:
        return Quantile(None, None, None)
    ordered = np.sort(values)
    low, high = order_statistic_ranks(n, percent, confidence)
    value = float(np.percentile(ordered, percent))
    # In a tiny sample the interpolated percentile can lie outside; widening keeps the coverage.
    return Quantile(
        value,
        None if low is None else min(value, float(ordered[low - 1])),
        None if high is None else max(value, float(ordered[high - 1])),
    )

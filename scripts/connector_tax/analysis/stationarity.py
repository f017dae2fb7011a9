"""Is a cell still warming up? MSER-5 and its start against its second half, on TPOT by arrival.

Sources: White, "An effective truncation heuristic for bias reduction in simulation output" (1997),
MSER-5; Georges et al. (OOPSLA'07) on steady state. Neither removes data: the warm-up that is
discarded is the design's fixed one, and a cell that is flagged needs a longer one.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.stats import mannwhitneyu

BATCH = 5
SIGNIFICANCE = 0.01
MIN_BATCHES = 16


def warming_up(values: NDArray[np.float64], margin: float) -> bool | None:
    """Whether `values` (one per request, in order of arrival) still change as they do at a start.

    Both signs must agree: the first quarter differs from the second half by more than the relative
    `margin` and significantly (Mann-Whitney on batch means), and MSER-5 would discard a beginning.
    None: too few requests to tell.
    """
    batches = values[: len(values) // BATCH * BATCH].reshape(-1, BATCH).mean(axis=1)
    start, settled = len(values) // 4, len(values) // 2
    if len(batches) < MIN_BATCHES or (level := np.median(values[settled:])) <= 0:
        return None
    change = float(np.median(values[:start]) / level - 1)
    first, last = batches[: start // BATCH], batches[settled // BATCH :]
    p = float(mannwhitneyu(first, last, method="asymptotic").pvalue)
    return p < SIGNIFICANCE and abs(change) > margin and mser(batches) > 0


def mser(batches: NDArray[np.float64]) -> int:
    """How many leading batches MSER discards: argmin over d of S_d^2 / (m - d)^2.

    S_d^2 is the sum of squared deviations of the m - d batches kept from their mean; d is at most
    half of m, as White has it, because the statistic is unstable when few batches are left.
    """
    m = len(batches)
    kept = np.arange(m, 0, -1)
    sums = np.cumsum(batches[::-1])[::-1]
    squares = np.cumsum(batches[::-1] ** 2)[::-1]
    statistic = (squares - sums**2 / kept) / kept.astype(np.float64) ** 2
    return int(np.argmin(statistic[: m // 2 + 1]))

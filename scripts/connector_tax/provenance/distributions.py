"""Probability for the audit, in plain numpy: t, F, binomial ranks, rank sums, many-to-one maxima.

Nothing is shared with connector_tax.analysis. Sources: Abramowitz & Stegun 26.5, 26.6, 26.7
(incomplete beta, F, Student's t); Le Boudec, theorem 2.1 (ranks of order statistics); Mann &
Whitney (1947) with ties; Dunnett (1955); Dunnett & Sobel (1955).
"""

import math
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SCALES = 48


@lru_cache(maxsize=4096)
def binomial_ranks(n: int, percent: int, confidence: float) -> tuple[int | None, int | None]:
    """Ranks (1 to n) of the order statistics that enclose a percentile; None: none far enough."""
    p, tail = percent / 100, (1 - confidence) / 2
    k = np.arange(n + 1)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n + 1)))])
    log_mass = log_factorial[n] - log_factorial - log_factorial[::-1]
    cumulated = np.cumsum(np.exp(log_mass + k * math.log(p) + (n - k) * math.log1p(-p)))
    low = int(np.argmax(cumulated >= tail))
    high = int(np.argmax(cumulated >= 1 - tail)) + 1
    return (low if low >= 1 else None), (high if high <= n else None)


def incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by its continued fraction."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - incomplete_beta(1 - x, b, a)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(log_front + a * math.log(x) + b * math.log1p(-x)) / a
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    total = d
    for m in range(1, 1000):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / (1 + numerator * d)
            c = 1 + numerator / c
            total *= c * d
        if abs(c * d - 1) < 1e-16:
            break
    return front * total


def t_two_sided(t: float, freedom: float) -> float:
    """P(|T| > |t|) for Student's t."""
    return incomplete_beta(freedom / (freedom + t * t), freedom / 2, 0.5)


@lru_cache(maxsize=4096)
def t_quantile(confidence: float, freedom: float) -> float:
    """The t for which P(|T| <= t) is `confidence`, by bisection."""
    low, high = 0.0, 1e9
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if t_two_sided(middle, freedom) > 1 - confidence else (low, middle)
        )
    return (low + high) / 2


def f_above(f: float, upper: int, lower: float) -> float:
    """P(F > f) with `upper` and `lower` degrees of freedom."""
    return (
        0.0 if math.isinf(f) else incomplete_beta(lower / (lower + upper * f), lower / 2, upper / 2)
    )


def mann_whitney_p(first: Floats, second: Floats) -> float:
    """Two-sided p of the rank-sum test: normal approximation, continuity and tie corrections."""
    pooled = np.concatenate([first, second])
    values, position, counts = np.unique(pooled, return_inverse=True, return_counts=True)
    upper = np.cumsum(counts)
    ranks = ((upper - counts + 1 + upper) / 2)[position]
    n1, n2, n = len(first), len(second), len(pooled)
    u = float(ranks[:n1].sum()) - n1 * (n1 + 1) / 2
    ties = float((counts.astype(float) ** 3 - counts).sum()) / (n * (n - 1))
    spread = math.sqrt(n1 * n2 / 12 * (n + 1 - ties))
    excess = max(u, n1 * n2 - u) - n1 * n2 / 2 - 0.5
    if len(values) == 1 or spread == 0:
        return 1.0
    return min(1.0, math.erfc(excess / spread / math.sqrt(2)))


# ---- the largest of several contrasts with one baseline


@cache
def _normal_table() -> tuple[Floats, Floats]:
    """(z, P(Z <= z)) close enough for linear interpolation to 1e-8."""
    z = np.linspace(-8.5, 8.5, 60_001)
    return z, np.array([math.erfc(-value / math.sqrt(2)) / 2 for value in z])


@lru_cache(maxsize=256)
def _scales(freedom: float) -> list[tuple[float, float]]:
    """Nodes and weights of S = sqrt(chi-squared / freedom): the trapezoid rule on log S."""
    width = 9 / math.sqrt(freedom)
    log_s = np.linspace(-width - 4, min(width, 2.5), 4 * SCALES)
    density = freedom * log_s - freedom * np.expm1(2 * log_s) / 2
    kept = density > density.max() - 40
    log_s = np.linspace(log_s[kept][0], log_s[kept][-1], SCALES)
    weight = np.exp(freedom * log_s - freedom * np.expm1(2 * log_s) / 2)
    return list(zip(np.exp(log_s).tolist(), (weight / weight.sum()).tolist(), strict=True))


def largest_above(t: float, shares: Floats, freedom: float) -> float:
    """P(max |T_i| > |t|) for k contrasts with one baseline, by the trapezoid rule.

    T_i = (sqrt(1 - c_i) Z_i + sqrt(c_i) U) / S with independent standard normal Z and U, and S the
    common error: given U and S the contrasts are independent.

    Args:
        t: the observed ratio of a contrast to its standard error.
        shares: the baseline's share c of the variance of each contrast, shape (k,).
        freedom: degrees of freedom of the common error.
    """
    u = np.arange(-60, 61) / 10
    weights = np.exp(-(u**2) / 2)
    centre, rest = u[:, None] * np.sqrt(shares), np.sqrt(1 - shares)
    grid, normal = _normal_table()
    above = 0.0
    for scale, weight in _scales(freedom):
        upper = np.interp((abs(t) * scale - centre) / rest, grid, normal)
        lower = np.interp((-abs(t) * scale - centre) / rest, grid, normal)
        inside = np.maximum(upper - lower, 0.0).prod(axis=1)
        above += weight * float(weights @ (1 - inside)) / float(weights.sum())
    return above

"""P-values adjusted for the number of contrasts with one baseline: Dunnett's and Sidak's.

Sources: docs/method.md, "Verdicts"; Dunnett, JASA 50 (1955) and Biometrics 20 (1964) (many-to-one
comparisons); Hochberg & Tamhane, "Multiple Comparison Procedures" (1987), appendix 3 (the
integral).
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
from scipy.special import ndtr, ndtri
from scipy.stats import chi

from connector_tax.analysis.block_model import Estimate, Floats

# Points of the integral over the pooled standard deviation and over the baseline's error.
_QUADRATURE = 96


def dunnett_p(estimate: Estimate, family: Sequence[Estimate]) -> float:
    """The adjusted two-sided p-value of one estimate of a family; the family includes it.

    Contrasts with the pooled error share it and their baseline: P(max |T| > |t|) of the
    multivariate t whose correlations are sqrt(rho_i rho_j), by Gauss quadrature. A contrast with an
    error of its own is adjusted for the number of contrasts by Sidak's formula.

    Raises:
        ValueError: the estimate has no error.
    """
    if estimate.t is None or estimate.p is None:
        raise ValueError("a contrast without a standard error has no p-value")
    if estimate.spread is not None:
        return sidak(estimate.p, len(family))
    pooled = [member for member in family if member.spread is None]
    inside = _all_inside(abs(estimate.t), estimate.df, pooled)
    # The others do their own tests: at most their number more comparisons.
    rest = (1 - estimate.p) ** (len(family) - len(pooled))
    return float(np.clip(1 - inside * rest, estimate.p, 1.0))


def sidak(p: float, comparisons: int) -> float:
    """Sidak's adjustment of a p-value for a number of comparisons."""
    return float(-np.expm1(comparisons * np.log1p(-min(p, 1 - 1e-16))))


def _all_inside(bound: float, df: float, pooled: Sequence[Estimate]) -> float:
    """P(all |T_i| <= bound) of contrasts that share one baseline and one pooled error."""
    if not np.isfinite(bound):
        return 1.0
    scale, common, weights = _quadrature(df)
    rounded = np.round([estimate.correlation for estimate in pooled], 12)
    # Equal correlations, the usual case, have one factor.
    rho, count = np.unique(rounded, return_counts=True)
    own = np.sqrt(1 - rho)[:, None, None]
    shift = np.sqrt(rho)[:, None, None] * common[None, None, :]
    reach = bound * scale[None, :, None]
    inside = ndtr((shift + reach) / own) - ndtr((shift - reach) / own)
    over_common = np.prod(inside ** count[:, None, None], axis=0) @ weights
    return float(over_common @ weights)


@cache
def _quadrature(df: int) -> tuple[Floats, Floats, Floats]:
    """Quantiles of the pooled sd over the true one, of the baseline's error, and their weights."""
    nodes, weights = np.polynomial.legendre.leggauss(_QUADRATURE)
    share = (nodes + 1) / 2
    return chi.ppf(share, df) / np.sqrt(df), ndtri(share), weights / 2

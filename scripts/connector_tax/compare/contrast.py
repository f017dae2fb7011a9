"""The difference of two independent estimates, each with its own error and degrees of freedom.

Two studies share no launch. So the variance of a difference is the sum of theirs, and its degrees
of freedom are Welch and Satterthwaite's. Source: docs/compare.md, "How a ratio is formed"; Welch,
Biometrika 34 (1947) 28.
"""

import math
from typing import NamedTuple

from scipy.stats import t as student


class Known(NamedTuple):
    """An estimate, on the scale on which it is compared.

    Attributes:
        error: its standard error; None where nothing repeats; 0 where it is exact.
        df: degrees of freedom behind the error; infinite for an exact one.
    """

    point: float
    error: float | None
    df: float


class Difference(NamedTuple):
    """B minus A with its interval; None where one of the two has no error. Of two exact: no df."""

    point: float
    lo: float | None
    hi: float | None
    p: float | None
    df: float | None


def from_interval(point: float, lo: float, hi: float, df: float, confidence: float) -> Known:
    """What a printed interval says of its estimate, on the same scale.

    Its longer arm is `t(df)` standard errors.
    """
    arm = max(hi - point, point - lo)
    return Known(point, arm / quantile(confidence, df), df)


def quantile(confidence: float, df: float) -> float:
    """Student's t, two-sided."""
    return float(student.ppf((1 + confidence) / 2, df))


def difference(a: Known, b: Known, confidence: float) -> Difference:
    """B minus A."""
    point = b.point - a.point
    if a.error is None or b.error is None:
        return Difference(point, None, None, None, None)
    variance = a.error**2 + b.error**2
    if variance == 0:
        return Difference(point, point, point, float(point == 0), None)
    df = variance**2 / sum(known.error**4 / known.df for known in (a, b) if known.error)
    half = quantile(confidence, df) * math.sqrt(variance)
    p = float(2 * student.sf(abs(point) / math.sqrt(variance), df))
    return Difference(point, point - half, point + half, p, df)

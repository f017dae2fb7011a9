"""Test percentiles and their order-statistic intervals."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from connector_tax.analysis.measure import quantile
from connector_tax.ranks import at_least, order_statistic_ranks

samples = st.lists(st.floats(0, 1e6), min_size=1, max_size=300).map(np.array)


@given(st.integers(1, 5000), st.sampled_from([50, 90, 99]), st.sampled_from([0.9, 0.95, 0.99]))
def test_interval_ranks_are_the_tightest_that_cover_by_the_binomial_law(
    n: int, percent: int, confidence: float
) -> None:
    low, high = order_statistic_ranks(n, percent, confidence)
    p, tail = percent / 100, (1 - confidence) / 2
    if low is not None:
        assert binom.cdf(low - 1, n, p) <= tail
        assert binom.cdf(low, n, p) > tail or low == n
    else:
        assert binom.cdf(0, n, p) > tail
    if high is not None:
        assert binom.sf(high - 1, n, p) <= tail
        assert binom.sf(high - 2, n, p) > tail or high == 1
    else:
        assert binom.sf(n - 1, n, p) > tail


@given(samples, st.sampled_from([50, 90, 99]))
def test_at_least_returns_the_lower_end_of_the_percentiles_interval(
    values: np.ndarray, percent: int
) -> None:
    least = quantile(values, percent, 0.95).lo
    expected = min(values) if least is None else least
    # NumPy interpolates in another order of operations.
    assert at_least(sorted(values), percent) == pytest.approx(expected, rel=1e-12)


def test_one_percent_of_slow_ticks_does_not_raise_the_p99_bound() -> None:
    ticks = [0.0] * 297
    assert at_least([*ticks, 10.0, 20.0, 30.0], 99) == 0
    assert at_least([*ticks, *[10.0] * 9], 99) == 10


@given(samples, st.sampled_from([50, 90, 99]))
def test_the_interval_encloses_the_value_and_scales_with_the_data(
    values: np.ndarray, percent: int
) -> None:
    estimate = quantile(values, percent, 0.95)
    assert estimate.value is not None
    assert estimate.value == np.percentile(values, percent, method="linear")
    assert estimate.lo is None or estimate.lo <= estimate.value
    assert estimate.hi is None or estimate.hi >= estimate.value
    doubled = quantile(2 * np.flip(values), percent, 0.95)
    assert doubled == tuple(None if v is None else pytest.approx(2 * v) for v in estimate)


def test_sample_too_small_for_a_bound_has_none() -> None:
    assert quantile(np.arange(10.0), 90, 0.95).hi is None
    assert quantile(np.array([]), 90, 0.95) == (None, None, None)

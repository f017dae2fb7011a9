"""Arrival processes: exact moments, never truncated, seeded by name."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from connector_tax.loadgen import ArrivalKind, make_offsets

RATE = 50.0
HORIZON_S = 4000.0  # 200,000 arrivals


def gaps_s(kind: ArrivalKind, shape: float | None = None) -> "np.ndarray[tuple[int], np.dtype]":
    offsets = make_offsets(kind, RATE, HORIZON_S, "7/moments", shape)
    return np.diff(offsets, prepend=0) / 1e9


def test_fixed_arrivals_stand_on_an_absolute_grid() -> None:
    offsets = make_offsets("fixed", 3.0, 1000.0, "unused")
    assert len(offsets) == 3000
    assert offsets[0] == 0
    # Never more than rounding away from k / rate: no drift by adding up gaps.
    assert np.abs(offsets - np.arange(3000) / 3.0 * 1e9).max() <= 0.5


def test_jittered_arrivals_are_one_in_each_interval() -> None:
    offsets = make_offsets("jittered", 4.0, 10_000.0, "7/j") / 1e9 * 4
    assert (offsets.astype(int) == np.arange(40_000)).all()
    assert stats.kstest(offsets % 1, stats.uniform.cdf).pvalue > 0.001
    assert np.diff(offsets).std() == pytest.approx(6**-0.5, rel=0.02)


@pytest.mark.parametrize(
    ("kind", "shape", "cv"),
    [("poisson", None, 1.0), ("gamma", 0.25, 2.0), ("gamma", 1.0, 1.0), ("gamma", 4.0, 0.5)],
)
def test_moments_are_exact(kind: ArrivalKind, shape: float | None, cv: float) -> None:
    gaps = gaps_s(kind, shape)
    standard_error = cv / math.sqrt(len(gaps))
    assert gaps.mean() * RATE == pytest.approx(1.0, abs=4 * standard_error)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03)


def test_poisson_gaps_are_exponential_with_their_whole_tail() -> None:
    gaps = gaps_s("poisson")
    assert stats.kstest(gaps, stats.expon(scale=1 / RATE).cdf).pvalue > 0.001
    # Cut at 3/rate the largest of 200,000 gaps would be 3/rate; it should be near ln(n)/rate.
    assert gaps.max() * RATE > 9


def test_gamma_gaps_have_their_distribution() -> None:
    law = stats.gamma(2.5, scale=1 / (RATE * 2.5))
    assert stats.kstest(gaps_s("gamma", 2.5), law.cdf).pvalue > 0.001


@given(
    st.sampled_from(["fixed", "jittered", "poisson"]),
    st.floats(0.05, 500),
    st.floats(0.1, 60),
    st.floats(0.1, 60),
)
def test_a_longer_horizon_extends_the_same_process(
    kind: ArrivalKind, rate: float, horizon_s: float, more_s: float
) -> None:
    short = make_offsets(kind, rate, horizon_s, "1/a")
    long = make_offsets(kind, rate, horizon_s + more_s, "1/a")
    assert (long[: len(short)] == short).all()
    assert (long[len(short) :] >= round(horizon_s * 1e9)).all()
    assert (np.diff(long) >= 0).all()
    assert (long >= 0).all()


def test_the_seed_is_its_whole_name() -> None:
    first = make_offsets("poisson", 10, 10, "7/A/r10/arrivals")
    assert (make_offsets("poisson", 10, 10, "7/A/r10/arrivals") == first).all()
    for other in ("8/A/r10/arrivals", "7/A/r1/0arrivals", "7/A/r10/arrivals/"):
        changed = make_offsets("poisson", 10, 10, other)
        assert len(changed) != len(first) or (changed != first).any()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (
            ("uniform", 1.0, 1.0, "s", None),
            "arrival kind is 'uniform'; allowed: fixed, jittered, poisson",
        ),
        (("poisson", 0.0, 1.0, "s", None), "rate_rps"),
        (("poisson", math.nan, 1.0, "s", None), "rate_rps"),
        (("fixed", 1.0, math.inf, "s", None), "horizon_s"),
        (("gamma", 1.0, 1.0, "s", None), "gamma_shape"),
        (("gamma", 1.0, 1.0, "s", -1.0), "gamma_shape"),
        (("poisson", 1.0, 1.0, "s", 2.0), "gamma_shape"),
    ],
)
def test_bad_arguments_are_named(arguments: tuple[object, ...], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make_offsets(*arguments)  # type: ignore[arg-type]

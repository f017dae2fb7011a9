"""Test the mixture over noisier configurations against dense linear algebra and scipy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import stdtr, stdtrit

from connector_tax.analysis.noise import (
    LEAST_DF,
    MOST_DF,
    Integers,
    Mixture,
    equivalent,
    models,
    quantiles,
    upper_tail,
)

LEVELS = (0.95, 0.996)


def _design(config: Integers, block: Integers) -> np.ndarray:
    columns = [config == c for c in np.unique(config)] + [block == b for b in np.unique(block)]
    return np.column_stack(columns).astype(float)


def _residual(config: Integers, block: Integers, y: np.ndarray) -> np.ndarray:
    columns = _design(config, block)
    return np.asarray(y - columns @ np.linalg.lstsq(columns, y)[0])


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Integers, Integers]:
    """Return launches of two to four configurations in two to four blocks, some left out."""
    k, blocks = draw(st.integers(2, 4)), draw(st.integers(2, 4))
    cells = [(c, b) for b in range(blocks) for c in (0, *range(k))]
    kept = draw(st.lists(st.booleans(), min_size=len(cells), max_size=len(cells)))
    held = [cell for cell, keep in zip(cells, kept, strict=True) if keep] or cells
    config, block = (np.unique(values, return_inverse=True)[1] for values in np.array(held).T)
    return config, block


@settings(max_examples=25, deadline=None)
@given(layouts(), st.integers(0, 1000))
def test_mixture_equals_restricted_likelihood_by_dense_algebra(
    layout: tuple[Integers, Integers], seed: int
) -> None:
    config, block = layout
    columns = _design(config, block)
    rank = int(np.linalg.matrix_rank(columns))
    y = np.random.default_rng(seed).normal(0, 1, len(config))
    residual = _residual(config, block, y)
    if len(y) == rank or residual @ residual < 1e-9:
        return
    mixture = Mixture.of(config, block, residual)
    assert mixture.df == len(y) - rank
    ratios, log_prior = models(int(config.max()) + 1)
    # An orthonormal basis of the columns, so that the determinant is of full rank.
    basis = np.linalg.svd(columns)[0][:, :rank]
    log = []
    for row, prior in zip(ratios, log_prior, strict=True):
        v = 1 / row[config] ** 2
        information = basis.T @ (v[:, None] * basis)
        scaled = np.sqrt(v)
        beta = np.linalg.lstsq(scaled[:, None] * basis, scaled * y)[0]
        rss = v @ (y - basis @ beta) ** 2
        determinants = np.log(v).sum() - np.linalg.slogdet(information)[1]
        log.append(prior + 0.5 * determinants - 0.5 * mixture.df * np.log(rss))
    weights = np.exp(np.array(log) - max(log))
    assert mixture.weights == pytest.approx(weights / weights.sum(), rel=1e-6, abs=1e-12)


@given(st.integers(1, 80), st.floats(0, 500))
def test_upper_tail_equals_scipy(df: int, x: float) -> None:
    assert upper_tail(df, np.array([x]))[0] == pytest.approx(stdtr(df, -x), abs=1e-12)


@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.floats(-12, 0), st.floats(-3, 3)), min_size=1, max_size=12),
    st.floats(0.9, 0.97),
)
def test_quantile_has_the_tail_probability_of_its_level(
    df: int, parts: list[tuple[float, float]], lower: float
) -> None:
    logs = np.array(parts)
    weights, errors = 10 ** logs[:, 0] / (10 ** logs[:, 0]).sum(), 10 ** logs[:, 1]
    levels = (lower, (1 + lower) / 2)
    for end, level in zip(quantiles(weights, errors, df, levels), levels, strict=True):
        assert weights @ stdtr(df, -end / errors) == pytest.approx(1 - level, rel=1e-9)


@given(st.floats(np.log(0.31), np.log(1e3)), st.floats(-5, 5))
def test_t_distribution_is_recovered_from_two_quantiles(log_df: float, log_error: float) -> None:
    df, error = float(np.exp(log_df)), float(np.exp(log_error))
    spread = equivalent(error * stdtrit(df, np.array(LEVELS)), LEVELS)
    assert spread.df == pytest.approx(df, rel=1e-8)
    assert spread.error == pytest.approx(error, rel=1e-8)


@pytest.mark.parametrize(("ends", "df"), [((1.0, 1e9), LEAST_DF), ((1.0, 1.1), MOST_DF)])
def test_t_distribution_at_a_limit_of_df_has_the_second_quantile(
    ends: tuple[float, float], df: float
) -> None:
    spread = equivalent(np.array(ends), LEVELS)
    assert spread.df == df
    assert spread.error * stdtrit(df, LEVELS[1]) == pytest.approx(ends[1], rel=1e-12)


def test_planned_layout_equals_the_layout_of_a_study_with_more_blocks() -> None:
    def of(blocks: int) -> Mixture:
        config = np.tile([0, 0, 1, 2, 3], blocks)
        block = np.repeat(np.arange(blocks), 5)
        y = np.random.default_rng(1).normal(0, 1, len(config))
        return Mixture.of(config, block, _residual(config, block, y))

    now, later = of(3), of(7)
    planned = now.planned(3, 7)
    assert planned.df == later.df
    change = planned.log_det - later.log_det
    assert change == pytest.approx(np.full_like(change, change[0]), abs=1e-9)
    assert planned.rss == pytest.approx(now.rss * 3, rel=1e-12)


def test_one_noisy_configuration_widens_only_its_own_spread() -> None:
    rng, blocks = np.random.default_rng(5), 4
    config = np.tile([0, 0, 1, 2, 3, 4, 5], blocks)
    block = np.repeat(np.arange(blocks), 7)
    y = rng.normal(0, 1, len(config)) * np.where(config == 1, 30, 1)
    mixture = Mixture.of(config, block, _residual(config, block, y))
    noisy, quiet = np.zeros(6), np.zeros(6)
    noisy[[0, 1]] = quiet[[0, 2]] = 1 / (2 * blocks), 1 / blocks
    assert mixture.noisier(1) > 0.99
    assert mixture.noisier(2) < 0.25
    assert mixture.spread(noisy, LEVELS).error > 10 * mixture.spread(quiet, LEVELS).error

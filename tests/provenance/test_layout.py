"""The audit's own block model and distributions, against textbooks and scipy."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from connector_tax.provenance.distributions import (
    f_above,
    largest_above,
    t_quantile,
    t_two_sided,
)
from connector_tax.provenance.layout import LaunchLayout

# Box, Hunter & Hunter (1978), table 7.1: penicillin yield, five blends (blocks), four treatments.
PENICILLIN = np.array(
    [[89, 88, 97, 94], [84, 77, 92, 79], [81, 87, 87, 85], [87, 92, 89, 84], [79, 81, 80, 88]]
)


def layout_of(table: np.ndarray) -> LaunchLayout:
    blocks, configs = np.indices(table.shape)
    return LaunchLayout(blocks.ravel().tolist(), [f"c{c}" for c in configs.ravel()], table.ravel())


def test_the_residual_of_a_textbook_s_randomised_blocks() -> None:
    rss, df = layout_of(PENICILLIN).residual()
    assert df == 12
    assert rss == pytest.approx(226.0)


def test_residual_and_rank_of_a_balanced_incomplete_design() -> None:
    # Montgomery, Design and Analysis of Experiments, table 4.22: catalysts in batches.
    observed = {
        (0, 0): 73, (0, 1): 74, (0, 3): 71, (1, 1): 75, (1, 2): 67, (1, 3): 72,
        (2, 0): 73, (2, 1): 75, (2, 2): 68, (3, 0): 75, (3, 2): 72, (3, 3): 75,
    }  # fmt: skip
    layout = LaunchLayout(
        [b for b, _ in observed],
        [f"c{c}" for _, c in observed],
        np.array(list(observed.values()), dtype=float),
    )
    rss, df = layout.residual()
    assert df == 5
    assert rss == pytest.approx(3.25, abs=1e-7)


@st.composite
def layouts(draw: st.DrawFn) -> LaunchLayout:
    blocks, configs = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    cells = [(b, f"c{c}") for b in range(blocks) for c in range(configs)]
    cells += [(b, "plain") for b in range(blocks) for _ in range(draw(st.integers(0, 3)))]
    kept = draw(st.lists(st.sampled_from(cells), min_size=1, max_size=30))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    return LaunchLayout([b for b, _ in kept], [c for _, c in kept], rng.normal(size=len(kept)))


@settings(max_examples=60, deadline=None)
@given(layouts())
def test_any_layout_is_the_least_squares_fit_of_all_indicators(layout: LaunchLayout) -> None:
    columns = [layout.blocks == b for b in set(layout.blocks.tolist())]
    columns += [layout.configs == c for c in set(layout.configs.tolist())]
    design = np.array(columns, dtype=float).T
    fitted, _, rank, _ = np.linalg.lstsq(design, layout.values, rcond=None)
    rss, df = layout.residual()
    assert df == len(layout.values) - rank
    assert rss == pytest.approx(float(((layout.values - design @ fitted) ** 2).sum()), abs=1e-7)


@settings(max_examples=30, deadline=None)
@given(layouts(), st.integers(0, 2**32))
def test_what_blocks_and_configurations_add_leaves_the_residual(
    layout: LaunchLayout, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    block, config = rng.normal(size=9) * 100, {c: rng.normal() * 100 for c in layout.configs}
    moved = layout.values + [
        block[b] + config[c] for b, c in zip(layout.blocks, layout.configs, strict=True)
    ]
    other = LaunchLayout(layout.blocks.tolist(), layout.configs.tolist(), moved)
    (rss, df), (other_rss, other_df) = layout.residual(), other.residual()
    assert other_df == df
    assert other_rss == pytest.approx(rss, abs=1e-8)


def test_a_noisier_configuration_is_left_out_of_the_pooled_error() -> None:
    rng = np.random.default_rng(3)
    table = rng.normal(size=(6, 5)) * 0.01
    table[:, 2] *= 60
    layout = layout_of(table)
    assert layout.spreads["c2"].p < 0.001
    assert layout.pooled == layout_of(np.delete(table, 2, axis=1)).pooled
    error = layout.error({"c2": 0.2, "c0": 0.1})
    own, pooled = 0.2 * layout.spreads["c2"].variance, 0.1 * layout.pooled[0]
    assert error.variance == pytest.approx(own + pooled)
    parts = own**2 / layout.spreads["c2"].df + pooled**2 / layout.pooled[1]
    assert error.df == pytest.approx((own + pooled) ** 2 / parts)
    assert error.spread == layout.spreads["c2"]
    assert layout.error({"c0": 0.1, "c1": 0.2}).variance == pytest.approx(0.3 * layout.pooled[0])


def test_the_spread_of_equal_configurations_is_uniform_in_p() -> None:
    rng = np.random.default_rng(5)
    p = [layout_of(rng.normal(size=(3, 6))).spreads["c1"].p for _ in range(1500)]
    assert stats.kstest(p, "uniform").pvalue > 0.001


def test_two_configurations_cannot_be_told_apart_by_their_spread() -> None:
    assert layout_of(np.random.default_rng(1).normal(size=(4, 2))).spreads == {}


@settings(max_examples=60, deadline=None)
@given(st.floats(0, 60), st.integers(1, 40), st.integers(1, 40))
def test_tails_are_scipy_s(f: float, upper: int, lower: int) -> None:
    assert f_above(f, upper, lower) == pytest.approx(stats.f.sf(f, upper, lower), abs=1e-7)
    assert t_two_sided(f, lower) == pytest.approx(2 * stats.t.sf(f, lower), abs=1e-7)
    assert t_quantile(0.95, lower) == pytest.approx(stats.t.ppf(0.975, lower), rel=1e-9)


# ---- Dunnett

DUNNETT_TOLERANCE = 2e-5

# Dunnett (1964), table II: two-sided 5% points for equal samples (correlation 1/2).
DUNNETT_1964 = {
    (2, 5): 3.03, (3, 5): 3.29, (9, 5): 3.97, (2, 10): 2.57, (4, 10): 2.89, (9, 10): 3.24,
    (2, 20): 2.38, (3, 20): 2.54, (5, 20): 2.73, (9, 20): 2.95,
}  # fmt: skip


@pytest.mark.parametrize(("k", "freedom"), DUNNETT_1964)
def test_dunnett_s_own_table(k: int, freedom: int) -> None:
    t = DUNNETT_1964[k, freedom]
    p = [largest_above(t + d, np.full(k, 0.5), freedom) for d in (-0.006, 0.006)]
    assert p[1] < 0.05 < p[0]


def test_one_contrast_is_student_s_t() -> None:
    for t in (0.0, 0.5, 2.0, 4.0):
        for freedom in (1, 2, 17):
            largest = largest_above(t, np.array([0.4]), freedom)
            assert largest == pytest.approx(t_two_sided(t, freedom), abs=DUNNETT_TOLERANCE)


def by_scipy(t: float, correlation: np.ndarray, freedom: int) -> float:
    k = len(correlation)
    law = stats.multivariate_t(shape=correlation, df=freedom, seed=1)
    return 1 - float(law.cdf(np.full(k, t), lower_limit=np.full(k, -t), maxpts=500_000))


@pytest.mark.parametrize("seed", range(8))
def test_any_shares_of_the_baseline_agree_with_scipy_s_multivariate_t(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shares = rng.uniform(0, 0.8, size=int(rng.integers(2, 9)))
    freedom, t = int(rng.integers(4, 30)), float(rng.uniform(1.5, 3.5))
    loadings = np.sqrt(shares)
    correlation = np.outer(loadings, loadings)
    np.fill_diagonal(correlation, 1.0)
    expected = by_scipy(t, correlation, freedom)
    assert largest_above(t, shares, freedom) == pytest.approx(expected, abs=DUNNETT_TOLERANCE)


@pytest.mark.parametrize("lost", range(1, 4))
def test_a_lost_block_changes_the_tail_by_less_than_two_percent(lost: int) -> None:
    """The correlation of contrasts on different blocks is less than the product of loadings."""
    has = np.ones((6, 3))
    has[:lost, 2] = 0
    weights = has / has.sum(axis=1)[:, None]
    plain = weights / math.sqrt(2)
    covariance = np.diag((weights**2).sum(axis=1)) + plain @ plain.T
    scale = np.sqrt(np.diag(covariance))
    exact = by_scipy(2.4, covariance / np.outer(scale, scale), 14)
    assert largest_above(2.4, np.full(6, 1 / 3), 14) == pytest.approx(exact, rel=0.02)


def test_the_command_agrees_with_scipy_s_dunnett_on_its_example() -> None:
    # Platelet counts of scipy's documentation (Dunnett 1955, table): control, drugs A and B.
    control = np.array([7.40, 8.50, 7.20, 8.24, 9.84, 8.32])
    drugs = [
        np.array([9.76, 8.80, 7.68, 9.36]),
        np.array([12.80, 9.68, 12.16, 9.20, 10.55]),
    ]
    theirs = stats.dunnett(*drugs, control=control, rng=np.random.default_rng(1)).pvalue
    groups = [control, *drugs]
    freedom = sum(map(len, groups)) - 3
    s2 = sum(float(((g - g.mean()) ** 2).sum()) for g in groups) / freedom
    shares = np.array([1 / len(control) / (1 / len(control) + 1 / len(g)) for g in drugs])
    for drug, p in zip(drugs, theirs, strict=True):
        t = (drug.mean() - control.mean()) / math.sqrt(s2 * (1 / len(drug) + 1 / len(control)))
        assert largest_above(t, shares, freedom) == pytest.approx(p, abs=1e-3)

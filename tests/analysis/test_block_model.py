"""The block model: contrasts, their errors, the test of equal spread, Dunnett's p-values."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.stats import multivariate_t
from scipy.stats import t as student

from connector_tax.analysis.block_model import Estimate, Launches, LaunchId, Spread
from connector_tax.analysis.multiplicity import dunnett_p

NAMES = ("plain", "plain_2", "a", "b", "c", "d", "e")
CONFIGURATION = {name: "plain" if name.startswith("plain") else name for name in NAMES}
BASE = ("plain", "plain_2")


def drawn(seed: int, blocks: int, noisy: str = "", factor: float = 1.0) -> dict[LaunchId, float]:
    rng = np.random.default_rng(seed)
    shift = rng.normal(size=blocks)
    return {
        LaunchId(name, block): shift[block] + rng.normal() * 0.05 * (factor if name == noisy else 1)
        for block in range(blocks)
        for name in NAMES
    }


def tax(values: dict[LaunchId, float], name: str) -> Estimate:
    estimate = Launches.of(values).contrast(name, BASE)
    assert estimate is not None
    return estimate


@given(st.integers(0, 2**32), st.integers(2, 6), st.floats(-1, 1), st.floats(-3, 3))
def test_block_shifts_cancel_and_a_shift_of_the_configuration_is_the_tax(
    seed: int, blocks: int, effect: float, shift: float
) -> None:
    values = drawn(seed, blocks)
    moved = {
        launch: v + (effect if launch.name == "a" else 0) + shift * launch.block**2
        for launch, v in values.items()
    }
    before, after = tax(values, "a"), tax(moved, "a")
    assert after.point - before.point == pytest.approx(effect, abs=1e-9)
    assert after.error == pytest.approx(before.error, rel=1e-6)


def test_the_error_of_a_balanced_layout_is_the_textbooks() -> None:
    values = {launch: v for launch, v in drawn(10, 4).items() if launch.name != "plain_2"}
    names = [name for name in NAMES if name != "plain_2"]
    table = np.array([[values[LaunchId(n, b)] for b in range(4)] for n in names])
    residual = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
    df = (len(names) - 1) * 3
    estimate = Launches.of(values).contrast("a", ("plain",))
    assert estimate is not None
    assert Launches.of(values).spreads["a"].larger is False
    assert estimate.df == df
    assert estimate.error == pytest.approx(np.sqrt(2 / 4 * (residual**2).sum() / df))
    assert estimate.half_width(0.95) == pytest.approx(student.ppf(0.975, df) * estimate.error)


@given(st.integers(0, 2**32), st.integers(1, 6), st.floats(0, 0.7))
def test_the_error_of_a_torn_layout_is_that_of_least_squares(
    seed: int, blocks: int, lost: float
) -> None:
    rng = np.random.default_rng(seed)
    values = {k: v for k, v in drawn(seed, blocks).items() if rng.random() >= lost}
    own = Launches.of(values)
    assume(values and not any(test.left_out for test in own.spreads.values()))
    columns = [f"block {k.block}" for k in values], [CONFIGURATION[k.name] for k in values]
    indicators = [[c == name for c in side] for side in columns for name in set(side)]
    design = np.array(indicators, float).reshape(len(indicators), len(values)).T
    y = np.array(list(values.values()))
    residual = y - design @ np.linalg.pinv(design) @ y
    variance, df = own.pooled
    assert df == len(values) - np.linalg.matrix_rank(design)
    assert variance == pytest.approx(residual @ residual / df if df else 0, rel=1e-6, abs=1e-20)


def test_two_thousand_blocks_are_fitted_launch_by_launch() -> None:
    # A dense design of them is half a gigabyte, and takes minutes to solve.
    blocks, names = 2000, ("plain", "plain_2", "a", "b")
    values = {launch: v for launch, v in drawn(11, blocks).items() if launch.name in names}
    estimate = tax(values, "a")
    assert estimate.df == 4 * blocks - blocks - 2
    assert estimate.error == pytest.approx(0.05 * np.sqrt(1.5 / blocks), rel=0.05)


def test_a_missing_launch_leaves_its_block_out_of_the_contrast_and_not_out_of_the_error() -> None:
    values = drawn(7, 3)
    del values[LaunchId("a", 1)]
    estimate = tax(values, "a")
    expected = np.mean(
        [
            values[LaunchId("a", b)]
            - (values[LaunchId("plain", b)] + values[LaunchId("plain_2", b)]) / 2
            for b in (0, 2)
        ]
    )
    assert estimate.blocks == (0, 2)
    assert estimate.point == pytest.approx(expected)
    assert estimate.df == 20 - 3 - 6 + 1


def test_a_lost_plain_launch_leaves_the_other_one_as_the_blocks_baseline() -> None:
    values = drawn(8, 3)
    del values[LaunchId("plain_2", 2)]
    estimate = tax(values, "b")
    last = values[LaunchId("b", 2)] - values[LaunchId("plain", 2)]
    launches = Launches.of(values)
    assert launches.weights("b", BASE, (2,)) @ launches.y == pytest.approx(last)
    assert estimate.blocks == (0, 1, 2)


def test_one_block_has_a_point_and_an_error_from_plains_launches_alone() -> None:
    estimate = tax(drawn(9, 1), "a")
    assert estimate.df == 1
    without = {launch: v for launch, v in drawn(9, 1).items() if launch.name != "plain_2"}
    assert tax(without, "a").error is None


def test_a_configuration_three_times_as_noisy_has_an_error_of_its_own() -> None:
    own, covered, others = [], [], []
    for seed in range(400):
        values = drawn(seed, 5, "a", 3.0)
        estimate, quiet = tax(values, "a"), tax(values, "b")
        own.append(estimate.spread is not None)
        covered.append(abs(estimate.point) <= (estimate.half_width(0.95) or 0))
        others.append(abs(quiet.point) <= (quiet.half_width(0.95) or 0))
    assert np.mean(own) > 0.8
    # 91% in a long simulation, 70% without the test of spread; two standard errors are 3 points.
    assert np.mean(covered) > 0.87
    assert 0.92 < np.mean(others) < 0.99


@given(st.integers(0, 2**32))
def test_the_aa_contrast_ignores_every_other_configuration_in_its_point(seed: int) -> None:
    values = drawn(seed, 3)
    aa = Launches.of(values).contrast("plain_2", ("plain",))
    assert aa is not None
    per_block = [values[LaunchId("plain_2", b)] - values[LaunchId("plain", b)] for b in range(3)]
    assert aa.point == pytest.approx(np.mean(per_block))


def test_equal_values_give_an_exact_zero() -> None:
    estimate = tax(dict.fromkeys(drawn(0, 3), 2.5), "a")
    assert (estimate.point, estimate.error, estimate.p) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize(("df", "rho", "number"), [(16, 1 / 3, 7), (16, 0.5, 7), (4, 0.5, 3)])
def test_dunnetts_p_is_that_of_the_multivariate_t(df: int, rho: float, number: int) -> None:
    shape = np.full((number, number), rho)
    np.fill_diagonal(shape, 1)
    sample = multivariate_t(shape=shape, df=df).rvs(200_000, random_state=3)
    largest = np.abs(sample).max(axis=1)
    for t in (1.0, 2.0, 3.0):
        family = [Estimate(t, 1.0, df, (0, 1, 2), rho)] * number
        # Three standard errors of the simulation.
        assert dunnett_p(family[0], family) == pytest.approx((largest > t).mean(), abs=3 * 0.0012)


def test_dunnett_of_one_contrast_is_its_own_p() -> None:
    single = Estimate(2.2, 1.0, 9, (0, 1, 2), 0.5)
    assert dunnett_p(single, [single]) == pytest.approx(single.p)


def test_an_error_of_its_own_is_adjusted_by_the_number_of_contrasts() -> None:
    pooled = [Estimate(t, 1.0, 16, (0, 1, 2), 1 / 3) for t in (0.5, 1.0, 4.0)]
    own = Estimate(5.0, 1.0, 2, (0, 1, 2), spread=Spread(9.0, 2, 9.0, 0.01))
    adjusted = [dunnett_p(estimate, [*pooled, own]) for estimate in (*pooled, own)]
    assert own.p is not None
    assert adjusted[3] == pytest.approx(1 - (1 - own.p) ** 4)
    assert all(dunnett_p(pooled[i], pooled) <= adjusted[i] for i in range(3))


def test_a_contrast_without_an_error_is_refused() -> None:
    without = Estimate(1.0, None, 0, (0,))
    with pytest.raises(ValueError, match="no p-value"):
        dunnett_p(without, [without])

"""Test the block model: contrasts, their errors, and planned numbers of blocks."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.stats import t as student

from connector_tax.analysis.block_model import (
    Launches,
    LaunchId,
    huber,
)
from connector_tax.analysis.effect import PLANNED, POWER, Effect, Levels, family_levels
from connector_tax.artifacts.tables import RAW
from tests.shared import known

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


def tax(values: dict[LaunchId, float], name: str) -> Effect:
    return known(Launches.of(values, RAW).contrast(name, BASE))


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


@given(st.integers(0, 2**32), st.integers(1, 6), st.floats(0, 0.7))
def test_residuals_with_missing_launches_equal_dense_least_squares(
    seed: int, blocks: int, lost: float
) -> None:
    rng = np.random.default_rng(seed)
    values = {k: v for k, v in drawn(seed, blocks).items() if rng.random() >= lost}
    own = Launches.of(values)
    assume(values)
    columns = [f"block {k.block}" for k in values], [CONFIGURATION[k.name] for k in values]
    indicators = [[c == name for c in side] for side in columns for name in set(side)]
    design = np.array(indicators, float).reshape(len(indicators), len(values)).T
    y = np.array(list(values.values()))
    residual = y - design @ np.linalg.pinv(design) @ y
    found, df = own.residual
    assert df == len(values) - np.linalg.matrix_rank(design)
    assert found == pytest.approx(residual, rel=1e-6, abs=1e-12)


def test_two_thousand_blocks_are_fitted_without_a_dense_design() -> None:
    # A dense design of these blocks takes half a gigabyte, and minutes to solve.
    blocks, names = 2000, ("plain", "plain_2", "a", "b")
    values = {launch: v for launch, v in drawn(11, blocks).items() if launch.name in names}
    estimate = tax(values, "a")
    assert estimate.df == pytest.approx(4 * blocks - blocks - 2, rel=1e-3)
    assert estimate.error == pytest.approx(0.05 * np.sqrt(1.5 / blocks), rel=0.05)


def test_block_with_a_missing_launch_counts_for_the_standard_error_but_not_the_contrast() -> None:
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
    assert Launches.of(values).residual[1] == 20 - 3 - 6 + 1


def test_lost_plain_launch_leaves_the_other_as_baseline_of_its_block() -> None:
    values = drawn(8, 3)
    del values[LaunchId("plain_2", 2)]
    estimate = tax(values, "b")
    last = values[LaunchId("b", 2)] - values[LaunchId("plain", 2)]
    launches = Launches.of(values)
    assert launches.weights("b", BASE, (2,)) @ launches.y == pytest.approx(last)
    assert estimate.blocks == (0, 1, 2)


@given(
    st.integers(0, 2**32),
    st.floats(-0.1, 0.1),
    st.floats(0.001, 0.5),
    st.floats(0.01, 0.1),
    st.sampled_from([1.0, 20.0]),
)
@settings(max_examples=20)
def test_blocks_needed_follow_from_the_whole_power_curve(
    seed: int, cost: float, spread: float, margin: float, noisier: float
) -> None:
    launches = drawn(seed, 3, noisy="a", factor=noisier)
    values = {launch: spread * v + cost * (launch.name == "a") for launch, v in launches.items()}
    effect, levels = tax(values, "a"), family_levels(0.95, 3)
    powers = {n: effect.with_blocks(n, levels).power(margin, levels) for n in PLANNED if n > 3}
    enough = [n for n, power in powers.items() if power >= POWER]
    assert effect.blocks_needed(margin, levels) == (enough[0] if enough else None)


def test_a_contrast_in_a_single_block_has_no_standard_error() -> None:
    assert tax(drawn(9, 1), "a").error is None
    values = {la: v for la, v in drawn(9, 3).items() if la.name != "a" or la.block == 1}
    assert (tax(values, "a").error, tax(values, "a").df) == (None, 0)
    assert tax(values, "b").error is not None


@given(st.integers(0, 2**32))
def test_aa_estimate_does_not_depend_on_other_configurations(seed: int) -> None:
    values = drawn(seed, 3)
    aa = known(Launches.of(values, RAW).contrast("plain_2", ("plain",)))
    per_block = [values[LaunchId("plain_2", b)] - values[LaunchId("plain", b)] for b in range(3)]
    assert aa.point == pytest.approx(np.mean(per_block))


def test_equal_values_give_an_exact_zero() -> None:
    estimate = tax(dict.fromkeys(drawn(0, 3), 2.5), "a")
    assert (estimate.point, estimate.error, estimate.p) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("point", "error", "margin"),
    [(0.05, 0.025, 0.03), (0.0, 0.02, 0.03), (0.01, 0.01, 0.03), (-0.08, 0.03, 0.03)],
)
def test_power_is_the_share_of_simulated_studies_with_a_verdict(
    point: float, error: float, margin: float
) -> None:
    df, studies = 12, 20_000
    planned = Effect(point, error, df, (0, 1, 2)).power(margin, Levels(0.95, 0.90))
    rng = np.random.default_rng(1)
    points = point + error * rng.normal(size=studies)
    errors = error * np.sqrt(rng.chisquare(df, studies) / df)
    wide, narrow = (student.ppf(q, df) * errors for q in (0.975, 0.95))
    away = np.abs(points) > wide
    within = (points - narrow > np.log1p(-margin)) & (points + narrow < np.log1p(margin))
    assert planned == pytest.approx((away | within).mean(), abs=0.05)


# ---- second opinions

FEW = (*BASE, "a", "b", "c")


def random_launches(
    rng: np.random.Generator, blocks: int, tax: float, bad: float = 0.0
) -> Launches:
    """Return launches with a spread of 2%; a share `bad` of them costs 30% more."""
    values = {}
    for block in range(blocks):
        level = rng.normal(0, 0.1)
        for name in FEW:
            y = level + rng.normal(0, 0.02) + (tax if name == "a" else 0)
            values[LaunchId(name, block)] = y + (0.3 if rng.random() < bad else 0)
    return Launches.of(values, RAW)


def test_without_noise_hubers_estimate_is_the_difference() -> None:
    exact = {LaunchId(n, b): b + (0.1 if n == "a" else 0) for n in FEW for b in range(4)}
    found = huber(Launches.of(exact), "a", BASE)
    assert found is None or (found.contrast, found.error) == pytest.approx((0.1, 0))


def test_huber_interval_covers_and_is_narrower_with_outlying_launches() -> None:
    rng = np.random.default_rng(5)
    covered, huber_width, least_width = 0, [], []
    for _ in range(300):
        study = random_launches(rng, 6, 0.05, bad=0.05)
        found, least = known(huber(study, "a", BASE)), known(study.contrast("a", BASE))
        lo, hi = known(found.interval(0.95))
        covered += lo <= 0.05 <= hi
        huber_width.append(hi - lo)
        least_width.append(2 * known(least.half_width(0.95)))
    assert 0.90 <= covered / 300 <= 0.99
    assert np.median(huber_width) < 0.8 * np.median(least_width)


def test_huber_estimate_equals_least_squares_without_outliers() -> None:
    study = random_launches(np.random.default_rng(2), 12, 0.05)
    found, least = known(huber(study, "a", BASE)), known(study.contrast("a", BASE))
    assert found.point == pytest.approx(least.point, abs=0.006)


def test_huber_estimate_is_none_without_a_common_block() -> None:
    apart = {LaunchId(n, b): float(b) for b, names in enumerate([BASE, ("a", "b")] * 2)
             for n in names}  # fmt: skip
    assert huber(Launches.of(apart), "a", BASE) is None

"""Means over launches: their intervals hold the truth as often as they say."""

from collections.abc import Mapping
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t as student

from connector_tax.analysis.block_model import OWN_LAUNCHES, LaunchId, levels
from connector_tax.seeds import named_generator

NAMES = "abcdefg"


def drawn(
    rng: np.random.Generator, truth: Mapping[str, float], blocks: int, shared: float, own: float
) -> dict[LaunchId, float]:
    """Launches around each configuration's truth: a factor of the block and one of the launch."""
    factors = np.exp(rng.normal(0, shared, blocks))
    return {
        LaunchId(name, block): truth[name] * factors[block] * np.exp(rng.normal(0, own))
        for name, block in product(truth, range(blocks))
    }


@pytest.mark.parametrize(("shared", "own"), [(0.0, 0.2), (0.15, 0.15), (0.2, 0.0), (0.2, 0.05)])
@pytest.mark.parametrize("blocks", [3, 5])
def test_intervals_hold_the_truth_as_often_as_they_say(
    shared: float, own: float, blocks: int
) -> None:
    truth = {name: 10.0 ** (i - 2) for i, name in enumerate(NAMES)}
    hits = []
    for study in range(200):
        rng = named_generator(f"levels/{shared}/{own}/{blocks}/{study}")
        estimates = levels(drawn(rng, truth, blocks, shared, own), 0.95)
        hits += [level.lo <= truth[name] <= level.hi for name, level in estimates.items()
                 if level.lo is not None and level.hi is not None]  # fmt: skip
    assert len(hits) == 200 * len(truth)
    assert 0.93 <= np.mean(hits) <= 0.985


def test_one_configuration_alone_has_student_s_interval() -> None:
    values = {LaunchId("a", block): value for block, value in enumerate((10.0, 12.0, 14.0))}
    level = levels(values, 0.95)["a"]
    half = float(student.ppf(0.975, 2)) * 2 / 12 / np.sqrt(3)
    assert (level.lo, level.hi) == pytest.approx((12 * np.exp(-half), 12 * np.exp(half)))
    assert (level.point, level.method, level.n_launches) == (12.0, OWN_LAUNCHES, 3)


def test_a_single_block_and_zeros_have_a_mean_and_no_interval() -> None:
    one = levels({LaunchId("a", 0): 3.0, LaunchId("b", 0): 4.0}, 0.95)
    assert one["a"][:4] == (3.0, None, None, None)
    zeros = {LaunchId("a", block): 0.0 for block in range(3)}
    others = {LaunchId("b", block): 1.0 + block for block in range(3)}
    estimates = levels(zeros | others, 0.95)
    assert estimates["a"][:4] == (0.0, None, None, None)
    assert estimates["b"].lo is not None


@given(
    st.dictionaries(
        st.tuples(st.sampled_from("abc"), st.integers(0, 3)), st.floats(0.1, 1e3), min_size=2
    ),
    st.floats(1e-3, 1e3),
)
def test_the_unit_of_the_values_does_not_matter(
    given_values: dict[tuple[str, int], float], scale: float
) -> None:
    values = {LaunchId(*launch): value for launch, value in given_values.items()}
    estimates = levels(values, 0.95)
    scaled = levels({launch: scale * value for launch, value in values.items()}, 0.95)
    for name, level in estimates.items():
        assert scaled[name].point == pytest.approx(scale * level.point)
        if level.lo is not None and level.hi is not None:
            assert level.lo <= level.point * (1 + 1e-12)
            assert level.point <= level.hi * (1 + 1e-12)
            assert scaled[name].lo == pytest.approx(scale * level.lo, rel=1e-6)

"""Huber's estimate and the randomisation test beside the block model's."""

import numpy as np
import pytest

from connector_tax.analysis.block_model import Launches, LaunchId
from connector_tax.analysis.robust import huber, randomisation_p

PLAINS = ("plain", "plain_2")
NAMES = (*PLAINS, "a", "b", "c")


def launches(rng: np.random.Generator, blocks: int, tax: float, bad: float = 0.0) -> Launches:
    """Launches with a spread of 2%; a share of `bad` ones is 30% dearer."""
    values = {}
    for block in range(blocks):
        level = rng.normal(0, 0.1)
        for name in NAMES:
            y = level + rng.normal(0, 0.02) + (tax if name == "a" else 0)
            values[LaunchId(name, block)] = y + (0.3 if rng.random() < bad else 0)
    return Launches.of(values)


def test_without_noise_both_are_the_difference() -> None:
    exact = {LaunchId(n, b): b + (0.1 if n == "a" else 0) for n in NAMES for b in range(4)}
    found = huber(Launches.of(exact), "a", PLAINS, 0.95)
    assert found is None or found == pytest.approx((0.1, 0.1, 0.1))
    assert randomisation_p(Launches.of(exact), "a", PLAINS, range(4)) == pytest.approx(3**-4)


def test_hubers_interval_covers_and_is_narrower_where_launches_are_bad() -> None:
    rng = np.random.default_rng(5)
    covered, huber_width, least_width = 0, [], []
    for _ in range(300):
        study = launches(rng, 6, 0.05, bad=0.05)
        found, least = huber(study, "a", PLAINS, 0.95), study.contrast("a", PLAINS)
        assert found is not None
        assert least is not None
        covered += found[1] <= 0.05 <= found[2]
        huber_width.append(found[2] - found[1])
        least_width.append(2 * (least.half_width(0.95) or 0))
    assert 0.90 <= covered / 300 <= 0.99
    assert np.median(huber_width) < 0.8 * np.median(least_width)


def test_hubers_estimate_is_least_squares_where_nothing_stands_out() -> None:
    study = launches(np.random.default_rng(2), 12, 0.05)
    found, least = huber(study, "a", PLAINS, 0.95), study.contrast("a", PLAINS)
    assert found is not None
    assert least is not None
    assert found[0] == pytest.approx(least.point, abs=0.006)


@pytest.mark.parametrize("blocks", [3, 4])
def test_randomisation_finds_nothing_in_equal_servers_more_often_than_it_says(blocks: int) -> None:
    rng = np.random.default_rng(7)
    ps = [
        randomisation_p(launches(rng, blocks, 0.0), "a", PLAINS, range(blocks)) for _ in range(400)
    ]
    assert min(ps) >= 1 / 3**blocks
    assert np.mean(np.array(ps) <= 0.05) <= 0.08
    assert np.mean(np.array(ps) <= 0.5) == pytest.approx(0.5, abs=0.08)


def test_many_blocks_are_drawn() -> None:
    study = launches(np.random.default_rng(1), 20, 0.1)
    assert randomisation_p(study, "a", PLAINS, range(20)) <= 1e-4
    assert randomisation_p(study, "b", PLAINS, range(20)) > 0.01


def test_a_configuration_that_shares_no_block_has_none() -> None:
    apart = {LaunchId(n, b): float(b) for b, names in enumerate([PLAINS, ("a", "b")] * 2)
             for n in names}  # fmt: skip
    assert huber(Launches.of(apart), "a", PLAINS, 0.95) is None

"""Test the check that a cell has warmed up."""

import numpy as np
import pytest

from connector_tax.analysis.rows import BATCH, mser, warming_up


def noise(seed: int, n: int = 200) -> np.ndarray:
    """Return stationary TPOT-like values with a standard deviation of 10%."""
    return 8 * np.exp(0.1 * np.random.default_rng(seed).normal(size=n))


def test_stationary_cells_are_rarely_flagged() -> None:
    flagged = sum(warming_up(noise(seed), 0.03) is True for seed in range(1000))
    assert flagged <= 15


@pytest.mark.parametrize(("settled_after", "at_least"), [(0.2, 85), (0.4, 99), (0.8, 99)])
def test_a_cell_still_warming_up_is_flagged(settled_after: float, at_least: int) -> None:
    flagged = 0
    for seed in range(100):
        ramp = np.clip(1 - np.arange(200) / (200 * settled_after), 0, None)
        flagged += warming_up(noise(seed) * (1 + 0.6 * ramp), 0.03) is True
    assert flagged >= at_least


def test_mser_finds_the_end_of_a_step() -> None:
    values = noise(1)
    values[:40] *= 3
    batches = values.reshape(-1, BATCH).mean(axis=1)
    assert 40 // BATCH <= mser(batches) <= 40 // BATCH + 1


def test_stationarity_is_undecided_below_80_requests() -> None:
    assert warming_up(noise(1, 79), 0.03) is None


def test_stationarity_is_undecided_for_values_that_settle_at_zero() -> None:
    values = np.where(np.arange(200) < 90, 5.0, 0.0)
    assert warming_up(values, 0.03) is None

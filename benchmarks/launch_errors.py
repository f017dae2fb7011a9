"""Launch errors for simulated studies, in units of a quiet launch's standard deviation.

A generator returns errors (blocks, launches) for a study whose launches are the columns; the first
two are the baseline's. `place` has each launch's position in its block, from 0.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Errors = Callable[[np.random.Generator, Floats], Any]
BASELINES = 2


def alike(rng: np.random.Generator, place: Floats) -> Any:
    """Draw normal errors."""
    return rng.normal(0, 1, place.shape)


def heavy_tails(rng: np.random.Generator, place: Floats) -> Any:
    """Draw from Student's t with three degrees of freedom, of variance 1."""
    return rng.standard_t(3, place.shape) / np.sqrt(3)


def drift(rng: np.random.Generator, place: Floats) -> Any:
    """Draw errors with a linear drift over each block; the drift's standard deviation is 2.5."""
    slope = rng.normal(0, 2.5, (len(place), 1))
    return alike(rng, place) + slope * place / (place.shape[1] - 1)


def bursts(rng: np.random.Generator, place: Floats) -> Any:
    """Draw errors; in about half of the blocks, two successive launches are slower by 5."""
    first = rng.integers(place.shape[1] - 1, size=(len(place), 1))
    struck = (rng.random((len(place), 1)) < 0.5) & (place >= first) & (place <= first + 1)
    return alike(rng, place) + 5 * struck


def regime(rng: np.random.Generator, place: Floats) -> Any:
    """Draw errors; in about half of the blocks, all launches after a random one are slower by 3."""
    first = rng.integers(place.shape[1], size=(len(place), 1))
    return alike(rng, place) + 3 * ((rng.random((len(place), 1)) < 0.5) & (place >= first))


def autocorrelated(rng: np.random.Generator, place: Floats) -> Any:
    """Draw an autoregressive process (0.6 between launches) of variance 1."""
    values = rng.normal(0, 1, place.size)
    for at in range(1, len(values)):
        values[at] = 0.6 * values[at - 1] + 0.8 * values[at]
    return np.take_along_axis(values.reshape(place.shape), place.astype(int), axis=1)


def slow_launches(rng: np.random.Generator, place: Floats) -> Any:
    """Draw errors; one launch in twenty is slower by 8."""
    return alike(rng, place) + 8 * (rng.random(place.shape) < 0.05)


def block_by_configuration(sd: float = 1.5) -> Errors:
    """Return errors with a value per configuration and block, shared by baseline launches."""

    def errors(rng: np.random.Generator, place: Floats) -> Any:
        offsets = rng.normal(0, sd, place.shape)
        offsets[:, :BASELINES] = offsets[:, :1]
        return alike(rng, place) + offsets

    return errors


def noisier(columns: Sequence[int], ratio: float) -> Errors:
    """Return errors that are `ratio` times as large in these columns."""

    def errors(rng: np.random.Generator, place: Floats) -> Any:
        values = alike(rng, place)
        values[:, list(columns)] *= ratio
        return values

    return errors


ANY_CONFIGURATION: Mapping[str, Errors] = {
    "alike": alike,
    "heavy tails": heavy_tails,
    "drift": drift,
    "bursts": bursts,
    "regime": regime,
    "autocorrelated": autocorrelated,
    "block x configuration": block_by_configuration(),
    "1 launch in 20 slower": slow_launches,
}

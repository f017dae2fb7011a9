"""The block model: estimate contrasts of configurations and their standard errors.

y = block + configuration + error, one value for each server launch. A block holds every
configuration once and the baseline one or more times. So differences between blocks, such as their
devices, cancel in a contrast within blocks, and all launches together estimate how much two
launches of one configuration differ.

Huber's estimate is computed beside least squares as a robustness check. A single bad launch in
twenty can cost least squares two thirds of a study's power; Huber's estimate bounds its influence.

Sources: docs/method.md, "The error model"; Montgomery, "Design and Analysis of Experiments",
chapter 4 (randomised complete blocks); Huber, Annals of Mathematical Statistics 35 (1964) 73;
standard errors: Huber & Ronchetti, Robust Statistics, 2nd ed., eq. 7.81.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from connector_tax.analysis.effect import Effect, Levels, family_levels
from connector_tax.analysis.noise import Mixture, Noise, Spread
from connector_tax.artifacts.names import configuration_of
from connector_tax.artifacts.tables import LOG

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

# Constants of Huber's estimate: the normal distribution's quartile, and the bound on errors that
# gives 95% of least squares' efficiency for normal errors.
QUARTILE, TUNING = 0.6745, 1.345
ROUNDS, SETTLED = 200, 1e-10
MIXTURE, OWN_DIFFERENCES = "mixture", "block differences"


class LaunchId(NamedTuple):
    """The identity of a server launch: its name in the run order (`plain_2`), and its block."""

    name: str
    block: int


@dataclass(frozen=True)
class Launches:
    """The values of one quantity in one cell of a phase, one entry per launch.

    Attributes:
        y: the values (for example the log of a percentile).
        scale: LOG if `y` holds logs, else RAW.
        borrow: whether the spread of one configuration may be estimated from the others; this needs
            two configurations besides the baseline.
    """

    name: NDArray[np.str_]
    block: NDArray[np.int64]
    y: Floats
    scale: str = LOG
    borrow: bool = True

    @classmethod
    def of(
        cls, values: Mapping[LaunchId, float], scale: str = LOG, borrow: bool = True
    ) -> "Launches":
        """Return the launches of a mapping from launch to value."""
        names = np.array([launch.name for launch in values], dtype=str)
        blocks = np.array([launch.block for launch in values], np.int64)
        return cls(names, blocks, np.array(list(values.values()), float), scale, borrow)

    def __len__(self) -> int:
        return len(self.y)

    @property
    def ids(self) -> list[LaunchId]:
        """Return the identifiers of these launches."""
        return [LaunchId(str(n), int(b)) for n, b in zip(self.name, self.block, strict=True)]

    def only(self, kept: Bools) -> "Launches":
        """Return the launches selected by the mask `kept`."""
        return Launches(self.name[kept], self.block[kept], self.y[kept], self.scale, self.borrow)

    @cached_property
    def config(self) -> NDArray[np.str_]:
        """Return the configuration of each launch."""
        return np.array([configuration_of(str(name)) for name in self.name], dtype=str)

    def only_rounding(self, residual: Floats) -> bool:
        """Return whether residuals are mere rounding errors: about 1e-16 of each value."""
        nothing = len(residual) * (1e-13 * float(np.abs(self.y).max(initial=1.0))) ** 2
        return float(residual @ residual) <= nothing

    @cached_property
    def numbers(self) -> NDArray[np.int64]:
        """Return each launch's configuration as an index into the sorted configuration names."""
        return np.unique(self.config, return_inverse=True)[1]

    @cached_property
    def mixture(self) -> Mixture | None:
        """Return the mixture of error models, each with its set of noisier configurations.

        None where the error comes from block differences, or the residuals are mere rounding.
        """
        residual, df = self.residual
        if self.own_blocks or not df or self.only_rounding(residual):
            return None
        return Mixture.of(self.numbers, np.unique(self.block, return_inverse=True)[1], residual)

    def blocks(self, config: str, base: Sequence[str]) -> tuple[int, ...]:
        """Return the blocks with a launch of `config` and another launch of `base`."""
        is_base = self.is_base(config, base)
        shared = set(self.block[self.name == config].tolist()) & set(self.block[is_base].tolist())
        return tuple(sorted(shared))

    def is_base(self, config: str, base: Sequence[str]) -> Bools:
        """Return a mask of the launches that are named in `base`, without `config`."""
        return np.isin(self.name, [name for name in base if name != config])

    def weights(self, config: str, base: Sequence[str], blocks: Sequence[int]) -> Floats:
        """Return the weights of a contrast: the mean over blocks of `config` minus mean `base`."""
        is_base, weights = self.is_base(config, base), np.zeros(len(self))
        for block in blocks:
            here = self.block == block
            weights[here & (self.name == config)] = 1 / len(blocks)
            weights[here & is_base] = -1 / len(blocks) / (here & is_base).sum()
        return weights

    def value(self, weights: Floats) -> float:
        """Return the weighted sum of the values; a contrast of equal values is exactly zero."""
        return float(weights @ (self.y - self.y[0]))

    def levels(self, weights: Floats) -> tuple[float, float]:
        """Return the two means that a contrast compares: of the base, and of the configuration."""
        return float(-np.minimum(weights, 0) @ self.y), float(np.maximum(weights, 0) @ self.y)

    def contrast(
        self,
        config: str,
        base: Sequence[str],
        confidence: float = 0.95,
        levels: Levels | None = None,
    ) -> Effect | None:
        """Return the effect of `config` against `base`; None without a block that has both.

        Args:
            config: name of the launches.
            base: names of the launches to compare with.
            confidence: confidence of the displayed interval.
            levels: confidence levels of the verdict. With None, a single comparison is judged.
        """
        blocks = self.blocks(config, base)
        weights = self.weights(config, base, blocks)
        return self.effect(weights, blocks, confidence, levels, config) if blocks else None

    def repeats(self, blocks: Sequence[int]) -> bool:
        """Return whether a contrast over these blocks has a standard error."""
        return len(blocks) > 1 and (self.own_blocks or self.residual[1] > 0)

    @cached_property
    def own_blocks(self) -> bool:
        """Return whether a contrast's error uses only its own differences between blocks."""
        return not self.borrow or len(set(self.config)) < 3

    def effect(
        self,
        weights: Floats,
        blocks: tuple[int, ...],
        confidence: float = 0.95,
        levels: Levels | None = None,
        config: str | None = None,
    ) -> Effect:
        """Return the effect: the weighted sum of the launches' values, and its standard error.

        Args:
            weights: weights of the launches; they add up to 0 in each block.
            blocks: the blocks that the contrast uses.
            confidence: confidence of the displayed interval.
            levels: confidence levels of the verdict. With None, a single comparison is judged.
            config: the configuration of the contrast; None for several.
        """
        point = self.value(weights)
        if not self.repeats(blocks):
            return Effect(point, None, 0, blocks, self.scale, confidence=confidence)
        separate = self.own_spread(weights, blocks)
        if self.own_blocks:
            return Effect(
                point,
                separate.error,
                separate.df,
                blocks,
                self.scale,
                OWN_DIFFERENCES,
                confidence,
                1,
            )
        if self.mixture is None or not weights.any():
            df = self.residual[1]
            return Effect(point, 0.0, df, blocks, self.scale, MIXTURE, confidence)
        squares = np.bincount(self.numbers, weights**2).astype(float)
        number = None if config is None else int(self.numbers[self.name == config][0])
        noise = Noise(self.mixture, squares, len(blocks), separate, number)
        levels = levels or family_levels(confidence, 1)
        spread = noise.spread(levels.one_sided)
        return Effect(
            point, spread.error, spread.df, blocks, self.scale, MIXTURE, confidence,
            noise=noise, own_spread=noise.suspect,
        )  # fmt: skip

    def own_spread(self, weights: Floats, blocks: tuple[int, ...]) -> Spread:
        """Return a contrast's standard error from the differences between its blocks."""
        each = [float((weights * self.y)[self.block == block].sum()) for block in blocks]
        differences = len(blocks) * np.array(each)
        deviations = differences - differences.mean()
        variance = (
            0.0
            if self.only_rounding(deviations)
            else float(deviations @ deviations) / (len(blocks) - 1)
        )
        return Spread(float(np.sqrt(variance / len(blocks))), len(blocks) - 1)

    @cached_property
    def residual(self) -> tuple[Floats, int]:
        """Return the least-squares residuals of the model, and their degrees of freedom.

        Block effects are removed by subtracting block means from all columns (Frisch & Waugh,
        Econometrica 1 (1933) 387). With a column for each block, work would grow with the cube of
        their number.
        """
        if not len(self):
            return self.y, 0
        y, config, block = self.y, self.config, np.unique(self.block, return_inverse=True)[1]
        # The mean is subtracted so that equal values give an exact zero.
        columns = np.column_stack([y - y.mean(), config[:, None] == np.unique(config)]).astype(
            float
        )
        means = np.zeros((block.max() + 1, columns.shape[1]))
        np.add.at(means, block, columns)
        columns -= (means / np.bincount(block)[:, None])[block]
        beta, _, rank, _ = np.linalg.lstsq(columns[:, 1:], columns[:, 0], rcond=1e-9)
        return columns[:, 0] - columns[:, 1:] @ beta, len(y) - len(means) - int(rank)


def huber(launches: Launches, config: str, base: Sequence[str]) -> Effect | None:
    """Return Huber's estimate of `config` against `base`; None without residuals."""
    others = [name for name in base if name != config]
    names, blocks = np.unique(launches.name), np.unique(launches.block)
    columns = np.column_stack(
        [launches.block[:, None] == blocks, launches.name[:, None] == names[1:]]
    ).astype(float)
    rank = int(np.linalg.matrix_rank(columns))
    df = len(launches) - rank
    weights = np.concatenate([np.zeros(len(blocks)), (names == config).astype(float)])
    weights[len(blocks) :][np.isin(names, others)] = -1 / len(set(names) & set(others))
    contrast = np.delete(weights, len(blocks))
    inverse = np.linalg.pinv(columns.T @ columns)
    # Without shared blocks the difference is undetermined.
    if df < 1 or not np.allclose(contrast @ inverse @ columns.T @ columns, contrast):
        return None
    y = launches.y - launches.y.mean()
    beta, scale, residual = _fitted(columns, y, df)
    if scale == 0:
        return None
    inner = np.abs(residual) <= TUNING * scale
    bounded = np.clip(residual, -TUNING * scale, TUNING * scale)
    share = inner.mean()
    if share == 0:
        return None
    correction = 1 + rank / len(y) * (1 - share) / share
    variance = correction**2 * float(bounded @ bounded) / df / share**2
    error = float(np.sqrt(variance * (contrast @ inverse @ contrast)))
    return Effect(float(contrast @ beta), error, df, launches.blocks(config, base), launches.scale)


def _fitted(columns: Floats, y: Floats, df: int) -> tuple[Floats, float, Floats]:
    """Return coefficients, scale and residuals of an iteratively reweighted least-squares fit.

    Residuals spread less than the errors, by the root of `df` over their number.
    """
    unit = QUARTILE * float(np.sqrt(df / len(y)))
    weight = np.ones(len(y))
    beta: Floats = np.zeros(columns.shape[1])
    for _ in range(ROUNDS):
        root = np.sqrt(weight)
        solved = np.linalg.lstsq(columns * root[:, None], y * root, rcond=None)[0]
        new = np.asarray(solved, np.float64)
        residual = y - columns @ new
        scale = float(np.median(np.abs(residual))) / unit
        settled = np.abs(columns @ (new - beta)).max() <= SETTLED * max(scale, 1e-12)
        beta = new
        if settled or scale == 0:
            break
        weight = np.minimum(1, TUNING * scale / np.maximum(np.abs(residual), 1e-300))
    return beta, scale, residual

"""The block model: what a contrast of configurations is, and how well the launches know it.

y = block + configuration + error, one value for each server launch. A block holds every
configuration once and the baseline one or more times, so what changes from block to block, its
device too, cancels in a contrast within blocks, and all launches together say how much two launches
of one kind differ.

Sources: docs/method.md, "The error model"; Montgomery, "Design and Analysis of Experiments",
chapter 4 (randomised complete blocks).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import f as fisher
from scipy.stats import t as student

from connector_tax.artifacts.names import configuration_of

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

POOLED = "block model"
OWN = "own spread"
# Levels of the test of equal spread, one test for each configuration. Below the first, the launches
# of a configuration have their own variance in a contrast; below the second, they do not enter the
# pooled one. Simulated with seven configurations and two launches of plain in a block, these keep
# 95% intervals at 94 to 96% with equal spreads, normal or heavy-tailed, and at 95 to 96% for the
# others where one configuration is three times as noisy; that one has 86% with three blocks and 92%
# with five (70% without a test). A first level of 0.25 gives it 91%, and takes half of the power.
OWN_ERROR_LEVEL = 0.05
LEFT_OUT_LEVEL = 0.01


class LaunchId(NamedTuple):
    """One server launch: its name in the run order (`plain_2`), and its block."""

    name: str
    block: int


class Spread(NamedTuple):
    """One configuration's variance between blocks against that of all others.

    Attributes:
        variance: of its launches about the block effects of the others, and `df` behind it.
        f_ratio: `variance` over the others'.
        p: of the ratio under equal spreads, one-sided.
    """

    variance: float
    df: int
    f_ratio: float
    p: float

    @property
    def larger(self) -> bool:
        """Whether its launches have their own variance in a contrast."""
        return self.p < OWN_ERROR_LEVEL

    @property
    def left_out(self) -> bool:
        """Whether its launches are left out of the pooled error."""
        return self.p < LEFT_OUT_LEVEL


@dataclass(frozen=True)
class Estimate:
    """A contrast with its standard error.

    Attributes:
        point: the contrast, in the unit of the values.
        error: its standard error; None where nothing repeats.
        df: degrees of freedom behind the error, Satterthwaite's where it is made of several
            variances; 0 without one.
        blocks: the blocks it is formed in.
        correlation: with the other contrasts of the same baseline (Dunnett); 0 where the error is
            the configuration's own.
        spread: the test that lets the contrast be judged by its own spread; None if pooled.
    """

    point: float
    error: float | None
    df: float
    blocks: tuple[int, ...]
    correlation: float = 0.0
    spread: Spread | None = None

    @property
    def method(self) -> str:
        """Whose spread the error is of, and the degrees of freedom."""
        if self.spread is None:
            return f"{POOLED} (df {self.df})"
        spread = f"spread F {self.spread.f_ratio:.1f}, p {self.spread.p:.3f}"
        return f"{OWN} (df {self.df:.1f}; {spread})"

    @property
    def t(self) -> float | None:
        """The contrast over its standard error; None without an error."""
        if self.error is None:
            return None
        if self.error == 0:
            return 0.0 if self.point == 0 else float(np.copysign(np.inf, self.point))
        return self.point / self.error

    @property
    def p(self) -> float | None:
        """Two-sided p-value of "the contrast is zero"; None without an error."""
        return None if self.t is None else float(2 * student.sf(abs(self.t), self.df))

    def half_width(self, confidence: float) -> float | None:
        """Half the width of the interval of the given confidence; None without an error."""
        if self.error is None:
            return None
        return float(student.ppf((1 + confidence) / 2, self.df)) * self.error

    def with_blocks(self, added_df: int, blocks: int) -> "Estimate":
        """As it would be in a study of so many blocks, each of which adds `added_df`."""
        assert self.error is not None
        present = len(self.blocks)
        df = self.df + added_df * (blocks - present)
        if self.spread is not None:
            df = self.df * (blocks - 1) / (present - 1)
        return replace(self, error=self.error * float(np.sqrt(present / blocks)), df=df)


@dataclass(frozen=True)
class Launches:
    """One quantity of one phase and cell, an entry for each launch that has it.

    Attributes:
        y: the quantity (the log of a percentile, say).
        replicates: (launches, resamples) of y within the launch; None: not resampled.
        n: requests behind each.
    """

    name: NDArray[np.str_]
    block: NDArray[np.int64]
    y: Floats
    replicates: Floats | None = None
    n: NDArray[np.int64] | None = None

    @classmethod
    def of(cls, values: Mapping[LaunchId, float]) -> "Launches":
        """The launches of a mapping."""
        names = np.array([launch.name for launch in values], dtype=str)
        blocks = np.array([launch.block for launch in values], np.int64)
        return cls(names, blocks, np.array(list(values.values()), float))

    def __len__(self) -> int:
        return len(self.y)

    @property
    def ids(self) -> list[LaunchId]:
        """Which launches these are."""
        return [LaunchId(str(n), int(b)) for n, b in zip(self.name, self.block, strict=True)]

    def only(self, kept: Bools) -> "Launches":
        """Those that are `kept`."""
        columns: dict[str, Any] = {
            name: value if value is None else value[kept]
            for name, value in vars(self).items()
            if name in self.__dataclass_fields__
        }
        return Launches(**columns)

    @cached_property
    def config(self) -> NDArray[np.str_]:
        """The configuration of each."""
        return np.array([configuration_of(str(name)) for name in self.name], dtype=str)

    @cached_property
    def spreads(self) -> dict[str, Spread]:
        """The test of equal spread of every configuration that has residual degrees of freedom."""
        everyone, found = np.ones(len(self), bool), {}
        squares, df = self._squares(everyone)
        for config in np.unique(self.config):
            rest_squares, rest_df = self._squares(self.config != config)
            if df - rest_df < 1 or rest_df < 1:
                continue
            rest = rest_squares / rest_df
            extra = max(0.0, squares - rest_squares) / (df - rest_df)
            ratio = float(extra / rest if rest else np.inf if extra else 0.0)
            p = float(fisher.sf(ratio, df - rest_df, rest_df))
            found[str(config)] = Spread(extra, df - rest_df, ratio, p)
        return found

    @cached_property
    def kept(self) -> Bools:
        """Which of the launches are behind the pooled error."""
        left_out = [name for name, test in self.spreads.items() if test.left_out]
        return ~np.isin(self.config, left_out)

    @cached_property
    def pooled(self) -> tuple[float, int]:
        """Residual variance and its degrees of freedom; (0.0, 0) without any."""
        squares, df = self._squares(self.kept)
        return (squares / df if df else 0.0), df

    @property
    def added_df(self) -> int:
        """Degrees of freedom that one more block would bring."""
        return len(set(self.name[self.kept])) - 1

    def blocks(self, ours: str, base: Sequence[str]) -> tuple[int, ...]:
        """The blocks that have the launch `ours` and another one of `base`."""
        is_base = np.isin(self.name, [name for name in base if name != ours])
        shared = set(self.block[self.name == ours].tolist()) & set(self.block[is_base].tolist())
        return tuple(sorted(shared))

    def weights(self, ours: str, base: Sequence[str], blocks: Sequence[int]) -> Floats:
        """Of each launch in `ours` minus the mean of the block's other launches of `base`.

        The mean of that over the blocks.
        """
        is_base = np.isin(self.name, [name for name in base if name != ours])
        weights = np.zeros(len(self))
        for block in blocks:
            here = self.block == block
            weights[here & (self.name == ours)] = 1 / len(blocks)
            weights[here & is_base] = -1 / len(blocks) / (here & is_base).sum()
        return weights

    def value(self, weights: Floats) -> float:
        """The weighted sum of the launches; of equal values an exact zero, weights adding to it."""
        return float(weights @ (self.y - self.y[0]))

    def contrast(self, ours: str, base: Sequence[str]) -> Estimate | None:
        """The launches `ours` against those of `base`; None without a block that has both."""
        blocks = self.blocks(ours, base)
        return self.estimate(self.weights(ours, base, blocks), [ours], blocks) if blocks else None

    def estimate(self, weights: Floats, ours: Sequence[str], blocks: tuple[int, ...]) -> Estimate:
        """The weighted sum of the launches, of which `ours` are compared with the others.

        The error is the pooled one of the block model; the launches of a configuration whose spread
        is larger than that of the others have its variance instead, with Satterthwaite's degrees
        of freedom for the sum.
        """
        point, (variance, df) = self.value(weights), self.pooled
        if df == 0:
            return Estimate(point, None, 0, blocks)
        used = set(self.config[weights != 0].tolist())
        larger = {name: test for name, test in self.spreads.items() if name in used and test.larger}
        total = float((weights**2).sum())
        if not larger:
            own = float((weights[np.isin(self.name, ours)] ** 2).sum())
            error = float(np.sqrt(variance * total))
            return Estimate(point, error, df, blocks, 1 - own / total if total else 0.0)
        squares = {name: float((weights[self.config == name] ** 2).sum()) for name in larger}
        parts = [(squares[name] * test.variance, test.df) for name, test in larger.items()]
        parts.append((variance * (total - sum(squares.values())), df))
        whole = sum(part for part, _ in parts)
        freedom = whole**2 / sum(part**2 / of for part, of in parts)
        clearest = min(larger.values(), key=lambda test: test.p)
        return Estimate(point, float(np.sqrt(whole)), freedom, blocks, 0.0, clearest)

    def _squares(self, kept: Bools) -> tuple[float, int]:
        """Residual sum of squares of the model by least squares, and its degrees of freedom.

        Residuals of a fit with blocks are those of columns less their means in each block (Frisch &
        Waugh, Econometrica 1 (1933) 387); with a column for each block, work would grow with the
        cube of their number.
        """
        if not kept.any():
            return 0.0, 0
        y, config = self.y[kept], self.config[kept]
        block = np.unique(self.block[kept], return_inverse=True)[1]
        # Taken from their mean, so that equal values leave an exact zero.
        columns = np.column_stack([y - y.mean(), config[:, None] == np.unique(config)]).astype(
            float
        )
        means = np.zeros((block.max() + 1, columns.shape[1]))
        np.add.at(means, block, columns)
        columns -= (means / np.bincount(block)[:, None])[block]
        basis, sizes, _ = np.linalg.svd(columns[:, 1:], full_matrices=False)
        basis = basis[:, sizes > 1e-9 * sizes.max()]
        residual = columns[:, 0] - basis @ (basis.T @ columns[:, 0])
        squares, df = float(residual @ residual), len(y) - len(means) - basis.shape[1]
        # Rounding leaves about 1e-16 of each value.
        nothing = len(y) * (1e-13 * max(1.0, float(np.abs(y).max()))) ** 2
        return (0.0 if squares <= nothing else squares), df


def known_launches(values: Iterable[tuple[LaunchId, float | None]]) -> dict[LaunchId, float]:
    """Those that have a value."""
    return {launch: value for launch, value in values if value is not None}

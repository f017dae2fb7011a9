"""The block model: what a contrast of configurations is, and how well the launches know it.

log p = block + configuration + error, one value for each server launch. A block holds every
configuration once and the baseline one or more times, so what changes from block to block cancels
in a contrast within blocks, and all launches together say how much two launches of one kind differ.

Sources: docs/method.md, "The error model"; Montgomery, "Design and Analysis of Experiments",
chapter 4 (randomised complete blocks).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import f as fisher
from scipy.stats import t as student

Floats = NDArray[np.float64]

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


class Term(NamedTuple):
    """`weight` times (mean of launch `ours` minus mean of launches `base`), within blocks."""

    weight: float
    ours: str
    base: tuple[str, ...]


class Spread(NamedTuple):
    """One configuration's variance between blocks against that of all others.

    Attributes:
        configuration: whose.
        variance: of its launches about the block effects of the others, and `df` behind it.
        f_ratio: `variance` over the others'.
        p: of the ratio under equal spreads, one-sided.
    """

    configuration: str
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
        method: POOLED, or OWN where a configuration has a variance of its own.
        blocks: the blocks it is formed in.
        correlation: with the other contrasts of the same baseline (Dunnett); 0 where the error is
            the configuration's own.
        spread: the test that lets the contrast be judged by its own spread; None if pooled.
        devices: how many the error is made of; 0: of launches (`device_model.over_devices`).
    """

    point: float
    error: float | None
    df: float
    method: str
    blocks: tuple[int, ...]
    correlation: float
    spread: Spread | None = None
    devices: int = 0

    @property
    def source(self) -> str:
        """Whose spread the error is of: `method`, and how many devices it is made of."""
        return f"{self.method} over {self.devices} devices" if self.devices else self.method

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
        if self.method == OWN or self.devices:
            units = self.devices or present
            df = self.df * (units * blocks / present - 1) / (units - 1)
        return replace(self, error=self.error * float(np.sqrt(present / blocks)), df=df)


class Layout:
    """One quantity over the launches of a phase, and the contrasts that can be formed from it.

    Args:
        values: the quantity of each valid launch (the log of a percentile, say).
        configuration_of: the configuration each launch name is started with; all launches of one
            configuration in a block are replicates of each other.
        device_of: the device of each block, where there are several: a configuration then has an
            effect of its own on each of them. None: one device.
    """

    def __init__(
        self,
        values: Mapping[LaunchId, float],
        configuration_of: Mapping[str, str],
        device_of: Mapping[int, str] | None = None,
    ) -> None:
        self._values = values
        self._configuration_of = configuration_of
        self.device_of = device_of or {}

    @cached_property
    def spreads(self) -> dict[str, Spread]:
        """The test of equal spread of every configuration that has residual degrees of freedom."""
        configurations = sorted({self._configuration_of[launch.name] for launch in self._values})
        tests = (self._spread(configuration) for configuration in configurations)
        return {test.configuration: test for test in tests if test is not None}

    @cached_property
    def pooled(self) -> tuple[float, int]:
        """Residual variance of the layout and its degrees of freedom; (0.0, 0) without any."""
        left_out = {name for name, test in self.spreads.items() if test.left_out}
        kept = [la for la in self._values if self._configuration_of[la.name] not in left_out]
        squares, df = self._squares(kept)
        return (squares / df if df else 0.0), df

    @cached_property
    def pooled_launches(self) -> frozenset[str]:
        """The launch names of a block whose launches are behind the pooled error."""
        left_out = {name for name, test in self.spreads.items() if test.left_out}
        names = {launch.name for launch in self._values}
        return frozenset(n for n in names if self._configuration_of[n] not in left_out)

    @cached_property
    def devices(self) -> list[str]:
        """The devices that its launches ran on; empty where there is one."""
        blocks = sorted({launch.block for launch in self._values}) if self.device_of else []
        return list(dict.fromkeys(self.device_of[block] for block in blocks))

    @property
    def names(self) -> list[str]:
        """The launch names that it has."""
        return sorted(self._blocks_by_name)

    def is_aa(self, term: Term) -> bool:
        """Whether the contrast is one of launches of one configuration."""
        ours = self._configuration_of[term.ours]
        return any(self._configuration_of.get(name) == ours for name in term.base)

    def blocks(self, terms: Iterable[Term], device: str | None = None) -> tuple[int, ...]:
        """The blocks, of one device if it is named, in which every term has both its sides."""
        named = self._blocks_by_name
        shared = self._blocks_on.get(device, set())
        for term in terms:
            based = [named[name] for name in term.base if name in named]
            ours = named.get(term.ours, set())
            shared = {b for b in shared & ours if any(b in blocks for blocks in based)}
        return tuple(sorted(shared))

    def estimate(self, terms: Sequence[Term], device: str | None = None) -> Estimate | None:
        """The sum of the terms' contrasts, on one device if it is named; None without a block.

        The error is the pooled one of the block model; the launches of a configuration whose spread
        is larger than that of the others have its variance instead, with Satterthwaite's degrees
        of freedom for the sum.
        """
        blocks = self.blocks(terms, device)
        if not blocks:
            return None
        weights = self._launch_weights(terms, blocks)
        point = float(sum(weight * self._values[launch] for launch, weight in weights.items()))
        variance, df = self.pooled
        if df == 0:
            return Estimate(point, None, 0, POOLED, blocks, 0.0)
        squares: dict[str, float] = {}
        for launch, weight in weights.items():
            name = self._configuration_of[launch.name]
            squares[name] = squares.get(name, 0.0) + weight**2
        larger = [self.spreads[n] for n in squares if n in self.spreads and self.spreads[n].larger]
        if not larger:
            error = float(np.sqrt(variance * sum(squares.values())))
            return Estimate(point, error, df, POOLED, blocks, _correlation(terms, weights))
        parts = [(squares.pop(test.configuration) * test.variance, test.df) for test in larger]
        parts.append((variance * sum(squares.values()), df))
        total = sum(part for part, _ in parts)
        freedom = total**2 / sum(part**2 / df for part, df in parts)
        clearest = min(larger, key=lambda test: test.p)
        return Estimate(point, float(np.sqrt(total)), freedom, OWN, blocks, 0.0, clearest)

    def per_block(self, terms: Sequence[Term], blocks: Sequence[int]) -> Floats:
        """(blocks,) the sum of the terms' contrasts in each block."""
        return np.array(
            [
                sum(w * self._values[launch] for launch, w in self._block_weights(terms, b).items())
                for b in blocks
            ]
        )

    def launch_weights(self, terms: Sequence[Term]) -> dict[LaunchId, float]:
        """The weight of each launch in `estimate`'s point: its linear form."""
        return self._launch_weights(terms, self.blocks(terms))

    def _launch_weights(
        self, terms: Sequence[Term], blocks: Sequence[int]
    ) -> dict[LaunchId, float]:
        weights: dict[LaunchId, float] = {}
        for block in blocks:
            for launch, weight in self._block_weights(terms, block).items():
                weights[launch] = weights.get(launch, 0.0) + weight / len(blocks)
        return weights

    def _block_weights(self, terms: Sequence[Term], block: int) -> dict[LaunchId, float]:
        weights: dict[LaunchId, float] = {}
        for weight, ours, base in terms:
            present = [name for name in base if LaunchId(name, block) in self._values]
            shares = [(ours, weight), *((name, -weight / len(present)) for name in present)]
            for name, share in shares:
                launch = LaunchId(name, block)
                weights[launch] = weights.get(launch, 0.0) + share
        return weights

    @cached_property
    def _blocks_on(self) -> dict[str | None, set[int]]:
        """The blocks of each device; None: all."""
        on: dict[str | None, set[int]] = {None: {launch.block for launch in self._values}}
        for block in on[None]:
            on.setdefault(self.device_of.get(block), set()).add(block)
        return on

    @cached_property
    def _blocks_by_name(self) -> dict[str, set[int]]:
        by_name: dict[str, set[int]] = {}
        for launch in self._values:
            by_name.setdefault(launch.name, set()).add(launch.block)
        return by_name

    def _spread(self, configuration: str) -> Spread | None:
        """F test of one configuration's residuals about the others' block effects."""
        others = [la for la in self._values if self._configuration_of[la.name] != configuration]
        all_squares, all_df = self._squares(list(self._values))
        rest_squares, rest_df = self._squares(others)
        own_df = all_df - rest_df
        if own_df < 1 or rest_df < 1:
            return None
        rest = rest_squares / rest_df
        extra = max(0.0, all_squares - rest_squares) / own_df
        ratio = extra / rest if rest else np.inf if extra else 0.0
        p = float(fisher.sf(ratio, own_df, rest_df))
        return Spread(configuration, extra, own_df, float(ratio), p)

    def _squares(self, launches: Sequence[LaunchId]) -> tuple[float, int]:
        """Residual sum of squares of the layout by least squares, and its df, over all devices.

        A fit for each device, all at once: a table each, with rows of zeros below the shorter ones.
        """
        if not launches:
            return 0.0, 0
        columns, blocks = self._within_blocks(launches)
        device = _numbered([self.device_of.get(launch.block, "") for launch in launches])
        order, counts = np.argsort(device, kind="stable"), np.bincount(device)
        row = np.arange(len(launches)) - np.repeat(np.cumsum(counts) - counts, counts)
        tables = np.zeros((len(counts), counts.max(), columns.shape[1]))
        tables[device[order], row] = columns[order]
        values, design = tables[:, :, :1], tables[:, :, 1:]
        basis, sizes, _ = np.linalg.svd(design, full_matrices=False)
        spanned = sizes > 1e-9 * sizes.max(axis=1, keepdims=True)
        basis *= spanned[:, None, :]
        residual = values - basis @ (basis.mT @ values)
        df = len(launches) - blocks - int(spanned.sum())
        squares = float((residual**2).sum())
        largest = max(1.0, *(abs(self._values[launch]) for launch in launches))
        # Rounding leaves about 1e-16 of each value.
        return (0.0 if squares <= len(launches) * (1e-13 * largest) ** 2 else squares), df

    def _within_blocks(self, launches: Sequence[LaunchId]) -> tuple[Floats, int]:
        """Columns of values and of configurations, less their means in each block; and the blocks.

        Residuals are those of a fit with blocks (Frisch & Waugh, Econometrica 1 (1933) 387), whose
        work would grow with the cube of their number.
        """
        block = _numbered([launch.block for launch in launches])
        name = _numbered([self._configuration_of[launch.name] for launch in launches])
        values = np.array([self._values[launch] for launch in launches])
        # Taken from their mean, so that equal values leave an exact zero.
        columns = np.column_stack([values - values.mean(), np.eye(name.max() + 1)[name]])
        means = np.zeros((block.max() + 1, columns.shape[1]))
        np.add.at(means, block, columns)
        means /= np.bincount(block)[:, None]
        return columns - means[block], len(means)


def _numbered(labels: Sequence[int] | Sequence[str]) -> NDArray[np.intp]:
    """Each label's number among the different ones."""
    return np.unique(labels, return_inverse=True)[1]


def _correlation(terms: Sequence[Term], weights: Mapping[LaunchId, float]) -> float:
    """Share of the contrast's variance that its baseline brings: Dunnett's correlation."""
    ours = {term.ours for term in terms}
    own = sum(weight**2 for launch, weight in weights.items() if launch.name in ours)
    total = sum(weight**2 for weight in weights.values())
    return 1 - own / total if total else 0.0

"""The block model of launches a second time: intra-block analysis of an incomplete layout.

y = block + configuration + error (docs/method.md, "The error model"). Blocks are projected out by
centring; what is left are the reduced normal equations of the configurations, C tau = Q, solved by
eigenvectors of C (Bose 1939; Yates 1940). Nothing is shared with connector_tax.analysis.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from connector_tax.artifacts.names import configuration_of
from connector_tax.provenance.distributions import Floats, f_above, t_quantile, t_two_sided

Values = Mapping[tuple[str, int], float]  # (launch, block) to a number

UNEQUAL_P = 0.01
OWN_P = 0.05


@dataclass(frozen=True)
class SpreadTest:
    """A configuration's own variance with its df; over that of the others: F and its upper tail."""

    variance: float
    df: int
    f: float
    p: float


class LaunchLayout:
    """One number for each launch, by block and configuration.

    Args:
        blocks: block of each launch.
        configs: configuration of each launch; all launches of the baseline have its id.
        values: shape (launches,).
        devices: device of each launch; on each a configuration has an effect of its own.
    """

    def __init__(
        self,
        blocks: Sequence[int],
        configs: Sequence[str],
        values: Floats,
        devices: Sequence[str] = (),
    ) -> None:
        self.blocks = np.asarray(blocks)
        self.configs = np.asarray(configs)
        self.values = np.asarray(values, dtype=float)
        self.devices = np.asarray(devices or [""] * len(self.values))

    def residual(self, without: Sequence[str] = ()) -> tuple[float, int]:
        """Residual sum of squares and degrees of freedom, some configurations left out."""
        kept = ~np.isin(self.configs, list(without))
        devices = dict.fromkeys(self.devices[kept].tolist())
        parts = [self._residual(kept & (self.devices == device)) for device in devices]
        return sum((rss for rss, _ in parts), 0.0), sum(df for _, df in parts)

    def _residual(self, kept: NDArray[np.bool_]) -> tuple[float, int]:
        """The same of the launches of one device."""
        names, config = np.unique(self.configs[kept], return_inverse=True)
        numbers, block = np.unique(self.blocks[kept], return_inverse=True)
        y = self.values[kept]
        indicators = np.eye(len(names))[config]
        for number in range(len(numbers)):
            mine = block == number
            y = np.where(mine, y - y[mine].mean(), y)
            indicators[mine] -= indicators[mine].mean(axis=0)
        roots, vectors = np.linalg.eigh(indicators.T @ indicators)
        solvable = roots > 1e-9 * len(y)
        basis = vectors[:, solvable]
        effects = basis @ ((basis.T @ (indicators.T @ y)) / roots[solvable])
        rest = y - indicators @ effects
        return float(rest @ rest), len(y) - len(numbers) - int(solvable.sum())

    @cached_property
    def spreads(self) -> dict[str, SpreadTest]:
        """The test of equal spread of every configuration that can be tested."""
        spreads: dict[str, SpreadTest] = {}
        rss, df = self.residual()
        for name in dict.fromkeys(self.configs.tolist()):
            others, left = self.residual([name])
            if left == 0 or df == left:
                continue
            ours = max(0.0, rss - others) / (df - left)
            # Rounding alone is left of an exactly additive layout.
            base = others / left
            f = ours / base if base > 0 else (math.inf if ours > 0 else 0.0)
            spreads[name] = SpreadTest(ours, df - left, f, f_above(f, df - left, left))
        return spreads

    @cached_property
    def unequal(self) -> tuple[str, ...]:
        """Configurations whose spread is not that of the others."""
        return tuple(name for name, spread in self.spreads.items() if spread.p < UNEQUAL_P)

    @cached_property
    def pooled(self) -> tuple[float, int]:
        """s squared and its degrees of freedom, without configurations of another spread."""
        rss, df = self.residual(self.unequal)
        return (rss / df if df else math.nan), df

    def error(self, squares: Mapping[str, float]) -> "Error":
        """The error of a contrast.

        Args:
            squares: configuration to the sum of the squared weights of its launches.
        """
        s2, df = self.pooled
        odd = {
            n: self.spreads[n] for n in squares if n in self.spreads and self.spreads[n].p < OWN_P
        }
        if not odd:
            return Error(s2 * sum(squares.values()), df, None, self.unequal)
        parts = [(squares[name] * spread.variance, spread.df) for name, spread in odd.items()]
        parts.append((s2 * sum(w for name, w in squares.items() if name not in odd), df))
        variance = sum(v for v, _ in parts)
        freedom = variance**2 / sum(v**2 / d for v, d in parts)
        clearest = min(odd.values(), key=lambda spread: spread.p)
        return Error(variance, freedom, clearest, self.unequal)


@dataclass(frozen=True)
class Error:
    """Variance of a contrast and its degrees of freedom.

    `spread` is the clearest sign of an unequal one among its configurations; None: all pooled.
    `unequal` are those left out of the pooled variance; `devices` is how many the error is made of,
    0 where it is of launches.
    """

    variance: float
    df: float
    spread: SpreadTest | None
    unequal: tuple[str, ...] = ()
    devices: int = 0

    @property
    def name(self) -> str:
        """As the tables call it."""
        over = f" over {self.devices} devices" if self.devices else ""
        return ("block model" if self.spread is None else "own spread") + over

    def half_width(self, confidence: float) -> float:
        """Of the contrast's interval."""
        return t_quantile(confidence, self.df) * math.sqrt(self.variance)

    def p(self, point: float) -> float:
        """The two-sided p-value of the contrast."""
        if self.variance > 0:
            return t_two_sided(point / math.sqrt(self.variance), self.df)
        return float(point == 0)


@dataclass(frozen=True)
class IntervalEstimate:
    """A number with the ends of its interval, its p-value and method; None: nothing repeats."""

    point: float
    low: float | None
    high: float | None
    p: float | None
    method: str | None
    launches: int


def layout_of(values: Values, devices: Mapping[int, str] | None = None) -> LaunchLayout:
    """The layout of launches by their names; `devices`: of each block, where there are several."""
    configs = [configuration_of(launch) for launch, _ in values]
    blocks = [block for _, block in values]
    on = [devices[block] for block in blocks] if devices else ()
    return LaunchLayout(blocks, configs, np.array(list(values.values())), on)


def squared_weights(
    weights: Mapping[str, float], plains: Sequence[int], baseline: str
) -> dict[str, float]:
    """The squared weights of the launches of each configuration, summed.

    Of the contrast that is, as a mean over blocks, the weighted launches minus the baseline's mean.

    Args:
        weights: launch name to its weight in a block.
        plains: how many launches of the baseline each block has.
    """
    whole, count = sum(weights.values()), len(plains)
    squares = {baseline: sum((whole / count) ** 2 / launches for launches in plains)}
    for name, weight in weights.items():
        config = configuration_of(name)
        squares[config] = squares.get(config, 0.0) + weight**2 / count
    return squares


def plain_values(values: Values, ours: str, baseline: str) -> dict[int, list[float]]:
    """Those of the other baseline launches, in each block that has one and the launch `ours`."""
    blocks: dict[int, list[float]] = {}
    for (launch, block), value in values.items():
        if configuration_of(launch) == baseline and launch != ours and (ours, block) in values:
            blocks.setdefault(block, []).append(value)
    return blocks

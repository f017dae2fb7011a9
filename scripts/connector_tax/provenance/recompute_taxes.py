"""Taxes, their intervals and verdicts, a second time (docs/method.md).

Plain numpy over `layout` and `distributions`; nothing is shared with connector_tax.analysis. The
error of a tax comes from the block model of all launches of its cell; the within-launch bootstrap
is a floor below which no interval can be.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from connector_tax.artifacts.names import PLAIN, configuration_of
from connector_tax.provenance.distributions import (
    Floats,
    largest_above,
    t_quantile,
    t_two_sided,
)
from connector_tax.provenance.layout import Layout
from connector_tax.provenance.recompute import Row

VERDICT_BLOCKS = 3
MOST_BLOCKS = 100
NO_VERDICT = "point estimate, no verdict"
MARKED = "no verdict (marked)"

Sample = tuple[float, Floats, int]
Where = tuple[str, str, str]  # launch name, phase, cell
Key = tuple[str, int, str, str]  # launch name, block, phase, cell
Term = tuple[float, Where]


@dataclass(frozen=True)
class Effect:
    """A tax or a linear combination of taxes; a tax's numbers are logarithms until `as_tax`.

    `behind` are the launch names of a block that the pooled error is made of.
    """

    point: float
    lo: float | None
    hi: float | None
    method: str
    p: float | None
    df: float | None
    n_blocks: int
    own_error: bool = False
    variance: float = math.nan
    p_model: float = math.nan
    p_bootstrap: float = math.nan
    behind: frozenset[str] = frozenset()
    mark: str = ""

    @property
    def low(self) -> float:
        """The lower bound, minus infinity if unknown."""
        return -math.inf if self.lo is None else self.lo

    @property
    def high(self) -> float:
        """The upper bound, infinity if unknown."""
        return math.inf if self.hi is None else self.hi

    def as_tax(self) -> "Effect":
        """The same, back from logarithms."""
        lo, hi = (None if end is None else math.expm1(end) for end in (self.lo, self.hi))
        return replace(self, point=math.expm1(self.point), lo=lo, hi=hi)

    def numbers(self) -> Row:
        """As hypotheses.json has an effect."""
        names = ("point", "lo", "hi", "method", "n_blocks", "mark")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class _Contrast:
    """A weighted sum of configurations against plain in one layout."""

    layout: Layout
    weights: Mapping[str, float]
    baselines: Mapping[int, tuple[int, ...]]
    lines: Mapping[tuple[str, int], int]

    @property
    def blocks(self) -> list[int]:
        return list(self.baselines)

    def per_block(self, values: Floats) -> Floats:
        """The contrast of each block; `values` has the launches along its first axis."""
        whole = sum(self.weights.values())
        return np.array(
            [
                sum(w * values[self.lines[name, block]] for name, w in self.weights.items())
                - whole * values[list(plains)].mean(axis=0)
                for block, plains in self.baselines.items()
            ]
        )

    @property
    def squared_weights(self) -> dict[str, float]:
        """Sum over a configuration's launches of their squared weights in the mean over blocks."""
        whole, count = sum(self.weights.values()), len(self.blocks)
        squares = {PLAIN: sum((whole / count) ** 2 / len(p) for p in self.baselines.values())}
        for name, weight in self.weights.items():
            config = configuration_of(name)
            squares[config] = squares.get(config, 0.0) + weight**2 / count
        return squares


class Taxes:
    """Every effect that can be formed from the samples of the valid cells.

    Args:
        samples: (log percentile, its resampled logs, sample size) by launch and cell, then metric.
        loads: (saturated, dropped arrivals) of every valid cell.
        statistics: the `statistics` section of the configuration.
        blocks: number of blocks.
    """

    def __init__(
        self,
        samples: Mapping[Key, Mapping[str, Sample]],
        loads: Mapping[Key, tuple[bool, int]],
        statistics: Mapping[str, Any],
        blocks: int,
    ) -> None:
        self.samples = samples
        self.loads = loads
        self.statistics = statistics
        self.all_blocks = range(blocks)

    @property
    def confidence(self) -> float:
        """Of every interval, 0.95 as a rule."""
        return float(self.statistics["confidence"])

    def has(self, name: str, block: int, phase: str, cells: Sequence[str], metric: str) -> bool:
        """Whether a launch has the metric in all the cells."""
        return all(metric in self.samples.get((name, block, phase, c), {}) for c in cells)

    def plains(
        self, against: Sequence[str], block: int, phase: str, cells: Sequence[str], metric: str
    ) -> list[str]:
        """The launches of plain that configurations are compared with in a block."""
        names = dict.fromkeys(k[0] for k in self.samples if configuration_of(k[0]) == PLAIN)
        return [
            name
            for name in names
            if name not in against and self.has(name, block, phase, cells, metric)
        ]

    def tax(self, where: Where, metric: str) -> Effect | None:
        """The tax of a launch name in a cell; None without a block that has it."""
        found = self._effect([(1.0, where)], metric, self.confidence, as_log=True)
        return None if found is None else replace(found.as_tax(), mark=self.mark(where, metric))

    def combination(
        self, terms: Sequence[Term], metric: str, confidence: float | None = None
    ) -> Effect | None:
        """A weighted sum of taxes: of configurations in one cell, or of one over several cells."""
        found = self._effect(terms, metric, confidence or self.confidence, as_log=False)
        if found is None:
            return None
        marks = [part for _, where in terms for part in self.mark(where, metric).split("; ")]
        return replace(found, mark="; ".join(filter(None, dict.fromkeys(marks))))

    def mark(self, where: Where, metric: str) -> str:
        """Saturation and dropped arrivals of the cells that entered a tax."""
        name, phase, cell = where
        ours, plain = [], []
        for block in self.shared_blocks([name], phase, [cell], metric):
            ours.append(self.loads[name, block, phase, cell])
            plains = self.plains([name], block, phase, [cell], metric)
            plain += [self.loads[other, block, phase, cell] for other in plains]
        sides = {name: ours, PLAIN: plain}
        if configuration_of(name) == PLAIN:
            sides = {PLAIN: ours + plain}
        told = []
        for side, loads in sides.items():
            if any(saturated for saturated, _ in loads):
                told.append(f"{side} saturated")
            if lost := sum(dropped for _, dropped in loads):
                told.append(f"{side} dropped {lost} arrivals")
        return "; ".join(told)

    def shared_blocks(
        self, names: Sequence[str], phase: str, cells: Sequence[str], metric: str
    ) -> list[int]:
        """The blocks in which the launches and a launch of plain have the metric in the cells."""
        return [
            block
            for block in self.all_blocks
            if all(self.has(name, block, phase, cells, metric) for name in names)
            and self.plains(names, block, phase, cells, metric)
        ]

    def log_ratio(
        self, where: Where, metric: str, blocks: Sequence[int], cells: Sequence[str]
    ) -> tuple[float, Floats]:
        """Mean over blocks of log(p_X / p_plain), and its resamples, launches held fixed."""
        name, phase, cell = where
        points, resamples = [], []
        for block in blocks:
            ours = self.samples[name, block, phase, cell][metric]
            plains = [
                self.samples[plain, block, phase, cell][metric]
                for plain in self.plains([name], block, phase, cells, metric)
            ]
            points.append(ours[0] - float(np.mean([p[0] for p in plains])))
            resamples.append(ours[1] - np.mean([p[1] for p in plains], axis=0))
        return float(np.mean(points)), np.asarray(np.mean(resamples, axis=0))

    def _effect(
        self, terms: Sequence[Term], metric: str, confidence: float, *, as_log: bool
    ) -> Effect | None:
        phase = terms[0][1][1]
        names = list(dict.fromkeys(where[0] for _, where in terms))
        cells = list(dict.fromkeys(where[2] for _, where in terms))
        if len(names) > 1 and len(cells) > 1:
            raise ValueError("several configurations over several cells have no common layout")
        blocks = self.shared_blocks(names, phase, cells, metric)
        if not blocks:
            return None
        ratios = [self.log_ratio(where, metric, blocks, cells) for _, where in terms]
        if as_log:
            (point, replicates), slopes = ratios[0], [1.0]
        else:
            point = sum(w * math.expm1(d) for (w, _), (d, _) in zip(terms, ratios, strict=True))
            replicates = sum(
                (w * np.expm1(r) for (w, _), (_, r) in zip(terms, ratios, strict=True)),
                np.zeros(1),
            )
            slopes = [w * math.exp(d) for (w, _), (d, _) in zip(terms, ratios, strict=True)]
        if len(blocks) == 1:
            return Effect(point, None, None, "one launch; launches not included", None, None, 1)
        of_cell = dict.fromkeys(cells, 1.0)
        weights = dict.fromkeys(names, 1.0)
        for slope, (_, (name, _, cell)) in zip(slopes, terms, strict=True):
            if len(cells) > 1:
                of_cell[cell] = slope
            else:
                weights[name] = slope
        contrast = self._contrast(weights, phase, of_cell, metric, blocks)
        by_model = _by_model(contrast, point, confidence)
        return _wider(by_model, replicates, confidence)

    def _contrast(
        self,
        weights: Mapping[str, float],
        phase: str,
        of_cell: Mapping[str, float],
        metric: str,
        blocks: Sequence[int],
    ) -> _Contrast:
        """The layout of z = sum over cells of v y, over every launch that has all the cells."""
        launches = [
            (name, block)
            for name, block in dict.fromkeys((k[0], k[1]) for k in self.samples if k[2] == phase)
            if self.has(name, block, phase, list(of_cell), metric)
        ]
        values = np.array(
            [
                sum(v * self.samples[name, b, phase, c][metric][0] for c, v in of_cell.items())
                for name, b in launches
            ]
        )
        layout = Layout(
            [b for _, b in launches], [configuration_of(n) for n, _ in launches], values
        )
        lines = {launch: line for line, launch in enumerate(launches)}
        baselines = {
            block: tuple(
                lines[plain, block]
                for plain in self.plains(list(weights), block, phase, list(of_cell), metric)
            )
            for block in blocks
        }
        return _Contrast(layout, weights, baselines, lines)

    def layout(self, phase: str, cell: str, metric: str) -> Layout:
        """All valid launches of a cell."""
        return self._contrast({}, phase, {cell: 1.0}, metric, []).layout


def _by_model(contrast: _Contrast, point: float, confidence: float) -> Effect:
    """The interval of the block model's error."""
    layout, count = contrast.layout, len(contrast.blocks)
    error = layout.error(contrast.squared_weights)
    shown = str(error.df)
    if error.spread is not None:
        shown = f"{error.df:.1f}; spread F {error.spread.f:.1f}, p {error.spread.p:.3f}"
    half = t_quantile(confidence, error.df) * math.sqrt(error.variance)
    own = error.spread is not None
    method = f"{error.name} (df {shown})"
    found = _interval(point, error.variance, error.df, half, method, count, own_error=own)
    behind = {name for name, _ in contrast.lines if configuration_of(name) not in layout.unequal}
    return replace(found, behind=frozenset(behind))


def _interval(
    point: float,
    variance: float,
    df: float,
    half: float,
    method: str,
    count: int,
    *,
    own_error: bool,
) -> Effect:
    p = 1.0 if point == 0 else 0.0
    if variance > 0:
        p = t_two_sided(point / math.sqrt(variance), df)
    low, high = point - half, point + half
    return Effect(point, low, high, method, p, df, count, own_error, variance, p_model=p)


def _wider(found: Effect, replicates: Floats, confidence: float) -> Effect:
    """The wider of two intervals and the larger of their p-values."""
    tail = (1 - confidence) / 2
    lo, hi = float(np.quantile(replicates, tail)), float(np.quantile(replicates, 1 - tail))
    fewer = min(int((replicates <= 0).sum()), int((replicates >= 0).sum()))
    by_resampling = min(1.0, 2 * (fewer + 1) / (len(replicates) + 1))
    p = max(found.p_model, by_resampling)
    if hi - lo <= found.high - found.low:
        return replace(found, p=p, p_bootstrap=by_resampling)
    method = "within-launch bootstrap"
    return replace(found, lo=lo, hi=hi, method=method, p=p, p_bootstrap=by_resampling)


# ---- verdicts


@dataclass(frozen=True)
class Compared:
    """A tax among those of its cell and metric, and the blocks it is made of."""

    config: str
    effect: Effect
    plains: Mapping[int, int]  # block -> launches of plain

    @property
    def baseline_share(self) -> float:
        """The part of the variance of the tax that plain's launches have."""
        plain = sum(1 / launches for launches in self.plains.values()) / len(self.plains)
        return plain / (1 + plain)


def adjusted(family: Sequence[Compared]) -> list[float]:
    """The p-values of one cell and metric, adjusted for their number.

    Dunnett's among the contrasts with the pooled error; those with an error of their own count as
    independent of these and of each other, as the within-launch bootstrap's p-values do.
    """
    pooled = [member for member in family if not member.effect.own_error]
    shares = tuple(member.baseline_share for member in pooled)
    found = []
    for member in family:
        effect = member.effect
        by_model = sidak(effect.p_model, len(family))
        if not effect.own_error and effect.df is not None:
            among = _dunnett(effect.p_model, shares, effect.df)
            by_model = 1 - (1 - among) * (1 - effect.p_model) ** (len(family) - len(pooled))
        found.append(max(by_model, sidak(effect.p_bootstrap, len(family))))
    return found


def sidak(p: float, count: int) -> float:
    """The smallest of `count` independent p-values, adjusted."""
    return 1.0 if p >= 1 else -math.expm1(count * math.log1p(-p))


@lru_cache(maxsize=65536)
def _dunnett(p: float, shares: tuple[float, ...], df: float) -> float:
    return (
        p if p <= 0 or p >= 1 else largest_above(t_quantile(1 - p, df), np.array(shares), round(df))
    )


def verdict(tax: Effect, p_adjusted: float | None, margin: float, confidence: float) -> str:
    """What the study says of a tax that carries no mark."""
    if tax.n_blocks < VERDICT_BLOCKS or p_adjusted is None:
        return NO_VERDICT
    if -margin < tax.low and tax.high < margin:
        return "NO TAX"
    proven = p_adjusted < 1 - confidence and tax.low > 0
    return "TAX" if proven else "INCONCLUSIVE"

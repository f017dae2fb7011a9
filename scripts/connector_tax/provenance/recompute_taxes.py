"""Taxes, their intervals and verdicts, a second time (docs/method.md).

Plain numpy over `layout` and `distributions`; nothing is shared with connector_tax.analysis. The
error of a tax comes from the block model of all launches of its cell; the within-launch bootstrap
is a floor below which no interval can be.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from connector_tax.artifacts.names import (
    DEVICES_DIFFER,
    INCONCLUSIVE,
    NO_TAX,
    POINT_ESTIMATE,
    TAX,
    configuration_of,
)
from connector_tax.artifacts.study_records import StatisticsSection
from connector_tax.provenance.device_spread import error_of, same_p
from connector_tax.provenance.distributions import Floats, largest_above, t_quantile
from connector_tax.provenance.layout import Error, Values, layout_of, squared_weights
from connector_tax.provenance.recompute import Row

VERDICT_BLOCKS = 3
MOST_BLOCKS = 100
NOTHING_REPEATS = "one launch; launches not included"

Sample = tuple[float, Floats, int]
Where = tuple[str, str, str]  # launch name, phase, cell
Key = tuple[str, int, str, str]  # launch name, block, phase, cell
Term = tuple[float, Where]


@dataclass(frozen=True)
class TaxEstimate:
    """A tax or a linear combination of taxes; a tax's numbers are logarithms until `as_tax`.

    `behind` are the launch names of a block that the pooled error is made of; `devices` how many
    the error is made of, 0 where it is of launches; they may `differ` in the tax.
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
    devices: int = 0
    differ: bool = False

    @property
    def low(self) -> float:
        """The lower bound, minus infinity if unknown."""
        return -math.inf if self.lo is None else self.lo

    @property
    def high(self) -> float:
        """The upper bound, infinity if unknown."""
        return math.inf if self.hi is None else self.hi

    @property
    def undecided(self) -> bool:
        """Whether nothing can be concluded from it."""
        return self.n_blocks < VERDICT_BLOCKS or bool(self.mark) or self.differ

    def as_tax(self) -> "TaxEstimate":
        """The same, back from logarithms."""
        lo, hi = (None if end is None else math.expm1(end) for end in (self.lo, self.hi))
        return replace(self, point=math.expm1(self.point), lo=lo, hi=hi)

    def numbers(self) -> Row:
        """As hypotheses.json has an effect."""
        names = ("point", "lo", "hi", "method", "n_blocks", "mark")
        return {name: getattr(self, name) for name in names}


class Taxes:
    """Every effect that can be formed from the samples of the valid cells.

    Args:
        samples: (log percentile, its resampled logs, sample size) by launch and cell, then metric.
        loads: (saturated, dropped arrivals) of every valid cell.
        statistics: the `statistics` section of the configuration.
        blocks: number of blocks.
        baseline: the configuration that taxes are against.
        devices: block to device, where there are several.
    """

    def __init__(
        self,
        samples: Mapping[Key, Mapping[str, Sample]],
        loads: Mapping[Key, tuple[bool, int]],
        statistics: StatisticsSection,
        blocks: int,
        baseline: str,
        devices: Mapping[int, str],
    ) -> None:
        self.baseline = baseline
        self.devices = devices
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
        """The launches of the baseline that configurations are compared with in a block."""
        names = dict.fromkeys(k[0] for k in self.samples if configuration_of(k[0]) == self.baseline)
        return [
            name
            for name in names
            if name not in against and self.has(name, block, phase, cells, metric)
        ]

    def tax(self, where: Where, metric: str) -> TaxEstimate | None:
        """The tax of a launch name in a cell; None without a block that has it."""
        effect = self._effect([(1.0, where)], metric, self.confidence, as_log=True)
        if effect is None:
            return None
        _, differ = self.device_test(where, metric)
        return replace(effect.as_tax(), mark=self.mark(where, metric), differ=differ)

    def tax_on(self, device: str, where: Where, metric: str) -> TaxEstimate | None:
        """The tax on one of several devices; None without a block there."""
        effect = self._effect([(1.0, where)], metric, self.confidence, as_log=True, device=device)
        if effect is None:
            return None
        return replace(effect.as_tax(), mark=self.mark(where, metric, device))

    def device_test(self, where: Where, metric: str) -> tuple[float | None, bool]:
        """p of one tax on all devices; whether they differ, surely and by more than the margin."""
        if not self.devices:
            return None, False
        name, phase, cell = where
        layout = layout_of(self._values(phase, {cell: 1.0}, metric), self.devices)
        points, errors = [], []
        for device in dict.fromkeys(self.devices.values()):
            blocks = self.shared_blocks([name], phase, [cell], metric, device)
            if blocks:
                points.append(self.log_ratio(where, metric, blocks, [cell])[0])
                counts = [len(self.plains([name], b, phase, [cell], metric)) for b in blocks]
                squares = squared_weights({name: 1.0}, counts, self.baseline)
                errors.append(layout.error(squares))
        if len(points) < 2 or layout.pooled[1] == 0:
            return None, False
        p = same_p(points, errors)
        apart = math.expm1(max(points)) - math.expm1(min(points))
        return p, p < 1 - self.confidence and apart > self.statistics["margins"][metric]

    def combination(
        self, terms: Sequence[Term], metric: str, confidence: float | None = None
    ) -> TaxEstimate | None:
        """A weighted sum of taxes: of configurations in one cell, or of one over several cells."""
        effect = self._effect(terms, metric, confidence or self.confidence, as_log=False)
        if effect is None:
            return None
        marks = [part for _, where in terms for part in self.mark(where, metric).split("; ")]
        taxes = [self.tax(where, metric) for _, where in terms] if self.devices else []
        differ = any(tax.differ for tax in taxes if tax is not None)
        return replace(effect, mark="; ".join(filter(None, dict.fromkeys(marks))), differ=differ)

    def mark(self, where: Where, metric: str, device: str | None = None) -> str:
        """Saturation and dropped arrivals of the cells that entered a tax."""
        name, phase, cell = where
        ours, plain = [], []
        for block in self.shared_blocks([name], phase, [cell], metric, device):
            ours.append(self.loads[name, block, phase, cell])
            plains = self.plains([name], block, phase, [cell], metric)
            plain += [self.loads[other, block, phase, cell] for other in plains]
        sides = {name: ours, self.baseline: plain}
        if configuration_of(name) == self.baseline:
            sides = {self.baseline: ours + plain}
        marks = []
        for side, loads in sides.items():
            if any(saturated for saturated, _ in loads):
                marks.append(f"{side} saturated")
            if lost := sum(dropped for _, dropped in loads):
                marks.append(f"{side} dropped {lost} arrivals")
        return "; ".join(marks)

    def shared_blocks(
        self,
        names: Sequence[str],
        phase: str,
        cells: Sequence[str],
        metric: str,
        device: str | None = None,
    ) -> list[int]:
        """The blocks in which the launches and a launch of plain have the metric in the cells.

        Of one device, if it is named.
        """
        return [
            block
            for block in self.all_blocks
            if device in (None, self.devices.get(block))
            and all(self.has(name, block, phase, cells, metric) for name in names)
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
        self,
        terms: Sequence[Term],
        metric: str,
        confidence: float,
        *,
        as_log: bool,
        device: str | None = None,
    ) -> TaxEstimate | None:
        phase = terms[0][1][1]
        names = list(dict.fromkeys(where[0] for _, where in terms))
        cells = list(dict.fromkeys(where[2] for _, where in terms))
        if len(names) > 1 and len(cells) > 1:
            raise ValueError("several configurations over several cells have no common layout")
        blocks = self.shared_blocks(names, phase, cells, metric, device)
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
            return TaxEstimate(point, None, None, NOTHING_REPEATS, None, None, 1)
        of_cell = dict.fromkeys(cells, 1.0)
        weights = dict.fromkeys(names, 1.0)
        for slope, (_, (name, _, cell)) in zip(slopes, terms, strict=True):
            if len(cells) > 1:
                of_cell[cell] = slope
            else:
                weights[name] = slope
        plains = {block: len(self.plains(names, block, phase, cells, metric)) for block in blocks}
        values = self._values(phase, of_cell, metric)
        error = error_of(
            values, self.devices, self.baseline, weights, plains, over_devices=device is None
        )
        if error is None:
            return TaxEstimate(point, None, None, NOTHING_REPEATS, None, None, len(blocks))
        by_model = _by_model(error, point, len(blocks), confidence)
        behind = frozenset(n for n, _ in values if configuration_of(n) not in error.unequal)
        return _wider(replace(by_model, behind=behind), replicates, confidence)

    def _values(self, phase: str, of_cell: Mapping[str, float], metric: str) -> Values:
        """The weighted sum over cells of the logs of each launch that has all of them."""
        launches = dict.fromkeys((k[0], k[1]) for k in self.samples if k[2] == phase)
        return {
            (name, b): sum(
                v * self.samples[name, b, phase, c][metric][0] for c, v in of_cell.items()
            )
            for name, b in launches
            if self.has(name, b, phase, list(of_cell), metric)
        }


def _by_model(error: Error, point: float, blocks: int, confidence: float) -> TaxEstimate:
    """The interval by an error."""
    shown = f"{error.df:.1f}" if error.devices else str(error.df)
    if error.spread is not None:
        shown = f"{error.df:.1f}; spread F {error.spread.f:.1f}, p {error.spread.p:.3f}"
    half, p = error.half_width(confidence), error.p(point)
    return TaxEstimate(
        point,
        point - half,
        point + half,
        f"{error.name} (df {shown})",
        p,
        error.df,
        blocks,
        own_error=error.spread is not None,
        variance=error.variance,
        p_model=p,
        devices=error.devices,
    )


def _wider(by_model: TaxEstimate, replicates: Floats, confidence: float) -> TaxEstimate:
    """The wider of two intervals and the larger of their p-values."""
    tail = (1 - confidence) / 2
    lo, hi = float(np.quantile(replicates, tail)), float(np.quantile(replicates, 1 - tail))
    fewer = min(int((replicates <= 0).sum()), int((replicates >= 0).sum()))
    by_resampling = min(1.0, 2 * (fewer + 1) / (len(replicates) + 1))
    p = max(by_model.p_model, by_resampling)
    if hi - lo <= by_model.high - by_model.low:
        return replace(by_model, p=p, p_bootstrap=by_resampling)
    method = "within-launch bootstrap"
    return replace(by_model, lo=lo, hi=hi, method=method, p=p, p_bootstrap=by_resampling)


# ---- verdicts


@dataclass(frozen=True)
class Compared:
    """A tax among those of its cell and metric, and the blocks it is made of."""

    config: str
    effect: TaxEstimate
    plains: Mapping[int, int]  # block -> launches of plain

    @property
    def baseline_share(self) -> float:
        """The part of the variance of the tax that plain's launches have."""
        if self.effect.devices:
            return 0.0
        plain = sum(1 / launches for launches in self.plains.values()) / len(self.plains)
        return plain / (1 + plain)


def adjusted(family: Sequence[Compared]) -> list[float]:
    """The p-values of one cell and metric, adjusted for their number.

    Dunnett's among the contrasts with the pooled error; those with an error of their own count as
    independent of these and of each other, as the within-launch bootstrap's p-values do.
    """
    pooled = [member for member in family if not member.effect.own_error]
    shares = tuple(member.baseline_share for member in pooled)
    p_values = []
    for member in family:
        effect = member.effect
        by_model = sidak(effect.p_model, len(family))
        if not effect.own_error and effect.df is not None:
            among = _dunnett(effect.p_model, shares, effect.df)
            by_model = 1 - (1 - among) * (1 - effect.p_model) ** (len(family) - len(pooled))
        p_values.append(max(by_model, sidak(effect.p_bootstrap, len(family))))
    return p_values


def sidak(p: float, count: int) -> float:
    """The smallest of `count` independent p-values, adjusted."""
    return 1.0 if p >= 1 else -math.expm1(count * math.log1p(-p))


@lru_cache(maxsize=65536)
def _dunnett(p: float, shares: tuple[float, ...], df: float) -> float:
    return p if p <= 0 or p >= 1 else largest_above(t_quantile(1 - p, df), np.array(shares), df)


def verdict(tax: TaxEstimate, p_adjusted: float | None, margin: float, confidence: float) -> str:
    """What the study says of a tax that carries no mark."""
    if tax.n_blocks < VERDICT_BLOCKS or p_adjusted is None:
        return POINT_ESTIMATE
    if tax.differ:
        return DEVICES_DIFFER
    if -margin < tax.low and tax.high < margin:
        return NO_TAX
    proven = p_adjusted < 1 - confidence and tax.low > 0
    return TAX if proven else INCONCLUSIVE

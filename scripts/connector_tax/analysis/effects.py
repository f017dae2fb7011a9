"""Effects: percentiles of a configuration over the baseline's, and combinations of such taxes, with
intervals and verdicts.

Source: docs/method.md, "The error model" and "Verdicts". tax = exp(d) - 1, d the mean over blocks
of the log of the configuration's percentile minus the mean log of the block's launches of plain.
The interval is that of the block model, or of the within-launch bootstrap where that is wider.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from connector_tax.analysis.block_model import Estimate, Floats, Launches, LaunchId
from connector_tax.analysis.bootstrap import bootstrap_p
from connector_tax.analysis.ingest import Cell
from connector_tax.analysis.multiplicity import dunnett_p, sidak
from connector_tax.analysis.reference import Sweep, judgement
from connector_tax.analysis.samples import LogSample
from connector_tax.analysis.saturation import CellLoad
from connector_tax.artifacts.names import (
    INCONCLUSIVE,
    MARKED,
    NO_TAX,
    POINT_ESTIMATE,
    TAX,
    CellKey,
    configuration_of,
    no_number,
)
from connector_tax.artifacts.study_file import Study

MIN_BLOCKS_FOR_VERDICT = 3
MOST_BLOCKS = 100
ONE_LAUNCH = "one launch; launches not included"
BOOTSTRAP = "within-launch bootstrap"


class WeightedTax(NamedTuple):
    """One tax in a linear combination of taxes."""

    weight: float
    config: str
    phase: str
    cell: str
    metric: str


class Overload(NamedTuple):
    """Why latencies of a launch's cell are those of survivors.

    Attributes:
        saturated: by the study's criteria.
        dropped: measured arrivals dropped by the in-flight cap.
    """

    saturated: bool
    dropped: int


@dataclass(frozen=True)
class Effect:
    """An estimate in fractions (0.45 is +45%) with its interval; infinite ends: unknown.

    Attributes:
        method: how the interval was made.
        p: two-sided p-value of "the effect is zero", at least `within_p`, the bootstrap's.
        estimate: the contrast of logs behind it.
        added_df: degrees of freedom that one more block would bring.
        mark: why it gets no verdict; "" where nothing was saturated or dropped.
        taxes: of a combination, over its blocks.
    """

    point: float
    lo: float
    hi: float
    method: str
    p: float | None
    within_p: float | None
    estimate: Estimate
    added_df: int
    confidence: float
    mark: str = ""
    taxes: tuple[float, ...] = ()

    @property
    def n_blocks(self) -> int:
        """The blocks it is formed in."""
        return len(self.estimate.blocks)

    @property
    def ends(self) -> tuple[float | None, float | None]:
        """The interval's ends; None: unknown."""
        return (self.lo, self.hi) if np.isfinite(self.hi - self.lo) else (None, None)

    @property
    def df(self) -> float | None:
        """Degrees of freedom behind the block model's error; None without an interval."""
        return None if self.p is None else self.estimate.df

    @property
    def decides(self) -> bool:
        """Whether there are enough blocks for a verdict."""
        return self.n_blocks >= MIN_BLOCKS_FOR_VERDICT

    def ahead(self, blocks: int) -> "Effect":
        """With the block model's interval as so many blocks would have it."""
        if self.estimate.error is None:
            return self
        later = self.estimate.with_blocks(self.added_df, blocks)
        half = later.half_width(self.confidence)
        assert half is not None
        if self.taxes:
            return replace(self, estimate=later, lo=self.point - half, hi=self.point + half)
        lo, hi = (float(np.expm1(later.point + side * half)) for side in (-1, 1))
        return replace(self, estimate=later, lo=lo, hi=hi)


def _effect(
    estimate: Estimate,
    replicates: Floats,
    added_df: int,
    confidence: float,
    taxes: tuple[float, ...] = (),
    point: float | None = None,
) -> Effect:
    """A tax, or the combination `point` of `taxes`: the wider of both intervals."""
    centre = estimate.point if point is None else point
    scale: Callable[[float], float] = np.expm1 if point is None else float
    half = estimate.half_width(confidence)
    known = (float(scale(centre)), -np.inf, np.inf, ONE_LAUNCH, None, None)
    effect = Effect(*known, estimate, added_df, confidence, taxes=taxes)
    if len(estimate.blocks) < 2 or half is None or estimate.p is None:
        return effect
    tail = (1 - confidence) / 2
    lo, hi = (float(end) for end in np.quantile(replicates, [tail, 1 - tail]))
    method = BOOTSTRAP
    if 2 * half >= hi - lo:
        lo, hi, method = centre - half, centre + half, estimate.method
    within = bootstrap_p(replicates)
    lo, hi, p = float(scale(lo)), float(scale(hi)), max(estimate.p, within)
    return replace(effect, lo=lo, hi=hi, method=method, p=p, within_p=within)


class TaxTable:
    """The samples of every valid cell of a study, and the effects that can be formed from them.

    Args:
        study: the study.
        cells: its planned cells, for the reasons of those without a sample.
        samples: `sample_launch` of each valid cell.
        overloads: of each valid cell; a cell that is absent was neither saturated nor dropped any.
    """

    def __init__(
        self,
        study: Study,
        cells: Sequence[Cell],
        samples: Mapping[CellKey, Mapping[str, LogSample]],
        overloads: Mapping[CellKey, Overload],
    ) -> None:
        self._confidence = study.config["statistics"]["confidence"]
        self._cells = {cell.key: cell for cell in cells}
        self._overloads = overloads
        self._blocks = range(study.document["blocks"])
        self._baseline = study.baseline
        self._plains = {phase: study.plains(phase) for phase in study.document["run_order"]}
        self._samples: dict[tuple[str, str, str], dict[LaunchId, LogSample]] = {}
        for key, metrics in samples.items():
            for metric, sample in metrics.items():
                if key.block in self._blocks:
                    own = self._samples.setdefault((key.phase, key.cell, metric), {})
                    own[LaunchId(key.config, key.block)] = sample
        self._launches: dict[tuple[str, str, str], Launches | None] = {}

    def launches(self, phase: str, cell: str, metric: str) -> Launches | None:
        """One metric of a cell's launches; None without any."""
        where = (phase, cell, metric)
        if where not in self._launches:
            samples = self._samples.get(where)
            self._launches[where] = None if samples is None else _table(samples)
        return self._launches[where]

    def tax(self, config: str, phase: str, cell: str, metric: str) -> Effect | None:
        """The tax with its interval, both formed on the log ratio; None without a shared block.

        The tax of a launch of plain is against the block's other launches of plain.
        """
        launches, plains = self.launches(phase, cell, metric), self._plains[phase]
        if launches is None or (estimate := launches.contrast(config, plains)) is None:
            return None
        weights = launches.weights(config, plains, estimate.blocks)
        replicates = _replicates(launches, weights)
        effect = _effect(estimate, replicates, launches.added_df, self._confidence)
        return replace(effect, mark=self._mark(launches, weights, phase, cell))

    def combination(
        self, terms: Sequence[WeightedTax], confidence: float | None = None
    ) -> Effect | None:
        """A linear combination of taxes, over the blocks all of them have; None without any.

        Of several configurations in one cell, or of one configuration in several cells of a phase:
        then over the launches that have all of these cells.

        Raises:
            ValueError: the taxes are of several configurations in several cells.
        """
        cells, configs = {term[2:] for term in terms}, {term.config for term in terms}
        if len(cells) > 1 and len(configs) > 1:
            raise ValueError("a combination is of one configuration, or in one cell")
        of = {cell: launches for cell in cells if (launches := self.launches(*cell)) is not None}
        if len(of) < len(cells):
            return None
        shared = set.intersection(*(set(launches.ids) for launches in of.values()))
        parts = {
            cell: launches.only(np.array([launch in shared for launch in launches.ids]))
            for cell, launches in of.items()
        }
        base = self._plains[terms[0].phase]
        by_term = [set(parts[term[2:]].blocks(term.config, base)) for term in terms]
        blocks = tuple(sorted(set.intersection(*by_term)))
        if not blocks:
            return None
        point, replicates = 0.0, np.zeros(1)
        first = parts[terms[0][2:]]
        linear, y, marks, taxes = np.zeros(len(first)), np.zeros(len(first)), [], []
        for term in terms:
            launches = parts[term[2:]]
            weights = launches.weights(term.config, base, blocks)
            d = launches.value(weights)
            taxes.append(float(np.expm1(d)))
            point += term.weight * taxes[-1]
            replicates = replicates + term.weight * np.expm1(_replicates(launches, weights))
            linear = linear + term.weight * float(np.exp(d)) * weights
            y = y + term.weight * float(np.exp(d)) * launches.y
            marks.append(self._mark(launches, weights, term.phase, term.cell))
        if len(cells) > 1:
            # Of one configuration: the combined values of each launch, compared once.
            first, linear = replace(first, y=y), weights
        estimate = first.estimate(linear, sorted(configs), blocks)
        level = self._confidence if confidence is None else confidence
        effect = _effect(estimate, replicates, first.added_df, level, tuple(taxes), point)
        return replace(effect, mark=joined(marks))

    def levels_ms(
        self, config: str, phase: str, cell: str, metric: str
    ) -> tuple[float, float, int, int]:
        """Plain's level and the configuration's over the tax's blocks, and the requests of each.

        Geometric means in ms, of a block's launches of plain too. The tax must have a number.
        """
        launches, plains = self.launches(phase, cell, metric), self._plains[phase]
        assert launches is not None
        assert launches.n is not None
        weights = launches.weights(config, plains, launches.blocks(config, plains))
        ours, base = weights > 0, weights < 0
        logs = weights * launches.y
        counts = (int(launches.n[base].sum()), int(launches.n[ours].sum()))
        return float(np.exp(-logs[base].sum())), float(np.exp(logs[ours].sum())), *counts

    def lost(self, config: str, phase: str, cell: str, metric: str) -> list[tuple[str, int, str]]:
        """(status, block, reason) of every block in which the tax has no number, in block order."""
        known = self._samples.get((phase, cell, metric), {})
        plains = [name for name in self._plains[phase] if name != config]
        reasons: list[tuple[str, int, str]] = []
        for block in self._blocks:
            if LaunchId(config, block) not in known:
                reasons.append(self._why_lost(config, block, phase, cell, metric))
            elif not any(LaunchId(name, block) in known for name in plains):
                status, _, reason = self._why_lost(self._baseline, block, phase, cell, metric)
                reasons.append((status, block, f"{self._baseline}: {reason}"))
        return reasons

    def _why_lost(
        self, config: str, block: int, phase: str, cell: str, metric: str
    ) -> tuple[str, int, str]:
        state = self._cells.get(CellKey(config, block, phase, cell))
        if state is None:
            return "missing", block, "the launch is not part of the design"
        if state.status == "valid":
            return "missing", block, no_number(metric, state.output_tokens)
        if state.status == "failed":
            return "missing", block, f"the launch failed: {state.reason}"
        return state.status, block, str(state.reason)

    def _mark(self, launches: Launches, weights: Floats, phase: str, cell: str) -> str:
        """What is wrong with the cells a tax is made from, a configuration at a time.

        `mooncake_both saturated; plain dropped 65 arrivals`; "" for nothing.
        """
        found: dict[str, list[Overload]] = {}
        for side in (weights > 0, weights < 0):
            for launch in launches.only(side).ids:
                overload = self._overloads.get(CellKey(*launch, phase, cell), Overload(False, 0))
                found.setdefault(configuration_of(launch.name), []).append(overload)
        parts = []
        for configuration, overloads in found.items():
            if any(overload.saturated for overload in overloads):
                parts.append(f"{configuration} saturated")
            if dropped := sum(overload.dropped for overload in overloads):
                parts.append(f"{configuration} dropped {dropped} arrivals")
        return "; ".join(parts)


def _table(samples: Mapping[LaunchId, LogSample]) -> Launches:
    points = {launch: sample.point for launch, sample in samples.items()}
    return replace(
        Launches.of(points),
        replicates=np.array([sample.replicates for sample in samples.values()]),
        n=np.array([sample.n for sample in samples.values()], np.int64),
    )


def _replicates(launches: Launches, weights: Floats) -> Floats:
    assert launches.replicates is not None
    used = weights != 0
    resampled: Floats = weights[used] @ launches.replicates[used]
    return resampled


def joined(marks: Iterable[str]) -> str:
    """The marks of several taxes as one, each part once."""
    parts = [part for text in marks for part in text.split("; ") if part]
    return "; ".join(dict.fromkeys(parts))


def overloads(
    study: Study,
    cells: Sequence[Cell],
    loads: Mapping[CellKey, CellLoad],
    dropped: Mapping[CellKey, int],
    sweeps: Mapping[tuple[str, int], Sweep],
) -> dict[CellKey, Overload]:
    """What every valid cell in which something succeeded says about overload.

    Args:
        study: the study.
        cells: its planned cells.
        loads: the load figures of those cells.
        dropped: measured arrivals that were dropped, of the same.
        sweeps: `reference.judge_launches` of Phase A.
    """
    return {
        cell.key: Overload(
            judgement(study, cell.key, cell.rate_rps, loads[cell.key], sweeps).saturated,
            dropped[cell.key],
        )
        for cell in cells
        if cell.key in loads and cell.rate_rps is not None
    }


# ---- verdicts


class Judged(NamedTuple):
    """What is said of a tax, and how many blocks would decide one of which it cannot be told."""

    p_adjusted: float | None
    verdict: str
    blocks_needed: int | None


def judge(effect: Effect, family: Sequence[Estimate], margin: float) -> Judged:
    """Adjusted p, verdict and blocks needed of a tax.

    Args:
        effect: the tax.
        family: the estimates it is compared with one baseline together with, itself included.
        margin: of its metric.
    """
    p = None if effect.mark else adjusted_p(effect, family)
    said = verdict(effect, p, margin)
    needed = blocks_needed(effect, family, margin) if said == INCONCLUSIVE else None
    return Judged(p, said, needed)


def adjusted_p(effect: Effect, family: Sequence[Estimate]) -> float | None:
    """The larger of Dunnett's p and the bootstrap's after Sidak; None without an interval."""
    if effect.within_p is None:
        return None
    return max(dunnett_p(effect.estimate, family), sidak(effect.within_p, len(family)))


def verdict(effect: Effect, p_adjusted: float | None, margin: float) -> str:
    """TAX, NO TAX, INCONCLUSIVE, or why there is no verdict (docs/method.md, "Verdicts").

    NO TAX: the interval lies within +-margin, even where it excludes zero. TAX: positive and
    significant after Dunnett's adjustment. A configuration that is significantly faster than plain
    is INCONCLUSIVE: a negative tax points at a confound, not at a cost.
    """
    if effect.mark:
        return MARKED
    if not effect.decides or p_adjusted is None:
        return POINT_ESTIMATE
    if -margin < effect.lo and effect.hi < margin:
        return NO_TAX
    if p_adjusted < 1 - effect.confidence and effect.lo > 0:
        return TAX
    return INCONCLUSIVE


def fewest_blocks(present: int, decided: Callable[[int], bool]) -> int | None:
    """The smallest number of blocks above `present` that decides; None where MOST_BLOCKS do not.

    Args:
        present: the blocks there are.
        decided: whether so many decide; true of every number above one of which it is true.
    """
    counts = range(present + 1, MOST_BLOCKS + 1)
    first = bisect_left(counts, True, key=decided)
    return counts[first] if first < len(counts) else None


def blocks_needed(effect: Effect, family: Sequence[Estimate], margin: float) -> int | None:
    """The smallest number of blocks, above the present one, at which it would be TAX or NO TAX.

    The point stays, the standard error shrinks with the root of the number of blocks, the degrees
    of freedom grow with the launches.
    """

    def no_tax(blocks: int) -> bool:
        later = effect.ahead(blocks)
        return -margin < later.lo and later.hi < margin

    def tax(blocks: int) -> bool:
        later = effect.ahead(blocks)
        return later.lo > 0 and dunnett_p(later.estimate, family) < 1 - effect.confidence

    # Each becomes true once, as the interval shrinks: bisection, Dunnett's integral being slow.
    counts = [fewest_blocks(effect.n_blocks, decided) for decided in (no_tax, tax)]
    return min((count for count in counts if count is not None), default=None)

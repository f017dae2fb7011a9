"""Effects: percentiles of a configuration over the baseline's, and combinations of such taxes, with
intervals and verdicts.

Source: docs/method.md, "The error model" and "Verdicts". tax = exp(d) - 1, d the mean over blocks
of the log of the configuration's percentile minus the mean log of the block's launches of plain.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from scipy.stats import t as student

from connector_tax.analysis.block_model import (
    POWER,
    Estimate,
    Floats,
    Launches,
    LaunchId,
    sidak,
)
from connector_tax.analysis.ingest import Cell
from connector_tax.analysis.reference import Sweep, judgement
from connector_tax.analysis.robust import huber, randomisation_p
from connector_tax.analysis.samples import LogSample, over_rates, saturated_in, unsaturated
from connector_tax.analysis.saturation import CellLoad
from connector_tax.artifacts.metrics import METRICS
from connector_tax.artifacts.names import ALL_RATES, CellKey, configuration_of, no_number
from connector_tax.artifacts.study_file import Study
from connector_tax.artifacts.tables import Row
from connector_tax.artifacts.verdicts import (
    CANNOT_TELL,
    MARKED,
    MIN_BLOCKS_FOR_VERDICT,
    TOO_FEW,
    verdict_of,
)

ONE_LAUNCH = "one launch; launches not included"


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

    @property
    def any(self) -> bool:
        """Whether there was one."""
        return self.saturated or self.dropped > 0


@dataclass(frozen=True)
class Effect:
    """An estimate in fractions (0.45 is +45%), with its intervals.

    Attributes:
        estimate: the contrast behind it: of logs, of which it is exp(d) - 1, or with `taxes` of
            linear terms about `point`.
        added_df: degrees of freedom that one more block would bring.
        mark: why it gets no verdict; "" where nothing was saturated or dropped.
        taxes: of a combination, over its blocks.
    """

    point: float
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
    def repeats(self) -> bool:
        """Whether anything repeats, so that there is an interval."""
        return self.estimate.error is not None and self.n_blocks > 1

    @property
    def method(self) -> str:
        """How the interval was made."""
        return self.estimate.method if self.repeats else ONE_LAUNCH

    @property
    def p(self) -> float | None:
        """Two-sided p-value of "the effect is zero"; None without an interval."""
        return self.estimate.p if self.repeats else None

    @property
    def df(self) -> float | None:
        """Degrees of freedom behind the error; None without an interval."""
        return self.estimate.df if self.repeats else None

    def interval(self, confidence: float, power: float | None = None) -> tuple[float, float]:
        """Its ends; infinite without an interval.

        Args:
            confidence: of the interval.
            power: with it the ends that are within reach of this share of such studies.
        """
        half = self.estimate.half_width(confidence)
        if not self.repeats or half is None or self.estimate.error is None:
            return -np.inf, np.inf
        if power is not None:
            half += float(student.ppf(power, self.estimate.df)) * self.estimate.error
        if self.taxes:
            return self.point - half, self.point + half
        lo, hi = (float(np.expm1(self.estimate.point + side * half)) for side in (-1, 1))
        return lo, hi

    @property
    def lo(self) -> float:
        """The interval's lower end; infinite: unknown."""
        return self.interval(self.confidence)[0]

    @property
    def hi(self) -> float:
        """The interval's upper end; infinite: unknown."""
        return self.interval(self.confidence)[1]

    @property
    def narrow(self) -> tuple[float, float]:
        """The interval of the equivalence test (TOST), of 90%; its upper end is "at most"."""
        return self.interval(2 * self.confidence - 1)

    @property
    def ends(self) -> tuple[float | None, float | None]:
        """The interval's ends; None: unknown."""
        return (self.lo, self.hi) if self.repeats else (None, None)

    def ahead(self, blocks: int) -> "Ahead":
        """As so many blocks would have it, in POWER of the studies."""
        later = self
        if self.estimate.error is not None:
            later = replace(self, estimate=self.estimate.with_blocks(self.added_df, blocks))
        return Ahead(*later.interval(self.confidence, POWER))


class Ahead(NamedTuple):
    """The ends that a planned study keeps within."""

    lo: float
    hi: float


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
        self._blocks = range(study.document["blocks"])
        self._baseline = study.baseline
        self._plains = {phase: study.plains(phase) for phase in study.document["run_order"]}
        self._samples: dict[tuple[str, str, str], dict[LaunchId, LogSample]] = {}
        for key, metrics in samples.items():
            for metric, sample in metrics.items():
                if key.block in self._blocks:
                    own = self._samples.setdefault((key.phase, key.cell, metric), {})
                    own[LaunchId(key.config, key.block)] = sample
        self._overloads = dict(overloads)
        self.rates: list[str] = []
        self._add_all_rates(study)
        self._launches: dict[tuple[str, str, str], Launches | None] = {}

    def _add_all_rates(self, study: Study) -> None:
        """The cell ALL_RATES: each launch's mean over the rates of Phase A without saturation."""
        sweep = [cell for cell in study.document.get("cells", {}).get("A", []) if cell["rate_rps"]]
        rates = [
            str(cell["cell"]) for cell in sorted(sweep, key=lambda cell: cell["rate_rps"] or 0.0)
        ]
        if not rates:
            return
        over = {k: load for k, load in self._overloads.items() if k.phase == "A"}
        hit = saturated_in((k.config, k.cell) for k, load in over.items() if load.any)
        self.rates = unsaturated(rates, hit)
        for metric in METRICS:
            of_cells = {cell: self._samples.get(("A", cell, metric), {}) for cell in self.rates}
            logs: dict[LaunchId, dict[str, float]] = {}
            for cell, samples in of_cells.items():
                for launch, sample in samples.items():
                    logs.setdefault(launch, {})[cell] = sample.point
            means = over_rates(logs, self.rates)
            if means:
                self._samples["A", ALL_RATES, metric] = {
                    launch: LogSample(mean, sum(of[launch].n for of in of_cells.values()))
                    for launch, mean in means.items()
                }
        for launch in {LaunchId(k.config, k.block) for k in over}:
            loads = [over[k] for cell in self.rates if (k := CellKey(*launch, "A", cell)) in over]
            self._overloads[CellKey(*launch, "A", ALL_RATES)] = Overload(
                any(load.saturated for load in loads), sum(load.dropped for load in loads)
            )

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
        mark = self._mark(launches, weights, phase, cell)
        point = float(np.expm1(estimate.point))
        return Effect(point, estimate, launches.added_df, self._confidence, mark)

    def second_opinions(
        self, effect: Effect, config: str, phase: str, cell: str, metric: str
    ) -> Row:
        """A tax by Huber's estimate, and p by randomisation; empty without an interval."""
        launches, plains = self.launches(phase, cell, metric), self._plains[phase]
        if launches is None or not effect.repeats:
            return {}
        blocks = effect.estimate.blocks
        row: Row = {"p_randomised": randomisation_p(launches, config, plains, blocks)}
        found = huber(launches, config, plains, self._confidence)
        if found is not None:
            names = ("huber", "huber_lo", "huber_hi")
            row |= dict(zip(names, map(float, np.expm1(found)), strict=True))
        return row

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
        point = 0.0
        first = parts[terms[0][2:]]
        linear, y, marks, taxes = np.zeros(len(first)), np.zeros(len(first)), [], []
        for term in terms:
            launches = parts[term[2:]]
            weights = launches.weights(term.config, base, blocks)
            d = launches.value(weights)
            taxes.append(float(np.expm1(d)))
            point += term.weight * taxes[-1]
            linear = linear + term.weight * float(np.exp(d)) * weights
            y = y + term.weight * float(np.exp(d)) * launches.y
            marks.append(self._mark(launches, weights, term.phase, term.cell))
        if len(cells) > 1:
            # Of one configuration: the combined values of each launch, compared once.
            first, linear = replace(first, y=y), weights
        estimate = first.estimate(linear, blocks)
        level = self._confidence if confidence is None else confidence
        return Effect(point, estimate, first.added_df, level, joined(marks), tuple(taxes))

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
        if cell == ALL_RATES:
            launch = LaunchId(config, block)
            for rate in self.rates:
                if launch not in self._samples.get((phase, rate, metric), {}):
                    return self._why_lost(config, block, phase, rate, metric)
            return "missing", block, "no rate of Phase A is without saturation"
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
        Launches.of(points), n=np.array([sample.n for sample in samples.values()], np.int64)
    )


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
    """What is said of a tax, by which interval, and the blocks that would decide what is open."""

    p_adjusted: float | None
    verdict: str
    blocks_needed: int | None = None
    family_lo: float | None = None
    family_hi: float | None = None


def judge(effect: Effect, comparisons: int, margin: float) -> Judged:
    """Adjusted p, verdict and blocks needed of a tax.

    Args:
        effect: the tax.
        comparisons: how many are compared with one baseline together.
        margin: of its metric.
    """
    if effect.mark:
        return Judged(None, MARKED)
    p = None if effect.p is None else sidak(effect.p, comparisons)
    if p is None or effect.n_blocks < MIN_BLOCKS_FOR_VERDICT:
        return Judged(p, TOO_FEW)
    # Off zero where p_adjusted is below 1 - confidence: Sidak's, as an interval.
    wide = effect.confidence ** (1 / comparisons)
    ends = effect.interval(wide)
    said, needed = verdict_of(ends, effect.narrow, margin), None
    if said == CANNOT_TELL:
        narrow = 2 * effect.confidence - 1
        needed = effect.estimate.blocks_needed(effect.added_df, margin, wide, narrow)
    return Judged(p, said, needed, *ends)

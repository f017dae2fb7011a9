"""Effects: percentiles of a configuration over the baseline's, and combinations of such taxes.

With their intervals and verdicts, and the rows of effects.csv about latencies. tax = exp(d) - 1, d
the mean over blocks of the log of the configuration's percentile minus the mean log of the block's
launches of plain. A tax that has no number keeps its row, with the status and the reason.

Source: docs/method.md, "The error model" and "Verdicts"; design, "Substrate tax definition" and
"Reference rate selection".
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from connector_tax.analysis.block_model import (
    POWER,
    Estimate,
    Floats,
    Launches,
    LaunchId,
    huber,
    randomisation_p,
    sidak,
)
from connector_tax.analysis.ingest import Cell, merged_reasons
from connector_tax.analysis.measure import Requests
from connector_tax.artifacts import tables
from connector_tax.artifacts.metrics import LATENCY_METRICS, METRICS, margin_of
from connector_tax.artifacts.names import (
    ALL_RATES,
    PHASES,
    REFERENCES,
    SAME_RATES,
    CellKey,
    configuration_of,
    no_number,
)
from connector_tax.artifacts.stage_records import RatesRecord
from connector_tax.artifacts.study_file import Study
from connector_tax.artifacts.study_records import Reference
from connector_tax.artifacts.tables import Row
from connector_tax.artifacts.verdicts import (
    CANNOT_TELL,
    MARKED,
    MIN_BLOCKS_FOR_VERDICT,
    TOO_FEW,
    verdict_of,
)

ONE_LAUNCH = "one launch; launches not included"
CONFIRMATORY, EXPLORATORY = "confirmatory", "exploratory"
# Beside the metrics: how long the machine took for the watch's arithmetic.
COMPUTE = "compute_ns_p50"


# ---- samples


class LogSample(NamedTuple):
    """One percentile (ms) of one launch's cell.

    Where the cell was saturated or arrivals were dropped, latencies are those of survivors.

    Attributes:
        point: its log.
        n: the sample size.
        saturated: by the study's criteria.
        dropped: measured arrivals dropped by the in-flight cap.
    """

    point: float
    n: int
    saturated: bool = False
    dropped: int = 0


Samples = Mapping[CellKey, Mapping[str, LogSample]]


def sample_launch(requests: Requests, saturated: bool = False) -> dict[str, LogSample]:
    """Every metric of one valid cell.

    Metrics without data (TPOT of one output token) are absent, and those that are 0, which has no
    ratio: TPOT, where all tokens of many requests came in one read.
    """
    samples = {}
    for metric in METRICS:
        values = getattr(requests, LATENCY_METRICS[metric].latency)
        value = float(np.percentile(values, LATENCY_METRICS[metric].percent)) if len(values) else 0
        if value > 0:
            point, dropped = float(np.log(value)), requests.dropped
            samples[metric] = LogSample(point, len(values), saturated, dropped)
    return samples


def unsaturated(cells: Sequence[str], saturated: Mapping[str, Collection[str]]) -> list[str]:
    """The cells of Phase A in which nothing was saturated, of all launches of all configurations.

    A configuration that is saturated at the lowest rate has no say, or one broken connector would
    leave no rate to anybody.

    Args:
        cells: from the lowest rate to the highest.
        saturated: cell to the configurations that were saturated, or dropped arrivals.
    """
    broken = set(saturated.get(cells[0], ()))
    return [cell for cell in cells if not set(saturated.get(cell, ())) - broken]


def over_rates(
    logs: Mapping[LaunchId, Mapping[str, float]], cells: Sequence[str]
) -> dict[LaunchId, float]:
    """The mean log over these cells of each launch that has all of them."""
    return {
        launch: sum(of[cell] for cell in cells) / len(cells)
        for launch, of in logs.items()
        if cells and all(cell in of for cell in cells)
    }


def saturated_in(places: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    """Cell to the configurations that were overloaded there, of launch names and cells."""
    found: dict[str, set[str]] = {}
    for name, cell in places:
        found.setdefault(cell, set()).add(configuration_of(name))
    return found


# ---- one effect


class WeightedTax(NamedTuple):
    """One tax in a linear combination of taxes."""

    weight: float
    config: str
    phase: str
    cell: str
    metric: str


class Ahead(NamedTuple):
    """The ends that a planned study keeps within."""

    lo: float
    hi: float


@dataclass(frozen=True)
class Effect:
    """An estimate in fractions (0.45 is +45%), with its intervals.

    Attributes:
        estimate: the contrast behind it: of logs, of which it is exp(d) - 1, or with `taxes` of
            linear terms about `point`; without an error where nothing repeats.
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

    def interval(self, confidence: float, power: float | None = None) -> Ahead:
        """Its ends; infinite without an interval.

        Args:
            confidence: of the interval.
            power: with it the ends that are within reach of this share of such studies.
        """
        half = self.estimate.half_width(confidence)
        if not self.repeats or half is None or self.estimate.error is None:
            return Ahead(-np.inf, np.inf)
        if power is not None:
            half += float(stdtrit(self.estimate.df, power)) * self.estimate.error
        if self.taxes:
            return Ahead(self.point - half, self.point + half)
        return Ahead(*(float(np.expm1(self.estimate.point + side * half)) for side in (-1, 1)))

    @property
    def lo(self) -> float:
        """The interval's lower end; infinite: unknown."""
        return self.interval(self.confidence).lo

    @property
    def hi(self) -> float:
        """The interval's upper end; infinite: unknown."""
        return self.interval(self.confidence).hi

    @property
    def narrow(self) -> Ahead:
        """The interval of the equivalence test (TOST), of 90%; its upper end is "at most"."""
        return self.interval(2 * self.confidence - 1)

    @property
    def ends(self) -> tuple[float | None, float | None]:
        """The interval's ends; None: unknown."""
        return (self.lo, self.hi) if self.repeats else (None, None)

    def ahead(self, blocks: int) -> Ahead:
        """As so many blocks would have it, in POWER of the studies."""
        later = self
        if self.estimate.error is not None:
            later = replace(self, estimate=self.estimate.with_blocks(self.added_df, blocks))
        return later.interval(self.confidence, POWER)


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


def joined(marks: Iterable[str]) -> str:
    """The marks of several taxes as one, each part once."""
    parts = [part for text in marks for part in text.split("; ") if part]
    return "; ".join(dict.fromkeys(parts))


# ---- the taxes of a study


class TaxTable:
    """The samples of every valid cell of a study, and the effects that can be formed from them.

    Args:
        study: the study.
        cells: its planned cells, for the reasons of those without a sample.
        samples: `sample_launch` of each valid cell.
    """

    def __init__(self, study: Study, cells: Sequence[Cell], samples: Samples) -> None:
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
        sweep = [cell for cell in study.document.get("cells", {}).get("A", []) if cell["rate_rps"]]
        by_rate = sorted(sweep, key=lambda cell: cell["rate_rps"] or 0.0)
        self.rates = self._over_all_rates([str(cell["cell"]) for cell in by_rate], samples)
        self._launches: dict[tuple[str, str, str], Launches | None] = {}

    def _over_all_rates(self, rates: Sequence[str], samples: Samples) -> list[str]:
        """Add the cell ALL_RATES: each launch's mean over the rates of Phase A without saturation.

        Returns these rates.
        """
        if not rates:
            return []
        hit = saturated_in(
            (key.config, key.cell)
            for key, metrics in samples.items()
            if key.phase == "A" and any(s.saturated or s.dropped for s in metrics.values())
        )
        kept = unsaturated(rates, hit)
        for metric in (*METRICS, COMPUTE):
            of = {cell: self._samples.get(("A", cell, metric), {}) for cell in kept}
            logs: dict[LaunchId, dict[str, float]] = {}
            for cell, launches in of.items():
                for launch, sample in launches.items():
                    logs.setdefault(launch, {})[cell] = sample.point
            if means := over_rates(logs, kept):
                self._samples["A", ALL_RATES, metric] = {
                    launch: LogSample(
                        mean,
                        sum(of[cell][launch].n for cell in kept),
                        any(of[cell][launch].saturated for cell in kept),
                        sum(of[cell][launch].dropped for cell in kept),
                    )
                    for launch, mean in means.items()
                }
        return kept

    def launches(self, phase: str, cell: str, metric: str) -> Launches | None:
        """One metric of a cell's launches; None without any."""
        where = (phase, cell, metric)
        if where not in self._launches:
            samples = self._samples.get(where, {})
            points = {launch: sample.point for launch, sample in samples.items()}
            self._launches[where] = Launches.of(points) if points else None
        return self._launches[where]

    def tax(self, config: str, phase: str, cell: str, metric: str) -> Effect | None:
        """The tax with its interval, both formed on the log ratio; None without a shared block.

        The tax of a launch of plain is against the block's other launches of plain.
        """
        launches, plains = self.launches(phase, cell, metric), self._plains[phase]
        if launches is None or (estimate := launches.contrast(config, plains)) is None:
            return None
        weights = launches.weights(config, plains, estimate.blocks)
        mark = self._mark(launches, weights, phase, cell, metric)
        point = float(np.expm1(estimate.point))
        return Effect(point, estimate, launches.added_df, self._confidence, mark)

    def second_opinions(
        self, effect: Effect, config: str, phase: str, cell: str, metric: str
    ) -> Row:
        """A tax by Huber's estimate, with the machine's speed taken out, and p by randomisation.

        Empty without an interval.
        """
        launches, plains = self.launches(phase, cell, metric), self._plains[phase]
        if launches is None or not effect.repeats:
            return {}
        blocks, speed = effect.estimate.blocks, self._samples.get((phase, cell, COMPUTE), {})
        opinions = {"huber": huber(launches, config, plains)}
        if all(launch in speed for launch in launches.ids):
            x = np.array([speed[launch].point for launch in launches.ids])
            weights = launches.weights(config, plains, blocks)
            opinions["adjusted"] = launches.without(x, weights, blocks)
        row: Row = {"p_randomised": randomisation_p(launches, config, plains, blocks)}
        for name, found in opinions.items():
            if found is not None and (ends := found.interval(self._confidence)) is not None:
                values = map(float, np.expm1((found.point, *ends)))
                row |= dict(zip((name, f"{name}_lo", f"{name}_hi"), values, strict=True))
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
            marks.append(self._mark(launches, weights, *term[2:]))
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
        weights = launches.weights(config, plains, launches.blocks(config, plains))
        base, own = map(float, np.exp(launches.levels(weights)))
        of = self._samples[phase, cell, metric]
        n_base, n = (
            sum(of[launch].n for launch in launches.only(side).ids)
            for side in (weights < 0, weights > 0)
        )
        return base, own, n_base, n

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

    def _mark(self, launches: Launches, weights: Floats, phase: str, cell: str, metric: str) -> str:
        """What is wrong with the cells a tax is made from, a configuration at a time.

        `mooncake_both saturated; plain dropped 65 arrivals`; "" for nothing.
        """
        found: dict[str, list[LogSample]] = {}
        for side in (weights > 0, weights < 0):
            for launch in launches.only(side).ids:
                sample = self._samples[phase, cell, metric][launch]
                found.setdefault(configuration_of(launch.name), []).append(sample)
        parts = []
        for configuration, samples in found.items():
            if any(sample.saturated for sample in samples):
                parts.append(f"{configuration} saturated")
            if dropped := sum(sample.dropped for sample in samples):
                parts.append(f"{configuration} dropped {dropped} arrivals")
        return "; ".join(parts)


@dataclass(frozen=True)
class Tables:
    """What every row, hypothesis and criterion is made from.

    Attributes:
        study: the study.
        taxes: the samples of its valid cells.
        rates: reference_rates.json.
    """

    study: Study
    taxes: TaxTable
    rates: RatesRecord

    def cell_at(self, reference: Reference) -> str | None:
        """The Phase A cell at `ref_safe` or `ref_load`; None when that rate is not in the grid."""
        names = {cell["rate_rps"]: str(cell["cell"]) for cell in self.study.cells("A")}
        return names.get(self.rates[reference])


# ---- rows


def compared(study: Study, phase: str) -> list[str]:
    """What has taxes: all but the baseline, and the last of the baseline's several launches."""
    baseline = study.plains(phase)[:-1] or study.plains(phase)
    return [name for name in study.configs(phase) if name not in baseline]


def tax_rows(made: Tables) -> list[Row]:
    """A row for each (configuration but the baseline, phase, cell, metric), valid or with a reason.

    Phase A has one over all of its rates without saturation too, the cell ALL_RATES. The A/A row is
    named after the baseline's last launch; there is none where it is launched once.
    """
    rows = []
    for phase in PHASES:
        cells = [str(planned["cell"]) for planned in made.study.cells(phase)]
        for cell in [*cells, ALL_RATES] if phase == "A" and cells else cells:
            for metric in METRICS:
                rows += _family(made, phase, cell, metric)
    plains = (name for phase in PHASES for name in made.study.plains(phase))
    order = {name: i for i, name in enumerate((*made.study.configurations, *plains))}
    return sorted(rows, key=lambda row: order[row["config"]])


def _family(made: Tables, phase: str, cell: str, metric: str) -> list[Row]:
    """The taxes of one cell and metric.

    The configurations are compared with the baseline together, the A/A row alone.
    """
    study, statistics = made.study, made.study.config["statistics"]
    margin = margin_of(statistics["margins"], metric)
    named = [made.cell_at(name) for name in REFERENCES if name in statistics["confirmatory"]]
    confirmatory = phase == "A" and cell in (ALL_RATES, *named)
    here: Row = {
        "quantity": tables.TAX, "phase": phase, "cell": cell, "metric": metric, "unit": "ms",
        "scale": tables.LOG, "margin": margin,
        "family": CONFIRMATORY if confirmatory else EXPLORATORY,
    }  # fmt: skip
    where = {config: (config, phase, cell, metric) for config in compared(study, phase)}
    effects = {config: made.taxes.tax(*at) for config, at in where.items()}
    noise = [config for config in where if configuration_of(config) == study.baseline]
    family = [
        config
        for config, effect in effects.items()
        if effect is not None and effect.p is not None and not effect.mark and config not in noise
    ]
    rows = []
    for config, effect in effects.items():
        row, lost = here | {"config": config}, made.taxes.lost(*where[config])
        if effect is None:
            rows.append(row | {"n_blocks": 0, "n": 0, "n_base": 0} | _worst(lost))
            continue
        base, own, n_base, n = made.taxes.levels_ms(*where[config])
        judged = judge(effect, 1 if config in noise else len(family), margin)
        reason = merged_reasons([(block, reason) for _, block, reason in lost])
        row |= {"base": base, "own": own, "n": n, "n_base": n_base, **judged._asdict()}
        if confirmatory:
            row |= made.taxes.second_opinions(effect, *where[config])
        rows.append(row | _numbers(effect) | {"reason": reason or None})
    return rows


def _numbers(effect: Effect) -> Row:
    lo, hi = effect.ends
    narrow = effect.narrow if effect.repeats else (None, None)
    return {
        "estimate": effect.point, "lo": lo, "hi": hi,
        "narrow_lo": narrow[0], "narrow_hi": narrow[1], "p": effect.p, "df": effect.df,
        "method": effect.method, "n_blocks": effect.n_blocks, "mark": effect.mark,
        "status": "valid",
    }  # fmt: skip


def _worst(lost: Sequence[tuple[str, int, str]]) -> Row:
    """Status and reason of a tax without a number."""
    for status in ("void", "missing", "skipped"):
        reasons = [(block, reason) for how, block, reason in lost if how == status]
        if reasons:
            return {"status": status, "reason": merged_reasons(reasons)}
    raise AssertionError("a tax without a number has a block that lost it")


def gap_rows(made: Tables) -> list[Row]:
    """tax(ref_load) - tax(ref_safe) of each configuration and metric, from Phase A, as fractions.

    Source: design, "Reference rate selection": the non-linear queueing amplification.
    """
    return [
        {"quantity": tables.GAP, "config": config, "phase": "A", "metric": metric,
         "unit": "fraction", "scale": tables.RAW, "n_blocks": 0, **_gap(made, config, metric)}
        for config in compared(made.study, "A")
        for metric in METRICS
    ]  # fmt: skip


def _gap(made: Tables, config: str, metric: str) -> Row:
    safe, load = made.cell_at("ref_safe"), made.cell_at("ref_load")
    if safe is None or load is None:
        return {"status": "missing", "reason": "a reference rate is not a rate of Phase A"}
    if safe == load:
        return {"status": "missing", "reason": SAME_RATES}
    gap = made.taxes.combination(
        [WeightedTax(sign, config, "A", cell, metric) for sign, cell in ((1, load), (-1, safe))]
    )
    if gap is not None:
        at_load, at_safe = gap.taxes
        return {**_numbers(gap), "base": at_safe, "own": at_load}
    lost = [at for cell in (safe, load) for at in made.taxes.lost(config, "A", cell, metric)]
    if lost:
        return _worst(lost)
    why = f"no launch of {made.study.baseline} is valid at both rates in a block"
    return {"status": "missing", "reason": why}

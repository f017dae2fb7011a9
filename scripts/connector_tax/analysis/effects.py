"""Compute effects: taxes (percentiles relative to the baseline) and combinations of taxes.

This module also judges them, and makes the latency rows of effects.csv. A tax is
tax = exp(d) - 1, where d is the mean over blocks of the log of the configuration's percentile minus
the mean log of the block's launches of plain. A tax without a number keeps its row, with status and
reason.

Source: docs/method.md, "The error model" and "Verdicts"; design, "Substrate tax definition" and
"Reference rate selection".
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from connector_tax.analysis.block_model import (
    Floats,
    Launches,
    LaunchId,
    huber,
)
from connector_tax.analysis.effect import Effect, Judged, Levels, family_levels, judge, sidak
from connector_tax.analysis.ingest import merged_reasons
from connector_tax.analysis.measure import Requests
from connector_tax.artifacts import tables
from connector_tax.artifacts.folder import CellFolder
from connector_tax.artifacts.looks import Finding
from connector_tax.artifacts.metrics import (
    ALL_METRICS,
    METRICS,
    THROUGHPUT_METRICS,
    margin_of,
    taxed_metrics,
)
from connector_tax.artifacts.names import (
    ALL_RATES,
    PHASES,
    REFERENCES,
    SAME_RATES,
    CellKey,
    configuration_of,
    no_number,
)
from connector_tax.artifacts.saturation import unsaturated
from connector_tax.artifacts.study_file import Study
from connector_tax.artifacts.study_records import Reference
from connector_tax.artifacts.tables import Row
from connector_tax.artifacts.verdicts import CANNOT_TELL, JUDGED

CONFIRMATORY, EXPLORATORY = "confirmatory", "exploratory"
FEW_REQUESTS = "few requests"
# Columns of a tax that no interim analysis fills.
OF_THE_WHOLE = {"p_adjusted", "huber_differs"}
# Levels of an interim analysis, and of the last planned one.
LookLevels = tuple[Levels, Levels]


# ---- samples


class LogSample(NamedTuple):
    """One percentile (ms) of one launch's cell.

    If the cell was saturated or dropped arrivals, its latencies cover only the served requests.

    Attributes:
        point: the log of the percentile.
        n: the sample size.
        saturated: whether the study's criteria call the cell saturated.
        dropped: measured arrivals dropped by the in-flight cap.
        n_cell: the sample size of its smallest cell; None if it has only one cell.
    """

    point: float
    n: int
    saturated: bool = False
    dropped: int = 0
    n_cell: int | None = None

    @property
    def least(self) -> int:
        """Return the sample size of the smallest cell."""
        return self.n if self.n_cell is None else self.n_cell


Samples = Mapping[CellKey, Mapping[str, LogSample]]


def sample_launch(
    requests: Requests, saturated: bool = False, statistics: Mapping[str, Any] | None = None
) -> dict[str, LogSample]:
    """Return every metric of one valid cell; a throughput as the log of its inverse, since less
    of it is a cost.

    Metrics without data (TPOT of one output token) are left out, and so are zero percentiles (TPOT,
    if many requests' tokens came in one read), which have no logarithm.
    """
    statistics = statistics or {}
    values, throughputs = (
        requests.percentiles_ms,
        requests.throughputs(statistics.get("goodput", {})),
    )
    values = values | {name: 1 / of for name, of in throughputs.items() if of > 0}
    return {
        metric: LogSample(
            float(np.log(value)),
            len(getattr(requests, ALL_METRICS[metric].latency)),
            saturated,
            requests.dropped,
        )
        for metric in taxed_metrics(statistics)
        if (value := values.get(metric, 0)) > 0
    }


# ---- combinations


class WeightedTax(NamedTuple):
    """One term of a linear combination of taxes."""

    weight: float
    config: str
    phase: str
    cell: str
    metric: str


def joined(marks: Iterable[str]) -> str:
    """Join the marks of several taxes, without repeated parts."""
    parts = [part for text in marks for part in text.split("; ") if part]
    return "; ".join(dict.fromkeys(parts))


# ---- the taxes of a study


@dataclass(frozen=True)
class CellTaxes:
    """One metric of a cell's launches, and the taxes between them.

    Attributes:
        samples: the samples by launch.
        plains: the baseline's launches in each block of the phase.
        confidence: confidence of the intervals.
        needed: requests per cell below which its percentile gets no verdict.
        borrow: whether configurations inform each other's noise.
    """

    samples: Mapping[LaunchId, LogSample]
    plains: Sequence[str]
    confidence: float
    needed: int
    borrow: bool = True

    @cached_property
    def launches(self) -> Launches:
        """Return the logs of the samples."""
        points = {launch: sample.point for launch, sample in self.samples.items()}
        return Launches.of(points, borrow=self.borrow)

    def judged(self, config: str) -> bool:
        """Return whether a configuration's tax has a standard error and no mark."""
        launches, blocks = self.launches, self.launches.blocks(config, self.plains)
        return launches.repeats(blocks) and not self.mark(
            launches, launches.weights(config, self.plains, blocks)
        )

    def tax(self, config: str, levels: Levels | None = None) -> Effect | None:
        """Return the tax and its interval, from the log ratio; None without a shared block.

        The tax of a launch of plain is relative to the block's other launches of plain.

        Args:
            levels: confidence levels of the verdict. With None, a single comparison is judged.
        """
        launches = self.launches
        if (tax := launches.contrast(config, self.plains, self.confidence, levels)) is None:
            return None
        weights = launches.weights(config, self.plains, tax.blocks)
        return replace(tax, mark=self.mark(launches, weights))

    def huber_differs(
        self, config: str, judged: Judged, levels: Levels, margin: float
    ) -> bool | None:
        """Return whether Huber's estimate gives another verdict at the same levels.

        None if the tax has no verdict on its size, or there is no such estimate.
        """
        other = huber(self.launches, config, self.plains)
        if judged.verdict not in JUDGED or not other:
            return None
        return judge(other, margin, levels).verdict != judged.verdict

    def levels(self, config: str) -> Row:
        """Return the levels of plain and of the configuration over the tax's blocks, with sample
        sizes.

        Levels are geometric means in ms, also over a block's launches of plain. `n_cell` holds the
        smallest number of requests in a cell of either. The tax must have a number.
        """
        launches = self.launches
        weights = launches.weights(config, self.plains, launches.blocks(config, self.plains))
        base, level = map(float, np.exp(launches.levels(weights)))
        n_base, n = (
            sum(self.samples[launch].n for launch in launches.only(side).ids)
            for side in (weights < 0, weights > 0)
        )
        n_cell = min(self.samples[launch].least for launch in launches.only(weights != 0).ids)
        return {"base": base, "own": level, "n": n, "n_base": n_base, "n_cell": n_cell}

    def mark(self, launches: Launches, weights: Floats) -> str:
        """Return the problems of the cells behind a tax, by configuration.

        For example `mooncake_both saturated; plain dropped 65 arrivals; few requests`; "" for none.
        """
        samples_of: dict[str, list[LogSample]] = {}
        for side in (weights > 0, weights < 0):
            for launch in launches.only(side).ids:
                samples_of.setdefault(configuration_of(launch.name), []).append(
                    self.samples[launch]
                )
        parts = []
        for configuration, samples in samples_of.items():
            if any(sample.saturated for sample in samples):
                parts.append(f"{configuration} saturated")
            if dropped := sum(sample.dropped for sample in samples):
                parts.append(f"{configuration} dropped {dropped} arrivals")
        if any(sample.least < self.needed for of in samples_of.values() for sample in of):
            parts.append(FEW_REQUESTS)
        return "; ".join(parts)


class TaxTable:
    """The samples of every valid cell of a study, and the effects computed from them.

    Args:
        cells: the study's planned cells, for the reasons of missing samples.
        samples: `sample_launch` of each valid cell.
        blocks: number of first blocks to use; None for all.

    Attributes:
        metrics: the metrics that have taxes in this study.
        rates: the Phase A cells that the cell ALL_RATES averages, for each launch.
    """

    def __init__(
        self,
        study: Study,
        cells: Sequence[CellFolder],
        samples: Samples,
        references: Mapping[Reference, float],
        blocks: int | None = None,
    ) -> None:
        self.study, self._references = study, references
        self._confidence = study.config["statistics"]["confidence"]
        self._cells = {cell.key: cell for cell in cells}
        self._blocks = range(study.document["blocks"] if blocks is None else blocks)
        self._plains = {phase: study.plains(phase) for phase in study.document["run_order"]}
        by_cell: dict[tuple[str, str, str], dict[LaunchId, LogSample]] = {}
        for key, metrics in samples.items():
            for metric, sample in metrics.items():
                if key.block in self._blocks:
                    cell_samples = by_cell.setdefault((key.phase, key.cell, metric), {})
                    cell_samples[LaunchId(key.config, key.block)] = sample
        overloaded = [
            (key.config, key.cell)
            for key, metrics in samples.items()
            if key.phase == "A" and key.block in self._blocks
            if any(sample.saturated or sample.dropped for sample in metrics.values())
        ]
        rates = {cell["cell"]: cell["rate_rps"] for cell in study.cells("A")}
        self.rates = unsaturated(rates, overloaded)
        self.metrics = taxed_metrics(study.config["statistics"])
        for metric in self.metrics:
            of = [by_cell.get(("A", cell, metric), {}) for cell in self.rates]
            by_cell["A", ALL_RATES, metric] = {
                launch: _over_rates([launches[launch] for launches in of])
                for launch in (of[0] if of else ())
                if all(launch in launches for launches in of)
            }
        self._at = {where: self._cell_taxes(where, launches) for where, launches in by_cell.items()}

    def _cell_taxes(
        self, where: tuple[str, str, str], samples: Mapping[LaunchId, LogSample]
    ) -> CellTaxes:
        phase, _, metric = where
        needed = ALL_METRICS[metric].least
        return CellTaxes(samples, self._plains[phase], self._confidence, needed, self.study.borrows)

    def cell_at(self, reference: Reference) -> str | None:
        """Return the Phase A cell at `ref_safe` or `ref_load`; None if that rate is not in the
        grid.
        """
        names = {cell["rate_rps"]: cell["cell"] for cell in self.study.cells("A")}
        return names.get(self._references.get(reference, -1.0))

    def at(self, phase: str, cell: str, metric: str) -> CellTaxes:
        """Return the samples of a cell in a metric."""
        where = phase, cell, metric
        return self._at.get(where) or self._cell_taxes(where, {})

    def tax(self, config: str, phase: str, cell: str, metric: str) -> Effect | None:
        """Return the tax of a configuration in one metric of a cell (see `CellTaxes.tax`)."""
        return self.at(phase, cell, metric).tax(config)

    def combination(
        self, terms: Sequence[WeightedTax], confidence: float | None = None
    ) -> Effect | None:
        """Return a linear combination of taxes over the blocks that all of them have, if any.

        It combines several configurations in one cell, or one configuration in several cells of a
        phase; the latter uses the launches that have all of these cells.
        """
        of = {term[2:]: self.at(*term[2:]) for term in terms}
        assert len(of) == 1 or len({term.config for term in terms}) == 1
        parts = {
            where: cell.launches.only(np.array(
                [all(launch in other.samples for other in of.values()) for launch in cell.samples],
                bool,
            ))
            for where, cell in of.items()
        }  # fmt: skip
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
            marks.append(of[term[2:]].mark(launches, weights))
        if len(of) > 1:
            # One configuration: combine the values of each launch, then compare once.
            first, linear = replace(first, y=y), weights
        level = self._confidence if confidence is None else confidence
        effect = replace(first, scale=tables.RAW).effect(linear, blocks, level)
        return replace(effect, mark=joined(marks), taxes=tuple(taxes), combined=point)

    def missing_blocks(
        self, config: str, phase: str, cell: str, metric: str
    ) -> list[tuple[str, int, str]]:
        """Return (status, block, reason) of every block without a number for the tax, in order."""
        known, baseline = self.at(phase, cell, metric).samples, self.study.baseline
        plains = [name for name in self._plains[phase] if name != config]
        reasons: list[tuple[str, int, str]] = []
        for block in self._blocks:
            if LaunchId(config, block) not in known:
                reasons.append(self._why_missing(config, block, phase, cell, metric))
            elif not any(LaunchId(name, block) in known for name in plains):
                status, _, reason = self._why_missing(baseline, block, phase, cell, metric)
                reasons.append((status, block, f"{baseline}: {reason}"))
        return reasons

    def _why_missing(
        self, config: str, block: int, phase: str, cell: str, metric: str
    ) -> tuple[str, int, str]:
        if cell == ALL_RATES:
            launch = LaunchId(config, block)
            for rate in self.rates:
                if launch not in self.at(phase, rate, metric).samples:
                    return self._why_missing(config, block, phase, rate, metric)
            return "missing", block, "no rate of Phase A is without saturation"
        state = self._cells.get(CellKey(config, block, phase, cell))
        if state is None:
            return "missing", block, "the launch is not part of the design"
        if state.status == "valid":
            return "missing", block, no_number(metric, state.output_tokens)
        if state.status == "failed":
            return "missing", block, f"the launch failed: {state.reason}"
        return state.status, block, str(state.reason)


def _over_rates(samples: Sequence[LogSample]) -> LogSample:
    """Return a launch's mean sample over several rates."""
    return LogSample(
        sum(sample.point for sample in samples) / len(samples),
        sum(sample.n for sample in samples),
        any(sample.saturated for sample in samples),
        sum(sample.dropped for sample in samples),
        min(sample.least for sample in samples),
    )


# ---- rows


def compared(study: Study, phase: str) -> list[str]:
    """Return the compared names: all configurations, and of the baseline only its last launch."""
    baseline = study.plains(phase)[:-1] or study.plains(phase)
    return [name for name in study.configs(phase) if name not in baseline]


def tax_rows(taxes: TaxTable, findings: Sequence[Finding] = ()) -> list[Row]:
    """Return a row for each configuration (except the baseline), phase, cell and metric, valid or
    not.

    Phase A also has the cell ALL_RATES, the mean over its rates without saturation. The A/A row is
    named after the baseline's last launch; it is missing if the baseline has one launch per block.

    Args:
        findings: results of the last interim analysis, which replace the numbers over all rates.
    """
    rows = []
    for phase in PHASES:
        cells = [str(planned["cell"]) for planned in taxes.study.cells(phase)]
        for cell in [*cells, ALL_RATES] if phase == "A" and cells else cells:
            for metric in taxes.metrics:
                rows += family_rows(taxes, phase, cell, metric)
    finding_of = {(finding.config, finding.metric): finding for finding in findings}
    for row in rows:
        if row["cell"] == ALL_RATES and (one := finding_of.get((row["config"], row["metric"]))):
            row |= dict.fromkeys(row.keys() & OF_THE_WHOLE) | asdict(one)
    plains = (name for phase in PHASES for name in taxes.study.plains(phase))
    order = {name: i for i, name in enumerate((*taxes.study.configurations, *plains))}
    return sorted(rows, key=lambda row: order[row["config"]])


def family_rows(
    taxes: TaxTable, phase: str, cell: str, metric: str, look: LookLevels | None = None
) -> list[Row]:
    """Return the tax rows of one cell and metric.

    The configurations are one family of comparisons with the baseline; the A/A row is judged alone.

    Args:
        look: levels of an interim analysis, which judges from two blocks on.
    """
    study, statistics = taxes.study, taxes.study.config["statistics"]
    margin = margin_of(statistics["margins"], metric)
    named = [taxes.cell_at(name) for name in REFERENCES if name in statistics["confirmatory"]]
    confirmatory = phase == "A" and cell in (ALL_RATES, *named)
    here: Row = {
        "quantity": tables.TAX, "phase": phase, "cell": cell, "metric": metric,
        "unit": ALL_METRICS[metric].unit,
        "scale": tables.LOG, "margin": margin,
        "family": CONFIRMATORY if confirmatory else EXPLORATORY,
    }  # fmt: skip
    at = taxes.at(phase, cell, metric)
    names = compared(study, phase)
    noise = [config for config in names if configuration_of(config) == study.baseline]
    family = [config for config in names if config not in noise and at.judged(config)]
    rows = []
    for config in names:
        size = len(family) if config in family else 1
        levels = family_levels(statistics["confidence"], size) if look is None else look[0]
        effect = at.tax(config, levels)
        row = here | {"config": config}
        missing = taxes.missing_blocks(config, phase, cell, metric)
        if effect is None:
            rows.append(row | {"n_blocks": 0, "n": 0, "n_base": 0} | _worst(missing))
            continue
        reason = merged_reasons([(block, reason) for _, block, reason in missing])
        row |= effect.columns() | {"mark": effect.mark, "status": "valid"} | at.levels(config)
        if metric in THROUGHPUT_METRICS:
            row |= {"base": 1 / row["base"], "own": 1 / row["own"]}
        if look is not None:
            judged, planned = judge(effect, margin, levels, fewest=2), look[1]
        else:
            judged, planned = judge(effect, margin, levels), levels
            p = None if effect.mark or effect.p is None else sidak(effect.p, size)
            row |= {"p_adjusted": p}
            if confirmatory and effect.repeats:
                row["huber_differs"] = at.huber_differs(config, judged, levels, margin)
        row |= judged._asdict() | {"reason": reason or None}
        if judged.verdict == CANNOT_TELL:
            row["blocks_needed"] = effect.blocks_needed(margin, planned)
        rows.append(row)
    return rows


def _worst(missing: Sequence[tuple[str, int, str]]) -> Row:
    """Return status and reason of a tax without a number."""
    for status in ("void", "missing", "skipped"):
        reasons = [(block, reason) for how, block, reason in missing if how == status]
        if reasons:
            return {"status": status, "reason": merged_reasons(reasons)}
    raise AssertionError("a tax without a number must have a block without a value")


def gap_rows(taxes: TaxTable) -> list[Row]:
    """Return tax(ref_load) - tax(ref_safe) of each configuration and metric, from Phase A, in
    fractions.

    Source: design, "Reference rate selection": the non-linear queueing amplification.
    """
    return [
        {"quantity": tables.GAP, "config": config, "phase": "A", "metric": metric,
         "unit": "fraction", "scale": tables.RAW, "n_blocks": 0, **_gap(taxes, config, metric)}
        for config in compared(taxes.study, "A")
        for metric in METRICS
    ]  # fmt: skip


def _gap(taxes: TaxTable, config: str, metric: str) -> Row:
    safe, load = taxes.cell_at("ref_safe"), taxes.cell_at("ref_load")
    if safe is None or load is None:
        return {"status": "missing", "reason": "a reference rate is not a rate of Phase A"}
    if safe == load:
        return {"status": "missing", "reason": SAME_RATES}
    gap = taxes.combination(
        [WeightedTax(sign, config, "A", cell, metric) for sign, cell in ((1, load), (-1, safe))]
    )
    if gap is not None:
        at_load, at_safe = gap.taxes
        narrow = gap.narrow(2 * gap.confidence - 1) if gap.repeats else (None, None)
        return gap.columns() | {
            "narrow_lo": narrow[0], "narrow_hi": narrow[1], "mark": gap.mark, "status": "valid",
            "base": at_safe, "own": at_load,
        }  # fmt: skip
    missing = [
        at for cell in (safe, load) for at in taxes.missing_blocks(config, "A", cell, metric)
    ]
    if missing:
        return _worst(missing)
    why = f"no launch of {taxes.study.baseline} is valid at both rates in a block"
    return {"status": "missing", "reason": why}

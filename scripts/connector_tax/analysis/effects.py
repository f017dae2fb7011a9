"""Effects: percentiles of a configuration over the baseline's, and combinations of such taxes, with
intervals.

Source: docs/method.md, "The error model". tax = exp(d) - 1, d the mean over blocks of the log of
the configuration's percentile minus the mean log of the block's launches of plain. The interval is
that of the block model, or of the within-launch bootstrap where that is wider.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from connector_tax.analysis.block_model import Estimate, LaunchId, Term
from connector_tax.analysis.bootstrap import Floats, bootstrap_p
from connector_tax.analysis.device_model import over_devices, same_p
from connector_tax.analysis.devices import block_devices
from connector_tax.analysis.ingest import Cell
from connector_tax.analysis.overload import Overload, joined, mark
from connector_tax.analysis.quantities import (
    Part,
    Quantity,
    common_blocks,
    linear_form,
    mean_point,
)
from connector_tax.analysis.samples import LogSample, Where
from connector_tax.artifacts.names import CellKey, no_number
from connector_tax.artifacts.study_file import Study

MIN_BLOCKS_FOR_VERDICT = 3
ONE_LAUNCH = "one launch; launches not included"
BOOTSTRAP = "within-launch bootstrap"


class WeightedTax(NamedTuple):
    """One tax in a linear combination of taxes."""

    weight: float
    config: str
    phase: str
    cell: str
    metric: str


class Interval(NamedTuple):
    """An interval and how it was made; None where a single block repeats nothing.

    Attributes:
        df: degrees of freedom behind the block model's error.
        p: two-sided p-value of "the effect is zero".
        bootstrap_p: the within-launch bootstrap's, which `p` is at least.
    """

    lo: float | None
    hi: float | None
    method: str
    df: float | None
    p: float | None
    bootstrap_p: float | None


@dataclass(frozen=True)
class Effect:
    """An estimate in fractions (0.45 is +45%) with its interval; None bounds: unknown.

    Attributes:
        estimate: the contrast of logs behind it.
        added_df: degrees of freedom that one more block would bring.
        mark: why it gets no verdict; "" where nothing was saturated or dropped.
        differ: whether it differs from device to device, significantly and by more than the
            margin; a combination does where one of its taxes does.
    """

    point: float
    interval: Interval
    estimate: Estimate
    added_df: int
    mark: str
    differ: bool = False

    @property
    def n_blocks(self) -> int:
        """The blocks it is formed in."""
        return len(self.estimate.blocks)

    @property
    def lo(self) -> float:
        """Lower bound; minus infinity when unknown."""
        return -np.inf if self.interval.lo is None else self.interval.lo

    @property
    def hi(self) -> float:
        """Upper bound; infinity when unknown."""
        return np.inf if self.interval.hi is None else self.interval.hi

    @property
    def decides(self) -> bool:
        """Whether there are enough blocks for a verdict."""
        return self.n_blocks >= MIN_BLOCKS_FOR_VERDICT


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
        samples: Mapping[CellKey, dict[str, LogSample]],
        overloads: Mapping[CellKey, Overload],
    ) -> None:
        self._statistics = study.config["statistics"]
        self._confidence = self._statistics["confidence"]
        self._cells = {cell.key: cell for cell in cells}
        self.device_of = block_devices(cells)
        self._samples = samples
        self._overloads = overloads
        self._blocks = range(study.document["blocks"])
        self._baseline = study.baseline
        self._plains = {phase: study.plains(phase) for phase in study.document["run_order"]}
        self._quantities: dict[tuple[str, str, str], Quantity] = {}
        self._ahead: int | None = None

    def with_blocks(self, blocks: int) -> "TaxTable":
        """The same points, with the block model's intervals as so many blocks would have them."""
        table = copy.copy(self)
        table._ahead = blocks
        return table

    def tax(self, config: str, phase: str, cell: str, metric: str) -> Effect | None:
        """The tax with its interval, both formed on the log ratio; None without a shared block.

        The tax of a launch of plain is against the block's other launches of plain.
        """
        quantity, term = self._quantity(phase, cell, metric), self._unit(config, phase)
        effect = self._tax(quantity, term, (phase, cell), over_devices(quantity.layout, [term]))
        if effect is None:
            return None
        return replace(effect, differ=self.device_test(config, phase, cell, metric)[1])

    def device_test(
        self, config: str, phase: str, cell: str, metric: str
    ) -> tuple[float | None, bool]:
        """p of one tax on all devices; whether they differ, surely and by more than the margin."""
        if not self.device_of:
            return None, False
        layout, term = self._quantity(phase, cell, metric).layout, self._unit(config, phase)
        on_each = [layout.estimate([term], device) for device in layout.devices]
        known = [estimate for estimate in on_each if estimate is not None]
        p = same_p(known)
        if p is None or p >= 1 - self._confidence:
            return p, False
        apart = float(np.ptp(np.expm1([estimate.point for estimate in known])))
        return p, apart > self._statistics["margins"][metric]

    def tax_on(self, device: str, config: str, phase: str, cell: str, metric: str) -> Effect | None:
        """The tax on one of several devices, with the error of all launches; None without one."""
        quantity, term = self._quantity(phase, cell, metric), self._unit(config, phase)
        return self._tax(quantity, term, (phase, cell), quantity.layout.estimate([term], device))

    def _tax(
        self, quantity: Quantity, term: Term, where: Where, estimate: Estimate | None
    ) -> Effect | None:
        if estimate is None:
            return None
        blocks, (phase, cell) = estimate.blocks, where
        replicates = estimate.point + quantity.deviations(term, blocks)
        added_df = len(quantity.layout.pooled_launches) - 1
        interval = self._interval(estimate.point, estimate, added_df, replicates, self._confidence)
        bounds = [None if b is None else float(np.expm1(b)) for b in (interval.lo, interval.hi)]
        return Effect(
            float(np.expm1(estimate.point)),
            interval._replace(lo=bounds[0], hi=bounds[1]),
            estimate,
            added_df,
            self._mark([(quantity, term, cell)], phase, blocks),
        )

    def combination(
        self, terms: Sequence[WeightedTax], confidence: float | None = None
    ) -> Effect | None:
        """A linear combination of taxes, over the blocks all of them have; None without any.

        Of several configurations in one cell, or of one configuration in several cells of a phase:
        then over the launches that have all of these cells.

        Raises:
            ValueError: the taxes are of several configurations in several cells.
        """
        parts = self._parts(terms)
        blocks = common_blocks(parts)
        if not blocks:
            return None
        point, forms = 0.0, []
        replicates: Floats = np.zeros(1)
        for (weight, *_), (quantity, unit, _) in zip(terms, parts, strict=True):
            d = quantity.contrast(unit, blocks)
            point += weight * float(np.expm1(d))
            replicates = replicates + weight * np.expm1(d + quantity.deviations(unit, blocks))
            forms.append(weight * float(np.exp(d)))
        layout, linear = linear_form(parts, forms)
        estimate = over_devices(layout, linear)
        assert estimate is not None
        level = self._confidence if confidence is None else confidence
        taxes = [self.tax(*term[1:]) for term in terms] if self.device_of else []
        added_df = len(layout.pooled_launches) - 1
        return Effect(
            point,
            self._interval(point, estimate, added_df, replicates, level),
            estimate,
            added_df,
            self._mark(parts, terms[0].phase, blocks),
            differ=any(effect.differ for effect in taxes if effect is not None),
        )

    def points(self, terms: Sequence[WeightedTax]) -> list[float]:
        """The taxes of a combination, their weights aside, over its blocks."""
        parts = self._parts(terms)
        blocks = common_blocks(parts)
        return [float(np.expm1(quantity.contrast(unit, blocks))) for quantity, unit, _ in parts]

    def sample_sizes(self, config: str, phase: str, cell: str, metric: str) -> tuple[int, int]:
        """Requests behind the tax over its blocks: the configuration's and plain's."""
        quantity, term = self._quantity(phase, cell, metric), self._unit(config, phase)
        pairs = [quantity.launches(term, block) for block in quantity.layout.blocks([term])]
        return (
            sum(quantity.samples[ours].n for ours, _ in pairs),
            sum(quantity.samples[launch].n for _, base in pairs for launch in base),
        )

    def levels_ms(self, config: str, phase: str, cell: str, metric: str) -> tuple[float, float]:
        """(plain_ms, config_ms): geometric means over the tax's blocks, of plain's launches too."""
        quantity, term = self._quantity(phase, cell, metric), self._unit(config, phase)
        pairs = [quantity.launches(term, block) for block in quantity.layout.blocks([term])]
        ours = np.mean([quantity.samples[launch].point for launch, _ in pairs])
        plain = np.mean([mean_point(quantity, base) for _, base in pairs])
        return float(np.exp(plain)), float(np.exp(ours))

    def plain_ms(self, phase: str, cell: str, metric: str) -> float | None:
        """Plain's geometric mean over all blocks in which one of its launches is valid."""
        quantity = self._quantity(phase, cell, metric)
        term = Term(1.0, self._baseline, tuple(self._plains[phase]))
        blocks = [base for block in self._blocks if (base := quantity.launches(term, block)[1])]
        if not blocks:
            return None
        return float(np.exp(np.mean([mean_point(quantity, base) for base in blocks])))

    def lost(self, config: str, phase: str, cell: str, metric: str) -> list[tuple[str, int, str]]:
        """(status, block, reason) of every block in which the tax has no number, in block order."""
        quantity, term = self._quantity(phase, cell, metric), self._unit(config, phase)
        reasons: list[tuple[str, int, str]] = []
        for block in self._blocks:
            ours, base = quantity.launches(term, block)
            if ours not in quantity.samples:
                status, reason = self._why_lost(config, block, phase, cell, metric)
            elif not base:
                status, reason = self._why_lost(self._baseline, block, phase, cell, metric)
                reason = f"{self._baseline}: {reason}"
            else:
                continue
            reasons.append((status, block, reason))
        return reasons

    def _why_lost(
        self, config: str, block: int, phase: str, cell: str, metric: str
    ) -> tuple[str, str]:
        state = self._cells.get(CellKey(config, block, phase, cell))
        if state is None:
            return "missing", "the launch is not part of the design"
        if state.status == "valid":
            return "missing", no_number(metric, state.output_tokens)
        if state.status == "failed":
            return "missing", f"the launch failed: {state.reason}"
        return state.status, str(state.reason)

    def _unit(self, config: str, phase: str) -> Term:
        return Term(1.0, config, tuple(name for name in self._plains[phase] if name != config))

    def _quantity(self, phase: str, cell: str, metric: str) -> Quantity:
        where = (phase, cell, metric)
        if where not in self._quantities:
            self._quantities[where] = Quantity(
                {
                    LaunchId(key.config, key.block): metrics[metric]
                    for key, metrics in self._samples.items()
                    if (key.phase, key.cell) == (phase, cell)
                    and key.block in self._blocks
                    and metric in metrics
                },
                self.device_of,
            )
        return self._quantities[where]

    def _parts(self, terms: Sequence[WeightedTax]) -> list[Part]:
        """Each tax's quantity, over the launches that have all of them, and its unit contrast."""
        quantities = [self._quantity(term.phase, term.cell, term.metric) for term in terms]
        shared = set.intersection(*(set(quantity.samples) for quantity in quantities))
        if any(len(quantity.samples) > len(shared) for quantity in quantities):
            quantities = [
                Quantity({k: q.samples[k] for k in sorted(shared)}, self.device_of)
                for q in quantities
            ]
        return [
            (quantity, self._unit(term.config, term.phase), term.cell)
            for quantity, term in zip(quantities, terms, strict=True)
        ]

    def _interval(
        self,
        point: float,
        estimate: Estimate,
        added_df: int,
        replicates: Floats,
        confidence: float,
    ) -> Interval:
        if self._ahead is None or estimate.error is None:
            return _interval(point, estimate, replicates, confidence)
        later = estimate.with_blocks(added_df, self._ahead)
        half = later.half_width(confidence)
        assert half is not None
        return Interval(point - half, point + half, _method(later), later.df, later.p, None)

    def _mark(self, parts: Sequence[Part], phase: str, blocks: Sequence[int]) -> str:
        marks = []
        for quantity, term, cell in parts:
            pairs = [quantity.launches(term, block) for block in blocks]
            launches = [ours for ours, _ in pairs] + [name for _, base in pairs for name in base]
            keys = [CellKey(launch.name, launch.block, phase, cell) for launch in launches]
            marks.append(mark(self._overloads[key] for key in keys if key in self._overloads))
        return joined(marks)


def _interval(point: float, estimate: Estimate, replicates: Floats, confidence: float) -> Interval:
    """The wider of the block model's interval about `point` and the bootstrap's."""
    half = estimate.half_width(confidence)
    if len(estimate.blocks) < 2 or half is None or estimate.p is None:
        return Interval(None, None, ONE_LAUNCH, None, None, None)
    tail = (1 - confidence) / 2
    lo, hi = (float(q) for q in np.quantile(replicates, [tail, 1 - tail]))
    method = BOOTSTRAP
    if 2 * half >= hi - lo:
        lo, hi, method = point - half, point + half, _method(estimate)
    within = bootstrap_p(replicates)
    return Interval(lo, hi, method, estimate.df, max(estimate.p, within), within)


def _method(estimate: Estimate) -> str:
    if estimate.spread is None:
        df = f"{estimate.df:.1f}" if estimate.devices else estimate.df
        return f"{estimate.source} (df {df})"
    spread = f"spread F {estimate.spread.f_ratio:.1f}, p {estimate.spread.p:.3f}"
    return f"{estimate.source} (df {estimate.df:.1f}; {spread})"

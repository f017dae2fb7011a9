"""Rows of effects.csv about latencies: every tax with its verdict, and what queueing adds to it.

Source: design, "Substrate tax definition" and "Reference rate selection"; docs/method.md. A tax
that has no number keeps its row, with the status and the reason.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from connector_tax.analysis.effects import Effect, TaxTable, WeightedTax, judge
from connector_tax.analysis.ingest import merged_reasons
from connector_tax.artifacts import tables
from connector_tax.artifacts.metrics import METRICS, margin_of
from connector_tax.artifacts.names import (
    ALL_RATES,
    PHASES,
    REFERENCES,
    SAME_RATES,
    configuration_of,
)
from connector_tax.artifacts.rates import cell_rates, shape_limits
from connector_tax.artifacts.stage_records import RatesRecord
from connector_tax.artifacts.study_file import Study
from connector_tax.artifacts.study_records import CellPlan, Reference
from connector_tax.artifacts.tables import Row

CONFIRMATORY, EXPLORATORY = "confirmatory", "exploratory"


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

    def where(self, phase: str, planned: CellPlan) -> Row:
        """The columns of a cell, with the reference rate it stands for; ref_safe where both."""
        if phase == "A":
            rate = planned["rate_rps"]
            name = next((name for name in REFERENCES if self.rates[name] == rate), "")
        else:
            reference: Reference = "ref_safe" if phase == "B" else "ref_load"
            name = reference
            rate = cell_rates(self.study.document, phase, self.rates[reference], self._limits)[
                planned["cell"]
            ]
        return {"phase": phase, "cell": planned["cell"], "rate_rps": rate, "reference": name}

    @cached_property
    def _limits(self) -> dict[str, float]:
        """The most requests/s of each shape, of B and B'."""
        return shape_limits(self.study.document, self.study.root, "B")


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
        places = [made.where(phase, planned) for planned in made.study.cells(phase)]
        if phase == "A" and places:
            places.append({"phase": "A", "cell": ALL_RATES, "reference": ALL_RATES})
        for here in places:
            for metric in METRICS:
                rows += _family(made, here, metric)
    plains = (name for phase in PHASES for name in made.study.plains(phase))
    order = {name: i for i, name in enumerate((*made.study.configurations, *plains))}
    return sorted(rows, key=lambda row: (row["quantity"], order[row["config"]]))


def _family(made: Tables, place: Row, metric: str) -> list[Row]:
    """The taxes of one cell and metric.

    The configurations are compared with the baseline together, the A/A row alone.
    """
    study, phase = made.study, place["phase"]
    margin = margin_of(study.config["statistics"]["margins"], metric)
    named = {*study.config["statistics"]["confirmatory"], ALL_RATES}
    rates = {made.rates[name] for name in REFERENCES if name in named}
    confirmatory = phase == "A" and (place["cell"] == ALL_RATES or place["rate_rps"] in rates)
    here = place | {"metric": metric, "scale": tables.LOG, "margin": margin}
    here["family"] = CONFIRMATORY if confirmatory else EXPLORATORY
    where = {config: (config, phase, place["cell"], metric) for config in compared(study, phase)}
    effects = {config: made.taxes.tax(*at) for config, at in where.items()}
    noise = [config for config in where if configuration_of(config) == study.baseline]
    family = [
        config
        for config, effect in effects.items()
        if effect is not None and effect.p is not None and not effect.mark and config not in noise
    ]
    rows = []
    for config, effect in effects.items():
        lost = made.taxes.lost(*where[config])
        row = {**here, "quantity": tables.TAX, "config": config, "unit": "ms"}
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
    terms = [
        WeightedTax(1, config, "A", load, metric),
        WeightedTax(-1, config, "A", safe, metric),
    ]
    gap = made.taxes.combination(terms)
    if gap is not None:
        at_load, at_safe = gap.taxes
        return {**_numbers(gap), "base": at_safe, "own": at_load}
    lost = [at for cell in (safe, load) for at in made.taxes.lost(config, "A", cell, metric)]
    if lost:
        return _worst(lost)
    why = f"no launch of {made.study.baseline} is valid at both rates in a block"
    return {"status": "missing", "reason": why}

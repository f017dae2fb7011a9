"""The tax table: every tax with its verdict, its A/A noise floor and its absolute size.

Source: design, "Substrate tax definition"; docs/method.md. A tax that has no number keeps its row,
with the status and the reason.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from connector_tax.analysis.block_model import Estimate
from connector_tax.analysis.blocks_needed import blocks_needed
from connector_tax.analysis.devices import devices_text
from connector_tax.analysis.effects import Effect, TaxTable, WeightedTax
from connector_tax.analysis.ingest import merged_reasons
from connector_tax.analysis.multiplicity import dunnett_p, sidak
from connector_tax.analysis.samples import METRICS
from connector_tax.artifacts import paths
from connector_tax.artifacts.names import (
    DEVICES_DIFFER,
    INCONCLUSIVE,
    MARKED,
    NO_TAX,
    PHASES,
    POINT_ESTIMATE,
    REFERENCES,
    SAME_RATES,
    TAX,
    configuration_of,
)
from connector_tax.artifacts.rates import cell_rates, shape_limits
from connector_tax.artifacts.stage_records import RatesRecord
from connector_tax.artifacts.study_file import Study
from connector_tax.artifacts.study_records import CellPlan, Reference
from connector_tax.artifacts.tables import DEVICE_COLUMNS, Row, empty_row

CONFIRMATORY, EXPLORATORY = "confirmatory", "exploratory"
NUMBERS = ("tax", "tax_lo", "tax_hi", "abs_ms", "abs_lo_ms", "abs_hi_ms", "plain_ms", "config_ms")
# The tax with nothing left out, whatever the rule of quiet time says.
WITHOUT_RULE = ("tax_all", "tax_all_lo", "tax_all_hi")
# taxes.csv's columns for the step taxes of the same cell, by step_taxes.csv's metric.
STEP_NUMBERS = {
    "tax_step_p50": "step_tax_us",
    "tax_engine_step_p50": "engine_step_tax_us",
    "tax_callback_p50": "callback_us",
    "unattributed": "unattributed_us",
}


@dataclass(frozen=True)
class Tables:
    """What every row, hypothesis and criterion is made from.

    Attributes:
        study: the study.
        taxes: the samples of its valid cells.
        rates: reference_rates.json.
        step_taxes: (config, phase, cell) to its step taxes in us, by metric.
        whole: `taxes` with nothing left out; None where no cell's machine was watched.
    """

    study: Study
    taxes: TaxTable
    rates: RatesRecord
    step_taxes: Mapping[tuple[str, str, str], Mapping[str, float]]
    whole: TaxTable | None = None

    def cell_at(self, reference: Reference) -> str | None:
        """The Phase A cell at `ref_safe` or `ref_load`; None when that rate is not in the grid."""
        names = {cell["rate_rps"]: str(cell["cell"]) for cell in self.study.cells("A")}
        return names.get(self.rates[reference])

    def reference_of(self, phase: str, planned: CellPlan) -> tuple[str, float | None]:
        """Which reference rate a cell stands for, and its rate; ref_safe where both are one."""
        if phase == "A":
            rate = planned["rate_rps"]
            names = [name for name in REFERENCES if self.rates[name] == rate]
            return (names[0] if names else ""), rate
        name: Reference = "ref_safe" if phase == "B" else "ref_load"
        rates = cell_rates(self.study.document, phase, self.rates[name], self._limits)
        return name, rates[planned["cell"]]

    @cached_property
    def _limits(self) -> dict[str, float]:
        """The most requests/s of each shape, of B and B'."""
        return shape_limits(self.study.document, self.study.root, "B")


def verdict(effect: Effect, p_adjusted: float | None, margin: float, confidence: float) -> str:
    """TAX, NO TAX, INCONCLUSIVE, or why there is no verdict (docs/method.md, "Verdicts").

    NO TAX: the interval lies within +-margin, even where it excludes zero. TAX: positive and
    significant after Dunnett's adjustment. A configuration that is significantly faster than plain
    is INCONCLUSIVE: a negative tax points at a confound, not at a cost. Where devices differ no tax
    is that of all.
    """
    if effect.mark:
        return MARKED
    if not effect.decides or p_adjusted is None:
        return POINT_ESTIMATE
    if effect.differ:
        return DEVICES_DIFFER
    if -margin < effect.lo and effect.hi < margin:
        return NO_TAX
    if p_adjusted < 1 - confidence and effect.point > 0 and effect.lo > 0:
        return TAX
    return INCONCLUSIVE


def tax_rows(tables: Tables) -> list[Row]:
    """A row for each (configuration but the baseline, phase, cell, metric), valid or with a reason.

    The A/A row is named after the baseline's last launch; there is none where it is launched once.
    """
    study = tables.study
    rows = []
    for phase in PHASES:
        configs = _compared(study, phase)
        for planned in study.cells(phase):
            for metric in METRICS:
                where = [(config, phase, planned["cell"], metric) for config in configs]
                effects = [tables.taxes.tax(*w) for w in where]
                rows_here = [
                    _tax_row(tables, planned, w, effect)
                    for w, effect in zip(where, effects, strict=True)
                ]
                _judge(rows_here, effects, study)
                rows += rows_here
    names = (*study.configurations, *(name for phase in PHASES for name in study.plains(phase)[1:]))
    order = {name: i for i, name in enumerate(dict.fromkeys(names))}
    return sorted(rows, key=lambda row: order[row["config"]])


def _compared(study: Study, phase: str) -> list[str]:
    """What has taxes: all but the baseline, and the last of the baseline's several launches."""
    baseline = study.plains(phase)[:-1] or study.plains(phase)
    return [name for name in study.configs(phase) if name not in baseline]


def _tax_row(
    tables: Tables,
    planned: CellPlan,
    where: tuple[str, str, str, str],
    effect: Effect | None,
) -> Row:
    config, phase, cell, metric = where
    reference, rate = tables.reference_of(phase, planned)
    lost = tables.taxes.lost(*where)
    row: Row = {
        "config": config,
        "phase": phase,
        "cell": cell,
        "rate_rps": rate,
        "reference": reference,
        "input_tokens": planned["input_tokens"],
        "output_tokens": planned["output_tokens"],
        "metric": metric,
        "family": _family(tables, phase, rate),
        **dict.fromkeys(NUMBERS),
        "n_blocks": 0,
        "n_config": 0,
        "n_plain": 0,
        "interval_method": None,
        "error_df": None,
        "verdict": None,
        "p_value": None,
        "p_adjusted": None,
        "blocks_needed": None,
        "margin": tables.study.config["statistics"]["margins"][metric],
        "aa_tax": None,
        "aa_lo": None,
        "aa_hi": None,
        **dict.fromkeys(WITHOUT_RULE),
        "mark": "",
        "capacity_ratio": _capacity_ratio(config, tables),
        **dict.fromkeys(STEP_NUMBERS.values()),
    }
    device_of = tables.taxes.device_of
    if device_of:
        row |= dict.fromkeys(DEVICE_COLUMNS[paths.TAXES])
    if effect is None:
        row["status"], row["reason"] = _worst(lost)
        return row
    if device_of:
        row["device"] = devices_text([device_of[block] for block in effect.estimate.blocks])
    plain_ms, config_ms = tables.taxes.levels_ms(*where)
    n_config, n_plain = tables.taxes.sample_sizes(*where)
    steps = tables.step_taxes.get((config, phase, cell), {})
    lo, hi = effect.interval.lo, effect.interval.hi
    return row | {
        "tax": effect.point,
        "tax_lo": lo,
        "tax_hi": hi,
        "abs_ms": config_ms - plain_ms,
        "abs_lo_ms": None if lo is None else plain_ms * lo,
        "abs_hi_ms": None if hi is None else plain_ms * hi,
        "plain_ms": plain_ms,
        "config_ms": config_ms,
        "n_blocks": effect.n_blocks,
        "n_config": n_config,
        "n_plain": n_plain,
        "interval_method": effect.interval.method,
        "error_df": effect.interval.df,
        "p_value": effect.interval.p,
        **_without_rule(tables, where),
        **{STEP_NUMBERS[metric]: us for metric, us in steps.items()},
        "mark": effect.mark,
        "status": "valid",
        "reason": merged_reasons([(block, reason) for _, block, reason in lost]) or None,
    }


def _without_rule(tables: Tables, where: tuple[str, str, str, str]) -> dict[str, float | None]:
    """The tax with the requests of disturbed time left in; nothing where none can be told."""
    effect = tables.whole.tax(*where) if tables.whole is not None else None
    if effect is None:
        return {}
    numbers = (effect.point, effect.interval.lo, effect.interval.hi)
    return dict(zip(WITHOUT_RULE, numbers, strict=True))


def _family(tables: Tables, phase: str, rate_rps: float | None) -> str:
    """Whether a cell was named before the measuring as one of those that verdicts are made for."""
    named = [tables.rates[name] for name in tables.study.config["statistics"]["confirmatory"]]
    return CONFIRMATORY if phase == "A" and rate_rps in named else EXPLORATORY


def _capacity_ratio(config: str, tables: Tables) -> float | None:
    """Saturation rate over the baseline's; None when the sweep did not saturate one of the two."""
    rates = tables.rates["saturation_rate_rps"]
    ours, plain = (rates.get(name) for name in (config, tables.study.baseline))
    return None if ours is None or plain is None else float(ours / plain)


def _worst(lost: Sequence[tuple[str, int, str]]) -> tuple[str, str]:
    for status in ("void", "missing", "skipped"):
        reasons = [(block, reason) for how, block, reason in lost if how == status]
        if reasons:
            return status, merged_reasons(reasons)
    raise AssertionError("a tax without a number has a block that lost it")


def _judge(
    rows: Sequence[Row],
    effects: Sequence[Effect | None],
    study: Study,
) -> None:
    """Fill in adjusted p, verdict, blocks needed and A/A of the rows of one cell and metric.

    The configurations are compared with the baseline together, the A/A row alone.
    """
    confidence = study.config["statistics"]["confidence"]
    noise = [row["config"] for row in rows if configuration_of(row["config"]) == study.baseline]
    known = [(r, e) for r, e in zip(rows, effects, strict=True) if e is not None]
    tested = [(r, e) for r, e in known if e.interval.p is not None and not e.mark]
    configurations = [e.estimate for r, e in tested if r["config"] not in noise]
    for row, effect in known:
        family = [effect.estimate] if row["config"] in noise else configurations
        if not effect.mark:
            row["p_adjusted"] = adjusted_p(effect, family)
        row["verdict"] = verdict(effect, row["p_adjusted"], row["margin"], confidence)
        if row["verdict"] == INCONCLUSIVE:
            row["blocks_needed"] = blocks_needed(effect, family, row["margin"], confidence)
    aa = next((row for row in rows if row["config"] in noise), None)
    if aa is None:
        return
    for row in rows:
        row |= {"aa_tax": aa["tax"], "aa_lo": aa["tax_lo"], "aa_hi": aa["tax_hi"]}


def adjusted_p(effect: Effect, family: Sequence[Estimate]) -> float | None:
    """The larger of Dunnett's p and the bootstrap's after Sidak; None without an interval."""
    if effect.interval.bootstrap_p is None:
        return None
    within = sidak(effect.interval.bootstrap_p, len(family))
    return max(dunnett_p(effect.estimate, family), within)


def device_rows(taxes: TaxTable, rows: Sequence[Row]) -> list[Row]:
    """devices.csv: each row of taxes.csv on each of several devices, with its number or reason."""
    devices = list(dict.fromkeys(taxes.device_of.values()))
    listed = []
    for row in rows:
        where = (row["config"], row["phase"], row["cell"], row["metric"])
        lost: dict[str, list[tuple[int, str]]] = {device: [] for device in devices}
        for _, block, why in taxes.lost(*where):
            lost[taxes.device_of[block]].append((block, why))
        shared = {name: row[name] for name in ("config", "phase", "cell", "metric")}
        shared["same_p"], _ = taxes.device_test(*where)
        for device, reasons in lost.items():
            own = {"device": device, "reason": merged_reasons(reasons) or None}
            numbers = _device_numbers(taxes.tax_on(device, *where))
            listed.append(empty_row(paths.DEVICE_TAXES) | shared | own | numbers)
    return listed


def _device_numbers(effect: Effect | None) -> Row:
    if effect is None:
        return {"n_blocks": 0, "mark": ""}
    return {
        "tax": effect.point,
        "tax_lo": effect.interval.lo,
        "tax_hi": effect.interval.hi,
        "p_value": effect.interval.p,
        "n_blocks": effect.n_blocks,
        "interval_method": effect.interval.method,
        "error_df": effect.interval.df,
        "mark": effect.mark,
    }


def amplification_rows(tables: Tables) -> list[Row]:
    """tax(ref_load) - tax(ref_safe) of each configuration and metric, from Phase A, as fractions.

    Source: design, "Reference rate selection": the non-linear queueing amplification.
    """
    return [
        _amplification_row(tables, config, metric)
        for config in _compared(tables.study, "A")
        for metric in METRICS
    ]


def _amplification_row(tables: Tables, config: str, metric: str) -> Row:
    row: Row = {
        "config": config,
        "metric": metric,
        "ref_safe_rps": tables.rates["ref_safe"],
        "ref_load_rps": tables.rates["ref_load"],
        **dict.fromkeys(("tax_ref_safe", "tax_ref_load", "gap", "gap_lo", "gap_hi")),
        "n_blocks": 0,
        "interval_method": None,
        "error_df": None,
        "mark": "",
        "status": "missing",
        "reason": None,
    }
    safe, load = tables.cell_at("ref_safe"), tables.cell_at("ref_load")
    if safe is None or load is None:
        return row | {"reason": "a reference rate is not a rate of Phase A"}
    if safe == load:
        return row | {"reason": SAME_RATES}
    taxes = tables.taxes
    terms = [
        WeightedTax(1, config, "A", load, metric),
        WeightedTax(-1, config, "A", safe, metric),
    ]
    gap = taxes.combination(terms)
    if gap is None:
        lost = [entry for cell in (safe, load) for entry in taxes.lost(config, "A", cell, metric)]
        if not lost:
            return row | {
                "reason": f"no launch of {tables.study.baseline} is valid at both rates in a block"
            }
        status, reason = _worst(lost)
        return row | {"status": status, "reason": reason}
    at_load, at_safe = taxes.points(terms)
    return row | {
        "tax_ref_safe": at_safe,
        "tax_ref_load": at_load,
        "gap": gap.point,
        "gap_lo": gap.interval.lo,
        "gap_hi": gap.interval.hi,
        "n_blocks": gap.n_blocks,
        "interval_method": gap.interval.method,
        "error_df": gap.interval.df,
        "mark": gap.mark,
        "status": "valid",
    }

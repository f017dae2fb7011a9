"""The tax table: every tax with its verdict, its A/A noise floor and its absolute size.

Source: design, "Substrate tax definition"; METHOD.md, "The unit of replication is the server
launch". A tax that has no number keeps its row, with the status and the reason.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from connector_tax.analysis.bootstrap import holm
from connector_tax.analysis.effects import METRICS, Effect, TaxTable, Term
from connector_tax.analysis.ingest import CLOSING_PLAIN, PHASES, Study, merged_reasons

TAX, NO_TAX, INCONCLUSIVE = "TAX", "NO TAX", "INCONCLUSIVE"
POINT_ESTIMATE = "point estimate, no verdict"
NUMBERS = ("tax", "tax_lo", "tax_hi", "abs_ms", "abs_lo_ms", "abs_hi_ms", "plain_ms", "config_ms")
JUDGED = ("verdict", "p_value", "p_holm", "aa_tax", "aa_lo", "aa_hi")
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
    """

    study: Study
    taxes: TaxTable
    rates: Mapping[str, Any]
    step_taxes: Mapping[tuple[str, str, str], Mapping[str, float]]

    def cell_at(self, reference: str) -> str | None:
        """The Phase A cell at `ref_safe` or `ref_load`; None when that rate is not in the grid."""
        names = {cell["rate_rps"]: str(cell["cell"]) for cell in self.study.cells("A")}
        return names.get(self.rates[reference])


def verdict(effect: Effect, p_holm: float | None, margin: float, confidence: float) -> str:
    """TAX, NO TAX, INCONCLUSIVE, or no verdict below three blocks (METHOD.md).

    NO TAX: the interval lies within +-margin, even where it excludes zero. TAX: positive and
    significant after Holm's correction. A configuration that is significantly faster than plain is
    INCONCLUSIVE: a negative tax points at a confound, not at a cost.
    """
    if not effect.decides or p_holm is None:
        return POINT_ESTIMATE
    if -margin < effect.lo and effect.hi < margin:
        return NO_TAX
    if p_holm < 1 - confidence and effect.point > 0 and effect.lo > 0:
        return TAX
    return INCONCLUSIVE


def tax_rows(tables: Tables) -> list[dict[str, Any]]:
    """One row for each (configuration but plain, phase, cell, metric), valid or with its reason."""
    study = tables.study
    rows = []
    for phase in PHASES:
        configs = [config for config in study.configs(phase) if config != "plain"]
        for planned in study.cells(phase):
            for metric in METRICS:
                where = [(config, phase, planned["cell"], metric) for config in configs]
                effects = [tables.taxes.tax(*w) for w in where]
                family = [
                    _tax_row(tables, planned, w, effect)
                    for w, effect in zip(where, effects, strict=True)
                ]
                _judge(family, effects, study.config["statistics"])
                rows += family
    order = {config: i for i, config in enumerate((*study.configurations, CLOSING_PLAIN))}
    return sorted(rows, key=lambda row: order[row["config"]])


def _tax_row(
    tables: Tables,
    planned: Mapping[str, Any],
    where: tuple[str, str, str, str],
    effect: Effect | None,
) -> dict[str, Any]:
    config, phase, cell, metric = where
    reference, rate = reference_of(phase, planned["rate_rps"], tables.rates)
    lost = tables.taxes.lost(*where)
    row: dict[str, Any] = {
        "config": config,
        "phase": phase,
        "cell": cell,
        "rate_rps": rate,
        "reference": reference,
        "input_tokens": planned["input_tokens"],
        "output_tokens": planned["output_tokens"],
        "metric": metric,
        **dict.fromkeys(NUMBERS),
        "n_blocks": 0,
        "n_config": 0,
        "n_plain": 0,
        "interval_method": None,
        **dict.fromkeys(JUDGED),
        "capacity_ratio": _capacity_ratio(config, tables.rates),
        **dict.fromkeys(STEP_NUMBERS.values()),
    }
    if effect is None:
        row["status"], row["reason"] = _worst(lost)
        return row
    plain_ms, config_ms, apart = tables.taxes.difference_ms(*where)
    n_config, n_plain = tables.taxes.sample_sizes(*where)
    steps = tables.step_taxes.get((config, phase, cell), {})
    return row | {
        "tax": effect.point,
        "tax_lo": effect.interval.lo,
        "tax_hi": effect.interval.hi,
        "abs_ms": config_ms - plain_ms,
        "abs_lo_ms": apart.lo,
        "abs_hi_ms": apart.hi,
        "plain_ms": plain_ms,
        "config_ms": config_ms,
        "n_blocks": effect.n_blocks,
        "n_config": n_config,
        "n_plain": n_plain,
        "interval_method": effect.interval.method,
        "p_value": effect.interval.p,
        **{STEP_NUMBERS[metric]: us for metric, us in steps.items()},
        "status": "valid",
        "reason": merged_reasons([(block, reason) for _, block, reason in lost]) or None,
    }


def reference_of(
    phase: str, rate_rps: float | None, rates: Mapping[str, Any]
) -> tuple[str, float | None]:
    """Which reference rate a cell stands for, and its rate; ref_safe where both are one rate."""
    if phase == "A":
        names = [name for name in ("ref_safe", "ref_load") if rates[name] == rate_rps]
        return (names[0] if names else ""), rate_rps
    name = "ref_safe" if phase == "B" else "ref_load"
    return name, rates[name]


def _capacity_ratio(config: str, rates: Mapping[str, Any]) -> float | None:
    """Saturation rate over plain's; None when the sweep did not saturate one of the two."""
    ours, plain = (rates["saturation_rate_rps"].get(name) for name in (config, "plain"))
    return None if ours is None or plain is None else float(ours / plain)


def _worst(lost: Sequence[tuple[str, int, str]]) -> tuple[str, str]:
    for status in ("void", "missing", "skipped"):
        reasons = [(block, reason) for found, block, reason in lost if found == status]
        if reasons:
            return status, merged_reasons(reasons)
    raise AssertionError("a tax without a number has a block that lost it")


def _judge(
    family: Sequence[dict[str, Any]],
    effects: Sequence[Effect | None],
    statistics: Mapping[str, Any],
) -> None:
    """Fill in Holm's p, the verdict and the A/A comparison of the rows of one cell and metric."""
    tested = [r for r in family if r["p_value"] is not None and r["config"] != CLOSING_PLAIN]
    adjusted = holm([row["p_value"] for row in tested])
    for row, p in zip(tested, adjusted, strict=True):
        row["p_holm"] = p
    noise = next((row for row in family if row["config"] == CLOSING_PLAIN), None)
    for row, effect in zip(family, effects, strict=True):
        if row["config"] == CLOSING_PLAIN:
            row["p_holm"] = row["p_value"]
        if noise is not None:
            row |= {"aa_tax": noise["tax"], "aa_lo": noise["tax_lo"], "aa_hi": noise["tax_hi"]}
        if effect is not None:
            row["verdict"] = verdict(
                effect, row["p_holm"], statistics["margin"], statistics["confidence"]
            )


def amplification_rows(tables: Tables) -> list[dict[str, Any]]:
    """tax(ref_load) - tax(ref_safe) of each configuration and metric, from Phase A, as fractions.

    Source: design, "Reference rate selection": the non-linear queueing amplification.
    """
    return [
        _amplification_row(tables, config, metric)
        for config in tables.study.configs("A")
        for metric in METRICS
        if config != "plain"
    ]


def _amplification_row(tables: Tables, config: str, metric: str) -> dict[str, Any]:
    row: dict[str, Any] = {
        "config": config,
        "metric": metric,
        "ref_safe_rps": tables.rates["ref_safe"],
        "ref_load_rps": tables.rates["ref_load"],
        **dict.fromkeys(("tax_ref_safe", "tax_ref_load", "gap", "gap_lo", "gap_hi")),
        "n_blocks": 0,
        "interval_method": None,
        "status": "missing",
        "reason": None,
    }
    safe, load = tables.cell_at("ref_safe"), tables.cell_at("ref_load")
    if safe is None or load is None:
        return row | {"reason": "a reference rate is not a rate of Phase A"}
    if safe == load:
        return row | {"reason": "ref_load equals ref_safe"}
    taxes = tables.taxes
    terms = [Term(1, config, "A", load, metric), Term(-1, config, "A", safe, metric)]
    gap = taxes.combination(terms)
    if gap is None:
        lost = [taxes.lost(config, "A", cell, metric) for cell in (safe, load)]
        status, reason = _worst([*lost[0], *lost[1]])
        return row | {"status": status, "reason": reason}
    at_load, at_safe = (taxes.point(term, taxes.common_blocks(terms)) for term in terms)
    return row | {
        "tax_ref_safe": at_safe,
        "tax_ref_load": at_load,
        "gap": gap.point,
        "gap_lo": gap.interval.lo,
        "gap_hi": gap.interval.hi,
        "n_blocks": gap.n_blocks,
        "interval_method": gap.interval.method,
        "status": "valid",
    }

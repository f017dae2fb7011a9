"""What the report says of engine steps: step taxes and the hooks that cost something."""

from dataclasses import dataclass

from connector_tax import text
from connector_tax.artifacts.names import REFERENCES
from connector_tax.artifacts.tables import HookRow, StepTaxRow
from connector_tax.figures.tables import StudyTables

SHOWN_US = 1.0  # hooks below this mean per step are in hooks.csv alone
METRICS = {
    "tax_step_p50": "schedule()",
    "tax_callback_p50": "callbacks",
    "unattributed": "schedule() minus callbacks",
    "tax_engine_step_p50": "whole engine step",
}


@dataclass(frozen=True)
class StepTaxes:
    """The step taxes at one reference rate: a line of words for each configuration and A/A."""

    reference: str
    rate_rps: float
    lines: list[tuple[str, list[str]]]


@dataclass(frozen=True)
class Hooks:
    """The hooks of one configuration at ref_safe, dearest first, and how many are not shown."""

    config: str
    rows: list[HookRow]
    below: int


def step_taxes(study: StudyTables) -> list[StepTaxes]:
    """Step taxes at both reference rates; ref_load only where it is another rate."""
    tables = []
    for reference in REFERENCES:
        by_metric = {metric: study.step_taxes_at(reference, metric) for metric in METRICS}
        rate = study.reference[reference]
        if rate is None or not any(by_metric.values()):
            continue
        lines = [
            (item.label, [_words(rows.get(item.id)) for rows in by_metric.values()])
            for item in study.connectors
        ]
        noise = [next(iter(rows.values()), None) for rows in by_metric.values()]
        lines.append(("plain over plain (A/A)", [_noise_words(row) for row in noise]))
        tables.append(StepTaxes(reference, rate, lines))
    return tables


def hooks(study: StudyTables) -> list[Hooks]:
    """Every configuration's hooks at ref_safe that take SHOWN_US of a step or more."""
    cell = study.cell_at("ref_safe")
    at_safe = [row for row in study.hooks if (row.phase, row.cell) == ("A", cell)]
    by_configuration = []
    for item in study.connectors:
        own = [row for row in at_safe if row.config == item.id]
        dear = [row for row in own if row.mean_us >= SHOWN_US]
        if own:
            dear.sort(key=lambda row: row.mean_us, reverse=True)
            by_configuration.append(Hooks(item.id, dear, len(own) - len(dear)))
    return by_configuration


def microseconds(value: float | None, low: float | None, high: float | None) -> str:
    """'12.3 [10.1, 14.6]', without brackets where there is no interval."""
    if value is None:
        return text.DASH
    ends = "" if low is None or high is None else f" [{_short(low)}, {_short(high)}]"
    return _short(value) + ends


def _short(value: float) -> str:
    return text.number(value, 1 if abs(value) < 99.95 else 0)


def _words(row: StepTaxRow | None) -> str:
    if row is None or row.us is None:
        return row.reason if row is not None else "missing"
    return _signed(row.us, row.lo_us, row.hi_us)


def _noise_words(row: StepTaxRow | None) -> str:
    return text.DASH if row is None else _signed(row.aa_us, row.aa_lo_us, row.aa_hi_us)


def _signed(value: float | None, low: float | None, high: float | None) -> str:
    if value is None:
        return text.DASH
    ends = (
        "" if low is None or high is None else f" [{text.signed(low, 0)}, {text.signed(high, 0)}]"
    )
    return text.signed(value, 0) + ends

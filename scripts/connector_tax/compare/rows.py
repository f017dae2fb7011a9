"""compare.csv: each tax, latency and resource of two studies as a ratio, with interval and verdict.

Source: docs/compare.md. A tax is itself a ratio to its own study's plain. What is compared is
(1 + tax of B) / (1 + tax of A): 1 where a configuration costs the same share in both. A quotient of
two percentages would have no meaning where one of them may be zero.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from connector_tax.analysis.effects import MIN_BLOCKS_FOR_VERDICT
from connector_tax.analysis.multiplicity import sidak
from connector_tax.analysis.resources import EXACT, LOG
from connector_tax.artifacts.names import (
    DEVICES_DIFFER,
    INCONCLUSIVE,
    MARKED,
    METRICS,
    POINT_ESTIMATE,
)
from connector_tax.artifacts.tables import POOLED, AggregateRow, ResourceRow, TaxRow
from connector_tax.compare.contrast import Difference, Known, difference, from_interval, of_estimate
from connector_tax.compare.studies import (
    Where,
    common_cells,
    common_configurations,
    contrasts_of_resources,
)
from connector_tax.figures.tables import StudyTables

TAX, LATENCY, RESOURCE = "tax", "latency", "resource"
HIGHER, LOWER, SAME = "HIGHER", "LOWER", "SAME"
# The comparison of plain with itself; its launch has another name in older studies.
AA = "plain (A/A)"


class Side(NamedTuple):
    """One study's number: as it is printed, and as it is compared."""

    printed: float
    lo: float | None
    hi: float | None
    known: Known
    blocks: int
    mark: str = ""


@dataclass(frozen=True)
class ComparedRow:
    """One line of compare.csv; the fields are described in docs/compare.md."""

    quantity: str
    config: str
    phase: str
    cell: str
    rate_rps: float | None
    input_tokens: int | None
    output_tokens: int | None
    metric: str
    unit: str
    scale: str
    a: float | None = None
    a_lo: float | None = None
    a_hi: float | None = None
    b: float | None = None
    b_lo: float | None = None
    b_hi: float | None = None
    effect: float | None = None
    effect_lo: float | None = None
    effect_hi: float | None = None
    error_df: float | None = None
    p_value: float | None = None
    p_adjusted: float | None = None
    margin: float | None = None
    blocks_a: int = 0
    blocks_b: int = 0
    verdict: str = ""
    mark: str = ""
    reason: str = ""

    @property
    def family(self) -> tuple[str, ...]:
        """The comparisons that are made together: all configurations of one cell and metric."""
        alone = self.config if self.config == AA else ""
        return self.quantity, self.phase, self.cell, self.metric, alone


Key = tuple[str, str, str, str]  # configuration, phase, cell, metric


def compare_rows(a: StudyTables, b: StudyTables) -> list[ComparedRow]:
    """Every comparison of two comparable studies, judged.

    Raises:
        ArtifactError: a table or a record of one of them is missing or malformed.
    """
    cells, configs = common_cells(a, b), common_configurations(a, b)
    confidence = a.settings["statistics"]["confidence"]
    rows = [
        *_taxes(a, b, cells, configs, confidence),
        *_latencies(a, b, cells, [a.baseline, *configs], confidence),
        *_resources(a, b, configs, confidence),
    ]
    return judged(rows, confidence)


def compared(row: ComparedRow, a: Side | str, b: Side | str, confidence: float) -> ComparedRow:
    """`row` with the numbers of both studies, or with why there are none, and their difference."""
    missing = [f"{n}: {side}" for n, side in (("A", a), ("B", b)) if isinstance(side, str)]
    for side, name in ((a, "a"), (b, "b")):
        if isinstance(side, Side):
            numbers: dict[str, Any] = {name: side.printed, f"blocks_{name}": side.blocks}
            numbers |= {f"{name}_lo": side.lo, f"{name}_hi": side.hi}
            row = replace(row, **numbers)
    if isinstance(a, str) or isinstance(b, str):
        return replace(row, reason="; ".join(missing))
    gap = difference(a.known, b.known, confidence)
    point, lo, hi = _on_scale(gap, row.scale)
    marks = [f"{n}: {side.mark}" for n, side in (("A", a), ("B", b)) if side.mark]
    return replace(
        row, effect=point, effect_lo=lo, effect_hi=hi, error_df=gap.df, p_value=gap.p,
        mark="; ".join(marks),
    )  # fmt: skip


def judged(rows: Sequence[ComparedRow], confidence: float) -> list[ComparedRow]:
    """The rows with adjusted p-values and verdicts."""
    sizes: dict[tuple[str, ...], int] = {}
    for row in rows:
        if row.p_value is not None and not row.mark:
            sizes[row.family] = sizes.get(row.family, 0) + 1
    return [_judged(row, sizes.get(row.family, 1), confidence) for row in rows]


def _judged(row: ComparedRow, comparisons: int, confidence: float) -> ComparedRow:
    if row.effect is None:
        return row
    if row.mark:
        return replace(row, verdict=MARKED)
    if row.p_value is None or min(row.blocks_a, row.blocks_b) < MIN_BLOCKS_FOR_VERDICT:
        return replace(row, verdict=POINT_ESTIMATE)
    p = sidak(row.p_value, comparisons)
    return replace(row, p_adjusted=p, verdict=_verdict(row, p < 1 - confidence))


def _verdict(row: ComparedRow, significant: bool) -> str:
    assert row.effect_lo is not None
    assert row.effect_hi is not None
    nothing, reach = (1.0 if row.scale == LOG else 0.0), row.margin or 0.0
    within = nothing - reach < row.effect_lo and row.effect_hi < nothing + reach
    if within or row.effect_lo == row.effect_hi == nothing:
        return SAME
    if significant and row.effect_lo > nothing:
        return HIGHER
    return LOWER if significant and row.effect_hi < nothing else INCONCLUSIVE


def _on_scale(gap: Difference, scale: str) -> tuple[float | None, ...]:
    ends = (gap.point, gap.lo, gap.hi)
    if scale != LOG:
        return ends
    return tuple(None if end is None else float(np.exp(end)) for end in ends)


def _margin(a: StudyTables, b: StudyTables, metric: str) -> float:
    """The narrower of the two studies' margins, where they differ."""
    return min(float(s.settings["statistics"]["margins"][metric]) for s in (a, b))


def _blanks(
    quantity: str,
    a: StudyTables,
    b: StudyTables,
    cells: Mapping[Where, AggregateRow],
    configs: Sequence[str],
) -> Iterator[tuple[Key, ComparedRow]]:
    """A row without numbers for each cell, metric and configuration, by its key in the tables."""
    unit = "fraction" if quantity == TAX else "ms"
    for (phase, cell), of in cells.items():
        for metric in METRICS:
            for config in configs:
                yield (config, phase, cell, metric), ComparedRow(
                    quantity, config, of.phase, of.cell, of.rate_rps, of.input_tokens,
                    of.output_tokens, metric, unit, LOG, margin=_margin(a, b, metric),
                )  # fmt: skip


# ---- taxes


def _taxes(
    a: StudyTables,
    b: StudyTables,
    cells: Mapping[Where, AggregateRow],
    configs: Sequence[str],
    confidence: float,
) -> Iterator[ComparedRow]:
    ours, theirs = _tax_rows(a), _tax_rows(b)
    names = [*configs, *([AA] if a.aa and b.aa else [])]
    for key, row in _blanks(TAX, a, b, cells, names):
        if key in ours or key in theirs:
            a_side, b_side = (tax_side(t.get(key), confidence) for t in (ours, theirs))
            yield compared(row, a_side, b_side, confidence)


def _tax_rows(study: StudyTables) -> dict[Key, TaxRow]:
    return {
        (AA if row.config == study.aa else row.config, row.phase, row.cell, row.metric): row
        for row in study.taxes
    }


def tax_side(row: TaxRow | None, confidence: float) -> Side | str:
    """A row of taxes.csv, compared on the scale of logs; a text where it has no number."""
    if row is None:
        return "not part of the design"
    if row.tax is None:
        return f"{row.status}: {row.reason}"
    known = Known(float(np.log1p(row.tax)), None, 0)
    if row.tax_lo is not None and row.tax_hi is not None and row.error_df is not None:
        point, lo, hi = (float(np.log1p(end)) for end in (row.tax, row.tax_lo, row.tax_hi))
        known = from_interval(point, lo, hi, row.error_df, confidence)
    mark = row.mark or "devices differ" * (row.verdict == DEVICES_DIFFER)
    return Side(row.tax, row.tax_lo, row.tax_hi, known, row.n_blocks or 0, mark)


# ---- latencies


def _latencies(
    a: StudyTables,
    b: StudyTables,
    cells: Mapping[Where, AggregateRow],
    configs: Sequence[str],
    confidence: float,
) -> Iterator[ComparedRow]:
    ours, theirs = (_latency_sides(study, confidence) for study in (a, b))
    for key, row in _blanks(LATENCY, a, b, cells, configs):
        if key in ours and key in theirs:
            yield compared(row, ours[key], theirs[key], confidence)


def _latency_sides(study: StudyTables, confidence: float) -> dict[Key, Side | str]:
    """Every pooled percentile; its interval is Student's t of the block values."""
    blocks: dict[tuple[str, str, str], set[str]] = {}
    saturated: dict[tuple[str, str, str], bool] = {}
    for row in study.aggregate:
        where = (row.configuration, row.phase, row.cell)
        if row.block != POOLED and row.status == "valid":
            blocks.setdefault(where, set()).add(row.block)
            saturated[where] = saturated.get(where, False) or bool(row.saturated)
    sides: dict[Key, Side | str] = {}
    for row in study.aggregate:
        where = (row.configuration, row.phase, row.cell)
        if row.block == POOLED:
            for metric in METRICS:
                mark = "saturated" if saturated.get(where) else ""
                side = _latency_side(row, metric, len(blocks.get(where, ())), confidence)
                sides[*where, metric] = side if isinstance(side, str) else side._replace(mark=mark)
    return sides


def _latency_side(row: AggregateRow, metric: str, blocks: int, confidence: float) -> Side | str:
    value, lo, hi = (getattr(row, f"{metric}{end}_ms") for end in ("", "_lo", "_hi"))
    if value is None:
        return f"{row.status}: {row.reason}" if row.status != "valid" else f"no {metric}"
    if value <= 0:
        return f"{metric} is 0, which has no ratio"
    return latency_side(value, lo, hi, blocks, confidence)


def latency_side(
    value: float, lo: float | None, hi: float | None, blocks: int, confidence: float
) -> Side:
    """A percentile pooled over blocks, compared on the scale of logs."""
    if blocks < 2 or lo is None or hi is None:
        # A single launch's interval is of its requests: launches are not in it.
        return Side(value, None, None, Known(float(np.log(value)), None, 0), blocks)
    logs = [float(np.log(end)) for end in (value, lo, hi)]
    known = from_interval(logs[0], logs[1], logs[2], blocks - 1, confidence)
    return Side(value, lo, hi, known, blocks)


# ---- resources


def _resources(
    a: StudyTables, b: StudyTables, configs: Sequence[str], confidence: float
) -> Iterator[ComparedRow]:
    ours, theirs = (_resource_sides(study) for study in (a, b))
    rows = {(row.config, row.resource): row for row in (*b.resources, *a.resources)}
    for (config, resource), row in rows.items():
        if config in configs:
            unit = "fraction" if row.scale == LOG else row.unit
            blank = ComparedRow(
                RESOURCE, config, "A", "", None, None, None, resource, unit, row.scale
            )
            none = "not recorded"
            key = (config, resource)
            yield compared(blank, ours.get(key, none), theirs.get(key, none), confidence)


def _resource_sides(study: StudyTables) -> dict[tuple[str, str], Side | str]:
    """Every resource's tax, or on the raw scale its difference, from plain."""
    estimates = contrasts_of_resources(study)
    sides: dict[tuple[str, str], Side | str] = {}
    for row in study.resources:
        key = (row.config, row.resource)
        printed, lo, hi = _resource_numbers(row)
        if printed is None:
            sides[key] = row.reason or row.status
            continue
        known = of_estimate(estimates[key])
        if row.interval_method == EXACT:
            point = float(np.log1p(printed)) if row.scale == LOG else printed
            known = Known(point, 0.0, np.inf)
        elif lo is None:
            known = known._replace(error=None)
        sides[key] = Side(printed, lo, hi, known, row.n_blocks)
    return sides


def _resource_numbers(row: ResourceRow) -> tuple[float | None, float | None, float | None]:
    if row.scale == LOG:
        return row.tax, row.tax_lo, row.tax_hi
    return row.difference, row.difference_lo, row.difference_hi

"""compare.csv: each tax, latency and resource of two studies as a ratio, with interval and verdict.

Source: docs/compare.md. Joins the two studies' tables. A tax is a ratio to its own study's plain.
The comparison is (1 + tax of B) / (1 + tax of A), which is 1 if a configuration costs the same
share in both. A quotient of percentages would be meaningless if one may be zero. Two studies share
no launch, so the variances of their estimates add, with Welch and Satterthwaite's degrees of
freedom (Welch, Biometrika 34 (1947) 28).
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from connector_tax.analysis.block_model import OWN_DIFFERENCES
from connector_tax.analysis.effect import (
    EXACT,
    Effect,
    effect_of,
    family_levels,
    judge,
    mean_of,
    sidak,
)
from connector_tax.analysis.effects import FEW_REQUESTS
from connector_tax.artifacts.metrics import ALL_METRICS, METRICS, margin_of
from connector_tax.artifacts.names import ALL_RATES
from connector_tax.artifacts.tables import LOG, POOLED, RESOURCE, TAX, CellRow, EffectRow
from connector_tax.artifacts.verdicts import MARKED, TOO_FEW
from connector_tax.compare.studies import (
    Load,
    Where,
    all_rates,
    common_cells,
    common_configurations,
    load_of,
)
from connector_tax.figures.tables import StudyTables

LATENCY = "latency"
# The comparison of plain with itself; its launch is named by its number in the block.
AA = "plain (A/A)"
# Rate and lengths of quantities without a cell.
NO_LOAD: Load = (None, None, None)

Key = tuple[str, str, str, str, str]  # quantity, configuration, phase, cell, metric


class Side(NamedTuple):
    """One study's number: displayed value, and effect for the comparison."""

    printed: float
    lo: float | None
    hi: float | None
    known: Effect

    @property
    def blocks(self) -> int:
        """Return the number of blocks."""
        return self.known.n_blocks

    @property
    def mark(self) -> str:
        """Return why the tax gets no verdict, or ""."""
        return self.known.mark


@dataclass(frozen=True)
class ComparedRow:
    """One line of compare.csv; docs/compare.md describes its fields."""

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
    narrow_lo: float | None = None
    narrow_hi: float | None = None
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
    def where(self) -> Where:
        """Return phase and cell."""
        return self.phase, self.cell

    @property
    def family(self) -> tuple[str, ...]:
        """Return the key of rows judged together: all configurations in one cell and metric."""
        alone = self.config if self.config == AA else ""
        return self.quantity, self.phase, self.cell, self.metric, alone


# A comparison and each study's number, or a text if it has none.
Pair = tuple[ComparedRow, Side | str, Side | str]


def compare_rows(a: StudyTables, b: StudyTables) -> list[ComparedRow]:
    """Return every comparison of two comparable studies, with its verdict.

    Raises:
        ArtifactError: a table of a study is missing or malformed.
    """
    confidence = a.settings["statistics"]["confidence"]
    configs = common_configurations(a, b)
    members = {TAX: [*configs, AA], LATENCY: [a.baseline, *configs], RESOURCE: configs}
    loads = {where: load_of(row) for where, row in common_cells(a, b).items()}
    if all_rates(a) == all_rates(b):
        loads["A", ALL_RATES] = NO_LOAD
    units = {row.metric: (row.unit, row.scale) for s in (a, b) for row in s.of(RESOURCE)}
    none = {TAX: "not part of the design", RESOURCE: "not recorded"}
    of_a, of_b = (dict(_sides(study, confidence)) for study in (a, b))
    pairs: list[Pair] = []
    for key in dict.fromkeys((*of_a, *of_b)):
        quantity, config, phase, cell, metric = key
        load = NO_LOAD if quantity == RESOURCE else loads.get((phase, cell))
        side_a, side_b = (of.get(key, none.get(quantity)) for of in (of_a, of_b))
        if config not in members[quantity] or load is None or side_a is None or side_b is None:
            continue
        unit, scale = units[metric] if quantity == RESOURCE else ("ms", LOG)
        if scale == LOG and quantity != LATENCY:
            unit = "fraction"
        margin = None
        if quantity != RESOURCE:
            margin = min(margin_of(s.settings["statistics"]["margins"], metric) for s in (a, b))
        row = ComparedRow(*key[:4], *load, metric, unit, scale, margin=margin)
        pairs.append((row, side_a, side_b))
    return judged(pairs, confidence)


def judged(pairs: Sequence[Pair], confidence: float) -> list[ComparedRow]:
    """Return the rows with numbers and verdicts, each judged together with its family."""
    sizes = Counter(row.family for row, *sides in pairs if all(map(_repeats, sides)))
    return [compared(row, a, b, confidence, max(1, sizes[row.family])) for row, a, b in pairs]


def _repeats(side: Side | str) -> bool:
    """Return whether a study's number has a standard error and no mark."""
    return isinstance(side, Side) and side.known.error is not None and not side.mark


def compared(
    row: ComparedRow, a: Side | str, b: Side | str, confidence: float, comparisons: int = 1
) -> ComparedRow:
    """Return `row` with both studies' numbers (or why they are missing), difference and verdict.

    `confidence` is the joint confidence of all comparisons made together.
    """
    if isinstance(a, Side):
        row = replace(row, a=a.printed, a_lo=a.lo, a_hi=a.hi, blocks_a=a.blocks)
    if isinstance(b, Side):
        row = replace(row, b=b.printed, b_lo=b.lo, b_hi=b.hi, blocks_b=b.blocks)
    if isinstance(a, str) or isinstance(b, str):
        missing = [f"{n}: {side}" for n, side in (("A", a), ("B", b)) if isinstance(side, str)]
        return replace(row, reason="; ".join(missing))
    gap = difference(a.known, b.known)
    judged = judge(gap, row.margin or 0.0, family_levels(confidence, comparisons))
    is_decidable = judged.verdict not in (MARKED, TOO_FEW)
    ends = (judged.family_lo, judged.family_hi) if is_decidable else gap.ends
    inner = gap.interval(2 * confidence - 1) if gap.repeats else (None, None)
    # Taxes are compared as ratios, which are 1 without a change.
    unit = 1.0 if row.scale == LOG else 0.0
    point, lo, hi, narrow_lo, narrow_hi = (
        None if end is None else end + unit for end in (gap.point, *ends, *inner)
    )
    return replace(
        row, effect=point, effect_lo=lo, effect_hi=hi, narrow_lo=narrow_lo, narrow_hi=narrow_hi,
        error_df=gap.df if gap.error else None, p_value=gap.p, mark=gap.mark,
        p_adjusted=sidak(gap.p, comparisons) if is_decidable and gap.p is not None else None,
        verdict=judged.verdict,
    )  # fmt: skip


def difference(a: Effect, b: Effect) -> Effect:
    """Return the effect B minus A, with the smaller number of blocks.

    It has an error only if A and B have one."""
    blocks = tuple(range(min(a.n_blocks, b.n_blocks)))
    mark = "; ".join(f"{name}: {one.mark}" for name, one in (("A", a), ("B", b)) if one.mark)
    point = b.contrast - a.contrast
    gap = Effect(point, None, 0, blocks, a.scale, confidence=a.confidence, mark=mark)
    if a.error is None or b.error is None:
        return gap
    variance = a.error**2 + b.error**2
    if variance == 0:
        return replace(gap, error=0.0, df=np.inf, method=EXACT)
    df = variance**2 / sum(known.error**4 / known.df for known in (a, b) if known.error)
    return replace(gap, error=math.sqrt(variance), df=df, method="Welch")


# ---- numbers of one study


def _sides(study: StudyTables, confidence: float) -> Iterator[tuple[Key, Side | str]]:
    """Yield every tax, pooled latency and resource of a study."""
    for row in study.effects:
        if row.quantity in (TAX, RESOURCE):
            config = AA if row.config == study.aa else row.config
            key = (row.quantity, config, row.phase, row.cell, row.metric)
            yield key, effect_side(row, confidence)
    valid = defaultdict(list)
    for cell in study.cell_rows:
        if cell.block != POOLED and cell.status == "valid":
            valid[cell.configuration, cell.phase, cell.cell].append(cell)
    for cell in study.cell_rows:
        where = (cell.configuration, cell.phase, cell.cell)
        for metric in METRICS if cell.block == POOLED else ():
            yield (LATENCY, *where, metric), _latency_side(cell, metric, valid[where], confidence)


def effect_side(row: EffectRow | None, confidence: float) -> Side | str:
    """Return an estimate for comparison, or the reason why it has no number."""
    if row is None:
        return "not part of the design"
    if row.estimate is None:
        state = row.reason if row.quantity == RESOURCE else f"{row.status}: {row.reason}"
        return state or row.status
    return Side(row.estimate, row.lo, row.hi, effect_of(row, confidence))


def _latency_side(
    row: CellRow, metric: str, valid: Sequence[CellRow], confidence: float
) -> Side | str:
    """Return a percentile pooled over blocks, on the log scale, with Student's t of the block
    values.

    `valid` holds the launches that it is pooled from.
    """
    value, lo, hi = (row.number(f"{metric}{end}_ms") for end in ("", "_lo", "_hi"))
    if value is None:
        return f"{row.status}: {row.reason}" if row.status != "valid" else f"no {metric}"
    if value <= 0:
        return f"{metric} is 0, which has no ratio"
    by_block: dict[str, list[float]] = {}
    for launch in valid:
        if (milliseconds := launch.number(f"{metric}_ms")) is not None:
            by_block.setdefault(launch.block, []).append(math.log(milliseconds))
    logs = [float(np.mean(milliseconds)) for milliseconds in by_block.values()]
    known = mean_of(logs, tuple(range(len(logs))), OWN_DIFFERENCES, confidence, LOG)
    least = ALL_METRICS[metric].least
    marks = {
        "saturated": any(launch.saturated for launch in valid),
        "dropped arrivals": any(launch.dropped for launch in valid),
        FEW_REQUESTS: any((launch.n or 0) < least for launch in valid),
    }
    mark = "; ".join(name for name, marked in marks.items() if marked)
    if len(logs) < 2:
        # A single launch's interval covers its requests only, not differences between launches.
        lo = hi = None
    return Side(value, lo, hi, replace(known, mark=mark))

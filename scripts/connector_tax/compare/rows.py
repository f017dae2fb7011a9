"""compare.csv: each tax, latency and resource of two studies as a ratio, with interval and verdict.

Source: docs/compare.md. A join of the two studies' tables. A tax is itself a ratio to its own
study's plain. What is compared is (1 + tax of B) / (1 + tax of A): 1 where a configuration costs
the same share in both. A quotient of two percentages would have no meaning where one of them may be
zero. Two studies share no launch, so that the variances of their estimates add, with Welch and
Satterthwaite's degrees of freedom (Welch, Biometrika 34 (1947) 28).
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from scipy.stats import t as student

from connector_tax.analysis.block_model import sidak
from connector_tax.analysis.resources import EXACT
from connector_tax.artifacts.metrics import METRICS, margin_of
from connector_tax.artifacts.names import ALL_RATES
from connector_tax.artifacts.tables import LOG, POOLED, RESOURCE, TAX, CellRow, EffectRow
from connector_tax.artifacts.verdicts import (
    MARKED,
    MIN_BLOCKS_FOR_VERDICT,
    TOO_FEW,
    verdict_of,
)
from connector_tax.compare.studies import (
    Load,
    all_rates,
    common_cells,
    common_configurations,
    load_of,
)
from connector_tax.figures.tables import StudyTables

LATENCY = "latency"
# The comparison of plain with itself; its launch is named by its number in the block.
AA = "plain (A/A)"

# Rate and lengths of what is of no cell.
NO_LOAD: Load = (None, None, None)

Key = tuple[str, str, str, str, str]  # quantity, configuration, phase, cell, metric


class Known(NamedTuple):
    """An estimate, on the scale on which it is compared.

    Attributes:
        error: its standard error; None where nothing repeats; 0 where it is exact.
        df: degrees of freedom behind the error; infinite for an exact one.
    """

    point: float
    error: float | None
    df: float


class Difference(NamedTuple):
    """B minus A with its interval; None where one of the two has no error. Of two exact: no df."""

    point: float
    lo: float | None
    hi: float | None
    p: float | None
    df: float | None


def from_interval(point: float, lo: float, hi: float, df: float, confidence: float) -> Known:
    """What a printed interval says of its estimate, on the same scale.

    Its longer arm is `t(df)` standard errors.
    """
    arm = max(hi - point, point - lo)
    return Known(point, arm / quantile(confidence, df), df)


def quantile(confidence: float, df: float) -> float:
    """Student's t, two-sided."""
    return float(student.ppf((1 + confidence) / 2, df))


def difference(a: Known, b: Known, confidence: float) -> Difference:
    """B minus A."""
    point = b.point - a.point
    if a.error is None or b.error is None:
        return Difference(point, None, None, None, None)
    variance = a.error**2 + b.error**2
    if variance == 0:
        return Difference(point, point, point, float(point == 0), None)
    df = variance**2 / sum(known.error**4 / known.df for known in (a, b) if known.error)
    half = quantile(confidence, df) * math.sqrt(variance)
    p = float(2 * student.sf(abs(point) / math.sqrt(variance), df))
    return Difference(point, point - half, point + half, p, df)


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
    def family(self) -> tuple[str, ...]:
        """The comparisons that are made together: all configurations of one cell and metric."""
        alone = self.config if self.config == AA else ""
        return self.quantity, self.phase, self.cell, self.metric, alone


def compare_rows(a: StudyTables, b: StudyTables) -> list[ComparedRow]:
    """Every comparison of two comparable studies, judged.

    Raises:
        ArtifactError: a table of one of them is missing or malformed.
    """
    confidence = a.settings["statistics"]["confidence"]
    cells, configs = common_cells(a, b), common_configurations(a, b)
    members = {TAX: [*configs, AA], LATENCY: [a.baseline, *configs], RESOURCE: configs}
    sides = [dict(_sides(study, confidence)) for study in (a, b)]
    same_rates = all_rates(a) == all_rates(b)
    both: list[tuple[ComparedRow, Side | str, Side | str]] = []
    units = {row.metric: (row.unit, row.scale) for s in (a, b) for row in s.of(RESOURCE)}
    none = {TAX: "not part of the design", RESOURCE: "not recorded"}
    for key in dict.fromkeys((*sides[0], *sides[1])):
        quantity, config, phase, cell, metric = key
        here, of_all = cells.get((phase, cell)), cell == ALL_RATES
        known = [of.get(key, none.get(quantity)) for of in sides]
        if config not in members[quantity] or (
            here is None and quantity != RESOURCE and not (of_all and same_rates)
        ):
            continue
        if known[0] is None or known[1] is None:
            continue
        if here is None and not of_all:
            unit, scale = units[metric]
            unit = "fraction" if scale == LOG else unit
            row = ComparedRow(*key[:4], *NO_LOAD, metric, unit, scale)
        else:
            load = NO_LOAD if here is None else load_of(here)
            unit = "ms" if quantity == LATENCY else "fraction"
            margin = min(margin_of(s.settings["statistics"]["margins"], metric) for s in (a, b))
            row = ComparedRow(*key[:4], *load, metric, unit, LOG, margin=margin)
        both.append((row, known[0], known[1]))
    return judged(both, confidence)


def judged(
    rows: Sequence[tuple[ComparedRow, Side | str, Side | str]], confidence: float
) -> list[ComparedRow]:
    """The rows with numbers and verdicts, each judged with the others of its family."""
    alone = [compared(row, a, b, confidence) for row, a, b in rows]
    sizes = Counter(row.family for row in alone if row.p_value is not None and not row.mark)
    return [compared(row, a, b, confidence, max(1, sizes[row.family])) for row, a, b in rows]


def compared(
    row: ComparedRow, a: Side | str, b: Side | str, confidence: float, comparisons: int = 1
) -> ComparedRow:
    """`row` with the numbers of both studies, or why there are none, their difference, a verdict.

    Args:
        row: what is compared.
        a: the number of A.
        b: that of B.
        confidence: of the intervals of all comparisons together.
        comparisons: how many are made together.
    """
    if isinstance(a, Side):
        row = replace(row, a=a.printed, a_lo=a.lo, a_hi=a.hi, blocks_a=a.blocks)
    if isinstance(b, Side):
        row = replace(row, b=b.printed, b_lo=b.lo, b_hi=b.hi, blocks_b=b.blocks)
    if isinstance(a, str) or isinstance(b, str):
        missing = [f"{n}: {side}" for n, side in (("A", a), ("B", b)) if isinstance(side, str)]
        return replace(row, reason="; ".join(missing))
    mark = "; ".join(f"{n}: {side.mark}" for n, side in (("A", a), ("B", b)) if side.mark)
    told = not mark and min(a.blocks, b.blocks) >= MIN_BLOCKS_FOR_VERDICT
    wide = confidence ** (1 / comparisons) if told else confidence
    gap, inner = (difference(a.known, b.known, c) for c in (wide, 2 * confidence - 1))
    point, lo, hi = _on_scale(gap, row.scale)
    _, narrow_lo, narrow_hi = _on_scale(inner, row.scale)
    row = replace(
        row, effect=point, effect_lo=lo, effect_hi=hi, narrow_lo=narrow_lo, narrow_hi=narrow_hi,
        error_df=gap.df, p_value=gap.p, mark=mark, verdict=MARKED if mark else TOO_FEW,
    )  # fmt: skip
    if not told or gap.p is None:
        return row
    nothing = 1.0 if row.scale == LOG else 0.0
    ends = [end - nothing for end in (lo, hi, narrow_lo, narrow_hi) if end is not None]
    said = verdict_of((ends[0], ends[1]), (ends[2], ends[3]), row.margin or 0.0)
    return replace(row, p_adjusted=sidak(gap.p, comparisons), verdict=said)


def _on_scale(gap: Difference, scale: str) -> tuple[float | None, ...]:
    ends = (gap.point, gap.lo, gap.hi)
    if scale != LOG:
        return ends
    return tuple(None if end is None else float(np.exp(end)) for end in ends)


# ---- what one study says


def _sides(study: StudyTables, confidence: float) -> Iterator[tuple[Key, Side | str]]:
    """Every tax, pooled latency and resource of a study."""
    for row in study.effects:
        if row.quantity in (TAX, RESOURCE):
            config = AA if row.config == study.aa else row.config
            key = (row.quantity, config, row.phase, row.cell, row.metric)
            yield key, effect_side(row, confidence)
    blocks = _valid_blocks(study)
    for cell in study.cell_rows:
        if cell.block == POOLED:
            where = (cell.configuration, cell.phase, cell.cell)
            count, saturated = blocks.get(where, (0, False))
            for metric in METRICS:
                side = _latency_side(cell, metric, count, confidence)
                if saturated and isinstance(side, Side):
                    side = side._replace(mark="saturated")
                yield (LATENCY, *where, metric), side


def effect_side(row: EffectRow | None, confidence: float) -> Side | str:
    """An estimate as it is compared; a text where it has no number."""
    if row is None:
        return "not part of the design"
    if row.estimate is None:
        state = row.reason if row.quantity == RESOURCE else f"{row.status}: {row.reason}"
        return state or row.status
    is_log = row.scale == LOG
    point, *ends = (
        None if end is None else float(np.log1p(end)) if is_log else end
        for end in (row.estimate, row.lo, row.hi)
    )
    assert point is not None
    known = Known(point, None, 0)
    if row.method == EXACT:
        known = Known(point, 0.0, np.inf)
    elif ends[0] is not None and ends[1] is not None and row.df is not None:
        known = from_interval(point, ends[0], ends[1], row.df, confidence)
    return Side(row.estimate, row.lo, row.hi, known, row.n_blocks or 0, row.mark)


def _valid_blocks(study: StudyTables) -> Mapping[tuple[str, str, str], tuple[int, bool]]:
    """How many blocks each configuration has in a cell, and whether one is saturated."""
    found: dict[tuple[str, str, str], tuple[set[str], bool]] = {}
    for row in study.cell_rows:
        if row.block != POOLED and row.status == "valid":
            where = (row.configuration, row.phase, row.cell)
            blocks, saturated = found.get(where, (set(), False))
            found[where] = (blocks | {row.block}, saturated or bool(row.saturated))
    return {where: (len(blocks), saturated) for where, (blocks, saturated) in found.items()}


def _latency_side(row: CellRow, metric: str, blocks: int, confidence: float) -> Side | str:
    """A percentile pooled over blocks, on the scale of logs; Student's t of the block values."""
    value, lo, hi = (row.number(f"{metric}{end}_ms") for end in ("", "_lo", "_hi"))
    if value is None:
        return f"{row.status}: {row.reason}" if row.status != "valid" else f"no {metric}"
    if value <= 0:
        return f"{metric} is 0, which has no ratio"
    if blocks < 2 or lo is None or hi is None:
        # A single launch's interval is of its requests: launches are not in it.
        return Side(value, None, None, Known(float(np.log(value)), None, 0), blocks)
    point, low, high = (float(np.log(end)) for end in (value, lo, hi))
    return Side(value, lo, hi, from_interval(point, low, high, blocks - 1, confidence), blocks)

"""Render the page of a comparison: studies in one table, with ratios to the first study."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from connector_tax import text
from connector_tax.artifacts.metrics import HEADLINE, LATENCY_METRICS, VERDICT_METRICS
from connector_tax.artifacts.names import ALL_RATES, REFERENCES
from connector_tax.artifacts.tables import LOG, RESOURCE, TAX
from connector_tax.artifacts.verdicts import (
    CANNOT_TELL,
    COSTS,
    GAINS,
    LESS,
    in_words,
    less,
    sign_of,
)
from connector_tax.compare.rows import AA, LATENCY, ComparedRow, compare_rows
from connector_tax.compare.studies import Where, left_out, what_differs
from connector_tax.figures.resources import LOST, UNSURE
from connector_tax.figures.tables import StudyTables
from connector_tax.report.page import filled

LOOKS = {
    COSTS: COSTS,
    GAINS: GAINS,
    UNSURE: CANNOT_TELL,
    LOST: "no verdict",
    LESS: "less than the margin",
}
HEADINGS = ("configuration", "cell", "metric", "A", "B", "B against A", "p adjusted", "verdict")

# Text of a cell, and its CSS class.
Shown = tuple[str, str]


@dataclass(frozen=True)
class Comparison:
    """Two studies and the differences of B from A."""

    a: StudyTables
    b: StudyTables

    @cached_property
    def rows(self) -> list[ComparedRow]:
        """Return every comparison; rows that cost more in B come first."""
        return dearest_first(compare_rows(self.a, self.b))

    @cached_property
    def drawn(self) -> list[Where]:
        """Return the cells to show: ALL_RATES and a reference rate's, or else all of Phase A."""
        compared = list(dict.fromkeys(row.where for row in self.rows if row.quantity == TAX))
        named = {("A", s.cell_at(reference)) for s in (self.a, self.b) for reference in REFERENCES}
        sweep = [where for where in compared if where[0] == "A"]
        named.add(("A", ALL_RATES))
        # The taxes over all rates come first, since they carry the verdict.
        chosen = [where for where in sweep if where in named] or sweep or compared
        return sorted(chosen, key=lambda where: where[1] != ALL_RATES)

    @property
    def labels(self) -> dict[str, str]:
        """Return the labels of configurations by id."""
        return {item.id: item.label for item in self.a.configurations}

    @cached_property
    def first(self) -> list[ComparedRow]:
        """Return the taxes over all rates; if there are none, the taxes at the reference rates."""
        cells = self.drawn[:1] if self.drawn[0][1] == ALL_RATES else self.drawn
        return [
            row
            for row in self.rows
            if row.quantity == TAX and row.metric in metrics_of(row.cell) and row.where in cells
        ]

    @property
    def headline(self) -> str:
        """Return a sentence with the verdicts on the taxes of `first`, higher costs first."""
        judged = [row for row in self.first if row.config != AA]
        counts = Counter(look(row) for row in judged)
        parts = [f"{words} {counts[kind]}" for kind, words in LOOKS.items() if counts[kind]]
        if counts[COSTS]:
            label = self.labels[judged[0].config]
            parts[0] += f" (most {label}, {metric_name(judged[0])} ×{judged[0].effect:.3g})"
        against = f"{self.b.name} against {self.a.name}"
        return f"Verdicts of {len(judged)} taxes, {against}: {'; '.join(parts)}."

    @property
    def sections(self) -> list[tuple[str, list[ComparedRow]]]:
        """Return the detail tables, each as a heading and rows."""
        at = [row for row in self.rows if row.where in self.drawn]
        parts = [
            ("Taxes", [row for row in at if row.quantity == TAX]),
            ("Latencies, which also depend on machine and engine",
             [row for row in at if row.quantity == LATENCY]),
            ("Taxes of resources", [row for row in self.rows if row.quantity == RESOURCE]),
            ("Taxes in all other cells",
             [row for row in self.rows if row.quantity == TAX and row not in at]),
        ]  # fmt: skip
        return [(heading, members) for heading, members in parts if members]

    @cached_property
    def differing(self) -> list[tuple[str, list[str]]]:
        """Return the studies' differences, by heading."""
        parts = {**what_differs(self.a, self.b), "Not compared": left_out(self.a, self.b)}
        return [(heading, lines) for heading, lines in parts.items() if lines]


def table_of(comparisons: Sequence[Comparison]) -> tuple[list[str], list[list[Shown]]]:
    """Return headings and rows: each study's taxes, and the ratio of later studies to A.

    Args:
        comparisons: the first study with each other one, in the given order.
    """
    first = comparisons[0]
    names = [study.name for study in (first.a, *(one.b for one in comparisons))]
    headings = ["configuration", "cell", "metric", *names]
    headings += [f"{name} against {names[0]}" for name in names[1:]]
    by_key = [{(r.config, r.where, r.metric): r for r in one.first} for one in comparisons]
    rows = []
    for key in dict.fromkeys(key for of in by_key for key in of):
        pairs = [of.get(key) for of in by_key]
        known = next(row for row in pairs if row is not None)
        label, cell, metric, effect_a, *_ = cells_of(known, first.labels)
        other_effects = [text.DASH if row is None else cells_of(row, {})[4] for row in pairs]
        against = [
            ("not compared", "") if row is None
            else (f"{_effect_text(row)} {_verdict_text(row)}", look(row))
            for row in pairs
        ]  # fmt: skip
        plain = [(words, "") for words in (label, cell, metric, effect_a, *other_effects)]
        rows.append([*plain, *against])
    return headings, rows


def metrics_of(cell: str) -> Sequence[str]:
    """Return the metrics to show for a cell: medians for the one over all rates, else p90."""
    return VERDICT_METRICS if cell == ALL_RATES else HEADLINE


def metric_name(row: ComparedRow) -> str:
    """Return the name of a metric (TTFT p90) or resource."""
    metric = LATENCY_METRICS.get(row.metric)
    return row.metric if metric is None else metric.label


def look(row: ComparedRow) -> str:
    """Return the kind of result, one of LOOKS; "" for plain against plain."""
    if row.config == AA:
        return ""
    if sign := sign_of(row.verdict):
        return sign
    if row.verdict == CANNOT_TELL:
        return UNSURE
    return LESS if less(row.verdict) else LOST


def dearest_first(rows: Sequence[ComparedRow]) -> list[ComparedRow]:
    """Return rows sorted by kind of result, higher costs in B first, then by size."""
    order = [*LOOKS, ""]
    return sorted(rows, key=lambda row: (order.index(look(row)), -(row.effect or 0)))


# ---- tables


def cells_of(row: ComparedRow, labels: dict[str, str]) -> list[str]:
    """Return a row of a table as text, in the order of HEADINGS."""
    where = text.DASH if not row.cell else f"{row.phase} {row.cell}"
    return [
        labels.get(row.config, row.config), where, metric_name(row),
        _side_text(row.unit, row.a, row.a_lo, row.a_hi),
        _side_text(row.unit, row.b, row.b_lo, row.b_hi),
        _effect_text(row), text.number(row.p_adjusted, 4), _verdict_text(row),
    ]  # fmt: skip


def _side_text(unit: str, value: float | None, lo: float | None, hi: float | None) -> str:
    """Return one study's number with its interval."""
    if value is None:
        return text.DASH
    if unit == "fraction":
        return f"{text.percent(value)} {text.interval(lo, hi) if lo is not None else ''}".strip()
    ends = "" if lo is None else f" [{text.compact(lo)}, {text.compact(hi)}]"
    return text.compact(value) + ends


def _effect_text(row: ComparedRow) -> str:
    """Return the ratio, or on the raw scale the difference, with its interval."""
    decimals = 3 if row.scale == LOG else 4
    point, low, high = (
        text.number(end, decimals) for end in (row.effect, row.effect_lo, row.effect_hi)
    )
    return point if row.effect_lo is None else f"{point} [{low}, {high}]"


def _verdict_text(row: ComparedRow) -> str:
    """Return the verdict as text, with the label A/A or a mark; without a verdict the reason."""
    verdict = in_words(row.verdict, row.margin)
    if row.config == AA:
        return f"A/A ({verdict})"
    return f"{verdict} ({row.mark})" if row.mark else verdict or row.reason


def html(comparisons: Sequence[Comparison]) -> str:
    """Return the whole self-contained page."""
    details = [
        (one, [
            (heading, [(row, cells_of(row, one.labels)) for row in rows])
            for heading, rows in one.sections
        ])
        for one in comparisons
    ]  # fmt: skip
    headings, rows = table_of(comparisons)
    shown = {
        "first": comparisons[0].a, "look": look, "headings": headings, "rows": rows,
        "columns": HEADINGS, "details": details,
        "studies": [comparisons[0].a, *(one.b for one in comparisons)],
    }  # fmt: skip
    return filled(Path(__file__).with_name("compare.html.j2"), shown)

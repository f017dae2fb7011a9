"""The pages of a comparison: of two studies as HTML and Markdown with a forest plot; of many.

`connector-tax compare A B C ...` (vLLM 0.31, 0.32, 0.33) shows each study's own tax over all rates
with its own verdict; what is between two of them is compared by naming these two.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from connector_tax import text
from connector_tax.artifacts.metrics import HEADLINE, LATENCY_METRICS, VERDICT_METRICS
from connector_tax.artifacts.names import ALL_RATES, REFERENCES
from connector_tax.artifacts.tables import LOG, RESOURCE, TAX, EffectRow
from connector_tax.artifacts.verdicts import (
    CANNOT_TELL,
    COSTS,
    GAINS,
    LESS,
    TOO_FEW,
    in_words,
    less,
    sign_of,
)
from connector_tax.compare.rows import AA, LATENCY, ComparedRow, compare_rows
from connector_tax.compare.studies import Where, left_out, what_differs
from connector_tax.figures import rows as row_plots
from connector_tax.figures import style
from connector_tax.figures.resources import LOST, UNSURE
from connector_tax.figures.tables import StudyTables, frame
from connector_tax.marks import AA_MARK
from connector_tax.report.page import SVG, data_url, filled

LOOKS = {
    COSTS: COSTS,
    GAINS: GAINS,
    UNSURE: CANNOT_TELL,
    LOST: "no verdict",
    LESS: "less than the margin",
}
HEADINGS = ("configuration", "cell", "metric", "A", "B", "B against A", "p adjusted", "verdict")
TITLE = "Ratio of taxes, B over A"
CAPTION = (
    "For each configuration (1 + tax in B) / (1 + tax in A), with its 95 % interval: right of 1 "
    "the configuration costs more in B. Dotted: the margin fixed in the studies. The last row of "
    "a panel is plain against plain, which should be 1."
)
ROW_IN = 0.165


@dataclass(frozen=True)
class Comparison:
    """Two studies and all that is said of them."""

    a: StudyTables
    b: StudyTables

    @cached_property
    def rows(self) -> list[ComparedRow]:
        """Every comparison."""
        return compare_rows(self.a, self.b)

    @cached_property
    def drawn(self) -> list[Where]:
        """All rates and the compared cells at a reference rate; else all of Phase A."""
        compared = list(dict.fromkeys(row.where for row in self.rows if row.quantity == TAX))
        named = {("A", s.cell_at(reference)) for s in (self.a, self.b) for reference in REFERENCES}
        sweep = [where for where in compared if where[0] == "A"]
        named.add(("A", ALL_RATES))
        # The taxes over all rates first: they carry the verdict.
        chosen = [where for where in sweep if where in named] or sweep or compared
        return sorted(chosen, key=lambda where: where[1] != ALL_RATES)

    @property
    def title(self) -> str:
        """Both studies' names."""
        return f"{self.a.name} (A) and {self.b.name} (B)"

    @property
    def labels(self) -> dict[str, str]:
        """Configuration id to label."""
        return {item.id: item.label for item in self.a.configurations}

    @property
    def headline(self) -> str:
        """The verdicts on the taxes over all rates, or on those drawn; what costs more first."""
        cells = self.drawn[:1] if self.drawn[0][1] == ALL_RATES else self.drawn
        judged = [
            row
            for row in dearest_first(self.rows)
            if row.quantity == TAX
            and row.config != AA
            and row.metric in metrics_of(row.cell)
            and row.where in cells
        ]
        counts = Counter(look(row) for row in judged)
        told = [f"{words} {counts[kind]}" for kind, words in LOOKS.items() if counts[kind]]
        if counts[COSTS]:
            label = self.labels[judged[0].config]
            told[0] += f" (most {label}, {metric_name(judged[0])} ×{judged[0].effect:.3g})"
        return f"Verdicts of {len(judged)} taxes, B against A: {'; '.join(told)}."

    @property
    def sections(self) -> list[tuple[str, list[ComparedRow]]]:
        """The tables of the page: heading and rows."""
        first = [r for r in self.rows if r.quantity == TAX and r.where in self.drawn]
        parts = [
            ("Taxes in the cells of the forest plot", first),
            ("Latencies, which hold the machine and the engine too",
             [r for r in self.rows if r.quantity == LATENCY and r.where in self.drawn]),
            ("Taxes of resources", [r for r in self.rows if r.quantity == RESOURCE]),
            ("Taxes in all other cells",
             [r for r in self.rows if r.quantity == TAX and r not in first]),
        ]  # fmt: skip
        return [(heading, dearest_first(members)) for heading, members in parts if members]

    @cached_property
    def differing(self) -> list[tuple[str, list[str]]]:
        """What the studies differ in, by heading."""
        parts = {**what_differs(self.a, self.b), "Not compared": left_out(self.a, self.b)}
        return [(heading, lines) for heading, lines in parts.items() if lines]


def metrics_of(cell: str) -> Sequence[str]:
    """What is drawn of a cell: medians over all rates, p90 at one."""
    return VERDICT_METRICS if cell == ALL_RATES else HEADLINE


def metric_name(row: ComparedRow) -> str:
    """TTFT p90; a resource under its own name."""
    metric = LATENCY_METRICS.get(row.metric)
    return row.metric if metric is None else metric.label


def look(row: ComparedRow) -> str:
    """The kind of answer, one of LOOKS; empty for plain against plain."""
    if row.config == AA:
        return ""
    if sign := sign_of(row.verdict):
        return sign
    if row.verdict == CANNOT_TELL:
        return UNSURE
    return LESS if less(row.verdict) else LOST


def dearest_first(rows: Sequence[ComparedRow]) -> list[ComparedRow]:
    """Rows by the kind of answer, those that cost more in B first, of a kind the dearest."""
    order = [*LOOKS, ""]
    return sorted(rows, key=lambda row: (order.index(look(row)), -(row.effect or 0)))


# ---- tables


def cells_of(row: ComparedRow, labels: dict[str, str]) -> list[str]:
    """A row of a table as text, in the order of HEADINGS."""
    where = text.DASH if not row.cell else f"{row.phase} {row.cell}"
    return [
        labels.get(row.config, row.config), where, metric_name(row),
        _side_text(row.unit, row.a, row.a_lo, row.a_hi),
        _side_text(row.unit, row.b, row.b_lo, row.b_hi),
        _effect_text(row), text.number(row.p_adjusted, 4), _verdict_text(row),
    ]  # fmt: skip


def _side_text(unit: str, value: float | None, lo: float | None, hi: float | None) -> str:
    """One study's number with its interval."""
    if value is None:
        return text.DASH
    if unit == "fraction":
        return f"{text.percent(value)} {text.interval(lo, hi) if lo is not None else ''}".strip()
    ends = "" if lo is None else f" [{text.compact(lo)}, {text.compact(hi)}]"
    return text.compact(value) + ends


def _effect_text(row: ComparedRow) -> str:
    """The ratio, or on the raw scale the difference, with its interval."""
    decimals = 3 if row.scale == LOG else 4
    point, low, high = (
        text.number(end, decimals) for end in (row.effect, row.effect_lo, row.effect_hi)
    )
    return point if row.effect_lo is None else f"{point} [{low}, {high}]"


def _verdict_text(row: ComparedRow) -> str:
    """The verdict; A/A, a mark or a reason in its place."""
    said = in_words(row.verdict, row.margin)
    if row.config == AA:
        return f"A/A ({said})"
    return f"{said} ({row.mark})" if row.mark else said or row.reason


def markdown(comparison: Comparison) -> str:
    """The comparison as Markdown, without the taxes of other cells."""
    lines = [f"# {comparison.title}", "", comparison.headline, ""]
    for heading, rows in comparison.sections[:3]:
        cells = [cells_of(row, comparison.labels) for row in rows]
        lines += [f"## {heading}", "", *markdown_table(HEADINGS, cells), ""]
    for heading, told in comparison.differing:
        lines += [f"## {heading}: A → B", "", *(f"- `{line}`" for line in told), ""]
    return "\n".join(lines)


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    lines = [list(headings), ["---"] * len(headings), *rows]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]


def html(comparison: Comparison, figure: Path) -> str:
    """The whole page; the figure is inlined."""
    tables = [
        (heading, [(row, cells_of(row, comparison.labels)) for row in rows])
        for heading, rows in comparison.sections
    ]
    shown = {
        "comparison": comparison, "look": look, "headings": HEADINGS, "tables": tables,
        "figure_title": TITLE, "caption": CAPTION, "figure": data_url(SVG, figure.read_bytes()),
        "studies": [("A", comparison.a), ("B", comparison.b)],
    }  # fmt: skip
    return filled(Path(__file__).with_name("compare.html.j2"), shown)


# ---- the forest plot


def draw(comparison: Comparison) -> style.Picture:
    """Each ratio of taxes with interval and verdict: panels of TTFT and TPOT for each cell."""
    a = comparison.a
    taxes = [row for row in comparison.rows if row.quantity == TAX]
    panels = [
        panel
        for where in comparison.drawn
        for metric in metrics_of(where[1])
        if (panel := [r for r in taxes if (r.where, r.metric) == (where, metric)])
    ]
    heights = [ROW_IN * len(panel) for panel in panels]
    sides = (f"{side} {study.name}, {study.blocks} block{'' if study.blocks == 1 else 's'}"
             for side, study in (("A", a), ("B", comparison.b)))  # fmt: skip
    height = sum(heights) + 0.5 * len(panels)
    figure = style.new_figure(a, style.COLUMN_IN, height, stamp="; ".join(sides))
    grid = figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    for axes, panel in zip(grid, panels, strict=True):
        _panel(comparison, axes, panel)
    drawn = frame([row for panel in panels for row in panel], ComparedRow)
    return replace(style.picture(figure, drawn), title=TITLE)


def _panel(comparison: Comparison, axes: Axes, rows: Sequence[ComparedRow]) -> None:
    ends = [e for r in rows for e in (r.effect, r.effect_lo, r.effect_hi) if e is not None]
    low, high = min([0.97, *ends]), max([1.03, *ends])
    axes.set_xlim(low - 0.04 * (high - low), high + 0.04 * (high - low))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.6g}"))
    axes.axvline(1, color="black", lw=0.6, zorder=4)
    if rows[0].margin is not None:
        for end in (1 - rows[0].margin, 1 + rows[0].margin):
            axes.axvline(end, color="#7c6a3c", lw=0.6, linestyle=(0, (1, 1.5)), zorder=0.8)
    marks = {**style.marks(comparison.a), AA: AA_MARK}
    for y, row in enumerate(rows):
        drawn = vars(row) | {"status": row.reason, "reason": "", "mark": ""}
        columns = ("effect", "effect_lo", "effect_hi")
        if row_plots.value(axes, y, drawn, columns, marks[row.config]):
            said = "" if row.verdict == TOO_FEW else in_words(row.verdict, row.margin)
            off = row.config != AA and bool(sign_of(row.verdict))
            row_plots.beside(axes, y, _ratio_text(row))
            row_plots.beside(axes, y, "A/A" if row.config == AA else said, bold=off, offset=84)
    rate = "over all rates" if rows[0].rate_rps is None else f"at {rows[0].rate_rps:g} req/s"
    labels = comparison.labels | {AA: "plain again (A/A)"}
    row_plots.prepare(axes, [labels[row.config] for row in rows], f"{metric_name(rows[0])} {rate}")
    axes.set_xlabel("(1 + tax in B) / (1 + tax in A)")
    axes.grid(axis="x")


def _ratio_text(row: ComparedRow) -> str:
    """'0.93 [0.90, 0.97]'; of two numbers without intervals the ratio alone."""
    if row.effect is None:
        return ""
    point = f"{row.effect:.3g}" if abs(np.log(max(row.effect, 1e-9))) > 1 else f"{row.effect:.3f}"
    if row.effect_lo is None or row.effect_hi is None:
        return point
    return f"{point} [{row.effect_lo:.3f}, {row.effect_hi:.3f}]"


# ---- many studies


def versions(studies: Sequence[StudyTables]) -> Iterator[tuple[str, str, list[EffectRow | None]]]:
    """Label, metric and each study's tax of each configuration that one of the studies has."""
    labels = {item.id: item.label for study in studies for item in study.connectors}
    for config, label in labels.items():
        for metric in VERDICT_METRICS:
            taxes = [study.at(ALL_RATES, metric).get(config) for study in studies]
            yield label, LATENCY_METRICS[metric].label, taxes


def tax_words(row: EffectRow | None) -> str:
    """`+12 % [+10, +14] costs`, or why there is no number."""
    if row is None:
        return "not in the study"
    if row.estimate is None:
        return f"{row.status}: {row.reason}"
    return f"{text.tax(*row.shown)} {row.mark or in_words(row.verdict, row.margin)}"


def versions_html(studies: Sequence[StudyTables]) -> str:
    """The page of many studies; it needs nothing else."""
    shown = {"studies": studies, "rows": versions(studies), "words": tax_words, "sign_of": sign_of}
    return filled(Path(__file__).with_name("versions.html.j2"), shown)

"""A comparison as a page that holds everything, and as Markdown."""

import base64
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from connector_tax import text
from connector_tax.artifacts import paths
from connector_tax.artifacts.metrics import LATENCY_METRICS
from connector_tax.artifacts.names import ALL_RATES
from connector_tax.artifacts.tables import LOG, RESOURCE, TAX
from connector_tax.artifacts.verdicts import CANNOT_TELL, COSTS, GAINS, LESS, in_words, less
from connector_tax.compare.forest import CAPTION, TITLE, forest_cells, metrics_of
from connector_tax.compare.rows import AA, LATENCY, ComparedRow
from connector_tax.compare.studies import Differences
from connector_tax.figures.resources import LOST, UNSURE, sign_of
from connector_tax.figures.tables import StudyTables
from connector_tax.report.templates import templates

LOOKS = {
    COSTS: "dearer",
    GAINS: "cheaper",
    UNSURE: "cannot be told",
    LOST: "without a verdict",
    LESS: "within the margin",
}


@dataclass(frozen=True)
class Comparison:
    """Two studies and all that is said of them."""

    a: StudyTables
    b: StudyTables
    rows: Sequence[ComparedRow]
    differences: Differences
    left_out: Sequence[str]

    @property
    def headline(self) -> str:
        """What got dearer in B first, of the taxes over all rates; else of those drawn."""
        cells = forest_cells(self.a, self.b, self.rows)
        cells = cells[:1] if cells[0][1] == ALL_RATES else cells
        drawn = [
            row
            for row in dearest_first(self.rows)
            if row.quantity == TAX
            and row.config != AA
            and row.metric in metrics_of(row.cell)
            and (row.phase, row.cell) in cells
        ]
        counts = Counter(look(row) for row in drawn)
        told = [f"{counts[kind]} {words}" for kind, words in LOOKS.items() if counts[kind]]
        if counts[COSTS]:
            label = labels_of(self)[drawn[0].config]
            told[0] += f", most {label} ({metric_name(drawn[0])} ×{drawn[0].effect:.3g})"
        return f"Of {len(drawn)} taxes, in B against A: {'; '.join(told)}."


def look(row: ComparedRow) -> str:
    """The kind of answer, one of LOOKS; empty for plain against plain."""
    if row.config == AA:
        return ""
    if less(row.verdict):
        return LESS
    return sign_of(row.verdict) or (UNSURE if row.verdict == CANNOT_TELL else LOST)


def dearest_first(rows: Sequence[ComparedRow]) -> list[ComparedRow]:
    """Rows by the kind of answer, those that cost more in B first, of a kind the dearest."""
    order = [*LOOKS, ""]
    return sorted(rows, key=lambda row: (order.index(look(row)), -(row.effect or 0)))


def side_text(row: ComparedRow, side: str) -> str:
    """One study's number with its interval."""
    value, lo, hi = (getattr(row, f"{side}{end}") for end in ("", "_lo", "_hi"))
    if value is None:
        return text.DASH
    if row.unit == "fraction":
        return f"{text.percent(value)} {text.interval(lo, hi) if lo is not None else ''}".strip()
    ends = "" if lo is None else f" [{text.compact(lo)}, {text.compact(hi)}]"
    return text.compact(value) + ends


def effect_text(row: ComparedRow) -> str:
    """The ratio, or on the raw scale the difference, with its interval."""
    if row.effect is None:
        return text.DASH
    decimals = 3 if row.scale == LOG else 4
    ends = ""
    if row.effect_lo is not None:
        low, high = (text.number(end, decimals) for end in (row.effect_lo, row.effect_hi))
        ends = f" [{low}, {high}]"
    return text.number(row.effect, decimals) + ends


def verdict_text(row: ComparedRow) -> str:
    """The verdict; A/A, a mark or a reason in its place."""
    said = in_words(row.verdict, row.margin)
    if row.config == AA:
        return f"A/A ({said})"
    return f"{said} ({row.mark})" if row.mark else said or row.reason


def sections(comparison: Comparison) -> list[tuple[str, list[ComparedRow]]]:
    """The tables of the page: heading and rows."""
    rows = comparison.rows
    drawn = forest_cells(comparison.a, comparison.b, rows)
    first = [r for r in rows if r.quantity == TAX and (r.phase, r.cell) in drawn]
    parts = [
        ("Taxes in the cells of the forest plot", first),
        ("Latencies, which hold the machine and the engine too",
         [r for r in rows if r.quantity == LATENCY and (r.phase, r.cell) in drawn]),
        ("Taxes of resources", [r for r in rows if r.quantity == RESOURCE]),
        ("Taxes in all other cells", [r for r in rows if r.quantity == TAX and r not in first]),
    ]  # fmt: skip
    return [(heading, dearest_first(members)) for heading, members in parts if members]


def differing(comparison: Comparison) -> list[tuple[str, Sequence[str]]]:
    """What the studies differ in, by heading."""
    told = comparison.differences
    parts = [
        ("Design", told.design),
        ("Analysis settings", told.analysis),
        ("Environment", told.environment),
        ("What the running engines resolved", told.engines),
        ("Not compared", comparison.left_out),
    ]
    return [(heading, lines) for heading, lines in parts if lines]


def metric_name(row: ComparedRow) -> str:
    """TTFT p90; a resource under its own name."""
    metric = LATENCY_METRICS.get(row.metric)
    return row.metric if metric is None else metric.label


def cells_of(row: ComparedRow, labels: dict[str, str]) -> list[str]:
    """A row of a table as text, in the order of HEADINGS."""
    where = text.DASH if not row.cell else f"{row.phase} {row.cell}"
    return [
        labels.get(row.config, row.config), where, metric_name(row), side_text(row, "a"),
        side_text(row, "b"), effect_text(row), text.number(row.p_adjusted, 4), verdict_text(row),
    ]  # fmt: skip


HEADINGS = ("configuration", "cell", "metric", "A", "B", "B against A", "p adjusted", "verdict")


def labels_of(comparison: Comparison) -> dict[str, str]:
    """Configuration id to label."""
    return {item.id: item.label for item in comparison.a.configurations}


def markdown(comparison: Comparison) -> str:
    """The comparison as Markdown, without the taxes of other cells."""
    lines = [f"# {_title(comparison)}", "", comparison.headline, ""]
    for heading, rows in sections(comparison)[:3]:
        cells = [cells_of(row, labels_of(comparison)) for row in rows]
        lines += [f"## {heading}", "", *markdown_table(HEADINGS, cells), ""]
    for heading, told in differing(comparison):
        lines += [f"## {heading}: A → B", "", *(f"- `{line}`" for line in told), ""]
    return "\n".join(lines)


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    lines = [list(headings), ["---"] * len(headings), *rows]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]


def html(comparison: Comparison, figure: Path) -> str:
    """The whole page; the figure is inlined."""
    labels = labels_of(comparison)
    tables = [
        (heading, [(row, cells_of(row, labels)) for row in rows])
        for heading, rows in sections(comparison)
    ]
    template = templates([Path(__file__).parent]).get_template("compare.html.j2")
    return (
        template.render(
            title=_title(comparison), comparison=comparison, look=look, headings=HEADINGS,
            tables=tables, differing=differing(comparison), figure_title=TITLE, caption=CAPTION,
            figure=f"data:image/svg+xml;base64,{base64.b64encode(figure.read_bytes()).decode()}",
            studies=[("A", comparison.a), ("B", comparison.b)], design=paths.STUDY,
        )
        + "\n"
    )  # fmt: skip


def _title(comparison: Comparison) -> str:
    return f"{comparison.a.name} (A) and {comparison.b.name} (B)"

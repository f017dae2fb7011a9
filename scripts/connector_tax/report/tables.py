"""Build a page's tables: columns as functions of a row, with sortable cells.

Columns with the same value in all rows are replaced by a text.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from connector_tax import text
from connector_tax.artifacts.tables import EffectRow

Row = TypeVar("Row")


@dataclass(frozen=True)
class TableCell:
    """A cell's text and its number for sorting; without a number it sorts by its text.

    `verdict` is the row behind a verdict that depends on the margin.
    """

    text: str
    number: float | None = None
    verdict: EffectRow | None = None


@dataclass(frozen=True)
class TableRow:
    """The cells of a row; `missing` marks a row that has a reason instead of a number."""

    cells: Sequence[TableCell]
    missing: bool = False


@dataclass(frozen=True)
class Table:
    """A table of a page.

    Attributes:
        id: id of the element, the target of links.
        columns: headings, and whether a column is numeric.
        same: text on the columns that were equal in every row.
    """

    id: str
    columns: Sequence[tuple[str, bool]]
    rows: Sequence[TableRow]
    same: Sequence[str]


# A heading, and a function that returns the cell or text of a row.
Column = tuple[str, Callable[[Row], TableCell | str]]


def of_rows(
    name: str, columns: Sequence[Column[Any]], rows: Iterable[Any], first: int | None = None
) -> Table:
    """Return a table of rows; an invalid row shows its `first` columns, then the reason."""
    made = []
    for row in rows:
        is_lost = first is not None and row.status != "valid"
        contents = [says(row) for _, says in (columns[:first] if is_lost else columns)]
        cells = [TableCell(words) if isinstance(words, str) else words for words in contents]
        if is_lost:
            words = [cell.text for cell in cells] + [text.DASH] * (len(columns) - len(cells) - 1)
            cells = [*map(TableCell, words), TableCell(f"{row.status}: {row.reason}")]
        made.append(TableRow(cells, is_lost))
    return table(name, [heading for heading, _ in columns], made)


def table(name: str, columns: Sequence[str], rows: Sequence[TableRow]) -> Table:
    """Return the table without columns (except the first) that are equal in every row.

    Columns of verdicts that depend on the margin stay, since the reader can change it.
    """
    full = [row for row in rows if not row.missing]
    texts = [{row.cells[place].text for row in full} for place in range(len(columns))]
    moved = {k for row in full for k, cell in enumerate(row.cells) if cell.verdict is not None}
    # The last cell of a row without numbers is the reason.
    always = {0, *moved} | ({len(columns) - 1} if len(full) < len(rows) else set())
    kept = [
        place
        for place, values in enumerate(texts)
        if place in always or len(full) < 2 or len(values) > 1
    ]
    same = [
        f"{columns[place]} {next(iter(values))}"
        for place, values in enumerate(texts)
        if place not in kept and not values <= {"", text.DASH}
    ]
    return Table(
        name,
        [(columns[k], any(row.cells[k].number is not None for row in full)) for k in kept],
        [TableRow([row.cells[k] for k in kept], row.missing) for row in rows],
        same,
    )


# ---- numbers as cells


def percent(value: float | None) -> TableCell:
    """Return a cell with a share in per cent."""
    return TableCell(text.DASH if value is None else text.signed(100 * value, 1), value)


def number(value: float | None, decimals: int = 2) -> TableCell:
    """Return a cell with a number, rounded to `decimals`."""
    return TableCell(text.number(value, decimals), value)


def compact(value: float | None) -> TableCell:
    """Return a cell with a number that has as many digits as it needs."""
    return TableCell(text.compact(value), value)


def interval(low: float | None, high: float | None) -> TableCell:
    """Return a cell with an interval of taxes, which sorts by its lower end."""
    return TableCell(text.interval(low, high), low)


def signed_size(*ends: float | None) -> TableCell:
    """Return a cell such as `+12 [+10, +14]`: a number and its interval."""
    return TableCell(text.size(*ends), ends[0])

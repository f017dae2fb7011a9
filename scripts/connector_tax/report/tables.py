"""A table of the page: sortable cells, and columns that say the same in every row taken out."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TableCell:
    """What a cell says, and the number it is sorted by; None sorts it by its text."""

    text: str
    number: float | None = None


@dataclass(frozen=True)
class TableRow:
    """The cells of a row; `lost` marks one that has no number, for the reason it gives."""

    cells: Sequence[TableCell]
    lost: bool = False


@dataclass(frozen=True)
class Table:
    """What the page shows of a table.

    Attributes:
        id: of the element, and the target of links.
        columns: headings, and whether numbers stand below.
        same: columns that were the same in every row, in words.
    """

    id: str
    columns: Sequence[tuple[str, bool]]
    rows: Sequence[TableRow]
    same: Sequence[str]


def table(name: str, columns: Sequence[str], rows: Sequence[TableRow]) -> Table:
    """The table without the columns, but the first, that say the same in every row."""
    full = [row for row in rows if not row.lost]
    texts = [{row.cells[place].text for row in full} for place in range(len(columns))]
    kept = [
        place
        for place in range(len(columns))
        if place == 0
        or len(full) < 2
        or len(texts[place]) > 1
        # The last column of a row without numbers holds the reason.
        or (len(full) < len(rows) and place == len(columns) - 1)
    ]
    same = [
        f"{columns[place]} {next(iter(texts[place]))}"
        for place in range(len(columns))
        if place not in kept and not texts[place] <= {"", "–"}
    ]
    numeric = [any(row.cells[place].number is not None for row in full) for place in kept]
    return Table(
        name,
        [(columns[place], number) for place, number in zip(kept, numeric, strict=True)],
        [TableRow([row.cells[place] for place in kept], row.lost) for row in rows],
        same,
    )


def lost(columns: Sequence[str], first: Sequence[str], reason: str) -> TableRow:
    """A row without numbers: what it is about, then dashes, then the reason."""
    dashes = [TableCell("–")] * (len(columns) - len(first) - 1)
    return TableRow([*map(TableCell, first), *dashes, TableCell(reason)], lost=True)

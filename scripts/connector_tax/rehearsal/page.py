"""What a rehearsal says, as sections of sentences and tables: Markdown, or 80 columns."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

COLUMNS = 80


@dataclass(frozen=True)
class Section:
    """A heading, sentences, and a table whose first column is text and whose others are numbers."""

    title: str
    sentences: Sequence[str] = ()
    headings: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = field(default_factory=list)


def markdown(title: str, sections: Sequence[Section]) -> str:
    """The sections as a page."""
    lines = [f"# {title}", ""]
    for section in sections:
        lines += [f"## {section.title}", ""]
        lines += [f"- {sentence}" for sentence in section.sentences]
        if section.sentences:
            lines.append("")
        if section.rows:
            lines += [_row(section.headings), _row(["---"] * len(section.headings))]
            lines += [*(_row(row) for row in section.rows), ""]
    return "\n".join(lines)


def _row(values: Sequence[str]) -> str:
    return f"| {' | '.join(value.replace('|', '/') for value in values)} |"


def show(title: str, sections: Sequence[Section], console: Console | None = None) -> None:
    """Print the sections, within 80 columns."""
    console = console or Console(width=COLUMNS)
    console.rule(title)
    for section in sections:
        console.print(f"\n[bold]{section.title}[/bold]")
        for sentence in section.sentences:
            console.print(f"- {sentence}", markup=False, highlight=False)
        if section.rows:
            table = Table(box=None, pad_edge=False)
            for number, heading in enumerate(section.headings):
                table.add_column(heading, justify="right" if number else "left", overflow="fold")
            for row in section.rows:
                table.add_row(*(value.replace("[", "\\[") for value in row))
            console.print(table)

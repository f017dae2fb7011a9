"""A page of sentences and tables, the same in a terminal of 80 columns and as Markdown."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field

import pandas as pd

COLUMNS = 80


@dataclass(frozen=True)
class Section:
    """A heading, sentences, and a table of text."""

    title: str
    sentences: list[str] = field(default_factory=list)
    headings: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


def page(title: str, sections: Sequence[Section]) -> str:
    """The sections as a page; a table stands as it is printed."""
    lines = [f"# {title}", ""]
    for section in sections:
        lines += [f"## {section.title}", ""]
        for sentence in section.sentences:
            lines += textwrap.wrap(f"- {sentence}", COLUMNS, subsequent_indent="  ")
        if section.sentences:
            lines.append("")
        if section.rows:
            table = pd.DataFrame(section.rows, columns=list(section.headings))
            lines += ["```", table.to_string(index=False), "```", ""]
    return "\n".join(lines)

"""The templates of the HTML pages."""

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def templates(folders: Sequence[Path] = ()) -> Environment:
    """The templates of these folders, and those of the report, which hold the pages' style."""
    return Environment(
        loader=FileSystemLoader([*folders, Path(__file__).parent]), autoescape=True,
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip

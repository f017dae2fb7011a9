"""Format tables and numbers consistently: units, signs, intervals, a dash if one is missing."""

from collections.abc import Mapping, Sequence
from typing import Any

DASH = "–"
MINUS = "\u2212"


def signed(value: float, decimals: int) -> str:
    """Format a number with sign, true minus and thousands separators; zero has no sign."""
    rounded = round(value, decimals) + 0.0
    sign = "+" if rounded else ""
    return f"{rounded:{sign},.{decimals}f}".replace("-", MINUS)


def percent(value: float | None) -> str:
    """Format a tax: '+12.3 %'."""
    return DASH if value is None else f"{signed(100 * value, 1)} %"


def interval(low: float | None, high: float | None) -> str:
    """Format the interval of a tax in per cent: '[+10.1, +14.6]'."""
    if low is None or high is None:
        return "no interval"
    return f"[{signed(100 * low, 1)}, {signed(100 * high, 1)}]"


def size(
    value: float | None, low: float | None = None, high: float | None = None, *, unit: str = ""
) -> str:
    """Format a number with its interval, in the precision of the largest: '+31 [+27, +35]'."""
    if value is None:
        return DASH
    ends = [end for end in (low, high) if end is not None]
    decimals = 1 if max(map(abs, (value, *ends))) < 9.95 else 0
    words = [signed(number, decimals) for number in (value, *ends)]
    return f"{words[0]}{unit}" + (f" [{', '.join(words[1:])}]" if len(ends) == 2 else "")


def tax(value: float | None, low: float | None = None, high: float | None = None) -> str:
    """Format a tax in per cent with its interval: '+140 % [+91, +203]'."""
    return size(*(None if end is None else 100 * end for end in (value, low, high)), unit=" %")


def number(value: float | None, decimals: int = 2) -> str:
    """Format a number with a fixed count of decimals."""
    return DASH if value is None else f"{value:z.{decimals}f}".replace("-", MINUS)


def compact(value: Any) -> str:
    """Format any recorded value in a few characters: numbers to 4 digits, lists and mappings
    inline.
    """
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:z.4g}".replace("-", MINUS)
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {compact(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return "[" + ", ".join(compact(item) for item in value) + "]"
    return str(value)


def duration(seconds: float) -> str:
    """Return seconds as '42 s', '7.5 min' or '5.2 h'."""
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.2f} h"


def markdown_table(headings: Sequence[str], *rows: Sequence[str]) -> list[str]:
    """Return the lines of a Markdown table; a `|` in a cell is not escaped."""
    return [f"| {' | '.join(cells)} |" for cells in (headings, ["---"] * len(headings), *rows)]

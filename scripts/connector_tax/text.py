"""How numbers read everywhere: units, signs, intervals; an absent number is a dash."""

from collections.abc import Mapping
from typing import Any

DASH = "–"
MINUS = "\u2212"


def signed(value: float, decimals: int) -> str:
    """A number with its sign, a real minus."""
    return f"{round(value, decimals) + 0.0:+.{decimals}f}".replace("-", MINUS)


def percent(value: float | None) -> str:
    """A tax: '+12.3 %'."""
    return DASH if value is None else f"{signed(100 * value, 1)} %"


def interval(low: float | None, high: float | None) -> str:
    """The interval of a tax: '[+10.1, +14.6]', in per cent."""
    if low is None or high is None:
        return "no interval"
    return f"[{signed(100 * low, 1)}, {signed(100 * high, 1)}]"


def tax(value: float | None, low: float | None, high: float | None) -> str:
    """A tax with its interval, as precisely as the widest allows: '+140 % [+91, +203]'."""
    if value is None:
        return DASH
    ends = [100 * end for end in (low, high) if end is not None]
    decimals = 1 if max(map(abs, (100 * value, *ends))) < 10 else 0
    interval = f" [{', '.join(signed(end, decimals) for end in ends)}]" if len(ends) == 2 else ""
    return f"{signed(100 * value, decimals)} %{interval}"


def number(value: float | None, decimals: int = 2) -> str:
    """A plain number with a fixed count of decimals."""
    return DASH if value is None else f"{value:.{decimals}f}".replace("-", MINUS)


def compact(value: Any) -> str:
    """Any recorded value in a few characters: numbers to 4 digits, lists and mappings inline."""
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}".replace("-", MINUS)
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {compact(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return "[" + ", ".join(compact(item) for item in value) + "]"
    return str(value)


def duration(seconds: float) -> str:
    """Seconds as '42 s', '7.5 min' or '5.2 h'."""
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.2f} h"

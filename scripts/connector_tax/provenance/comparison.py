"""Is a published value what was recomputed? Numbers to a relative 1e-8, everything else exactly."""

import csv
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from connector_tax.files import ArtifactError, reading

Table = list[dict[str, str]]
Row = Mapping[str, Any]
RELATIVE, ABSOLUTE = 1e-8, 1e-10
# Two ways of integrating over the baseline and the common error agree to this.
TOLERANCES = {"p_adjusted": 1e-4}


def differences(published: Any, recomputed: Any, where: str) -> Iterator[str]:
    """One line for each place in which two values differ: `key: published a, recomputed b`."""
    if isinstance(recomputed, Mapping) and isinstance(published, Mapping):
        for key in dict.fromkeys((*recomputed, *published)):
            if key not in published or key not in recomputed:
                which = "published" if key in published else "recomputed"
                yield f"{where}.{key}: only {which}"
            else:
                yield from differences(published[key], recomputed[key], f"{where}.{key}")
    elif isinstance(recomputed, list | tuple) and isinstance(published, list):
        if len(recomputed) != len(published):
            yield f"{where}: published {len(published)} entries, recomputed {len(recomputed)}"
        for position, pair in enumerate(zip(published, recomputed, strict=False)):
            yield from differences(*pair, f"{where}[{position}]")
    elif not same(published, recomputed):
        yield f"{where}: published {published!r}, recomputed {recomputed!r}"


def same(published: Any, recomputed: Any, tolerance: float | None = None) -> bool:
    """Whether two scalars agree; numbers within the absolute `tolerance` where there is one."""
    if isinstance(recomputed, bool) or isinstance(published, bool) or recomputed is None:
        return published is recomputed
    if isinstance(recomputed, int | float) and isinstance(published, int | float):
        near = ABSOLUTE if tolerance is None else tolerance
        return math.isclose(published, recomputed, rel_tol=RELATIVE, abs_tol=near)
    return bool(published == recomputed)


def text_differs(published: str, recomputed: Any, tolerance: float | None = None) -> bool:
    """Whether a CSV field differs from a value: empty is None, `true`/`True` is True."""
    if recomputed is None or recomputed == "":
        return published != ""
    if isinstance(recomputed, bool):
        return published.lower() != str(recomputed).lower()
    if isinstance(recomputed, int | float):
        try:
            return not same(float(published), float(recomputed), tolerance)
        except ValueError:
            return True
    return published != str(recomputed)


def field_differences(published: Mapping[str, str], recomputed: Row, where: str) -> Iterator[str]:
    """One line for each field of a published row that differs: `where: column: published ...`."""
    for column, text in published.items():
        value = recomputed.get(column)
        # Where a number is missing the reason is recomputed; elsewhere it is a remark.
        remark = column == "reason" and value is None
        if not remark and text_differs(text, value, TOLERANCES.get(column)):
            shown = "" if value is None else value
            yield f"{where}: {column}: published {text!r}, recomputed {shown!r}"


def read_csv(path: Path) -> Table:
    """The rows of a published CSV, a row without any value left out.

    Raises:
        ArtifactError: the file is missing or a folder, or a row has not as many fields as the head.
    """
    with reading(path), path.open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    for number, row in enumerate(rows, 2):
        if None in row or None in row.values():
            raise ArtifactError(f"{path}:{number}: not as many fields as the head has columns")
    return [row for row in rows if any(row.values())]

"""Is a published value what was recomputed? Numbers to a relative 1e-8, everything else exactly."""

import csv
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from connector_tax.files import ArtifactError

Table = list[dict[str, str]]
RELATIVE, ABSOLUTE = 1e-8, 1e-10


def differences(published: Any, found: Any, where: str) -> Iterator[str]:
    """One line for each place in which two values differ: `key: published a, recomputed b`."""
    if isinstance(found, Mapping) and isinstance(published, Mapping):
        for key in dict.fromkeys((*found, *published)):
            if key not in published or key not in found:
                which = "published" if key in published else "recomputed"
                yield f"{where}.{key}: only {which}"
            else:
                yield from differences(published[key], found[key], f"{where}.{key}")
    elif isinstance(found, list | tuple) and isinstance(published, list):
        if len(found) != len(published):
            yield f"{where}: published {len(published)} entries, recomputed {len(found)}"
        for position, pair in enumerate(zip(published, found, strict=False)):
            yield from differences(*pair, f"{where}[{position}]")
    elif not same(published, found):
        yield f"{where}: published {published!r}, recomputed {found!r}"


def same(published: Any, found: Any, tolerance: float | None = None) -> bool:
    """Whether two scalars agree; numbers within the absolute `tolerance` where there is one."""
    if isinstance(found, bool) or isinstance(published, bool) or found is None:
        return published is found
    if isinstance(found, int | float) and isinstance(published, int | float):
        near = ABSOLUTE if tolerance is None else tolerance
        return math.isclose(published, found, rel_tol=RELATIVE, abs_tol=near)
    return bool(published == found)


def text_differs(published: str, found: Any, tolerance: float | None = None) -> bool:
    """Whether a CSV field differs from a value: empty is None, `true`/`True` is True."""
    if found is None or found == "":
        return published != ""
    if isinstance(found, bool):
        return published.lower() != str(found).lower()
    if isinstance(found, int | float):
        try:
            return not same(float(published), float(found), tolerance)
        except ValueError:
            return True
    return published != str(found)


def read_csv(path: Path) -> Table:
    """The rows of a published CSV, a row without any value left out.

    Raises:
        ArtifactError: the file is missing, or a row has not as many fields as the head.
    """
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            rows = list(csv.DictReader(stream))
    except FileNotFoundError:
        raise ArtifactError(f"{path}: no such file") from None
    for number, row in enumerate(rows, 2):
        if None in row or None in row.values():
            raise ArtifactError(f"{path}:{number}: not as many fields as the head has columns")
    return [row for row in rows if any(row.values())]

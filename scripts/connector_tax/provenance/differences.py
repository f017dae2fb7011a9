"""Compare published values with recomputed ones, by key.

Numbers may differ by a relative 1e-8; everything else must be equal. The order of a table's rows
and columns is ignored.
"""

import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from connector_tax.artifacts.tables import KEYS, KIND_OF_ROW
from connector_tax.files import ArtifactError, read_json

RELATIVE, ABSOLUTE = 1e-8, 1e-10


@dataclass
class Comparison:
    """The differences between a published file and the recomputed one.

    Attributes:
        wrong: values that differ; keys, columns and rows that one file lacks.
        only: keys, columns and kinds of rows that only another version of this package makes.
    """

    wrong: list[str] = field(default_factory=list)
    only: list[str] = field(default_factory=list)


def compare(published: Path, made: Path, other_version: bool = False) -> Comparison:
    """Compare a published file with the recomputed file of the same name.

    Args:
        published, made: existing files.
        other_version: another version of this package made the published one.

    Raises:
        ArtifactError: one of them cannot be read.
    """
    if published.suffix == ".csv":
        return _compare_tables(read_keyed(published), read_keyed(made), other_version)
    if published.suffix == ".json":
        old, new = read_json(published), read_json(made)
        return compare_values(old, new, published.stem, other_version)
    same_bytes = published.read_bytes() == made.read_bytes()
    return Comparison([] if same_bytes else ["differs from the file that this code makes"])


def compare_values(published: Any, made: Any, where: str, other_version: bool) -> Comparison:
    """Compare two JSON values; records in a list are matched by `id` if each has an `id`."""
    result = Comparison()
    for one_sided, line in _walk(published, made, where):
        (result.only if one_sided and other_version else result.wrong).append(line)
    return result


@dataclass(frozen=True)
class KeyedTable:
    """The rows of a CSV table by the text of their key, with the kind of each row."""

    name: str
    columns: list[str]
    rows: dict[str, dict[str, Any]]
    kinds: dict[str, str]


def read_keyed(path: Path) -> KeyedTable:
    """Read a table of the analysis.

    Raises:
        ArtifactError: the table has no key columns, a row is too short or too long, or two rows
            have the same key.
    """
    key_columns, kind_columns = KEYS[path.name], KIND_OF_ROW.get(path.name, ())
    rows: dict[str, dict[str, Any]] = {}
    kinds: dict[str, str] = {}
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            reader = csv.DictReader(stream, restkey="")
            columns = list(reader.fieldnames or ())
            if missing := {*key_columns} - {*columns}:
                raise ArtifactError(f"{path.name}: no column {min(missing)}")
            for row in reader:
                if "" in row or None in row.values():
                    raise ArtifactError(f"{path.name}:{reader.line_num}: other columns than line 1")
                key = "/".join(row[column] for column in key_columns)
                if key in rows:
                    raise ArtifactError(f"{path.name}:{reader.line_num}: second row of {key}")
                rows[key] = {name: _value(text) for name, text in row.items()}
                kinds[key] = "/".join(row[column] for column in kind_columns)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ArtifactError(f"{path.name}: not a CSV in UTF-8: {error}") from None
    return KeyedTable(path.name, columns, rows, kinds)


def _compare_tables(published: KeyedTable, made: KeyedTable, other_version: bool) -> Comparison:
    result = Comparison()
    for side, table, other in (("published", published, made), ("made again", made, published)):
        lone = (
            f"column {name}: only {side}" for name in table.columns if name not in other.columns
        )
        (result.only if other_version else result.wrong).extend(lone)
        known, kinds = {*other.kinds.values()}, dict[str, None]()
        for key in (key for key in table.rows if key not in other.rows):
            if other_version and table.kinds[key] not in known:
                kinds[f"rows of {table.kinds[key]}: only {side}"] = None
            else:
                result.wrong.append(f"row {key}: only {side}")
        result.only += kinds
    shared = [name for name in published.columns if name in made.columns]
    for key in (key for key in published.rows if key in made.rows):
        old, new = published.rows[key], made.rows[key]
        if old == new:
            continue
        for name in shared:
            where = f"{published.name}[{key}].{name}"
            result.wrong += differences(old[name], new[name], where)
    return result


def differences(published: Any, made: Any, where: str) -> Iterator[str]:
    """Yield a line for each place where values differ: `key: published a, made again b`."""
    return (line for _, line in _walk(published, made, where))


def _walk(published: Any, made: Any, where: str) -> Iterator[tuple[bool, str]]:
    """Yield differences, each with a flag for keys that only one side has."""
    published, made = _by_id(published), _by_id(made)
    if isinstance(published, Mapping) and isinstance(made, Mapping):
        for key in dict.fromkeys((*made, *published)):
            if key not in published or key not in made:
                side = "published" if key in published else "made again"
                yield True, f"{where}.{key}: only {side}"
            else:
                yield from _walk(published[key], made[key], f"{where}.{key}")
    elif isinstance(published, list | tuple) and isinstance(made, list | tuple):
        if len(published) != len(made):
            yield False, f"{where}: published {len(published)}, made again {len(made)}"
        for k, (old, new) in enumerate(zip(published, made, strict=False)):
            yield from _walk(old, new, f"{where}[{k}]")
    elif not same(published, made):
        yield False, f"{where}: published {published!r}, made again {made!r}"


def _by_id(value: Any) -> Any:
    """Return a list of records as a mapping by `id`, if each has an `id`; otherwise the value."""
    if isinstance(value, list) and value and all(isinstance(v, dict) and "id" in v for v in value):
        by_id = {str(record["id"]): record for record in value}
        return by_id if len(by_id) == len(value) else value
    return value


def same(published: Any, made: Any) -> bool:
    """Return whether two values agree: numbers nearly, everything else exactly."""
    numbers = [type(value) in (int, float) for value in (published, made)]
    if all(numbers):
        return published == made or math.isclose(
            published, made, rel_tol=RELATIVE, abs_tol=ABSOLUTE
        )
    return type(published) is type(made) and bool(published == made)


def _value(text: str) -> Any:
    """Return the value of a table field: a number, a tuple's numbers, or text."""
    if text.startswith("(") and text.endswith(")"):
        return [_value(part) for part in text[1:-1].split(", ")]
    try:
        return float(text)
    except ValueError:
        return text

"""The tables of the analysis as typed rows (artifacts.tables), read from their CSVs."""

import csv
import math
import types
import typing
from dataclasses import fields
from pathlib import Path
from typing import Any, TextIO, TypeVar

import msgspec

from connector_tax.files import ArtifactError, reading

Row = TypeVar("Row")
_ALLOWED = {str: "text", int: "an integer", float: "a finite number", bool: "true or false"}


def _value(text: str, scalar: type, optional: bool) -> Any:
    """A CSV field as a value of its column; None where it is empty and may be.

    Raises:
        ValueError: it is something else; says what is allowed.
    """
    if text == "" and optional:
        return None
    try:
        value: Any = msgspec.convert(text, scalar, strict=False)
    except msgspec.ValidationError:
        value = math.nan
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{text!r}; allowed: {_ALLOWED[scalar]}")
    return value


def column_types(row_type: type) -> dict[str, tuple[type, bool]]:
    """Column name -> (scalar type, may be empty) from the annotations of a row class."""
    hints = typing.get_type_hints(row_type)
    columns = {}
    for field in fields(row_type):
        hint = hints[field.name]
        optional = isinstance(hint, types.UnionType)
        scalar = typing.get_args(hint)[0] if optional else hint
        columns[field.name] = (scalar, optional)
    return columns


def read_table(path: Path, row_type: type[Row]) -> list[Row]:
    """Read a CSV into rows of `row_type`; columns the class does not name are ignored.

    A line without any value stands for an empty table and is no row.

    Raises:
        ArtifactError: the file or a column is missing, or a value does not parse; names file, line
            and column, what was found and what is allowed.
    """
    try:
        with reading(path), path.open(encoding="utf-8", newline="") as stream:
            return _rows(path, stream, row_type)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ArtifactError(f"{path}: not a CSV in UTF-8: {error}") from None


def _rows(path: Path, stream: TextIO, row_type: type[Row]) -> list[Row]:
    columns = column_types(row_type)
    reader = csv.DictReader(stream)
    missing = [name for name in columns if name not in (reader.fieldnames or ())]
    if missing:
        raise ArtifactError(f"{path}:1: missing column(s): {', '.join(missing)}")
    rows = []
    for record in reader:
        if not any(record.values()):
            continue
        values: dict[str, Any] = {}
        for name, (scalar, optional) in columns.items():
            if record[name] is None:
                raise ArtifactError(f"{path}:{reader.line_num}: fewer values than columns")
            try:
                values[name] = _value(record[name], scalar, optional)
            except ValueError as error:
                raise ArtifactError(f"{path}:{reader.line_num}: {name}: {error}") from None
        rows.append(msgspec.convert(values, row_type))
    return rows

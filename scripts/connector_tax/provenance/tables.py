"""JSON-lines files of a study as one parquet table each kind, and back to the same bytes.

A row is a line. `file` names the file it is of and `shape` is the line itself with a mark in place
of each value; the values stand in columns named by their keys and the mark:

    i  integer    b  boolean    s  text    n  null (no column)    j  anything else, as JSON
    r  number; in the column `:e`
"""

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import polars as pl

MARKS = {int: "i", bool: "b", str: "s", float: "r", type(None): "n"}
TYPES: dict[str, pl.DataType] = {"i": pl.Int64(), "b": pl.Boolean(), "e": pl.Float64()}
STYLES = ((",", ":"), (", ", ": "))


def encode(files: Mapping[str, bytes]) -> tuple[bytes, list[str]]:
    """A parquet table of files, and the names of those that it gives back to the byte."""
    frames = [frame for name, data in files.items() if (frame := _frame(name, data)) is not None]
    if not frames:
        return b"", []
    whole = pl.concat(frames, how="diagonal")
    kept = [
        str(part["file"][0])
        for part in whole.partition_by("file", maintain_order=True)
        if _gives_back(part, files)
    ]
    stream = io.BytesIO()
    # The archive is compressed as a whole.
    whole.filter(pl.col("file").is_in(kept)).write_parquet(
        stream, compression="uncompressed", statistics=False
    )
    return stream.getvalue(), kept


def _gives_back(part: pl.DataFrame, files: Mapping[str, bytes]) -> bool:
    name = str(part["file"][0])
    try:
        return decode(part, {name: len(files[name])})[name] == files[name]
    except (TypeError, ValueError, OverflowError, KeyError, pl.exceptions.PolarsError):
        return False


def read_table(path: Path, most_values: int) -> pl.DataFrame:
    """A parquet table; what is written in few bytes may be huge in memory, so it is counted first.

    Raises:
        ValueError: it holds more than `most_values`.
    """
    lazy = pl.scan_parquet(path)
    rows, columns = lazy.select(pl.len()).collect().item(), len(lazy.collect_schema())
    if rows * columns > most_values:
        raise ValueError(f"{rows} rows of {columns} columns; allowed: {most_values} values")
    return lazy.collect()


def decode(table: pl.DataFrame, sizes: Mapping[str, int]) -> dict[str, bytes]:
    """The files of a table, each of at most the size that is listed for it.

    Raises:
        Exception: it is not a table that `encode` made.
    """
    files: dict[str, bytes] = {}
    for part in table.partition_by("file", maintain_order=True):
        columns = {s.name: s.to_list() for s in part if s.null_count() < len(s)}
        readers = {shape: _reader(json.loads(shape), "", columns) for shape in {*columns["shape"]}}
        writers = {shape: _encoder(shape) for shape in readers}
        name, lines, left = columns["file"][0], [], sizes[columns["file"][0]]
        for row, shape in enumerate(columns["shape"]):
            lines.append((writers[shape](readers[shape](row)) + "\n").encode())
            left -= len(lines[-1])
            if left < 0:
                raise ValueError(f"{name}: more than the {sizes[name]} bytes that are listed")
        files[name] = b"".join(lines)
    return files


# ---- lines to columns


def _frame(name: str, data: bytes) -> pl.DataFrame | None:
    """The lines of one file; None where they are no JSON objects."""
    lines = data.split(b"\n")[:-1]
    style = STYLES[b'": ' in data.partition(b"\n")[0]]
    rows = []
    try:
        for line in lines:
            row: dict[str, Any] = {"file": name}
            shape = _shape(json.loads(line), "", row)
            rows.append(row | {"shape": json.dumps(shape, separators=style, ensure_ascii=False)})
            if not isinstance(shape, dict):
                return None
        columns = dict.fromkeys(column for row in rows for column in row)
        schema = {column: TYPES.get(column.rpartition(":")[2], pl.String()) for column in columns}
        return pl.DataFrame(rows, schema=schema, strict=True) if rows else None
    except (ValueError, TypeError, OverflowError, RecursionError, pl.exceptions.PolarsError):
        return None


def _shape(value: Any, path: str, row: dict[str, Any]) -> Any:
    """The value with marks in place of its leaves, which go into the row as `path:mark`."""
    if isinstance(value, dict) and value:
        return {
            key: _shape(inner, f"{path}\t{key}" if path else key, row)
            for key, inner in value.items()
        }
    mark = MARKS.get(type(value), "j")
    if mark != "n":
        row[_column(path, mark)] = json.dumps(value, separators=STYLES[0]) if mark == "j" else value
    return mark


def _column(path: str, mark: str) -> str:
    """The column of the values with this mark at a path."""
    return f"{path}:{'e' if mark == 'r' else mark}"


# ---- columns to lines


def _encoder(shape: str) -> Callable[[Any], str]:
    """What writes a record in the style of its shape."""
    style = STYLES[shape.find('": ') > 0]
    return json.JSONEncoder(separators=style, ensure_ascii=False).encode


def _reader(mark: Any, path: str, columns: Mapping[str, list[Any]]) -> Callable[[int], Any]:
    """What makes the value at `path` from the number of its row; a line's mark is its shape."""
    if isinstance(mark, dict):
        readers = {
            key: _reader(inner, f"{path}\t{key}" if path else key, columns)
            for key, inner in mark.items()
        }
        return lambda row: {key: read(row) for key, read in readers.items()}
    if mark == "n":
        return lambda _: None
    values = columns[_column(path, mark)]
    return values.__getitem__ if mark != "j" else lambda row: json.loads(values[row])

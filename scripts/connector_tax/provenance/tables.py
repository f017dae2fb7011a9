"""JSON-lines files of a study as one parquet table each kind, and back to the same bytes.

A row is a line. `file` names the file it is of and `shape` is the line itself with a mark in place
of each value; the values stand in columns named by their keys and the mark:

    i  integer                         d  integer, minus that of the line before (time, counts)
    c  a stamp (t_..._ns), minus the stamp before it in the line
    r  number, times the power of ten that follows (`step_us:r1` is ten times the value);
       `:e` holds the value itself where that is not exact
    b  boolean    s  text    n  null (no column)    j  anything else, as JSON
    t  the list [[ns, n], ...]: its ns, each minus the one before (the first: minus
       t_first_token_ns), beside `:u` with its n
"""

import io
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

COUNTED = ("seq", "step_id")
MOST_DECIMALS = 4
LIST_FROM = "t_first_token_ns"
STYLES = ((",", ":"), (", ", ": "))


def encode(files: Mapping[str, bytes]) -> tuple[bytes, list[str]]:
    """A parquet table of files, and the names of those that it gives back to the byte."""
    frames = [frame for name, data in files.items() if (frame := _frame(name, data)) is not None]
    if not frames:
        return b"", []
    whole = _scaled(pl.concat(frames, how="diagonal"))
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
        absolute = _summed(part[[s.name for s in part if s.null_count() < len(s)]])
        columns = {name: absolute[name].to_list() for name in absolute.columns}
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
    """The lines of one file; None where they are no JSON objects in one style."""
    lines = data.split(b"\n")
    if len(lines) < 2 or lines.pop():
        return None
    columns: dict[str, list[Any]] = defaultdict(lambda: [None] * len(lines))
    style = STYLES[b'": ' in lines[0]]
    shapes: dict[tuple[str, ...], str] = {}
    for row, line in enumerate(lines):
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if not isinstance(content, dict) or not content:
            return None
        leaves = list(_leaves(content, "", content.get(LIST_FROM)))
        key = tuple(column for column, _ in leaves)
        if key not in shapes:
            shapes[key] = json.dumps(
                _marked(content, iter(key)), separators=style, ensure_ascii=False
            )
        columns["shape"][row] = shapes[key]
        for column, value in leaves:
            if column.endswith(":t"):
                columns[column][row], columns[column[:-1] + "u"][row] = value
            elif not column.endswith(":n"):
                columns[column][row] = value
    try:
        frame = pl.DataFrame({"file": [name] * len(lines), **columns}, strict=True)
    except (TypeError, OverflowError, pl.exceptions.PolarsError):
        return None
    return _differenced(frame)


def _leaves(value: Any, path: str, origin: int | None) -> Iterator[tuple[str, Any]]:
    """`path:mark` and value of each leaf, in order."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}\t{key}" if path else key, origin)
    elif value is None:
        yield f"{path}:n", None
    elif isinstance(value, bool):
        yield f"{path}:b", value
    elif isinstance(value, int):
        yield f"{path}:{_integer_mark(path)}", value
    elif isinstance(value, float):
        yield f"{path}:r", value
    elif isinstance(value, str):
        yield f"{path}:s", value
    elif origin is not None and _pairs(value):
        times = np.array([origin, *(ns for ns, _ in value)])
        yield f"{path}:t", (np.diff(times).tolist(), [n for _, n in value])
    else:
        yield f"{path}:j", json.dumps(value, separators=STYLES[0])


def _pairs(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(pair, list) and [type(part) for part in pair] == [int, int] for pair in value
    )


def _integer_mark(path: str) -> str:
    if path in COUNTED or path == "t_ns" or path == "t_intended_ns":
        return "d"
    return "c" if path.startswith("t_") and path.endswith("_ns") else "i"


def _marked(value: Any, columns: Iterator[str]) -> Any:
    """The line with its columns' names in place of its leaves."""
    if isinstance(value, dict) and value:
        return {key: _marked(inner, columns) for key, inner in value.items()}
    return next(columns).rpartition(":")[2]


def _chained(columns: Sequence[str]) -> list[str]:
    first = [name for name in columns if name.endswith("_ns:d")][:1]
    return first + [name for name in columns if name.endswith(":c")]


def _differenced(frame: pl.DataFrame) -> pl.DataFrame:
    chain = _chained(frame.columns)
    steps = [
        (pl.col(name) - pl.coalesce(*reversed(chain[:k]))).alias(name)
        for k, name in enumerate(chain)
        if k
    ]
    counted = [
        pl.col(name).diff().fill_null(pl.col(name)) for name in frame.columns if name.endswith(":d")
    ]
    return frame.with_columns(*steps, *counted)


def _summed(part: pl.DataFrame) -> pl.DataFrame:
    part = part.with_columns(
        pl.col(name).cast(pl.Int64).cum_sum() for name in part.columns if name.endswith(":d")
    )
    chain = _chained(part.columns)
    for k, name in enumerate(chain):
        if k:
            part = part.with_columns(pl.col(name) + pl.coalesce(*reversed(chain[:k])))
    return part


def _scaled(frame: pl.DataFrame) -> pl.DataFrame:
    """Numbers of few decimals as integers."""
    columns = []
    for name in frame.columns:
        series = frame[name]
        if not name.endswith(":r"):
            columns.append(series)
            continue
        values = series.to_numpy()
        known = values[~np.isnan(values)]
        decimals = next(
            (
                k
                for k in range(MOST_DECIMALS)
                if (np.rint(known * 10**k) / 10**k == known).mean() > 0.99
            ),
            MOST_DECIMALS,
        )
        scaled = np.rint(values * 10**decimals)
        exact = (scaled / 10**decimals == values) & (np.abs(scaled) < 2**31)
        whole = pl.Series(f"{name}{decimals}", scaled, nan_to_null=True)
        columns.append(whole.zip_with(pl.Series(exact), pl.Series([None])).cast(pl.Int32))
        if not (exact | np.isnan(values)).all():
            rest = series.zip_with(pl.Series(~exact), pl.Series([None], dtype=pl.Float64))
            columns.append(rest.alias(f"{name[:-1]}e"))
    return pl.DataFrame(columns)


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
    if mark == "t":
        steps, counts, origins = (columns[n] for n in (f"{path}:t", f"{path}:u", f"{LIST_FROM}:c"))
        return lambda row: list(
            zip((origins[row] + np.cumsum(steps[row])).tolist(), counts[row], strict=True)
        )
    if mark == "r":
        exact = columns.get(f"{path}:e", [])
        name = next((name for name in columns if name.startswith(f"{path}:r")), None)
        if name is None:
            return exact.__getitem__
        scaled, scale = columns[name], 10 ** int(name[-1])
        return lambda row: exact[row] if scaled[row] is None else scaled[row] / scale
    values = columns[f"{path}:{mark}"]
    return values.__getitem__ if mark != "j" else lambda row: json.loads(values[row])

"""The tables once more as parquet, with typed columns: for notebooks, DuckDB and pandas."""

import io
from collections.abc import Mapping, Sequence

import polars as pl

from connector_tax.artifacts import paths
from connector_tax.artifacts.table_reader import column_types
from connector_tax.artifacts.tables import COLUMNS, ROW_TYPES, STEP_COUNTS

_TYPES: Mapping[type, type[pl.DataType]] = {
    str: pl.String,
    int: pl.Int64,
    float: pl.Float64,
    bool: pl.Boolean,
}
# Of the columns that no row class names; all others are numbers.
_TEXTS = (
    *("label", "reason", "p99_reason", "config", "configuration", "phase", "cell", "status"),
    "device",
)
_COUNTS = ("n", "dropped", "n_disturbed", *STEP_COUNTS)


def schema(table: str, further: Sequence[str] = ()) -> dict[str, type[pl.DataType]]:
    """The types of a table's columns, the same in every study, also where a column is empty.

    Args:
        table: its name.
        further: those of DEVICE_COLUMNS that it has.
    """
    known = column_types(ROW_TYPES[table]) if table in ROW_TYPES else {}
    types: dict[str, type[pl.DataType]] = {}
    for name in (*COLUMNS[table], *further):
        scalar = str if name in _TEXTS else int if name in _COUNTS else float
        types[name] = _TYPES[known[name][0] if name in known else scalar]
    if table == paths.STEPS:
        types["block"] = pl.Int64
    return types


def table_parquet(table: str, text: str) -> bytes:
    """A table's CSV as parquet; an empty field is null."""
    stream, columns = io.BytesIO(), text.partition("\n")[0].split(",")
    frame = pl.read_csv(io.StringIO(text), schema=schema(table, columns[len(COLUMNS[table]) :]))
    frame.write_parquet(stream, compression="zstd")
    return stream.getvalue()

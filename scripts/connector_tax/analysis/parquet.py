"""The tables once more as parquet, with typed columns: for notebooks, DuckDB and pandas."""

import io

import polars as pl

from connector_tax.artifacts.table_reader import column_types
from connector_tax.artifacts.tables import ROW_TYPES

_TYPES: dict[type, type[pl.DataType]] = {
    str: pl.String,
    int: pl.Int64,
    float: pl.Float64,
    bool: pl.Boolean,
}


def table_parquet(table: str, text: str) -> bytes:
    """A table's CSV as parquet; an empty field is null, a column's type the same in every study."""
    schema = {name: _TYPES[of] for name, (of, _) in column_types(ROW_TYPES[table]).items()}
    stream = io.BytesIO()
    pl.read_csv(io.StringIO(text), schema=schema).write_parquet(stream, compression="zstd")
    return stream.getvalue()

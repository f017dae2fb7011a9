"""The parquet tables: what the CSVs hold, with the same types in every study."""

from pathlib import Path

import polars as pl
import pytest

from connector_tax.analysis.aggregate import table_parquet
from connector_tax.artifacts import paths
from connector_tax.artifacts.tables import COLUMNS, table_text
from tests.analysis.tables import table

TABLES = [name for name in paths.ANALYSIS_FILES if name.endswith(".csv")]


@pytest.mark.parametrize("name", TABLES)
def test_a_parquet_table_reads_in_one_line_and_holds_what_the_csv_holds(
    crisp: Path, name: str
) -> None:
    frame = pl.read_parquet(crisp / "analysis" / name.replace(".csv", ".parquet"))
    rows = table(crisp, name)
    assert frame.columns == list(COLUMNS[name])
    assert frame.height == len(rows)
    for column, kind in frame.schema.items():
        texts = [row[column] for row in rows]
        for value, text in zip(frame[column], texts, strict=True):
            if value is None:
                assert text == ""
            elif kind == pl.Boolean:
                assert text == str(value).lower()
            else:
                assert value == (text if kind == pl.String else float(text))


def test_the_types_do_not_depend_on_what_a_study_has(crisp: Path, tmp_path: Path) -> None:
    for name in TABLES:
        path = tmp_path / name
        path.write_bytes(table_parquet(name, table_text(name, [])))
        whole = pl.read_parquet(crisp / "analysis" / name.replace(".csv", ".parquet"))
        assert pl.read_parquet(path).schema == whole.schema

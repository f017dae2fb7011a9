"""The cells of both shipped archives, analysed anew, against what release 0.2 published of them."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from connector_tax.analysis.aggregate import write_tables
from connector_tax.artifacts import paths
from connector_tax.artifacts.study_file import load_study
from connector_tax.artifacts.table_reader import read_table
from connector_tax.artifacts.tables import ROW_TYPES
from connector_tax.config import ROOT
from connector_tax.provenance.archive import unpack
from tests.oracle import published
from tests.shared import made_once

WITHIN = 1e-9
ARCHIVES = ("default", "vllm-cpu")


@pytest.fixture(scope="module", params=ARCHIVES)
def study(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an unpacked archive with the present tables beside the published ones."""
    name = str(request.param)

    def make(root: Path) -> None:
        unpack(ROOT / f"results/archive/{name}.tar.zst", root / name)
        write_tables(load_study(root / name / paths.STUDY))

    return made_once(tmp_path_factory, f"oracle-{name}", make) / name


def differences(where: str, was: Any, now: Any) -> Iterator[str]:
    """Each place in which a published value, or its text in a CSV, is not the present one."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in was:
            yield from differences(f"{where} {key}", was[key], now.get(key))
    elif isinstance(was, list | tuple) and isinstance(now, list | tuple):
        for k, (old, new) in enumerate(zip(was, now, strict=True)):
            yield from differences(f"{where}[{k}]", old, new)
    elif not same(was, now):
        yield f"{where}: published {was!r}, now {now!r}"


def same(was: Any, now: Any) -> bool:
    """Whether two scalars agree: numbers nearly, texts exactly; nothing is the empty text."""
    if was in (None, "") or now in (None, ""):
        return was in (None, "") and now in (None, "")
    if isinstance(now, float | int) and not isinstance(now, bool):
        return math.isclose(float(was), float(now), rel_tol=WITHIN, abs_tol=1e-12)
    return str(was).lower() == str(now).lower()


def test_every_cell_is_as_published(study: Path) -> None:
    was = published.cells(study / "published" / paths.ANALYSIS)
    rows = read_table(study / paths.ANALYSIS / paths.CELLS, ROW_TYPES[paths.CELLS])
    now = {tuple(getattr(row, name) for name in published.CELL_KEY): vars(row) for row in rows}
    assert now.keys() == was.keys()
    assert sum("ttft_p50_ms" in row for row in was.values()) > len(was) / 3
    assert list(differences("", was, now)) == []

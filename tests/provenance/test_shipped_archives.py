"""Test that this code recomputes the published tables of shipped archives."""

from pathlib import Path

import pytest

from connector_tax.analysis.aggregate import write_tables
from connector_tax.analysis.reference import rates_of
from connector_tax.artifacts import paths
from connector_tax.artifacts.folder import StudyFolder
from connector_tax.artifacts.tables import METHOD
from connector_tax.config import ROOT
from connector_tax.files import read_json
from connector_tax.provenance.archive import PUBLISHED, unpack
from connector_tax.provenance.differences import compare, differences
from connector_tax.provenance.manifest import read_manifest

pytestmark = pytest.mark.workflow


@pytest.mark.parametrize("name", ["default", "vllm-cpu", "emulated-controls"])
def test_tables_of_shipped_archives_equal_the_published_ones(name: str, tmp_path: Path) -> None:
    root = tmp_path / name
    unpack(ROOT / f"results/archive/{name}.tar.zst", root)
    study = StudyFolder.load(root / paths.STUDY)
    rates = read_json(root / paths.REFERENCE_RATES)
    assert list(differences(rates, rates_of(study), "rates")) == []
    write_tables(study)
    published = sorted((root / PUBLISHED / paths.ANALYSIS).iterdir())
    assert len(published) > 4
    assert read_manifest(root / paths.MANIFEST)["method"] == METHOD
    for table in published:
        # Columns and rows that only another version makes are no difference.
        made = root / paths.ANALYSIS / table.name
        assert compare(table, made, other_version=True).wrong == [], table.name

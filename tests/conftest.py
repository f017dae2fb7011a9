"""Settings for the whole suite, and studies shared by several test folders."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.shared import made_once

# A property holds however slow the machine is; pytest's own timeout ends a test that hangs.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run whole studies first, so that no process waits for them at the end."""
    items.sort(key=lambda item: item.get_closest_marker("workflow") is None)


@pytest.fixture(scope="session", autouse=True)
def quick_disk() -> Iterator[None]:
    """Write this process's files without waiting for the disk: no test needs them after a power
    cut.

    study/test_durability.py checks what is synced when; processes that a test starts do wait.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="session")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with MANIFEST.md and results/synthetic, which passes the audit."""
    from tests.provenance.audited_study import write_published_study

    return made_once(tmp_path_factory, "published", write_published_study) / "audited"


@pytest.fixture
def root(audited: Path, tmp_path: Path) -> Path:
    """Return a copy of the audited study's folder, which the test may change."""
    from tests.study_folder import linked_copy

    return linked_copy(audited, tmp_path / "copy") / "results" / "synthetic"


@pytest.fixture(scope="session")
def remade(audited: Path) -> Path:
    """Return the folder with the recomputed results of the audited study."""
    return audited.with_name("synthetic")


@pytest.fixture(scope="session")
def packed(audited: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the archive of the audited study, in a copy of the study's folder."""
    from connector_tax.provenance.pack import pack
    from tests.study_folder import linked_copy

    def make(folder: Path) -> None:
        study = linked_copy(audited, folder / "study")
        study_file = study / "results" / "synthetic" / "study.json"
        pack(study_file, study / "MANIFEST.md", study / "synthetic.tar.zst")

    return made_once(tmp_path_factory, "packed", make) / "study" / "synthetic.tar.zst"

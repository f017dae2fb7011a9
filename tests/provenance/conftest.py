"""One synthetic study that passes the audit, made once."""

from pathlib import Path

import pytest

from tests.provenance.audited_study import write_audited_study


@pytest.fixture(scope="session")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with results/synthetic; not to be written to."""
    folder = tmp_path_factory.mktemp("audited")
    write_audited_study(folder)
    return folder

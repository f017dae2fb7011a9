"""Studies drawn by the tests of the figures; each is written once and never changed."""

from collections.abc import Callable

import pytest

from connector_tax.figures.tables import StudyTables
from tests.figures.figure_study import write_study
from tests.figures.figure_tables import Design

TablesOf = Callable[[Design], StudyTables]


@pytest.fixture(scope="session")
def tables_of(tmp_path_factory: pytest.TempPathFactory) -> TablesOf:
    """Return a function that returns the study of a design, which the test does not change."""
    written: dict[str, StudyTables] = {}

    def of(design: Design) -> StudyTables:
        name = repr(design)
        if name not in written:
            root = tmp_path_factory.mktemp("design") / "s"
            written[name] = StudyTables(write_study(root, design))
        return written[name]

    return of

"""Servers for the engine's tests: real processes on real sockets."""

import os
from collections.abc import Iterator

import pytest

from connector_tax.config import ROOT
from tests.engine.serving import Launched, launched


@pytest.fixture(autouse=True)
def _workers_find_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    """Yield a server of configuration `plain`, shared by a module's tests."""
    with launched(tmp_path_factory.mktemp("server")) as running:
        yield running

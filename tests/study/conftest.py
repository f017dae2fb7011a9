"""Fixtures for tests of measurements: drivers started by hand, and stand-ins for programs."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from connector_tax.study.guard import PARENT_VARIABLE
from tests.study.driving import write_study

StandIn = Callable[[str, str], Path]


@pytest.fixture(autouse=True)
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variable that names Snakemake as the driver's parent."""
    monkeypatch.delenv(PARENT_VARIABLE, raising=False)


@pytest.fixture
def study_file(tmp_path: Path) -> Path:
    """Return study.json of a small study of the embedded engine."""
    return write_study(tmp_path / "results" / "tiny")


@pytest.fixture
def affinity() -> Iterator[set[int]]:
    """Yield this process's CPUs, and restore them after the test."""
    before = os.sched_getaffinity(0)
    yield before
    os.sched_setaffinity(0, before)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Return a function that puts a shell script first on PATH under a program's name."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def put(name: str, script: str) -> Path:
        program = folder / name
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        return program

    return put

"""Folders that take long to make, made once per test run; shipped archives."""

import os
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import zstandard

from connector_tax.artifacts.study_records import EngineSection
from connector_tax.files import locked

# The section of a real vLLM where nothing is launched.
VLLM: EngineSection = {"kind": "vllm", "label": "real vLLM"}
Value = TypeVar("Value")


def known(value: Value | None) -> Value:
    """Return a value after checking that it is not None."""
    assert value is not None
    return value


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return the folder `name` of this test run, filled by the first process that needs it.

    Other processes wait for it. The folder is not changed afterwards.
    """
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # each process has a subfolder there
    folder, complete = base / name, base / f"{name}.complete"
    with locked(base / f"{name}.lock"):
        if not complete.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            complete.touch()
    return folder


def members_of(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of every file in an archive of a study."""
    with zstandard.open(archive, "rb") as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
        for member in tar:
            content = tar.extractfile(member)
            assert content is not None
            yield member.name, content.read()


def interpreter(folder: Path, script: str) -> Path:
    """Return an executable `python` that ignores its arguments and runs this script."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return python

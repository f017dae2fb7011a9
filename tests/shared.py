"""Folders that take long to make, made once for all processes of a test run."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from connector_tax.artifacts.study_records import EngineSection
from connector_tax.files import locked

# The section of a real vLLM where nothing is launched.
VLLM: EngineSection = {"kind": "vllm", "label": "real vLLM"}


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The folder `name` of this test run, filled by the process that asks first.

    The others wait for it. Nobody writes to it afterwards.
    """
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # each process has a folder of its own in there
    folder, complete = base / name, base / f"{name}.complete"
    with locked(base / f"{name}.lock"):
        if not complete.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            complete.touch()
    return folder

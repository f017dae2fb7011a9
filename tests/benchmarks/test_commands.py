"""Test that every benchmark is listed, runs, and has the listed options."""

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import error_model
from connector_tax.config import ROOT

FOLDER = ROOT / "benchmarks"
LISTED = re.findall(r"^\| `python -m benchmarks\.(\w+)", (FOLDER / "README.md").read_text(), re.M)


def test_list_of_benchmarks_is_complete() -> None:
    commands = [path.stem for path in FOLDER.glob("*.py") if "__main__" in path.read_text()]
    assert sorted(set(LISTED)) == sorted(commands)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_every_benchmark_can_be_imported_with_its_packages(path: Path) -> None:
    import_module(f"benchmarks.{path.stem}")


def test_benchmark_prints_help_and_refuses_unknown_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-m", "benchmarks.error_model"]
    shown = subprocess.run([*command, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert shown.stdout.startswith("usage: python -m benchmarks.error_model ")
    monkeypatch.setattr(sys, "argv", ["error_model", "plan"])
    with pytest.raises(SystemExit) as refused:
        error_model.main()
    assert refused.value.code == 2
    assert "TABLE: found plan; allowed: aims, ab, steps, virtual" in capsys.readouterr().err

"""Test the workflow with a Snakemake that was installed alone."""

import os
import re
import subprocess
import sys
import sysconfig
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from connector_tax.config import ROOT
from tests.workflow.harness import ended, prepare
from tests.workflow.test_dry_run import planned


def needed_by(name: str, known: set[str]) -> set[str]:
    """Return the distributions that `pip install <name>` installs, `name` included."""
    if name not in known:
        known.add(name)
        for line in distribution(name).requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                needed_by(requirement.name.lower(), known)
    return known


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of an environment with Snakemake and its dependencies."""
    folder = tmp_path_factory.mktemp("alone") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    paths = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", vars=paths))
    for name in needed_by("snakemake", set()):
        files = distribution(name).files or []
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution(name).locate_file(top))))
    return folder / "bin" / "python"


def call(python: Path, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    # Without the interpreter and the sources of this environment.
    bare = ["env", *(f"--unset={name}" for name in os.environ if name.startswith("PYTHON"))]
    command = ["-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "--cores", "1"]
    study = ["--configfile", str(folder / "study.yaml"), *options]
    return ended([*bare, python, *command, *study], folder)


@pytest.mark.long
def test_lowest_supported_snakemake_plans_the_study(tmp_path: Path) -> None:
    rules = (ROOT / "workflow" / "rules" / "common.smk").read_text()
    lowest = re.findall(r'^min_version\("([\d.]+)"\)', rules, re.M)
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", f"snakemake=={lowest[0]}.*"], check=True)
    done = call(python, prepare(tmp_path / "study"), "--dry-run", "--", "all")
    assert done.returncode == 0, done.stdout + done.stderr
    assert planned(done.stdout + done.stderr)["phase_a"] == 1


def test_snakemake_alone_plans_the_whole_study(python: Path, tmp_path: Path) -> None:
    done = call(python, prepare(tmp_path / "study"), "--dry-run", "--", "all")
    assert done.returncode == 0, done.stdout + done.stderr
    assert planned(done.stdout + done.stderr)["phase_a"] == 1


@pytest.mark.parametrize("options", [(), ("--config", "archive=none.tar.zst")])
def test_rule_without_its_packages_names_what_to_install(
    python: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    done = call(python, prepare(tmp_path / "study"), *options)
    assert done.returncode == 1
    assert f"not installed for {python}" in done.stderr
    assert "numpy" in done.stderr
    assert "make .venv/pipeline.stamp" in done.stderr

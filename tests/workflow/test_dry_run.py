"""What Snakemake plans: every job from the start, and no measurement without a reason."""

from pathlib import Path

import pytest

from connector_tax.config import ROOT
from tests.workflow.harness import prepare, run

MEASURING = ("phase_a", "phase_b", "phase_bp", "preflight")


def planned(output: str) -> dict[str, int]:
    """Jobs by rule from the table a dry run prints first."""
    rows = [line.split() for line in output.split("Job stats:")[1].splitlines()[1:]]
    table = [row for row in rows if len(row) == 2 and row[1].isdigit()]
    return {name: int(count) for name, count in table}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return prepare(tmp_path / "study")


def test_every_job_is_planned_from_the_start(folder: Path) -> None:
    done = run(folder, "all", options=("--dry-run",))
    assert done.returncode == 0, done.stdout + done.stderr
    jobs = planned(done.stdout + done.stderr)
    assert jobs["phase_a"] == jobs["phase_b"] == 4
    assert jobs["phase_bp"] == 3
    assert jobs["figure"] >= 8


@pytest.mark.parametrize(("name", "launches"), [("config.yaml", 9), ("h20.yaml", 9)])
def test_the_shipped_studies_plan_one_job_for_each_launch(
    folder: Path, name: str, launches: int
) -> None:
    (folder / "study.yaml").write_text((ROOT / "config" / name).read_text())
    done = run(folder, "all", options=("--dry-run",))
    assert done.returncode == 0, done.stdout + done.stderr
    assert planned(done.stdout + done.stderr)["phase_b"] == launches


def test_a_broken_configuration_stops_before_anything_starts(folder: Path) -> None:
    text = (folder / "study.yaml").read_text()
    (folder / "study.yaml").write_text(text.replace("floor_s: 1.2", "floor_s: -1"))
    done = run(folder, "all")
    assert done.returncode != 0
    assert "study.yaml: cell.floor_s: found -1; allowed: > 0" in done.stdout + done.stderr
    assert not (folder / "results").exists()


def test_the_dag_can_be_drawn(folder: Path) -> None:
    done = run(folder, "all", options=("--dag",))
    assert done.returncode == 0
    assert "digraph" in done.stdout
    assert "phase_a" in done.stdout

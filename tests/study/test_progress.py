"""What a person who watches a study is told."""

from pathlib import Path

import pytest

from connector_tax.artifacts.names import PHASES
from connector_tax.artifacts.study_file import launches
from connector_tax.files import read_json
from connector_tax.study.progress import LaunchProgress
from tests.study.driving import write_study


@pytest.mark.parametrize("phase", PHASES)
def test_launches_are_counted_within_their_phase(tmp_path: Path, phase: str) -> None:
    study = read_json(write_study(tmp_path))
    order = launches(study, phase)
    said = []
    for launch in order:
        with LaunchProgress(study, tmp_path, launch, tmp_path / "x.log") as progress:
            said.append(progress.note("begins").split("  ")[:3])
    names = [launch.config for launch in order]
    assert [line[0][9:] for line in said] == [f"Phase {phase}"] * len(order)
    assert [line[1] for line in said] == [
        f"launch {number} of {len(order)}" for number in range(1, len(order) + 1)
    ]
    assert [line[2] for line in said] == names

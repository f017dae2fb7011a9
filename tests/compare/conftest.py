"""Provide two small analysed studies with known taxes, of which B differs in two."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from connector_tax.analysis.aggregate import main as aggregate
from tests.analysis.synthetic import write_synthetic_study
from tests.analysis.synthetic_records import TAXES
from tests.analysis.tables import edit
from tests.launch_records import complete_launches
from tests.study_folder import DEFAULT

GRID: Mapping[str, Any] = {
    "phase_a": {"rates_rps": [20.0]},
    "phase_b": {"input_tokens": [128], "output_tokens": [16]},
    "phase_bp": {"configurations": ["plain"], "shapes": [[128, 16]]},
}
ENGINE: Mapping[str, Any] = {
    "kind": "embedded",
    "label": "embedded (emulated)",
    "definition_content": {"model": {"served_name": "m", "vocab_size": 100}, "step_us": 1.0},
}
MORE = {
    "engine": ENGINE,
    "server": {**DEFAULT["server"], "release_s": 1.0},
}
IN_B = {**TAXES, "nixl_both": 0.20, "lmcache_only": 0.20}


def small_study(root: Path, change: Callable[[Any], None] = lambda _: None, **how: Any) -> Path:
    """Return the folder of an analysed study of one cell in each of Phases A and B."""
    study = write_synthetic_study(
        root, config=GRID, step_timing=False, launch_sigma=0.005, noise=0.3, **how
    )
    edit(study, lambda document: document["config"].update(MORE))
    edit(study, change)
    complete_launches(root)
    assert aggregate(["--study", str(study)]) == 0
    return root


@pytest.fixture(scope="session")
def a(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a study of three blocks."""
    return small_study(tmp_path_factory.mktemp("compare") / "a", blocks=3, seed=1)


@pytest.fixture(scope="session")
def b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a study of four blocks, with twice the spread between launches and two other taxes."""

    def rename(document: Any) -> None:
        document["study"] = "other-study"
        document["config"]["engine"] = {
            **ENGINE,
            "definition_content": {**ENGINE["definition_content"], "step_us": 2.0},
        }

    return small_study(
        tmp_path_factory.mktemp("compare") / "b", rename, blocks=4, seed=2, taxes=IN_B
    )

"""Provide two small analysed studies with known taxes, of which B differs in two."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.analysis.tables import edit
from tests.study_folder import CONFIG, TAXES, write_analysed_study

IN_B = {**TAXES, "nixl_both": 0.20, "lmcache_only": 0.20}


def small_study(root: Path, change: Callable[[Any], None] = lambda _: None, **how: Any) -> Path:
    """Return the folder of an analysed study of one cell in each of Phases A and B."""
    study_file = write_analysed_study(
        root,
        configurations=["plain", "mooncake_both", "nixl_both", "lmcache_only"],
        phase_a=CONFIG["phase_a"] | {"rates_rps": [40.0]},
        phase_b={"input_tokens": [128], "output_tokens": [16]},
        phase_bp=None,
        step_timing=False,
        **how,
    )
    edit(study_file, change)
    return root


@pytest.fixture(scope="session")
def a(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a study of three blocks."""
    return small_study(tmp_path_factory.mktemp("compare") / "a", blocks=3, seed=1)


@pytest.fixture(scope="session")
def b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a study of four blocks with two other taxes."""

    def rename(document: Any) -> None:
        document["study"] = "other-study"
        document["config"]["engine"]["definition_content"]["step_cost"]["delta_us"] = 500.0

    return small_study(
        tmp_path_factory.mktemp("compare") / "b", rename, blocks=4, seed=2, taxes=IN_B
    )

"""Synthetic studies shared by the tests of the analysis; each is written once and never changed."""

from pathlib import Path

import pytest

from tests.analysis.synthetic import write_analysed_study
from tests.shared import made_once

SKIP_REASON = "pre-flight: the consumer did not answer within 30 s"
VOID_REASON = "requests were written later than scheduled (p99)"
FAIL_REASON = "the server died: EngineDeadError"


@pytest.fixture(scope="session")
def crisp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an analysed study's folder: five blocks, little noise, taxes that grow with length."""

    def make(root: Path) -> None:
        write_analysed_study(
            root, blocks=5, noise=0.1, launch_sigma=0.001, ttft_growth=0.05, tpot_growth=0.05
        )

    return made_once(tmp_path_factory, "crisp", make)


@pytest.fixture(scope="session")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an analysed study of one block with skipped, failed and void cells."""

    def make(root: Path) -> None:
        write_analysed_study(
            root,
            skipped={"mooncake_consumer": SKIP_REASON},
            failed={("nixl_both", 0, "B"): FAIL_REASON},
            void={
                ("plain", 0, "B", "128x16"): VOID_REASON,
                ("plain_2", 0, "B", "128x16"): VOID_REASON,
                ("plain_2", 0, "B", "128x64"): VOID_REASON,
                ("lmcache_only", 0, "A", "r40"): VOID_REASON,
            },
            step_timing=False,
        )

    return made_once(tmp_path_factory, "damaged", make)

"""Virtual studies shared by the tests of the analysis; each is written once and never changed."""

from pathlib import Path

import pytest

from connector_tax.analysis.aggregate import write_tables
from connector_tax.artifacts.folder import StudyFolder
from tests.shared import made_once
from tests.study_folder import (
    CONFIG,
    edited_lines,
    fail_launch,
    seal_cell,
    write_virtual_study,
)

SKIP_REASON = "pre-flight: the consumer did not answer within 30 s"
VOID_REASON = "requests were written later than scheduled (p99)"
FAIL_REASON = "the server died: EngineDeadError"
STACKED = "multi_mooncake_lmcache"
# Hooks of STACKED that the engine does not emulate, and its children's shares of build_meta.
TAKE_EVENTS_US, WAIT_FOR_SAVE_US = 2.0, 20.0
CHILDREN = {"Mooncake": 0.25, "LMCache": 0.75}


@pytest.fixture(scope="session")
def crisp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an analysed study's folder: three blocks, little noise, saturation at 160/s."""

    def make(root: Path) -> None:
        sweep = CONFIG["phase_a"] | {"rates_rps": [40.0, 80.0, 160.0]}
        study_file = write_virtual_study(root, blocks=3, launch_sd=0.001, phase_a=sweep)
        for path in root.glob(f"runs/{STACKED}/*/*/*/engine_step_*"):
            _add_hooks(path)
        write_tables(StudyFolder.load(study_file))

    return made_once(tmp_path_factory, "crisp", make)


def _add_hooks(steps_file: Path) -> None:
    with edited_lines(steps_file) as steps:
        for step in steps:
            varied = 1 + 0.05 * (step["step_id"] % 5 - 2)
            if step["process"] == "worker":
                step["hooks_us"] = {"wait_for_save": WAIT_FOR_SAVE_US * varied}
                continue
            step["hooks_us"] = {"take_events": TAKE_EVENTS_US * varied}
            step["children_us"] = {
                child: {"build_connector_meta": share * step["build_meta_us"]}
                for child, share in CHILDREN.items()
            }
    seal_cell(steps_file.parent)


@pytest.fixture(scope="session")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an analysed study of one block with skipped, failed and void cells."""

    def make(root: Path) -> None:
        study_file = write_virtual_study(
            root,
            skipped={"mooncake_consumer": SKIP_REASON.removeprefix("pre-flight: ")},
            void={
                ("plain", 0, "B", "128x16"): VOID_REASON,
                ("plain_2", 0, "B", "128x16"): VOID_REASON,
                ("plain_2", 0, "B", "512x16"): VOID_REASON,
                ("lmcache_only", 0, "A", "r40"): VOID_REASON,
            },
            step_timing=False,
        )
        fail_launch(root / "runs/nixl_both/block0/B", FAIL_REASON)
        write_tables(StudyFolder.load(study_file))

    return made_once(tmp_path_factory, "damaged", make)

"""Test a study with interim analyses in virtual time: decided configurations are dropped."""

import copy
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from connector_tax import __version__
from connector_tax.analysis.effect import effect_of
from connector_tax.analysis.looks import take_due_look
from connector_tax.artifacts.looks import (
    FIRST_LOOK,
    LEFT_OUT,
    decided_earlier,
    decided_in,
    read_looks,
)
from connector_tax.artifacts.names import ALL_RATES, Launch
from connector_tax.artifacts.stage_records import ManifestRecord
from connector_tax.artifacts.study_file import launches, load_study
from connector_tax.artifacts.tables import METHOD
from connector_tax.artifacts.verdicts import COSTS
from connector_tax.config import ConfigError
from connector_tax.figures.tables import StudyTables
from connector_tax.files import read_json, write_json
from connector_tax.provenance.claims import FAIL, NOT_CHECKABLE, Ledger
from connector_tax.provenance.remade import Claims, check_looks, take_looks_again
from connector_tax.rehearsal import plan
from connector_tax.rehearsal.findings import sections
from connector_tax.rehearsal.launch import rehearse_launch
from connector_tax.rehearsal.machine import machine_of
from connector_tax.rehearsal.study import Rehearsal, prepare, rehearse
from connector_tax.report.answer import looks
from connector_tax.seals import seal_end
from connector_tax.study import remeasure
from connector_tax.study.design import resolve
from connector_tax.study.remeasure import superseded
from tests.shared import known
from tests.study_folder import write_stages
from tests.workflow.harness import TINY

BLOCKS = 3


def config_with(levels: list[float], **changes: Any) -> dict[str, Any]:
    """Return a configuration in which Mooncake both costs much and the no-op connector almost
    nothing.
    """
    config: dict[str, Any] = yaml.safe_load(TINY.read_text())
    del config["phase_b"], config["phase_bp"]
    config["phase_a"]["rates_rps"] = [20]
    config["statistics"] |= {"looks": levels, "margins": {"ttft_p50": 0.0001}}
    return config | {"blocks": BLOCKS, **changes}


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Rehearsal:
    root = tmp_path_factory.mktemp("looks")
    study = resolve(config_with([0.01] * (BLOCKS - 1)), "tiny.yaml")
    return rehearse(study, machine_of(study), root)


def measured(rehearsal: Rehearsal, config: str) -> list[int]:
    """Return the blocks of Phase A in which a launch was run."""
    return [launch.block for launch, index in rehearsal.indexes.items()
            if (launch.config, launch.phase, index.status) == (config, "A", "done")]  # fmt: skip


def test_decided_configuration_is_dropped_and_plain_stays_until_all_are_decided(
    rehearsed: Rehearsal,
) -> None:
    taken = read_looks(rehearsed.study.root)
    assert [look["blocks"] for look in taken] == [2, 3]
    assert list(decided_in(taken[0])) == ["mooncake_both"]
    assert measured(rehearsed, "mooncake_both") == [0, 1]
    assert measured(rehearsed, "noop_connector") == [0, 1, 2]
    assert measured(rehearsed, "plain") == measured(rehearsed, "plain_2") == [0, 1, 2]
    reasons = {index.reason for index in rehearsed.indexes.values() if index.status == "skipped"}
    assert reasons == {f"{LEFT_OUT} 2 blocks"}


def test_report_names_the_interim_analysis_that_decided(rehearsed: Rehearsal) -> None:
    sentence = looks(StudyTables(rehearsed.study.root / "study.json"))
    assert sentence.startswith("Interim analyses decided Mooncake both after 2, then")
    assert "11 of 12 launches" in sentence


def test_tables_have_the_last_interim_analysis_of_each_configuration(rehearsed: Rehearsal) -> None:
    root = rehearsed.study.root
    tables, taken = StudyTables(root / "study.json"), read_looks(root)
    assert list(decided_in(taken[1])) == ["mooncake_both"]
    for finding in taken[1]["findings"]:
        row = tables.at(ALL_RATES, finding.metric)[finding.config]
        for name, value in asdict(finding).items():
            assert getattr(row, name) == value, name
        assert finding.n_blocks == (2 if finding.config == "mooncake_both" else 3)
        effect = effect_of(row, 0.95)
        assert effect.interval(0.95) == pytest.approx((row.lo, row.hi))
        assert known(row.family_lo) < known(row.lo)
    assert {row.verdict for row in tables.at(ALL_RATES, "ttft_p50").values()} >= {COSTS}


def test_rehearsal_prints_longest_and_shortest_duration(rehearsed: Rehearsal) -> None:
    (_, sentence), rows = sections(rehearsed)[0].sentences, sections(rehearsed)[0].rows
    assert sentence.startswith("In this rehearsal, interim analyses leave out 1 of the 12 launches")
    assert rows


def test_interim_analysis_waits_for_failed_launches_and_ignores_later_blocks(
    rehearsed: Rehearsal, tmp_path: Path
) -> None:
    root = shutil.copytree(rehearsed.study.root, tmp_path / "x")
    study = load_study(root / "study.json")
    (root / "looks.json").unlink()
    last = [la for la in launches(study.document, "A") if la.block == BLOCKS - 1]
    assert take_due_look(study, FIRST_LOOK - 2) is None
    # The last block is there already.
    assert take_due_look(study, BLOCKS - 2) is None
    for launch in last:
        shutil.rmtree(launch.folder(root))
    assert take_due_look(study, BLOCKS - 1) is None
    assert not (root / "looks.json").exists()
    (root / Launch("plain", 1, "A").folder(root) / "index.json").rename(root / "aside")
    assert take_due_look(study, BLOCKS - 2) is None
    (root / "aside").rename(Launch("plain", 1, "A").folder(root) / "index.json")
    found = take_due_look(study, BLOCKS - 2)
    assert found is not None
    assert [look["blocks"] for look in read_looks(root)] == [BLOCKS - 1]


def measured_again(rehearsal: Rehearsal, folder: Path, launch: Launch) -> Path:
    """Return a copy of the analysed study, in which an early launch was remeasured with other
    results.
    """
    root: Path = shutil.copytree(rehearsal.study.root, folder / "x")
    assert remeasure.main([str(root), "--launch", launch.name]) == 0
    # Other arrivals.
    study: Any = rehearsal.study.document | {"seed": 77}
    rehearse_launch(study, launch, root, rehearsal.machine)
    index = read_json(launch.folder(root) / "index.json")
    write_json(launch.folder(root) / "index.json", index | {
        "attempts": [{"attempt": 1, "supersedes": superseded(launch, root)}],
    })  # fmt: skip
    seal_end(root)
    return root


def test_interim_analysis_is_kept_when_an_early_launch_is_remeasured(
    rehearsed: Rehearsal, tmp_path: Path
) -> None:
    taken = (rehearsed.study.root / "looks.json").read_bytes()
    root = measured_again(rehearsed, tmp_path, Launch("mooncake_both", 0, "A"))
    study = load_study(root / "study.json")
    assert [take_due_look(study, block) for block in range(BLOCKS - 1)] == [None] * (BLOCKS - 1)
    assert take_due_look(study, BLOCKS - 1) is not None
    assert (root / "looks.json").read_bytes() == taken
    late = Launch("mooncake_both", BLOCKS - 1, "A")
    assert decided_earlier(root, late) == f"{LEFT_OUT} 2 blocks"


def not_named(folder: Path) -> None:
    index = read_json(folder / "index.json")
    write_json(folder / "index.json", index | {"attempts": []})


def forged_name(folder: Path) -> None:
    """Name a launch that never existed."""
    index = read_json(folder / "index.json")
    attempts = [{"attempt": 1, "supersedes": "A.superseded7"}]
    write_json(folder / "index.json", index | {"attempts": attempts})


def first_run_gone(folder: Path) -> None:
    shutil.rmtree(folder.with_name("A.superseded1"))


def first_run_changed(folder: Path) -> None:
    """Change the first run after it was sealed."""
    path = folder.with_name("A.superseded1") / "index.json"
    write_json(path, read_json(path) | {"reason": "another"})


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (lambda _: None, NOT_CHECKABLE),
        (not_named, FAIL),
        (forged_name, FAIL),
        (first_run_gone, FAIL),
        (first_run_changed, FAIL),
    ],
    ids=["named", "unnamed", "forged", "gone", "changed"],
)
def test_audit_skips_only_interim_analyses_with_remeasured_launches(
    rehearsed: Rehearsal, tmp_path: Path, change: Callable[[Path], None], verdict: str
) -> None:
    launch = Launch("mooncake_both", 0, "A")
    root = measured_again(rehearsed, tmp_path, launch)
    change(launch.folder(root))
    copy = shutil.copytree(root, tmp_path / "copy")
    (copy / "looks.json").unlink()
    take_looks_again(root, load_study(copy / "study.json"))
    record: ManifestRecord = {
        "method": METHOD,
        "package": __version__,
        "files": {},
        "launches": [],
    }
    ledger = Ledger()
    check_looks(root, copy, Claims(record, ledger))
    assert [claim.verdict for claim in ledger.claims] == [verdict]


@pytest.mark.parametrize("choice", ["--all", "--phase=A"])
def test_interim_analyses_are_moved_aside_with_all_their_launches(
    rehearsed: Rehearsal, tmp_path: Path, choice: str
) -> None:
    root = shutil.copytree(rehearsed.study.root, tmp_path / "x")
    assert remeasure.main([str(root), choice]) == 0
    assert (root / "looks.superseded1.json").exists()
    assert decided_earlier(root, Launch("mooncake_both", BLOCKS - 1, "A")) is None


def test_plan_prints_longest_and_shortest_duration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    totals = []
    for levels in ([0.01] * (BLOCKS - 1), None):
        config = config_with(levels or [])
        if levels is None:
            del config["statistics"]["looks"]
        study_file = write_stages(tmp_path / str(levels is None), resolve(config, "tiny.yaml"))
        assert plan.main(["--study", str(study_file)]) == 0
        totals.append(capsys.readouterr().out)
    assert re.search(r", at least [1-9]\d*\.\d (s|min) if the first interim analysis", totals[0])
    assert "at least" not in totals[1]
    most = [re.split(r",| \(design", text.split("about ")[1])[0] for text in totals]
    assert most[0] == most[1]


@pytest.mark.parametrize(
    ("levels", "changes", "found"),
    [
        ([0.01] * BLOCKS, {}, "found 3 levels and 3 blocks; allowed: a level for each block"),
        ([0.01], {}, "found 1 levels and 3 blocks"),
        ([0.01] * 2, {"devices": [{"id": "a", "cpus": "0"}]}, "found `devices` and 3 blocks"),
        ([0.02, 0.04], {}, "found levels that add up to 0.06; allowed: up to 1 - statistics.conf"),
    ],
)
def test_interim_analyses_that_do_not_fit_the_study_are_refused(
    levels: list[float], changes: dict[str, Any], found: str
) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(copy.deepcopy(config_with(levels, **changes)), "my.yaml")
    assert f"my.yaml: statistics.looks: {found}" in str(error.value)


def test_rehearsal_with_more_blocks_does_not_change_the_studys_interim_analyses(
    tmp_path: Path,
) -> None:
    study = resolve(config_with([0.01], blocks=2), "tiny.yaml")
    assert "looks" not in prepare(study, tmp_path, 3)["config"]["statistics"]
    assert study["config"]["statistics"]["looks"] == [0.01]

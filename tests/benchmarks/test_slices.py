"""Test that slices of alternating servers recover a cost of the embedded engine."""

import math
import time
from pathlib import Path

import psutil
import pytest
import yaml

from benchmarks.slices import Slices, main, median_interval, with_step
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.files import ArtifactError, write_json
from connector_tax.study.design import resolve
from connector_tax.study.guardian import started_for
from tests.workflow.harness import TINY, device_for, smaller

# Added to a decode step of one sequence, which takes 3,030 us.
COST_US = 91.0


def resolved(folder: Path) -> StudyDocument:
    config = yaml.safe_load(smaller(TINY.read_text()))
    config["server"]["device"] = device_for(folder)
    study = resolve(config, "tiny.yaml")
    definition = study["config"]["engine"]["definition_content"]
    definition["step_cost"] |= {"launch_offset_rel_sd": 0.0, "beta3_us_per_kv_token": 0.0}
    definition["connectors"]["noop_connector"] |= {
        "build_meta_us": COST_US,
        "get_finished_us": 0.0,
        "start_load_kv_us": 0.0,
    }
    return study


def states(folder: Path, name: str) -> set[str]:
    (launch,) = folder.glob(f"{name}.*")
    return {psutil.Process(pid).status() for pid, _ in started_for(launch)}


@pytest.mark.workflow
def test_slices_find_a_cost_of_three_percent_and_none_between_equal_servers(
    tmp_path: Path,
) -> None:
    slices = Slices(resolved(tmp_path), tmp_path, [1], 0.7)
    names = ["plain", "plain_2", "noop_connector"]
    try:
        slices.start(names)
        rounds = slices.measure(names, 7, time.monotonic() + 60)
        assert states(tmp_path, "plain") == {psutil.STATUS_STOPPED}
    finally:
        slices.close()
    plain, twice, noop = (rounds[1, name] for name in ("plain", "plain_2", "noop_connector"))
    cost, low, high = median_interval([a - b for a, b in zip(noop, plain, strict=True)])
    assert low > 0, rounds
    assert cost == pytest.approx(COST_US, abs=30)
    _, low, high = median_interval([a - b for a, b in zip(twice, plain, strict=True)])
    assert low - 15 < 0 < high + 15
    assert list(started_for(tmp_path)) == []


@pytest.mark.workflow
def test_two_servers_are_relaunched_if_minutes_are_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_json(tmp_path / "study.json", resolved(tmp_path))
    options = ["--servers", "plain", "noop_connector", "--batches", "2", "--slice-s", "0.3"]
    command = ["--study", str(tmp_path / "study.json"), *options, "--rounds", "1"]
    assert main([*command, "--minutes", "1"]) == 0
    printed = capsys.readouterr().out
    assert "one launch of each, 1 rounds" in printed
    assert "plain and noop_connector launched anew, 1 rounds" in printed
    assert "[-inf, +inf]" in printed
    assert main([*command, "--servers", "plain", "plain"]) != 0
    assert "--servers: found plain; allowed: plain and others" in capsys.readouterr().err
    assert main([*command, "--rounds", "0"]) != 0
    assert "--rounds, --batches: found a number below 1" in capsys.readouterr().err
    assert main([*command, "--servers", "plain", "nixl_both"]) != 0
    assert "--servers: nixl_both: not in the study" in capsys.readouterr().err


def test_few_rounds_have_no_interval() -> None:
    assert median_interval([1.0, 2.0, 3.0]) == (2.0, -math.inf, math.inf)
    assert median_interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == (3.5, 1.0, 6.0)


def test_step_length_needs_an_emulated_device(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="--step-ms: tiny has no emulated device"):
        with_step(resolved(tmp_path), 2.5)

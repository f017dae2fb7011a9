"""Test the end of a cell: arrivals continue until the last measured request is answered."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from connector_tax.artifacts.folder import StudyFolder
from connector_tax.artifacts.study_file import load_study
from connector_tax.config import ROOT, load_yaml
from connector_tax.files import read_json, read_jsonl, write_json
from connector_tax.provenance.claims import FAIL, Ledger
from connector_tax.provenance.records import Records, check_cell
from connector_tax.study.design import resolve
from tests.study.driving import drive, launch_folder, write_study
from tests.study_folder import edited_json, edited_lines, seal_cell

pytestmark = pytest.mark.workflow

# About 9 sequences decode at once; each costs a step 0.35 ms of about 7, so that a server which
# runs empty is quicker by up to 40%. A request takes 0.5 s.
CROWDED = {"delta_us": 0.0, "beta0_us": 4000.0, "beta2_us_per_decode_seq": 350.0,
           "jitter_rel_sd": 0.0, "launch_offset_rel_sd": 0.0}  # fmt: skip


def run_cell(root: Path, cell: Mapping[str, Any], **step_cost: float) -> Path:
    """Drive plain's only rate; return the path of study.json."""
    study_file = write_study(root)
    config = yaml.safe_load(yaml.safe_dump(read_json(study_file)["config"]))
    del config["engine"]["definition_content"]
    config["phase_a"] |= {"rates_rps": [20], "output_tokens": 64}
    config["cell"] |= {"warmup_s": 1.0, "floor_s": 3.0, "cap_s": 3.0, **cell}
    study = resolve(config, "tiny.yaml")
    definition = load_yaml(ROOT / "config" / "embedded.yaml")
    definition["step_cost"] |= CROWDED | step_cost
    study["config"]["engine"]["definition_content"] = definition
    write_json(study_file, study)
    done = drive(study_file)
    assert done.returncode == 0, done.stdout
    return study_file


def cell_of(study_file: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the record of the cell, and its requests."""
    folder = launch_folder(study_file) / "r20"
    requests = list(read_jsonl(folder / "requests_A_r20.jsonl"))
    return read_json(folder / "cell_A_r20.json"), requests


def audit_failures(study_file: Path) -> list[str]:
    ledger, study = Ledger(), load_study(study_file)
    # Of the whole design nothing else was measured.
    for cell in StudyFolder(study).cells("A"):
        if cell.record is not None:
            check_cell(Records(study, cell), ledger)
    return [f"{claim.kind}: {claim.message}" for claim in ledger.claims if claim.verdict == FAIL]


def tpot_ms(request: Mapping[str, Any]) -> float:
    span_ns = request["t_last_token_ns"] - request["t_first_token_ns"]
    return float(span_ns / 1e6 / (request["completion_tokens"] - 1))


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_cell(tmp_path_factory.mktemp("cooldown"), {})


def test_last_measured_requests_are_served_under_full_load(crowded: Path) -> None:
    record, requests = cell_of(crowded)
    measured = [r for r in requests if not r["warmup"] and not r["cooldown"]]
    assert len(measured) == 60
    tpots = np.array([tpot_ms(r) for r in measured])
    middle, last = np.median(tpots[20:40]), np.median(tpots[-5:])
    assert last > 0.93 * middle
    assert record["cooldown"]["ended_by"] == "answered"
    assert record["valid"], record["void_reasons"]


def test_every_request_is_accounted_for_and_the_counters_match_exactly(crowded: Path) -> None:
    record, requests = cell_of(crowded)
    window, counts = record["window"], record["counts"]
    later = [r for r in requests if r["t_intended_ns"] >= window["t_stop_ns"]]
    assert len(later) == record["cooldown"]["requests"] == sum(r["cooldown"] for r in requests) > 0
    assert counts["planned"] == len(requests) == counts["ok"] == record["schedule"]["n"]
    assert counts["measured_ok"] == 60
    for check in ("success", "prompt_tokens", "generation_tokens"):
        assert record["health"][f"server_{check}_excess"]["value"] == 0
    assert record["health"]["unaccounted_requests"]["value"] == 0
    assert audit_failures(crowded) == []


def test_cooldown_request_cut_by_the_drain_does_not_void_the_cell(tmp_path: Path) -> None:
    # A request takes 1.4 s: requests of the window end before the drain, the last ones do not.
    study_file = run_cell(tmp_path, {"drain_s": 2.2}, beta0_us=12_000.0)
    record, requests = cell_of(study_file)
    assert record["valid"], record["void_reasons"]
    assert record["cooldown"]["ended_by"] == "answered"
    assert {r["status"] for r in requests if not r["cooldown"]} == {"ok"}
    assert "drain_timeout" in {r["error_kind"] for r in requests if r["cooldown"]}
    assert record["health"]["error_rate"]["value"] == 0
    assert audit_failures(study_file) == []


def test_cooldown_records_that_the_schedule_ended(tmp_path: Path) -> None:
    study_file = run_cell(tmp_path, {"warmup_s": 0.1, "floor_s": 1.0, "cap_s": 1.0},
                          beta0_us=36_000.0)  # fmt: skip
    record, requests = cell_of(study_file)
    assert record["cooldown"] == {
        "requests": sum(r["cooldown"] for r in requests), "ended_by": "schedule"
    }  # fmt: skip
    assert requests[-1]["t_intended_ns"] - record["window"]["t_origin_ns"] == pytest.approx(
        2.2e9, abs=6e7
    )
    assert audit_failures(study_file) == []


def test_audit_detects_a_request_moved_into_the_window(crowded: Path, tmp_path: Path) -> None:
    study_file = tmp_path / "study" / "study.json"
    shutil.copytree(crowded.parent, study_file.parent)
    folder = launch_folder(study_file) / "r20"
    with edited_lines(folder / "requests_A_r20.jsonl") as requests:
        requests[-1]["cooldown"] = False
    with edited_json(folder / "cell_A_r20.json") as record:
        record["cooldown"]["requests"] += 1
    seal_cell(folder)
    told = audit_failures(study_file)
    assert any(".cooldown: published False, made again True" in text for text in told)
    assert any("cell.cooldown.requests: published" in text for text in told)

"""How long `plan` and `doctor` say a study takes, against its rehearsal, and whose number it is."""

import re
from pathlib import Path
from typing import Any

import pytest
from snakemake.utils import update_config

from connector_tax.artifacts import paths
from connector_tax.artifacts.stage_records import Durations
from connector_tax.artifacts.study_records import RehearsalSection, StudyDocument
from connector_tax.config import ROOT, load_yaml
from connector_tax.files import ArtifactError, read_json, write_json
from connector_tax.provenance.archive import read_head
from connector_tax.rehearsal import doctor, durations, plan
from connector_tax.rehearsal.durations import modelled
from connector_tax.rehearsal.machine import NOISES, machine_of
from connector_tax.study.design import resolve
from connector_tax.study.plan import (
    durations_content,
    expected_cell_s,
    planned_cells,
    read_durations,
    reference_rate,
    remaining,
)


def shipped(*names: str) -> StudyDocument:
    """The design of configuration files laid over each other."""
    config = load_yaml(ROOT / f"config/{names[0]}.yaml")
    for name in names[1:]:
        update_config(config, load_yaml(ROOT / f"config/{name}.yaml"))
    return resolve(config, names[-1])


def said_hours(text: str) -> float:
    """What the doctor says."""
    hours = re.search(r"expected duration: (\d+) h (\d+) min", text)
    assert hours is not None, text
    return int(hours[1]) + int(hours[2]) / 60


@pytest.mark.parametrize("names", [("h20",), ("h20", "h20-verdicts"), ("h20", "gpu-small")])
def test_plan_and_doctor_say_what_the_rehearsal_says(
    names: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs/rehearsal.md").read_text()
    row = rf"^\| `config/{names[-1]}\.yaml` \| \w+ \| \d+ blocks? \| (\S+) h"
    rehearsed = re.search(row, page, re.MULTILINE)
    assert rehearsed is not None
    hours = pytest.approx(float(rehearsed[1]), rel=0.03)
    study = shipped(*names)
    write_json(tmp_path / "study.json", study)
    arguments = ["--study", str(tmp_path / "study.json")]
    assert durations.main(arguments) == 0
    doctor.main(arguments)
    said = capsys.readouterr().out
    model = "by the model of " + study["config"]["rehearsal"]["accelerator"]
    assert said_hours(said) == hours
    assert model in said
    assert plan.main(arguments) == 0
    said = capsys.readouterr().out
    planned = re.search(r"still to measure, about (\S+) h", said)
    assert planned is not None
    assert float(planned[1]) == hours
    assert f"Seconds: {model}" in said


def test_the_step_log_of_a_launch_is_a_model_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    study = shipped("vllm-cpu")
    measured = read_head(ROOT / study["config"]["rehearsal"]["archive"])
    for key in ("blocks", "run_order", "cells"):
        study[key] = measured[key]
    for key in ("blocks", "phase_a", "phase_b", "phase_bp"):
        study["config"][key] = measured["config"][key]  # type: ignore[literal-required]
    write_json(tmp_path / "study.json", study)
    doctor.main(["--study", str(tmp_path / "study.json")])
    said = capsys.readouterr().out
    # Its launches took 1.04 h; cells measured again and void are not foreseen.
    assert 0.8 < said_hours(said) < 1.2
    assert "plain/block0/A of results/archive/vllm-cpu.tar.zst" in said


def test_a_fitted_machine_differs_as_the_launches_of_its_archive_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    study = shipped("vllm-cpu")
    machine = machine_of(study)
    assert machine.noise.source == study["config"]["rehearsal"]["archive"]
    # The shipped study was measured on a noisier host than release 0.2's.
    assert machine.noise.launch_sd > NOISES["vllm-cpu"].launch_sd
    drawn = {engine.step_cost.launch_offset_rel_sd for engine in machine.engines.values()}
    assert drawn == {machine.noise.launch_sd}


@pytest.mark.parametrize(
    ("name", "section", "said"),
    [
        ("config", None, "a start-up of 2 s as in the shipped studies; no model of this machine"),
        ("vllm-cpu", None, "28 s as in the shipped studies; no `rehearsal` section"),
        ("h20", None, "a start-up of 60 s assumed; no `rehearsal` section"),
        ("vllm-cpu", {"archive": "no.tar.zst", "launch": "plain/block0/A"}, "no.tar.zst: No such"),
    ],
)
def test_without_a_model_the_assumption_is_told(
    name: str, section: RehearsalSection | None, said: str
) -> None:
    study = shipped(name)
    study["config"].pop("rehearsal", None)
    if section is not None:
        study["config"]["rehearsal"] = section
    known = modelled(study)
    assert said in known.source
    assert "if the server keeps up with every rate" in known.source
    rows = list(planned_cells(study, Path("nowhere"), known))
    rate = study["cells"]["A"][0]["rate_rps"]
    cell = next(row for row in rows if row.cell == study["cells"]["A"][0]["cell"])
    assert cell.expected_s == expected_cell_s(study["config"], rate)


def test_what_was_modelled_is_kept_for_its_design_and_its_machine(tmp_path: Path) -> None:
    study = shipped("h20")
    known = Durations(100.0, 0.0, "by a model")
    write_json(tmp_path / paths.DURATIONS, durations_content(study, known))
    kept = read_durations(study, tmp_path)
    assert kept is not None
    assert (kept.startup_s, kept.source, kept.cells) == (100.0, "by a model", {})
    other = study["config"].copy()
    other["rehearsal"] = {"accelerator": "H100", "model_config": "x"}
    assert read_durations({**study, "config": other}, tmp_path) is None
    assert read_durations({**study, "design_sha256": "0" * 64}, tmp_path) is None
    write_json(tmp_path / paths.DURATIONS, {"design_sha256": study["design_sha256"]})
    with pytest.raises(ArtifactError, match=r"durations\.json"):
        read_durations(study, tmp_path)


def test_reference_rates_without_a_rate_are_refused_by_name(tmp_path: Path) -> None:
    write_json(tmp_path / paths.REFERENCE_RATES, {})
    with pytest.raises(ArtifactError, match=r"reference_rates\.json"):
        reference_rate(tmp_path, "B")


def test_what_is_done_is_no_longer_expected_and_a_rate_of_its_own_is_followed(
    tmp_path: Path,
) -> None:
    study = shipped("h20", "gpu-small")
    names = {p: [c["cell"] for c in study["cells"][p]] for p in ("A", "B", "Bp")}
    cells = {phase: dict.fromkeys(named, 100.0) for phase, named in names.items()}
    known = Durations(50.0, 500.0, "", {"B": 4.0, "Bp": 4.0}, cells)
    before = remaining(study, tmp_path, known)
    # Gates of five configurations.
    write_json(tmp_path / paths.PREFLIGHT_STATUS, {})
    gated = remaining(study, tmp_path, known)
    assert before.wall_s - gated.wall_s == pytest.approx(5 * 60)
    # As expected: B' is left out. At other rates it is not, and its cells are not those expected.
    rates: Any = {"rates_rps": [], "saturation_rate_rps": {}, "criteria": {}, "left_out": {},
                  "fallback_used": False, "ref_safe": 4.0, "ref_load": 4.0}  # fmt: skip
    write_json(tmp_path / paths.REFERENCE_RATES, rates)
    assert remaining(study, tmp_path, known) == gated
    write_json(tmp_path / paths.REFERENCE_RATES, rates | {"ref_safe": 2.0})
    rows = {(r.launch.phase, r.cell): r for r in planned_cells(study, tmp_path, known)}
    assert rows["A", names["A"][0]].expected_s == 100.0
    assert rows["B", names["B"][0]].expected_s == expected_cell_s(study["config"], 2.0)
    assert rows["Bp", names["Bp"][0]].expected_s == 100.0
    probed = {"design_sha256": study["design_sha256"], "label": "", "shapes": {}}
    left = remaining(study, tmp_path, known)
    write_json(tmp_path / paths.SHAPE_RATES, probed)
    assert left.wall_s - remaining(study, tmp_path, known).wall_s == pytest.approx(560.0)
    assert read_json(tmp_path / paths.SHAPE_RATES) == probed

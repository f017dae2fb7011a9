"""Test the durations that `plan` and `doctor` print against the study's rehearsal."""

import re
from pathlib import Path
from typing import Any

import pytest
from snakemake.utils import update_config

from connector_tax.artifacts import paths
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.config import ROOT, ConfigError, load_yaml
from connector_tax.files import ArtifactError, write_json
from connector_tax.rehearsal import __main__ as rehearse
from connector_tax.rehearsal import doctor, plan
from connector_tax.study.design import resolve
from connector_tax.study.durations import durations_of, expected_cell_s, overloaded_cells
from connector_tax.study.plan import planned_cells, reference_rate, remaining


def shipped(*names: str) -> StudyDocument:
    """Return the design of configuration files that are merged in this order."""
    config = load_yaml(ROOT / f"config/{names[0]}.yaml")
    for name in names[1:]:
        update_config(config, load_yaml(ROOT / f"config/{name}.yaml"))
    return resolve(config, names[-1])


@pytest.mark.parametrize("names", [("h20",), ("h20", "h20-verdicts"), ("h20", "gpu-small")])
def test_plan_and_doctor_agree_and_are_close_to_the_rehearsal(
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
    study = shipped(*names)
    write_json(tmp_path / "study.json", study)
    arguments = ["--study", str(tmp_path / "study.json")]
    doctor.main(arguments)
    text = capsys.readouterr().out
    parts = re.search(r"expected duration: (\d+) h (\d+) min", text)
    assert parts is not None, text
    hours = int(parts[1]) + int(parts[2]) / 60
    assert hours == pytest.approx(float(rehearsed[1]), rel=0.15)
    model = "by a fluid model of " + study["config"]["rehearsal"]["accelerator"]
    assert model in text
    assert plan.main(arguments) == 0
    text = capsys.readouterr().out
    planned = re.search(r"still to measure, about (\S+) h", text)
    assert planned is not None
    assert float(planned[1]) == pytest.approx(hours, abs=0.06)
    assert f"Seconds: {model}" in text


def test_rehearsal_of_an_h20_names_reference_rates_and_overloaded_cells() -> None:
    study = shipped("h20")
    known = durations_of(study)
    assert known.rates_rps == {"B": 2.0, "Bp": 2.0}
    assert overloaded_cells(study, known) == ["A r4"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config", "start-up of 2 s as in the shipped studies; no model of this machine"),
        ("vllm-cpu", "28 s as in the shipped studies; no accelerator in `rehearsal`"),
        ("h20", "start-up of 60 s assumed; no accelerator in `rehearsal`"),
    ],
)
def test_duration_without_an_accelerator_names_its_assumption(name: str, text: str) -> None:
    study = shipped(name)
    study["config"].pop("rehearsal", None)
    known = durations_of(study)
    assert text in known.source
    assert "if the server keeps up with every rate" in known.source
    first = study["cells"]["A"][0]
    cell = next(row for row in planned_cells(study, Path("nowhere")) if row.cell == first["cell"])
    assert cell.expected_s == expected_cell_s(study["config"]["cell"], first["rate_rps"])


def test_rehearsal_without_a_machine_prints_durations_and_assumptions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_json(tmp_path / "study.json", shipped("vllm-cpu"))
    assert rehearse.main(["--study", str(tmp_path / "study.json")]) == 0
    text = capsys.readouterr().out
    assert "if the server keeps up with every rate; start-up of 28 s" in " ".join(text.split())
    assert "Not rehearsed: this study names no machine." in text
    assert (tmp_path / paths.REHEARSAL_PAGE).read_text() in text


def test_error_for_a_removed_key_names_its_replacement() -> None:
    config = load_yaml(ROOT / "config/vllm-cpu.yaml")
    config["rehearsal"] = {"archive": "a.tar.zst", "launch": "plain/block0/A"}
    with pytest.raises(ConfigError, match=r"rehearsal\.archive: removed; name rehearsal\.acc"):
        resolve(config, "mine.yaml")


def test_reference_rates_file_without_a_rate_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / paths.REFERENCE_RATES, {})
    with pytest.raises(ArtifactError, match=r"reference_rates\.json"):
        reference_rate(tmp_path, "B")


def test_remaining_time_uses_finished_cells_and_derived_rates(tmp_path: Path) -> None:
    study = shipped("h20", "gpu-small")
    names = {p: [c["cell"] for c in study["cells"][p]] for p in ("A", "B", "Bp")}
    before = remaining(study, tmp_path)
    startup_s = durations_of(study).startup_s
    # The gates of five configurations have passed.
    write_json(tmp_path / paths.PREFLIGHT_STATUS, {})
    gated = remaining(study, tmp_path)
    assert before.wall_s - gated.wall_s == pytest.approx(5 * (startup_s + 10))
    # Equal reference rates leave out B', as expected; other rates do not.
    rates: Any = {"rates_rps": [], "saturation_rate_rps": {}, "criteria": {}, "left_out": {},
                  "fallback_used": False, "ref_safe": 4.0, "ref_load": 4.0}  # fmt: skip
    write_json(tmp_path / paths.REFERENCE_RATES, rates)
    assert remaining(study, tmp_path) == gated
    write_json(tmp_path / paths.REFERENCE_RATES, rates | {"ref_safe": 2.0})
    rows = {(r.launch.phase, r.cell): r for r in planned_cells(study, tmp_path)}
    shortest = expected_cell_s(study["config"]["cell"], 2.0)
    assert shortest < rows["B", names["B"][0]].expected_s < shortest + 2
    assert rows["Bp", names["Bp"][0]].expected_s > 0
    probed = {"design_sha256": study["design_sha256"], "label": "", "shapes": {}}
    left = remaining(study, tmp_path)
    write_json(tmp_path / paths.SHAPE_RATES, probed)
    probes_s = startup_s + 10 + durations_of(study).probes_s
    assert left.wall_s - remaining(study, tmp_path).wall_s == pytest.approx(probes_s, rel=0.05)

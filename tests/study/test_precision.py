"""Precision-targeted studies: order, stopping, skipped rates, and everything that reads them."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from connector_tax.analysis.ingest import load_cells
from connector_tax.artifacts.names import Launch
from connector_tax.artifacts.study_file import load_study
from connector_tax.artifacts.study_records import PrecisionSection, StudyDocument
from connector_tax.config import ROOT, load_yaml
from connector_tax.files import read_json, write_json
from connector_tax.provenance import audit
from connector_tax.provenance.claims import FAIL
from connector_tax.study.design import cell_order, resolve
from connector_tax.study.plan import planned_cells
from connector_tax.study.precision import precision_rule, saturation_skips, skip_reason
from tests.study.driving import drive, index_of, launch_folder, write_study
from tests.workflow.harness import prepare, run
from tests.workflow.small import smaller

# The target is wide: r20 reaches it on a machine that other tests use too.
ON: PrecisionSection = {
    "enabled": True,
    "target_relative_half_width": 0.9,
    "min_completed_floor": 36,
    "certain_throughput_ratio": 0.8,
    "skip_rate_factor": 2,
}
# One sequence at a time: plain serves about 35 requests of 8 tokens in a second.
RATES = [20, 80, 120, 160]


def slow_engine() -> dict[str, Any]:
    definition: dict[str, Any] = load_yaml(ROOT / "config" / "embedded.yaml")
    definition["scheduler"]["max_num_seqs"] = 1
    return definition


def default_study(**precision: Any) -> StudyDocument:
    config = load_yaml(ROOT / "config" / "config.yaml")
    config["precision"] = precision
    return resolve(config, "config.yaml")


def test_phase_a_ascends_only_with_the_feature_on_and_other_phases_never() -> None:
    off, on = default_study(), default_study(enabled=True)
    assert off["design_sha256"] != on["design_sha256"]
    assert precision_rule(off["config"]) is None
    ascending = 0
    for phase in ("A", "B", "Bp"):
        for entry in off["run_order"][phase]:
            launch = Launch(entry["config"], entry["block"], phase)
            orders = [[c["cell"] for c in cell_order(study, launch)] for study in (off, on)]
            planned = [c["cell"] for c in off["cells"][phase]]
            assert orders[1] == (planned if phase == "A" else orders[0])
            ascending += phase == "A" and orders[0] == planned
    assert ascending < len(off["run_order"]["A"])


@given(
    lower=st.floats(0.1, 100),
    rate=st.floats(0.1, 1000),
    ratio=st.none() | st.floats(0, 1.2),
    factor=st.floats(1, 8),
)
def test_only_rates_above_a_certain_saturation_are_skipped(
    lower: float, rate: float, ratio: float | None, factor: float
) -> None:
    skipped = saturation_skips(ON | {"skip_rate_factor": factor}, lower, ratio, rate)
    assert skipped == (
        ratio is not None and ratio < 0.8 and rate > lower and rate >= factor * lower
    )


def test_a_void_cell_skips_nothing(tmp_path: Path) -> None:
    study = default_study(enabled=True)
    launch, high = Launch("plain", 0, "A"), study["cells"]["A"][-1]
    record = {"valid": True, "precision": {"throughput_ratio": 0.41}}
    path = tmp_path / "r40" / "cell_A_r40.json"
    write_json(path, record)
    said = skip_reason(study, launch, tmp_path, high)
    assert said == (
        "saturated at r40 by throughput_ratio 0.41 (below 0.8); rates >= 2x that are skipped"
    )
    write_json(path, record | {"valid": False})
    assert skip_reason(study, launch, tmp_path, high) is None
    write_json(path, record)
    assert skip_reason(default_study(), launch, tmp_path, high) is None


@pytest.fixture(scope="module")
def driven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plain's Phase A, driven with the feature on; the path of study.json."""
    study_file = write_study(tmp_path_factory.mktemp("precision"))
    config = yaml.safe_load(yaml.safe_dump(read_json(study_file)["config"]))
    del config["engine"]["definition_content"]
    config["precision"] = ON
    config["phase_a"]["rates_rps"] = RATES
    study = resolve(config, "tiny.yaml")
    study["config"]["engine"]["definition_content"] = slow_engine()
    write_json(study_file, study)
    done = drive(study_file)
    assert done.returncode == 0, done.stdout
    return study_file


def test_the_driver_stops_at_the_target_and_skips_what_is_far_above(driven: Path) -> None:
    cells = {entry["cell"]: entry for entry in index_of(driven)["cells"]}
    assert {n: e["status"] for n, e in cells.items()} == {
        "r20": "valid", "r80": "valid", "r120": "valid", "r160": "skipped",
    }  # fmt: skip
    assert cells["r160"]["reason"].startswith("saturated at r80 by throughput_ratio 0.")
    assert cells["r160"]["files"] == {}
    assert not (launch_folder(driven) / "r160").exists()
    record = read_json(launch_folder(driven) / "r20" / "cell_A_r20.json")
    assert record["precision"]["stopped_by"] == "target"
    assert record["precision"]["at_stop"]["n"] >= 36
    assert record["precision"]["achieved"]["n"] == record["counts"]["measured_ok"]


def test_a_resumed_launch_skips_the_same_rates_and_starts_nothing(driven: Path) -> None:
    before = index_of(driven)
    (launch_folder(driven) / "index.json").unlink()
    rows = {row.cell: row.state for row in planned_cells(read_json(driven), driven.parent)
            if row.launch == Launch("plain", 0, "A")}  # fmt: skip
    assert rows["r80"] == "done"
    again = drive(driven)
    assert again.returncode == 0, again.stdout
    after = index_of(driven)
    assert after["cells"] == before["cells"]
    assert len(after["attempts"]) == 1
    rows = {row.cell: row.state for row in planned_cells(read_json(driven), driven.parent)
            if row.launch == Launch("plain", 0, "A")}  # fmt: skip
    assert rows["r160"] == "skipped"


def small_precise(text: str) -> str:
    """The small study on the slow engine with the feature on; its rates saturate early."""
    text = smaller(text)
    for old, new in {
        "enabled: false": "enabled: true",
        "target_relative_half_width: 0.05": "target_relative_half_width: 0.5",
        "min_completed_floor: 50": "min_completed_floor: 36",
        "rates_rps: [20, 40]": "rates_rps: [20, 80, 160]",
        "config/embedded.yaml": "ENGINE",
        "fallback_rps: 20": "fallback_rps: null",
    }.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


@pytest.mark.workflow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_whole_study_with_skipped_rates_is_complete_and_audited(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    engine = tmp_path_factory.mktemp("engine") / "slow.yaml"
    engine.write_text(yaml.safe_dump(slow_engine()))
    folder = prepare(tmp_path / "study", lambda t: small_precise(t).replace("ENGINE", str(engine)))
    done = run(folder, "all")
    assert done.returncode == 0, done.stdout + done.stderr
    study_file = folder / "results" / "tiny" / "study.json"
    rates = read_json(study_file.parent / "reference_rates.json")
    assert (rates["ref_safe"], rates["ref_load"], rates["fallback_used"]) == (20.0, 20.0, False)
    assert rates["saturation_rate_rps"]["plain"] == 80.0
    cells = {cell.key: cell for cell in load_cells(load_study(study_file), "A")}
    assert {c.status for k, c in cells.items() if k.cell == "r160"} == {"skipped"}
    assert {c.status for k, c in cells.items() if k.cell != "r160"} == {"valid"}
    ledger, _ = audit.audit(study_file, folder / "MANIFEST.md")
    # Stamps of single requests are not what this test is about; a busy machine disorders them.
    assert [c for c in ledger.claims if c.verdict == FAIL and c.kind != "records"] == []
    assert "rates &gt;= 2x that are skipped" in (study_file.parent / "report.html").read_text()

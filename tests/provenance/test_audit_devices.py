"""The audit agrees with every number of a study on several devices."""

import csv
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from connector_tax.analysis import aggregate
from connector_tax.artifacts import paths
from connector_tax.artifacts.names import DEVICES_DIFFER
from connector_tax.figures.tables import StudyTables
from connector_tax.files import read_json
from connector_tax.provenance import audit
from connector_tax.provenance.claims import FAIL
from connector_tax.report.answer import answer
from tests.analysis.synthetic import write_analysed_study, write_synthetic_study
from tests.provenance.audited_study import write_audited_study
from tests.provenance.tampering import failures
from tests.study_folder import on_machines

CONFIG: dict[str, Any] = {
    "phase_a": {"rates_rps": [40.0, 80.0]},
    "phase_b": {"input_tokens": [128], "output_tokens": [16, 64]},
    "phase_bp": {"configurations": ["plain", "mooncake_both"], "shapes": [[128, 16]]},
    "statistics": {"resamples": 100},
    "cell": {"floor_s": 1.5, "min_completed": 60},
}


@pytest.mark.long
def test_a_study_on_two_devices_passes_the_whole_audit(tmp_path: Path) -> None:
    """Devices differ in NIXL's tax: figures and report of it are made, and made again."""
    study_file = write_audited_study(
        tmp_path,
        blocks=3,
        noise=0.3,
        nodes=on_machines("a", "b", "a"),
        offsets={("nixl_both", 1): 0.3},
    )
    ledger = audit.audit(study_file, tmp_path / "MANIFEST.md")
    assert [c for c in ledger.claims if c.verdict == FAIL] == []
    assert ("numbers", paths.DEVICE_TAXES) in {(c.kind, c.subject) for c in ledger.claims}
    study = StudyTables(study_file)
    assert study.taxes_at("ref_safe", "tpot_p90")["nixl_both"].verdict == DEVICES_DIFFER
    assert "the devices differ in the cost of nixl both (TTFT p90 and TPOT p90)" in answer(study)
    page = (study.root / paths.REPORT).read_text()
    assert "Each device at ref_safe" in page
    assert "machine-b none, CPUs 0-7" in page
    rows = list(csv.DictReader((study.root / "analysis/aggregate.csv").open()))
    on = {(row["block"], row["device"]) for row in rows if row["config"] == "plain"}
    assert {("0", "machine-a none, CPUs 0-7"), ("1", "machine-b none, CPUs 0-7")} < on
    assert ("all", "2 devices") in on
    parquet = pl.read_parquet(study.root / "analysis/taxes.parquet")
    assert set(parquet["device"].drop_nulls()) == {"2 devices"}
    clock = read_json(study.root / "analysis/hypotheses.json")["criteria"][-1]
    assert " h of 2 devices together" in clock["sentence"]


@pytest.mark.long
def test_every_number_of_a_study_on_four_devices_is_recomputed(tmp_path: Path) -> None:
    """With a launch lost, a void cell and a device that has two blocks."""
    study_file = write_analysed_study(
        tmp_path / "results" / "synthetic",
        blocks=5,
        seed=5,
        ttft_growth=0.05,
        steps_per_cell=60,
        failed={("lmcache_only", 2, "B"): "the server ended"},
        void={("nixl_both", 4, "A", "r40"): "late"},
        config=CONFIG,
        nodes=on_machines(*"abcda"),
        offsets={("nixl_both", block): 0.2 * block for block in range(5)},
    )
    study = StudyTables(study_file)
    methods = " ".join(row.interval_method for row in study.taxes)
    assert "block model over 4 devices (df" in methods
    assert "own spread over 4 devices (df" in methods
    assert "block model over 4 devices" in {row.method for row in study.step_taxes}
    assert {"TAX", "INCONCLUSIVE"} <= {row.verdict for row in study.taxes}
    wrong = [c for c in failures(study_file) if c.kind == "numbers"]
    assert wrong == []


@pytest.mark.long
def test_devices_of_a_block_measured_again_leave_no_table_of_another_time(tmp_path: Path) -> None:
    study_file = write_synthetic_study(
        tmp_path / "x", blocks=1, steps_per_cell=10, config=CONFIG, nodes=on_machines("a")
    )
    stale = study_file.parent / paths.ANALYSIS / paths.DEVICE_TAXES
    stale.parent.mkdir()
    stale.write_text("stale")
    assert aggregate.main(["--study", str(study_file)]) == 0
    assert not stale.exists()
    assert "device" not in (stale.parent / paths.TAXES).read_text().splitlines()[0]

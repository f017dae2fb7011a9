"""The whole way from raw files to tables: known answers, and what must never feed a number."""

import csv
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from connector_tax.analysis.aggregate import main as aggregate
from connector_tax.analysis.measure import summarise_cell
from connector_tax.analysis.reference import main as reference
from connector_tax.files import ArtifactError, sha256_file
from tests.analysis.conftest import FAIL_REASON, SKIP_REASON, VOID_REASON
from tests.analysis.synthetic import TAXES, write_synthetic_study

FILES = (
    "aggregate.csv",
    "aggregate.json",
    "amplification.csv",
    "hooks.csv",
    "hypotheses.json",
    "step_cdf.csv",
    "step_taxes.csv",
    "steps.csv",
    "taxes.csv",
)


def table(root: Path, name: str) -> list[dict[str, str]]:
    """The rows of a CSV under analysis/."""
    with (root / "analysis" / name).open(newline="") as stream:
        return list(csv.DictReader(stream))


def select(rows: list[dict[str, str]], **where: str) -> list[dict[str, str]]:
    """The rows with the given values."""
    return [row for row in rows if all(row[k] == v for k, v in where.items())]


def one(rows: list[dict[str, str]], **where: str) -> dict[str, str]:
    """The only row with the given values."""
    found = select(rows, **where)
    assert len(found) == 1, (where, len(found))
    return found[0]


def test_taxes_are_recovered_within_their_intervals(crisp: Path) -> None:
    rows = table(crisp, "taxes.csv")
    covered = 0
    for config, truth in TAXES.items():
        row = one(rows, config=config, reference="ref_safe", phase="A", metric="tpot_p90")
        # Phase A has 32 output tokens, one doubling above 16.
        assert float(row["tax"]) == pytest.approx(truth + 0.05, abs=0.004)
        covered += float(row["tax_lo"]) <= truth + 0.05 <= float(row["tax_hi"])
        assert row["verdict"] == "TAX"
        assert row["n_blocks"] == "5"
    assert covered >= 6


def test_the_last_plain_shows_no_tax_and_stands_beside_every_tax(crisp: Path) -> None:
    rows = table(crisp, "taxes.csv")
    noise = one(rows, config="plain_2", reference="ref_safe", phase="A", metric="tpot_p90")
    assert noise["verdict"] == "NO TAX"
    other = one(rows, config="nixl_both", reference="ref_safe", phase="A", metric="tpot_p90")
    assert (other["aa_tax"], other["aa_lo"]) == (noise["tax"], noise["tax_lo"])


def test_absolute_difference_and_ratio_agree(crisp: Path) -> None:
    for row in select(table(crisp, "taxes.csv"), status="valid"):
        plain, ours = float(row["plain_ms"]), float(row["config_ms"])
        assert float(row["abs_ms"]) == pytest.approx(ours - plain)
        assert float(row["tax"]) == pytest.approx(ours / plain - 1)


def test_capacity_and_step_taxes_stand_beside_the_ratio(crisp: Path) -> None:
    row = one(
        table(crisp, "taxes.csv"),
        config="mooncake_both",
        reference="ref_safe",
        phase="A",
        metric="ttft_p90",
    )
    assert float(row["capacity_ratio"]) == 80 / 160
    assert float(row["step_tax_us"]) == pytest.approx(450, rel=0.02)
    assert float(row["callback_us"]) == pytest.approx(0.6 * 450, rel=0.01)
    gap = float(row["step_tax_us"]) - float(row["callback_us"])
    assert float(row["unattributed_us"]) == pytest.approx(gap)
    assert float(row["engine_step_tax_us"]) == pytest.approx(450, rel=0.05)


def test_a_tax_outside_schedule_is_on_the_engine_step_alone(crisp: Path) -> None:
    where = {"reference": "ref_safe", "phase": "A", "metric": "ttft_p90"}
    row = one(table(crisp, "taxes.csv"), config="nixl_both", **where)
    beyond = float(row["engine_step_tax_us"]) - float(row["step_tax_us"])
    assert beyond == pytest.approx(100, abs=30)


def test_records_without_whole_steps_keep_the_rest_with_the_reason(small: Path) -> None:
    for index in small.glob("runs/*/*/*/index.json"):
        text = index.read_text()
        for path in index.parent.glob("*/engine_step_*.jsonl"):
            before = sha256_file(path)
            path.write_bytes(re.sub(rb'"engine_step_us":[^,]*,', b"", path.read_bytes()))
            text = text.replace(before, sha256_file(path))
        index.write_text(text)
    assert aggregate(["--study", str(small / "study.json")]) == 0
    rows = select(table(small, "steps.csv"), status="valid")
    assert {row["reason"] for row in rows} == {"no engine_step_us in the records of both sides"}
    assert all(row["tax_step_p50"] and not row["tax_engine_step_p50"] for row in rows)


def test_amplification_is_the_difference_of_the_taxes_with_its_own_interval(crisp: Path) -> None:
    rows = table(crisp, "amplification.csv")
    grown = one(rows, config="mooncake_both", metric="ttft_p90")
    assert float(grown["gap"]) == pytest.approx(
        float(grown["tax_ref_load"]) - float(grown["tax_ref_safe"])
    )
    assert float(grown["gap_lo"]) > 1  # saturated at ref_load: a queue, not a tax of some per cent
    flat = one(rows, config="noop_connector", metric="tpot_p90")
    assert float(flat["gap_lo"]) < 0 < float(flat["gap_hi"])


def test_every_planned_cell_and_tax_has_a_row(damaged: Path) -> None:
    study = json.loads((damaged / "study.json").read_text())
    planned = {
        (launch["config"], str(launch["block"]), phase, cell["cell"])
        for phase in ("A", "B", "Bp")
        for launch in study["run_order"][phase]
        for cell in study["cells"][phase]
    }
    rows = [row for row in table(damaged, "aggregate.csv") if row["block"] != "all"]
    assert {(r["config"], r["block"], r["phase"], r["cell"]) for r in rows} == planned
    taxes = table(damaged, "taxes.csv")
    assert len(taxes) == 5 * sum(config != "plain" for config, *_ in planned)
    assert sum(row["config"] == "plain_2" for row in taxes) == 5 * sum(
        config == "plain_2" for config, *_ in planned
    )
    assert all(row["reason"] for row in taxes if row["status"] != "valid")
    assert all((row["tax"] != "") == (row["status"] == "valid") for row in taxes)


def test_lost_cells_keep_their_reason_and_feed_nothing(damaged: Path) -> None:
    cells, taxes = table(damaged, "aggregate.csv"), table(damaged, "taxes.csv")
    skipped = one(cells, config="mooncake_consumer", block="0", cell="r40", phase="A")
    assert (skipped["status"], skipped["reason"]) == ("skipped", SKIP_REASON)
    void = one(cells, config="lmcache_only", block="0", phase="A", cell="r40")
    assert (void["status"], void["reason"]) == ("void", VOID_REASON)
    assert (void["n"], void["ttft_p90_ms"]) == ("120", "")
    failed = select(cells, config="nixl_both", block="0", phase="B")
    assert {(row["status"], row["reason"]) for row in failed} == {("failed", FAIL_REASON)}
    orphan = one(taxes, config="mooncake_both", phase="B", cell="128x16", metric="ttft_p90")
    assert orphan["status"] == "void"
    assert orphan["reason"] == f"block 0: plain: {VOID_REASON}"
    lost = one(taxes, config="nixl_both", phase="B", cell="512x64", metric="ttft_p90")
    assert (lost["status"], lost["tax"]) == ("missing", "")
    assert FAIL_REASON in lost["reason"]


def test_one_block_gives_numbers_without_intervals_or_verdicts(damaged: Path) -> None:
    valid = select(table(damaged, "taxes.csv"), status="valid")
    assert {row["verdict"] for row in valid} == {
        "point estimate, no verdict",
        "no verdict (marked)",
    }
    assert {row["interval_method"] for row in valid} == {"one launch; launches not included"}
    empty = ("tax_lo", "tax_hi", "abs_lo_ms", "abs_hi_ms", "p_value", "p_adjusted", "error_df")
    assert {row[name] for row in valid for name in empty} == {""}
    gaps = select(table(damaged, "amplification.csv"), status="valid")
    assert {row["gap_lo"] for row in gaps} == {""}


def test_a_lost_launch_of_plain_leaves_the_other_as_baseline_and_no_aa(damaged: Path) -> None:
    rows = table(damaged, "taxes.csv")
    row = one(rows, config="mooncake_both", phase="B", cell="128x64", metric="ttft_p90")
    assert (row["status"], row["aa_tax"]) == ("valid", "")
    noise = one(rows, config="plain_2", phase="B", cell="128x64", metric="ttft_p90")
    assert (noise["status"], noise["reason"]) == ("void", f"block 0: {VOID_REASON}")


def test_the_columns_of_the_tax_table(crisp: Path) -> None:
    text = (crisp / "analysis" / "taxes.csv").read_text()
    assert text.splitlines()[0].replace(",", " ") == (
        "config phase cell rate_rps reference input_tokens output_tokens metric family tax tax_lo"
        " tax_hi abs_ms abs_lo_ms abs_hi_ms plain_ms config_ms n_blocks n_config n_plain"
        " interval_method error_df verdict p_value p_adjusted blocks_needed margin aa_tax aa_lo"
        " aa_hi tax_all tax_all_lo tax_all_hi mark capacity_ratio step_tax_us engine_step_tax_us"
        " callback_us unattributed_us"
        " status reason"
    )


def test_the_confirmatory_family_is_phase_a_at_the_rates_named_beforehand(
    crisp: Path, tmp_path: Path
) -> None:
    def confirmatory(root: Path) -> set[tuple[str, str]]:
        rows = select(table(root, "taxes.csv"), family="confirmatory")
        return {(row["phase"], row["cell"]) for row in rows}

    assert confirmatory(crisp) == {("A", "r40"), ("A", "r80")}
    study = write_synthetic_study(
        tmp_path / "x", steps_per_cell=10, config={"statistics": {"confirmatory": ["ref_load"]}}
    )
    assert aggregate(["--study", str(study)]) == 0
    assert confirmatory(study.parent) == {("A", "r80")}


def test_a_saturated_configuration_is_marked_and_leaves_the_family(crisp: Path) -> None:
    rows = table(crisp, "taxes.csv")
    where = {"phase": "A", "cell": "r80", "metric": "tpot_p90"}
    marked = one(rows, config="mooncake_both", **where)
    assert marked["mark"] == "mooncake_both saturated"
    assert (marked["verdict"], marked["p_adjusted"]) == ("no verdict (marked)", "")
    assert marked["tax_lo"] != "" != marked["p_value"]
    clean = one(rows, config="noop_connector", **where)
    assert (clean["mark"], clean["verdict"]) == ("", "TAX")
    everyone = select(rows, phase="A", cell="r160", metric="ttft_p90")
    assert {row["verdict"] for row in everyone} == {"no verdict (marked)"}
    gap = one(table(crisp, "amplification.csv"), config="mooncake_both", metric="ttft_p90")
    assert gap["mark"] == "mooncake_both saturated"


def test_plains_pooled_row_is_over_all_of_its_launches(crisp: Path) -> None:
    rows = table(crisp, "aggregate.csv")
    launches = [
        row
        for name in ("plain", "plain_2")
        for row in select(rows, config=name, phase="A", cell="r40")
        if row["block"] != "all"
    ]
    assert len(launches) == 10
    logs = np.log([float(row["ttft_p90_ms"]) for row in launches]).reshape(2, 5).mean(axis=0)
    pooled = one(rows, configuration="plain", phase="A", cell="r40", block="all")
    assert pooled["config"] == "plain"
    assert float(pooled["ttft_p90_ms"]) == pytest.approx(np.exp(logs.mean()))
    half = 2.776445 * logs.std(ddof=1) / np.sqrt(5)
    assert float(pooled["ttft_p90_hi_ms"]) == pytest.approx(np.exp(logs.mean() + half))
    assert pooled["n"] == str(10 * 120)
    tax = one(
        table(crisp, "taxes.csv"), config="nixl_both", phase="A", cell="r40", metric="ttft_p90"
    )
    assert float(tax["plain_ms"]) == pytest.approx(float(pooled["ttft_p90_ms"]))


def test_without_step_timing_step_columns_are_empty_with_the_reason(damaged: Path) -> None:
    rows = select(table(damaged, "steps.csv"), status="valid")
    assert rows
    assert {row["reason"] for row in rows} == {
        "step timing is not available: the probe does not fit this engine version"
    }
    assert all(row["tax_step_p50"] == row["n_steps"] == "" for row in rows)
    assert [row["config"] for row in table(damaged, "step_cdf.csv")] in ([], [""])


def test_pooled_rows_are_geometric_means_of_the_blocks(crisp: Path) -> None:
    rows = table(crisp, "aggregate.csv")
    blocks = [
        float(row["ttft_p90_ms"])
        for row in select(rows, config="nixl_both", phase="A", cell="r40")
        if row["block"] != "all"
    ]
    pooled = one(rows, config="nixl_both", phase="A", cell="r40", block="all")
    assert len(blocks) == 5
    assert float(pooled["ttft_p90_ms"]) == pytest.approx(np.exp(np.mean(np.log(blocks))))
    mean, error = np.mean(np.log(blocks)), np.std(np.log(blocks), ddof=1) / np.sqrt(5)
    assert float(pooled["ttft_p90_hi_ms"]) == pytest.approx(np.exp(mean + 2.776445 * error))
    assert pooled["n"] == str(5 * 120)


def test_a_p99_below_the_minimum_is_refused_in_words(crisp: Path) -> None:
    row = one(table(crisp, "aggregate.csv"), config="plain", phase="A", cell="r40", block="0")
    assert (row["ttft_p99_ms"], row["p99_reason"]) == ("", "n too small")


def test_aggregate_json_holds_the_rows_and_says_what_was_measured(crisp: Path) -> None:
    found = json.loads((crisp / "analysis" / "aggregate.json").read_text())
    assert (found["engine_label"], found["emulated"]) == ("embedded (emulated)", True)
    assert len(found["rows"]) == len(table(crisp, "aggregate.csv"))


def test_the_step_cdf_is_a_distribution_of_at_most_400_points(crisp: Path) -> None:
    rows = select(table(crisp, "step_cdf.csv"), config="plain")
    shares, durations = ([float(row[k]) for row in rows] for k in ("cdf", "step_duration_us"))
    assert len(rows) == 400
    assert shares[-1] == 1
    assert np.all(np.diff(shares) > 0)
    assert np.all(np.diff(durations) >= 0)
    assert durations[0] > 100  # the empty polling steps of 20 us are not in it


def test_same_input_same_bytes(damaged: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    shutil.copytree(damaged, copy)
    shutil.rmtree(copy / "analysis")
    assert aggregate(["--study", str(copy / "study.json")]) == 0
    for name in FILES:
        assert (copy / "analysis" / name).read_bytes() == (damaged / "analysis" / name).read_bytes()


def test_an_archived_study_with_a_closing_plain_gives_the_same_numbers(
    small: Path, tmp_path: Path
) -> None:
    old = tmp_path / "old"
    shutil.copytree(small, old)
    for launch in (old / "runs").glob("plain_2/*/*"):
        text = (launch / "index.json").read_text()
        for record in launch.glob("*/cell_*.json"):
            before = sha256_file(record)
            record.write_text(record.read_text().replace("plain_2", "plain_last"))
            text = text.replace(before, sha256_file(record))
        (launch / "index.json").write_text(text.replace("plain_2", "plain_last"))
    (old / "runs" / "plain_2").rename(old / "runs" / "plain_last")

    def as_it_was(study: dict[str, Any]) -> None:
        config = study["config"]
        assert config.pop("plain_launches") == 2
        config["closing_plain"] = True
        del config["statistics"]["confirmatory"]
        config["statistics"]["margin"] = config["statistics"].pop("margins")["ttft_p90"]
        for entry in (entry for order in study["run_order"].values() for entry in order):
            entry["config"] = entry["config"].replace("plain_2", "plain_last")

    edit(old / "study.json", as_it_was)
    for root in (small, old):
        assert reference(["--study", str(root / "study.json")]) == 0
        assert aggregate(["--study", str(root / "study.json")]) == 0
    for name in FILES:
        then = (old / "analysis" / name).read_text().replace("plain_last", "plain_2")
        assert then == (small / "analysis" / name).read_text()


def test_plain_launched_once_has_taxes_and_no_aa(tmp_path: Path) -> None:
    study = write_synthetic_study(tmp_path / "x", steps_per_cell=10, plain_launches=1, blocks=2)
    assert aggregate(["--study", str(study)]) == 0
    rows = table(study.parent, "taxes.csv")
    assert {row["config"] for row in rows} == set(TAXES)
    assert {row["aa_tax"] for row in rows} == {""}
    assert all(row["tax_lo"] != "" for row in rows)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A small study of its own for a test that damages it."""
    return write_synthetic_study(tmp_path / "x", steps_per_cell=20).parent


def flip(path: Path) -> None:
    """Change the last digit of a file."""
    data = bytearray(path.read_bytes())
    position = max(i for i, byte in enumerate(data) if chr(byte).isdigit())
    data[position] = ord("1") if data[position] != ord("1") else ord("2")
    path.write_bytes(data)


def edit(path: Path, change: Callable[[Any], None]) -> None:
    """Change a JSON file."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def refused(root: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run the aggregate command, which must fail and write nothing; its message."""
    assert aggregate(["--study", str(root / "study.json")]) == 2
    assert not (root / "analysis").exists()
    return capsys.readouterr().err


CELL = Path("runs/nixl_both/block0/A/r40")


@pytest.mark.parametrize("kind", ["requests", "metrics", "engine_step", "cell"])
def test_a_changed_raw_file_is_refused(
    small: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = next((small / CELL).glob(f"{kind}_*"))
    flip(path)
    message = refused(small, capsys)
    assert str(path) in message
    assert "changed after it was measured" in message


def test_a_bad_line_is_refused_by_file_and_line(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small / CELL / "requests_A_r40.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[6] = lines[6][:50] + b"\n"
    path.write_bytes(b"".join(lines))
    assert f"{path}:7: not valid JSON" in refused(small, capsys)


def test_a_launch_of_another_design_is_refused(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small / CELL.parent / "index.json"
    edit(path, lambda index: index["depends"].update(design_sha256="f" * 64))
    message = refused(small, capsys)
    assert f"{path}: depends.design_sha256" in message
    assert "mixtures are refused" in message
    assert reference(["--study", str(small / "study.json")]) == 2


def test_phase_b_of_another_reference_rate_is_refused(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small / "runs" / "mooncake_both" / "block0" / "B" / "index.json"
    edit(path, lambda index: index.update(rate_rps=index["rate_rps"] / 2))
    message = refused(small, capsys)
    assert f"{path}: rate_rps is" in message
    assert "mixtures are refused" in message
    assert message.rstrip().endswith("--forcerun phase_b")


def test_reference_rates_that_the_raw_cells_do_not_give_are_refused(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(
        small / "study.json",
        lambda study: (
            study["config"]["saturation"].update(waiting_p50_max=1e9)
            or study["config"]["saturation"].update(throughput_ratio_min=0.0)
            or study["config"]["saturation"].update(ttft_p90_ratio_max=1e9)
        ),
    )
    assert "ref_safe is 40.0, the raw cells and the thresholds" in refused(small, capsys)


def test_an_index_and_a_cell_that_disagree_are_refused(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small / CELL.parent / "index.json"
    edit(path, lambda index: index["cells"][1].update(status="void", reason="no"))
    assert "valid is True, index.json says 'void'" in refused(small, capsys)


def test_a_launch_without_index_is_missing_not_forgotten(small: Path) -> None:
    (small / CELL.parent / "index.json").unlink()
    assert reference(["--study", str(small / "study.json")]) == 0
    for index in small.glob("runs/*/block0/B*/index.json"):
        # The rates file names nixl_both as left out now; these launches used the earlier one.
        index.unlink()
    assert aggregate(["--study", str(small / "study.json")]) == 0
    row = one(
        table(small, "taxes.csv"), config="nixl_both", phase="A", cell="r40", metric="ttft_p90"
    )
    assert (row["status"], row["reason"]) == ("missing", "block 0: the launch has no index.json")


def test_summarise_cell_gives_the_aggregate_table_s_numbers(crisp: Path) -> None:
    found = summarise_cell(crisp / "runs" / "nixl_both" / "block2" / "A" / "r40")
    row = one(table(crisp, "aggregate.csv"), config="nixl_both", phase="A", cell="r40", block="2")
    for key in ("n", "ttft_p90_ms", "ttft_p90_hi_ms", "tpot_p50_ms", "throughput_ratio"):
        assert found[key] == float(row[key])
    with pytest.raises(ArtifactError, match=r"found 0 files cell_\*\.json"):
        summarise_cell(crisp)

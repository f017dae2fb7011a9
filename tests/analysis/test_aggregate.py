"""Test the analysis from raw files to tables: known results, and data that must not count."""

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
from connector_tax.artifacts import paths
from connector_tax.artifacts.metrics import METRICS
from connector_tax.artifacts.tables import ROW_TYPES, EffectRow, read_table
from connector_tax.files import ArtifactError, sha256_file
from tests.analysis.conftest import FAIL_REASON, SKIP_REASON, VOID_REASON
from tests.analysis.tables import FILES, edit, effects, one, select, table
from tests.study_folder import ONE_CONNECTOR, TAXES, write_analysed_study, write_virtual_study

NEVER_SATURATED = {"waiting_p50_max": 1e9, "throughput_ratio_min": 0.0, "ttft_p90_ratio_max": 1e9}


def test_taxes_are_recovered_within_their_intervals(crisp: Path) -> None:
    rows = effects(crisp, "tax")
    covered = 0
    for config, truth in TAXES.items():
        row = one(rows, config=config, reference="ref_safe", phase="A", metric="tpot_p90")
        assert float(row["estimate"]) == pytest.approx(truth, abs=0.004)
        covered += float(row["lo"]) <= truth <= float(row["hi"])
        assert row["verdict"] == "costs"
        assert row["n_blocks"] == "3"
    assert covered >= 6


def test_tax_equals_the_ratio_of_the_listed_levels(crisp: Path) -> None:
    for row in select(effects(crisp, "tax"), status="valid"):
        plain, ours = float(row["base"]), float(row["own"])
        assert float(row["estimate"]) == pytest.approx(ours / plain - 1)


def test_records_without_engine_steps_keep_other_taxes_and_a_reason(small: Path) -> None:
    for index in small.glob("runs/*/*/*/index.json"):
        text = index.read_text()
        for path in index.parent.glob("*/engine_step_*.jsonl"):
            before = sha256_file(path)
            path.write_bytes(re.sub(rb'"engine_step_us":[^,]*,', b"", path.read_bytes()))
            text = text.replace(before, sha256_file(path))
        index.write_text(text)
    assert aggregate(["--study", str(small / "study.json")]) == 0
    rows = effects(small, "step")
    lost = select(rows, metric="engine_step")
    assert {row["reason"].partition(": ")[2] for row in lost} == {
        "no engine_step_us in the records of both sides"
    }
    assert all(row["estimate"] for row in select(rows, metric="step"))


def test_tpot_tax_is_missing_when_all_tokens_came_in_one_read(small: Path) -> None:
    """Give all requests of one launch in one cell a TPOT of 0."""
    launch = small / "runs/plain_2/block0/A"
    path = launch / "r40/requests_A_r40.jsonl"
    before, records = sha256_file(path), [json.loads(line) for line in path.open()]
    for record in records:
        record["t_last_token_ns"] = record["t_first_token_ns"]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    index = launch / "index.json"
    index.write_text(index.read_text().replace(before, sha256_file(path)))
    assert aggregate(["--study", str(small / "study.json")]) == 0
    read_table(small / "analysis/cells.csv", ROW_TYPES[paths.CELLS])
    read_table(small / "analysis/effects.csv", EffectRow)
    where = {"phase": "A", "cell": "r40"}
    pooled = one(table(small, "cells.csv"), config="plain", block="all", **where)
    assert (pooled["tpot_p50_ms"], pooled["tpot_p50_lo_ms"]) == ("0.0", "")
    lost = one(effects(small, "tax"), config="plain_2", metric="tpot_p50", **where)
    assert (lost["status"], lost["estimate"]) == ("missing", "")
    assert "all tokens of many came in one read" in lost["reason"]
    assert one(effects(small, "tax"), config="plain_2", metric="ttft_p50", **where)["estimate"]


def test_amplification_is_the_difference_of_two_taxes_with_an_interval(crisp: Path) -> None:
    rows = effects(crisp, "gap")
    grown = one(rows, config="mooncake_both", metric="ttft_p90")
    assert float(grown["estimate"]) == pytest.approx(float(grown["own"]) - float(grown["base"]))
    assert float(grown["lo"]) > 1  # saturated at ref_load: a queue, not a tax of some per cent
    flat = one(rows, config="noop_connector", metric="tpot_p90")
    assert float(flat["lo"]) < 0 < float(flat["hi"])


def test_every_planned_cell_and_tax_has_a_row(damaged: Path) -> None:
    study = json.loads((damaged / "study.json").read_text())
    planned = {
        (launch["config"], str(launch["block"]), phase, cell["cell"])
        for phase in ("A", "B", "Bp")
        for launch in study["run_order"][phase]
        for cell in study["cells"][phase]
    }
    rows = [row for row in table(damaged, "cells.csv") if row["block"] != "all"]
    assert {(r["config"], r["block"], r["phase"], r["cell"]) for r in rows} == planned
    # And one over all rates of Phase A.
    planned |= {(config, block, "A", "all_rates") for config, block, phase, _ in planned
                if phase == "A"}  # fmt: skip
    taxes = effects(damaged, "tax")
    assert len(taxes) == len(METRICS) * sum(config != "plain" for config, *_ in planned)
    assert sum(row["config"] == "plain_2" for row in taxes) == len(METRICS) * sum(
        config == "plain_2" for config, *_ in planned
    )
    assert all(row["reason"] for row in taxes if row["status"] != "valid")
    assert all((row["estimate"] != "") == (row["status"] == "valid") for row in taxes)


def test_cells_without_numbers_keep_their_reason_and_enter_no_tax(damaged: Path) -> None:
    cells, taxes = table(damaged, "cells.csv"), effects(damaged, "tax")
    skipped = one(cells, config="mooncake_consumer", block="0", cell="r40", phase="A")
    assert (skipped["status"], skipped["reason"]) == ("skipped", SKIP_REASON)
    void = one(cells, config="lmcache_only", block="0", phase="A", cell="r40")
    assert (void["status"], void["reason"]) == ("void", VOID_REASON)
    assert (void["n"], void["ttft_p90_ms"]) == ("60", "")
    failed = select(cells, config="nixl_both", block="0", phase="B")
    assert {(row["status"], row["reason"]) for row in failed} == {("failed", FAIL_REASON)}
    orphan = one(taxes, config="mooncake_both", phase="B", cell="128x16", metric="ttft_p90")
    assert orphan["status"] == "void"
    assert orphan["reason"] == f"block 0: plain: {VOID_REASON}"
    lost = one(taxes, config="nixl_both", phase="B", cell="512x16", metric="ttft_p90")
    assert (lost["status"], lost["estimate"]) == ("missing", "")
    assert FAIL_REASON in lost["reason"]


def test_p99_of_too_few_requests_is_refused(crisp: Path) -> None:
    row = one(table(crisp, "cells.csv"), config="plain", phase="A", cell="r40", block="0")
    assert (row["ttft_p99_ms"], row["ttft_p99_lo_ms"]) == ("", "")


def test_the_step_cdf_is_a_distribution_of_at_most_400_points(crisp: Path) -> None:
    rows = select(table(crisp, "step_cdf.csv"), config="plain")
    shares, durations = ([float(row[k]) for row in rows] for k in ("cdf", "step_duration_us"))
    assert len(rows) == 400
    assert shares[-1] == 1
    assert np.all(np.diff(shares) > 0)
    assert np.all(np.diff(durations) >= 0)


def test_analysis_of_the_same_input_writes_the_same_bytes(damaged: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    shutil.copytree(damaged, copy)
    shutil.rmtree(copy / "analysis")
    assert aggregate(["--study", str(copy / "study.json")]) == 0
    for name in FILES:
        assert (copy / "analysis" / name).read_bytes() == (damaged / "analysis" / name).read_bytes()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = ["plain", "mooncake_both", "nixl_both"]
    return write_virtual_study(tmp_path_factory.mktemp("small"), configurations=names).parent


@pytest.fixture
def small(written: Path, tmp_path: Path) -> Path:
    """Return a small study that the test may damage."""
    return shutil.copytree(written, tmp_path / "x")


def flip(path: Path) -> None:
    """Change the last digit of a file."""
    data = bytearray(path.read_bytes())
    position = max(i for i, byte in enumerate(data) if chr(byte).isdigit())
    data[position] = ord("1") if data[position] != ord("1") else ord("2")
    path.write_bytes(data)


def refused(root: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run the aggregate command, which must fail and write nothing; return its message."""
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


@pytest.mark.parametrize("log", ["requests_A_r40", "metrics_A_r40"])
def test_a_missing_log_is_named_in_the_error(
    small: Path, log: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small / CELL / f"{log}.jsonl"
    path.unlink()
    assert f"{path}: no such file" in refused(small, capsys)


def test_a_folder_in_place_of_the_study_file_is_refused(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert aggregate(["--study", str(small)]) == 2
    assert f"{small}: Is a directory; allowed: a file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("launch", "change", "told"),
    [
        ("nixl_both/block0/A", lambda index: index["depends"].update(design_sha256="f" * 64),
         "depends.design_sha256 is ffff.*mixtures are refused"),
        ("mooncake_both/block0/B", lambda index: index.update(rate_rps=index["rate_rps"] / 2),
         "rate_rps is 20.0.*mixtures are refused.*connector-tax remeasure .* --phase B$"),
        ("nixl_both/block0/A", lambda index: index["cells"][1].update(status="void", reason="no"),
         "valid is True, but index.json says 'void'"),
    ],
    ids=["another design", "another reference rate", "a cell that says otherwise"],
)  # fmt: skip
def test_index_that_contradicts_its_study_is_refused(
    small: Path, launch: str, change: Callable[[Any], None], told: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    edit(small / "runs" / launch / "index.json", change)
    message = refused(small, capsys).rstrip()
    assert str(small / "runs" / launch) in message
    assert re.search(told, message)


def test_reference_rates_that_contradict_the_raw_cells_are_refused(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for index in small.glob("runs/*/block0/B*/index.json"):
        index.unlink()
        shutil.rmtree(index.parent)
    edit(small / "study.json", lambda study: study["config"]["saturation"].update(NEVER_SATURATED))
    assert "ref_safe is 40.0, but the raw cells and the thresholds" in refused(small, capsys)


def test_reference_rates_do_not_change_after_phase_b(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(small / "study.json", lambda study: study["config"]["saturation"].update(NEVER_SATURATED))
    command = ["--study", str(small / "study.json")]
    assert reference(command) == 0
    rates = json.loads((small / "reference_rates.json").read_text())
    assert (rates["ref_safe"], rates["derived_now"]) == (40.0, {"ref_safe": 80.0})
    assert (
        "ref_safe stays 40 req/s, which Phase B was measured at; Phase A as it is now gives 80"
        in (output := capsys.readouterr().out)
    )
    assert output.rstrip().endswith(f"connector-tax remeasure {small} --phase B")
    # An interrupted launch has no index; then the cells give the rate.
    for index in small.glob("runs/*/block0/B/index.json"):
        index.unlink()
    assert reference(command) == 0
    assert json.loads((small / "reference_rates.json").read_text()) == rates
    for folder in small.glob("runs/*/block0/B"):
        folder.rename(folder.with_name("B.superseded1"))
    assert reference(command) == 0
    assert json.loads((small / "reference_rates.json").read_text())["ref_safe"] == 80.0


def test_phase_measured_at_two_rates_is_refused(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small / "runs" / "mooncake_both" / "block0" / "B" / "index.json"
    edit(path, lambda index: index.update(rate_rps=20.0))
    before = (small / "reference_rates.json").read_bytes()
    assert reference(["--study", str(small / "study.json")]) == 2
    message = capsys.readouterr().err
    assert "launches of Phase B were measured at 20 and 40 req/s: mixtures are refused" in message
    assert message.rstrip().endswith(f"connector-tax remeasure {small} --phase B")
    assert (small / "reference_rates.json").read_bytes() == before


def test_launch_without_an_index_has_rows_with_status_missing(small: Path) -> None:
    (small / CELL.parent / "index.json").unlink()
    assert aggregate(["--study", str(small / "study.json")]) == 0
    row = one(effects(small, "tax"), config="nixl_both", phase="A", cell="r40", metric="ttft_p90")
    assert (row["status"], row["reason"]) == ("missing", "block 0: the launch has no index.json")


def test_summarise_cell_equals_the_aggregate_table(crisp: Path) -> None:
    summary = summarise_cell(crisp / "runs" / "nixl_both" / "block2" / "A" / "r40")
    row = one(table(crisp, "cells.csv"), config="nixl_both", phase="A", cell="r40", block="2")
    for key in ("n", "ttft_p90_ms", "ttft_p90_hi_ms", "tpot_p50_ms", "throughput_ratio"):
        assert summary[key] == float(row[key])
    with pytest.raises(ArtifactError, match=r"found 0 files cell_\*\.json"):
        summarise_cell(crisp)


# ---- the tax table: baseline, families, marks, one block, plain's launches


def test_last_plain_launch_has_no_tax_relative_to_the_others(crisp: Path) -> None:
    rows = effects(crisp, "tax")
    noise = one(rows, config="plain_2", reference="ref_safe", phase="A", metric="tpot_p90")
    assert noise["verdict"] == "less"


def test_taxes_of_one_block_have_no_intervals_or_verdicts(damaged: Path) -> None:
    valid = select(effects(damaged, "tax"), status="valid")
    assert {row["verdict"] for row in valid} == {"too few blocks", "marked"}
    assert {row["method"] for row in valid} == {"one launch; launches not included"}
    empty = ("lo", "hi", "p", "p_adjusted", "df")
    assert {row[name] for row in valid for name in empty} == {""}
    gaps = select(effects(damaged, "gap"), status="valid")
    assert {row["lo"] for row in gaps} == {""}


def test_lost_plain_launch_leaves_one_baseline_and_no_aa_row(damaged: Path) -> None:
    rows = effects(damaged, "tax")
    row = one(rows, config="mooncake_both", phase="B", cell="512x16", metric="ttft_p90")
    assert row["status"] == "valid"
    noise = one(rows, config="plain_2", phase="B", cell="512x16", metric="ttft_p90")
    assert (noise["status"], noise["reason"]) == ("void", f"block 0: {VOID_REASON}")


def test_confirmatory_family_is_phase_a_at_prespecified_rates(crisp: Path, tmp_path: Path) -> None:
    def confirmatory(root: Path) -> set[tuple[str, str]]:
        rows = select(effects(root, "tax"), family="confirmatory")
        return {(row["phase"], row["cell"]) for row in rows}

    assert confirmatory(crisp) == {("A", "r40"), ("A", "r80"), ("A", "all_rates")}
    given = ONE_CONNECTOR | {"statistics": {"confirmatory": ["ref_load"]}}
    study = write_analysed_study(tmp_path / "x", step_timing=False, **given)
    assert confirmatory(study.parent) == {("A", "r80"), ("A", "all_rates")}


def test_saturated_configuration_is_marked_and_removed_from_the_family(crisp: Path) -> None:
    rows = effects(crisp, "tax")
    where = {"phase": "A", "cell": "r80", "metric": "tpot_p90"}
    marked = one(rows, config="mooncake_both", **where)
    assert marked["mark"] == "mooncake_both saturated"
    assert (marked["verdict"], marked["p_adjusted"]) == ("marked", "")
    assert marked["lo"] != "" != marked["p"]
    clean = one(rows, config="noop_connector", **where)
    assert (clean["mark"], clean["verdict"]) == ("", "costs")
    everyone = select(rows, phase="A", cell="r160", metric="ttft_p90")
    assert {row["verdict"] for row in everyone} == {"marked"}
    gap = one(effects(crisp, "gap"), config="mooncake_both", metric="ttft_p90")
    assert gap["mark"] == "mooncake_both saturated"


@pytest.mark.parametrize("names", [("plain", "plain_2"), ("nixl_both",)])
def test_a_pooled_row_is_the_geometric_mean_over_blocks_of_all_launches(
    crisp: Path, names: tuple[str, ...]
) -> None:
    rows = table(crisp, "cells.csv")
    where = {"phase": "A", "cell": "r40"}
    launches = [
        row for name in names for row in select(rows, config=name, **where) if row["block"] != "all"
    ]
    assert len(launches) == 3 * len(names)
    logs = np.log([float(row["ttft_p90_ms"]) for row in launches]).reshape(-1, 3).mean(axis=0)
    pooled = one(rows, configuration=names[0], block="all", **where)
    assert pooled["config"] == names[0]
    assert float(pooled["ttft_p90_ms"]) == pytest.approx(np.exp(logs.mean()))
    half = 4.302653 * logs.std(ddof=1) / np.sqrt(3)
    assert float(pooled["ttft_p90_hi_ms"]) == pytest.approx(np.exp(logs.mean() + half))
    assert pooled["n"] == str(60 * len(launches))
    tax = one(effects(crisp, "tax"), config="nixl_both", metric="ttft_p90", **where)
    level = tax["base"] if names[0] == "plain" else tax["own"]
    assert float(level) == pytest.approx(float(pooled["ttft_p90_ms"]))


def test_single_plain_launch_gives_taxes_without_an_aa_row(tmp_path: Path) -> None:
    study = write_analysed_study(tmp_path / "x", plain_launches=1, blocks=2, **ONE_CONNECTOR)
    rows = effects(study.parent, "tax")
    assert {row["config"] for row in rows} == {"nixl_both"}
    assert all(row["lo"] != "" for row in rows)


def test_cell_that_reaches_its_cap_counts_with_a_note(tmp_path: Path) -> None:
    given = ONE_CONNECTOR | {"cell": {"min_completed": 140, "cap_s": 2.0}}
    study = write_analysed_study(tmp_path, step_timing=False, **given).parent
    rows = [row for row in table(study, "cells.csv") if row["phase"] == "A"]
    rows = [row for row in rows if row["block"] != "all"]
    assert {row["status"] for row in rows} == {"valid"}
    slow, fast = (select(rows, cell=f"r{rate}") for rate in (40, 80))
    assert {row["remark"] for row in slow} == {
        f"cap reached after {row['n']} of 140" for row in slow
    }
    assert {row["remark"] for row in fast} == {""}

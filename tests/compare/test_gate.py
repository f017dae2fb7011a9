"""Test the gate: its four results, joint bounds, and its output for CI."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from scipy.stats import t as student

from connector_tax.analysis.block_model import MIXTURE
from connector_tax.analysis.looks import taxes_of_phase_a
from connector_tax.artifacts.names import ALL_RATES
from connector_tax.artifacts.study_file import load_study
from connector_tax.artifacts.verdicts import CANNOT_TELL
from connector_tax.compare.bounds import ABOVE, BELOW, NO_NUMBER, Bound, BoundCheck
from connector_tax.compare.gate import checks_of, main
from connector_tax.figures.tables import StudyTables
from connector_tax.files import read_json, write_json
from tests.analysis.tables import edit_csv, select
from tests.figures.figure_study import write_study
from tests.figures.figure_tables import Design
from tests.shared import known
from tests.study_folder import write_analysed_study

VOID = {("lmcache_only", "A", "r4"): "error_rate 0.2 > 0.01"}
OVERLOADED = {("mooncake_both", "r4"): "mooncake_both saturated"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gate")
    write_study(folder, Design(void=VOID, overloaded=OVERLOADED))
    return folder


def interval(root: Path, config: str = "nixl_both") -> tuple[float, float]:
    row = StudyTables(root / "study.json").at("ref_safe", "ttft_p90")[config]
    assert row.lo is not None
    assert row.hi is not None
    return row.lo, row.hi


def gate(root: Path, bounds: Sequence[float], configs: Sequence[str], *more: str) -> int:
    asked = [f"--max=ttft_p90={100 * bound:.6f}%" for bound in bounds]
    return main([str(root), *asked, *(f"--config={c}" for c in configs), *more])


def test_exit_status_reports_the_gate_result(root: Path) -> None:
    lo, hi = interval(root)
    # The printed interval is symmetric about the tax, not about its logarithm, so the bounds have a
    # little room.
    assert gate(root, [hi + 0.05], ["nixl_both"]) == 0
    assert gate(root, [lo - 0.05], ["nixl_both"]) == 1
    assert gate(root, [(lo + hi) / 2], ["nixl_both"]) == 2
    assert gate(root, [5.0], ["lmcache_only"]) == 3
    assert gate(root, [5.0], ["no_such_configuration"]) == 3
    assert gate(root, [5.0], ["mooncake_both"]) == 3
    assert gate(root / "none", [0.05], ["nixl_both"]) == 3
    # A violated bound outweighs an unknown cost.
    assert gate(root, [lo - 0.2], ["nixl_both", "lmcache_only"]) == 1
    assert gate(root, [hi + 0.2], ["nixl_both", "lmcache_only"]) == 3


def test_tables_without_standard_errors_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_study(tmp_path, Design())

    def of_method_1(rows: list[dict[str, str]]) -> None:
        for row in rows:
            del row["error"]

    edit_csv(tmp_path / "analysis" / "effects.csv", of_method_1)
    assert gate(tmp_path, [5.0], ["nixl_both"]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert "has tables of method 1, without standard errors; finish the study, or run `c" in line


def checked(folder: Path, *bounds: Bound) -> list[BoundCheck]:
    return checks_of(StudyTables(folder / "study.json"), ["nixl_both"], bounds, "ref_safe")


def test_bounds_judged_together_have_wider_intervals(root: Path) -> None:
    bound = Bound(0.1, "ttft_p90")
    (alone,), (of_three, *_) = checked(root, bound), checked(root, bound, bound, bound)
    assert known(of_three.lo) < known(alone.lo) < known(alone.hi) < known(of_three.hi)
    assert known(of_three.decides) > known(alone.decides)


def test_gate_computes_intervals_of_the_mixture_from_raw_records(tmp_path: Path) -> None:
    study_file = write_analysed_study(
        tmp_path, blocks=3, step_timing=False, phase_b=None, phase_bp=None
    )
    study = StudyTables(study_file)
    (row,) = (one for c, one in study.at(ALL_RATES, "ttft_p50").items() if c == "nixl_both")
    assert row.method == MIXTURE
    asked = [Bound(0.1)] * 20
    (one, *_) = checks_of(study, ["nixl_both"], asked, "ref_safe")
    noise = known(known(taxes_of_phase_a(load_study(study_file)).tax(
        "nixl_both", "A", ALL_RATES, "ttft_p50")).noise)  # fmt: skip
    mixture = noise.mixture
    errors = np.sqrt(mixture.rss / mixture.df * (mixture.layout.ratios**2 @ noise.squares))
    half = np.log1p(known(one.hi)) - np.log1p(known(one.tax))
    beyond = mixture.weights @ student.sf(half / errors, mixture.df)
    assert beyond == pytest.approx(0.025 / 40)


def test_bound_without_a_metric_applies_to_both_medians_over_all_rates(root: Path) -> None:
    taxes = StudyTables(root / "study.json")
    checks = checked(root, Bound(0.1))
    assert [one.metric for one in checks] == ["ttft_p50", "tpot_p50"]
    for one in checks:
        assert one.tax == taxes.at(ALL_RATES, one.metric)["nixl_both"].estimate


def test_bound_of_a_metric_replaces_the_general_bound_of_that_metric(root: Path) -> None:
    checks = checked(root, Bound(0.1), Bound(0.5, "ttft_p50"), Bound(0.6, "ttft_p90"))
    assert [(one.metric, one.bound) for one in checks] == [
        ("tpot_p50", 0.1), ("ttft_p50", 0.5), ("ttft_p90", 0.6),
    ]  # fmt: skip


def test_tax_decided_by_an_interim_analysis_keeps_its_interval(root: Path, tmp_path: Path) -> None:
    study = shutil.copytree(root, tmp_path / "study")
    write_json(study / "looks.json", [{"blocks": 2, "level": 0.05, "findings": []}])

    def early(rows: list[dict[str, str]]) -> None:
        for row in select(rows, quantity="tax", cell=ALL_RATES, config="nixl_both"):
            row |= {"family_lo": "0.04", "family_hi": "0.06", "n_blocks": "2"}

    edit_csv(study / "analysis" / "effects.csv", early)
    assert {one.result for one in checked(study, Bound(0.07))} == {BELOW}
    assert {one.result for one in checked(study, Bound(0.05))} == {CANNOT_TELL}


def test_gate_is_undecided_with_too_few_blocks(tmp_path: Path) -> None:
    write_study(tmp_path, Design(blocks=1))
    (answer,) = checked(tmp_path, Bound(5.0, "ttft_p90"))
    assert answer.result == CANNOT_TELL


def test_result_files_list_each_bound(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lo, hi = interval(root)
    bounds = [lo - 0.3, (lo + hi) / 2, hi + 0.3]
    file = f"--junit={tmp_path / 'gate.xml'}"
    assert gate(root, bounds, ["nixl_both", "lmcache_only"], file) == 1
    suite = ElementTree.parse(tmp_path / "gate.xml").getroot()
    assert {k: suite.get(k) for k in ("tests", "failures", "errors", "skipped")} == {
        "tests": "6", "failures": "1", "errors": "3", "skipped": "1",
    }  # fmt: skip
    cases = suite.findall("testcase")
    assert cases[0].find("failure") is not None
    assert cases[1].find("skipped") is not None
    assert [child.tag for child in cases[2]] == ["properties"]
    text = capsys.readouterr().out
    assert text.startswith(f"{ABOVE}: ")
    assert all(result in text for result in (ABOVE, BELOW, CANNOT_TELL, NO_NUMBER))


def test_line_break_in_a_label_adds_no_line_to_the_output(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = shutil.copytree(root, tmp_path / "study")
    document = read_json(study / "study.json")
    write_json(study / "study.json", document | {"engine_label": "x (emulated)\nbelow: all"})
    assert gate(study, [5.0], ["lmcache_only"]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0].endswith("(x (emulated)\\u{a}below: all)")


def test_junit_on_standard_output_is_not_mixed_with_text(
    root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    gate(root, [5.0], ["nixl_both"], "--junit=-")
    printed = capfd.readouterr()
    assert printed.out.startswith("<?xml")
    assert "nixl_both ttft_p90" not in printed.out
    assert "nixl_both ttft_p90" in printed.err
    assert gate(root, [5.0], ["nixl_both"], "--junit=/dev/full") == 3
    printed = capfd.readouterr()
    assert "nixl_both ttft_p90" in printed.out
    assert "/dev/full" in printed.err


@pytest.mark.parametrize("bound", ["ttft_p90", "ttft_p90=5", "speed=5%", "ttft_p90=x%"])
def test_bad_arguments_exit_with_64(
    root: Path, bound: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([str(root), "--max", bound, "--config", "nixl_both"])
    assert stopped.value.code == 64
    assert "allowed: NUMBER%, or METRIC=NUMBER%" in capsys.readouterr().err


def test_removed_option_names_its_replacement(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([str(root), "--max-tax", "ttft_p90=5%", "--config", "nixl_both"])
    assert stopped.value.code == 64
    assert "--max ttft_p90=5%" in capsys.readouterr().err


@pytest.mark.parametrize("fault", ["junit", "table"])
def test_unreadable_or_unwritable_file_exits_with_3(
    root: Path, tmp_path: Path, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    study = shutil.copytree(root, tmp_path / "study")
    assert gate(study, [5.0], ["nixl_both"]) == 0
    more = [f"--junit={tmp_path}"] if fault == "junit" else []
    if fault == "table":
        (study / "analysis" / "effects.csv").write_bytes(b"\xff\xfe")
    assert gate(study, [5.0], ["nixl_both"], *more) == 3
    assert capsys.readouterr().err.startswith("gate: ")


def test_rate_that_is_ref_safe_and_ref_load_is_accepted_under_either_name(
    root: Path, tmp_path: Path
) -> None:
    study = shutil.copytree(root, tmp_path / "study")
    rates = read_json(study / "reference_rates.json")
    write_json(study / "reference_rates.json", {**rates, "ref_load": rates["ref_safe"]})
    assert gate(study, [5.0], ["nixl_both"]) == 0
    assert gate(study, [5.0], ["nixl_both"], "--at=ref_load") == 0

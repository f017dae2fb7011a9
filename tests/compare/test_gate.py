"""The gate: its four answers, several bounds together, what a CI reads."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from connector_tax.analysis.effect import Effect
from connector_tax.artifacts.verdicts import CANNOT_TELL
from connector_tax.compare.gate import (
    ABOVE,
    BELOW,
    NO_NUMBER,
    check,
    decided_bound,
    main,
    overall,
)
from connector_tax.figures.tables import StudyTables
from connector_tax.files import read_json, write_json
from tests.figures.figure_study import write_study
from tests.figures.figure_tables import Design

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
    asked = [f"--max-tax=ttft_p90={100 * bound:.6f}%" for bound in bounds]
    return main([str(root), *asked, *(f"--config={c}" for c in configs), *more])


def test_the_exit_status_is_the_answer(root: Path) -> None:
    lo, hi = interval(root)
    # The printed interval is symmetric about the tax, not about its logarithm: a little room.
    assert gate(root, [hi + 0.05], ["nixl_both"]) == 0
    assert gate(root, [lo - 0.05], ["nixl_both"]) == 1
    assert gate(root, [(lo + hi) / 2], ["nixl_both"]) == 2
    assert gate(root, [5.0], ["lmcache_only"]) == 3
    assert gate(root, [5.0], ["no_such_configuration"]) == 3
    assert gate(root, [5.0], ["mooncake_both"]) == 3
    assert gate(root / "none", [0.05], ["nixl_both"]) == 3
    # A broken bound outweighs what is not known.
    assert gate(root, [lo - 0.2], ["nixl_both", "lmcache_only"]) == 1
    assert gate(root, [hi + 0.2], ["nixl_both", "lmcache_only"]) == 3


def test_bounds_judged_together_have_wider_intervals(root: Path) -> None:
    study = StudyTables(root / "study.json")
    alone, of_three = (check(study, "nixl_both", "ttft_p90", 0.1, "ref_safe", k) for k in (1, 3))
    assert None not in (alone.lo, alone.hi, of_three.lo, of_three.hi)
    assert of_three.lo < alone.lo < alone.hi < of_three.hi  # type: ignore[operator]
    assert alone.decides is not None
    assert of_three.decides is not None
    assert of_three.decides > alone.decides


def test_too_few_blocks_cannot_tell(tmp_path: Path) -> None:
    write_study(tmp_path, Design(blocks=1))
    study = StudyTables(tmp_path / "study.json")
    answer = check(study, "nixl_both", "ttft_p90", 5.0, "ref_safe", 1)
    assert answer.result == CANNOT_TELL
    assert overall([answer]) == CANNOT_TELL


def test_junit_and_markdown_say_what_each_bound_gave(root: Path, tmp_path: Path) -> None:
    lo, hi = interval(root)
    bounds = [lo - 0.3, (lo + hi) / 2, hi + 0.3]
    files = (f"--junit={tmp_path / 'gate.xml'}", f"--markdown={tmp_path / 'gate.md'}")
    assert gate(root, bounds, ["nixl_both", "lmcache_only"], *files) == 1
    suite = ElementTree.parse(tmp_path / "gate.xml").getroot()
    assert {k: suite.get(k) for k in ("tests", "failures", "errors", "skipped")} == {
        "tests": "6", "failures": "1", "errors": "3", "skipped": "1",
    }  # fmt: skip
    cases = suite.findall("testcase")
    assert cases[0].find("failure") is not None
    assert cases[1].find("skipped") is not None
    assert [child.tag for child in cases[2]] == ["properties"]
    text = (tmp_path / "gate.md").read_text()
    assert text.startswith(f"## Gate: {ABOVE}")
    assert all(result in text for result in (ABOVE, BELOW, CANNOT_TELL, NO_NUMBER))


@pytest.mark.parametrize("kind", ["junit", "markdown"])
def test_a_file_on_standard_output_is_alone_there(
    root: Path, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    gate(root, [5.0], ["nixl_both"], f"--{kind}=-")
    printed = capfd.readouterr()
    assert printed.out.startswith("<?xml" if kind == "junit" else "## Gate")
    assert printed.out.count("## Gate") == (kind == "markdown")
    assert "## Gate" in printed.err
    assert gate(root, [5.0], ["nixl_both"], f"--{kind}=/dev/full") == 3
    printed = capfd.readouterr()
    assert "## Gate" in printed.out
    assert "/dev/full" in printed.err


@pytest.mark.parametrize("bound", ["ttft_p90", "ttft_p90=5", "speed=5%", "ttft_p90=x%"])
def test_a_wrong_command_line_is_none_of_the_answers(
    root: Path, bound: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([str(root), "--max-tax", bound, "--config", "nixl_both"])
    assert stopped.value.code == 64
    assert "allowed: METRIC=NUMBER%" in capsys.readouterr().err


def test_the_decided_bound_is_the_interval_and_the_reach_of_its_power() -> None:
    # Error 1 and many degrees of freedom: 1.96 + 0.84 standard errors on the logs.
    effect = Effect(0.3, 0.01, 1e6, (0, 1, 2))
    assert decided_bound(effect, 0.95) == pytest.approx(0.0284, abs=2e-4)


@pytest.mark.parametrize("fault", ["junit", "markdown", "table"])
def test_what_cannot_be_read_or_written_is_none_of_the_answers(
    root: Path, tmp_path: Path, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    study = shutil.copytree(root, tmp_path / "study")
    assert gate(study, [5.0], ["nixl_both"]) == 0
    more = {"junit": [f"--junit={tmp_path}"], "markdown": [f"--markdown={root}/study.json/x"]}
    if fault == "table":
        (study / "analysis" / "effects.csv").write_bytes(b"\xff\xfe")
    assert gate(study, [5.0], ["nixl_both"], *more.get(fault, [])) == 3
    assert capsys.readouterr().err.startswith("gate: ")


def test_one_rate_that_is_both_has_its_taxes_under_either_name(root: Path, tmp_path: Path) -> None:
    study = shutil.copytree(root, tmp_path / "study")
    rates = read_json(study / "reference_rates.json")
    write_json(study / "reference_rates.json", {**rates, "ref_load": rates["ref_safe"]})
    assert gate(study, [5.0], ["nixl_both"]) == 0
    assert gate(study, [5.0], ["nixl_both"], "--at=ref_load") == 0

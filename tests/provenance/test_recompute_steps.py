"""The audit's own step taxes and hooks agree with the published ones, and find what was changed."""

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from connector_tax.provenance.audit_study import RawStudy
from connector_tax.provenance.audit_tables import compare
from connector_tax.provenance.cell_steps import CellSteps
from connector_tax.provenance.comparison import read_csv
from connector_tax.provenance.recompute_steps import StepNumbers
from tests.analysis.synthetic import SMALL_GRID, write_analysed_study

NAMES = ("steps.csv", "step_taxes.csv", "hooks.csv", "step_cdf.csv")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three blocks with a void cell, a failed launch, one noisy connector; analysed."""
    study = write_analysed_study(
        tmp_path_factory.mktemp("audited") / "x",
        blocks=3,
        launch_sigma=0.05,
        steps_per_cell=40,
        config=SMALL_GRID,
        failed={("nixl_both", 1, "A"): "the server died: EngineDeadError"},
        void={("plain", 2, "A", "r40"): "requests were written later than scheduled (p99)"},
    )
    return study.parent


def numbers_of(root: Path) -> StepNumbers:
    """The audit's own numbers of a study, from its raw step records."""
    study = RawStudy(root / "study.json")
    valid = [cell for cell in study.cells if cell.status == "valid"]
    return StepNumbers(
        study, {cell.key: CellSteps(cell.steps(), cell.record["window"]) for cell in valid}
    )


@pytest.fixture(scope="module")
def recomputed(published: Path) -> StepNumbers:
    """The audit's own numbers of the study as it was measured."""
    return numbers_of(published)


@pytest.fixture
def copy(published: Path, tmp_path: Path) -> Path:
    """A copy of the published tables that a test may damage."""
    shutil.copytree(published / "analysis", tmp_path / "x" / "analysis")
    return tmp_path / "x"


def problems(root: Path, numbers: StepNumbers) -> dict[str, list[str]]:
    """What the published tables differ in from the audit's own numbers, by table."""
    rows = {
        "step_taxes.csv": numbers.tax_rows(),
        "hooks.csv": numbers.hook_rows(),
        "step_cdf.csv": numbers.curve_rows("r40"),
    }
    differences = {
        name: list(compare(name, read_csv(root / "analysis" / name), own))
        for name, own in rows.items()
    }
    launches = [
        {
            **row,
            **numbers.launch_taxes((row["config"], int(row["block"]), row["phase"], row["cell"])),
        }
        for row in read_csv(root / "analysis" / "steps.csv")
    ]
    differences["steps.csv"] = list(
        compare("steps.csv", read_csv(root / "analysis" / "steps.csv"), launches)
    )
    return differences


def change_field(root: Path, name: str, column: str, value: Callable[[str], str]) -> None:
    """Replace a column's first number in a published table."""
    path = root / "analysis" / name
    rows = read_csv(path)
    row = next(row for row in rows if row[column])
    row[column] = value(row[column])
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def test_an_honest_study_agrees_in_every_number(published: Path, recomputed: StepNumbers) -> None:
    assert problems(published, recomputed) == {name: [] for name in NAMES}
    methods = {row["method"] for row in read_csv(published / "analysis" / "step_taxes.csv")}
    assert {"block model", "own spread", "pooled launches"} <= methods
    hooks = read_csv(published / "analysis" / "hooks.csv")
    assert {"own launches", "pooled launches"} <= {row["mean_method"] for row in hooks}


@pytest.mark.parametrize(
    ("name", "column"),
    [
        *(("step_taxes.csv", c) for c in ("us", "lo_us", "hi_us", "p", "n_blocks", "aa_hi_us")),
        *(("hooks.csv", c) for c in ("p50_us", "mean_lo_us", "mean_hi_us", "share", "n_ran")),
        ("steps.csv", "unattributed"),
        ("step_cdf.csv", "engine_step_us"),
    ],
)
def test_a_changed_number_is_found(
    copy: Path, recomputed: StepNumbers, name: str, column: str
) -> None:
    change_field(copy, name, column, lambda text: str(float(text) * 1.001 + 1))
    differences = problems(copy, recomputed)
    assert len(differences.pop(name)) >= 1
    assert not any(differences.values())


@pytest.mark.parametrize(("name", "column"), [("step_taxes.csv", "method"), ("hooks.csv", "hook")])
def test_a_changed_word_is_found(
    copy: Path, recomputed: StepNumbers, name: str, column: str
) -> None:
    change_field(copy, name, column, lambda _: "another")
    assert problems(copy, recomputed)[name]


def test_a_row_that_was_left_out_is_found(copy: Path, recomputed: StepNumbers) -> None:
    path = copy / "analysis" / "hooks.csv"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:5] + lines[6:]))
    assert any("published 0 times" in line for line in problems(copy, recomputed)["hooks.csv"])


def test_a_hook_changed_in_the_raw_records_is_found(published: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(published, tmp_path / "x"))
    path = next(copy.glob("runs/mooncake_both/block0/A/r40/engine_step_*.jsonl"))
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        record["hooks_us"] = {name: 2 * us for name, us in record["hooks_us"].items()}
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    differences = problems(copy, numbers_of(copy))
    assert {line.split(":")[0] for line in differences["hooks.csv"]} >= {
        "mooncake_both A r40 scheduler  take_events",
        "mooncake_both A r40 worker  wait_for_save",
    }
    assert not differences["step_taxes.csv"]

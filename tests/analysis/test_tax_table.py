"""The tax table: baseline, families, marks, one block, plain's launches."""

from pathlib import Path

import numpy as np
import pytest

from tests.analysis.conftest import VOID_REASON
from tests.analysis.synthetic import SMALL_GRID, write_analysed_study
from tests.analysis.synthetic_records import TAXES
from tests.analysis.tables import effects, one, select, table


def test_the_last_plain_shows_no_tax(crisp: Path) -> None:
    rows = effects(crisp, "tax")
    noise = one(rows, config="plain_2", reference="ref_safe", phase="A", metric="tpot_p90")
    assert noise["verdict"] == "less"


def test_one_block_gives_numbers_without_intervals_or_verdicts(damaged: Path) -> None:
    valid = select(effects(damaged, "tax"), status="valid")
    assert {row["verdict"] for row in valid} == {"too few blocks", "marked"}
    assert {row["method"] for row in valid} == {"one launch; launches not included"}
    empty = ("lo", "hi", "p", "p_adjusted", "df")
    assert {row[name] for row in valid for name in empty} == {""}
    gaps = select(effects(damaged, "gap"), status="valid")
    assert {row["lo"] for row in gaps} == {""}


def test_a_lost_launch_of_plain_leaves_the_other_as_baseline_and_no_aa(damaged: Path) -> None:
    rows = effects(damaged, "tax")
    row = one(rows, config="mooncake_both", phase="B", cell="128x64", metric="ttft_p90")
    assert row["status"] == "valid"
    noise = one(rows, config="plain_2", phase="B", cell="128x64", metric="ttft_p90")
    assert (noise["status"], noise["reason"]) == ("void", f"block 0: {VOID_REASON}")


def test_the_confirmatory_family_is_phase_a_at_the_rates_named_beforehand(
    crisp: Path, tmp_path: Path
) -> None:
    def confirmatory(root: Path) -> set[tuple[str, str]]:
        rows = select(effects(root, "tax"), family="confirmatory")
        return {(row["phase"], row["cell"]) for row in rows}

    assert confirmatory(crisp) == {("A", "r40"), ("A", "r80"), ("A", "all_rates")}
    study = write_analysed_study(
        tmp_path / "x", steps_per_cell=10, config={"statistics": {"confirmatory": ["ref_load"]}}
    )
    assert confirmatory(study.parent) == {("A", "r80"), ("A", "all_rates")}


def test_a_saturated_configuration_is_marked_and_leaves_the_family(crisp: Path) -> None:
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
    assert len(launches) == 5 * len(names)
    logs = np.log([float(row["ttft_p90_ms"]) for row in launches]).reshape(-1, 5).mean(axis=0)
    pooled = one(rows, configuration=names[0], block="all", **where)
    assert pooled["config"] == names[0]
    assert float(pooled["ttft_p90_ms"]) == pytest.approx(np.exp(logs.mean()))
    half = 2.776445 * logs.std(ddof=1) / np.sqrt(5)
    assert float(pooled["ttft_p90_hi_ms"]) == pytest.approx(np.exp(logs.mean() + half))
    assert pooled["n"] == str(120 * len(launches))
    tax = one(effects(crisp, "tax"), config="nixl_both", metric="ttft_p90", **where)
    level = tax["base"] if names[0] == "plain" else tax["own"]
    assert float(level) == pytest.approx(float(pooled["ttft_p90_ms"]))


def test_plain_launched_once_has_taxes_and_no_aa(tmp_path: Path) -> None:
    study = write_analysed_study(
        tmp_path / "x", steps_per_cell=10, plain_launches=1, blocks=2, config=SMALL_GRID
    )
    rows = effects(study.parent, "tax")
    assert {row["config"] for row in rows} == set(TAXES)
    assert all(row["lo"] != "" for row in rows)

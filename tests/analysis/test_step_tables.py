"""Step taxes and hooks of whole studies: known costs are found, by one estimator everywhere."""

from pathlib import Path

import numpy as np
import pytest

from tests.analysis.synthetic import TAXES, write_analysed_study
from tests.analysis.synthetic_records import CHILDREN, STACKED, TAKE_EVENTS_US, WAIT_FOR_SAVE_US
from tests.analysis.tables import one, select, table

SAFE = {"phase": "A", "cell": "r40"}


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One block without a second launch of plain, and a cell of plain that is void."""
    study = write_analysed_study(
        tmp_path_factory.mktemp("single") / "x",
        plain_launches=1,
        steps_per_cell=40,
        void={("plain", 0, "A", "r20"): "requests were written later than scheduled (p99)"},
    )
    return study.parent


def numbers(row: dict[str, str], *names: str) -> list[float]:
    """Some columns of a row."""
    return [float(row[name]) for name in names]


@pytest.mark.parametrize("config", TAXES)
def test_step_taxes_hold_the_cost_that_was_built_in(crisp: Path, config: str) -> None:
    rows = select(table(crisp, "step_taxes.csv"), config=config, **SAFE)
    step_taxes = {row["metric"]: row for row in rows}
    outside = 100.0 if config == "nixl_both" else 0.0
    truth = {
        "tax_step_p50": 1000 * TAXES[config],
        "tax_engine_step_p50": 1000 * TAXES[config] + outside,
        "tax_callback_p50": 600 * TAXES[config],
        "unattributed": 400 * TAXES[config],
    }
    assert set(step_taxes) == set(truth)
    for metric, row in step_taxes.items():
        point, low, high = numbers(row, "us", "lo_us", "hi_us")
        # Five launches of 40 to 300 steps know it to about 1%; their interval knows that too.
        assert point == pytest.approx(truth[metric], abs=25)
        assert low < point < high < low + 60
        assert row["n_blocks"] == "5"


def test_one_estimator_in_every_table(crisp: Path) -> None:
    launches = table(crisp, "steps.csv")
    middle = {row["config"]: row for row in select(table(crisp, "step_cdf.csv"), cdf="0.5")}
    for config in TAXES:
        own = select(launches, config=config, **SAFE)
        tax = one(
            table(crisp, "step_taxes.csv"), config=config, metric="tax_engine_step_p50", **SAFE
        )
        beside = one(table(crisp, "taxes.csv"), config=config, metric="ttft_p90", **SAFE)
        mean = np.mean([float(row["tax_engine_step_p50"]) for row in own])
        curve = float(middle[config]["engine_step_us"]) - float(middle["plain"]["engine_step_us"])
        for value in (float(beside["engine_step_tax_us"]), mean, curve):
            assert value == pytest.approx(float(tax["us"]))


def test_every_launch_of_plain_is_in_the_baseline_and_the_last_is_the_a_a(crisp: Path) -> None:
    launches = select(table(crisp, "steps.csv"), block="2", **SAFE)
    medians = {row["config"]: float(row["step_duration_us_p50"]) for row in launches}
    plain = np.mean([medians["plain"], medians["plain_2"]])
    mine = one(launches, config="nixl_both")
    assert float(mine["tax_step_p50"]) == pytest.approx(medians["nixl_both"] - plain)
    last = one(launches, config="plain_2")
    assert float(last["tax_step_p50"]) == pytest.approx(medians["plain_2"] - medians["plain"])
    row = one(table(crisp, "step_taxes.csv"), config="nixl_both", metric="tax_step_p50", **SAFE)
    every = select(table(crisp, "steps.csv"), config="plain_2", **SAFE)
    mean = np.mean([float(launch["tax_step_p50"]) for launch in every])
    low, point, high = numbers(row, "aa_lo_us", "aa_us", "aa_hi_us")
    assert point == pytest.approx(mean)
    assert low < 0 < high


def test_hooks_have_their_time_share_and_interval(crisp: Path) -> None:
    rows = select(table(crisp, "hooks.csv"), **SAFE)
    for hook, process, truth in (
        ("take_events", "scheduler", TAKE_EVENTS_US),
        ("wait_for_save", "worker", WAIT_FOR_SAVE_US),
    ):
        row = one(rows, config="mooncake_both", hook=hook)
        assert (row["process"], row["child"], row["n_launches"]) == (process, "", "5")
        for number in ("p50", "mean"):
            low, point, high = numbers(row, f"{number}_lo_us", f"{number}_us", f"{number}_hi_us")
            assert point == pytest.approx(truth, rel=0.02)
            assert low < point < high < 1.05 * low
        low, share, high = numbers(row, "share_lo", "share", "share_hi")
        assert share == pytest.approx(truth / 5450, rel=0.02)
        assert low < share < high
        assert row["n_ran"] == row["n_steps"] != "0"
    assert not select(rows, config="plain")
    assert not select(rows, config="plain_2")


def test_a_stack_s_children_stand_beside_it(crisp: Path) -> None:
    rows = select(table(crisp, "hooks.csv"), config=STACKED, hook="build_meta", **SAFE)
    whole = float(one(rows, child="")["mean_us"])
    for child, part in CHILDREN.items():
        row = one(rows, child=child)
        assert float(row["mean_us"]) == pytest.approx(part * whole)
        assert row["mean_method"] == "own launches"
    assert one(rows, child="")["mean_method"] == "pooled launches"


def test_every_phase_and_cell_has_its_hooks(crisp: Path) -> None:
    cells = {(row["phase"], row["cell"]) for row in table(crisp, "hooks.csv")}
    assert cells == {(row["phase"], row["cell"]) for row in table(crisp, "steps.csv")}


def test_one_block_has_points_and_no_interval(single: Path) -> None:
    tax = one(table(single, "step_taxes.csv"), config="nixl_both", metric="tax_step_p50", **SAFE)
    assert float(tax["us"]) > 100
    assert [tax[name] for name in ("lo_us", "hi_us", "p", "method", "aa_us")] == [""] * 5
    for row in table(single, "hooks.csv"):
        assert row["mean_us"]
        assert (row["mean_lo_us"], row["mean_method"], row["n_launches"]) == ("", "", "1")


def test_a_tax_without_plain_says_why(single: Path) -> None:
    taxes = select(table(single, "step_taxes.csv"), config="nixl_both", phase="A", cell="r20")
    assert {(row["us"], row["reason"]) for row in taxes} == {
        ("", "no block with nixl_both and plain: plain is not valid here")
    }
    launch = one(table(single, "steps.csv"), config="nixl_both", phase="A", cell="r20")
    assert (launch["tax_step_p50"], launch["reason"]) == ("", "plain is not valid here")
    alone = one(table(single, "steps.csv"), config="plain", **SAFE)
    assert (alone["tax_step_p50"], alone["reason"]) == (
        "",
        "no other launch of plain is valid here",
    )


def test_without_step_timing_both_tables_say_so(damaged: Path) -> None:
    reason = "step timing is not available: the probe does not fit this engine version"
    rows = table(damaged, "step_taxes.csv")
    assert {(row["us"], row["reason"]) for row in rows} == {("", reason)}
    assert not any(any(row.values()) for row in table(damaged, "hooks.csv"))

"""Test that step taxes and hooks recover known costs, with one estimator everywhere."""

from pathlib import Path

import numpy as np
import pytest

from tests.analysis.conftest import CHILDREN, STACKED, TAKE_EVENTS_US, WAIT_FOR_SAVE_US
from tests.analysis.tables import effects, one, select, table
from tests.study_folder import (
    CALLBACKS,
    ONE_CONNECTOR,
    OUTSIDE,
    STEP_US,
    TAXES,
    write_analysed_study,
)

SAFE = {"phase": "A", "cell": "r40"}


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an analysed study of one block: plain is launched once, with a void cell."""
    root, plain = tmp_path_factory.mktemp("single"), ("plain", 0, "A", "r80")
    write_analysed_study(root, plain_launches=1, void={plain: "late"}, **ONE_CONNECTOR)
    return root


def numbers(row: dict[str, str], *names: str) -> list[float]:
    """Return some columns of a row."""
    return [float(row[name]) for name in names]


@pytest.mark.parametrize("config", TAXES)
def test_step_taxes_recover_the_injected_cost(crisp: Path, config: str) -> None:
    rows = select(effects(crisp, "step"), config=config, item="", **SAFE)
    step_taxes = {row["metric"]: row for row in rows}
    tax_us = STEP_US * TAXES[config]
    truth = {
        "step": (OUTSIDE + CALLBACKS["build_meta_us"]) * tax_us,
        "engine_step": tax_us,
        "callbacks": (1 - OUTSIDE) * tax_us,
    }
    assert set(step_taxes) == set(truth)
    for metric, row in step_taxes.items():
        point, low, high = numbers(row, "estimate", "lo", "hi")
        # Callbacks take the same time in every step.
        assert point == pytest.approx(truth[metric], abs=40)
        assert low <= point <= high < low + 200
        assert row["n_blocks"] == "3"


def test_every_table_uses_the_same_estimator(crisp: Path) -> None:
    cells = table(crisp, "cells.csv")
    middle = {row["config"]: row for row in select(table(crisp, "step_cdf.csv"), cdf="0.5")}

    def medians(config: str) -> list[float]:
        own = [row for row in select(cells, config=config, **SAFE) if row["block"] != "all"]
        return [float(row["engine_step_us_p50"]) for row in own]

    plain = np.mean([medians("plain"), medians("plain_2")], axis=0)
    for config in TAXES:
        tax = one(effects(crisp, "step"), config=config, metric="engine_step", **SAFE)
        curve = float(middle[config]["engine_step_us"]) - float(middle["plain"]["engine_step_us"])
        for value in (np.mean(medians(config) - plain), curve):
            assert value == pytest.approx(float(tax["estimate"]))
    # The last launch of plain against the first: A/A.
    noise = one(effects(crisp, "step"), config="plain_2", metric="engine_step", **SAFE)
    low, point, high = numbers(noise, "lo", "estimate", "hi")
    assert point == pytest.approx(np.mean(medians("plain_2")) - np.mean(medians("plain")))
    assert low < 0 < high


@pytest.mark.parametrize("kind", ["decode", "mixed"])
@pytest.mark.parametrize("config", ["noop_connector", "mooncake_both", "nixl_both", STACKED])
def test_hooks_and_remainder_add_up_to_the_step(crisp: Path, config: str, kind: str) -> None:
    """Expect three fifths of the tax in callbacks, and 22 us more in two hooks of STACKED."""
    rows = select(effects(crisp, "step"), config=config, item=f"{kind}/all/", **SAFE)
    step, hooks, left = (one(rows, metric=f"{name}_us") for name in ("step", "hooks", "left"))
    beside = TAKE_EVENTS_US + WAIT_FOR_SAVE_US if config == STACKED else 0.0
    tax, noop = STEP_US * TAXES[config], STEP_US * TAXES["noop_connector"]
    truth = {"step": tax, "hooks": (1 - OUTSIDE) * tax + beside}
    truth["left"] = truth["step"] - truth["hooks"]
    if config != "noop_connector":
        truth["left"] -= OUTSIDE * noop
    for name, row, off in (("step", step, 60), ("hooks", hooks, 5), ("left", left, 60)):
        point, low, high = numbers(row, "estimate", "lo", "hi")
        assert low <= point <= high
        assert point == pytest.approx(truth[name], abs=off)
        assert row["n_blocks"] == "3"
    framework = 0.0
    if config != "noop_connector":
        noops = select(effects(crisp, "step"), config="noop_connector", item=step["item"], **SAFE)
        framework = float(one(noops, metric="left_us")["estimate"])
    parts = sum(float(row["estimate"]) for row in (hooks, left))
    assert float(step["estimate"]) == pytest.approx(parts + framework)
    assert float(step["own"]) - float(step["base"]) == pytest.approx(float(step["estimate"]))


def test_hooks_have_their_mean_time_and_interval(crisp: Path) -> None:
    rows = select(effects(crisp, "hook"), **SAFE)
    for name, truth in (
        ("scheduler//take_events", TAKE_EVENTS_US),
        ("worker//wait_for_save", WAIT_FOR_SAVE_US),
    ):
        for item in ("decode/all/", "mixed/all/"):
            hook = one(rows, config=STACKED, metric=name, item=item)
            low, point, high = numbers(hook, "lo", "estimate", "hi")
            assert point == pytest.approx(truth, rel=0.02)
            assert low < point < high < 1.1 * low
            assert (hook["n_blocks"], hook["method"]) == ("3", "own launches")
    assert not select(rows, config="plain")
    assert not select(rows, config="plain_2")


def test_hooks_of_child_connectors_are_listed_and_included_in_the_parent(crisp: Path) -> None:
    rows = select(effects(crisp, "hook"), config=STACKED, item="decode/all/", **SAFE)
    whole = float(one(rows, metric="scheduler//build_meta")["estimate"])
    for child, part in CHILDREN.items():
        own = one(rows, metric=f"scheduler/{child}/build_meta")
        assert float(own["estimate"]) == pytest.approx(part * whole)


def test_every_phase_and_cell_has_its_hooks(crisp: Path) -> None:
    cells = {(row["phase"], row["cell"]) for row in effects(crisp, "hook")}
    assert cells == {(row["phase"], row["cell"]) for row in table(crisp, "cells.csv")}


def test_step_table_of_one_block_has_points_without_intervals(single: Path) -> None:
    tax = one(effects(single, "step"), config="nixl_both", metric="step", **SAFE)
    assert float(tax["estimate"]) > 100
    assert [tax[name] for name in ("lo", "hi", "p", "method")] == [""] * 4
    assert not select(effects(single, "step"), config="plain_2")
    for row in effects(single, "hook"):
        assert row["estimate"]
        assert (row["lo"], row["method"], row["n_blocks"]) == ("", "", "1")


def test_step_tax_without_plain_gives_a_reason(single: Path) -> None:
    taxes = select(effects(single, "step"), config="nixl_both", phase="A", cell="r80", item="")
    assert {(row["estimate"], row["reason"]) for row in taxes} == {
        ("", "no block with nixl_both and plain: plain is not valid here")
    }


def test_step_taxes_give_a_reason_without_step_timing(damaged: Path) -> None:
    reason = "step timing is not available: the probe does not fit this engine version"
    rows = effects(damaged, "step")
    assert {(row["estimate"], row["reason"]) for row in rows} == {("", reason)}
    assert effects(damaged, "hook") == table(damaged, "step_cdf.csv") == []
    assert {row["n_steps"] for row in table(damaged, "cells.csv")} == {""}

"""The virtual engine is the engine: its times are the step cost's, its taxes those injected."""

import dataclasses

import numpy as np
import pandas as pd
import pytest

from connector_tax.analysis.measure import Requests
from connector_tax.artifacts.metrics import HEADLINE
from connector_tax.artifacts.verdicts import COSTS, LESS
from connector_tax.calibration import virtual
from connector_tax.calibration.virtual import log_ratios, serve, true_taxes, virtual_study
from connector_tax.engine.config import EngineConfig
from connector_tax.engine.model import StepClock
from connector_tax.engine.virtual import VirtualEngine

JITTERED = virtual.study_document("jittered", 0, 1)["config"]


def served(engine: EngineConfig, seed: int, arrivals: str = "x") -> Requests:
    return serve(VirtualEngine(engine, seed), JITTERED, arrivals)


@pytest.mark.parametrize("config", ["plain", "step_tax_360us"])
def test_a_lone_request_takes_the_cost_of_its_steps(config: str) -> None:
    engine = virtual.machine_with("engine").engines[config]
    cost = dataclasses.replace(engine.step_cost, jitter_rel_sd=0.0, launch_offset_rel_sd=0.0)
    launched = VirtualEngine(dataclasses.replace(engine, step_cost=cost), 1)
    launched.add(0, 64, 3)
    ends = []
    while launched.scheduler.has_work:
        launched.step()
        ends.append(launched.now_ns)
    tax, clock = virtual.STEP_TAX_US.get(config, 0.0), StepClock(cost, 1)
    steps = [sum(clock.draw_us(*s)) + tax for s in ((64, 0, 0), (0, 1, 64), (0, 1, 65))]
    assert ends == pytest.approx(np.cumsum(steps) * 1000, abs=8)


def test_a_cell_is_that_of_the_study() -> None:
    cell = served(virtual.machine_with("engine").engines["plain"], 1)
    assert cell.window_s == JITTERED["cell"]["floor_s"]
    assert cell.n == round(virtual.RATE_RPS * cell.window_s)
    assert cell.since_warmup_s == pytest.approx(np.arange(cell.n) / virtual.RATE_RPS, abs=0.02)


def test_the_launch_seed_decides_everything() -> None:
    engine = virtual.machine_with("engine").engines["plain"]
    one, again, other = (served(engine, seed) for seed in (1, 1, 2))
    assert np.array_equal(one.e2e_ms, again.e2e_ms)
    assert not np.array_equal(one.e2e_ms, other.e2e_ms)


def test_true_taxes_grow_with_the_injected_tax() -> None:
    config = virtual.study_document("poisson", 0, 1)["config"]
    ratios = [row for number in range(10) for row in log_ratios(config, number, 1)]
    of_plain = [row["log_ratio"] for row in ratios if row["config"] == "plain"]
    assert of_plain == [0.0] * 10 * len(HEADLINE)
    truths = true_taxes(ratios)
    taxes = [truths[name, "tpot_p90"] for name in virtual.STEP_TAX_US]
    assert truths[virtual.AA, "tpot_p90"] == 0.0
    assert taxes == sorted(taxes)
    # 360 us on steps of at least 3.03 ms: at most 12% without queueing, and not much less.
    assert 0.08 < taxes[-1] < 0.25


def test_a_study_is_analysed_with_each_count_of_blocks() -> None:
    rows = pd.DataFrame(virtual_study("engine", "jittered", 0, 7, (3, 5)))
    assert len(rows) == 2 * len(HEADLINE) * (len(virtual.STEP_TAX_US) + 1)
    assert set(rows.blocks) == {3, 5}
    large = rows[(rows.config == "step_tax_360us") & (rows.metric == "tpot_p90")]
    assert set(large.verdict) <= {COSTS}


def truths_of(taxes: dict[str, float]) -> dict[str, pd.Series]:
    known = pd.Series({(name, "ttft_p90"): tax for name, tax in taxes.items()}, name="truth")
    return {"jittered": known.rename_axis(["config", "metric"])}


def outcome(config: str, study: int, lo: float, **more: object) -> dict[str, object]:
    row = {
        "spread": "engine", "arrivals": "jittered", "blocks": 3, "metric": "ttft_p90",
        "study": study, "config": config, "verdict": LESS, "lo": lo, "hi": 0.02,
    }  # fmt: skip
    return row | more


def test_the_summary_counts_what_the_outcomes_say() -> None:
    rows = [
        outcome("step_tax_30us", 0, 0.0),
        outcome("step_tax_30us", 1, 0.011, verdict=COSTS),
        outcome(virtual.AA, 0, -0.01),
        outcome(virtual.AA, 1, 0.001),
    ]
    truths = truths_of({"step_tax_30us": 0.01, virtual.AA: 0.0})
    table = virtual.with_truth(pd.DataFrame(rows), truths)
    (row,) = virtual.summary(table)
    assert (row["covered"], row["aa"], row["aa_costs"]) == (0.5, 0.5, 0.0)
    assert row["half_width"] == pytest.approx((0.015 + 0.0095) / 2)
    assert (row["smallest"], row["largest"]) == (None, 0.01)


@pytest.mark.parametrize(("found", "smallest"), [((2, 5), 0.02 + 0.02 * 0.4 / 0.6), ((0, 2), None)])
def test_power_is_read_between_two_levels(found: tuple[int, int], smallest: float | None) -> None:
    truth = {"step_tax_30us": 0.02, "step_tax_60us": 0.04, virtual.AA: 0.0}
    rows = [
        outcome(name, study, 0.01, verdict=COSTS if study < count else LESS)
        for name, count in zip(truth, (*found, 0), strict=True)
        for study in range(5)
    ]
    (row,) = virtual.summary(virtual.with_truth(pd.DataFrame(rows), truths_of(truth)))
    assert row["smallest"] == (None if smallest is None else pytest.approx(smallest))

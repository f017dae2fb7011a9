"""The virtual engine is the engine: its times are the step cost's, its taxes those injected."""

import dataclasses

import numpy as np
import polars as pl
import pytest

from connector_tax.artifacts.names import NO_TAX, TAX
from connector_tax.calibration import coverage, design, studies
from connector_tax.calibration.truth import TrueTax, true_taxes
from connector_tax.calibration.virtual import serve
from connector_tax.engine.config import EngineConfig
from connector_tax.engine.model import StepClock


def without_spread(config: str) -> EngineConfig:
    engine = design.engine_configs("equal")[config]
    cost = dataclasses.replace(engine.step_cost, jitter_rel_sd=0.0, launch_offset_rel_sd=0.0)
    return dataclasses.replace(engine, step_cost=cost)


@pytest.mark.parametrize("config", ["plain", "step_tax_360us"])
def test_a_lone_request_takes_the_cost_of_its_steps(config: str) -> None:
    engine = without_spread(config)
    arrival = 5_000_000
    first, last = serve(engine, 1, [arrival], (64, 3))
    tax = design.STEP_TAX_US.get(config, 0.0)
    host, prefill = StepClock(engine.step_cost, 1).draw_us(64, 0, 0)
    decodes = [sum(StepClock(engine.step_cost, 1).draw_us(0, 1, kv)) for kv in (64, 65)]
    assert first[0] - arrival == pytest.approx((host + prefill + tax) * 1000, abs=4)
    assert last[0] - first[0] == pytest.approx((sum(decodes) + 2 * tax) * 1000, abs=8)


def test_a_request_that_comes_during_a_step_waits_for_its_end() -> None:
    engine = without_spread("plain")
    alone, _ = serve(engine, 1, [0], (64, 1))
    first, _ = serve(engine, 1, [0, 1000], (64, 1))
    assert first[0] == alone[0]
    assert first[1] == 2 * alone[0]


def test_the_launch_seed_decides_everything() -> None:
    engine = design.engine_configs("equal")["plain"]
    arrivals = list(range(0, 10**9, 2 * 10**7))
    one, again, other = (serve(engine, seed, arrivals, (64, 8)) for seed in (1, 1, 2))
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)


def test_true_taxes_grow_with_the_injected_tax() -> None:
    truths = true_taxes("equal", "poisson", 3, {"warmup_s": 2.0, "floor_s": 5.0}, 1)
    taxes = [truths[name, "tpot_p90"].tax for name in design.STEP_TAX_US]
    assert truths[design.AA, "tpot_p90"].tax == 0.0
    assert taxes == sorted(taxes)
    # 360 us on steps of at least 3.03 ms: at most 12% without queueing, and not much less.
    assert 0.08 < taxes[-1] < 0.25


def test_a_study_is_analysed_with_each_count_of_blocks() -> None:
    rows = pl.DataFrame(studies.virtual_study("equal", "fixed", 0, 7, (3, 5)))
    assert rows.height == 2 * len(studies.METRICS) * (len(design.STEP_TAX_US) + 1)
    assert set(rows["blocks"]) == {3, 5}
    # What is printed is the wider of the two intervals.
    assert rows.filter(
        pl.col("hi") - pl.col("lo") + 1e-12 < pl.col("model_hi") - pl.col("model_lo")
    ).is_empty()
    large = rows.filter((pl.col("config") == "step_tax_360us") & (pl.col("metric") == "tpot_p90"))
    assert set(large["verdict"]) == {TAX}


def test_the_summary_counts_what_the_outcomes_say() -> None:
    outcome = {
        "spread": "equal", "arrivals": "fixed", "blocks": 3, "metric": "ttft_p90",
        "method": "block model (df 17)", "verdict": NO_TAX, "p_value": 0.5, "p_adjusted": 0.5,
        "tax": 0.01, "model_lo": 0.0, "model_hi": 0.02,
    }  # fmt: skip
    rows = [
        {**outcome, "study": 0, "config": "step_tax_30us", "lo": 0.0, "hi": 0.02},
        {
            **outcome,
            "study": 1,
            "config": "step_tax_30us",
            "lo": 0.011,
            "hi": 0.02,
            "p_adjusted": 0.01,
        },
        {**outcome, "study": 0, "config": design.AA, "lo": -0.01, "hi": 0.02},
        {**outcome, "study": 1, "config": design.AA, "lo": 0.001, "hi": 0.02},
    ]
    truth = {
        (name, "ttft_p90"): TrueTax(tax, 0.0)
        for name, tax in (("step_tax_30us", 0.01), (design.AA, 0.0))
    }
    long_run = {key: TrueTax(0.02, 0.001) for key in truth}
    table = coverage.with_truth(
        pl.DataFrame(rows), {("equal", "fixed"): truth}, {("equal", "fixed"): long_run}
    )
    (pooled,) = coverage.coverage_rows(table)
    assert (pooled["covered"], pooled["model_covered"]) == (0.5, 1.0)
    assert (pooled["bootstrap_printed"], pooled["noisy_covered"]) == (0.0, None)
    assert pooled["long_run_covered"] == 1.0
    (noise,) = coverage.aa_rows(table)
    assert (noise["excludes_zero"], noise["verdict_tax"]) == (0.5, 0.0)
    level = next(r for r in coverage.level_rows(table) if r["config"] == "step_tax_30us")
    assert level["detected"] == 0.5
    assert level["log_bias"] == pytest.approx(0.0)
    assert (level["truth"], level["long_run"], level["long_run_se"]) == (0.01, 0.02, 0.001)


def test_one_configurations_launches_may_differ_three_times_as_much() -> None:
    equal, unequal = (design.engine_configs(spread) for spread in design.SPREADS)
    wider = {name for name in equal if equal[name].step_cost != unequal[name].step_cost}
    assert wider == {design.NOISY}
    spreads = [c[design.NOISY].step_cost.launch_offset_rel_sd for c in (equal, unequal)]
    assert spreads[1] == pytest.approx(3 * spreads[0])
    arrivals = list(range(0, 10**9, 2 * 10**7))

    def spread_of_medians(engine: EngineConfig) -> float:
        medians = []
        for seed in range(20):
            first, last = serve(engine, seed, arrivals, (64, 8))
            medians.append(np.log(np.median(last - first)))
        return float(np.std(medians))

    ratio = spread_of_medians(unequal[design.NOISY]) / spread_of_medians(equal[design.NOISY])
    assert ratio == pytest.approx(3, rel=0.25)


@pytest.mark.parametrize(
    ("rates", "smallest"), [([0.4, 1.0], 0.02 + 0.02 * 0.4 / 0.6), ([0.1, 0.5], None)]
)
def test_power_is_read_between_two_levels(rates: list[float], smallest: float | None) -> None:
    levels = [
        {"spread": "equal", "arrivals": "fixed", "metric": "ttft_p90", "blocks": 3,
         "config": name, "truth": truth, "detected": rate}
        for name, truth, rate in zip(
            ("step_tax_30us", "step_tax_60us"), (0.02, 0.04), rates, strict=True
        )
    ]  # fmt: skip
    (row,) = coverage.power_rows(levels)
    assert row["smallest_tax_detected"] == (None if smallest is None else pytest.approx(smallest))

"""Test virtual studies with known taxes: engine, true tax, smallest detected tax."""

import dataclasses

import numpy as np
import pytest

from benchmarks.virtual_studies import (
    AA,
    BLOCKS,
    PHASE,
    RATE_RPS,
    STEP_TAX_US,
    Noise,
    log_ratios,
    machine_with,
    serve,
    slowness,
    smallest_found,
    study_document,
    true_taxes,
    virtual_study,
)
from connector_tax.artifacts.metrics import HEADLINE
from connector_tax.artifacts.study_file import launches
from connector_tax.artifacts.verdicts import COSTS, LESS
from connector_tax.engine.model import StepClock
from connector_tax.engine.virtual import VirtualEngine

JITTERED = study_document("jittered", 0, 1)["config"]


@pytest.mark.parametrize("config", ["plain", "step_tax_360us"])
def test_single_request_takes_the_cost_of_its_steps(config: str) -> None:
    engine = machine_with("engine").engines[config]
    cost = dataclasses.replace(engine.step_cost, jitter_rel_sd=0.0, launch_offset_rel_sd=0.0)
    launched = VirtualEngine(dataclasses.replace(engine, step_cost=cost), 1)
    launched.add(0, 64, 3)
    ends = []
    while launched.scheduler.has_work:
        launched.step()
        ends.append(launched.now_ns)
    tax, clock = STEP_TAX_US.get(config, 0.0), StepClock(cost, 1)
    steps = [sum(clock.draw_us(*s)) + tax for s in ((64, 0, 0), (0, 1, 64), (0, 1, 65))]
    assert ends == pytest.approx(np.cumsum(steps) * 1000, abs=8)


def test_cell_depends_on_the_launch_seed_and_has_the_studys_window() -> None:
    engine = machine_with("engine").engines["plain"]
    one, again, other = (serve(VirtualEngine(engine, seed), JITTERED, "x") for seed in (1, 1, 2))
    assert one.window_s == JITTERED["cell"]["floor_s"]
    assert one.since_warmup_s == pytest.approx(np.arange(one.n) / RATE_RPS, abs=0.02)
    assert np.array_equal(one.e2e_ms, again.e2e_ms)
    assert not np.array_equal(one.e2e_ms, other.e2e_ms)


def test_launches_are_bad_and_drift_as_their_noise_says() -> None:
    study = study_document("jittered", 0, 200)

    def factors(noise: Noise) -> np.ndarray:
        slow = [slowness(noise, study, launch) for launch in launches(study, PHASE)]
        return np.array(slow).reshape(200, -1)

    assert set(factors(Noise(0.1)).flat) == {1.0}
    bad = factors(Noise(0.0, bad_share=0.2))
    assert np.isin(bad.round(9), (1.0, 1.2, 1.4)).all()
    assert (bad > 1).mean() == pytest.approx(0.2, abs=0.06)
    drift = np.log(factors(Noise(0.0, drift_sd=0.3)))
    assert (drift[:, 0] - drift[:, -1]).std() == pytest.approx(0.3, rel=0.15)
    assert drift.mean(axis=1) == pytest.approx(0, abs=1e-6)


def test_true_taxes_grow_with_the_injected_tax() -> None:
    truths = true_taxes([row for number in range(3) for row in log_ratios("poisson", number)])
    taxes = [truths[name, "tpot_p90"] for name in STEP_TAX_US]
    assert truths["plain", "tpot_p90"] == truths[AA, "tpot_p90"] == 0.0
    assert taxes == sorted(taxes)
    # 360 us on steps of at least 3.03 ms: at most 12% without queueing, and not much less.
    assert 0.08 < taxes[-1] < 0.25


def test_virtual_study_is_analysed_for_each_number_of_blocks() -> None:
    rows = virtual_study("engine", "jittered", 0)
    assert len(rows) == len(BLOCKS) * len(HEADLINE) * (len(STEP_TAX_US) + 1)
    large = {
        (row["blocks"], row["verdict"])
        for row in rows
        if (row["config"], row["metric"]) == ("step_tax_360us", "tpot_p90")
    }
    assert large == {(count, COSTS) for count in BLOCKS}


@pytest.mark.parametrize(("found", "smallest"), [((2, 5), 0.02 + 0.02 * 0.4 / 0.6), ((0, 2), None)])
def test_smallest_detected_tax_lies_between_two_levels(
    found: tuple[int, int], smallest: float | None
) -> None:
    truths = {("step_tax_30us", "ttft_p90"): 0.02, ("step_tax_60us", "ttft_p90"): 0.04}
    rows = [
        {"config": config, "metric": metric, "verdict": COSTS if study < count else LESS}
        for (config, metric), count in zip(truths, found, strict=True)
        for study in range(5)
    ]
    value = smallest_found(rows, truths)
    assert value == (None if smallest is None else pytest.approx(smallest))

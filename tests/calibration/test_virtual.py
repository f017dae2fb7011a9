"""The virtual engine is the engine; the short form of the whole calibration."""

import dataclasses
import statistics
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from connector_tax.analysis.measure import Requests
from connector_tax.artifacts.metrics import HEADLINE
from connector_tax.artifacts.verdicts import COSTS, LESS
from connector_tax.calibration import __main__ as command
from connector_tax.calibration import virtual
from connector_tax.calibration.__main__ import SHORT
from connector_tax.calibration.live import CASES, inject_faults
from connector_tax.calibration.virtual import log_ratios, serve, true_taxes, virtual_study
from connector_tax.engine.config import EngineConfig
from connector_tax.engine.faults import FaultKind
from connector_tax.engine.model import StepClock
from connector_tax.engine.virtual import VirtualEngine
from connector_tax.files import read_json

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


@pytest.mark.long
def test_the_short_calibration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--short", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert text.rstrip("\n") == (tmp_path / "calibration.txt").read_text().rstrip("\n")
    virtual, http, faults = (
        read_json(tmp_path / f"{name}.json") for name in ("virtual", "http", "faults")
    )
    # Three spreads, two arrival processes, two metrics, 3 and 5 blocks.
    assert len(virtual["rows"]) == 24
    assert all(row["studies"] == SHORT.studies for row in virtual["rows"])
    # Of two studies and a truth from six launches: single rows may miss, all of them not.
    assert statistics.mean(row["covered"] for row in virtual["rows"]) > 0.6
    assert all(row["largest"] > 0.05 for row in virtual["rows"])
    # Launches that differ as a real vLLM's make wider intervals.
    widths = {
        spread: [row["half_width"] for row in virtual["rows"] if row["spread"] == spread]
        for spread in ("engine", "vllm-cpu")
    }
    assert statistics.mean(widths["vllm-cpu"]) > 2 * statistics.mean(widths["engine"])
    assert all(f["as_designed"] for f in faults["faults"]), faults["faults"]
    assert {f["fault"]: f["outcome"] for f in faults["faults"]} == {
        "fin": "void",
        "prefix_hit, once": "void",
        "refuse_start": "failed",
        "crlf": "valid",
    }
    assert http["requests"] > 100
    # A stamp of the wrong event is off by a step of 3 ms; half of them are not, on any machine.
    assert 0 < http["stamps"]["last_us"][0] < 3000
    assert len(http["taxes"]) == 4


def test_every_fault_switch_has_a_case() -> None:
    assert {case.rule["kind"] for case in CASES} == set(FaultKind)


@pytest.mark.long
def test_every_fault_does_what_the_table_says(tmp_path: Path) -> None:
    rows = inject_faults(tmp_path, None, 1, lambda _: None)
    assert [row for row in rows if not row["as_designed"]] == []

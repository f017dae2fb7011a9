"""Virtual pairs: their differences are known, their errors the studies' own, the gate's rates."""

from pathlib import Path

import numpy as np
import pytest

from connector_tax.artifacts.names import PLAIN
from connector_tax.calibration import compare_report, pairs
from connector_tax.calibration.design import CellTimes
from connector_tax.compare.gate import ABOVE, BELOW
from connector_tax.compare.rows import AA, LATENCY, TAX
from connector_tax.files import read_json

CELL: CellTimes = {"warmup_s": 0.5, "floor_s": 3.0}


def test_the_true_ratios_are_those_of_the_step_costs() -> None:
    known = pairs.truths(pairs.pair_logs(0, 4, CELL, 1))
    assert known[TAX, AA, "tpot_p90"] == (0.0, 0.0)
    ratios = {c: float(np.exp(known[TAX, c, "tpot_p90"][0])) for c in pairs.IN_B}
    # The same tax on dearer steps is a smaller share.
    assert ratios["step_tax_360us"] < ratios["step_tax_150us"] < 1 < ratios["step_tax_90us"]
    slower = float(np.exp(known[LATENCY, PLAIN, "tpot_p90"][0]))
    assert slower == pytest.approx(pairs.COST_FACTOR, rel=0.1)


def test_the_short_calibration_of_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--pairs", "2", "--truth-launches", "4", "--out", str(tmp_path)]
    assert compare_report.main(argv) == 0
    assert "in target" in capsys.readouterr().out
    result = read_json(tmp_path / "pairs.json")
    assert {(r["quantity"], r["metric"]) for r in result["pooled"]} == {
        (q, m) for q in (TAX, LATENCY) for m in ("ttft_p90", "tpot_p90")
    }
    ratios = [r for r in result["ratios"] if r["config"] == "step_tax_90us"]
    # More than three blocks' degrees of freedom, fewer than both studies' together.
    assert all(2 <= r["error_df"] <= 60 for r in ratios)
    ratio = next(r for r in ratios if (r["quantity"], r["metric"]) == (TAX, "tpot_p90"))
    assert ratio["truth"] > 1.005
    assert ratio["LOWER"] == 0.0


def test_a_gate_at_the_true_tax_is_wrong_as_often_as_its_confidence_says() -> None:
    random = np.random.default_rng(5)
    gates = [
        {"point": 0.05 + random.normal(0, 0.01),
         "error": 0.01 * float(np.sqrt(random.chisquare(10) / 10)), "df": 10.0}
        for _ in range(600)
    ]  # fmt: skip
    at_truth = pairs.gate_results(gates, 0.05, 0.0)
    assert at_truth[ABOVE] == pytest.approx(0.025, abs=0.02)
    assert at_truth[BELOW] == pytest.approx(0.025, abs=0.02)
    assert pairs.gate_results(gates, 0.05, 0.06)[BELOW] > 0.99
    assert pairs.gate_results(gates, 0.05, -0.05)[ABOVE] > 0.95

"""Test the forecast of the smallest cost that a comparison's blocks prove."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from connector_tax.ab.__main__ import main
from connector_tax.ab.design import FAMILY_LEVEL, FIRST_ANALYSIS
from connector_tax.ab.forecast import forecast, smallest_cost
from connector_tax.analysis.effect import POWER, Effect
from connector_tax.analysis.looks import shared
from connector_tax.artifacts.looks import Finding

LABELS = {"candidate": "--fast"}
TTFT = Finding("candidate", "ttft_p50", 3, 3, 6, "valid", error=0.02, df=2)


def test_smallest_cost_is_proven_in_four_of_five_studies() -> None:
    blocks, deviation = 9, 0.03
    finding = replace(TTFT, error=deviation / 3**0.5)
    cost = smallest_cost(finding, blocks, 1, 2)
    drawn = np.random.default_rng(1).normal(np.log1p(cost), deviation, (4000, blocks))
    level = shared(FAMILY_LEVEL / (blocks - FIRST_ANALYSIS + 1), 1, 2).wide
    proven = 0
    for study in drawn:
        error = float(study.std(ddof=1)) / blocks**0.5
        effect = Effect(float(study.mean()), error, blocks - 1, tuple(range(blocks)))
        proven += effect.interval(level).lo > 0
    assert abs(proven / 4000 - POWER) < 0.05


def test_forecast_gives_the_smallest_cost_and_the_time_for_half_of_it() -> None:
    findings = [TTFT, replace(TTFT, metric="tpot_p50", error=0.01)]
    costs = [smallest_cost(of, 6, 1, 2) for of in findings]
    (line,) = forecast(findings, 6, 60, LABELS)
    assert f"--fast: 6 blocks prove a cost of at least {100 * costs[0]:.1f}% of TTFT and " in line
    blocks, minutes = (int(word) for word in line.rpartition("takes ")[2].split() if word.isdigit())
    assert blocks == minutes

    def halved(count: int) -> bool:
        pairs = zip(findings, costs, strict=True)
        return all(smallest_cost(of, count, 1, 2) <= cost / 2 for of, cost in pairs)

    assert halved(blocks)
    assert not halved(blocks - 1)
    assert forecast([replace(TTFT, error=None)], 6, 60, LABELS) == []


def test_dry_run_without_an_earlier_comparison_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    servers = ["--baseline", "a {port}", "--candidate", "b {port}", "--rate", "1"]
    assert main([*servers, "--shape", "8x8", "--dry-run", "--name", "earlier"]) == 3
    assert "--dry-run: found no interim analysis in results/earlier" in capsys.readouterr().err

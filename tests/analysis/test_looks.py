"""Looks after blocks: verdicts, what they decide, and that what is decided stays so."""

from pathlib import Path

import numpy as np
import pytest

from connector_tax.analysis import looks
from connector_tax.analysis.block_model import LaunchId
from connector_tax.analysis.looks import findings_of, take_look
from connector_tax.artifacts.looks import Finding, decided, decided_earlier, decided_in
from connector_tax.artifacts.metrics import VERDICT_METRICS
from connector_tax.artifacts.names import Launch
from connector_tax.artifacts.study_file import Study
from connector_tax.artifacts.verdicts import CANNOT_TELL, COSTS, GAINS, LESS, MARKED, less
from tests.shared import known

MARGINS = dict.fromkeys(VERDICT_METRICS, 0.03)
LEVELS = [0.025, 0.025]


def medians(taxes: dict[str, float], sd: float, blocks: int) -> dict[str, dict[LaunchId, float]]:
    """Log medians of launches with these taxes, blocks that differ widely."""
    rng = np.random.default_rng(1)
    return {
        metric: {
            LaunchId(name, block): float(10 * block + np.log1p(tax) + rng.normal(0, sd))
            for block in range(blocks)
            for name, tax in {"base": 0.0, "base_2": 0.0, **taxes}.items()
        }
        for metric in VERDICT_METRICS
    }


def verdicts(taxes: dict[str, float], sd: float) -> dict[str, set[str]]:
    """By candidate, after three blocks."""
    found = findings_of(medians(taxes, sd, 3), "base", list(taxes), 3, LEVELS, MARGINS)
    return {name: {f.verdict for f in found if f.config == name} for name in taxes}


def test_costs_gains_and_equality_are_told_and_noise_is_not() -> None:
    assert verdicts({"dear": 0.1, "quick": -0.1, "same": 0.0}, 0.001) == {
        "dear": {COSTS}, "quick": {GAINS}, "same": {LESS},
    }  # fmt: skip
    assert verdicts({"noisy": 0.02}, 0.05) == {"noisy": {CANNOT_TELL}}


def test_an_end_of_the_equivalence_test_stands_beside_each_interval() -> None:
    taxes = {"same": 0.0, "other": 0.02, "noisy": 0.005}
    found = findings_of(medians(taxes, 0.01, 4), "base", list(taxes), 3, LEVELS, MARGINS)
    assert LESS in {finding.verdict for finding in found}
    for one in found:
        low, high = known(one.narrow_lo), known(one.narrow_hi)
        assert known(one.lo) < low < high < known(one.hi)
        within = low >= -0.03 and high <= 0.03
        assert less(one.verdict) == within


def test_what_cannot_be_told_says_how_many_blocks_would() -> None:
    values = medians({"noisy": 0.0}, 0.02, 3)
    (first, _) = findings_of(values, "base", ["noisy"], 3, LEVELS, MARGINS)
    assert first.verdict == CANNOT_TELL
    assert known(first.blocks_needed) > 3
    assert decided([first]) == set()


def test_a_candidate_without_launches_has_no_number() -> None:
    values = medians({}, 0.01, 2)
    found = findings_of(values, "base", ["gone"], 2, LEVELS, MARGINS, ["gone"])
    assert {finding.verdict for finding in found} == {MARKED}
    assert found[0].tax is None


def test_more_candidates_and_looks_widen_the_interval() -> None:
    one = findings_of(medians({"a": 0.1}, 0.01, 2), "base", ["a"], 2, [0.05], MARGINS)[0]
    two = findings_of(medians({"a": 0.1}, 0.01, 2), "base", ["a"], 2, LEVELS, MARGINS)[0]
    assert known(two.lo) < known(one.lo)


def test_what_is_decided_leaves_and_stays_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(verdict: str) -> list[Finding]:
        numbers = (0.1, 0.0, 0.2, 0.0, 0.2)
        return [
            Finding(config, metric, *numbers, verdict if config == "a" else CANNOT_TELL, 1.0,
                    None)
            for config in ("a", "b") for metric in VERDICT_METRICS
        ]  # fmt: skip

    study = Study(tmp_path, {"config": {"statistics": {"looks": LEVELS}}})  # type: ignore[typeddict-item]
    monkeypatch.setattr(looks, "look", lambda *_: told(COSTS))
    assert decided(take_look(study, 2)) == {"a"}
    monkeypatch.setattr(looks, "look", lambda *_: told(CANNOT_TELL))
    # Neither the same look taken again, nor the next, takes it back.
    assert decided(take_look(study, 2)) == {"a"}
    assert decided(take_look(study, 3)) == {"a"}
    assert decided_earlier(tmp_path, Launch("a", 1, "A")) is None
    assert decided_earlier(tmp_path, Launch("a", 2, "A")) == "decided after 2 blocks"
    assert decided_earlier(tmp_path, Launch("b", 2, "A")) is None
    assert decided_earlier(tmp_path, Launch("base_2", 2, "A")) is None


def test_what_one_look_decides_keeps_the_order_of_the_configurations() -> None:
    names = [f"{letter}_candidate" for letter in "zyxwvuts"]
    numbers = (0.1, 0.0, 0.2, 0.0, 0.2)
    findings = [
        Finding(name, metric, *numbers, COSTS, 1.0, None)
        for metric in VERDICT_METRICS for name in names
    ]  # fmt: skip
    assert list(decided_in({"blocks": 2, "level": 0.05, "findings": findings})) == names

"""Test interim analyses: their verdicts, and that decisions persist."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from connector_tax.analysis import looks
from connector_tax.analysis.effects import LogSample, TaxTable
from connector_tax.analysis.looks import findings_of, take_look
from connector_tax.artifacts.looks import (
    Finding,
    decided,
    decided_earlier,
    decided_in,
    read_looks,
)
from connector_tax.artifacts.metrics import VERDICT_METRICS
from connector_tax.artifacts.names import CellKey, Launch
from connector_tax.artifacts.study_file import Study
from connector_tax.artifacts.verdicts import CANNOT_TELL, COSTS, GAINS, LESS, less
from tests.shared import known

LEVELS = [0.025, 0.025]
BASE = ("base", "base_2")


def findings(
    taxes: dict[str, float], sd: float, blocks: int, *, levels: list[float] = LEVELS,
    saturated: str = "",
) -> list[Finding]:  # fmt: skip
    """Return the findings on launches at two rates with these taxes, in blocks that differ widely.

    Args:
        saturated: the configuration that is saturated, at the higher rate only.
    """
    rng = np.random.default_rng(1)
    cells = ("r1", "r2")
    samples = {
        CellKey(name, block, "A", cell): {
            metric: LogSample(
                10 * block + np.log1p(tax) + rng.normal(0, sd), 100,
                name == saturated and cell == "r2",
            )
            for metric in VERDICT_METRICS
        }
        for block in range(blocks)
        for name, tax in {**dict.fromkeys(BASE, 0.0), **taxes}.items()
        for cell in cells
    }  # fmt: skip
    document: Any = {
        "blocks": 9,
        "config": {"baseline": "base", "statistics": {
            "confidence": 0.95, "looks": levels, "confirmatory": [],
            "margins": dict.fromkeys(VERDICT_METRICS, 0.03),
        }, "engine": {"kind": "vllm"}},
        "configurations": [{"id": name} for name in ("base", *taxes)],
        "cells": {"A": [{"cell": cell, "rate_rps": float(cell[1])} for cell in cells]},
        "run_order": {"A": [{"config": name, "block": 0} for name in (*BASE, *taxes)]},
    }  # fmt: skip
    return findings_of(TaxTable(Study(Path(), document), [], samples, {}, blocks), blocks)


def verdicts(taxes: dict[str, float], sd: float) -> dict[str, set[str]]:
    """Return the verdicts after three blocks, by candidate."""
    found = findings(taxes, sd, 3)
    return {name: {f.verdict for f in found if f.config == name} for name in taxes}


def test_interim_analysis_decides_costs_gains_and_equality_but_not_noise() -> None:
    assert verdicts({"dear": 0.1, "quick": -0.1, "same": 0.0}, 0.001) == {
        "dear": {COSTS}, "quick": {GAINS}, "same": {LESS},
    }  # fmt: skip
    assert verdicts({"noisy": 0.02}, 0.05) == {"noisy": {CANNOT_TELL}}


def test_each_verdict_has_both_intervals() -> None:
    found = findings({"same": 0.0, "other": 0.02, "noisy": 0.005}, 0.01, 3)
    assert LESS in {finding.verdict for finding in found}
    for one in found:
        low, high = known(one.narrow_lo), known(one.narrow_hi)
        assert known(one.family_lo) < low < high < known(one.family_hi)
        within = low >= -0.03 and high <= 0.03
        assert less(one.verdict) == within


def test_undecided_tax_gives_the_blocks_needed() -> None:
    (first, _) = findings({"noisy": 0.0}, 0.02, 3)
    assert first.verdict == CANNOT_TELL
    assert known(first.blocks_needed) > 3
    assert decided([first]) == set()


def test_rate_at_which_one_configuration_saturates_is_excluded_for_all() -> None:
    both = findings({"dear": 0.1, "full": 0.1}, 0.001, 3)
    low = findings({"dear": 0.1, "full": 0.1}, 0.001, 3, saturated="full")
    assert [one.n for one in both] == [2 * one.n for one in low]
    assert {one.verdict for one in low} == {COSTS}


def test_candidate_without_launches_stays_undecided() -> None:
    samples: dict[CellKey, dict[str, LogSample]] = {}
    document: Any = {
        "blocks": 2, "cells": {"A": [{"cell": "r1", "rate_rps": 1.0}]},
        "config": {"baseline": "base", "statistics": {
            "confidence": 0.95, "looks": LEVELS, "confirmatory": [], "margins": {},
        }, "engine": {"kind": "vllm"}},
        "configurations": [{"id": "base"}, {"id": "gone"}],
        "run_order": {"A": [{"config": "base", "block": 0}, {"config": "gone", "block": 0}]},
    }  # fmt: skip
    found = findings_of(TaxTable(Study(Path(), document), [], samples, {}, 2), 2)
    assert {(one.config, one.estimate, one.status) for one in found} == {("gone", None, "missing")}
    assert decided(found) == set()


def test_more_interim_analyses_widen_the_interval() -> None:
    one = findings({"a": 0.1}, 0.01, 2, levels=[0.05])[0]
    two = findings({"a": 0.1}, 0.01, 2)[0]
    assert known(two.family_lo) < known(one.family_lo)


def test_decided_configuration_is_dropped_and_stays_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(verdict: str) -> list[Finding]:
        return [
            Finding(config, metric, 2, 1, 1, "valid", 0.1,
                    verdict=verdict if config == "a" else CANNOT_TELL)
            for config in ("a", "b") for metric in VERDICT_METRICS
        ]  # fmt: skip

    study = Study(tmp_path, {"config": {"statistics": {"looks": LEVELS}}})  # type: ignore[typeddict-item]
    monkeypatch.setattr(looks, "look", lambda *_: told(COSTS))
    assert decided(take_look(study, 2)) == {"a"}
    monkeypatch.setattr(looks, "look", lambda *_: told(CANNOT_TELL))
    # Neither repeating this interim analysis nor the next one changes the decision.
    assert decided(take_look(study, 2)) == {"a"}
    assert decided(take_look(study, 3)) == {"a"}
    assert decided_earlier(tmp_path, Launch("a", 1, "A")) is None
    assert decided_earlier(tmp_path, Launch("a", 2, "A")) == "decided after 2 blocks"
    assert decided_earlier(tmp_path, Launch("b", 2, "A")) is None
    assert decided_earlier(tmp_path, Launch("base_2", 2, "A")) is None
    # Later phases measure the undecided configurations in every block.
    assert decided_earlier(tmp_path, Launch("a", 0, "B")) == "decided after 2 blocks"
    assert decided_earlier(tmp_path, Launch("b", 0, "Bp")) is None


def test_analysis_without_any_number_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(estimate: float | None) -> list[Finding]:
        return [Finding("a", metric, 2, 1, 1, "valid", estimate, verdict=COSTS if estimate else "")
                for metric in VERDICT_METRICS]  # fmt: skip

    study = Study(tmp_path, {"config": {"statistics": {"looks": LEVELS}}})  # type: ignore[typeddict-item]
    # Every cell of the first two blocks was void, and then measured again after the third.
    monkeypatch.setattr(looks, "look", lambda *_: told(None))
    assert decided(take_look(study, 2)) == set()
    assert decided(take_look(study, 3)) == set()
    monkeypatch.setattr(looks, "look", lambda *_: told(0.1))
    assert decided(take_look(study, 2)) == {"a"}
    assert [entry["blocks"] for entry in read_looks(tmp_path)] == [2, 3]


def test_skipped_configuration_does_not_keep_others_running() -> None:
    found = [
        Finding(name, metric, 2, 1, 1, status, verdict=verdict)
        for metric in VERDICT_METRICS
        for name, status, verdict in (("gone", "skipped", ""), ("a", "valid", COSTS))
    ]
    assert decided(found) == {"gone", "a"}


def test_decided_configurations_keep_their_order() -> None:
    names = [f"{letter}_candidate" for letter in "zyxwvuts"]
    found = [
        Finding(name, metric, 2, 1, 1, "valid", verdict=COSTS)
        for metric in VERDICT_METRICS for name in names
    ]  # fmt: skip
    assert list(decided_in({"blocks": 2, "level": 0.05, "findings": found})) == names

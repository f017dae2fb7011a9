"""The simulated Phase A: the cost model's own times, and the same verdicts in less time."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from connector_tax.config import ROOT, load_yaml
from connector_tax.engine.config import load_config
from connector_tax.study.bench_precision import Outcome, VirtualEngine, simulate
from tests.workflow.harness import TINY

EMBEDDED = ROOT / "config" / "embedded.yaml"
RATES = [10.0, 100.0, 400.0, 800.0]


def tiny(cell: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = load_yaml(TINY)
    config["configurations"] = ["plain", "mooncake_both"]
    config["phase_a"]["rates_rps"] = RATES
    config["cell"] |= cell
    config["precision"] |= {"min_completed_floor": 36, "target_relative_half_width": 0.2}
    config["reference"]["fallback_rps"] = None
    return config


def test_a_lone_request_takes_what_the_cost_model_says() -> None:
    config = load_config(EMBEDDED, "mooncake_both")
    cost = replace(config.step_cost, jitter_rel_sd=0.0, launch_offset_rel_sd=0.0)
    engine = VirtualEngine(replace(config, step_cost=cost), seed=1)
    engine.add(0, prompt=64, output=2)
    assert [s.sink for s in engine.step()] == [0]
    # delta + beta0 + beta1 * 64, the three callbacks, and the admission of one request.
    prefill_us = 400 + 2600 + 24 * 64 + 150 + 120 + 180 + 1200
    assert engine.now_ns == prefill_us * 1000
    engine.step()
    # One decoding sequence with 64 cached tokens in 4 blocks, as the prefix cache holds them.
    decode_us = 400 + 2600 + 30 + 0.02 * 64 + 150 + 120 + 180 + 0.01 * 4
    assert engine.now_ns == pytest.approx((prefill_us + decode_us) * 1000, abs=1)
    assert not engine.scheduler.has_work


def test_both_ways_give_the_same_rates_and_verdicts(tmp_path: Path) -> None:
    definition = yaml.safe_load(EMBEDDED.read_text())
    definition["scheduler"]["max_num_seqs"] = 4
    engine = tmp_path / "engine.yaml"
    engine.write_text(yaml.safe_dump(definition))
    config = tiny({"floor_s": 1, "cap_s": 20, "min_completed": 120, "inflight_cap": 64})

    def outcome(enabled: bool) -> Outcome:
        return simulate(config, "tiny.yaml", engine, enabled)

    full, precise = outcome(False), outcome(True)
    assert {c.status for c in full.cells} == {"valid"}
    skipped = {c.key.cell for c in precise.cells if c.status == "skipped"}
    assert skipped == {"r800"}
    rates, verdicts = full.verdicts()
    precise_rates, precise_verdicts = precise.verdicts()
    assert rates["ref_safe"] == precise_rates["ref_safe"] == 100.0
    assert rates["saturation_rate_rps"] == precise_rates["saturation_rate_rps"]
    assert verdicts == precise_verdicts
    assert all(precise.seconds[name] < full.seconds[name] for name in full.seconds)
    assert outcome(True).seconds == precise.seconds

"""The simulated Phase A: the cost model's own times, and the same verdicts in less time."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.precision import Outcome, simulate, true_taxes
from benchmarks.precision_report import (
    FULL,
    PRECISE,
    Replication,
    Truth,
    agreement,
    agreement_lost,
    report,
)
from connector_tax.artifacts.names import INCONCLUSIVE, NO_TAX, TAX
from connector_tax.config import ROOT, load_yaml
from connector_tax.engine.config import load_config
from connector_tax.engine.virtual import VirtualEngine
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


def test_the_true_tax_is_what_the_cost_model_adds_to_a_step() -> None:
    config = tiny({"floor_s": 1, "cap_s": 1, "min_completed": 1})
    truths = true_taxes(config, "tiny.yaml", EMBEDDED, 10.0, 3)
    # Requests follow each other without overlap: 450 us on decode steps of a little over 3.03 ms,
    # and the cached blocks' share, at most 0.01 us for each of the pool's.
    assert 450 / 3100 < truths["mooncake_both", "tpot_p90"].tax < 620 / 3030
    assert truths["mooncake_both", "tpot_p90"].standard_error < 0.01
    assert truths["plain_2", "tpot_p90"] == Truth(0.0, 0.0)


@pytest.mark.parametrize(
    ("tax", "place", "wrong"),
    [
        (0.0, "none", {TAX}),
        (0.01, "within margin", set()),
        (-0.01, "within margin", {TAX}),
        (0.031, "near margin", {NO_TAX}),
        (0.2, "above margin", {NO_TAX}),
    ],
)
def test_a_verdict_is_wrong_only_about_what_it_claims(
    tax: float, place: str, wrong: set[str]
) -> None:
    truth = Truth(tax, 0.002)
    assert truth.place(0.03) == place
    assert {v for v in (TAX, NO_TAX, INCONCLUSIVE) if truth.refutes(v, 0.03)} == wrong


KEYS = [("a", "ref_safe", "ttft_p90"), ("b", "ref_safe", "ttft_p90")]
RATES_FOUND = {"ref_safe": 4.0, "ref_load": 4.0, "saturation_rate_rps": {"plain": 8.0}}


def replication(
    full: tuple[str, str], precise: tuple[str, str], cell_s: tuple[float, float] = (100.0, 30.0)
) -> Replication:
    verdicts = tuple(dict(zip(KEYS, said, strict=True)) for said in (full, precise))
    return Replication(verdicts, (RATES_FOUND, RATES_FOUND), cell_s, 20.0)  # type: ignore[arg-type]


def test_agreement_is_counted_against_the_full_grids_of_other_seeds() -> None:
    replications = [
        replication((TAX, NO_TAX), (TAX, TAX)),
        replication((TAX, TAX), (TAX, TAX)),
        replication((TAX, NO_TAX), (INCONCLUSIVE, NO_TAX)),
    ]
    assert agreement(replications, FULL, KEYS, same_seed=True) == 1.0
    assert agreement(replications, PRECISE, KEYS, same_seed=True) == pytest.approx(4 / 6)
    # Full grids: a agrees in all of 3 pairs, b in one.
    assert agreement(replications, FULL, KEYS, same_seed=False) == pytest.approx(4 / 6)
    # Precise: a in 4 of 6 ordered pairs; b in 1 (seed 0 with 1), 0 and 1 (seed 2 with 0).
    assert agreement(replications, PRECISE, KEYS, same_seed=False) == pytest.approx((4 + 2) / 12)
    lost, error = agreement_lost(replications, KEYS)
    assert lost == pytest.approx(4 / 6 - 6 / 12)
    assert error > 0


@pytest.mark.parametrize(
    ("precise", "cell_s", "passes"),
    [
        ((TAX, NO_TAX), (100.0, 30.0), True),
        ((TAX, NO_TAX), (100.0, 45.0), False),
        ((INCONCLUSIVE, NO_TAX), (100.0, 30.0), False),
        ((TAX, TAX), (100.0, 30.0), False),
    ],
    ids=["same verdicts in half the time", "start-ups count", "undecided", "wrong"],
)
def test_the_benchmark_passes_on_the_full_grids_verdicts_in_half_its_time(
    precise: tuple[str, str],
    cell_s: tuple[float, float],
    passes: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    replications = [replication((TAX, NO_TAX), precise, cell_s)] * 4
    taxes = {("a", "ttft_p90"): Truth(0.2, 0.001), ("b", "ttft_p90"): Truth(0.0, 0.0)}
    truths: Mapping[float, Mapping[tuple[str, str], Truth]] = {4.0: taxes}
    assert report(replications, truths, {"ttft_p90": 0.03}, 0.95) is passes
    said = capsys.readouterr().out
    assert f"{cell_s[1] / 100:.1%} of the full grid's in cells" in said
    assert f"{(cell_s[1] + 20) / 120:.1%} with start-ups" in said

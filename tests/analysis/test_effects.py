"""Test taxes and their combinations: intervals, coverage, taxes over all rates, verdicts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import t as student

from connector_tax.analysis.block_model import MIXTURE
from connector_tax.analysis.effect import Effect, family_levels, judge, sidak
from connector_tax.analysis.effects import (
    LogSample,
    TaxTable,
    WeightedTax,
    sample_launch,
)
from connector_tax.analysis.measure import Requests
from connector_tax.artifacts.metrics import METRICS
from connector_tax.artifacts.names import ALL_RATES, CellKey
from connector_tax.artifacts.study_file import Study
from connector_tax.artifacts.verdicts import (
    CANNOT_TELL,
    COSTS,
    COSTS_LESS,
    GAINS,
    LESS,
    MARKED,
    TOO_FEW,
)
from tests.shared import known

LONG = pytest.mark.long
WHERE = ("A", "r1", "ttft_p90")
# Whether launches' cells were saturated, and the arrivals they dropped.
Overloads = dict[CellKey, tuple[bool, int]]


def requests_of(ttft_ms: np.ndarray) -> Requests:
    """Return requests of one output token, evenly spaced over a minute, with the given TTFT."""
    n = len(ttft_ms)
    at_s = np.arange(n) * 60 / n
    return Requests(ttft_ms, ttft_ms, np.empty(0), 2 * ttft_ms, at_s, 60.0, n, 0, 0)


def table_of(
    samples: dict[CellKey, dict[str, LogSample]],
    blocks: int,
    overloads: Overloads | None = None,
    cells: Any = (),
) -> TaxTable:
    """Return a tax table from samples."""
    over = overloads or {}
    marked = {
        key: {name: LogSample(*sample[:2], *over.get(key, ())) for name, sample in of.items()}
        for key, of in samples.items()
    }
    order = [{"config": key.config, "block": key.block} for key in samples]
    document: Any = {
        "blocks": blocks,
        "config": {"statistics": {"confidence": 0.95}, "engine": {"kind": "vllm"}},
        "configurations": [],
        "cells": {"A": cells},
        "run_order": {"A": order},
    }
    return TaxTable(Study(Path(), document), [], marked, {})


def simulated(
    blocks: int,
    seed: int,
    taxes: dict[str, float],
    launch_sigma: float,
    cells: tuple[str, ...] = ("r1",),
) -> TaxTable:
    """Return the tax table of the launches that `drawn` returns."""
    return table_of(drawn(blocks, seed, taxes, launch_sigma, cells), blocks)


def drawn(
    blocks: int,
    seed: int,
    taxes: dict[str, float],
    launch_sigma: float,
    cells: tuple[str, ...],
    n: int = 120,
) -> dict[CellKey, dict[str, LogSample]]:
    """Return lognormal launches of plain (twice a block) and of configurations with known taxes."""
    rng = np.random.default_rng([blocks, seed])
    samples = {}
    for config, tax in {"plain": 0.0, "plain_2": 0.0, **taxes}.items():
        for block in range(blocks):
            for cell in cells:
                noise = rng.normal(0, launch_sigma) + 0.15 * rng.normal(size=n)
                key = CellKey(config, block, "A", cell)
                ttft = requests_of(50 * (1 + tax) * np.exp(noise))
                samples[key] = sample_launch(ttft)
    return samples


@pytest.mark.parametrize("zeros", [60, 45, 0])
def test_percentile_equal_to_zero_is_missing(zeros: int) -> None:
    n = 100
    tpot = np.where(np.arange(n) < zeros, 0.0, 5.0 + np.arange(n) / n)
    samples = sample_launch(replace(requests_of(50.0 + np.arange(n)), per_token_ms=tpot))
    assert set(METRICS) - set(samples) == (set() if zeros < 50 else {"tpot_p50"})


def agreeing(points: dict[str, list[float]], overloads: Overloads | None = None) -> TaxTable:
    """Return the tax table of launches with these values, by configuration and block."""
    samples = {
        CellKey(name, block, "A", "r1"): {"ttft_p90": LogSample(value, 100)}
        for name, values in points.items()
        for block, value in enumerate(values)
    }
    return table_of(samples, max(map(len, points.values())), overloads)


def taxed(table: TaxTable, config: str) -> Effect:
    return known(table.tax(config, *WHERE))


def test_varying_launches_have_the_interval_of_the_mixture() -> None:
    rng = np.random.default_rng(4)
    values = {name: list(rng.normal(0, 0.05, 3)) for name in ("plain", "plain_2", "x", "y", "z")}
    effect = taxed(agreeing(values), "x")
    d = np.array(values["x"]) - (np.array(values["plain"]) + values["plain_2"]) / 2
    assert effect.method == MIXTURE
    assert effect.point == pytest.approx(np.expm1(d.mean()))
    error = known(effect.error)
    assert effect.lo == pytest.approx(np.expm1(d.mean() - student.ppf(0.975, effect.df) * error))


def test_two_blocks_have_an_interval_and_no_verdict() -> None:
    effect = taxed(simulated(2, 3, {"x": 0.5, "y": 0.1}, 0.001), "x")
    assert effect.lo > 0
    assert judge(effect, 0.03, family_levels(0.95, 1)).verdict == TOO_FEW


def test_tax_of_plains_last_launch_is_relative_to_its_other_launches() -> None:
    values = {"plain": [0.0, 1.0, 2.0], "plain_2": [0.1, 1.2, 2.1], "x": [0.5, 1.5, 2.5]}
    table = agreeing(values)
    assert taxed(table, "plain_2").point == pytest.approx(np.expm1(0.4 / 3))
    assert taxed(table, "x").point == pytest.approx(np.expm1(0.5 - 0.2 / 3))
    levels = table.at(*WHERE).levels("x")
    assert levels["own"] / levels["base"] - 1 == pytest.approx(taxed(table, "x").point)
    assert (levels["n"], levels["n_base"]) == (300, 600)


@pytest.mark.long
@pytest.mark.parametrize("blocks", [3, 5, 8])
@pytest.mark.parametrize("launch_sigma", [0.0, 0.01, 0.05])
def test_intervals_contain_the_true_tax_at_their_level(blocks: int, launch_sigma: float) -> None:
    studies, covered, false = 1000, 0, 0
    taxes = {"x": 0.2, "y": 0.1, "z": 0.0}
    for seed in range(studies):
        table = simulated(blocks, seed, taxes, launch_sigma)
        tax, noise = taxed(table, "x"), taxed(table, "plain_2")
        covered += tax.lo <= 0.2 <= tax.hi
        false += known(noise.p) < 0.05
    # Three standard errors at 95% are 2 points.
    assert 0.93 <= covered / studies <= 0.97
    assert false / studies <= 0.07


def test_combination_cancels_the_common_part_of_its_terms() -> None:
    table = simulated(4, 1, {"x": 0.3, "y": 0.2}, 0.01)
    terms = [WeightedTax(1, "x", *WHERE), WeightedTax(-1, "y", *WHERE)]
    gap = known(table.combination(terms))
    assert gap.point == pytest.approx(taxed(table, "x").point - taxed(table, "y").point)
    zero = known(table.combination([terms[0], WeightedTax(-1, *terms[0][1:])]))
    assert (zero.point, zero.lo, zero.hi) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("across", ["configurations", pytest.param("cells", marks=LONG)])
def test_intervals_of_combinations_contain_the_true_value_as_often_as_stated(across: str) -> None:
    studies, covered, widths = 150, 0, []
    for seed in range(studies):
        table = simulated(3, seed, {"x": 0.3, "y": 0.1, "z": 0.0}, 0.02, ("r1", "r2"))
        first = WeightedTax(1, "x", "A", "r1", "ttft_p90")
        other = first._replace(weight=-1, cell="r2") if across == "cells" else None
        gap = known(table.combination([first, other or WeightedTax(-1, "y", *WHERE)]))
        truth = 0.0 if across == "cells" else 0.2
        covered += gap.lo <= truth <= gap.hi
        assert (known(gap.p) > 0.05) == (gap.lo < 0 < gap.hi)
        widths.append(gap.hi - gap.lo)
    # Three standard errors at 95% are 5.3 points.
    assert 0.89 <= covered / studies <= 0.995
    assert np.median(widths) < 0.25


def test_combination_over_cells_uses_only_launches_with_all_cells() -> None:
    samples = drawn(3, 3, {"x": 0.3, "y": 0.1, "z": 0.0}, 0.02, ("r1", "r2"))
    table = table_of(samples, 3)
    terms = [WeightedTax(w, "x", "A", cell, "ttft_p90") for w, cell in ((1, "r2"), (-1, "r1"))]
    whole = known(table.combination(terms))
    del samples[CellKey("plain_2", 1, "A", "r2")]
    fewer = known(table_of(samples, 3).combination(terms))
    assert fewer.n_blocks == 3
    assert known(fewer.noise).mixture.df == known(whole.noise).mixture.df - 1
    del samples[CellKey("plain", 1, "A", "r1")]
    two = known(table_of(samples, 3).combination(terms))
    assert two.n_blocks == 2


def test_marks_name_saturated_configurations_and_dropped_arrivals() -> None:
    values = {"plain": [0.0] * 3, "plain_2": [0.0] * 3, "x": [0.2] * 3, "y": [0.1] * 3}
    overloads = {
        CellKey("x", 1, "A", "r1"): (True, 0),
        CellKey("plain_2", 2, "A", "r1"): (False, 65),
        CellKey("y", 0, "A", "r9"): (True, 0),
    }
    table = agreeing(values, overloads)
    assert taxed(table, "x").mark == "x saturated; plain dropped 65 arrivals"
    assert taxed(table, "y").mark == "plain dropped 65 arrivals"
    assert taxed(table, "plain_2").mark == "plain dropped 65 arrivals"
    gap = known(table.combination([WeightedTax(1, "x", *WHERE), WeightedTax(-1, "y", *WHERE)]))
    assert gap.mark == "x saturated; plain dropped 65 arrivals"


def effect_of(point: float, error: float, blocks: int = 3, df: int = 12, mark: str = "") -> Effect:
    """Return an effect of this size with this standard error."""
    blocks_ = tuple(range(blocks))
    return Effect(float(np.log1p(point)), error, df, blocks_, added_df=8, mark=mark)


@pytest.mark.parametrize(("metric", "enough"), [("ttft_p50", 10), ("tpot_p90", 50)])
@pytest.mark.parametrize("cell", ["r1", ALL_RATES])
def test_fewer_than_five_requests_beyond_a_percentile_mark_its_tax(
    metric: str, enough: int, cell: str
) -> None:
    def tax(least: int) -> Effect:
        samples = {
            CellKey(name, block, "A", at): {
                metric: LogSample(1.0 + 0.1 * (name == "x") + 0.01 * block * (at == "r2"), n)
            }
            for name in ("plain", "plain_2", "x")
            for block in range(3)
            for at in ("r1", "r2")
            for n in [least if (name, block, at) == ("plain_2", 1, "r1") else 1000]
        }
        cells = [{"cell": at, "rate_rps": float(at[1])} for at in ("r1", "r2")]
        return known(table_of(samples, 3, cells=cells).tax("x", "A", cell, metric))

    few = tax(enough - 1)
    assert few.mark == "few requests"
    assert judge(few, 0.03, family_levels(0.95, 1)).verdict == MARKED
    assert tax(enough).mark == ""


@pytest.mark.parametrize(
    ("point", "error", "expected"),
    [
        (0.20, 0.02, COSTS),
        (0.01, 0.002, COSTS_LESS),
        (0.0, 0.005, LESS),
        (0.02, 0.02, CANNOT_TELL),
        (-0.2, 0.02, GAINS),
    ],
)
def test_verdict_follows_from_interval_margin_mark_and_blocks(
    point: float, error: float, expected: str
) -> None:
    assert judge(effect_of(point, error), 0.03, family_levels(0.95, 7)).verdict == expected
    assert (
        judge(effect_of(point, error, mark="x saturated"), 0.03, family_levels(0.95, 7)).verdict
        == MARKED
    )
    assert judge(effect_of(point, error, blocks=2), 0.03, family_levels(0.95, 7)).verdict == TOO_FEW


def test_cost_has_no_verdict_if_its_adjusted_interval_contains_zero() -> None:
    effect = effect_of(0.10, 0.04)
    assert effect.lo > 0
    assert judge(effect, 0.03, family_levels(0.95, 1)).verdict == COSTS
    many = judge(effect, 0.03, family_levels(0.95, 7))
    assert sidak(known(effect.p), 7) == pytest.approx(1 - (1 - known(effect.p)) ** 7)
    assert many.verdict == CANNOT_TELL
    # The interval that is shown beside it contains zero.
    assert known(many.family_lo) < 0 < effect.lo < effect.hi < known(many.family_hi)


def test_blocks_needed_is_the_smallest_number_with_sufficient_power() -> None:
    effect = effect_of(0.05, 0.03, df=17)
    levels = family_levels(0.95, 7)
    needed = known(effect.blocks_needed(0.03, levels))

    def power(blocks: int) -> float:
        return effect.with_blocks(blocks, levels).power(0.03, levels)

    assert power(needed - 1) < 0.8 <= power(needed)
    later = effect.with_blocks(12, levels)
    assert later.error == pytest.approx(0.03 / 2)
    assert later.df == 17 + 9 * 8


def test_blocks_needed_is_missing_above_one_hundred() -> None:
    assert effect_of(0.031, 0.4).blocks_needed(0.03, family_levels(0.95, 1)) is None


# ---- over all rates


def over_rates(overloads: Overloads, lost: tuple[CellKey, ...] = ()) -> TaxTable:
    """Return the taxes at three rates: x costs 10, 20 and 60%, y costs 100% at each rate."""
    costs = {"plain": (0, 0, 0), "plain_2": (0, 0, 0), "x": (0.1, 0.2, 0.6), "y": (1.0, 1.0, 1.0)}
    rng = np.random.default_rng(2)
    samples = {
        key: {"ttft_p90": LogSample(float(np.log1p(tax) + rng.normal(0, 0.001)), 100)}
        for name, taxes in costs.items()
        for block in range(3)
        for rate, tax in zip((1, 2, 4), taxes, strict=True)
        if (key := CellKey(name, block, "A", f"r{rate}")) not in lost
    }
    cells = [{"cell": f"r{rate}", "rate_rps": float(rate)} for rate in (1, 2, 4)]
    return table_of(samples, 3, overloads, cells)


def test_tax_over_all_rates_excludes_saturated_rates() -> None:
    where = ("x", "A", ALL_RATES, "ttft_p90")
    every = known(over_rates({}).tax(*where))
    assert every.point == pytest.approx((1.1 * 1.2 * 1.6) ** (1 / 3) - 1, abs=0.01)
    table = over_rates({CellKey("plain_2", 1, "A", "r4"): (False, 3)})
    low = known(table.tax(*where))
    assert low.point == pytest.approx((1.1 * 1.2) ** 0.5 - 1, abs=0.01)
    assert (table.rates, low.mark, low.n_blocks) == (["r1", "r2"], "", 3)
    levels = table.at(*where[1:]).levels("x")
    assert (levels["n_base"], levels["n"]) == (1200, 600)


def test_configuration_saturated_at_the_lowest_rate_is_marked_and_excludes_no_rate() -> None:
    table = over_rates({CellKey("y", 0, "A", f"r{rate}"): (True, 0) for rate in (1, 2, 4)})
    taxes = {name: table.tax(name, "A", ALL_RATES, "ttft_p90") for name in ("x", "y")}
    assert table.rates == ["r1", "r2", "r4"]
    assert {name: tax.mark for name, tax in taxes.items() if tax} == {"x": "", "y": "y saturated"}


def test_launch_without_one_of_the_rates_is_excluded_from_their_mean() -> None:
    table = over_rates({}, (CellKey("x", 1, "A", "r2"),))
    tax = known(table.tax("x", "A", ALL_RATES, "ttft_p90"))
    assert tax.blocks == (0, 2)
    missing = table.missing_blocks("x", "A", ALL_RATES, "ttft_p90")
    assert missing == [("missing", 1, "the launch is not part of the design")]

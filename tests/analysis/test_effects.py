"""Taxes and their combinations: the wider of block model and bootstrap, its coverage, verdicts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import t as student

from connector_tax.analysis.block_model import Estimate
from connector_tax.analysis.effects import (
    Effect,
    Overload,
    TaxTable,
    WeightedTax,
    adjusted_p,
    blocks_needed,
    verdict,
)
from connector_tax.analysis.measure import Requests
from connector_tax.analysis.multiplicity import dunnett_p
from connector_tax.analysis.samples import LogSample, sample_launch
from connector_tax.artifacts.names import INCONCLUSIVE, MARKED, NO_TAX, POINT_ESTIMATE, TAX, CellKey
from connector_tax.artifacts.study_file import Study

RESAMPLES = 400
LONG = pytest.mark.long
WHERE = ("A", "r1", "ttft_p90")


def requests_of(ttft_ms: np.ndarray) -> Requests:
    """Requests of one output token, evenly spaced over a minute, with the given TTFT."""
    n = len(ttft_ms)
    at_s = np.arange(n) * 60 / n
    return Requests(ttft_ms, ttft_ms, np.empty(0), 2 * ttft_ms, at_s, 60.0, n, 0, 0)


def table_of(
    samples: dict[CellKey, dict[str, LogSample]],
    blocks: int,
    overloads: dict[CellKey, Overload] | None = None,
) -> TaxTable:
    """A tax table straight from samples."""
    order = [{"config": key.config, "block": key.block} for key in samples]
    document: Any = {
        "blocks": blocks,
        "config": {"statistics": {"confidence": 0.95}},
        "configurations": [],
        "run_order": {"A": order},
    }
    return TaxTable(Study(Path(), document), [], samples, overloads or {})


def simulated(
    blocks: int,
    seed: int,
    taxes: dict[str, float],
    launch_sigma: float,
    cells: tuple[str, ...] = ("r1",),
) -> TaxTable:
    """The tax table of `drawn`."""
    return table_of(drawn(blocks, seed, taxes, launch_sigma, cells), blocks)


def drawn(
    blocks: int,
    seed: int,
    taxes: dict[str, float],
    launch_sigma: float,
    cells: tuple[str, ...],
    n: int = 120,
) -> dict[CellKey, dict[str, LogSample]]:
    """Lognormal launches of plain (twice a block) and of configurations of known tax."""
    rng = np.random.default_rng([blocks, seed])
    samples = {}
    for config, tax in {"plain": 0.0, "plain_2": 0.0, **taxes}.items():
        for block in range(blocks):
            for cell in cells:
                noise = rng.normal(0, launch_sigma) + 0.15 * rng.normal(size=n)
                key = CellKey(config, block, "A", cell)
                ttft = requests_of(50 * (1 + tax) * np.exp(noise))
                samples[key] = sample_launch(ttft, RESAMPLES, 2.0, seed, key)
    return samples


@pytest.mark.parametrize("zeros", [45, 60, 0])
def test_a_percentile_that_may_be_zero_is_no_number(zeros: int) -> None:
    """The median is 0, or is in resamples that hold the first requests more than once."""
    n = 100
    tpot = np.where(np.arange(n) < zeros, 0.0, 5.0 + np.arange(n) / n)
    requests = replace(requests_of(50.0 + np.arange(n)), tpot_ms=tpot)
    samples = sample_launch(requests, RESAMPLES, 2.0, 1, CellKey("plain", 0, "A", "r1"))
    known = {"ttft_p50", "ttft_p90", "tpot_p90", "e2e_p90"} | ({"tpot_p50"} if not zeros else set())
    assert set(samples) == known
    assert all(np.isfinite(sample.replicates).all() for sample in samples.values())


def agreeing(
    points: dict[str, list[float]], noise: float, overloads: dict[CellKey, Overload] | None = None
) -> TaxTable:
    """Launches of given logs by block, each with replicates of a given standard deviation."""
    rng = np.random.default_rng(0)
    samples = {
        CellKey(name, block, "A", "r1"): {
            "ttft_p90": LogSample(value, value + rng.normal(0, noise, RESAMPLES), 100)
        }
        for name, values in points.items()
        for block, value in enumerate(values)
    }
    return table_of(samples, max(map(len, points.values())), overloads)


def taxed(table: TaxTable, config: str) -> Effect:
    effect = table.tax(config, *WHERE)
    assert effect is not None
    return effect


def test_launches_that_happen_to_agree_have_the_bootstraps_interval() -> None:
    values = {"plain": [0.0] * 3, "plain_2": [0.0] * 3, "x": [0.2] * 3, "y": [0.1] * 3}
    effect = taxed(agreeing(values, 0.03), "x")
    assert effect.method == "within-launch bootstrap"
    assert effect.point == pytest.approx(np.expm1(0.2))
    # Of three differences of one launch and the mean of two, each of sd 0.03.
    error = 0.03 * np.sqrt(1.5 / 3)
    assert effect.hi == pytest.approx(np.expm1(0.2 + 1.96 * error), rel=0.03)
    assert effect.p == effect.within_p


def test_launches_that_differ_have_the_block_models_interval() -> None:
    rng = np.random.default_rng(4)
    values = {name: list(rng.normal(0, 0.05, 3)) for name in ("plain", "plain_2", "x", "y", "z")}
    effect = taxed(agreeing(values, 1e-4), "x")
    d = np.array(values["x"]) - (np.array(values["plain"]) + values["plain_2"]) / 2
    assert effect.method == "block model (df 9)"
    assert effect.point == pytest.approx(np.expm1(d.mean()))
    error = effect.estimate.error
    assert error is not None
    assert effect.lo == pytest.approx(np.expm1(d.mean() - student.ppf(0.975, 9) * error))


def test_a_configuration_with_a_spread_of_its_own_says_so() -> None:
    rng = np.random.default_rng(5)
    values = {n: list(rng.normal(0, 0.01, 3)) for n in ("plain", "plain_2", "b", "c", "d", "e")}
    effect = taxed(agreeing({**values, "x": [-0.4, 0.1, 0.5]}, 1e-4), "x")
    assert effect.method.startswith("own spread (df 2.0; spread F ")
    assert effect.method.endswith(", p 0.000)")
    assert taxed(agreeing({**values, "x": [-0.4, 0.1, 0.5]}, 1e-4), "b").hi < 0.1


def test_one_block_has_a_point_and_no_interval() -> None:
    effect = taxed(simulated(1, 3, {"x": 0.2, "y": 0.1}, 0.01), "x")
    assert (effect.method, effect.p) == ("one launch; launches not included", None)
    assert (effect.ends, effect.df, effect.within_p) == ((None, None), None, None)
    assert effect.point == pytest.approx(0.2, abs=0.1)


def test_two_blocks_have_an_interval_and_no_verdict() -> None:
    effect = taxed(simulated(2, 3, {"x": 0.5, "y": 0.1}, 0.001), "x")
    assert effect.lo > 0
    assert verdict(effect, adjusted_p(effect, [effect.estimate]), 0.03) == POINT_ESTIMATE


def test_the_tax_of_plains_last_launch_is_against_the_others() -> None:
    values = {"plain": [0.0, 1.0, 2.0], "plain_2": [0.1, 1.2, 2.1], "x": [0.5, 1.5, 2.5]}
    table = agreeing(values, 1e-4)
    assert taxed(table, "plain_2").point == pytest.approx(np.expm1(0.4 / 3))
    assert taxed(table, "x").point == pytest.approx(np.expm1(0.5 - 0.2 / 3))
    plain_ms, config_ms, n_plain, n_config = table.levels_ms("x", *WHERE)
    assert config_ms / plain_ms - 1 == pytest.approx(taxed(table, "x").point)
    assert (n_config, n_plain) == (300, 600)


@pytest.mark.parametrize(
    ("blocks", "launch_sigma"),
    [pytest.param(*case, marks=LONG) for case in ((3, 0.01), (5, 0.01), (5, 0.05))],
)
def test_coverage_and_false_positives(blocks: int, launch_sigma: float) -> None:
    studies, covered, false = 200, 0, 0
    for seed in range(studies):
        table = simulated(blocks, seed, {"x": 0.2, "y": 0.1, "z": 0.0}, launch_sigma)
        tax, noise = taxed(table, "x"), taxed(table, "plain_2")
        covered += tax.lo <= 0.2 <= tax.hi
        assert noise.p is not None
        false += noise.p < 0.05
    # 200 studies at 95%: three standard errors are 4.6 points.
    assert 0.90 <= covered / studies <= 0.995
    assert false / studies <= 0.10


@pytest.mark.long
@pytest.mark.parametrize("blocks", [3, 5, 8])
@pytest.mark.parametrize("launch_sigma", [0.0, 0.01, 0.05])
def test_coverage_over_many_studies(blocks: int, launch_sigma: float) -> None:
    studies, covered = 1000, 0
    taxes = {"x": 0.2, "y": 0.1, "z": 0.0}
    for seed in range(studies):
        tax = taxed(simulated(blocks, seed, taxes, launch_sigma), "x")
        covered += tax.lo <= 0.2 <= tax.hi
    # Where requests alone make the noise (0.024 of a launch's p90), block model and bootstrap
    # estimate the same spread, and the wider of the two covers more than either.
    most = 0.98 if launch_sigma > 0.024 else 0.995
    assert 0.93 <= covered / studies <= most


def test_a_combination_cancels_what_its_terms_share() -> None:
    table = simulated(4, 1, {"x": 0.3, "y": 0.2}, 0.01)
    terms = [WeightedTax(1, "x", *WHERE), WeightedTax(-1, "y", *WHERE)]
    gap = table.combination(terms)
    assert gap is not None
    assert gap.point == pytest.approx(taxed(table, "x").point - taxed(table, "y").point)
    zero = table.combination([terms[0], WeightedTax(-1, *terms[0][1:])])
    assert zero is not None
    assert (zero.point, zero.lo, zero.hi) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("across", ["configurations", pytest.param("cells", marks=LONG)])
def test_combinations_cover_their_truth(across: str) -> None:
    studies, covered, widths = 150, 0, []
    for seed in range(studies):
        table = simulated(3, seed, {"x": 0.3, "y": 0.1, "z": 0.0}, 0.02, ("r1", "r2"))
        first = WeightedTax(1, "x", "A", "r1", "ttft_p90")
        other = first._replace(weight=-1, cell="r2") if across == "cells" else None
        gap = table.combination([first, other or WeightedTax(-1, "y", *WHERE)])
        assert gap is not None
        truth = 0.0 if across == "cells" else 0.2
        covered += gap.lo <= truth <= gap.hi
        widths.append(gap.hi - gap.lo)
    # Three standard errors at 95% are 5.3 points.
    assert 0.89 <= covered / studies <= 0.995
    assert np.median(widths) < 0.25


def test_a_combination_over_cells_uses_the_launches_that_have_them_all() -> None:
    samples = drawn(3, 3, {"x": 0.3, "y": 0.1, "z": 0.0}, 0.02, ("r1", "r2"))
    table = table_of(samples, 3)
    terms = [WeightedTax(w, "x", "A", cell, "ttft_p90") for w, cell in ((1, "r2"), (-1, "r1"))]
    whole = table.combination(terms)
    del samples[CellKey("plain_2", 1, "A", "r2")]
    fewer = table_of(samples, 3).combination(terms)
    assert whole is not None
    assert fewer is not None
    assert fewer.n_blocks == 3
    assert fewer.estimate.df == whole.estimate.df - 1
    del samples[CellKey("plain", 1, "A", "r1")]
    two = table_of(samples, 3).combination(terms)
    assert two is not None
    assert two.n_blocks == 2


def test_several_configurations_in_several_cells_are_refused() -> None:
    table = simulated(2, 1, {"x": 0.3, "y": 0.2}, 0.01, ("r1", "r2"))
    mixed = [WeightedTax(1, "x", "A", "r1", "ttft_p90"), WeightedTax(1, "y", "A", "r2", "ttft_p90")]
    with pytest.raises(ValueError, match="one configuration, or in one cell"):
        table.combination(mixed)


def test_marks_name_who_was_saturated_or_dropped_arrivals() -> None:
    values = {"plain": [0.0] * 3, "plain_2": [0.0] * 3, "x": [0.2] * 3, "y": [0.1] * 3}
    overloads = {
        CellKey("x", 1, "A", "r1"): Overload(True, 0),
        CellKey("plain_2", 2, "A", "r1"): Overload(False, 65),
        CellKey("y", 0, "A", "r9"): Overload(True, 0),
    }
    table = agreeing(values, 0.01, overloads)
    assert taxed(table, "x").mark == "x saturated; plain dropped 65 arrivals"
    assert taxed(table, "y").mark == "plain dropped 65 arrivals"
    assert taxed(table, "plain_2").mark == "plain dropped 65 arrivals"
    gap = table.combination([WeightedTax(1, "x", *WHERE), WeightedTax(-1, "y", *WHERE)])
    assert gap is not None
    assert gap.mark == "x saturated; plain dropped 65 arrivals"


def effect_of(
    point: float, lo: float | None, hi: float | None, blocks: int, text: str = ""
) -> Effect:
    estimate = Estimate(point, None, 0, tuple(range(blocks)))
    ends = (-np.inf if lo is None else lo, np.inf if hi is None else hi)
    return Effect(point, *ends, "", None, None, estimate, 8, 0.95, text)


@pytest.mark.parametrize(
    ("point", "lo", "hi", "p", "n", "expected"),
    [
        (0.2, 0.15, 0.25, 0.001, 3, TAX),
        (0.01, 0.005, 0.015, 0.001, 3, NO_TAX),
        (0.0, -0.02, 0.02, 0.9, 3, NO_TAX),
        (0.02, -0.02, 0.06, 0.3, 3, INCONCLUSIVE),
        (0.05, 0.001, 0.10, 0.2, 3, INCONCLUSIVE),
        (-0.2, -0.25, -0.15, 0.001, 3, INCONCLUSIVE),
        (0.2, 0.15, 0.25, 0.001, 2, POINT_ESTIMATE),
        (0.2, None, None, None, 1, POINT_ESTIMATE),
    ],
)
def test_verdicts(
    point: float, lo: float | None, hi: float | None, p: float | None, n: int, expected: str
) -> None:
    assert verdict(effect_of(point, lo, hi, n), p, 0.03) == expected
    assert verdict(effect_of(point, lo, hi, n, "x saturated"), p, 0.03) == MARKED


def test_the_bootstraps_p_is_adjusted_for_the_number_of_comparisons() -> None:
    values = {"plain": [0.0] * 3, "plain_2": [0.0] * 3, "x": [0.2] * 3, "y": [0.1] * 3}
    effect = taxed(agreeing(values, 0.03), "x")
    within = effect.within_p
    assert within is not None
    assert adjusted_p(effect, [effect.estimate] * 7) == pytest.approx(1 - (1 - within) ** 7)


def undecided(point: float, error: float, df: int = 17) -> Effect:
    estimate = Estimate(point, error, df, (0, 1, 2), 1 / 3)
    return Effect(point, -1, 1, "", 0.2, 0.001, estimate, 8, 0.95)


def test_the_blocks_needed_are_the_first_that_decide() -> None:
    effect = undecided(0.05, 0.03)
    family = [effect.estimate] * 7
    needed = blocks_needed(effect, family, 0.03)
    assert needed is not None

    def decided(blocks: int) -> bool:
        later = effect.estimate.with_blocks(effect.added_df, blocks)
        half = later.half_width(0.95)
        assert half is not None
        return dunnett_p(later, family) < 0.05 and later.point > half

    assert [decided(b) for b in range(4, needed + 3)] == [False] * (needed - 4) + [True] * 3
    later = effect.estimate.with_blocks(effect.added_df, 12)
    assert later.error == pytest.approx(0.03 / 2)
    assert later.df == 17 + 9 * 8


def test_a_tax_inside_the_margin_needs_the_blocks_that_show_it() -> None:
    effect = undecided(0.0, 0.03)
    needed = blocks_needed(effect, [effect.estimate] * 7, 0.03)
    assert needed is not None
    widths = [
        effect.estimate.with_blocks(effect.added_df, b).half_width(0.95) or 0.0
        for b in (needed - 1, needed)
    ]
    assert np.expm1(widths[0]) >= 0.03 > np.expm1(widths[1])


@pytest.mark.parametrize("point", [-0.3, 0.031])
def test_what_a_hundred_blocks_do_not_decide_has_no_number(point: float) -> None:
    effect = undecided(point, 0.2)
    assert blocks_needed(effect, [effect.estimate], 0.03) is None

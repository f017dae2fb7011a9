"""The bootstrap against its definition, and the coverage of the interval it leads to."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector_tax.analysis.bootstrap import (
    MAX_CHUNKS,
    Interval,
    block_draws,
    chunk_counts,
    chunk_labels,
    hierarchical_mean,
    holm,
    interval,
    resampled_percentiles,
)
from connector_tax.analysis.effects import Effect, TaxTable, Term, sample_launch
from connector_tax.analysis.ingest import CellKey, Study
from connector_tax.analysis.measure import Requests
from connector_tax.analysis.taxes import INCONCLUSIVE, NO_TAX, POINT_ESTIMATE, TAX, verdict

STATISTICS = {"confidence": 0.95, "resamples": 400, "margin": 0.03, "chunk_s": 2.0}


def requests_of(ttft_ms: np.ndarray) -> Requests:
    """Requests evenly spaced over a minute with the given TTFT."""
    n = len(ttft_ms)
    at_s = np.arange(n) * 60 / n
    return Requests(ttft_ms, ttft_ms, ttft_ms / 10, 2 * ttft_ms, at_s, 60.0, n, 0, 0)


def table_of(launches: dict[CellKey, np.ndarray], blocks: int, seed: int) -> TaxTable:
    """A tax table straight from TTFT samples."""
    document = {"blocks": blocks, "seed": seed, "config": {"statistics": STATISTICS}}
    samples = {
        key: sample_launch(requests_of(ttft), STATISTICS, seed, key)
        for key, ttft in launches.items()
    }
    return TaxTable(Study(Path(), document), [], samples)


def simulated(
    blocks: int, seed: int, taxes: dict[str, float], launch_sigma: float, n: int = 120
) -> TaxTable:
    """Lognormal launches: TTFT is exactly (1 + tax) times plain's in distribution."""
    rng = np.random.default_rng([blocks, seed])
    launches = {
        CellKey(config, block, "A", "r1"): 50
        * (1 + tax)
        * np.exp(rng.normal(0, launch_sigma) + 0.15 * rng.normal(size=n))
        for config, tax in {"plain": 0.0, **taxes}.items()
        for block in range(blocks)
    }
    return table_of(launches, blocks, seed)


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=60),
    st.integers(1, 8),
    st.integers(0, 2**31),
)
@settings(max_examples=60)
def test_resampled_percentiles_equal_those_of_resamples_built_one_by_one(
    numbers: list[int], chunks: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    values = np.array(numbers, dtype=np.float64)
    labels = np.unique(rng.integers(0, chunks, len(values)), return_inverse=True)[1]
    counts = chunk_counts(int(labels.max()) + 1, 25, rng)
    found = resampled_percentiles(values, labels, counts, [50, 90, 99])
    for row, drawn in enumerate(counts):
        resample = np.repeat(values, drawn.astype(int)[labels])
        assert found[:, row] == pytest.approx(np.percentile(resample, [50, 90, 99]))


def test_chunks_are_contiguous_and_bounded() -> None:
    at_s = np.sort(np.random.default_rng(1).uniform(0, 600, 5000))
    labels = chunk_labels(at_s, 600.0, 1.0)
    assert labels.max() == MAX_CHUNKS - 1
    assert np.all(np.diff(labels) >= 0)
    assert chunk_labels(np.array([0.0, 0.4, 9.9]), 10.0, 0.5).tolist() == [0, 0, 1]


def test_within_launch_noise_is_counted_once() -> None:
    rng = np.random.default_rng(5)
    blocks, within = 5, 0.1
    draws = block_draws(blocks, 4000, rng)
    variances = []
    for _ in range(300):
        points = rng.normal(0, within, blocks)
        replicates = points[:, None] + rng.normal(0, within, (blocks, 4000))
        variances.append(hierarchical_mean(points, replicates, draws).var())
    assert np.mean(variances) == pytest.approx(within**2 / blocks, rel=0.07)


def test_the_wider_of_bootstrap_and_t_is_taken() -> None:
    narrow = np.linspace(0.19, 0.21, 1000)
    spread = interval(0.2, np.array([0.1, 0.2, 0.3]), narrow, 0.95)
    assert spread.method == "t on block values"
    assert spread.hi is not None
    assert spread.hi > 0.4
    alike = interval(0.2, np.array([0.2, 0.2, 0.2]), narrow, 0.95)
    assert alike.method == "hierarchical bootstrap"
    assert alike[:2] == pytest.approx((0.1905, 0.2095))
    alone = interval(0.2, np.array([0.2]), narrow, 0.95)
    assert (alone.method, alone.p) == ("within-launch bootstrap", None)


def test_one_chunk_in_one_launch_has_no_interval() -> None:
    found = interval(0.2, np.array([0.2]), np.full(400, 0.2), 0.95)
    assert (found.lo, found.hi, found.p) == (None, None, None)


@pytest.mark.parametrize(("blocks", "launch_sigma"), [(3, 0.01), (5, 0.01), (5, 0.05)])
def test_coverage_and_false_positives(blocks: int, launch_sigma: float) -> None:
    studies, covered, false = 200, 0, 0
    for seed in range(studies):
        table = simulated(blocks, seed, {"x": 0.2, "plain_last": 0.0}, launch_sigma)
        tax, noise = (table.tax(c, "A", "r1", "ttft_p90") for c in ("x", "plain_last"))
        assert tax is not None
        assert noise is not None
        covered += tax.lo <= 0.2 <= tax.hi
        assert noise.interval.p is not None
        false += noise.interval.p < 0.05
    # 200 studies at 95%: three standard errors are 4.6 points.
    assert 0.90 <= covered / studies <= 0.995
    assert false / studies <= 0.10


@pytest.mark.long
@pytest.mark.parametrize("blocks", [3, 5, 8])
@pytest.mark.parametrize("launch_sigma", [0.0, 0.01, 0.05])
def test_coverage_over_many_studies(blocks: int, launch_sigma: float) -> None:
    studies, covered = 1000, 0
    for seed in range(studies):
        tax = simulated(blocks, seed, {"x": 0.2}, launch_sigma).tax("x", "A", "r1", "ttft_p90")
        assert tax is not None
        covered += tax.lo <= 0.2 <= tax.hi
    assert 0.93 <= covered / studies <= 0.98


def test_a_combination_cancels_what_its_terms_share() -> None:
    table = simulated(4, 1, {"x": 0.3, "y": 0.2}, 0.01)
    terms = [Term(1, "x", "A", "r1", "ttft_p90"), Term(-1, "y", "A", "r1", "ttft_p90")]
    gap = table.combination(terms)
    taxes = [table.tax(config, "A", "r1", "ttft_p90") for config in ("x", "y")]
    assert gap is not None
    assert taxes[0] is not None
    assert taxes[1] is not None
    assert gap.point == pytest.approx(taxes[0].point - taxes[1].point)
    zero = table.combination([terms[0], Term(-1, *terms[0][1:])])
    assert zero is not None
    assert (zero.point, zero.lo, zero.hi) == (0.0, 0.0, 0.0)


def test_holm_against_its_definition() -> None:
    p = [0.01, 0.04, 0.03, 0.005]
    assert holm(p) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
    assert holm([0.9, 0.8]) == [1.0, 1.0]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_never_lowers_a_p_value_and_keeps_the_order(p: list[float]) -> None:
    adjusted = holm(p)
    assert all(a >= b for a, b in zip(adjusted, p, strict=True))
    order = np.argsort(p, kind="stable")
    assert np.all(np.diff(np.array(adjusted)[order]) >= 0)


@pytest.mark.parametrize(
    ("point", "lo", "hi", "p", "n", "expected"),
    [
        (0.2, 0.15, 0.25, 0.001, 3, TAX),
        (0.01, 0.005, 0.015, 0.001, 3, NO_TAX),
        (0.0, -0.02, 0.02, 0.9, 3, NO_TAX),
        (0.02, -0.02, 0.06, 0.3, 3, INCONCLUSIVE),
        (0.05, 0.001, 0.10, 0.2, 3, INCONCLUSIVE),
        (-0.2, -0.25, -0.15, 0.001, 3, INCONCLUSIVE),
        (0.2, 0.15, 0.25, None, 2, POINT_ESTIMATE),
        (0.2, None, None, None, 1, POINT_ESTIMATE),
    ],
)
def test_verdicts(
    point: float, lo: float | None, hi: float | None, p: float | None, n: int, expected: str
) -> None:
    effect = Effect(point, Interval(lo, hi, "", p), n)
    assert verdict(effect, p, 0.03, 0.95) == expected

"""The bootstrap against its definition, chunks at least as long as a request's life."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector_tax.analysis.bootstrap import (
    MAX_CHUNKS,
    bootstrap_p,
    chunk_counts,
    chunk_labels,
    resampled_percentiles,
)
from connector_tax.analysis.measure import Requests
from connector_tax.analysis.samples import chunk_seconds
from connector_tax.artifacts.names import CellKey


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
    percentiles = resampled_percentiles(values, labels, counts, [50, 90, 99])
    for row, drawn in enumerate(counts):
        resample = np.repeat(values, drawn.astype(int)[labels])
        assert percentiles[:, row] == pytest.approx(np.percentile(resample, [50, 90, 99]))


def test_chunks_are_contiguous_and_bounded() -> None:
    at_s = np.sort(np.random.default_rng(1).uniform(0, 600, 5000))
    labels = chunk_labels(at_s, 600.0, 1.0)
    assert labels.max() == MAX_CHUNKS - 1
    assert np.all(np.diff(labels) >= 0)
    assert chunk_labels(np.array([0.0, 0.4, 9.9]), 10.0, 0.5).tolist() == [0, 0, 1]


def lasting(e2e_ms: float, n: int = 11) -> Requests:
    """Requests of one life."""
    life, at_s = np.full(n, e2e_ms), np.arange(n) * 60 / n
    return Requests(life, life, life, life, at_s, 60.0, n, 0, 0)


def test_chunks_are_as_long_as_the_longest_median_life_of_a_cells_launches() -> None:
    requests = {
        CellKey("plain", 0, "A", "r1"): lasting(1500.0),
        CellKey("slow", 0, "A", "r1"): lasting(4000.0),
        CellKey("slow", 1, "A", "r1"): lasting(0.0, n=0),
        CellKey("plain", 0, "A", "r2"): lasting(900.0),
    }
    assert chunk_seconds(requests, 2.0) == {("A", "r1"): 4.0, ("A", "r2"): 2.0}


def test_the_bootstraps_p_is_twice_the_smaller_tail() -> None:
    replicates = np.concatenate([np.full(10, -1.0), np.full(989, 1.0)])
    assert bootstrap_p(replicates) == pytest.approx(2 * 11 / 1000)
    assert bootstrap_p(np.zeros(99)) == 1.0

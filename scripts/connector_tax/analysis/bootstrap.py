"""Within-launch bootstrap of percentiles: contiguous time-chunks of requests drawn again.

Sources: Carlstein (1986) and Kuensch (1989) on blocks of a dependent series; Kalibera & Jones
(ISMM'13) on resampling at the level at which a measurement is repeated. Launches are held fixed:
what differs between launches is the block model's part (`block_model`).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MAX_CHUNKS = 60

Floats = NDArray[np.float64]


def chunk_labels(since_warmup_s: Floats, window_s: float, chunk_s: float) -> NDArray[np.intp]:
    """The contiguous time-chunk of each request, numbered from 0 without gaps.

    Chunks last `chunk_s`, or longer when the window would hold more than MAX_CHUNKS of them.
    """
    length = max(chunk_s, window_s / MAX_CHUNKS)
    chunk = np.floor(since_warmup_s / length)
    labels: NDArray[np.intp] = np.unique(chunk, return_inverse=True)[1]
    return labels


def chunk_counts(n_chunks: int, resamples: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """(resamples, n_chunks): how often each chunk is drawn, n_chunks draws with replacement."""
    drawn = rng.multinomial(n_chunks, np.full(n_chunks, 1 / n_chunks), size=resamples)
    return drawn.astype(np.float32)


def resampled_percentiles(
    values: Floats, labels: NDArray[np.intp], counts: NDArray[np.float32], percents: Sequence[float]
) -> Floats:
    """Percentiles (numpy's `linear`) of every resample, without building the resamples.

    The values are sorted once; below[k, c] is how many of the k smallest lie in chunk c, so that
    counts[i] @ below[k] is the size of the k smallest in resample i, and each order statistic is
    found by bisection on k for all resamples at once.

    Args:
        values: (n,) the sample.
        labels: (n,) the chunk of each value.
        counts: (resamples, chunks) from `chunk_counts`.
        percents: the percentiles wanted, 0 to 100.

    Returns:
        (len(percents), resamples), in the unit of the values.
    """
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    below = np.zeros((len(values) + 1, counts.shape[1]), dtype=np.float32)
    below[np.arange(1, len(values) + 1), labels[order]] = 1
    np.cumsum(below, axis=0, out=below)
    sizes = counts @ below[-1]
    result = np.empty((len(percents), len(counts)))
    for row, percent in enumerate(percents):
        position = (sizes.astype(np.float64) - 1) * (percent / 100)
        rank = np.floor(position)
        low = ordered[_rank_index(below, counts, rank)]
        high = ordered[_rank_index(below, counts, np.minimum(rank + 1, sizes - 1))]
        result[row] = low + (high - low) * (position - rank)
    return result


def _rank_index(
    below: NDArray[np.float32], counts: NDArray[np.float32], rank: Floats
) -> NDArray[np.intp]:
    """For each resample, the index of the sorted value that holds 0-based `rank`."""
    low = np.zeros(len(counts), dtype=np.intp)
    high = np.full(len(counts), len(below) - 1, dtype=np.intp)
    for _ in range(len(below).bit_length()):
        middle = (low + high) // 2
        enough = np.einsum("rc,rc->r", counts, below[middle]) > rank
        high = np.where(enough, middle, high)
        low = np.where(enough, low, middle + 1)
    return high - 1


def bootstrap_p(replicates: Floats) -> float:
    """Two-sided p-value of "the effect is zero" from the effect's resamples."""
    smaller = min(int(np.sum(replicates <= 0)), int(np.sum(replicates >= 0)))
    return min(1.0, 2 * (smaller + 1) / (len(replicates) + 1))

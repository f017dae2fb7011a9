"""Hierarchical bootstrap of percentiles, and the interval printed for an effect.

Sources: Kalibera & Jones (ISMM'13) on resampling at every level at which a measurement is
repeated; Carlstein (1986) and Kuensch (1989) on blocks of a dependent series; Student's t on per-
block values. Two levels: server launches (blocks), and contiguous time-chunks of requests within a
launch.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student

MAX_CHUNKS = 60
MIN_BLOCKS_FOR_VERDICT = 3

Floats = NDArray[np.float64]


class Interval(NamedTuple):
    """An interval, how it was made, and the two-sided p-value that goes with it.

    `p` is None with fewer than three blocks: launches are the unit of replication.
    """

    lo: float | None
    hi: float | None
    method: str
    p: float | None


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


def block_draws(n_blocks: int, resamples: int, rng: np.random.Generator) -> NDArray[np.intp]:
    """(resamples, n_blocks): the blocks of each resample, drawn with replacement."""
    return rng.integers(0, n_blocks, size=(resamples, n_blocks))


def hierarchical_mean(points: Floats, replicates: Floats, draws: NDArray[np.intp]) -> Floats:
    """The mean over drawn blocks of a number each block estimates, with its within-launch noise.

    Each block's estimate already holds its within-launch noise; drawing blocks and drawing requests
    would count that noise twice, and the interval would cover about 99% instead of 95%. The
    within-launch deviations are therefore divided by sqrt(blocks): without variation between
    launches the variance of the mean is then the true one, with it the block draws dominate.

    Args:
        points: (blocks,) the estimates.
        replicates: (blocks, resamples) their within-launch replicates.
        draws: (resamples, blocks) from `block_draws`.

    Returns:
        (resamples,). A block drawn twice in a resample contributes two different replicates: each
        slot reads the replicates at its own offset.
    """
    blocks, resamples = replicates.shape
    deviations = (replicates - points[:, None]) / np.sqrt(blocks)
    rows = np.arange(resamples)
    total = np.zeros(resamples)
    for slot in range(blocks):
        shifted = (rows + slot * (resamples // blocks)) % resamples
        drawn = draws[:, slot]
        total += points[drawn] + deviations[drawn, shifted]
    mean: Floats = total / blocks
    return mean


def interval(point: float, per_block: Floats, replicates: Floats, confidence: float) -> Interval:
    """The wider of the bootstrap interval and Student's t on per-block values; H0: effect is 0.

    Args:
        point: the estimate the t interval is centred on.
        per_block: (blocks,) the effect in each block.
        replicates: (resamples,) `hierarchical_mean` of the effect.
        confidence: e.g. 0.95.
    """
    tail = (1 - confidence) / 2
    n = len(per_block)
    if n == 1 and np.ptp(replicates) == 0 and replicates.size > 1:
        return Interval(None, None, "none: one time-chunk in one launch", None)
    lo, hi = (float(q) for q in np.quantile(replicates, [tail, 1 - tail]))
    if n == 1:
        return Interval(lo, hi, "within-launch bootstrap", None)
    error = float(np.std(per_block, ddof=1)) / np.sqrt(n)
    half = float(student.ppf(1 - tail, n - 1)) * error
    method = "hierarchical bootstrap"
    if 2 * half > hi - lo:
        lo, hi, method = point - half, point + half, "t on block values"
    p = None
    if n >= MIN_BLOCKS_FOR_VERDICT:
        p = max(_bootstrap_p(replicates), _t_p(point, error, n))
    return Interval(lo, hi, method, p)


def _bootstrap_p(replicates: Floats) -> float:
    smaller = min(int(np.sum(replicates <= 0)), int(np.sum(replicates >= 0)))
    return min(1.0, 2 * (smaller + 1) / (len(replicates) + 1))


def _t_p(point: float, error: float, n: int) -> float:
    if error == 0:
        return 1.0 if point == 0 else 0.0
    return float(2 * student.sf(abs(point) / error, n - 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's (1979) step-down adjustment of a family of p-values, in their order."""
    order = np.argsort(p_values, kind="stable")
    adjusted = [0.0] * len(p_values)
    running = 0.0
    for rank, position in enumerate(order):
        running = max(running, (len(p_values) - rank) * p_values[position])
        adjusted[position] = min(1.0, running)
    return adjusted

"""The percentiles that taxes are made of, one launch's cell at a time, with their resamples.

Source: docs/method.md, "The error model".
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from connector_tax.analysis.bootstrap import (
    Floats,
    chunk_counts,
    chunk_labels,
    resampled_percentiles,
)
from connector_tax.analysis.measure import Requests
from connector_tax.artifacts.metrics import LATENCY_METRICS, METRICS
from connector_tax.artifacts.names import CellKey
from connector_tax.seeds import named_generator

Where = tuple[str, str]  # phase, cell


class LogSample(NamedTuple):
    """One percentile (ms) of one launch's cell: its log, its resamples' logs, the sample size."""

    point: float
    replicates: Floats
    n: int


def chunk_seconds(requests: Mapping[CellKey, Requests], chunk_s: float) -> dict[Where, float]:
    """(phase, cell) to the length of its time-chunks: `chunk_s`, or a request's life if longer.

    That life is the median time from arrival to last token, the longest among the cell's launches:
    all launches of a cell have chunks of one length.
    """
    lengths: dict[Where, float] = {}
    for key, measured in requests.items():
        where = (key.phase, key.cell)
        life_s = float(np.median(measured.e2e_ms)) / 1e3 if measured.n else 0.0
        lengths[where] = max(lengths.get(where, chunk_s), life_s)
    return lengths


def sample_launch(
    requests: Requests, resamples: int, chunk_s: float, seed: int, key: CellKey
) -> dict[str, LogSample]:
    """Every metric of one valid cell with its within-launch resamples.

    All metrics share one draw of chunks, and so do the configurations of a block: they were sent
    the same arrivals (`study.cell.prepare`), and what a burst does to both cancels in their ratio.
    Windows of unequal length are drawn apart. Metrics without data (TPOT of one output token) are
    absent, and those of which a resample is 0, which has no ratio: TPOT, where all tokens of many
    requests came in one read.
    """
    if requests.n == 0:
        return {}
    labels = chunk_labels(requests.since_warmup_s, requests.window_s, chunk_s)
    rng = named_generator(f"{seed}/bootstrap/block{key.block}/{key.phase}/{key.cell}")
    counts = chunk_counts(int(labels.max()) + 1, resamples, rng)
    samples = {}
    for latency in dict.fromkeys(LATENCY_METRICS[metric].latency for metric in METRICS):
        values = getattr(requests, latency)
        if len(values) == 0:
            continue
        wanted = {
            m: LATENCY_METRICS[m].percent for m in METRICS if LATENCY_METRICS[m].latency == latency
        }
        drawn = resampled_percentiles(values, labels, counts, list(wanted.values()))
        for (metric, percent), replicates in zip(wanted.items(), drawn, strict=True):
            value = float(np.percentile(values, percent))
            if min(value, replicates.min()) > 0:
                samples[metric] = LogSample(np.log(value), np.log(replicates), len(values))
    return samples

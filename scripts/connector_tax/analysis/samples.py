"""The percentiles that taxes are made of, one launch's cell at a time, and over all rates.

Source: docs/method.md, "The error model".
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from connector_tax.analysis.block_model import LaunchId
from connector_tax.artifacts.metrics import LATENCY_METRICS, METRICS
from connector_tax.artifacts.names import configuration_of

if TYPE_CHECKING:
    from connector_tax.analysis.measure import Requests


class LogSample(NamedTuple):
    """One percentile (ms) of one launch's cell: its log, and the sample size."""

    point: float
    n: int


# Beside the metrics: how long the machine took for the watch's arithmetic.
COMPUTE = "compute_ns_p50"


def sample_launch(requests: "Requests") -> dict[str, LogSample]:
    """Every metric of one valid cell.

    Metrics without data (TPOT of one output token) are absent, and those that are 0, which has no
    ratio: TPOT, where all tokens of many requests came in one read.
    """
    samples = {}
    for metric in METRICS:
        values = getattr(requests, LATENCY_METRICS[metric].latency)
        value = float(np.percentile(values, LATENCY_METRICS[metric].percent)) if len(values) else 0
        if value > 0:
            samples[metric] = LogSample(float(np.log(value)), len(values))
    return samples


def unsaturated(cells: Sequence[str], saturated: Mapping[str, Collection[str]]) -> list[str]:
    """The cells of Phase A in which nothing was saturated, of all launches of all configurations.

    A configuration that is saturated at the lowest rate has no say, or one broken connector would
    leave no rate to anybody.

    Args:
        cells: from the lowest rate to the highest.
        saturated: cell to the configurations that were saturated, or dropped arrivals.
    """
    broken = set(saturated.get(cells[0], ()))
    return [cell for cell in cells if not set(saturated.get(cell, ())) - broken]


def over_rates(
    logs: Mapping[LaunchId, Mapping[str, float]], cells: Sequence[str]
) -> dict[LaunchId, float]:
    """The mean log over these cells of each launch that has all of them."""
    return {
        launch: sum(of[cell] for cell in cells) / len(cells)
        for launch, of in logs.items()
        if cells and all(cell in of for cell in cells)
    }


def saturated_in(places: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    """Cell to the configurations that were overloaded there, of launch names and cells."""
    found: dict[str, set[str]] = {}
    for name, cell in places:
        found.setdefault(cell, set()).add(configuration_of(name))
    return found

"""The true tax of each configuration, with its Monte-Carlo error.

The tax of the analysis is exp(mean over launches of log(p_X / p_plain)) - 1, and its interval
speaks of the launches there could have been: each with its own offset and jitter, arrivals drawn
afresh, and a cell of the study's length. The true value is the same with the mean taken over all of
them; here over many virtual launches with the study's own warm-up and window. The percentile of a
short window is not that of a cell without end: the mean of a log percentile over windows of a few
seconds differs from the log of the long-run percentile, more so the more a tax adds to queueing.
That difference belongs to the design of the cell; no interval made from such cells can hold it, and
more launches do not lessen it. It is therefore not counted as missed coverage but shown beside it:
the same function with a long window gives the long-run tax.

Plain and the taxed configuration of a launch share arrivals, launch offset and jitter, which leaves
the expectation of the difference of logs unchanged and takes most of its noise away.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from connector_tax.artifacts.metrics import LATENCY_METRICS, METRICS
from connector_tax.artifacts.names import PLAIN
from connector_tax.calibration.design import RATE_RPS, SHAPE, CellTimes, engine_configs
from connector_tax.calibration.virtual import serve
from connector_tax.engine.config import EngineConfig
from connector_tax.loadgen import make_offsets
from connector_tax.seeds import named_generator

# By name and metric, a number of each launch.
Logs = dict[str, dict[str, list[float]]]


@dataclass(frozen=True)
class TrueTax:
    """A tax in fractions (0.1 is +10%) and the standard error of its Monte-Carlo estimate."""

    tax: float
    standard_error: float


def log_ratios(
    spread: str, arrivals: str, first: int, launches: int, cell: CellTimes, seed: int
) -> Logs:
    """By configuration and metric, each launch's log percentile minus plain's.

    Args:
        spread: of `design.SPREADS`.
        arrivals: fixed or poisson.
        first: number of the first launch.
        launches: virtual launches of each configuration from there on.
        cell: `warmup_s` and `floor_s` of each launch's cell, in s.
        seed: names the random streams; another seed is an independent estimate.
    """
    configs = engine_configs(spread)
    ratios: Logs = {config: {metric: [] for metric in METRICS} for config in configs}
    for launch in range(first, first + launches):
        name = f"{seed}/truth/{arrivals}/launch{launch}"
        offsets = make_offsets("fixed" if arrivals == "fixed" else "poisson", RATE_RPS,
                               cell["warmup_s"] + cell["floor_s"], f"{name}/arrivals")  # fmt: skip
        launch_seed = int(named_generator(f"{name}/offset").integers(2**31))
        measured = offsets >= round(cell["warmup_s"] * 1e9)
        logs = launch_logs(configs, launch_seed, offsets, measured)
        for config, by_metric in logs.items():
            for metric, log in by_metric.items():
                ratios[config][metric].append(log - logs[PLAIN][metric])
    return ratios


def launch_logs(
    configs: Mapping[str, EngineConfig],
    launch_seed: int,
    offsets: NDArray[np.int64],
    measured: NDArray[np.bool_],
) -> dict[str, dict[str, float]]:
    """By configuration and metric, the log percentile of one launch of each under one load.

    Args:
        configs: the engines.
        launch_seed: their offset and jitter, the same for all.
        offsets: (n,) arrivals in ns.
        measured: (n,) which of them count.
    """
    logs: dict[str, dict[str, float]] = {}
    for config, engine in configs.items():
        begun, ended = serve(engine, launch_seed, offsets.tolist(), SHAPE)
        values = {
            "ttft_ms": (begun - offsets)[measured],
            "tpot_ms": (ended - begun)[measured],
            "e2e_ms": (ended - offsets)[measured],
        }
        logs[config] = {
            metric: float(np.log(np.percentile(values[of.latency], of.percent)))
            for metric in METRICS
            for of in [LATENCY_METRICS[metric]]
        }
    return logs


def true_tax(ratios: Sequence[float]) -> TrueTax:
    """The tax of many launches' log ratios, at least two."""
    values = np.array(ratios)
    tax = float(np.expm1(values.mean()))
    return TrueTax(tax, (1 + tax) * float(np.std(values, ddof=1) / np.sqrt(len(values))))


def true_taxes(
    spread: str, arrivals: str, launches: int, cell: CellTimes, seed: int
) -> dict[tuple[str, str], TrueTax]:
    """(configuration, metric) to its true tax; arguments as `log_ratios` takes them."""
    return taxes_of(log_ratios(spread, arrivals, 0, launches, cell, seed))


def taxes_of(ratios: Logs) -> dict[tuple[str, str], TrueTax]:
    """(configuration, metric) to the true tax, of many launches' log ratios."""
    return {(c, m): true_tax(values) for c, by in ratios.items() for m, values in by.items()}

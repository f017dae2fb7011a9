"""Means over launches of a quantity that plain does not have, such as the time of a hook.

Source: docs/method.md, "Steps". There is no launch of plain to compare with, so the interval is of
the configuration's own launches, blocks included. How much launches differ is pooled over the
configurations relative to each one's mean: a hook of 0.6 us and one of 200 us differ alike in
proportion, and the interval is one of ratios, so that it stays above zero. What the configurations
of a block share is one draw for each block and not one for each launch, which the degrees of
freedom say (Satterthwaite, Biometrics Bulletin 2 (1946) 110).
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from scipy.stats import t as student

from connector_tax.analysis.block_model import LaunchId, Layout

POOLED, OWN = "pooled launches", "own launches"


class Level(NamedTuple):
    """A mean over launches, in the unit of the values, and its interval.

    Attributes:
        method: POOLED, or OWN where the configuration's spread is larger than the others' or no
            other has the quantity; None without an interval: in one block, or where all values are
            zero.
    """

    point: float
    lo: float | None
    hi: float | None
    method: str | None
    n_launches: int


def levels(
    values: Mapping[LaunchId, float], configuration_of: Mapping[str, str], confidence: float
) -> dict[str, Level]:
    """The mean of each configuration's launches, by configuration.

    Args:
        values: the quantity in each launch, 0 or more.
        configuration_of: the configuration each launch name is started with.
        confidence: of the intervals.
    """
    groups: dict[str, dict[LaunchId, float]] = {}
    for launch, value in values.items():
        groups.setdefault(configuration_of[launch.name], {})[launch] = value
    means = {name: float(np.mean(list(own.values()))) for name, own in groups.items()}
    relative = {
        launch: value / means[name] - 1
        for name, own in groups.items()
        if means[name] > 0
        for launch, value in own.items()
    }
    layout = Layout(relative, configuration_of)
    left_out = {name for name, test in layout.spreads.items() if test.left_out}
    pool = {
        launch: z for launch, z in relative.items() if configuration_of[launch.name] not in left_out
    }
    variance, df = pooled_variance(pool, configuration_of, layout)
    pooled = {configuration_of[launch.name] for launch in pool}
    by_name = {}
    for name, own in groups.items():
        halves: list[tuple[float, str]] = []
        if df > 0 and means[name] > 0:
            half = _half(variance, df, len(own), confidence)
            halves = [(half, OWN if pooled == {name} else POOLED)]
            test = layout.spreads.get(name)
            if test is not None and test.larger and len(own) > 1:
                spread = float(np.var([relative[launch] for launch in own], ddof=1))
                halves.append((_half(spread, len(own) - 1, len(own), confidence), OWN))
        if not halves:
            by_name[name] = Level(means[name], None, None, None, len(own))
            continue
        widest, method = max(halves)
        ratio = float(np.exp(widest))
        by_name[name] = Level(
            means[name], means[name] / ratio, means[name] * ratio, method, len(own)
        )
    return by_name


def pooled_variance(
    pool: Mapping[LaunchId, float], configuration_of: Mapping[str, str], layout: Layout
) -> tuple[float, float]:
    """Variance of a launch about its configuration's mean, and its degrees of freedom.

    The sum of squares about the configurations' means is that of the blocks plus the residual of
    the layout; (0.0, 0.0) without degrees of freedom.
    """
    df_within = len(pool) - len({configuration_of[launch.name] for launch in pool})
    if df_within < 1 or len({launch.block for launch in pool}) < 2:
        return 0.0, 0.0
    within = sum(z**2 for z in pool.values())
    residual_variance, df_residual = layout.pooled
    residual = residual_variance * df_residual
    shared, df_shared = max(0.0, within - residual), df_within - df_residual
    if within == 0:
        return 0.0, float(df_within)
    parts = ((residual, df_residual), (shared, df_shared))
    df = within**2 / sum(squares**2 / df for squares, df in parts if df > 0)
    return within / df_within, df


def _half(variance: float, df: float, launches: int, confidence: float) -> float:
    quantile = float(student.ppf((1 + confidence) / 2, df))
    return quantile * float(np.sqrt(variance / launches))

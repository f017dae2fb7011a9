"""Taxes of several devices a second time (docs/method.md, "Several devices").

Nothing is shared with connector_tax.analysis. Sources: Cochran, Biometrics 10 (1954) 101;
Satterthwaite, Biometrics Bulletin 2 (1946) 110.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from connector_tax.artifacts.names import configuration_of
from connector_tax.provenance.distributions import f_above
from connector_tax.provenance.layout import (
    OWN_P,
    Error,
    IntervalEstimate,
    Values,
    layout_of,
    plain_values,
    squared_weights,
)

FEWEST = 3  # devices that tell how much devices differ


def same_p(points: Sequence[float], errors: Sequence[Error]) -> float:
    """p of one number on all devices, of which each has measured it with its error."""
    variances = [error.variance for error in errors]
    if min(variances) == 0:
        return float(max(points) == min(points))
    weights = [1 / variance for variance in variances]
    mean = sum(w * x for w, x in zip(weights, points, strict=True)) / sum(weights)
    q = sum(w * (x - mean) ** 2 for w, x in zip(weights, points, strict=True))
    return f_above(q / (len(points) - 1), len(points) - 1, min(error.df for error in errors))


def device_contrasts(
    values: Values, devices: Mapping[int, str], baseline: str
) -> dict[tuple[str, int], float]:
    """(configuration, number of the device) to its mean contrast with the baseline there."""
    numbers = {name: n for n, name in enumerate(dict.fromkeys(devices.values()))}
    contrasts: dict[tuple[str, int], list[float]] = {}
    for name in dict.fromkeys(launch for launch, _ in values):
        if configuration_of(name) == baseline:
            continue
        for block, side in plain_values(values, name, baseline).items():
            contrast = values[name, block] - float(np.mean(side))
            contrasts.setdefault((name, numbers[devices[block]]), []).append(contrast)
    return {at: float(np.mean(of_blocks)) for at, of_blocks in contrasts.items()}


def device_error(
    contrasts: Mapping[tuple[str, int], float], weights: Mapping[str, float], share: float
) -> Error | None:
    """The error of a weighted sum of taxes, each a mean over devices; None: nothing repeats.

    Args:
        contrasts: of `device_contrasts`.
        weights: configuration to the weight of its tax.
        share: the sum over the devices of the squared shares of the tax's blocks.
    """
    by_name: dict[str, list[float]] = {}
    for (name, _), contrast in contrasts.items():
        by_name.setdefault(name, []).append(contrast)
    z = {at: value - float(np.mean(by_name[at[0]])) for at, value in contrasts.items()}
    layout = layout_of(z)
    pool = {at: value for at, value in z.items() if at[0] not in layout.unequal}
    df = len(pool) - len({name for name, _ in pool})
    total = sum(value**2 for value in pool.values())
    rest, df_rest = layout.residual(layout.unequal)
    pieces = ((rest, df_rest), (max(0.0, total - rest), df - df_rest))
    below = sum(squares**2 / f for squares, f in pieces if f > 0)
    parts, odd, together = [], [], []
    for name, weight in weights.items():
        test = layout.spreads.get(name)
        if test is None or test.p >= OWN_P:
            together.append(weight**2 * share)
            continue
        own = by_name[name]
        parts.append((weight**2 * share * float(np.var(own, ddof=1)), len(own) - 1.0))
        odd.append(test)
    if together:
        if df < 1:
            return None
        effective = total**2 / below if below > 0 else float(df)
        parts.append((sum(together) * total / df, effective))
    variance = math.fsum(v for v, _ in parts)
    under = sum(v**2 / d for v, d in parts)
    freedom = variance**2 / under if under > 0 else min(d for _, d in parts)
    return Error(variance, freedom, min(odd, key=lambda test: test.p, default=None))


def error_of(
    values: Values,
    devices: Mapping[int, str],
    baseline: str,
    weights: Mapping[str, float],
    plains: Mapping[int, int],
    *,
    over_devices: bool = True,
) -> Error | None:
    """The error of a contrast; None where nothing repeats.

    Args:
        values: of all launches.
        devices: of each block; empty where there is one.
        baseline: the configuration that the others are compared with.
        weights: launch name to its weight in each block of the contrast.
        plains: launches of the baseline in each of these blocks.
        over_devices: whether three or more devices are a draw of devices.
    """
    several = len({devices.get(block) for _, block in values})
    if over_devices and several >= FEWEST and configuration_of(next(iter(weights))) != baseline:
        on = [devices[block] for block in plains]
        share = sum((on.count(one) / len(on)) ** 2 for one in set(on))
        error = device_error(device_contrasts(values, devices, baseline), weights, share)
        return None if error is None else replace(error, devices=several)
    layout = layout_of(values, devices)
    if layout.pooled[1] == 0:
        return None
    return layout.error(squared_weights(weights, list(plains.values()), baseline))


def difference(
    values: Values, ours: str, confidence: float, baseline: str, devices: Mapping[int, str]
) -> IntervalEstimate | None:
    """A launch's mean over blocks minus the baseline's; None without a block that has both."""
    plains = plain_values(values, ours, baseline)
    if not plains:
        return None
    point = float(np.mean([values[ours, block] - np.mean(side) for block, side in plains.items()]))
    counts = {block: len(side) for block, side in plains.items()}
    error = error_of(values, devices, baseline, {ours: 1.0}, counts)
    if error is None or len({block for _, block in values}) < 2:
        return IntervalEstimate(point, None, None, None, None, len(plains))
    half = error.half_width(confidence)
    return IntervalEstimate(
        point, point - half, point + half, error.p(point), error.name, len(plains)
    )

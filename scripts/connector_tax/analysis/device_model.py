"""Taxes over several devices: whether they agree, and what they say of devices not measured.

A block lies on one device. The contrast of a device is the mean over its blocks, and independent of
the next device's.

Sources: docs/method.md, "Several devices"; Cochran, Biometrics 10 (1954) 101 (heterogeneity);
Satterthwaite, Biometrics Bulletin 2 (1946) 110.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy.stats import f as fisher

from connector_tax.analysis.block_model import OWN, POOLED, Estimate, LaunchId, Layout, Term
from connector_tax.analysis.levels import pooled_variance

# With two there is no telling how much devices differ.
DEVICES_FOR_VARIANCE = 3


class _Spread(NamedTuple):
    """Contrasts by configuration and device, about each one's mean, and their pooled variance."""

    about: Mapping[LaunchId, float]
    layout: Layout
    variance: float
    df: float


def same_p(estimates: Sequence[Estimate]) -> float | None:
    """p of one contrast on all of these devices; None without two, or without an error.

    Cochran's Q over its degrees of freedom. The error is one of finitely many launches, so that
    this is the F ratio of device and configuration's interaction in the block model.
    """
    errors = [estimate.error for estimate in estimates if estimate.error is not None]
    if len(errors) < max(2, len(estimates)):
        return None
    points = np.array([estimate.point for estimate in estimates])
    if min(errors) == 0:
        return float(np.ptp(points) == 0)
    weights = 1 / np.square(errors)
    q = float(weights @ np.square(points - np.average(points, weights=weights)))
    df = len(points) - 1
    return float(fisher.sf(q / df, df, min(estimate.df for estimate in estimates)))


def over_devices(layout: Layout, terms: Sequence[Term]) -> Estimate | None:
    """`layout.estimate`, whose error with three or more devices is that of devices.

    How much a contrast differs from device to device, launches included, is pooled over the
    configurations; one whose contrast differs more has a variance of its own. Several taxes count
    as independent: what they share, plain's launches, cancels in their differences. A/A keeps the
    launches' error, since nothing of a device is in it.
    """
    estimate = layout.estimate(terms)
    few = len(layout.devices) < DEVICES_FOR_VARIANCE
    if estimate is None or few or layout.is_aa(terms[0]):
        return estimate
    about, by_device, variance, df = _spread(layout, terms[0].base)
    on = [layout.device_of[block] for block in estimate.blocks]
    share = sum((count / len(on)) ** 2 for count in Counter(on).values())
    parts, larger, together = [], [], []
    for name, weight in _weights(terms).items():
        test = by_device.spreads.get(name)
        if test is not None and test.larger:
            own = [z for launch, z in about.items() if launch.name == name]
            parts.append((weight**2 * share * float(np.var(own, ddof=1)), len(own) - 1.0))
            larger.append(test)
        else:
            together.append(weight**2 * share)
    if together and not df:
        return replace(estimate, error=None, df=0)
    if together:
        parts.append((sum(together) * variance, df))
    total = sum(part for part, _ in parts)
    below = sum(part**2 / freedom for part, freedom in parts)
    return replace(
        estimate,
        error=float(np.sqrt(total)),
        df=total**2 / below if below else min(freedom for _, freedom in parts),
        method=OWN if larger else POOLED,
        correlation=0.0,
        spread=min(larger, key=lambda test: test.p, default=None),
        devices=len(layout.devices),
    )


@lru_cache(maxsize=16)
def _spread(layout: Layout, base: tuple[str, ...]) -> _Spread:
    about = _about_means(layout, base)
    names = {launch.name: launch.name for launch in about}
    by_device = Layout(about, names)
    kept = by_device.pooled_launches
    pool = {launch: z for launch, z in about.items() if launch.name in kept}
    return _Spread(about, by_device, *pooled_variance(pool, names, by_device))


def _about_means(layout: Layout, base: tuple[str, ...]) -> dict[LaunchId, float]:
    """The contrast of each configuration on each device, about the configuration's mean."""
    about: dict[LaunchId, float] = {}
    for name in layout.names:
        term = Term(1.0, name, base)
        if layout.is_aa(term):
            continue
        known = [
            (number, float(layout.per_block([term], blocks).mean()))
            for number, device in enumerate(layout.devices)
            if (blocks := layout.blocks([term], device))
        ]
        mean = float(np.mean([contrast for _, contrast in known])) if known else 0.0
        about |= {LaunchId(name, number): contrast - mean for number, contrast in known}
    return about


def _weights(terms: Sequence[Term]) -> Mapping[str, float]:
    weights: dict[str, float] = {}
    for weight, ours, _ in terms:
        weights[ours] = weights.get(ours, 0.0) + weight
    return weights

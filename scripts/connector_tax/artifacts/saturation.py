"""The rule of saturation, for a study's cells and for the load generator's rates.

Effective throughput charges a growing backlog to the window, so that requests served only after it
do not count as sustained. The criteria are in artifacts/metrics.py:CRITERIA.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from connector_tax.artifacts.metrics import CRITERIA, CellLoad, Sweep, criteria_of
from connector_tax.artifacts.names import configuration_of

DEFAULT_BOUNDS = {criterion.bound: criterion.default for criterion in CRITERIA.values()}
"""Defaults of the section `saturation`."""


TENTH, HALF = 10, 2
"""Compared parts of a window: tenths, or halves for a trace, whose bursts can fill tenths."""


def effective_rps(e2e_ms: NDArray[np.float64], window_s: float, parts: int = TENTH) -> float:
    """Return the successes over the window plus the backlog's growth (1/s).

    The backlog's growth is the median E2E of the window's last part minus the median E2E of its
    first part.

    Args:
        e2e_ms: E2E of the successes in order of arrival.
    """
    n = len(e2e_ms)
    if n == 0:
        return 0.0
    part = max(1, n // parts)
    growth_s = float(np.median(e2e_ms[-part:]) - np.median(e2e_ms[:part])) / 1e3
    return n / (window_s + max(0.0, growth_s))


@dataclass(frozen=True)
class Judgement:
    """The judgement of one launch at one rate: each criterion's value and whether it fired."""

    load: CellLoad
    values: Mapping[str, float | None]
    fired: Mapping[str, bool | None]

    @property
    def saturated(self) -> bool:
        """Return whether any criterion fired."""
        return any(fired is True for fired in self.fired.values())

    @property
    def names(self) -> str:
        """Return the criteria that fired, joined by semicolons."""
        return ";".join(name for name, fired in self.fired.items() if fired)


def judge(load: CellLoad, sweep: Sweep, bounds: Mapping[str, float]) -> Judgement:
    """Apply the criteria to a cell.

    Args:
        sweep: the same launch's valid Phase A cells; empty in other phases.
        bounds: the `saturation` section of the configuration.
    """
    criteria = criteria_of(bounds)
    values = {name: criterion.value(load, sweep) for name, criterion in criteria.items()}
    fired: dict[str, bool | None] = dict.fromkeys(criteria)
    for name, criterion in criteria.items():
        value, bound = values[name], bounds[criterion.bound]
        if value is not None:
            fired[name] = value > bound if criterion.above else value < bound
    return Judgement(load, values, fired)


def unsaturated(
    rates: Mapping[str, float | None], overloaded: Collection[tuple[str, str]]
) -> list[str]:
    """Return the Phase A cells without saturation in any launch, from low to high rate.

    A configuration that is saturated at the lowest rate is ignored, or one broken connector would
    leave no rate.

    Args:
        overloaded: (launch, cell) pairs that were saturated or dropped arrivals.
    """
    cells = sorted(rates, key=lambda cell: rates[cell] or 0.0)
    broken = {configuration_of(name) for name, cell in overloaded if cell in cells[:1]}
    hit = {cell for name, cell in overloaded if configuration_of(name) not in broken}
    return [cell for cell in cells if cell not in hit]

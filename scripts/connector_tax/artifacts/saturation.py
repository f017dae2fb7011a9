"""The rule of saturation, for a study's cells and for the rates of the load generator.

Effective throughput charges a growing backlog to the window, so that requests which are only served
after it do not count as kept up with. The criteria are artifacts/metrics.py:CRITERIA.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from connector_tax.artifacts.metrics import CRITERIA, CellLoad, Sweep, criteria_of

DEFAULT_BOUNDS = {criterion.bound: criterion.default for criterion in CRITERIA.values()}
"""The section `saturation` of a study that does not say otherwise."""


TENTH, HALF = 10, 2
"""Parts of a window that are compared: tenths; of a trace, whose bursts fill tenths, halves."""


def backlog_growth_s(e2e_ms: NDArray[np.float64], parts: int = TENTH) -> float | None:
    """Return the median E2E of the last part of the successes minus the first part's, in s.

    Args:
        e2e_ms: in order of arrival; without any the result is None.
        parts: of the window; the first and the last are compared.
    """
    n = len(e2e_ms)
    if n == 0:
        return None
    part = max(1, n // parts)
    return float(np.median(e2e_ms[-part:]) - np.median(e2e_ms[:part])) / 1e3


def effective_rps(e2e_ms: NDArray[np.float64], window_s: float, parts: int = TENTH) -> float:
    """Return the successes over the window plus the backlog's growth (1/s)."""
    growth = backlog_growth_s(e2e_ms, parts)
    return 0.0 if growth is None else len(e2e_ms) / (window_s + max(0.0, growth))


@dataclass(frozen=True)
class Judgement:
    """One launch at one rate: the value of each criterion, and whether it fired."""

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
    """Apply the criteria.

    Args:
        load: the cell at rate r.
        sweep: the same launch's cells of Phase A that are valid; none outside it.
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

"""Saturation of a configuration at a rate: the design's three criteria, any of them.

Source: docs/study.md, "Saturation and the reference rates". With several blocks each valid launch
is judged by itself; the configuration is saturated at a rate when at least half of its valid
launches are (a tie counts as saturated: a reference rate errs on the low side).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from connector_tax.analysis.measure import Requests
from connector_tax.artifacts.metrics import CRITERIA
from connector_tax.artifacts.stage_records import RateCriteria


@dataclass(frozen=True)
class CellLoad:
    """What saturation is judged from, in one valid cell."""

    throughput_ratio: float
    waiting_p50: float | None
    ttft_p90_ms: float
    backlog_by_quarter_s: list[float | None]


# Of a cell and, where it is valid, the same launch's cell at half the rate: the value of each
# criterion; None: not applicable.
VALUES: Mapping[str, Callable[[CellLoad, CellLoad | None], float | None]] = {
    "throughput_ratio": lambda load, _: load.throughput_ratio,
    "waiting": lambda load, _: load.waiting_p50,
    "ttft_ratio": lambda load, half: load.ttft_p90_ms / half.ttft_p90_ms if half else None,
}


@dataclass(frozen=True)
class Judgement:
    """One launch at one rate: the value of each criterion, and whether it fired."""

    load: CellLoad
    values: Mapping[str, float | None]
    fired: Mapping[str, bool | None]

    @property
    def saturated(self) -> bool:
        """Whether any criterion fired."""
        return any(fired is True for fired in self.fired.values())

    @property
    def names(self) -> str:
        """The criteria that fired, joined by semicolons."""
        return ";".join(name for name in CRITERIA if self.fired[name])


def load_of(requests: Requests, waiting: float | None) -> CellLoad | None:
    """The load figures of a cell; None when nothing succeeded in it."""
    ratio = requests.throughput_ratio
    ttft_ms = requests.ttft_ms
    if len(ttft_ms) == 0 or ratio is None:
        return None
    return CellLoad(
        ratio, waiting, float(np.percentile(ttft_ms, 90)), requests.backlog_by_quarter_s
    )


def judge(load: CellLoad, half_rate: CellLoad | None, bounds: Mapping[str, float]) -> Judgement:
    """Apply the criteria.

    Args:
        load: the cell at rate r.
        half_rate: the same launch's cell at r/2; None when the grid has none or it is not valid.
        bounds: the `saturation` section of the configuration.
    """
    values = {name: VALUES[name](load, half_rate) for name in CRITERIA}
    fired: dict[str, bool | None] = dict.fromkeys(CRITERIA)
    for name, criterion in CRITERIA.items():
        value, bound = values[name], criterion.bound_of(bounds)
        if value is not None:
            fired[name] = value > bound if criterion.above else value < bound
    return Judgement(load, values, fired)


def judge_sweep(
    loads: Mapping[float, CellLoad], bounds: Mapping[str, float]
) -> dict[float, Judgement]:
    """Judge every valid rate (1/s) of one launch's sweep."""
    return {rate: judge(load, loads.get(rate / 2), bounds) for rate, load in loads.items()}


def combine(judgements: Sequence[Judgement], bounds: Mapping[str, float]) -> RateCriteria:
    """One rate of one configuration over its valid launches: medians of the values, majorities.

    Returns:
        `saturated` with the criteria and the backlog, as reference_rates.json has it; `saturated`
        is None when no launch is valid.
    """
    quarters = [j.load.backlog_by_quarter_s for j in judgements]
    entry = {
        "saturated": _at_least_half([j.saturated for j in judgements]),
        "n_launches": len(judgements),
        "n_saturated": sum(j.saturated for j in judgements),
        **{
            name: {
                "value": _median_or_none([j.values[name] for j in judgements]),
                "bound": criterion.bound_of(bounds),
                "fired": _at_least_half(
                    [f for j in judgements if (f := j.fired[name]) is not None]
                ),
            }
            for name, criterion in CRITERIA.items()
        },
        "backlog_growth": [_median_or_none(column) for column in zip(*quarters, strict=True)],
    }
    return cast(RateCriteria, entry)


def _at_least_half(flags: Sequence[bool]) -> bool | None:
    return 2 * sum(flags) >= len(flags) if flags else None


def _median_or_none(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None

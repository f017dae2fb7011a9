"""Saturation of a configuration at a rate: the design's three criteria, any of them.

Source: docs/study.md, "Saturation and the reference rates". With several blocks each valid launch
is judged by itself; the configuration is saturated at a rate when at least half of its valid
launches are (a tie counts as saturated: a reference rate errs on the low side), and with several
devices when it is on one of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from connector_tax.analysis.measure import Requests
from connector_tax.artifacts.stage_records import CriterionRecord, RateCriteria
from connector_tax.artifacts.study_records import SaturationSection

Criterion = Literal["throughput_ratio", "waiting", "ttft_ratio"]
CRITERIA: tuple[Criterion, ...] = ("throughput_ratio", "waiting", "ttft_ratio")


@dataclass(frozen=True)
class CellLoad:
    """What saturation is judged from, in one valid cell."""

    throughput_ratio: float
    waiting_p50: float | None
    ttft_p90_ms: float
    backlog_by_quarter_s: list[float | None]


@dataclass(frozen=True)
class Judgement:
    """One launch at one rate; a ratio of None means r/2 has no valid cell: not applicable."""

    load: CellLoad
    ttft_ratio: float | None
    fired: dict[str, bool | None]

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
    ttft_ms = requests.everything.ttft_ms
    if len(ttft_ms) == 0 or ratio is None:
        return None
    return CellLoad(
        ratio, waiting, float(np.percentile(ttft_ms, 90)), requests.backlog_by_quarter_s
    )


def judge(load: CellLoad, half_rate: CellLoad | None, bounds: SaturationSection) -> Judgement:
    """Apply the three criteria.

    Args:
        load: the cell at rate r.
        half_rate: the same launch's cell at r/2; None when the grid has none or it is not valid.
        bounds: the `saturation` section of the configuration.
    """
    ratio = None if half_rate is None else load.ttft_p90_ms / half_rate.ttft_p90_ms
    return Judgement(
        load,
        ratio,
        {
            "throughput_ratio": load.throughput_ratio < bounds["throughput_ratio_min"],
            "waiting": None
            if load.waiting_p50 is None
            else load.waiting_p50 > bounds["waiting_p50_max"],
            "ttft_ratio": None if ratio is None else ratio > bounds["ttft_p90_ratio_max"],
        },
    )


def judge_sweep(
    loads: Mapping[float, CellLoad], bounds: SaturationSection
) -> dict[float, Judgement]:
    """Judge every valid rate (1/s) of one launch's sweep."""
    return {rate: judge(load, loads.get(rate / 2), bounds) for rate, load in loads.items()}


def combine(judgements: Sequence[Judgement], bounds: SaturationSection) -> RateCriteria:
    """One rate of one configuration over its valid launches: medians of the values, majorities.

    Returns:
        `saturated` with the three criteria and the backlog, as reference_rates.json has it;
        `saturated` is None when no launch is valid.
    """

    def criterion(name: str, values: Sequence[float | None], bound: float) -> CriterionRecord:
        fired = [f for j in judgements if (f := j.fired[name]) is not None]
        return {"value": _median_or_none(values), "bound": bound, "fired": _at_least_half(fired)}

    ratios = [j.load.throughput_ratio for j in judgements]
    waiting = [j.load.waiting_p50 for j in judgements]
    quarters = [j.load.backlog_by_quarter_s for j in judgements]
    return {
        "saturated": _at_least_half([j.saturated for j in judgements]),
        "n_launches": len(judgements),
        "n_saturated": sum(j.saturated for j in judgements),
        "throughput_ratio": criterion("throughput_ratio", ratios, bounds["throughput_ratio_min"]),
        "waiting": criterion("waiting", waiting, bounds["waiting_p50_max"]),
        "ttft_ratio": criterion(
            "ttft_ratio", [j.ttft_ratio for j in judgements], bounds["ttft_p90_ratio_max"]
        ),
        "backlog_growth": [_median_or_none(column) for column in zip(*quarters, strict=True)],
    }


def worst(devices: Sequence[Sequence[Judgement]], bounds: SaturationSection) -> RateCriteria:
    """`combine` over several devices, each with its own launches: the worst of them decides.

    Returns:
        as `combine`, values over all launches; saturated, or a criterion fired, where it is so on
        one device, and `saturated` None where it is on none and one has no valid launch.
    """
    entry = combine([judged for device in devices for judged in device], bounds)
    each = [combine(device, bounds) for device in devices]
    if len(each) < 2:
        return entry
    states = [own["saturated"] for own in each]
    entry["saturated"] = True if True in states else None if None in states else False
    for name in CRITERIA:
        if entry[name]["fired"] is not None:
            entry[name]["fired"] = any(own[name]["fired"] for own in each)
    return entry


def _at_least_half(flags: Sequence[bool]) -> bool | None:
    return 2 * sum(flags) >= len(flags) if flags else None


def _median_or_none(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None

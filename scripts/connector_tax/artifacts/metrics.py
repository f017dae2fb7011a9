"""The latency metrics and the criteria of saturation.

An entry of LATENCY_METRICS is a percentile in every table, in the report and in `compare`. With a
margin it is compared with the baseline's and judged; without one it is only in cells.csv. An entry
of THROUGHPUT_METRICS has a tax if `statistics.judged` names it. An entry of CRITERIA is a criterion
in `saturation`, reference_rates.json, tables and figures.
"""

from collections import ChainMap
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

# A percentile with fewer requests beyond it in a launch's cell gets no verdict.
BEYOND = 5
# How a launch's sample of each latency is named: of `analysis.measure.Requests`.
Latency = Literal["ttft_ms", "tpot_ms", "e2e_ms"]
# The latencies that `statistics.goodput` limits.
GOODPUT_LATENCIES = ("ttft", "tpot", "e2e")


def number(meaning: str, default: float | None, **limits: float) -> dict[str, Any]:
    """Return the JSON schema of a key that is a positive number."""
    schema = {"type": "number", "exclusiveMinimum": 0, "default": default}
    return {"description": meaning, **schema, **limits}


class Metric(NamedTuple):
    """A percentile of a latency, or a throughput; a lower throughput is a cost.

    Attributes:
        latency: the latency; for a throughput `ttft_ms`, which all of its requests have.
        percent: the percentile; 50 for a throughput, for the number of requests that it needs.
        margin: default margin, within which a tax counts as none; None if no tax is computed.
    """

    label: str
    latency: Latency
    percent: int
    margin: float | None = None
    unit: str = "ms"

    @property
    def least(self) -> int:
        """Return the sample size at which BEYOND requests lie beyond the percentile."""
        return -(-100 * BEYOND // (100 - self.percent))

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of the metric's margin."""
        schema = number(f"of a tax of {self.label}", self.margin, maximum=1)
        if self.unit != "ms":
            del schema["default"]
        return schema


LATENCY_METRICS = {
    "ttft_p90": Metric("TTFT p90", "ttft_ms", 90, 0.03),
    "tpot_p90": Metric("TPOT p90", "tpot_ms", 90, 0.03),
    "ttft_p50": Metric("TTFT p50", "ttft_ms", 50, 0.03),
    "tpot_p50": Metric("TPOT p50", "tpot_ms", 50, 0.03),
    "e2e_p90": Metric("E2E p90", "e2e_ms", 90, 0.03),
    "ttft_p99": Metric("TTFT p99", "ttft_ms", 99),
    "tpot_p99": Metric("TPOT p99", "tpot_ms", 99),
    "e2e_p50": Metric("E2E p50", "e2e_ms", 50),
    "e2e_p99": Metric("E2E p99", "e2e_ms", 99),
}
THROUGHPUT_METRICS = {
    "requests_per_s": Metric("requests/s", "ttft_ms", 50, 0.03, "requests/s"),
    "tokens_per_s": Metric("tokens/s", "ttft_ms", 50, 0.03, "tokens/s"),
    "goodput": Metric("goodput", "ttft_ms", 50, 0.03, "requests/s"),
}
ALL_METRICS = ChainMap(LATENCY_METRICS, THROUGHPUT_METRICS)
# Metrics with a tax in every study.
METRICS = tuple(name for name, metric in LATENCY_METRICS.items() if metric.margin is not None)
# Metrics whose tax over all rates is the study's verdict: medians, which need fewest launches.
VERDICT_METRICS = ("ttft_p50", "tpot_p50")
# Metrics of a closed loop.
CLOSED_LOOP_METRICS = ("requests_per_s", "tokens_per_s", *VERDICT_METRICS)
# Metrics in figures and in the report's tables at one rate.
HEADLINE = ("ttft_p90", "tpot_p90")
# Percentiles from here on need `statistics.p99_min_samples` successes.
FAR_TAIL = 99


def judged_metrics(statistics: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the metrics whose tax over all rates is judged; by default the medians."""
    return tuple(statistics.get("judged", VERDICT_METRICS))


def taxed_metrics(statistics: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the metrics with a tax in a study: METRICS and the throughputs that it judges."""
    judged = judged_metrics(statistics)
    return (*METRICS, *(metric for metric in judged if metric in THROUGHPUT_METRICS))


def word_of(metric: str) -> str:
    """Return a metric's short name, such as TTFT p90; the median is just TTFT."""
    return ALL_METRICS[metric].label.removesuffix(" p50")


def change_of(metric: str, tax: float) -> float:
    """Return the relative change of a metric from its tax; a throughput falls with a tax.

    Args:
        tax: a fraction; for a throughput baseline / configuration - 1.
    """
    return 1 / (1 + tax) - 1 if metric in THROUGHPUT_METRICS else tax


def margin_of(margins: Mapping[str, float], metric: str) -> float:
    """Return the margin of a metric: from `statistics.margins`, or its default."""
    margin = ALL_METRICS[metric].margin
    assert margin is not None
    return margins.get(metric, margin)


class CellLoad(NamedTuple):
    """The load of one valid cell, from which saturation is judged; percentiles are
    LATENCY_METRICS.
    """

    rate_rps: float | None
    throughput_ratio: float
    waiting_p50: float | None
    ms: Mapping[str, float]
    backlog_by_quarter_s: list[float | None]

    def over(self, other: "CellLoad | None", metric: str) -> float | None:
        """Return the ratio of this cell's percentile to the other's; None if one is missing."""
        if other is None or metric not in self.ms.keys() & other.ms.keys():
            return None
        return self.ms[metric] / other.ms[metric]


# The launch's valid Phase A cells by rate; empty in other phases.
Sweep = Mapping[float, CellLoad]


class SaturationCriterion(NamedTuple):
    """One sign of saturation.

    Attributes:
        value: returns the value of a launch's cell; None if not applicable.
        bound: its key in the section `saturation`; `default` where a study's file has none.
        above: whether it fires above the bound; else below it.
        label: its label in a figure's cell.
        quantity: the measured quantity, in words.
    """

    value: Callable[[CellLoad, Sweep], float | None]
    bound: str
    default: float
    above: bool
    label: str
    quantity: str

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of the criterion's bound."""
        return number(f"{self.quantity} {'above' if self.above else 'below'} this", self.default)


CRITERIA = {
    "throughput_ratio": SaturationCriterion(
        lambda cell, _: cell.throughput_ratio,
        "throughput_ratio_min", 0.95, False, "rate", "effective throughput / arrivals",
    ),
    "waiting": SaturationCriterion(
        lambda cell, _: cell.waiting_p50,
        "waiting_p50_max", 1.0, True, "queue", "median of waiting requests",
    ),
    "ttft_ratio": SaturationCriterion(
        lambda cell, sweep: cell.over(sweep.get((cell.rate_rps or 0) / 2), "ttft_p90"),
        "ttft_p90_ratio_max", 1.5, True, "TTFT", "p90(r) / p90(r/2)",
    ),
}  # fmt: skip


def criteria_of(bounds: Mapping[str, Any]) -> dict[str, SaturationCriterion]:
    """Return the criteria with a bound in the study's `saturation`."""
    return {name: one for name, one in CRITERIA.items() if one.bound in bounds}

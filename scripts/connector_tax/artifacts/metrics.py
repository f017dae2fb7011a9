"""The latency metrics and the criteria of saturation: each declared here, once.

A line of LATENCY_METRICS is a percentile in every table, in the report and in `compare`: compared
with the baseline's and judged where it has a margin, in cells.csv alone where it has none. A line
of THROUGHPUT_METRICS has a tax where `statistics.judged` names it. A line of CRITERIA is a
criterion in `saturation`, in reference_rates.json, in the tables and figures.
"""

from collections import ChainMap
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

# With fewer requests of a launch's cell beyond a percentile it carries no verdict.
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
    """A percentile of a latency, or a throughput, whose cost is that there is less of it.

    Attributes:
        latency: of a throughput `ttft_ms`, which all of its requests have.
        percent: of a throughput 50, for the requests that it needs.
        margin: within which a tax counts as none, where `statistics.margins` does not say;
            None: no tax of it is computed.
    """

    label: str
    latency: Latency
    percent: int
    margin: float | None = None
    unit: str = "ms"

    @property
    def least(self) -> int:
        """The requests of a cell of which BEYOND lie beyond the percentile."""
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
# Those with a tax in every study.
METRICS = tuple(name for name, metric in LATENCY_METRICS.items() if metric.margin is not None)
# Those whose tax over all rates is the study's verdict: medians, which few launches tell best.
VERDICT_METRICS = ("ttft_p50", "tpot_p50")
# Those of a closed loop.
CLOSED_LOOP_METRICS = ("requests_per_s", "tokens_per_s", *VERDICT_METRICS)
# Those that figures and the tables of the report at one rate show.
HEADLINE = ("ttft_p90", "tpot_p90")
# Percentiles from here on are refused below `statistics.p99_min_samples` successes.
FAR_TAIL = 99


def judged_metrics(statistics: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the metrics whose tax over all rates is judged; the medians where none is named."""
    return tuple(statistics.get("judged", VERDICT_METRICS))


def taxed_metrics(statistics: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the metrics of which a study has taxes: METRICS, and the throughputs it judges."""
    judged = judged_metrics(statistics)
    return (*METRICS, *(metric for metric in judged if metric in THROUGHPUT_METRICS))


def word_of(metric: str) -> str:
    """Return a metric in a word: TTFT for its median, TTFT p90."""
    return ALL_METRICS[metric].label.removesuffix(" p50")


def change_of(metric: str, tax: float) -> float:
    """Return the relative change of a metric that a tax is: of a throughput, less of it.

    Args:
        tax: a fraction; of a throughput the baseline's over the configuration's, minus 1.
    """
    return 1 / (1 + tax) - 1 if metric in THROUGHPUT_METRICS else tax


def margin_of(margins: Mapping[str, float], metric: str) -> float:
    """Return the margin of a metric: the one in `statistics.margins`, or else its default."""
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
        """Return the ratio of one cell's percentile to another's, or None if one is missing."""
        if other is None or metric not in self.ms.keys() & other.ms.keys():
            return None
        return self.ms[metric] / other.ms[metric]


# The launch's valid cells of Phase A, by rate; none outside it.
Sweep = Mapping[float, CellLoad]


class SaturationCriterion(NamedTuple):
    """One sign of saturation.

    Attributes:
        value: of a cell of a launch; None: not applicable.
        bound: its key in the section `saturation`; `default` where a study's file has none.
        above: it fires above the bound, else below it.
        label: in a figure's cell.
        quantity: what is measured, in words.
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
    """Return the criteria that a study was judged by: those with a bound in its `saturation`."""
    return {name: one for name, one in CRITERIA.items() if one.bound in bounds}

"""The latency metrics and the criteria of saturation: each declared here, once.

A line of LATENCY_METRICS is a percentile in every table, in the report and in `compare`: compared
with the baseline's and judged where it has a margin, in cells.csv alone where it has none.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

# How a launch's sample of each latency is named: of `analysis.measure.Requests`.
Latency = Literal["ttft_ms", "tpot_ms", "e2e_ms"]


class Metric(NamedTuple):
    """A percentile of a latency.

    Attributes:
        margin: within which a tax counts as none, where `statistics.margins` does not say;
            None: no tax of it is computed.
    """

    label: str
    latency: Latency
    percent: int
    margin: float | None = None


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
# Those with a tax.
METRICS = tuple(name for name, metric in LATENCY_METRICS.items() if metric.margin is not None)
# Those whose tax over all rates is the study's verdict: medians, which few launches tell best.
VERDICT_METRICS = ("ttft_p50", "tpot_p50")
# Those that figures and the tables of the report at one rate show.
HEADLINE = ("ttft_p90", "tpot_p90")
# Percentiles from here on are refused below `statistics.p99_min_samples` successes.
FAR_TAIL = 99


def margin_of(margins: Mapping[str, float], metric: str) -> float:
    """The margin of a metric: as `statistics.margins` has it, else its own."""
    own = LATENCY_METRICS[metric].margin
    assert own is not None
    return margins.get(metric, own)


class SaturationCriterion(NamedTuple):
    """One sign of saturation; its value: `analysis.reference.VALUES`.

    Attributes:
        bound: its key in the section `saturation`, and `default` where that has none.
        above: it fires above the bound, else below it.
        label: in a figure's cell.
        said: what is measured.
    """

    bound: str
    default: float
    above: bool
    label: str
    said: str

    def bound_of(self, bounds: Mapping[str, Any]) -> float:
        """Its bound in a section `saturation`."""
        return float(bounds.get(self.bound, self.default))


CRITERIA = {
    "throughput_ratio": SaturationCriterion(
        "throughput_ratio_min", 0.95, False, "rate", "effective throughput / rate"
    ),
    "waiting": SaturationCriterion(
        "waiting_p50_max", 1.0, True, "queue", "median of waiting requests"
    ),
    "ttft_ratio": SaturationCriterion("ttft_p90_ratio_max", 1.5, True, "TTFT", "p90(r) / p90(r/2)"),
}

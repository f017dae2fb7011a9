"""The latency metrics: a line here is a percentile in every table, in the report and in `compare`.

A metric with a margin is compared with the baseline's and judged; one without stands in cells.csv.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

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
# Those that figures and the first tables of the report show.
HEADLINE = ("ttft_p90", "tpot_p90")
# Percentiles from here on are refused below `statistics.p99_min_samples` successes.
FAR_TAIL = 99


def margin_of(margins: Mapping[str, float], metric: str) -> float:
    """The margin of a metric: as `statistics.margins` has it, else its own."""
    own = LATENCY_METRICS[metric].margin
    assert own is not None
    return margins.get(metric, own)

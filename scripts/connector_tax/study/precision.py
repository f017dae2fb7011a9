"""Precision-targeted cells: the rule a cell stops by, its record, and the rates it makes needless.

The rule is the same for every configuration; what differs is how long each needs to satisfy it.
"""

from pathlib import Path

from connector_tax.artifacts import paths
from connector_tax.artifacts.cell_records import (
    CellRecord,
    HalfWidthsRecord,
    MeasuredWindow,
    PrecisionRecord,
)
from connector_tax.artifacts.names import Launch
from connector_tax.artifacts.study_records import (
    CellPlan,
    PrecisionSection,
    StudyConfig,
    StudyDocument,
)
from connector_tax.files import read_json
from connector_tax.loadgen import CellResult, PrecisionRule
from connector_tax.loadgen.precision import HalfWidths
from connector_tax.ranks import order_statistic_ranks

# Every reported percentile has a 95% interval.
CONFIDENCE = 0.95


def precision_rule(config: StudyConfig) -> PrecisionRule | None:
    """A fresh rule for one cell; None when cells stop by count alone."""
    precision = config["precision"]
    if not precision["enabled"]:
        return None
    return PrecisionRule(
        precision["target_relative_half_width"], lambda n: order_statistic_ranks(n, 90, CONFIDENCE)
    )


def precision_record(
    rule: PrecisionRule, result: CellResult, requests_file: Path, config: StudyConfig
) -> PrecisionRecord:
    """The `precision` part of a cell's record.

    Returns:
        `stopped_by` (target, cap, or interrupted when a worker died), `at_stop` (what the rule saw
        when it ended the window; None when it did not), `achieved` (over all successes of the
        window, those that came in the drain included), `throughput_ratio` (effective over requested
        throughput, by which higher rates may be skipped).
    """
    from connector_tax.analysis.measure import read_requests

    window: MeasuredWindow = {
        "t_warmup_end_ns": result.t_warmup_end_ns,
        "t_stop_ns": result.t_stop_ns,
    }
    requests = read_requests(requests_file, None, window)
    stopped_by = "target" if result.precise is not None else "interrupted"
    if result.precise is None and result.t_stop_ns - result.t_warmup_end_ns >= round(
        config["cell"]["cap_s"] * 1e9
    ):
        stopped_by = "cap"
    achieved = rule.half_widths(sorted(requests.ttft_ms), sorted(requests.tpot_ms))
    return {
        "stopped_by": stopped_by,
        "at_stop": None if result.precise is None else _half_widths(result.precise),
        "achieved": _half_widths(achieved),
        "throughput_ratio": requests.throughput_ratio,
    }


def _half_widths(seen: HalfWidths) -> HalfWidthsRecord:
    return {"n": seen.n, "ttft_p90": seen.ttft_p90, "tpot_p90": seen.tpot_p90}


def skip_reason(study: StudyDocument, launch: Launch, folder: Path, cell: CellPlan) -> str | None:
    """Why a Phase A rate need not be measured: the launch is certainly saturated far below it.

    Args:
        study: study.json.
        launch: the launch.
        folder: where its finished cells lie.
        cell: the cell in question.
    """
    precision, rate_rps = study["config"]["precision"], cell["rate_rps"]
    if launch.phase != "A" or rate_rps is None or not precision["enabled"]:
        return None
    for lower in study["cells"]["A"]:
        lower_rps = lower["rate_rps"]
        if lower_rps is None or lower_rps >= rate_rps:
            break
        path = folder / lower["cell"] / paths.cell_record("A", lower["cell"])
        record: CellRecord | None = read_json(path) if path.exists() else None
        # A rate without arrivals in its window says nothing.
        ratio = record["precision"]["throughput_ratio"] if record and record["valid"] else None
        if saturation_skips(precision, lower_rps, ratio, rate_rps):
            return (
                f"saturated at {lower['cell']} by throughput_ratio {ratio:.2f} (below "
                f"{precision['certain_throughput_ratio']:g}); rates >= "
                f"{precision['skip_rate_factor']:g}x that are skipped"
            )
    return None


def saturation_skips(
    precision: PrecisionSection, lower_rps: float, ratio: float | None, rate_rps: float
) -> bool:
    """Whether `ratio`, the throughput ratio at `lower_rps`, makes `rate_rps` (1/s) needless."""
    certain = ratio is not None and ratio < precision["certain_throughput_ratio"]
    return (
        certain and rate_rps > lower_rps and rate_rps >= precision["skip_rate_factor"] * lower_rps
    )

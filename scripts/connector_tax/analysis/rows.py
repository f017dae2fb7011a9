"""Rows of cells.csv: one for each planned cell, and pooled rows over blocks.

Source: docs/method.md. A cell that is not valid keeps its row, with status and reason but without
latencies. Each configuration has pooled rows (block `all`): the geometric mean over the blocks of
the geometric mean of the block's valid launches, with an interval by Student's t on the logs of the
block values. Plain's rows cover all of its launches. A single valid launch gives its own values.

MSER-5 and a comparison of start and second half, on TPOT by arrival, show whether a cell was still
warming up. Sources: White, "An effective truncation heuristic for bias reduction in simulation
output" (1997), MSER-5; Georges et al. (OOPSLA'07) on steady state. No data are removed: the
discarded warm-up is the design's fixed one, and a flagged cell needs a longer warm-up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from connector_tax.analysis.effect import mean_of
from connector_tax.analysis.ingest import block_devices, merged_reasons
from connector_tax.analysis.machine import MachineUse
from connector_tax.analysis.measure import Requests, request_columns
from connector_tax.analysis.records import Table
from connector_tax.analysis.reference import at_least_half
from connector_tax.analysis.steps import Steps, step_columns
from connector_tax.artifacts.folder import CellFolder
from connector_tax.artifacts.metrics import LATENCY_METRICS, CellLoad, criteria_of, margin_of
from connector_tax.artifacts.names import CellKey
from connector_tax.artifacts.saturation import Judgement
from connector_tax.artifacts.study_file import Study
from connector_tax.artifacts.tables import POOLED, STEP_COLUMNS, Row

# Requests per MSER batch, least number of batches, and level of the test for a changed start.
BATCH, MIN_BATCHES = 5, 16
SIGNIFICANCE = 0.01
# Columns that describe the cell itself, also in its pooled row.
IDENTITY = (
    "config", "configuration", "phase", "cell", "input_tokens", "output_tokens", "label",
)  # fmt: skip
AVERAGED = (
    "ttft_from_send_p90_ms", "requested_throughput_rps", "effective_throughput_rps",
    "throughput_ratio", "error_rate", *MachineUse._fields, "waiting_p50", *STEP_COLUMNS,
)  # fmt: skip
SUMMED = (
    "n", "window_s", "dropped", "n_steps", "n_empty_steps", "n_incomplete_steps",
)  # fmt: skip


@dataclass(frozen=True)
class MeasuredCell:
    """The data read from one valid cell."""

    requests: Requests
    waiting_p50: float | None
    load: CellLoad | None
    machine: MachineUse | None
    steps: Steps | None
    wait_ms: float | None
    device: Table | None


def cell_rows(
    study: Study,
    cells: Sequence[CellFolder],
    measured: Mapping[CellKey, MeasuredCell],
    judged: Mapping[CellKey, Judgement],
) -> list[Row]:
    """Return a row for every planned cell, then the pooled rows of every configuration."""
    statistics, devices, rows = study.config["statistics"], block_devices(cells), list[Row]()
    margin = margin_of(statistics["margins"], "tpot_p50")
    for cell in cells:
        row = _identity(study, cell) | {"device": devices.get(cell.key.block)}
        if (of := measured.get(cell.key)) is not None:
            row |= request_columns(
                of.requests, statistics["confidence"], statistics["p99_min_samples"]
            )
            wanted = study.config["cell"]["min_completed"]
            if of.requests.n < wanted:
                row["remark"] = f"cap reached after {of.requests.n} of {wanted}"
            row["waiting_p50"] = of.waiting_p50
            row["warming_up"] = warming_up(of.requests.tpot_ms, margin)
            row |= {} if of.machine is None else of.machine._asdict()
            if (saturation := judged.get(cell.key)) is not None:
                row |= {"saturation_criteria": saturation.names}
                row |= {"saturated": saturation.saturated} if study.saturation else {}
            row |= {} if of.steps is None else step_columns(of.steps)
        rows.append(row)
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["phase"], row["configuration"], row["cell"]), []).append(row)
    return rows + [_pooled(group, study) for group in groups.values()]


def _identity(study: Study, cell: CellFolder) -> Row:
    row: Row = {
        **cell.key._asdict(),
        "configuration": cell.configuration,
        "rate_rps": cell.rate_rps,
        "input_tokens": cell.input_tokens,
        "output_tokens": cell.output_tokens,
        "status": cell.status,
        "reason": cell.reason,
        "label": study.document["engine_label"],
    }
    if cell.status == "void" and cell.record is not None:
        window = cell.record["window"]
        row["n"] = cell.record["counts"]["measured_ok"]
        row["dropped"] = cell.record["counts"]["dropped"]
        row["window_s"] = (window["t_stop_ns"] - window["t_warmup_end_ns"]) / 1e9
    return row


def _pooled(group: Sequence[Row], study: Study) -> Row:
    valid = [row for row in group if row["status"] == "valid"]
    reasons = [(row["block"], row["reason"]) for row in group if row["status"] != "valid"]
    row = {name: group[0][name] for name in IDENTITY}
    row |= {"block": POOLED, "reason": merged_reasons(reasons) or None}
    if not valid:
        return row | {name: group[0][name] for name in ("status", "rate_rps")}
    row |= {"status": "valid", "rate_rps": valid[0]["rate_rps"]}
    for name in LATENCY_METRICS:
        row |= pooled_quantile(name, valid, study.config["statistics"]["confidence"])
    for name in (*AVERAGED, *SUMMED):
        known = [of[name] for of in valid if of.get(name) is not None]
        row[name] = (sum(known) if name in SUMMED else float(np.mean(known))) if known else None
    judged = [of for of in valid if of.get("saturated") is not None]
    if judged:
        row["saturated"] = at_least_half([of["saturated"] for of in judged])
        fired = [of["saturation_criteria"].split(";") for of in judged]
        row["saturation_criteria"] = ";".join(
            name
            for name in criteria_of(study.saturation)
            if at_least_half([name in names for names in fired])
        )
    warming = [of["warming_up"] for of in valid if of["warming_up"] is not None]
    return row | {"warming_up": any(warming) if warming else None}


def pooled_quantile(name: str, valid: Sequence[Row], confidence: float) -> Row:
    """Return a percentile pooled over the launches' rows, with its interval, by column.

    It is the geometric mean, which is 0 if a launch has 0 (TPOT with all tokens in one read).
    """
    columns = [f"{name}{bound}_ms" for bound in ("", "_lo", "_hi")]
    if len(valid) == 1:
        return {column: valid[0][column] for column in columns}
    if 0 in (row[columns[0]] for row in valid):
        return dict(zip(columns, (0.0, None, None), strict=True))
    by_block: dict[int, list[float]] = {}
    for row in valid:
        if row[columns[0]] is not None:
            by_block.setdefault(row["block"], []).append(float(np.log(row[columns[0]])))
    if not by_block:
        return dict.fromkeys(columns)
    logs = [float(np.mean(launches)) for launches in by_block.values()]
    mean = mean_of(logs, tuple(by_block), "", confidence)
    ends = (None if log is None else float(np.exp(log)) for log in (mean.point, *mean.ends))
    return dict(zip(columns, ends, strict=True))


def warming_up(values: NDArray[np.float64], margin: float) -> bool | None:
    """Return whether `values` (one per request, in order of arrival) still change as during a
    warm-up.

    Two criteria must hold: the first quarter differs from the second half by more than the relative
    `margin` and significantly (Mann-Whitney on batch means), and MSER-5 would discard a beginning.
    None if there are too few requests.
    """
    batches = values[: len(values) // BATCH * BATCH].reshape(-1, BATCH).mean(axis=1)
    start, settled = len(values) // 4, len(values) // 2
    if len(batches) < MIN_BATCHES or (level := np.median(values[settled:])) <= 0:
        return None
    # Imported late: it takes a quarter of the start of commands that make no rows.
    from scipy.stats import mannwhitneyu

    change = float(np.median(values[:start]) / level - 1)
    first, last = batches[: start // BATCH], batches[settled // BATCH :]
    p = float(mannwhitneyu(first, last, method="asymptotic").pvalue)
    return p < SIGNIFICANCE and abs(change) > margin and mser(batches) > 0


def mser(batches: NDArray[np.float64]) -> int:
    """Return the number of leading batches that MSER discards: argmin over d of S_d^2 / (m - d)^2.

    S_d^2 is the sum of squared deviations of the remaining m - d batches from their mean. Following
    White, d is at most half of m, since the statistic is unstable for few remaining batches.
    """
    m = len(batches)
    kept = np.arange(m, 0, -1)
    sums = np.cumsum(batches[::-1])[::-1]
    squares = np.cumsum(batches[::-1] ** 2)[::-1]
    statistic = (squares - sums**2 / kept) / kept.astype(np.float64) ** 2
    return int(np.argmin(statistic[: m // 2 + 1]))

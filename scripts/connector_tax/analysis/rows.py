"""Rows of cells.csv: one for each planned cell, and one pooled over blocks.

Source: docs/method.md. A cell that is not valid keeps its row, with its status and reason and
without a latency. Each configuration has pooled rows (block `all`), plain's over all of its
launches: the geometric mean over the blocks of the geometric mean of the block's valid launches,
with Student's t on the logs of the block values as interval. A single valid launch is repeated.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from scipy.stats import t as student

from connector_tax.analysis.devices import block_devices
from connector_tax.analysis.ingest import Cell, merged_reasons
from connector_tax.analysis.machine import MachineUse
from connector_tax.analysis.measure import Requests, request_columns
from connector_tax.analysis.reference import Sweep, judgement
from connector_tax.analysis.saturation import CellLoad
from connector_tax.analysis.stationarity import warming_up
from connector_tax.analysis.steps import Steps, step_columns
from connector_tax.artifacts.metrics import CRITERIA, LATENCY_METRICS, margin_of
from connector_tax.artifacts.names import CellKey
from connector_tax.artifacts.study_file import Study
from connector_tax.artifacts.tables import POOLED, STEP_COLUMNS, Row

# Of the cell itself, in its pooled row too.
IDENTITY = (
    "config", "configuration", "phase", "cell", "input_tokens", "output_tokens", "label",
)  # fmt: skip
AVERAGED = (
    "ttft_from_send_p90_ms",
    "requested_throughput_rps",
    "effective_throughput_rps",
    "throughput_ratio",
    "error_rate",
    *MachineUse._fields,
    "waiting_p50",
    *STEP_COLUMNS,
)
SUMMED = (
    "n", "window_s", "dropped", "n_steps", "n_empty_steps", "n_incomplete_steps",
)  # fmt: skip


def cell_rows(
    study: Study,
    cells: Sequence[Cell],
    measured: Mapping[CellKey, tuple[Requests, float | None, CellLoad | None, MachineUse | None]],
    sweeps: Mapping[tuple[str, int], Sweep],
    steps: Mapping[CellKey, Steps],
) -> list[Row]:
    """Every planned cell in order, then the pooled rows of every configuration."""
    devices, rows = block_devices(cells), list[Row]()
    for cell in cells:
        row = _identity(study, cell) | {"device": devices.get(cell.key.block)}
        if cell.key in measured:
            requests, waiting, load, machine = measured[cell.key]
            row |= _measured_columns(study, requests, waiting)
            row |= {} if machine is None else machine._asdict()
            if load is not None and cell.rate_rps is not None:
                judged = judgement(study, cell.key, cell.rate_rps, load, sweeps)
                row |= {"saturated": judged.saturated, "saturation_criteria": judged.names}
            if cell.key in steps:
                row |= step_columns(steps[cell.key])
        rows.append(row)
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["phase"], row["configuration"], row["cell"]), []).append(row)
    confidence = study.config["statistics"]["confidence"]
    return rows + [_pooled(group, confidence) for group in groups.values()]


def _identity(study: Study, cell: Cell) -> Row:
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


def _measured_columns(study: Study, requests: Requests, waiting: float | None) -> Row:
    statistics = study.config["statistics"]
    row = request_columns(requests, statistics["confidence"], statistics["p99_min_samples"])
    return {
        **row,
        "waiting_p50": waiting,
        "warming_up": warming_up(requests.tpot_ms, margin_of(statistics["margins"], "tpot_p50")),
    }


def _pooled(group: Sequence[Row], confidence: float) -> Row:
    valid = [row for row in group if row["status"] == "valid"]
    lost = [(row["block"], row["reason"]) for row in group if row["status"] != "valid"]
    row = {name: group[0][name] for name in IDENTITY}
    row |= {"block": POOLED, "reason": merged_reasons(lost) or None}
    if not valid:
        return row | {name: group[0][name] for name in ("status", "rate_rps")}
    row |= {"status": "valid", "rate_rps": valid[0]["rate_rps"]}
    for name in LATENCY_METRICS:
        row |= pooled_quantile(name, valid, confidence)
    for name in (*AVERAGED, *SUMMED):
        known = [of[name] for of in valid if of.get(name) is not None]
        row[name] = (sum(known) if name in SUMMED else float(np.mean(known))) if known else None
    judged = [of for of in valid if of.get("saturated") is not None]
    if judged:
        row["saturated"] = 2 * sum(of["saturated"] for of in judged) >= len(judged)
        fired = [of["saturation_criteria"].split(";") for of in judged]
        row["saturation_criteria"] = ";".join(
            name for name in CRITERIA if 2 * sum(name in names for names in fired) >= len(fired)
        )
    warming = [of["warming_up"] for of in valid if of["warming_up"] is not None]
    return row | {"warming_up": any(warming) if warming else None}


def pooled_quantile(name: str, valid: Sequence[Row], confidence: float) -> Row:
    """A percentile pooled over the rows of launches, with its interval, by column.

    Its geometric mean; of launches one of which has 0 (TPOT, all tokens in one read) that is 0.
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
    logs = np.array([np.mean(launches) for launches in by_block.values()])
    mean = float(logs.mean())
    bounds: list[float | None] = [None, None]
    if len(logs) > 1:
        quantile = float(student.ppf((1 + confidence) / 2, len(logs) - 1))
        half = quantile * float(logs.std(ddof=1)) / np.sqrt(len(logs))
        bounds = [float(np.exp(mean - half)), float(np.exp(mean + half))]
    return dict(zip(columns, [float(np.exp(mean)), *bounds], strict=True))

"""How long requests wait for the step with their prompt: a part of the TTFT that is the arrivals'.

The first token's time is cut where the step begins that computes the prompt (the first with prompt
tokens after the request's due time). A request that comes while another decodes waits for the end
of the step it comes into. Where requests come at nearly the same moment of a step each time, as
with fixed arrivals, that wait differs between configurations by up to a step, whatever they cost.
"""

from collections.abc import Mapping

import numpy as np
import polars as pl

from connector_tax.analysis.block_model import Launches
from connector_tax.analysis.ingest import Cell
from connector_tax.analysis.records import REQUESTS, STEPS, empty_frame, read_records
from connector_tax.analysis.step_tables import by_cell, contrast_columns
from connector_tax.analysis.taxes import compared
from connector_tax.artifacts import tables
from connector_tax.artifacts.names import CellKey
from connector_tax.artifacts.study_file import Study
from connector_tax.artifacts.tables import Row


def prefill_wait_ms(cell: Cell) -> float | None:
    """The median over a valid cell's measured successes, in ms; None where no step follows one."""
    assert cell.record is not None
    window = cell.record["window"]
    inside = pl.col("t_intended_ns").is_between(
        window["t_warmup_end_ns"], window["t_stop_ns"], closed="left"
    )
    requests = read_records(cell.file("requests"), REQUESTS, cell.sha256("requests"))
    due = [f.filter((pl.col("status") == "ok") & inside)["t_intended_ns"] for f in requests]
    prefill = (pl.col("process") == "scheduler") & (pl.col("prefill_tokens") > 0)
    steps = read_records(cell.file("engine_step"), STEPS, cell.sha256("engine_step"))
    begun = pl.concat([empty_frame(STEPS), *(f.filter(prefill) for f in steps)])["t_ns"].sort()
    due_ns = pl.concat([empty_frame(REQUESTS)["t_intended_ns"], *due]).to_numpy()
    place = np.searchsorted(begun.to_numpy(), due_ns)
    known = place < len(begun)
    if not known.any():
        return None
    return float(np.median(begun.to_numpy()[place[known]] - due_ns[known])) / 1e6


def wait_rows(study: Study, waits: Mapping[CellKey, float]) -> list[Row]:
    """By how much a configuration's requests wait longer than the baseline's, by cell, in ms."""
    rows: list[Row] = []
    for (phase, cell), launched in by_cell(waits).items():
        plains, launches = study.plains(phase), Launches.of(launched)
        for config in compared(study, phase):
            confidence = study.config["statistics"]["confidence"]
            if known := contrast_columns(launches, config, plains, confidence):
                row: Row = {"quantity": tables.WAIT, "config": config, "phase": phase, "cell": cell}
                row |= {"metric": "wait", "unit": "ms", "scale": tables.RAW, "status": "valid"}
                rows.append(row | known)
    return rows

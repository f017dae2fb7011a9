"""Write a small finished study as tables, as the analysis would."""

import copy
import re
from functools import cache
from pathlib import Path
from typing import Any

from connector_tax.artifacts import paths
from connector_tax.artifacts.index import CellEntry, launch_index, write_index
from connector_tax.artifacts.names import PHASES, PLAIN, Launch
from connector_tax.artifacts.study_records import CellPlan, DesignLabel, StudyDocument
from connector_tax.artifacts.tables import table_text
from connector_tax.files import write_json, write_text
from connector_tax.study.design import planned_cell
from tests.figures.figure_tables import (
    Design,
    cdf_rows,
    cell_rows,
    configs,
    effect_rows,
    engine_rows,
    grid,
    reference_rates,
    resource_rows,
    state,
)
from tests.study_folder import DEFAULT, study_design, write_stages

NO_HASH = "0" * 64


@cache
def _resolved() -> StudyDocument:
    return study_design(arrivals=DEFAULT["arrivals"])


def _settings(design: Design) -> dict[str, Any]:
    return {
        "seed": 1,
        "blocks": design.blocks,
        "statistics": DEFAULT["statistics"] | {"margins": {}},  # each metric's own, 3%
        "plain_launches": design.plain_launches,
        "phase_a": {"rates_rps": list(design.rates_rps), "input_tokens": 4096,
                    "output_tokens": 256},
        "phase_b": {"input_tokens": list(design.inputs), "output_tokens": list(design.outputs)},
    }  # fmt: skip


def _hypotheses() -> dict[str, Any]:
    verdicts = ("supported", "refuted", "cannot tell", "supported", "supported", "refuted")
    none: dict[str, Any] = {"numbers": {}, "point_label": None}
    return {
        "engine_label": "embedded (emulated)", "emulated": True,
        "hypotheses": [
            {"id": f"H{number}", "verdict": verdict, "sentence": f"Sentence of H{number}.", **none}
            for number, verdict in enumerate(verdicts, 1)
        ],
        "criteria": [
            {"id": number, "verdict": "met" if number != 6 else "not met",
             "sentence": f"Sentence of criterion {number}.", **none}
            for number in range(1, 8)
        ],
    }  # fmt: skip


def _launches(design: Design) -> list[Launch]:
    """Return the launches in run order."""
    return [
        Launch(config, block, phase)
        for phase in dict.fromkeys(cell[0] for cell in grid(design))
        for block in range(design.blocks)
        for config in configs(design)
        if phase != "Bp" or config in ("plain", "mooncake_both", "plain_2")
    ]


def _write_launch(root: Path, design: Design, launch: Launch) -> None:
    folder, phase = launch.folder(root), launch.phase
    cells: list[CellEntry] = []
    for _, cell, rate, input_tokens, output_tokens in (c for c in grid(design) if c[0] == phase):
        status, reason = state(design, launch.config, phase, cell)
        cells.append(CellEntry(cell, status, reason or None, {}))
        if status == "skipped":
            continue
        values = {
            "phase": phase, "cell": cell, "config": launch.config, "block": launch.block,
            "input_tokens": input_tokens, "output_tokens": output_tokens,
            "schedule": {"kind": "fixed", "rate_rps": rate, "seed": "s", "n": 240},
            "window": {"t_origin_ns": 0, "t_warmup_end_ns": 10**9, "t_stop_ns": 61 * 10**9,
                       "t_drained_ns": 62 * 10**9, "started_utc": "2026-05-26T00:00:00Z"},
            "counts": {"planned": 240, "sent": 240, "ok": 240, "dropped": 0, "failed": {},
                       "measured_ok": 230},
            "health": {
                "schedule_lag_p99_ms": {"value": 0.4, "bound": 2.0, "pass": True},
                "error_rate": {"value": 0.2 if status == "void" else 0.0, "bound": 0.01,
                               "pass": status != "void"},
            },
            "files": {}, "valid": status == "valid", "void_reasons": [reason] if reason else [],
        }  # fmt: skip
        write_json(folder / cell / f"cell_{phase}_{cell}.json", values)
    skipped = all(cell.status == "skipped" for cell in cells)
    document: DesignLabel = {"engine_label": design.engine_label, "design_sha256": NO_HASH}
    index = launch_index(
        document, launch, cells,
        status="skipped" if skipped else "done",
        reason=cells[0].reason if skipped else None,
        started_utc="2026-05-26T00:00:00+00:00", ended_utc="2026-05-26T00:01:44+00:00",
        timing={"startup_s": 2.0, "cells_s": 100.0, "release_s": 1.0, "wall_s": 104.0},
    )  # fmt: skip
    write_index(folder, index)


def write_study(root: Path, design: Design | None = None, runs: bool = False) -> Path:
    """Write the tables of a study into `root`, and the records of its launches if `runs`.

    Returns the path of its study.json.
    """
    design = design or Design()
    cells: dict[str, list[CellPlan]] = {}
    for phase, _, rate, i, o in grid(design):
        planned = planned_cell(i, o, rate if phase == "A" else None)
        cells.setdefault(phase, []).append(planned)
    launches = _launches(design)
    document: Any = copy.deepcopy(_resolved())
    document["config"] |= _settings(design)
    plain = document["configurations"][0]
    document |= {
        "study": re.sub(r"[^a-z0-9._-]", "-", root.name), "design_sha256": NO_HASH,
        "engine_label": design.engine_label, "emulated": design.emulated, "blocks": design.blocks,
        "configurations": [
            plain | {"id": name, "label": label, "connector": None if name == PLAIN else "C"}
            for name, label in design.labels.items()
        ],
        "run_order": {
            phase: [{"config": e.config, "block": e.block} for e in launches if e.phase == phase]
            for phase in PHASES
        },
        "cells": {phase: cells.get(phase, []) for phase in PHASES},
    }  # fmt: skip
    environment = {
        "python": "3.11.7", "cpu": "Example CPU", "packages": ["numpy==2.4.6", "pyzmq==27.0"],
    }  # fmt: skip
    study_file = write_stages(
        root, document, design.skipped, step_timing=design.step_timing, environment=environment
    )
    tables = {
        paths.CELLS: cell_rows(design),
        paths.EFFECTS: [*effect_rows(design), *resource_rows(design)],
        paths.STEP_CDF: cdf_rows(design),
        paths.ENGINE_TABLE: engine_rows(design),
    }
    for name, rows in tables.items():
        write_text(root / paths.ANALYSIS / name, table_text(name, rows))
    write_json(root / paths.ANALYSIS / paths.HYPOTHESES, _hypotheses())
    write_json(root / paths.REFERENCE_RATES, reference_rates(design))
    for launch in launches if runs else ():
        _write_launch(root, design, launch)
    return study_file

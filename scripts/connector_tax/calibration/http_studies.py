"""Small studies over real HTTP: are the taxes found that the virtual launches say are there?"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from connector_tax.analysis.aggregate import measure, sample_cells
from connector_tax.analysis.effects import TaxTable
from connector_tax.analysis.ingest import Cell, load_cells
from connector_tax.analysis.taxes import Tables, tax_rows
from connector_tax.artifacts import paths
from connector_tax.artifacts.names import launched_plains
from connector_tax.artifacts.study_file import Study, launches, load_study
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.artifacts.tables import Row
from connector_tax.calibration import harness
from connector_tax.calibration.design import PHASE, OwnCell, study_document
from connector_tax.calibration.live import measure_launch
from connector_tax.calibration.studies import KNOWN_RATES, METRICS
from connector_tax.calibration.truth import TrueTax
from connector_tax.files import write_json

TAXED = "step_tax_240us"
# Short cells: a launch's start-up takes most of its time either way.
CELL: OwnCell = {"warmup_s": 0.3, "floor_s": 2.0, "cap_s": 2.0, "min_completed": 1}


@dataclass(frozen=True)
class HttpStudy:
    """One study: its tax rows, and each cell's errors against the truth log."""

    number: int
    rows: list[Row]
    errors: dict[tuple[str, int], harness.Errors]
    states: list[Row]
    measured_again: list[Row]


def run(
    root: Path, studies: int, blocks: int, seed: int, say: Callable[[str], None]
) -> list[HttpStudy]:
    """Measure `studies` studies of one known tax and of plain, launched twice a block."""
    rows = []
    for number in range(studies):
        document = study_document("fixed", seed + 10_000 + number, blocks, (TAXED,), cell=CELL)
        rows.append(_study(document, number, root / f"study{number}"))
        say(f"http: {number + 1} of {studies} studies")
    return rows


def _study(document: StudyDocument, number: int, folder: Path) -> HttpStudy:
    errors, again = {}, []
    for launch in launches(document, PHASE):
        live = measure_launch(document, launch, folder)
        if not live.record["valid"]:
            # As in a study, a void cell is measured once more; here with a launch of its own.
            again.append({"launch": launch.name, "reasons": live.record["void_reasons"]})
            shutil.rmtree(launch.folder(folder))
            live = measure_launch(document, launch, folder)
        errors[launch.config, launch.block] = harness.errors(live)
    write_json(folder / paths.STUDY, document)
    study = load_study(folder / paths.STUDY)
    cells = load_cells(study, PHASE)
    states = [
        {
            "study": number,
            "config": c.key.config,
            "block": c.key.block,
            "status": c.status,
            "reason": c.reason,
        }
        for c in cells
    ]
    return HttpStudy(number, _tax_rows(study, cells), errors, states, again)


def _tax_rows(study: Study, cells: Sequence[Cell]) -> list[Row]:
    requests = {
        cell.key: measure(cell, with_steps=False).requests
        for cell in cells
        if cell.status == "valid"
    }
    samples = sample_cells(study, requests)
    rows = tax_rows(Tables(study, TaxTable(study, cells, samples, {}), KNOWN_RATES))
    return [row for row in rows if row["metric"] in METRICS]


def compare(studies: Sequence[HttpStudy], truths: Mapping[tuple[str, str], TrueTax]) -> list[Row]:
    """One row for each tax of each study: measured, from the server's own stamps, and virtual."""
    return [
        {
            "study": study.number,
            "config": row["config"],
            "metric": row["metric"],
            "status": row["status"],
            "blocks": row["n_blocks"],
            "tax": row.get("estimate"),
            "lo": row.get("lo"),
            "hi": row.get("hi"),
            "verdict": row.get("verdict"),
            "tax_by_truth_log": _tax_by_truth_log(study, row["config"], row["metric"]),
            "virtual_truth": truths[row["config"], row["metric"]].tax,
            "covered": _covers(row, truths[row["config"], row["metric"]].tax),
        }
        for study in studies
        for row in study.rows
    ]


def _covers(row: Row, truth: float) -> bool | None:
    if row.get("lo") is None:
        return None
    return bool(row["lo"] <= truth <= row["hi"])


def _tax_by_truth_log(study: HttpStudy, config: str, metric: str) -> float:
    """The same estimate made from the server's write stamps: what a perfect client would say."""
    column = f"true_{metric.partition('_')[0]}_ms"

    def log_p90(name: str, block: int) -> float:
        return float(np.log(np.percentile(getattr(study.errors[name, block], column), 90)))

    plains = [name for name in launched_plains(n for n, _ in study.errors) if name != config]
    logs = [
        log_p90(name, block) - np.mean([log_p90(plain, block) for plain in plains])
        for name, block in study.errors
        if name == config
    ]
    return float(np.expm1(np.mean(logs)))


def harness_summary(studies: Sequence[HttpStudy]) -> Row:
    """`harness.summary` over every cell of every study."""
    cells = [cell for study in studies for cell in study.errors.values()]
    return harness.summary(cells)


def cell_states(studies: Sequence[HttpStudy]) -> Row:
    """How many cells were valid, and each one that was not, with its reason."""
    states = [state for study in studies for state in study.states]
    return {
        "cells": len(states),
        "valid": sum(state["status"] == "valid" for state in states),
        "not_valid": [state for state in states if state["status"] != "valid"],
        "measured_again": [entry for study in studies for entry in study.measured_again],
    }

"""Small studies over real HTTP: are the taxes found that the virtual launches say are there?"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from connector_tax.analysis.aggregate import sample_cells
from connector_tax.analysis.ingest import load_cells
from connector_tax.analysis.measure import measure_requests
from connector_tax.artifacts import paths
from connector_tax.artifacts.study_file import launches, load_study
from connector_tax.calibration.design import PHASE, study_document
from connector_tax.calibration.live import measure_launch
from connector_tax.calibration.virtual import known_taxes, log_ratios, true_taxes
from connector_tax.files import write_json

TAXED = "step_tax_240us"
# Short cells: a launch's start-up takes most of its time either way.
CELL = {"warmup_s": 0.3, "floor_s": 2.0, "cap_s": 2.0, "min_completed": 1}


def run(
    root: Path,
    studies: int,
    blocks: int,
    truth_launches: int,
    seed: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measure `studies` studies of one known tax and of plain: their taxes, cells and stamps.

    Returns:
        taxes: each with the true one. cells: how many; not_valid: of each that was not, why;
        again: of each that was void at first, why. stamps: percentiles of the stamps' errors, us.
        p90_errors: of each cell's TTFT and TPOT p90, measured over true, minus 1.
    """
    config = study_document("jittered", seed, 1, (TAXED,), cell=CELL)["config"]
    truths = true_taxes([log_ratios(config, 0, truth_launches, seed)])
    taxes, stamps, not_valid, again = [], [], [], []
    for number in range(studies):
        document = study_document("jittered", seed + 10_000 + number, blocks, (TAXED,), cell=CELL)
        folder = root / f"study{number}"
        for launch in launches(document, PHASE):
            live = measure_launch(document, launch, folder)
            if not live.record["valid"]:
                # As in a study, a void cell is measured once more; here with a launch of its own.
                again.append({"launch": launch.name, "reasons": live.record["void_reasons"]})
                shutil.rmtree(launch.folder(folder))
                live = measure_launch(document, launch, folder)
            stamps.append(live.errors())
        write_json(folder / paths.STUDY, document)
        study = load_study(folder / paths.STUDY)
        cells = load_cells(study, PHASE)
        valid = {cell.key: measure_requests(cell) for cell in cells if cell.status == "valid"}
        not_valid += [f"{c.key}: {c.status}, {c.reason}" for c in cells if c.key not in valid]
        for row in known_taxes(study, cells, sample_cells(valid)):
            truth = truths[row["config"], row["metric"]].tax
            covered = None if row["lo"] is None else bool(row["lo"] <= truth <= row["hi"])
            taxes.append({"study": number, **row, "truth": truth, "covered": covered})
        say(f"http: {number + 1} of {studies} studies")
    every = pd.concat(stamps)
    p90 = [cell.quantile(0.9) for cell in stamps]
    return {
        "taxes": taxes,
        "cells": len(stamps),
        "not_valid": not_valid,
        "again": again,
        "requests": len(every),
        "stamps": {
            name: list(np.percentile(every[name], (50, 90, 99)))
            for name in ("first_us", "last_us", "late_us")
        },
        "p90_errors": {
            name: [cell[f"{name}_ms"] / cell[f"true_{name}_ms"] - 1 for cell in p90]
            for name in ("ttft", "tpot")
        },
    }

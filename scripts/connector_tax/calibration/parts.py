"""The parts of a calibration; each writes its results as JSON (and CSV) under the output folder."""

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd

from connector_tax.calibration import coverage, fault_table, http_studies
from connector_tax.calibration.design import ARRIVALS, study_document
from connector_tax.calibration.truth import true_taxes
from connector_tax.figures.style import csv_text
from connector_tax.files import write_json, write_text
from connector_tax.machine import machine

NAMES = ("virtual", "http", "faults")


@dataclass(frozen=True)
class Scale:
    """How much is run.

    Attributes:
        studies: virtual studies for each spread and arrival process.
        truth_launches: launches behind a true tax, each with a cell of the studies' length.
        long_launches, long_s: launches behind a long-run tax, and the window of each.
        http_studies, http_blocks: studies over HTTP and the blocks of each.
        faults: names of the fault cases; None: all.
    """

    studies: int
    truth_launches: int
    long_launches: int
    long_s: float
    http_studies: int
    http_blocks: int
    faults: tuple[str, ...] | None


FULL = Scale(300, 1000, 50, 40.0, 10, 3, None)
SHORT = Scale(2, 10, 2, 5.0, 1, 1, ("fin", "prefix_hit", "crlf", "refuse_start"))


def run(name: str, out: Path, scale: Scale, seed: int, say: Callable[[str], None]) -> None:
    """Run one part of NAMES and write `<name>.json` under `out`."""
    {"virtual": _virtual, "http": _http, "faults": _faults}[name](out, scale, seed, say)


def _virtual(out: Path, scale: Scale, seed: int, say: Callable[[str], None]) -> None:
    say(f"virtual: true taxes from {scale.truth_launches} launches")
    rules = study_document(ARRIVALS[0], seed, 1)["config"]["cell"]

    def progress(done: int, total: int) -> None:
        if done % 50 == 0 or done == total:
            say(f"virtual: {done} of {total} studies")

    long = rules | {"floor_s": scale.long_s}
    with coverage.Workers() as workers:
        of_cells = coverage.truths(workers, scale.truth_launches, rules, seed)
        long_run = coverage.truths(workers, scale.long_launches, long, seed)
        studies = coverage.run_studies(workers, scale.studies, seed, progress)
    outcomes = coverage.with_truth(studies, of_cells, long_run)
    levels = coverage.level_rows(outcomes)
    write_text(out / "virtual_outcomes.csv", outcomes.write_csv())
    write_text(out / "virtual_levels.csv", csv_text(pd.DataFrame(levels, dtype=object)))
    write_json(
        out / "virtual.json",
        {
            "machine": machine(),
            "seed": seed,
            "scale": asdict(scale),
            "levels": levels,
            "coverage": coverage.coverage_rows(outcomes),
            "aa": coverage.aa_rows(outcomes),
            "power": coverage.power_rows(levels),
        },
    )


def _http(out: Path, scale: Scale, seed: int, say: Callable[[str], None]) -> None:
    shutil.rmtree(out / "http", ignore_errors=True)
    results = http_studies.run(out / "http", scale.http_studies, scale.http_blocks, seed, say)
    truths = true_taxes("equal", "fixed", scale.truth_launches, http_studies.CELL, seed)
    rows = http_studies.compare(results, truths)
    write_text(out / "http_taxes.csv", csv_text(pd.DataFrame(rows, dtype=object)))
    write_json(
        out / "http.json",
        {
            "machine": machine(),
            "seed": seed,
            "scale": asdict(scale),
            "taxes": rows,
            "harness": http_studies.harness_summary(results),
            "cells": http_studies.cell_states(results),
        },
    )


def _faults(out: Path, scale: Scale, seed: int, say: Callable[[str], None]) -> None:
    shutil.rmtree(out / "faults", ignore_errors=True)
    rows = fault_table.run(out / "faults", scale.faults, seed, say)
    write_text(out / "faults.csv", csv_text(pd.DataFrame(rows, dtype=object)))
    write_json(out / "faults.json", {"machine": machine(), "seed": seed, "faults": rows})

"""How right a rehearsal is: a measured study, and the same rehearsed from one of its launches.

    python -m connector_tax.rehearsal.accuracy --archive FILE

The step log of one launch is fitted, the whole study is rehearsed with it at its own reference
rates, and plain's cells are set beside the measured ones. Every other configuration costs more
than plain by what such a study is to find out, and is not compared; nor is ref_safe, which hangs on
the costs of all.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from connector_tax.analysis.ingest import Cell, load_cells
from connector_tax.analysis.measure import measure_requests
from connector_tax.analysis.reference import judge_launches, judgement, read_loads
from connector_tax.artifacts import paths
from connector_tax.artifacts.checks import BOUNDS
from connector_tax.artifacts.index import read_index
from connector_tax.artifacts.names import PHASES, Launch
from connector_tax.artifacts.record_reader import read_record
from connector_tax.artifacts.stage_records import RatesRecord
from connector_tax.artifacts.study_file import Study, launches, load_study
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.commands import run_command
from connector_tax.config import ConfigError
from connector_tax.files import ArtifactError
from connector_tax.provenance.unpack import unpack
from connector_tax.rehearsal.machine import machine_of
from connector_tax.rehearsal.page import Section, show
from connector_tax.rehearsal.study import RehearsalError, rehearse_at

DURATION_AIM, TTFT_AIM = 0.15, 0.20
HEADINGS = ["cell", "s", "meas.", "%", "TTFT p50", "meas.", "%", "saturated"]


@dataclass(frozen=True)
class CellFigures:
    """Plain in one cell: medians over its valid launches."""

    seconds: float
    ttft_p50_ms: float
    saturated: bool


def figures_of(root: Path) -> dict[tuple[str, str], CellFigures]:
    """Phase and cell to plain's figures in a study's folder, measured or rehearsed."""
    study = load_study(root / paths.STUDY)
    rates = read_record(root / paths.REFERENCE_RATES, RatesRecord)
    rate_of = {"A": None, "B": rates["ref_safe"], "Bp": rates["ref_load"]}
    cells = [
        cell
        for phase in PHASES
        for cell in load_cells(study, phase, rate_of[phase])
        if cell.configuration == study.baseline and cell.status == "valid"
    ]
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.key.phase, cell.key.cell), []).append(cell)
    saturated = _saturated(study, cells)
    return {
        name: CellFigures(
            median(_seconds(cell) for cell in group),
            median(float(np.median(measure_requests(cell).ttft_ms)) for cell in group),
            2 * sum(saturated[cell.key] for cell in group) >= len(group),
        )
        for name, group in groups.items()
    }


def _seconds(cell: Cell) -> float:
    assert cell.record is not None
    window = cell.record["window"]
    return float(window["t_drained_ns"] - window["t_origin_ns"]) / 1e9


def _saturated(study: Study, cells: Sequence[Cell]) -> dict[Any, bool]:
    loads = read_loads(cells)
    sweeps = judge_launches(study, [c for c in cells if c.key.phase == "A"], loads)
    return {
        cell.key: cell.key in loads
        and judgement(study, cell.key, cell.rate_rps or 0.0, loads[cell.key], sweeps).saturated
        for cell in cells
    }


def study_seconds(root: Path, study: StudyDocument) -> float:
    """Start-ups, cells and releases of every launch of a study."""
    indexes = [read_index(e.folder(root)) for phase in PHASES for e in launches(study, phase)]
    names = ("startup_s", "cells_s", "release_s")
    return sum(i.timing[name] for i in indexes if i is not None for name in names)


def middle_launch(root: Path) -> str:
    """Plain's launch of Phase A whose TTFT p50 in the lightest cell is the middle one.

    Raises:
        ArtifactError: no such launch has a valid cell.
    """
    study = load_study(root / paths.STUDY)
    valid = [c for c in load_cells(study, "A") if c.status == "valid" and c.rate_rps is not None]
    plain = [cell for cell in valid if cell.configuration == study.baseline]
    if not plain:
        raise ArtifactError(f"{root}: no launch of {study.baseline} has a valid cell in Phase A")
    lightest = min(plain, key=lambda cell: cell.rate_rps or 0.0).key.cell
    ordered = sorted(
        (float(np.median(measure_requests(cell).ttft_ms)), cell.key)
        for cell in plain
        if cell.key.cell == lightest
    )
    key = ordered[(len(ordered) - 1) // 2][1]
    return Launch(key.config, key.block, "A").name


def compare(
    predicted: Mapping[tuple[str, str], CellFigures],
    measured: Mapping[tuple[str, str], CellFigures],
) -> tuple[list[list[str]], dict[str, str], bool]:
    """A row for each cell that both have, how many meet each aim, and whether all do."""
    both = [name for name in measured if name in predicted]
    rows, hits = [], {"duration": 0, "saturation": 0, "TTFT p50": 0}
    for name in both:
        mine, real = predicted[name], measured[name]
        seconds = mine.seconds / real.seconds - 1
        ttft = mine.ttft_p50_ms / real.ttft_p50_ms - 1
        hits["duration"] += abs(seconds) <= DURATION_AIM
        hits["TTFT p50"] += abs(ttft) <= TTFT_AIM
        hits["saturation"] += mine.saturated == real.saturated
        said = {True: "yes", False: "no"}
        same = said[real.saturated]
        if mine.saturated != real.saturated:
            same = f"{said[mine.saturated]}, meas. {said[real.saturated]}"
        rows.append(
            [" ".join(name), f"{mine.seconds:.1f}", f"{real.seconds:.1f}", f"{100 * seconds:+.0f}",
             f"{mine.ttft_p50_ms:.4g}", f"{real.ttft_p50_ms:.4g}", f"{100 * ttft:+.0f}", same]
        )  # fmt: skip
    lines = {
        f"{what} {aim}": f"{hits[what]} of {len(both)} cells"
        for what, aim in (
            ("duration", f"within {DURATION_AIM:.0%}"),
            ("saturation", "named right"),
            ("TTFT p50", f"within {TTFT_AIM:.0%}"),
        )
    }
    return rows, lines, all(hit == len(both) for hit in hits.values())


def main(argv: Sequence[str] | None = None) -> int:
    """Set a rehearsal beside the study it rehearses; non-zero where it misses an aim."""
    parser = argparse.ArgumentParser(
        prog="python -m connector_tax.rehearsal.accuracy", description=main.__doc__
    )
    parser.add_argument("--archive", type=Path, required=True)
    words = "the launch that is fitted, such as plain/block0/A; not given: plain's middle one"
    parser.add_argument("--launch", help=words)
    refusals = (ArtifactError, ConfigError, RehearsalError)
    return run_command(parser, argv, _compare, refusals, label="accuracy: ")


def _compare(arguments: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="accuracy-") as folder:
        measured, virtual = Path(folder) / "measured", Path(folder) / "rehearsed"
        unpack(arguments.archive, measured)
        document = load_study(measured / paths.STUDY).document
        launch = arguments.launch or middle_launch(measured)
        config = document["config"].copy()
        # An older study names fewer bounds than there are checks now.
        config["validity"] = {**BOUNDS, **config["validity"]}
        config["rehearsal"] = {"archive": str(arguments.archive), "launch": launch}
        study: StudyDocument = {**document, "config": config}
        machine = machine_of(study)
        virtual.mkdir()
        rehearse_at(study, virtual, read_record(measured / paths.REFERENCE_RATES, RatesRecord))
        rows, lines, good = compare(figures_of(virtual), figures_of(measured))
        mine, real = (study_seconds(root, study) for root in (virtual, measured))
    whole = mine / real - 1
    sentences = [
        *machine.source,
        f"the study's launches: {mine / 60:.1f} min predicted, {real / 60:.1f} measured "
        f"({whole:+.0%})",
        *(f"{what}: {count}" for what, count in lines.items()),
    ]
    show(f"{study['study']}, rehearsed", [Section("plain", sentences, HEADINGS, rows)])
    return int(not (good and abs(whole) <= DURATION_AIM))


if __name__ == "__main__":
    sys.exit(main())

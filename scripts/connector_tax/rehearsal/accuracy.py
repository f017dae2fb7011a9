"""How right a rehearsal is: a measured study, and the same rehearsed from one of its launches.

    python -m connector_tax.rehearsal.accuracy --archive FILE

The step log of one launch is fitted, the whole study is rehearsed with it at its own reference
rates, and plain's cells are set beside the measured ones, and the widths of its A/A intervals.
Every other configuration costs more than plain by what such a study is to find out, and is not
compared; nor is ref_safe, which hangs on the costs of all. A study of the embedded engine is
rehearsed by the engine's own definition.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from connector_tax.analysis.aggregate import sample_cells
from connector_tax.analysis.effects import TaxTable
from connector_tax.analysis.ingest import Cell, load_cells
from connector_tax.analysis.measure import Requests, measure_requests
from connector_tax.analysis.reference import judge_cells, read_loads
from connector_tax.artifacts import paths
from connector_tax.artifacts.checks import BOUNDS
from connector_tax.artifacts.index import read_index
from connector_tax.artifacts.metrics import METRICS
from connector_tax.artifacts.names import PHASES, CellKey, Launch
from connector_tax.artifacts.record_reader import read_record
from connector_tax.artifacts.stage_records import RatesRecord
from connector_tax.artifacts.study_file import Study, every_launch, load_study
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.commands import run_command
from connector_tax.config import ConfigError
from connector_tax.files import ArtifactError
from connector_tax.provenance.archive import unpack
from connector_tax.rehearsal.machine import machine_of
from connector_tax.rehearsal.noise import Noise, shown
from connector_tax.rehearsal.page import Section, page
from connector_tax.rehearsal.processes import SimulationError
from connector_tax.rehearsal.study import rehearse_at

# How far a prediction may be from what was measured, as a fraction of it.
AIMS = {"seconds": 0.15, "TTFT p50": 0.20, "A/A": 0.30}


@dataclass(frozen=True)
class Cells:
    """A study's cells and the requests of its valid ones, measured or rehearsed."""

    study: Study
    cells: Sequence[Cell]
    requests: Mapping[CellKey, Requests]

    @classmethod
    def of(cls, root: Path) -> "Cells":
        """Those of the study in a folder."""
        study = load_study(root / paths.STUDY)
        rates = read_record(root / paths.REFERENCE_RATES, RatesRecord)
        rate_of = {"A": None, "B": rates["ref_safe"], "Bp": rates["ref_load"]}
        cells = [cell for phase in PHASES for cell in load_cells(study, phase, rate_of[phase])]
        valid = [cell for cell in cells if cell.status == "valid"]
        return cls(study, cells, {cell.key: measure_requests(cell) for cell in valid})

    def of_plain(self) -> dict[tuple[str, str], dict[str, float]]:
        """Phase and cell to plain's figures: medians over its valid launches."""
        study = self.study
        plain = [
            cell
            for cell in self.cells
            if cell.configuration == study.baseline and cell.key in self.requests
        ]
        judged = judge_cells(study, plain, read_loads(plain))
        groups: dict[tuple[str, str], list[dict[str, float]]] = {}
        for cell in plain:
            assert cell.record is not None
            window, key = cell.record["window"], cell.key
            figures = {
                "seconds": (window["t_drained_ns"] - window["t_origin_ns"]) / 1e9,
                "TTFT p50": float(np.median(self.requests[key].ttft_ms)),
                "saturated": key in judged and judged[key].saturated,
            }
            groups.setdefault((key.phase, key.cell), []).append(figures)
        return {
            name: {figure: median(one[figure] for one in group) for figure in group[0]}
            for name, group in groups.items()
        }

    def aa_half_widths(self) -> dict[tuple[str, str, str], float]:
        """Phase, cell and metric to half the interval of plain against plain."""
        table = TaxTable(self.study, self.cells, sample_cells(self.requests))
        places = [(p, c["cell"], m) for p in PHASES for c in self.study.cells(p) for m in METRICS]
        effects = {place: table.tax(self.study.plains(place[0])[-1], *place) for place in places}
        halves = {place: (e.hi - e.lo) / 2 for place, e in effects.items() if e is not None}
        return {place: half for place, half in halves.items() if np.isfinite(half)}


def study_seconds(root: Path, study: StudyDocument) -> float:
    """Start-ups, cells and releases of every launch of a study."""
    indexes = [read_index(launch.folder(root)) for launch in every_launch(study)]
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


def compare(predicted: Cells, measured: Cells, noise: Noise) -> tuple[list[Section], bool]:
    """What both have beside each other, and whether every aim is met; rehearsed with `noise`."""
    mine, real = predicted.of_plain(), measured.of_plain()
    both = [name for name in real if name in mine]
    rows, hits = [], dict.fromkeys(("seconds", "TTFT p50", "saturated"), 0)
    for name in both:
        row = [" ".join(name)]
        for figure in ("seconds", "TTFT p50"):
            said, seen = mine[name][figure], real[name][figure]
            row += [f"{said:.4g}", f"{seen:.4g}", f"{100 * (said / seen - 1):+.0f}"]
            hits[figure] += abs(said / seen - 1) <= AIMS[figure]
        said, seen = (bool(side[name]["saturated"]) for side in (mine, real))
        hits["saturated"] += said == seen
        rows.append([*row, f"{'yes' if said else 'no'}, {'yes' if seen else 'no'}"])
    counts = [
        f"{figure} {f'within {AIMS[figure]:.0%}' if figure in AIMS else 'named right'}: "
        f"{hit} of {len(both)} cells"
        for figure, hit in hits.items()
    ]
    headings = ["cell", "s", "meas.", "%", "TTFT p50", "meas.", "%", "saturated, meas."]
    ours, theirs = predicted.aa_half_widths(), measured.aa_half_widths()
    ratios = {place: ours[place] / half for place, half in theirs.items() if place in ours}
    whole = _middle(list(ratios.values()))
    widths = [
        [metric, str(len(of)), f"{_middle(list(of.values())):.2f}",
         f"{min(of.values()):.2f}", f"{max(of.values()):.2f}"]
        for metric in METRICS
        if (of := {place: ratio for place, ratio in ratios.items() if place[2] == metric})
    ]  # fmt: skip
    drawn, found = (shown(side.study.document, side.requests) for side in (predicted, measured))
    text = (
        f"Half-width of plain against plain, predicted over measured: {whole:.2f} (geometric mean "
        f"of {len(ratios)}; aim: within {AIMS['A/A']:.0%})."
    )
    launches = (
        f"Launches by the TPOT p50 of their cells: spread {drawn.launch_sd:.2%} rehearsed (of "
        f"steps {noise.launch_sd:.2%}), {found.launch_sd:.2%} measured; bad {found.bad_share:.1%}; "
        f"drift over a block {found.drift_sd:.2%}."
    )
    good = all(hit == len(both) for hit in hits.values()) and abs(whole - 1) <= AIMS["A/A"]
    return [
        Section("plain", counts, headings, rows),
        Section("A/A", [text, launches], ["metric", "cells", "mean", "least", "most"], widths),
    ], good


def _middle(ratios: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(ratios))))


def main(argv: Sequence[str] | None = None) -> int:
    """Set a rehearsal beside the study it rehearses; non-zero where it misses an aim."""
    parser = argparse.ArgumentParser(
        prog="python -m connector_tax.rehearsal.accuracy", description=main.__doc__
    )
    parser.add_argument("--archive", type=Path, required=True)
    words = "the launch that is fitted, such as plain/block0/A; not given: plain's middle one"
    parser.add_argument("--launch", help=words)
    refusals = (ArtifactError, ConfigError, SimulationError)
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
        sections, good = compare(Cells.of(virtual), Cells.of(measured), machine.noise)
        mine, real = (study_seconds(root, study) for root in (virtual, measured))
    whole = mine / real - 1
    took = f"the study's launches: {mine / 60:.1f} min predicted, {real / 60:.1f} measured "
    sections[0].sentences[:0] = [*machine.source, f"{took}({whole:+.0%})"]
    print(page(f"{study['study']}, rehearsed", sections))
    return int(not (good and abs(whole) <= AIMS["seconds"]))


if __name__ == "__main__":
    sys.exit(main())

"""How right a rehearsal is: a measured study, and the same rehearsed from one of its launches.

The step log of one launch is fitted, the whole study is rehearsed with it at its own reference
rates, and plain's cells are set beside the measured ones, and the widths of its A/A intervals.
Every other configuration costs more than plain by what such a study is to find out, and is not
compared; nor is ref_safe, which hangs on the costs of all. A study of the embedded engine is
rehearsed by the engine's own definition, one beside an emulated device by its own roofline, with
the spread of launches that was measured.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from scipy.stats import gmean

from benchmarks import parser_of
from connector_tax.analysis.aggregate import write_tables
from connector_tax.artifacts import paths
from connector_tax.artifacts.checks import BOUNDS
from connector_tax.artifacts.index import read_index
from connector_tax.artifacts.names import ALL_RATES, PHASES, Launch, configuration_of
from connector_tax.artifacts.record_reader import read_record
from connector_tax.artifacts.stage_records import RatesRecord, ShapeRatesRecord
from connector_tax.artifacts.study_file import Study, every_launch, load_study
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.artifacts.tables import TAX
from connector_tax.artifacts.verdicts import MIN_BLOCKS_FOR_VERDICT
from connector_tax.commands import run_command
from connector_tax.config import ConfigError
from connector_tax.files import ArtifactError, read_json, write_json
from connector_tax.provenance.archive import unpack
from connector_tax.rehearsal.findings import Section, page
from connector_tax.rehearsal.launch import SimulationError
from connector_tax.rehearsal.machine import Noise, cells_of_launches, machine_of, noise_of
from connector_tax.rehearsal.study import prepare, rehearse_phase

# How far a prediction may be from what was measured, as a fraction of it.
AIMS = {"seconds": 0.15, "TTFT p50": 0.20, "A/A": 0.30}


def launch_cells(study: Study) -> pd.DataFrame:
    """The valid cells of single launches, from tables made anew.

    Raises:
        ArtifactError: a record is missing or malformed.
    """
    write_tables(study)
    return cells_of_launches(study.root / paths.ANALYSIS / paths.CELLS)


def of_plain(study: Study, cells: pd.DataFrame) -> pd.DataFrame:
    """Plain's figures by phase and cell: medians over its valid launches."""
    own = cells[cells.configuration == study.baseline]

    def seconds(cell: Any) -> float:
        folder = Launch(cell.config, cell.block, cell.phase).folder(study.root) / cell.cell
        window = read_json(folder / paths.cell_record(cell.phase, cell.cell))["window"]
        return float(window["t_drained_ns"] - window["t_origin_ns"]) / 1e9

    own = own.assign(
        seconds=[seconds(cell) for cell in own.itertuples()],
        saturated=own.saturated.eq(True).astype(float),
    ).rename(columns={"ttft_p50_ms": "TTFT p50"})
    columns = ["seconds", "TTFT p50", "saturated"]
    return own.groupby(["phase", "cell"], sort=False)[columns].median()


def aa_half_widths(study: Study) -> pd.Series:
    """Half the interval of plain against plain, by metric, phase and cell."""
    effects = pd.read_csv(study.root / paths.ANALYSIS / paths.EFFECTS)
    taxes = effects[(effects.quantity == TAX) & (effects.cell != ALL_RATES)]
    own = taxes[taxes.config.map(configuration_of) == study.baseline]
    return own.assign(half=(own.hi - own.lo) / 2).set_index(["metric", "phase", "cell"]).half


def study_seconds(root: Path, study: StudyDocument) -> float:
    """Start-ups, cells and releases of every launch of a study."""
    indexes = [read_index(launch.folder(root)) for launch in every_launch(study)]
    names = ("startup_s", "cells_s", "release_s")
    return sum(i.timing[name] for i in indexes if i is not None for name in names)


def middle_launch(study: Study, cells: pd.DataFrame) -> str:
    """Plain's launch of Phase A whose TTFT p50 in the lightest cell is the middle one.

    Raises:
        ArtifactError: no such launch has a valid cell.
    """
    plain = cells[(cells.configuration == study.baseline) & (cells.phase == "A")]
    if plain.empty:
        raise ArtifactError(
            f"{study.root}: no launch of {study.baseline} has a valid cell in Phase A"
        )
    lightest = plain[plain.rate_rps == plain.rate_rps.min()].sort_values("ttft_p50_ms")
    middle = lightest.iloc[(len(lightest) - 1) // 2]
    return Launch(middle.config, int(middle.block), "A").name


def compare(
    predicted: Study, measured: Study, measured_cells: pd.DataFrame, noise: Noise
) -> list[Section]:
    """What both have beside each other; rehearsed with `noise`."""
    sides = [(predicted, launch_cells(predicted)), (measured, measured_cells)]
    mine, real = (of_plain(*side) for side in sides)
    both = real.join(mine.add_suffix("_said"), how="inner")
    rows, hits = [], {"seconds": 0, "TTFT p50": 0, "saturated": 0}
    for of in both.reset_index().to_dict("records"):
        row = [f"{of['phase']} {of['cell']}"]
        for figure in ("seconds", "TTFT p50"):
            said, seen = of[f"{figure}_said"], of[figure]
            row += [f"{said:.4g}", f"{seen:.4g}", f"{100 * (said / seen - 1):+.0f}"]
            hits[figure] += abs(said / seen - 1) <= AIMS[figure]
        judged = bool(of["saturated_said"]), bool(of["saturated"])
        hits["saturated"] += judged[0] == judged[1]
        rows.append([*row, ", ".join("yes" if saturated else "no" for saturated in judged)])
    counts = [
        f"{figure} {f'within {AIMS[figure]:.0%}' if figure in AIMS else 'named right'}: "
        f"{hit} of {len(both)} cells"
        for figure, hit in hits.items()
    ]
    headings = ["cell", "s", "meas.", "%", "TTFT p50", "meas.", "%", "saturated, meas."]
    ratios = (aa_half_widths(predicted) / aa_half_widths(measured)).dropna()
    widths = [
        [str(metric), str(len(of)), *(f"{value:.2f}" for value in (gmean(of), of.min(), of.max()))]
        for metric, of in ratios.groupby("metric", sort=False)
    ]
    drawn, found = (noise_of(cells, study.document["run_order"]) for study, cells in sides)
    text = (
        f"Half-width of plain against plain, predicted over measured: {gmean(ratios):.2f} "
        f"(geometric mean of {len(ratios)}; aim: within {AIMS['A/A']:.0%})."
    )
    launches = (
        f"Launches by the TPOT p50 of their cells: spread {drawn.launch_sd:.2%} rehearsed (of "
        f"steps {noise.launch_sd:.2%}), {found.launch_sd:.2%} measured; bad {found.bad_share:.1%}; "
        f"drift over a block {found.drift_sd:.2%}."
    )
    return [
        Section("plain", counts, headings, rows),
        Section("A/A", [text, launches], ["metric", "cells", "mean", "least", "most"], widths),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Set a rehearsal beside the study it rehearses."""
    parser = parser_of(__file__, __doc__)
    parser.add_argument("--archive", type=Path, required=True)
    words = "the launch that is fitted, such as plain/block0/A; not given: plain's middle one"
    parser.add_argument("--launch", help=words)
    refusals = (ArtifactError, ConfigError, SimulationError)
    return run_command(parser, argv, _compare, refusals, label="rehearsal: ")


def _compare(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
        root, virtual = Path(folder) / "measured", Path(folder) / "rehearsed"
        unpack(arguments.archive, root)
        virtual.mkdir()
        measured = load_study(root / paths.STUDY)
        cells = launch_cells(measured)
        config = measured.config.copy()
        # An older study names fewer bounds than there are checks now.
        config["validity"] = {**BOUNDS, **config["validity"]}
        emulated = config["engine"].get("device") == "emulated" and "rehearsal" in config
        if emulated and not arguments.launch:
            # An emulated device's steps are the same in every launch; the host's work is not.
            spread = noise_of(cells, measured.document["run_order"]).launch_sd
            config["rehearsal"] = {**config["rehearsal"], "launch_sd": spread}
        else:
            launch = arguments.launch or middle_launch(measured, cells)
            config["rehearsal"] = {"archive": str(arguments.archive), "launch": launch}
        study: StudyDocument = {**measured.document, "config": config}
        machine = machine_of(study)
        document = prepare(study, virtual, max(study["blocks"], MIN_BLOCKS_FOR_VERDICT))
        rates = read_record(root / paths.REFERENCE_RATES, RatesRecord)
        write_json(virtual / paths.REFERENCE_RATES, rates)
        if (root / paths.SHAPE_RATES).exists():
            shapes = read_record(root / paths.SHAPE_RATES, ShapeRatesRecord)
            shapes["design_sha256"] = document["design_sha256"]
            write_json(virtual / paths.SHAPE_RATES, shapes)
        for phase in PHASES:
            rehearse_phase(document, phase, virtual, machine)
        predicted = load_study(virtual / paths.STUDY)
        sections = compare(predicted, measured, cells, machine.noise)
        mine, real = (study_seconds(each, study) for each in (virtual, root))
    whole = mine / real - 1
    took = f"the study's launches: {mine / 60:.1f} min predicted, {real / 60:.1f} measured "
    sections[0].sentences[:0] = [*machine.source, f"{took}({whole:+.0%})"]
    print(page(f"{study['study']}, rehearsed", sections))


if __name__ == "__main__":
    sys.exit(main())

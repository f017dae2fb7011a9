"""Rehearse a whole study in virtual time: launches, reference rates and analysis, in a folder."""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from connector_tax.analysis.aggregate import write_tables
from connector_tax.analysis.looks import take_due_look
from connector_tax.analysis.reference import NoReferenceRateError, rates_of
from connector_tax.artifacts import paths
from connector_tax.artifacts.cell_records import CellRecord
from connector_tax.artifacts.folder import StudyFolder
from connector_tax.artifacts.index import LaunchIndex
from connector_tax.artifacts.names import PHASES, Launch, baseline_of
from connector_tax.artifacts.record_reader import read_record
from connector_tax.artifacts.stage_records import ConclusionRecord, HypothesesRecord, RatesRecord
from connector_tax.artifacts.study_file import Study, launches, load_study
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.artifacts.tables import ROW_TYPES, TAX, EffectRow, Row, read_table
from connector_tax.artifacts.verdicts import MIN_BLOCKS_FOR_VERDICT
from connector_tax.engine.virtual import VirtualEngine
from connector_tax.files import write_json
from connector_tax.rehearsal.launch import SimulationError, in_processes, rehearse_launch
from connector_tax.rehearsal.machine import Machine
from connector_tax.servers.embedded import launch_seed
from connector_tax.study.design import run_order
from connector_tax.study.shape_rates import (
    ShapeRateError,
    fastest_burst,
    shape_rates_content,
    shapes_of,
)


@dataclass
class Rehearsal:
    """A study's outcome in virtual time.

    Attributes:
        study: the rehearsed study, with at least as many blocks as a verdict needs.
        own_blocks: number of blocks of the original study.
        machine: the rehearsed machine.
        rates: reference_rates.json; None if no rate qualifies.
        no_rate: why no rate qualifies; None if one does.
        probes_s: duration of the shape probes; None without them.
        indexes: the index of every launch that ran.
        records: the record of each cell, by launch and cell name.
        rows, taxes, hypotheses: the analysis's tables; empty without reference rates.
    """

    study: Study
    own_blocks: int
    machine: Machine
    rates: RatesRecord | None = None
    no_rate: str | None = None
    probes_s: float | None = None
    indexes: Mapping[Launch, LaunchIndex] = field(default_factory=dict)
    records: Mapping[tuple[Launch, str], CellRecord] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    taxes: list[EffectRow] = field(default_factory=list)
    hypotheses: list[ConclusionRecord] = field(default_factory=list)

    def own_indexes(self, phase: str) -> Iterator[LaunchIndex]:
        """Yield the indexes of a phase's launches that belong to the original study."""
        for launch, index in self.indexes.items():
            if launch.phase == phase and launch.block < self.own_blocks:
                yield index


def rehearse(study: StudyDocument, machine: Machine, root: Path) -> Rehearsal:
    """Rehearse a study in the empty folder `root`.

    Raises:
        SimulationError: a process of the rehearsal failed, or a shape cannot be served.
    """
    rehearsal = run_phases(study, machine, root, max(study["blocks"], MIN_BLOCKS_FOR_VERDICT))
    if rehearsal.rates is not None:
        write_tables(StudyFolder(rehearsal.study))
        folder = root / paths.ANALYSIS
        cells = read_table(folder / paths.CELLS, ROW_TYPES[paths.CELLS])
        effects = read_table(folder / paths.EFFECTS, EffectRow)
        rehearsal.rows = [vars(row) for row in cells]
        rehearsal.taxes = [row for row in effects if row.quantity == TAX]
        concluded = read_record(folder / paths.HYPOTHESES, HypothesesRecord)
        rehearsal.hypotheses = concluded["hypotheses"]
    return rehearsal


def run_phases(study: StudyDocument, machine: Machine, root: Path, blocks: int) -> Rehearsal:
    """Run Phase A, its reference rates, the shape probes, and Phases B and B', without tables.

    Args:
        root: the study's folder, empty.

    Raises:
        SimulationError: a process failed, or a shape cannot be served.
    """
    document = prepare(study, root, blocks)
    rehearsal = Rehearsal(load_study(root / paths.STUDY), study["blocks"], machine)
    rehearse_phase(document, "A", root, machine)
    try:
        rehearsal.rates = rates_of(StudyFolder(rehearsal.study))
    except NoReferenceRateError as error:
        rehearsal.no_rate = str(error)
    else:
        write_json(root / paths.REFERENCE_RATES, rehearsal.rates)
        if document["config"].get("shape_rates") is not None:
            completed_s, rehearsal.probes_s = rehearse_shapes(document, machine)
            try:
                write_json(root / paths.SHAPE_RATES, shape_rates_content(document, completed_s))
            except ShapeRateError as error:
                raise SimulationError(str(error)) from None
        for phase in PHASES[1:]:
            rehearse_phase(document, phase, root, machine)
    launches = StudyFolder(rehearsal.study).launches
    rehearsal.indexes = {la.launch: index for la in launches if (index := la.index) is not None}
    rehearsal.records = {
        (la.launch, entry.cell): record
        for la in launches
        for entry in (la.index.cells if la.index else ())
        if entry.files and (record := la.record(entry.cell)) is not None
    }
    return rehearsal


def prepare(study: StudyDocument, root: Path, blocks: int) -> StudyDocument:
    """Write the rehearsed study's own files; return its design, which has `blocks` blocks."""
    config = study["config"].copy()
    document: StudyDocument = {**study, "config": config}
    if study["blocks"] != blocks:
        config["blocks"] = document["blocks"] = blocks
        document["run_order"] = run_order(config)
        # The levels of interim analyses depend on the original number of blocks.
        config["statistics"] = config["statistics"].copy()
        config["statistics"].pop("looks", None)
    write_json(root / paths.STUDY, document)
    gates = {c["id"]: {"include": True, "reason": "rehearsed"} for c in study["configurations"]}
    write_json(root / paths.PREFLIGHT_STATUS, gates)
    patch = {"step_timing_available": False, "reason": "a rehearsal records no steps"}
    write_json(root / paths.PATCH_STATUS, patch)
    return document


def rehearse_phase(document: StudyDocument, phase: str, root: Path, machine: Machine) -> None:
    """Rehearse every launch of a phase, block by block, with interim analyses if the study has any.

    Raises:
        SimulationError: a process failed.
    """
    tasks = [(launch.config, launch.block, phase) for launch in launches(document, phase)]
    if len(tasks) == 1:
        rehearse_launch(document, Launch(*tasks[0]), root, machine)
        return
    blocks = [tasks]
    if phase == "A" and "looks" in document["config"]["statistics"]:
        blocks = [[t for t in tasks if t[1] == block] for block in range(document["blocks"])]
    for block, members in enumerate(blocks):
        in_processes("connector_tax.rehearsal.launch", [str(root)], members)
        if members is not tasks:
            take_due_look(load_study(root / paths.STUDY), block)


def rehearse_shapes(study: StudyDocument, machine: Machine) -> tuple[dict[str, list[float]], float]:
    """Return completion times in s by cell name, and the total duration of the probes in s.

    Repeats what `study.shape_rates` measures on a server.
    """
    config = study["config"]
    baseline = baseline_of(config)
    seed = launch_seed(study, Launch(baseline, 0, "B"))
    engine = VirtualEngine(machine.engines[baseline], seed, machine.device_us)
    longest_s = config["cell"]["request_timeout_s"]
    completed_s = {
        name: fastest_burst(config, functools.partial(_burst, engine, shape, longest_s))
        for name, shape in shapes_of(study).items()
    }
    return completed_s, engine.now_ns / 1e9


def _burst(
    engine: VirtualEngine, shape: tuple[int, int], longest_s: float, count: int
) -> list[float]:
    """Return the completion times, in s, of `count` requests of a shape that arrive at once."""
    began_ns = engine.now_ns
    arrived = [engine.add(number, *shape) for number in range(count)]
    done: list[float] = []
    passed_s = 0.0
    while engine.scheduler.has_work and passed_s < longest_s:
        finished = sum(sequence.finished for sequence in engine.step())
        passed_s = (engine.now_ns - began_ns) / 1e9
        done += [passed_s] * finished
    for sequence in arrived:
        if not sequence.finished:
            engine.abort(sequence)
    return done

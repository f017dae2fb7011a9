"""How long a study takes on the model of its machine, in seconds of computing.

On a real vLLM every configuration costs what the baseline does (`rehearsal.machine`), so one
virtual launch of the baseline in each phase says what `rehearsal.study` says with all of them. A
study of the embedded engine is not modelled: its machine is the one at hand, which also runs the
load generator.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from connector_tax.artifacts import paths
from connector_tax.artifacts.index import read_index
from connector_tax.artifacts.names import PHASES, baseline_of
from connector_tax.artifacts.study_file import launches, read_study
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.commands import run_command, study_parser
from connector_tax.config import ConfigError
from connector_tax.files import write_json
from connector_tax.rehearsal.launch import rehearse_launch
from connector_tax.rehearsal.machine import Machine, machine_of
from connector_tax.rehearsal.processes import SimulationError
from connector_tax.rehearsal.study import Ran, prepare, read_cell_record, run_phases
from connector_tax.servers.kinds import engine_of
from connector_tax.study.design import run_order
from connector_tax.study.plan import (
    Durations,
    assumed,
    durations_content,
    machine_named,
    read_durations,
)


def durations_of(study: StudyDocument, folder: Path) -> Durations:
    """What the study's folder says of its durations, else what its machine's model says."""
    known = read_durations(study, folder)
    return modelled(study) if known is None else known


def modelled(study: StudyDocument) -> Durations:
    """What the model of the study's machine says; where there is none, what is assumed, and why."""
    names = machine_named(study)
    if engine_of(study["config"]["engine"]).emulated:
        return assumed(study, "no model of this machine")
    if names is None:
        return assumed(study, "no `rehearsal` section")
    try:
        machine = machine_of(study)
        with tempfile.TemporaryDirectory(prefix="durations-") as folder:
            return _of_one_launch(study, machine, Path(folder))
    except (ConfigError, SimulationError) as error:
        return assumed(study, f"no model of the machine ({error})")


def _of_one_launch(study: StudyDocument, machine: Machine, root: Path) -> Durations:
    document = prepare(_baseline_alone(study), root, 1)

    def run(phase: str) -> None:
        for launch in launches(document, phase):
            rehearse_launch(document, launch, root, machine)

    ran = run_phases(document, machine, root, run)
    rates = {"B": ran.rates["ref_safe"], "Bp": ran.rates["ref_load"]} if ran.rates else {}
    return Durations(
        startup_s=machine.startup_s,
        probes_s=ran.probes_s or 0.0,
        source=_source(study, ran),
        rates_rps=rates,
        cells={phase: _cells(document, phase, root) for phase in PHASES},
    )


def _baseline_alone(study: StudyDocument) -> StudyDocument:
    """The design with one launch of the baseline in each phase that it has."""
    config = study["config"].copy()
    baseline = baseline_of(config)
    config["configurations"], config["plain_launches"], config["blocks"] = [baseline], 1, 1
    if "phase_b" in config:
        config["phase_b"] = {**config["phase_b"], "configurations": [baseline]}
    if "phase_bp" in config:
        config["phase_bp"] = {**config["phase_bp"], "configurations": [baseline]}
    only = [entry for entry in study["configurations"] if entry["id"] == baseline]
    alone = study.copy()
    alone["config"], alone["configurations"] = config, only
    alone["blocks"], alone["run_order"] = 1, run_order(config)
    return alone


def _cells(document: StudyDocument, phase: str, root: Path) -> dict[str, float]:
    """Seconds of each cell of the launch of a phase; of one that is left out, 0."""
    seconds: dict[str, float] = {}
    for launch in launches(document, phase):
        index = read_index(launch.folder(root))
        for entry in [] if index is None else index.cells:
            record = read_cell_record(launch, entry.cell, root) if entry.files else None
            seconds[entry.cell] = record["rehearsed"]["seconds"] if record else 0.0
    return seconds


def _source(study: StudyDocument, ran: Ran) -> str:
    names = machine_named(study)
    assert names is not None
    fitted = f"{names.get('launch')} of {names.get('archive')}, fitted"
    text = f"by the model of {names.get('accelerator', fitted)} (rehearsal)"
    return text if ran.rates else f"{text}, which finds no reference rate"


def main(argv: Sequence[str] | None = None) -> int:
    """Write durations.json: how long each part of a study is expected to take."""
    return run_command(study_parser("rehearsal.durations", main.__doc__), argv, _write)


def _write(arguments: argparse.Namespace) -> None:
    study = read_study(arguments.study)
    known = modelled(study)
    write_json(arguments.study.parent / paths.DURATIONS, durations_content(study, known))
    print(f"durations: {known.source}")


if __name__ == "__main__":
    sys.exit(main())

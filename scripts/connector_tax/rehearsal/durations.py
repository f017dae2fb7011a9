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
from connector_tax.artifacts.names import PHASES, REFERENCE_OF, baseline_of
from connector_tax.artifacts.stage_records import Durations
from connector_tax.artifacts.study_file import read_study
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.commands import run_command, study_parser
from connector_tax.config import ConfigError
from connector_tax.files import write_json
from connector_tax.rehearsal.launch import SimulationError
from connector_tax.rehearsal.machine import QUIET, machine_of
from connector_tax.rehearsal.study import run_phases
from connector_tax.servers.kinds import engine_of
from connector_tax.study.design import run_order
from connector_tax.study.plan import assumed, durations_content, read_durations


def durations_of(study: StudyDocument, folder: Path) -> Durations:
    """What the study's folder says of its durations, else what its machine's model says."""
    known = read_durations(study, folder)
    return modelled(study) if known is None else known


def modelled(study: StudyDocument) -> Durations:
    """What the model of the study's machine says; where there is none, what is assumed, and why."""
    names = study["config"].get("rehearsal")
    if engine_of(study["config"]["engine"]).emulated:
        return assumed(study, "no model of this machine")
    if names is None:
        return assumed(study, "no `rehearsal` section")
    try:
        # What a usual launch takes, and not what one draw of its noise makes of it.
        machine = machine_of(study).noisy(QUIET)
        with tempfile.TemporaryDirectory(prefix="durations-") as folder:
            found = run_phases(_baseline_alone(study), machine, Path(folder), 1)
    except (ConfigError, SimulationError) as error:
        return assumed(study, f"no model of the machine ({error})")
    fitted = f"{names.get('launch')} of {names.get('archive')}, fitted"
    source = f"by the model of {names.get('accelerator', fitted)} (rehearsal)"
    if found.rates is None:
        source += ", which finds no reference rate"
    # Of a cell that is left out, 0.
    cells: dict[str, dict[str, float]] = {phase: {} for phase in PHASES}
    for launch, index in found.indexes.items():
        for entry in index.cells:
            record = found.records.get((launch, entry.cell))
            cells[launch.phase][entry.cell] = record["rehearsed"]["seconds"] if record else 0.0
    return Durations(
        startup_s=machine.startup_s,
        probes_s=found.probes_s or 0.0,
        source=source,
        rates_rps=(
            {phase: found.rates[name] for phase, name in REFERENCE_OF.items()}
            if found.rates
            else {}
        ),
        cells=cells,
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
    alone = study.copy()
    alone["config"], alone["blocks"], alone["run_order"] = config, 1, run_order(config)
    alone["configurations"] = [e for e in study["configurations"] if e["id"] == baseline]
    return alone


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

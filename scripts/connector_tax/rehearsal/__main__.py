"""Rehearse a study: `python -m connector_tax.rehearsal --study results/<study>/study.json`."""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from connector_tax.artifacts import paths
from connector_tax.artifacts.study_file import read_study
from connector_tax.commands import run_command, study_parser
from connector_tax.config import ConfigError
from connector_tax.files import ArtifactError, write_text
from connector_tax.provenance.archive import private_folder
from connector_tax.rehearsal.findings import (
    assumed,
    cells_that_cannot_be_valid,
    page,
    sections,
)
from connector_tax.rehearsal.launch import SimulationError
from connector_tax.rehearsal.machine import has_machine, machine_of
from connector_tax.rehearsal.study import rehearse


def main(argv: Sequence[str] | None = None) -> int:
    """Rehearse a study in virtual time; exit non-zero if one of its cells cannot be valid."""
    parser = study_parser("rehearsal", main.__doc__)
    refusals = (ArtifactError, ConfigError, SimulationError)
    return run_command(parser, argv, _rehearse, refusals, label="rehearsal: ")


def _rehearse(arguments: argparse.Namespace) -> int:
    study = read_study(arguments.study)
    began = time.monotonic()
    path = arguments.study.parent / paths.REHEARSAL_PAGE
    title = f"Rehearsal of {study['study']}"
    if not has_machine(study):
        text = page(title, [assumed(study)])
        write_text(path, text)
        print(f"{text}\n{path}")
        return 0
    with private_folder(Path(tempfile.gettempdir()) / "rehearsal") as folder:
        rehearsal = rehearse(study, machine_of(study), folder)
    text = page(title, sections(rehearsal))
    write_text(path, text)
    print(f"{text}\n{path}, in {time.monotonic() - began:.0f} s")
    hopeless = cells_that_cannot_be_valid(rehearsal)
    return int(bool(hopeless) or rehearsal.rates is None)


if __name__ == "__main__":
    sys.exit(main())

"""Compare planned with measured durations of studies.

Planned: before the first launch, without gates, at the archive's rates. Measured: start-ups, cells
and releases of all launches.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import parser_of
from connector_tax.artifacts import paths
from connector_tax.artifacts.folder import StudyFolder
from connector_tax.artifacts.study_file import Study, load_study
from connector_tax.commands import run_command
from connector_tax.config import ConfigError
from connector_tax.files import ArtifactError
from connector_tax.provenance.archive import unpack
from connector_tax.study.durations import durations_of
from connector_tax.study.plan import planned_cells


def measured_s(study: Study) -> float:
    """Return the seconds of start-ups, cells and releases of every launch of a study."""
    indexes = [launch.index for launch in StudyFolder(study).launches]
    names = ("startup_s", "cells_s", "release_s")
    return sum(i.timing[name] for i in indexes if i is not None for name in names)


def planned_s(study: Study, folder: Path) -> float:
    """Return the expected seconds of the study's launches; `folder` contains only their rates."""
    rows = list(planned_cells(study.document, folder))
    run = {row.launch for row in rows if row.expected_s}
    each_s = durations_of(study.document).startup_s + study.config["server"]["release_s"]
    return sum(row.expected_s for row in rows) + len(run) * each_s


def main(argv: Sequence[str] | None = None) -> int:
    """Print planned and measured durations of archives."""
    parser = parser_of(__file__, __doc__)
    parser.add_argument("archives", nargs="+", type=Path, metavar="ARCHIVE")
    return run_command(parser, argv, _compare, (ArtifactError, ConfigError), label="rehearsal: ")


def _compare(arguments: argparse.Namespace) -> None:
    table = Table("archive", "planned, min", "measured, min", "off by", "planned")
    for archive in arguments.archives:
        with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
            root, rates = Path(folder) / "measured", Path(folder) / "rates"
            unpack(archive, root)
            rates.mkdir()
            for name in (paths.REFERENCE_RATES, paths.SHAPE_RATES):
                if (root / name).exists():
                    (rates / name).parent.mkdir(parents=True, exist_ok=True)
                    (rates / name).write_bytes((root / name).read_bytes())
            study = load_study(root / paths.STUDY)
            planned, measured = planned_s(study, rates), measured_s(study)
        off = f"{planned / measured - 1:+.0%}"
        minutes = [f"{seconds / 60:.1f}" for seconds in (planned, measured)]
        table.add_row(archive.name, *minutes, off, durations_of(study.document).source)
    Console(width=120).print(table)


if __name__ == "__main__":
    sys.exit(main())

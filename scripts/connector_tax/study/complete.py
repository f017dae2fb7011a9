"""List void cells and failed launches; exit non-zero, or mark the study complete if none failed.

The index.json of a failed launch is renamed to index.failed.json here, so that the next run
measures its missing cells; everything derived from the other launches stays. With `--phase` the
launches of one phase are checked, and nothing is marked complete.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from connector_tax.artifacts import paths
from connector_tax.artifacts.folder import LaunchFolder, StudyFolder
from connector_tax.artifacts.names import PHASES
from connector_tax.commands import run_command, study_parser
from connector_tax.files import ArtifactError, make_durable, write_json
from connector_tax.foreign import printable
from connector_tax.study.processes import STOLEN_WORTH_SAYING
from connector_tax.study.remeasure import (
    MACHINE_CAUSES,
    OVERLOADED,
    stolen_share,
    void_cause,
    withdraw_failed,
)


def void_lines(ended: Iterable[LaunchFolder], study_folder: Path) -> list[str]:
    """Return a line for each cause of void cells: count, reason and remedy."""
    causes: Counter[str] = Counter()
    stolen = []
    for launch in ended:
        if launch.index is None:  # the launch has not ended
            raise ArtifactError(f"{launch.folder / paths.INDEX}: no such file")
        for cell in (entry.cell for entry in launch.index.cells if entry.status == "void"):
            if (record := launch.record(cell)) is None:
                raise ArtifactError(f"{launch.record_path(cell)}: no such file")
            if (cause := void_cause(record)) is not None:
                causes[cause] += 1
                stolen.append(stolen_share(launch.file("machine", cell)))
    again = f"run connector-tax remeasure {study_folder}, then the same command"
    mends = dict.fromkeys(MACHINE_CAUSES, f"stop other programs on the machine; {again}")
    mends[OVERLOADED] = "a retry would overload it again; lower the rates, or set `shape_rates`"
    lines = [
        f"VOID {number} {'cell' if number == 1 else 'cells'}: {cause}. {mends.get(cause, again)}"
        for cause, number in causes.most_common()
    ]
    high = [share for share in stolen if share >= STOLEN_WORTH_SAYING]
    if 2 * len(high) > len(stolen):
        lines.append(
            f"In {len(high)} of {len(stolen)} void cells the host took up to {max(high):.0%} of the"
            " CPU time (steal): measure when it is quieter, or on another machine"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """List void cells and failed launches; exit non-zero if a launch failed."""
    parser = study_parser("study.complete", main.__doc__)
    end = parser.add_mutually_exclusive_group(required=True)
    end.add_argument("--out", type=Path, help="file that marks the study complete")
    end.add_argument("--phase", choices=PHASES, help="check the launches of one phase only")
    return run_command(parser, argv, _conclude)


def _conclude(arguments: argparse.Namespace) -> int:
    study = StudyFolder.load(arguments.study)
    folder, phases = study.root, [arguments.phase] if arguments.phase else PHASES
    ended = [launch for phase in phases for launch in study.of_phase(phase)]
    for line in void_lines(ended, folder):
        print(printable(line), file=sys.stderr)
    failed = withdraw_failed((launch.launch for launch in ended), folder)
    if not failed:
        if arguments.out:
            make_durable(folder)
            write_json(arguments.out, {"complete": True})
        return 0
    for launch, reason in failed.items():
        print(printable(f"MISSING {launch.folder(folder)}: {reason}"), file=sys.stderr)
    print(
        f"{len(failed)} launches failed. Figures and report omit their cells; "
        "rerun the same command to measure what is missing.",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())

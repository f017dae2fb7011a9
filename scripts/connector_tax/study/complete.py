"""Exit non-zero and list the launches that failed; else mark the study complete. Name void cells.

A launch that failed gives up its index.json here (renamed to index.failed.json), so that the next
run measures its missing cells; everything derived from the others stays. With `--phase` this is the
end of a run that measures one phase only, and marks nothing complete.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from connector_tax.artifacts import paths
from connector_tax.artifacts.index import read_index
from connector_tax.artifacts.names import PHASES
from connector_tax.artifacts.study_file import launches, read_study
from connector_tax.commands import run_command, study_parser
from connector_tax.files import ArtifactError, make_durable, write_json
from connector_tax.study.remeasure import withdraw_failed


def void_cells(study_file: Path, phases: Sequence[str]) -> list[str]:
    """A line for each void cell of the phases: where it is, and why it is void.

    Raises:
        ArtifactError: a launch has no index.json: it has not ended.
    """
    study = read_study(study_file)
    lines = []
    for launch in (launch for phase in phases for launch in launches(study, phase)):
        folder = launch.folder(study_file.parent)
        index = read_index(folder)
        if index is None:
            raise ArtifactError(f"{folder / paths.INDEX}: no such file")
        void = [cell for cell in index.cells if cell.status == "void"]
        lines += [f"VOID {launch.name}/{cell.cell}: {cell.reason}" for cell in void]
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """End non-zero, saying what is missing, unless every launch is done or skipped for a reason."""
    parser = study_parser("study.complete", main.__doc__)
    end = parser.add_mutually_exclusive_group(required=True)
    end.add_argument("--out", type=Path, help="what marks the whole study complete")
    end.add_argument("--phase", choices=PHASES, help="judge the launches of one phase")
    return run_command(parser, argv, _conclude)


def _conclude(arguments: argparse.Namespace) -> int:
    phases = [arguments.phase] if arguments.phase else PHASES
    void = void_cells(arguments.study, phases)
    failed = withdraw_failed(read_study(arguments.study), arguments.study.parent)
    print("".join(f"{line}\n" for line in void), end="", file=sys.stderr)
    if void:
        folder = arguments.study.parent / paths.RUNS
        print(
            f"{len(void)} cells are void: measured twice, kept, and used nowhere. Where the "
            "machine was disturbed, end what else runs on it. To measure a launch again: "
            f"snakemake --forcerun {folder}/<configuration>/block<k>/<phase>/index.json",
            file=sys.stderr,
        )
    if not failed and arguments.phase:
        return 0
    if not failed:
        make_durable(arguments.study.parent)
        write_json(arguments.out, {"complete": True})
        return 0
    for path, reason in failed:
        print(f"MISSING {path}: {reason}", file=sys.stderr)
    print(
        f"{len(failed)} launches failed. Figures and report show the study without their cells; "
        "the same command measures what is missing.",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())

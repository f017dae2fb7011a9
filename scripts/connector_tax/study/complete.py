"""Exit non-zero and list the launches that failed; else mark the study complete. Name void cells.

A launch that failed gives up its index.json here (renamed to index.failed.json), so that the next
run measures its missing cells; everything derived from the others stays.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from connector_tax.artifacts import paths
from connector_tax.artifacts.index import read_index
from connector_tax.artifacts.names import PHASES
from connector_tax.artifacts.study_file import launches
from connector_tax.commands import run_command, study_parser
from connector_tax.files import ArtifactError, make_durable, read_json, write_json
from connector_tax.seals import seal_end


def failed_launches(study_file: Path) -> list[tuple[Path, str]]:
    """Index file and reason of each launch that failed.

    Raises:
        ArtifactError: a launch has no index.json: it has not ended.
    """
    study = read_json(study_file)
    failed = []
    for phase in PHASES:
        for launch in launches(study, phase):
            folder = launch.folder(study_file.parent)
            index = read_index(folder)
            if index is None:
                raise ArtifactError(f"{folder / paths.INDEX}: no such file")
            if index.status == "failed":
                failed.append((folder / paths.INDEX, index.reason or ""))
    return failed


def void_cells(study_file: Path) -> list[str]:
    """A line for each void cell: where it is, and why it is void."""
    study = read_json(study_file)
    indexes = [
        (launch, read_index(launch.folder(study_file.parent)))
        for phase in PHASES
        for launch in launches(study, phase)
    ]
    return [
        f"VOID {launch.name}/{cell.cell}: {cell.reason}"
        for launch, index in indexes
        for cell in (index.cells if index is not None else ())
        if cell.status == "void"
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """End non-zero, saying what is missing, unless every launch is done or skipped for a reason."""
    parser = study_parser("study.complete", main.__doc__)
    parser.add_argument("--out", type=Path, required=True)
    return run_command(parser, argv, _conclude)


def _conclude(arguments: argparse.Namespace) -> int:
    failed = failed_launches(arguments.study)
    void = void_cells(arguments.study)
    print("".join(f"{line}\n" for line in void), end="", file=sys.stderr)
    if void:
        folder = arguments.study.parent / paths.RUNS
        print(
            f"{len(void)} cells are void: measured twice, kept, and used nowhere. Where the "
            "machine was disturbed, end what else runs on it. To measure a launch again: "
            f"snakemake --forcerun {folder}/<configuration>/block<k>/<phase>/index.json",
            file=sys.stderr,
        )
    if not failed:
        make_durable(arguments.study.parent)
        write_json(arguments.out, {"complete": True})
        seal_end(arguments.study.parent)
        return 0
    for path, reason in failed:
        path.rename(path.with_name(paths.FAILED_INDEX))
        print(f"MISSING {path.parent}: {reason}", file=sys.stderr)
    print(
        f"{len(failed)} launches failed. Figures and report show the study without their cells; "
        "the same command measures what is missing.",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())

"""Exit non-zero and list the launches that failed; else mark the study complete.

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
from connector_tax.files import ArtifactError, read_json, write_json
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


def main(argv: Sequence[str] | None = None) -> int:
    """End non-zero, saying what is missing, unless every launch is done or skipped for a reason."""
    parser = study_parser("study.complete", main.__doc__)
    parser.add_argument("--out", type=Path, required=True)
    return run_command(parser, argv, _conclude)


def _conclude(arguments: argparse.Namespace) -> int:
    failed = failed_launches(arguments.study)
    if not failed:
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

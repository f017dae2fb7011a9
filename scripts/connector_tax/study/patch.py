"""Step timing on and off: what the design's patch stage decides and records.

The embedded engine writes the step log itself when AGENTIC_STEP_LOG_PATH is set, so there is
nothing to install; the stage records that, and the study knows from `step_timing_available` whether
figures 6 and 7 can be drawn.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from connector_tax.files import ArtifactError, read_json, write_json


def apply(study: Mapping[str, Any]) -> dict[str, Any]:
    """The content of patch_status.json."""
    embedded = study["config"]["engine"]["kind"] == "embedded"
    return {
        "step_timing_available": embedded,
        "method": "the embedded engine writes the step log itself" if embedded else None,
        "reason": None if embedded else "no step probe for this engine",
        "targets": [],
    }


def revert(status: Mapping[str, Any]) -> dict[str, Any]:
    """The content of revert_status.json: what was removed, and whether anything is left."""
    return {"reverted": True, "removed": status["targets"]}


def main(argv: Sequence[str] | None = None) -> int:
    """Apply the step timing of a study, or revert it; both can be repeated."""
    parser = argparse.ArgumentParser(
        prog="python -m connector_tax.study.patch", description=main.__doc__
    )
    parser.add_argument("action", choices=["apply", "revert"])
    parser.add_argument("--study", type=Path, required=True, help="results/<study>/study.json")
    arguments = parser.parse_args(argv)
    folder = arguments.study.parent / "patch"
    try:
        if arguments.action == "apply":
            write_json(folder / "patch_status.json", apply(read_json(arguments.study)))
        else:
            status = read_json(folder / "patch_status.json")
            write_json(folder / "revert_status.json", revert(status))
    except ArtifactError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

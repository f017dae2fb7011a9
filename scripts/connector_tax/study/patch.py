"""Switch step timing on and off, as the design's patch stage, and record the result.

The embedded engine writes the step log itself when AGENTIC_STEP_LOG_PATH is set, so nothing is
installed. For a real vLLM the step probe's overlay is installed beside the results
(connector_tax.vllm.overlay), after two checks: every hook point exists by name, and both processes
recorded steps in the baseline's gate. If a check fails, `step_timing_available` is false with the
reason, and the study continues without figures 6 and 7, as designed.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from connector_tax.artifacts import paths
from connector_tax.artifacts.names import baseline_of
from connector_tax.artifacts.record_reader import read_record
from connector_tax.artifacts.stage_records import GateRecord, PatchStatus, RevertStatus
from connector_tax.artifacts.study_file import read_study
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.commands import run_command, study_parser
from connector_tax.config import ROOT, pythons_of
from connector_tax.files import ArtifactError, write_json
from connector_tax.foreign import printable
from connector_tax.servers.kinds import STEP_LOG_PROCESSES, engine_of, publishable
from connector_tax.study.guard import end_with_parent
from connector_tax.study.preflight import GateError, fitting_vllm
from connector_tax.study.server_command import OVERLAY
from connector_tax.vllm import overlay


def apply(study: StudyDocument, folder: Path) -> PatchStatus:
    """Switch on step timing for the study with patch folder `folder`; return the content of
    patch_status.json.

    Raises:
        OverlayError: the study emulates a device and the emulation does not work.
    """
    engine, kind = study["config"]["engine"], engine_of(study["config"]["engine"])
    status: PatchStatus = {
        "step_timing_available": kind.no_steps is None and not pythons_of(engine),
        "method": kind.steps_method,
        "reason": kind.no_steps,
        "targets": [],
    }
    if not kind.takes_probe:
        return status
    if not pythons_of(engine):
        # The query of the server has shown that the probe loads.
        return {**status, "overlay": overlay.install(folder / OVERLAY)}
    try:
        described = fitting_vllm(engine)
        package = Path(described["package"])
        status = {
            **status,
            "vllm": described["vllm"],
            "targets": described["targets"],
            "missing": described["missing"],
            "overlay": overlay.install(folder / OVERLAY),
            "vllm_sources_sha256_before": overlay.sources_sha256(package),
            "leftovers": overlay.leftovers(package),
        }
        status["steps_recorded"] = _proved(study, folder.parent)
        status["step_timing_available"] = True
    except (overlay.OverlayError, GateError) as error:
        if engine["device"] == "emulated":
            # The overlay contains the emulated device, without which nothing can be measured.
            raise overlay.OverlayError(publishable(str(error))) from error
        status["reason"] = publishable(str(error))
        overlay.remove(folder / OVERLAY)
    return status


def _proved(study: StudyDocument, root: Path) -> dict[str, int]:
    """Return the number of steps that the baseline's gate recorded, by process."""
    gates = read_record(root / paths.PREFLIGHT_STATUS, dict[str, GateRecord])
    counts = gates[baseline_of(study["config"])].get("steps", {})
    if missing := [process for process in STEP_LOG_PROCESSES if not counts.get(process)]:
        raise GateError(f"no step recorded by the {' and the '.join(missing)} process")
    return counts


def revert(study: StudyDocument, status: PatchStatus, folder: Path) -> RevertStatus:
    """Remove the overlay; return the record of removed and remaining files.

    Raises:
        OverlayError: the overlay folder holds a file that is not the probe's.
    """
    removed = overlay.remove(folder / OVERLAY)
    result: RevertStatus = {"reverted": True, "removed": removed}
    before = status.get("vllm_sources_sha256_before")
    if before is not None:
        package = Path(overlay.describe_vllm(ROOT / study["config"]["engine"]["python"])["package"])
        after = overlay.sources_sha256(package)
        left = overlay.leftovers(package)
        result |= {
            "reverted": after == before and not left,
            "vllm_sources_sha256_before": before,
            "vllm_sources_sha256_after": after,
            "leftovers": left,
        }
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Apply or revert the step timing of a study; both can be repeated."""
    parser = study_parser("study.patch", main.__doc__)
    parser.add_argument("action", choices=["apply", "revert"])
    refusals = (ArtifactError, overlay.OverlayError)
    return run_command(parser, argv, _patch, refusals)


def _patch(arguments: argparse.Namespace) -> None:
    end_with_parent(print)
    root = arguments.study.parent
    folder = root / paths.PATCH
    study = read_study(arguments.study)
    if arguments.action == "apply":
        status = apply(study, folder)
        write_json(root / paths.PATCH_STATUS, status)
        available = status["step_timing_available"]
        print(f"step timing: {'available' if available else 'NOT available'}")
        if status["reason"]:
            print(printable(status["reason"]))
    else:
        status = read_record(root / paths.PATCH_STATUS, PatchStatus)
        write_json(root / paths.REVERT_STATUS, revert(study, status, folder))


if __name__ == "__main__":
    sys.exit(main())

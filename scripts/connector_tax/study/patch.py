"""Step timing on and off: what the design's patch stage decides, does and records.

The embedded engine writes the step log itself when AGENTIC_STEP_LOG_PATH is set, so there is
nothing to install. For a real vLLM the step probe's overlay is installed beside the results
(connector_tax.vllm.overlay), then proved: every hook point is there by name, and a launch of the
baseline records steps in both processes. Where that fails, `step_timing_available` is false with
the reason, and the study goes on without figures 6 and 7, as designed.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from connector_tax.artifacts import paths
from connector_tax.artifacts.names import Launch, baseline_of
from connector_tax.artifacts.record_reader import read_record
from connector_tax.artifacts.stage_records import PatchStatus, RevertStatus
from connector_tax.artifacts.study_file import read_study
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.commands import run_command, study_parser
from connector_tax.config import ROOT
from connector_tax.files import ArtifactError, write_json
from connector_tax.servers.kinds import engine_of, without_root
from connector_tax.study.device import DeviceError, devices_of, enter_block_slot, hold_devices
from connector_tax.study.preflight import GateError, fitting_vllm, gated_server, steps_of
from connector_tax.study.server import PortTakenError
from connector_tax.study.server_command import OVERLAY
from connector_tax.vllm import overlay


def apply(study: StudyDocument, folder: Path) -> PatchStatus:
    """Switch step timing on for the study whose patch folder is `folder`: patch_status.json.

    Raises:
        DeviceError: another launch holds the device.
        OverlayError: the study's device is emulated, and that does not work.
    """
    engine, kind = study["config"]["engine"], engine_of(study["config"]["engine"])
    status: PatchStatus = {
        "step_timing_available": kind.no_steps is None and not kind.pythons,
        "method": kind.steps_method,
        "reason": kind.no_steps,
        "targets": [],
    }
    if not kind.takes_probe:
        return status
    if not kind.pythons:
        # Found to load when the server was asked what it serves.
        return {**status, "overlay": overlay.install(folder / OVERLAY)}
    try:
        described = fitting_vllm(engine)
        overlay.install(folder / OVERLAY)
        status = {**status, **overlay.status_of(folder / OVERLAY, described)}
        status["steps_recorded"] = _prove(study, folder)
        status["step_timing_available"] = True
    except (overlay.OverlayError, GateError) as error:
        if engine["device"] == "emulated":
            # The device lies in the overlay: without it there is nothing to measure.
            raise overlay.OverlayError(without_root(str(error))) from error
        status["reason"] = without_root(str(error))
        overlay.remove(folder / OVERLAY)
    return status


def _prove(study: StudyDocument, folder: Path) -> dict[str, int]:
    """Launch the baseline with the probe and serve one request: steps recorded, by process."""
    launch = Launch(baseline_of(study["config"]), 0, "A")
    lines: list[str] = []
    with (
        hold_devices(devices_of(study["config"])),
        gated_server(
            study, launch, "step_probe", folder / "launch", lines.append, folder / OVERLAY
        ),
    ):
        steps = steps_of(study, folder / "launch")
    counts = {p: sum(s["process"] == p for s in steps) for p in ("scheduler", "worker")}
    if missing := [process for process, count in counts.items() if not count]:
        raise GateError(f"no step recorded by the {' and the '.join(missing)} process")
    return counts


def revert(study: StudyDocument, status: PatchStatus, folder: Path) -> RevertStatus:
    """Remove the overlay: revert_status.json says what was removed, and whether anything is left.

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
    """Apply the step timing of a study, or revert it; both can be repeated."""
    parser = study_parser("study.patch", main.__doc__)
    parser.add_argument("action", choices=["apply", "revert"])
    refusals = (ArtifactError, DeviceError, PortTakenError, overlay.OverlayError)
    return run_command(parser, argv, _patch, refusals)


def _patch(arguments: argparse.Namespace) -> None:
    root = arguments.study.parent
    folder = root / paths.PATCH
    study = read_study(arguments.study)
    if arguments.action == "apply":
        status = apply(enter_block_slot(study, root), folder)
        write_json(root / paths.PATCH_STATUS, status)
        available = status["step_timing_available"]
        print(f"step timing: {'available' if available else 'NOT available'}")
        if status["reason"]:
            print(status["reason"])
    else:
        status = read_record(root / paths.PATCH_STATUS, PatchStatus)
        write_json(root / paths.REVERT_STATUS, revert(study, status, folder))


if __name__ == "__main__":
    sys.exit(main())

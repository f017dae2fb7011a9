"""The step probe a launch of a study runs with, as its patch stage left it."""

from pathlib import Path

from connector_tax.artifacts import paths
from connector_tax.artifacts.record_reader import read_record
from connector_tax.artifacts.stage_records import PatchStatus
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.files import ArtifactError
from connector_tax.servers.kinds import engine_of
from connector_tax.vllm import overlay

OVERLAY = "overlay"


def probe_overlay(study: StudyDocument, study_folder: Path) -> Path | None:
    """The overlay a launch of this study runs with; None without step timing or for no vLLM.

    A reverted overlay is installed again when the study measures again.

    Raises:
        ArtifactError: the probe has changed since patch_status.json was written.
    """
    if not engine_of(study["config"]["engine"]).takes_probe:
        return None
    path = study_folder / paths.PATCH_STATUS
    status = read_record(path, PatchStatus)
    if not status["step_timing_available"]:
        return None
    folder = study_folder / paths.PATCH / OVERLAY
    if overlay.install(folder) != status.get("overlay"):
        raise ArtifactError(
            f"{path}: the step probe has changed since it was applied; delete this file to apply "
            "the new one"
        )
    return folder

"""Whether the machine that a block was given can measure it, asked before its first launch.

A scheduler gives each job a machine that nobody has looked at: a block that its first launch would
fail on, or that ran on another vLLM than its neighbours, ends at once, and says why.
"""

from collections.abc import Iterator
from pathlib import Path

from connector_tax.artifacts import paths
from connector_tax.artifacts.launch_files import EngineFiles
from connector_tax.artifacts.record_reader import read_record
from connector_tax.artifacts.stage_records import GateRecord, PatchStatus
from connector_tax.artifacts.study_records import EngineSection, StudyDocument
from connector_tax.files import read_json
from connector_tax.machine import machine_alias
from connector_tax.study.device import DeviceError
from connector_tax.study.doctor import findings
from connector_tax.vllm.engine_files import engine_files

# What the launch before may still hold (a launch waits for these itself), and its devices.
AWAITED = ("GPU memory", "GPU load", "device", "GPU")
# Estimates; and an environment that was measured with is not built anew within a study.
LEFT_OUT = (*AWAITED, "memory", "disk", "environment")


class UnfitError(DeviceError):
    """This machine cannot measure the study; the text says why."""


def require_fit(study: StudyDocument, folder: Path) -> dict[str, EngineFiles]:
    """Make the doctor's checks, and compare vLLM's sources with those of the patch stage.

    Args:
        study: the content of study.json; within its slot where it names slots.
        folder: results/<study>.

    Returns:
        `engine_files`, which each of the block's launches records.

    Raises:
        UnfitError: names every check that failed.
    """
    gates: dict[str, GateRecord] = read_json(folder / paths.PREFLIGHT_STATUS)
    run = [entry for entry in study["configurations"] if gates[entry["id"]]["include"]]
    failed = [
        f"{finding.check}: {finding.text}"
        for finding in findings({**study, "configurations": run}, folder)
        if finding.verdict == "fail" and finding.check not in LEFT_OUT
    ]
    engine = study["config"]["engine"]
    here = engine_files(engine)
    failed += _other_sources(engine, here, folder / paths.PATCH_STATUS)
    if failed:
        lines = "\n  ".join(failed)
        raise UnfitError(f"{machine_alias()} cannot measure {study['study']}:\n  {lines}")
    return here


def _other_sources(
    engine: EngineSection, files: dict[str, EngineFiles], status: Path
) -> Iterator[str]:
    """What is wrong with vLLM's sources; without step timing their hash is not known."""
    proved = read_record(status, PatchStatus).get("vllm_sources_sha256_before")
    if proved is None:
        return
    here = files[engine["python"]]["sources_sha256"]
    if here is None:
        yield f"{engine['python']}: no vLLM"
    elif here != proved:
        yield (
            f"vLLM sources: SHA-256 {here[:12]} here, {proved[:12]} where step timing was proved "
            f"({status}); a study is measured with one vLLM"
        )

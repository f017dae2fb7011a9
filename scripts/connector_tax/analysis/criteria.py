"""The design's seven success criteria: met, not met, cannot tell.

Source: design, "Success Criteria". Criteria 1 to 5 ask that a number is reported and labelled.
"""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from connector_tax.analysis.hypotheses import MET, NOT_MET, conclusion, criteria_of_labels
from connector_tax.analysis.ingest import Cell
from connector_tax.analysis.taxes import Tables
from connector_tax.artifacts import paths
from connector_tax.artifacts.names import PHASES, Launch
from connector_tax.artifacts.stage_records import ConclusionRecord, GateRecord
from connector_tax.artifacts.study_file import Study
from connector_tax.artifacts.verdicts import CANNOT_TELL
from connector_tax.files import ArtifactError, read_json

NS_PER_HOUR = 3.6e12


def criteria(made: Tables, cells: Sequence[Cell], step_timing: bool) -> list[ConclusionRecord]:
    """All seven, in order, as hypotheses.json has them; `id` is a number."""
    return [
        *criteria_of_labels(made),
        artifacts(made.study, cells, step_timing),
        wall_clock(made.study, cells),
    ]


def artifacts(study: Study, cells: Sequence[Cell], step_timing: bool) -> ConclusionRecord:
    """6: a launch that ran has every file; a skipped configuration has a reason in pre-flight."""
    path = study.root / paths.PREFLIGHT_STATUS
    try:
        preflight: dict[str, GateRecord] = read_json(path)
    except ArtifactError as error:
        return conclusion(6, NOT_MET, str(error))
    missing = []
    launches: dict[tuple[str, int, str], list[Cell]] = {}
    for cell in cells:
        launches.setdefault(cell.key[:3], []).append(cell)
    for (config, block, phase), members in launches.items():
        name = f"{paths.RUNS}/{Launch(config, block, phase).name}"
        missing += _missing_files(study.root.joinpath(name), name, members, step_timing)
        if members[0].status == "skipped" and phase != "Bp":
            entry = preflight.get(members[0].configuration)
            if entry is None or not entry.get("reason"):
                missing.append(f"{name}: skipped without a reason in preflight_status.json")
    numbers = {"launches": len(launches), "missing": missing}
    if missing:
        sentence = f"{len(missing)} artifacts or reasons are missing, first: {missing[0]}."
        return conclusion(6, NOT_MET, sentence, numbers)
    sentence = f"All artifacts of {len(launches)} launches are present; every skip has its reason."
    return conclusion(6, MET, sentence, numbers)


def _missing_files(
    folder: Path, name: str, members: Sequence[Cell], step_timing: bool
) -> list[str]:
    if all(cell.status in ("skipped", "failed", "missing") for cell in members):
        # A failed launch is missing its cells; the aggregate table says so row by row.
        return [f"{name}: {c.key.cell}: {c.reason}" for c in members if c.status != "skipped"]
    kinds = ["requests", "metrics", *(["engine_step"] if step_timing else [])]
    missing = [f"{name}/{file}" for file in paths.LAUNCH_FILES if not (folder / file).exists()]
    for cell in members:
        if cell.status in ("failed", "missing"):
            missing.append(f"{name}: {cell.key.cell}: {cell.reason}")
        elif cell.status in ("valid", "void"):
            missing += [
                f"{name}/{cell.key.cell}/{cell.file(kind).name}"
                for kind in kinds
                if not cell.file(kind).exists()
            ]
    return missing


def wall_clock(study: Study, cells: Sequence[Cell]) -> ConclusionRecord:
    """7: the measurements span less than max_hours of wall clock, first arrival to last drain."""
    limit = study.config["hypotheses"]["max_hours"]
    spans, busy_h = [], 0.0
    for window in (cell.record["window"] for cell in cells if cell.record is not None):
        hours = (window["t_drained_ns"] - window["t_origin_ns"]) / NS_PER_HOUR
        start_h = datetime.fromisoformat(window["started_utc"]).timestamp() / 3600
        spans.append((start_h, start_h + hours))
        busy_h += hours
    if not spans:
        return conclusion(7, CANNOT_TELL, "Cannot tell: no cell was measured.")
    span = max(end for _, end in spans) - min(begin for begin, _ in spans)
    planned = sum(len(study.document["run_order"][p]) * len(study.cells(p)) for p in PHASES)
    numbers = {"span_hours": span, "cell_hours": busy_h, "max_hours": limit,
               "cells_measured": len(spans), "cells_planned": planned}  # fmt: skip
    sentence = (
        f"{len(spans)} of {planned} planned cells span {span:.2f} h of wall clock"
        f" ({busy_h:.2f} h inside cells), limit {limit:g} h."
    )
    return conclusion(7, MET if span < limit else NOT_MET, sentence, numbers)

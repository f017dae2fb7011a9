"""What stands in the report, section by section, and the page made of it."""

import base64
import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from connector_tax import text
from connector_tax.artifacts import paths
from connector_tax.artifacts.metrics import criteria_of
from connector_tax.artifacts.tables import POOLED
from connector_tax.figures import resources, steps, style
from connector_tax.figures.names import BOUNDARY, FIGURES, figures_of
from connector_tax.figures.tables import StudyTables
from connector_tax.files import read_json, reading
from connector_tax.report import answer, effects, series
from connector_tax.report import launches as runs
from connector_tax.seals import changed_settings

COLUMN_FIGURES = (
    "fig1_ttft_vs_rate",
    "fig2_tpot_vs_rate",
    "fig7_decomposition",
    "fig8_additivity",
)
DOWNLOADS = (paths.CELLS, paths.EFFECTS, paths.ENGINE_TABLE)
RAW_FILES = (
    paths.STUDY,
    paths.ENVIRONMENT,
    paths.ENV_TEXT,
    paths.REFERENCE_RATES,
    paths.PREFLIGHT_STATUS,
    paths.PATCH_STATUS,
    *(f"{paths.ANALYSIS}/{name}" for name in paths.ANALYSIS_FILES),
)


@dataclass(frozen=True)
class FigureView:
    """One figure of the page: inlined picture, its words, and its numbers as a download.

    `absent_because` says why the study has no such figure; empty where it has one.
    """

    name: str
    title: str
    caption: str
    source: str
    numbers: str
    wide: bool
    absent_because: str


def templates(folders: Sequence[Path] = ()) -> Environment:
    """The templates of these folders, and those of the report, which hold the pages' style."""
    return Environment(
        loader=FileSystemLoader([*folders, Path(__file__).parent]), autoescape=True,
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip


def render(study: StudyTables) -> str:
    """The whole page as text.

    Raises:
        ArtifactError: a figure, table or record the page is made of is missing or malformed.
    """
    environment = templates()
    environment.filters |= {
        "percent": text.percent,
        "number": text.number,
        "compact": text.compact,
        "duration": text.duration,
        "labelled": study.labelled,
        "label": study.label,
    }
    return environment.get_template("report.html.j2").render(context(study)) + "\n"


def context(study: StudyTables) -> dict[str, Any]:
    """Everything the template shows."""
    launches = runs.read_launches(study)
    drift = runs.drift_rows(study)
    step_timing = study.patch["step_timing_available"]
    over_time = [(launch, series.series_of(launch)) for launch in launches]
    return {
        "study": study,
        "plain": study.against("plain"),
        "watermark": "EMULATED" if study.emulated else None,
        "headline": answer.answer(study),
        "notes": answer.notes(study),
        "limits": answer.limits(study),
        "scores": resources.scores(study),
        "changed_settings": changed_settings(study.root, study.document),
        "figures": {name: _figure(study, name) for name in figures_of(study.settings["engine"])},
        "hypotheses": answer.hypotheses(study),
        "looks": answer.looks(study),
        "not_asked": answer.not_asked(study),
        "criteria": answer.criteria(study),
        "prior": effects.prior(study),
        "tax_tables": effects.at_references(study),
        "amplification": effects.amplification(study),
        "other_taxes": effects.others(study),
        "resources": effects.resource_taxes(study),
        "all_resources": effects.every_resource(study),
        "resources_missing": effects.resources_missing(study),
        "also_differs": effects.also_differs(study),
        "same_settings": effects.same_everywhere(study),
        "settings": effects.settings(study),
        "device_time": effects.device_steps(study),
        "boundary": BOUNDARY,
        "emulated_device": study.settings["engine"].get("device_time", {}).get("accelerator"),
        "step_kinds": effects.step_kinds(study) if step_timing else [],
        "hooks": effects.hooks(study) if step_timing else None,
        "spans": f"{steps.hidden(study)} {steps.placed(study)}".strip(),
        "launches": [(launch, runs.checks(launch), cells) for launch, cells in over_time],
        "void_phases": runs.void_phases(launches),
        "silent": [
            (launch, item)
            for launch, cells in over_time
            for item in cells
            if item.cell.status == "valid" and item.silence and item.silence.flagged
        ],
        "series_columns": series.COLUMNS,
        "bins": series.BINS,
        "counts": (counts := runs.count_states(launches)),
        "void_share": counts["void"] / (counts.total() or 1),
        "lost_cells": runs.lost_cells(study, launches),
        "measured_again": runs.measured_again(study),
        "reference_rates": runs.reference_rates(study),
        "criteria_said": " / ".join(
            criterion.said for criterion in criteria_of(study.settings["saturation"]).values()
        ),
        "overhead": runs.overhead([launch.index for launch in launches]),
        "placements": runs.placements(launches),
        "warming_up": [row for row in study.cell_rows if row.warming_up and row.block != POOLED],
        "drift": runs.drift_table(drift) if drift else None,
        "drift_summary": runs.drift_summary(drift),
        "environment": _environment(study, launches),
        "downloads": [(name, _data(study.root / paths.ANALYSIS / name)) for name in DOWNLOADS],
        "raw_files": [name for name in RAW_FILES if (study.root / name).exists()],
    }


def _figure(study: StudyTables, name: str) -> FigureView:
    folder = study.root / paths.FIGURES
    picture, numbers = _data(folder / f"{name}.svg"), _data(folder / f"{name}.csv")
    words = FIGURES[name]
    caption = study.against(words.caption)
    if name in steps.STEP_FIGURES and (said := steps.hidden(study)):
        caption += f" {said}"
    wide = name not in COLUMN_FIGURES
    with reading(table := folder / f"{name}.csv"), table.open(encoding="utf-8") as stream:
        first = next(csv.DictReader(stream), {})
    absent = first.get(style.ABSENT_BECAUSE, "")
    return FigureView(name, words.title, caption, picture, numbers, wide, absent)


def _data(path: Path) -> str:
    """A file as a URL that holds it."""
    kinds = {".svg": "image/svg+xml", ".csv": "text/csv"}
    with reading(path):
        content = path.read_bytes()
    return f"data:{kinds[path.suffix]};base64,{base64.b64encode(content).decode()}"


def _environment(study: StudyTables, launches: list[runs.LaunchReport]) -> dict[str, list[str]]:
    """environment.json as lines: a list keeps its entries, anything else is one line.

    With what the launches recorded of their vLLM's files.
    """
    content = read_json(study.root / paths.ENVIRONMENT)
    if files := runs.engine_files(launches):
        content["lock and vLLM sources"] = files
    lines = {key: value if isinstance(value, list) else [value] for key, value in content.items()}
    return {key: list(map(text.compact, value)) for key, value in lines.items()}

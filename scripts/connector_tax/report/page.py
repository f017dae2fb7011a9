"""Assemble the report's sections and render the page."""

import base64
import gzip
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from connector_tax import text
from connector_tax.artifacts import paths
from connector_tax.artifacts.metrics import criteria_of
from connector_tax.artifacts.tables import POOLED, TAX
from connector_tax.artifacts.verdicts import sign_of
from connector_tax.figures import compared, resources, steps, style
from connector_tax.figures.names import FIGURES, caption
from connector_tax.figures.tables import StudyTables
from connector_tax.files import read_json, reading
from connector_tax.report import answer, effects, series
from connector_tax.report import launches as runs
from connector_tax.report.changes import changes_of
from connector_tax.seals import changed_settings

SVG, GZIP = "image/svg+xml", "application/gzip"
DOWNLOADS = tuple(name for name in paths.ANALYSIS_FILES if name.endswith(".csv"))
SECTIONS = {
    "evidence": "Evidence",
    "saturation": "Saturation",
    "resources": "Resources",
    "changes": "What else each connector changes",
    "hypotheses": "Hypotheses",
    "taxes": "Every tax",
    "steps": "Engine steps",
    "validity": "Validity",
    "order": "Run order",
    "method": "Method and environment",
    "files": "Files",
}
RAW_FILES = (
    paths.STUDY,
    paths.ENVIRONMENT,
    paths.ENV_TEXT,
    paths.REFERENCE_RATES,
    paths.PREFLIGHT_STATUS,
    paths.PATCH_STATUS,
    *(f"{paths.ANALYSIS}/{name}" for name in paths.ANALYSIS_FILES),
)


def filled(template: Path, shown: Mapping[str, Any], **filters: Callable[..., str]) -> str:
    """Return a template filled with values, in the common style of all pages."""
    environment = Environment(
        loader=FileSystemLoader([template.parent, Path(__file__).parent]), autoescape=True,
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= filters
    return environment.get_template(template.name).render(shown) + "\n"


def render(study: StudyTables) -> str:
    """Return the whole page as text.

    Raises:
        ArtifactError: a required figure, table or record is missing or malformed.
    """
    return filled(
        Path(__file__).with_name("report.html.j2"), context(study),
        percent=text.percent, number=text.number, compact=text.compact, duration=text.duration,
        labelled=study.labelled, label=study.label,
    )  # fmt: skip


def context(study: StudyTables) -> dict[str, Any]:
    """Return the template's values, and the modules whose functions the template calls."""
    engine = study.settings["engine"]
    tables = study.root / paths.ANALYSIS
    launches = runs.read_launches(study)
    over_time = [(launch, series.series_of(launch)) for launch in launches]
    counts = Counter(cell.status for launch in launches for cell in launch.cells)
    scores, step_kinds = resources.scores(study), effects.step_kinds(study)
    changes = changes_of(study)
    shown = shown_sections(study, bool(step_kinds), changes is not None)
    return {
        "study": study,
        "plain": study.against("plain"),
        "answer": answer,
        "effects": effects,
        "runs": runs,
        "series": series,
        "scores": scores,
        "largest": any(cell.words[1].startswith("▲") for _, of in scores[1] for cell in of),
        "step_kinds": step_kinds,
        "changes": changes,
        "shown": shown,
        "sections": [(name, SECTIONS[name]) for name in shown],
        "requests_of_cells": resources.requests_of_cells(study),
        "commands": compared.commands(study),
        "load": compared.load(study),
        "latencies": compared.table(study) if compared.commands(study) else None,
        "sign_of": sign_of,
        "changed_settings": changed_settings(study.root, study.document),
        "figures": {name: _figure(study, name) for name in FIGURES},
        "emulated_device": engine.get("device_time", {}).get("accelerator"),
        "spans": f"{steps.hidden(study)} {steps.placed(study)}".strip(),
        "over_time": over_time,
        "launches": launches,
        "counts": counts,
        "void_share": counts["void"] / (counts.total() or 1),
        "saturation_quantities": " / ".join(
            criterion.quantity for criterion in criteria_of(study.saturation).values()
        ),
        "capped": Counter(
            (row.phase, row.cell, row.remark) for row in study.cell_rows if row.remark
        ),
        "warming_up": [row for row in study.cell_rows if row.warming_up and row.block != POOLED],
        "environment": _environment(study, launches),
        "downloads": [
            (f"{name}.gz", data_url(GZIP, gzip.compress(_read(tables / name), mtime=0)))
            for name in DOWNLOADS
        ],
        "raw_files": [name for name in RAW_FILES if (study.root / name).exists()],
    }


def shown_sections(study: StudyTables, steps_known: bool, changes_known: bool) -> list[str]:
    """Return the sections of a page; a comparison of commands has only non-empty sections."""
    absent = set() if changes_known else {"changes"}
    if compared.commands(study):
        absent.add("hypotheses")
        if len(study.settings["phase_a"]["rates_rps"]) < 2:
            absent.add("saturation")
        if not steps_known:
            absent.add("steps")
    return [name for name in SECTIONS if name not in absent]


def _figure(study: StudyTables, name: str) -> dict[str, str]:
    """Return a figure's content for the page: texts and the inlined picture.

    `absent_because` is the reason of a missing figure; "" if there is a figure.
    """
    picture = _read(study.root / paths.FIGURES / f"{name}.svg")
    words = FIGURES[name]
    words_of = study.against(caption(name))
    title = words.title
    if compared.commands(study):
        title = title.replace(" at ref_safe", "")
        words_of = without_absent_marks(words_of, any(row.mark for row in study.of(TAX)))
    if name in steps.STEP_FIGURES and (explanation := steps.hidden(study)):
        words_of += f" {explanation}"
    return {
        "name": name, "title": title, "caption": words_of, "source": data_url(SVG, picture),
        "absent_because": style.absent_because(picture),
    }  # fmt: skip


def without_absent_marks(words: str, marked: bool) -> str:
    """Return a caption without sentences about marks that the figure lacks."""
    absent = ("Open diamonds", *(() if marked else ("An open triangle",)))
    return " ".join(one for one in re.split(r"(?<=\.) ", words) if not one.startswith(absent))


def _read(path: Path) -> bytes:
    with reading(path):
        return path.read_bytes()


def data_url(kind: str, content: bytes) -> str:
    """Return a URL that holds a file's content."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _environment(study: StudyTables, launches: list[runs.LaunchReport]) -> dict[str, list[str]]:
    """Return environment.json as lines: one for each list item or other value.

    Includes the hashes of vLLM's files that the launches recorded.
    """
    content = read_json(study.root / paths.ENVIRONMENT)
    if files := runs.engine_files(launches):
        content["lock and vLLM sources"] = files
    lines = {key: value if isinstance(value, list) else [value] for key, value in content.items()}
    return {key: list(map(text.compact, value)) for key, value in lines.items()}

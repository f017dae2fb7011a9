"""What stands in the report, section by section, and the page made of it."""

import base64
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from connector_tax import text
from connector_tax.artifacts import paths
from connector_tax.artifacts.names import PLAIN, REFERENCES
from connector_tax.artifacts.tables import POOLED, TaxRow
from connector_tax.figures.names import NAMES
from connector_tax.figures.tables import StudyTables
from connector_tax.files import ArtifactError, read_json
from connector_tax.report import launches as runs
from connector_tax.report import resources, steps
from connector_tax.report.answer import answer
from connector_tax.seals import changed_settings


@dataclass(frozen=True)
class Criterion:
    """One success criterion in words."""

    words: str
    needs: tuple[str, ...] = ()
    reported: bool = False


LEAD_FIGURE = "fig9_forest"
WIDE_FIGURES = ("fig5_shape_heatmap", "fig6_step_cdf", "fig7_decomposition", "fig10_resources")
HEADLINE_METRICS = ("ttft_p90", "tpot_p90")
METRIC_NAMES = {
    "ttft_p90": "TTFT p90", "tpot_p90": "TPOT p90", "ttft_p50": "TTFT p50",
    "tpot_p50": "TPOT p50", "e2e_p90": "E2E p90",
}  # fmt: skip
NEEDS = {
    "H1": ("mooncake_both",),
    "H2": ("mooncake_both", "nixl_both"),
    "H3": ("mooncake_both", "noop_connector"),
    "H4": ("mooncake_both", "lmcache_only", "multi_mooncake_lmcache"),
    "H5": ("mooncake_both",),
    "H6": ("mooncake_both",),
}
QUESTIONS = {
    "H1": "The tax persists on a single instance under synthetic load",
    "H2": "The NIXL–Mooncake gap is the connectors' own, not coupling",
    "H3": "The framework is less than half of the Mooncake tax",
    "H4": "Stacked connectors' taxes add up",
    "H5": "The TTFT tax grows with input length",
    "H6": "The TPOT tax grows with output length",
}
# What each criterion asks for, the hypotheses whose numbers it needs, and whether it asks no more
# than that a number is there.
CRITERIA = {
    1: Criterion("The Mooncake tax at ref_safe, beside the prior", ("H1",), reported=True),
    2: Criterion("The NIXL–Mooncake gap at ref_safe, beside the prior", ("H2",), reported=True),
    3: Criterion("The share of the no-op connector in the tax", ("H3",), reported=True),
    4: Criterion("The departure from additivity", ("H4",), reported=True),
    5: Criterion("Sign and size of the growth with length", ("H5", "H6"), reported=True),
    6: Criterion("All artifacts are present, every skip has a reason"),
    7: Criterion("The measurements end in time"),
}
REPORTED = {"met": "reported", "not met": "not reported"}
RAW_FILES = (
    paths.STUDY,
    paths.ENVIRONMENT,
    paths.ENV_TEXT,
    paths.REFERENCE_RATES,
    paths.PREFLIGHT_STATUS,
    paths.PATCH_STATUS,
    *(f"{paths.ANALYSIS}/{name}" for name in paths.ANALYSIS_FILES),
)  # fmt: skip


@dataclass(frozen=True)
class FigureView:
    """One figure of the page: inlined picture, its words, and links to its files."""

    name: str
    title: str
    caption: str
    source: str
    wide: bool


def render(study: StudyTables) -> str:
    """The whole page as text.

    Raises:
        ArtifactError: a figure, table or record the page is made of is missing or malformed.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "percent": text.percent,
        "number": text.number,
        "compact": text.compact,
        "duration": text.duration,
        "labelled": study.labelled,
        "link": lambda path: quote(str(path)),
    }
    environment.globals |= {"interval": text.interval, "microseconds": steps.microseconds}
    return environment.get_template("report.html.j2").render(context(study)) + "\n"


def context(study: StudyTables) -> dict[str, Any]:
    """Everything the template shows."""
    launches = runs.read_launches(study)
    drift = drift_rows(study)
    labels = {item.id: item.label for item in study.launched}
    return {
        "study": study,
        "watermark": "EMULATED" if study.emulated else None,
        "labels": labels,
        "headline": answer(study),
        "changed_settings": changed_settings(study.root, study.document),
        "lead": _figure(study, LEAD_FIGURE),
        "figures": [_figure(study, name) for name in NAMES if name != LEAD_FIGURE],
        "hypotheses": hypothesis_rows(study),
        "not_asked": not_asked(study),
        "criteria": criterion_rows(study),
        "priors": prior_rows(study),
        "tax_tables": reference_tables(study),
        "other_taxes": [row for row in study.taxes if not (row.phase == "A" and row.reference)],
        "metric_names": METRIC_NAMES,
        "references": REFERENCES,
        "step_taxes": steps.step_taxes(study) if study.patch["step_timing_available"] else [],
        "step_metrics": list(steps.METRICS.values()),
        "hooks": steps.hooks(study),
        "launches": launches,
        "counts": runs.count_states(launches),
        "overhead": runs.overhead(launches),
        "placements": runs.placements(launches),
        "amplification": [r for r in study.amplification if r.metric in HEADLINE_METRICS],
        "resolution": study.hypotheses["resolution"],
        "warming_up": [row for row in study.aggregate if row.warming_up and row.block != POOLED],
        "drift": drift,
        "drift_summary": drift_summary(drift),
        "resources": resources.overview(study),
        "resources_missing": resources.not_recorded(study),
        "also_differs": resources.also_differs(study),
        "same_settings": resources.same_everywhere(study),
        "environment": _environment(study),
        "raw_files": [name for name in RAW_FILES if (study.root / name).exists()],
    }


def _figure(study: StudyTables, name: str) -> FigureView:
    module = import_module(f"connector_tax.figures.{name}")
    path = study.root / paths.FIGURES / f"{name}.svg"
    try:
        picture = path.read_bytes()
    except FileNotFoundError:
        raise ArtifactError(f"{path}: no such file") from None
    source = f"data:image/svg+xml;base64,{base64.b64encode(picture).decode()}"
    return FigureView(name, module.TITLE, module.CAPTION, source, name in WIDE_FIGURES)


def _asked(study: StudyTables, hypothesis: str) -> bool:
    """Whether the study has the configurations, and of H5 and H6 the lengths, that it is about."""
    known = {item.id for item in study.configurations}
    axis = {"H5": "input_tokens", "H6": "output_tokens"}.get(hypothesis)
    lengths = {cell[axis] for cell in study.document["cells"]["B"]} if axis else {0, 1}
    return known.issuperset(NEEDS[hypothesis]) and len(lengths) > 1


def hypothesis_rows(study: StudyTables) -> list[tuple[str, str, Mapping[str, Any]]]:
    """Id, question and finding of each hypothesis that the study can be asked."""
    return [
        (item["id"], QUESTIONS[item["id"]], item)
        for item in study.hypotheses["hypotheses"]
        if _asked(study, item["id"])
    ]


def not_asked(study: StudyTables) -> list[str]:
    """The hypotheses that need a configuration or a length that the study does not have."""
    return [name for name in NEEDS if not _asked(study, name)]


def criterion_rows(study: StudyTables) -> list[tuple[str, str, str]]:
    """Words, verdict and finding of each success criterion that the study can be held to."""
    return [
        (criterion.words, REPORTED[verdict] if criterion.reported else verdict, item["sentence"])
        for item in study.hypotheses["criteria"]
        for criterion, verdict in [(CRITERIA[item["id"]], item["verdict"])]
        if all(_asked(study, name) for name in criterion.needs)
    ]


@dataclass(frozen=True)
class PriorRow:
    """One configuration's TTFT p90 in the earlier trace replay, beside this study's."""

    config: str
    prior_s: float
    prior_tax: float | None
    measured_ms: float | None
    tax: TaxRow | None


def prior_rows(study: StudyTables) -> list[PriorRow]:
    """The prior beside the measurement at ref_safe, of the configurations that have both."""
    known = {item.id for item in study.connectors}
    prior = study.settings["hypotheses"]["prior"]
    taxes = study.taxes_at("ref_safe", "ttft_p90")
    plain_s = prior["plain_ttft_p90_s"]
    plain_ms = next((row.plain_ms for row in taxes.values() if row.plain_ms is not None), None)
    rows = [PriorRow(PLAIN, plain_s, None, plain_ms, None)]
    for config, key in (
        ("nixl_both", "nixl_ttft_p90_s"),
        ("mooncake_both", "mooncake_both_ttft_p90_s"),
    ):
        if config not in known:
            continue
        row = taxes.get(config)
        measured = row.config_ms if row else None
        rows.append(PriorRow(config, prior[key], prior[key] / plain_s - 1, measured, row))
    return rows if len(rows) > 1 else []


@dataclass(frozen=True)
class TaxTable:
    """The taxes of one metric at one reference rate, and the configurations' gap to ref_safe."""

    reference: str
    rate_rps: float
    metric: str
    rows: list[TaxRow]


def reference_tables(study: StudyTables) -> list[TaxTable]:
    """TTFT and TPOT p90 at both reference rates; ref_load only where it is another rate."""
    tables = []
    for reference in REFERENCES:
        for metric in HEADLINE_METRICS:
            rows = list(study.taxes_at(reference, metric).values())
            rate = study.reference[reference]
            if rows and rate is not None:
                tables.append(TaxTable(reference, rate, metric, rows))
    return tables


@dataclass(frozen=True)
class DriftRow:
    """The launches of plain that ran first and last in a block, in one cell, in ms."""

    block: str
    phase: str
    cell: str
    metric: str
    earlier_ms: float
    later_ms: float

    @property
    def change(self) -> float:
        """Later over earlier, minus one."""
        return self.later_ms / self.earlier_ms - 1


def drift_rows(study: StudyTables) -> list[DriftRow]:
    """Plain's earliest against its latest launch of each block, wherever both cells are valid."""
    valid = {
        (row.config, row.block, row.phase, row.cell): row
        for row in study.aggregate
        if row.block != POOLED and row.status == "valid" and row.configuration == PLAIN
    }
    rows = []
    for (config, block, phase, cell), earlier in valid.items():
        ran = [
            entry["config"]
            for entry in study.document["run_order"][phase]
            if str(entry["block"]) == block and (entry["config"], block, phase, cell) in valid
        ]
        if config != ran[0] or len(ran) < 2:
            continue
        later = valid[ran[-1], block, phase, cell]
        for metric, before, after in (
            ("TTFT p90", earlier.ttft_p90_ms, later.ttft_p90_ms),
            ("TPOT p90", earlier.tpot_p90_ms, later.tpot_p90_ms),
        ):
            if before and after is not None:
                rows.append(DriftRow(block, phase, cell, metric, before, after))
    return rows


def drift_summary(drift: list[DriftRow]) -> list[tuple[str, int, float, DriftRow]]:
    """Per metric: how many comparisons, the median change, and the row that changed most."""
    changes = []
    for metric in dict.fromkeys(row.metric for row in drift):
        rows = [row for row in drift if row.metric == metric]
        middle = statistics.median(row.change for row in rows)
        changes.append((metric, len(rows), middle, max(rows, key=lambda row: abs(row.change))))
    return changes


def _environment(study: StudyTables) -> dict[str, list[str]]:
    """environment.json as lines: a list keeps its entries, anything else is one line."""
    content = read_json(study.root / paths.ENVIRONMENT)
    return {
        key: [text.compact(item) for item in value] if isinstance(value, list) else [
            text.compact(value)
        ]
        for key, value in content.items()
    }  # fmt: skip

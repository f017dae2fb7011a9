"""What stands in the report, section by section, and the page made of it."""

import base64
import statistics
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from connector_tax.artifacts.names import PLAIN, REFERENCES
from connector_tax.artifacts.tables import POOLED, TaxRow
from connector_tax.figures.names import NAMES
from connector_tax.figures.tables import StudyTables
from connector_tax.files import ArtifactError, read_json
from connector_tax.report import launches as runs
from connector_tax.report import resources, steps, text
from connector_tax.seals import changed_settings

HEADLINE_CONFIG = "mooncake_both"
LEAD_FIGURE = "fig9_forest"
WIDE_FIGURES = ("fig5_shape_heatmap", "fig6_step_cdf", "fig7_decomposition", "fig10_resources")
HEADLINE_METRICS = ("ttft_p90", "tpot_p90")
METRIC_NAMES = {
    "ttft_p90": "TTFT p90", "tpot_p90": "TPOT p90", "ttft_p50": "TTFT p50",
    "tpot_p50": "TPOT p50", "e2e_p90": "E2E p90",
}  # fmt: skip
QUESTIONS = {
    "H1": "The tax persists on a single instance under synthetic load",
    "H2": "The NIXL–Mooncake gap is the connectors' own, not coupling",
    "H3": "The framework is less than half of the Mooncake tax",
    "H4": "Stacked connectors' taxes add up",
    "H5": "The TTFT tax grows with input length",
    "H6": "The TPOT tax grows with output length",
}
CRITERIA = {
    1: "H1 is falsifiable: the Mooncake tax at ref_safe is reported, the prior accepted or revised",
    2: "H2 is testable: the NIXL–Mooncake gap at ref_safe is reported",
    3: "H3 is disambiguated: framework or implementation dominates",
    4: "H4: additivity of the stacked connector is computed",
    5: "H5 and H6: sign and size of the growth with length are reported",
    6: "All artifacts are present, every skip has a reason",
    7: "The bench ends in time",
}
RAW_FILES = (
    "study.json", "environment.json", "env.txt", "reference_rates.json",
    "preflight/preflight_status.json", "patch/patch_status.json", "analysis/aggregate.csv",
    "analysis/aggregate.json", "analysis/taxes.csv", "analysis/amplification.csv",
    "analysis/steps.csv", "analysis/step_taxes.csv", "analysis/hooks.csv",
    "analysis/step_cdf.csv", "analysis/resources.csv", "analysis/engine.csv",
    "analysis/hypotheses.json",
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
        "headline": headline(study),
        "changed_settings": changed_settings(study.root, study.document),
        "lead": _figure(study, LEAD_FIGURE),
        "figures": [_figure(study, name) for name in NAMES if name != LEAD_FIGURE],
        "questions": QUESTIONS,
        "criteria": CRITERIA,
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


def headline(study: StudyTables) -> str:
    """The study's answer in one sentence, with its interval and verdict or why there is none."""
    label = next((i.label for i in study.configurations if i.id == HEADLINE_CONFIG), None)
    if label is None:
        return f"This study does not measure {HEADLINE_CONFIG}, the configuration of the prior."
    ttft = study.taxes_at("ref_safe", "ttft_p90").get(HEADLINE_CONFIG)
    tpot = study.taxes_at("ref_safe", "tpot_p90").get(HEADLINE_CONFIG)
    if ttft is None or ttft.tax is None or ttft.rate_rps is None:
        reason = f"{ttft.status}: {ttft.reason}" if ttft else "no Phase A cell at ref_safe"
        return f"{label}, idle: no TTFT p90 tax at ref_safe ({reason})."
    sentence = (
        f"{label}, idle, costs {_tax_words(ttft)} on TTFT p90"
        f"{f' and {_tax_words(tpot)} on TPOT p90' if tpot and tpot.tax is not None else ''}"
        f" at {ttft.rate_rps:g} requests/s (ref_safe)"
    )
    return f"{sentence}: {_verdict_words(ttft, tpot)}."


def _tax_words(row: TaxRow) -> str:
    if row.tax_lo is None or row.tax_hi is None:
        return f"{text.percent(row.tax)} ({row.interval_method})"
    ends = f"{text.signed(100 * row.tax_lo, 1)} to {text.signed(100 * row.tax_hi, 1)} %"
    return f"{text.percent(row.tax)} (95 % interval {ends})"


def _verdict_words(ttft: TaxRow, tpot: TaxRow | None) -> str:
    marks = dict.fromkeys(row.mark for row in (ttft, tpot) if row is not None and row.mark)
    if marks:
        return f"no verdict, {'; '.join(marks)}"
    if tpot is None or tpot.tax is None or tpot.verdict == ttft.verdict:
        return ttft.verdict
    return f"{ttft.verdict} on TTFT, {tpot.verdict} on TPOT"


def _figure(study: StudyTables, name: str) -> FigureView:
    module = import_module(f"connector_tax.figures.{name}")
    path = study.root / "figures" / f"{name}.svg"
    try:
        picture = path.read_bytes()
    except FileNotFoundError:
        raise ArtifactError(f"{path}: no such file") from None
    source = f"data:image/svg+xml;base64,{base64.b64encode(picture).decode()}"
    return FigureView(name, module.TITLE, module.CAPTION, source, name in WIDE_FIGURES)


@dataclass(frozen=True)
class PriorRow:
    """One configuration's TTFT p90 in the earlier trace replay, beside this study's."""

    config: str
    prior_s: float
    prior_tax: float | None
    measured_ms: float | None
    tax: TaxRow | None


def prior_rows(study: StudyTables) -> list[PriorRow]:
    """The prior of the design beside the measurement at ref_safe."""
    prior = study.settings["hypotheses"]["prior"]
    taxes = study.taxes_at("ref_safe", "ttft_p90")
    plain_s = prior["plain_ttft_p90_s"]
    plain_ms = next((row.plain_ms for row in taxes.values() if row.plain_ms is not None), None)
    rows = [PriorRow(PLAIN, plain_s, None, plain_ms, None)]
    for config, key in (
        ("nixl_both", "nixl_ttft_p90_s"),
        ("mooncake_both", "mooncake_both_ttft_p90_s"),
    ):
        row = taxes.get(config)
        measured = row.config_ms if row else None
        rows.append(PriorRow(config, prior[key], prior[key] / plain_s - 1, measured, row))
    return rows


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
    content = read_json(study.root / "environment.json")
    return {
        key: [text.compact(item) for item in value] if isinstance(value, list) else [
            text.compact(value)
        ]
        for key, value in content.items()
    }  # fmt: skip

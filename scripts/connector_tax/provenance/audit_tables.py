"""Claims about what is published: tables, figures' numbers, report, manifest."""

import base64
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from connector_tax.artifacts import paths
from connector_tax.artifacts.tables import columns_of
from connector_tax.files import read_json
from connector_tax.provenance.audit_figures import check_figures
from connector_tax.provenance.audit_manifest import check_manifest
from connector_tax.provenance.audit_study import RawLaunch, RawStudy
from connector_tax.provenance.claims import Ledger, message_of
from connector_tax.provenance.comparison import Table, differences, field_differences, read_csv
from connector_tax.provenance.recompute import Row
from connector_tax.provenance.recompute_findings import Findings
from connector_tax.provenance.recompute_resources import Resources, engine_rows
from connector_tax.provenance.recompute_tables import Recomputed

CELL = ("config", "block", "phase", "cell")
# What names a row of each table; all its columns are declared in artifacts.tables.
KEYS = {
    "aggregate.csv": CELL,
    "steps.csv": CELL,
    "step_taxes.csv": ("config", "phase", "cell", "metric"),
    "hooks.csv": ("config", "phase", "cell", "process", "child", "hook"),
    "step_cdf.csv": ("config", "cdf"),
    "taxes.csv": ("config", "phase", "cell", "metric"),
    "amplification.csv": ("config", "metric"),
    "resources.csv": ("config", "resource"),
    "engine.csv": ("config", "setting"),
    paths.DEVICE_TAXES: ("device", "config", "phase", "cell", "metric"),
}


def _tables(study: RawStudy) -> list[str]:
    """The tables that the study has."""
    return [name for name in KEYS if study.devices or name != paths.DEVICE_TAXES]


def check_published(study: RawStudy, ledger: Ledger, manifest: Path) -> None:
    """Every claim about tables, figures, report and manifest."""
    try:
        numbers = Recomputed(study)
    except Exception as error:
        text = f"the raw records cannot be read: {message_of(error)}"
        for name in (*_tables(study), "reference_rates.json", "hypotheses.json", "figures"):
            ledger.fail("numbers", name, text)
    else:
        _check_numbers(study, numbers, ledger)
    ledger.check("report", "report.html", _report(study), "holds every picture as it is on disk")
    check_manifest(study, ledger, manifest)
    if study.numbers != study.published:
        reason = "published by the method of before `plain_launches`, which this version left"
        for name in (*_tables(study), "aggregate.json", "hypotheses.json", "figures"):
            ledger.not_checkable("published", name, reason)


def _check_numbers(study: RawStudy, numbers: Recomputed, ledger: Ledger) -> None:
    tables: dict[str, Callable[[], list[Row]]] = {
        "aggregate.csv": numbers.aggregate_rows,
        "steps.csv": numbers.steps_rows,
        "step_taxes.csv": lambda: numbers.step_numbers.tax_rows(),
        "hooks.csv": lambda: numbers.step_numbers.hook_rows(),
        "step_cdf.csv": lambda: numbers.step_numbers.curve_rows(numbers.cell_at("ref_safe")),
        "taxes.csv": numbers.tax_rows,
        "amplification.csv": numbers.amplification_rows,
        "resources.csv": lambda: Resources(study, numbers.cell_at("ref_safe")).rows(),
        "engine.csv": lambda: engine_rows(study),
    }
    recomputed: dict[str, list[Row]] = {}
    if study.devices:
        tables[paths.DEVICE_TAXES] = lambda: numbers.device_rows(recomputed["taxes.csv"])
    for name, recompute in tables.items():
        with ledger.guarded("numbers", name):
            recomputed[name] = recompute()
            path = study.numbers / paths.ANALYSIS / name
            if study.published != study.root and not path.exists():
                ledger.not_checkable("numbers", name, "published before it was made")
                continue
            table = read_csv(path)
            cells = sum(len(row) for row in table)
            note = f"{len(table)} rows, {cells} fields"
            problems = itertools.chain(compare(name, table, recomputed[name]), _reasons(table))
            ledger.check("numbers", name, problems, note)
    ledger.check(
        "numbers", "aggregate.json", _aggregate_json(study, recomputed.get("aggregate.csv", []))
    )
    ledger.check("numbers", "reference_rates.json", _rates(study, numbers))
    ledger.check("numbers", "hypotheses.json", _hypotheses(study, numbers))
    for launch in study.launches:
        if launch.status == "done":
            ledger.check("summary", launch.name, _summary(launch, numbers))
    if recomputed.keys() == tables.keys():
        check_figures(study, numbers, recomputed, ledger)


def compare(name: str, table: Table, recomputed: Sequence[Row]) -> Iterator[str]:
    """Every declared column, and row by row, found by its keys, every field; nothing else."""
    declared, keys = columns_of(name, recomputed), KEYS[name]
    columns = tuple(table[0]) if table else declared
    if columns != declared:
        odd = [c for c in dict.fromkeys((*declared, *columns))
               if (c in columns) != (c in declared)]  # fmt: skip
        yield f"columns missing, added or in another order: {', '.join(odd) or 'order'}"
    if not set(keys) <= set(columns):
        return
    ours = {tuple(str(row[key]) for key in keys): row for row in recomputed}
    seen = [tuple(row[key] for key in keys) for row in table]
    times = Counter(seen)
    for key in dict.fromkeys((*ours, *seen)):
        if times[key] != 1 or key not in ours:
            yield f"{' '.join(key)}: published {times[key]} times, recomputed {key in ours:d}"
    for published, key in zip(table, seen, strict=True):
        if key in ours:
            yield from field_differences(published, ours[key], " ".join(key))


def _reasons(table: Table) -> Iterator[str]:
    """What has no number says why."""
    for number, row in enumerate(table, 2):
        if (row.get("status") == "missing" or row.get("value") == "") and not row["reason"]:
            yield f"line {number}: no value and no reason"


def _aggregate_json(study: RawStudy, rows: Sequence[Row]) -> Iterator[str]:
    content = read_json(study.numbers / paths.ANALYSIS / paths.AGGREGATE_JSON)
    yield from _labels(study, content)
    if len(content["rows"]) != len(rows):
        yield f"published {len(content['rows'])} rows, recomputed {len(rows)}"
    keys = KEYS["aggregate.csv"]
    by_key = {tuple(row[key] for key in keys): row for row in rows}
    declared = columns_of("aggregate.csv", rows)
    for published in content["rows"]:
        where = " ".join(str(published[key]) for key in keys)
        ours = by_key[tuple(published[key] for key in keys)]
        if odd := sorted(set(published) ^ set(declared)):
            yield f"{where}: columns missing or added: {', '.join(odd)}"
        for column, value in published.items():
            yield from (f"{where}: {line}" for line in differences(value, ours.get(column), column))


def _labels(study: RawStudy, content: Row) -> Iterator[str]:
    for key in ("engine_label", "emulated"):
        if content[key] != study.document[key]:
            yield f"{key} is {content[key]!r}, study.json says {study.document[key]!r}"


def _rates(study: RawStudy, numbers: Recomputed) -> Iterator[str]:
    yield from differences(study.rates, numbers.reference_rates(), "rates")


def _hypotheses(study: RawStudy, numbers: Recomputed) -> Iterator[str]:
    content = read_json(study.numbers / paths.ANALYSIS / paths.HYPOTHESES)
    yield from _labels(study, content)
    findings = Findings(numbers)
    findings_by_id, criteria = findings.criteria()
    for entry in content["hypotheses"]:
        name = entry["id"]
        verdict, values = findings_by_id.pop(name)
        if entry["verdict"] != verdict:
            yield f"{name}: verdict {entry['verdict']!r}, recomputed {verdict!r}"
        for key, value in values.items():
            yield from differences(entry["numbers"].get(key), value, f"{name}.{key}")
    for entry in content["criteria"]:
        verdict, label = criteria.pop(entry["id"])
        if (entry["verdict"], entry["numbers"].get("label")) != (verdict, label):
            shown = f"{entry['verdict']!r} {entry['numbers'].get('label')!r}"
            yield f"criterion {entry['id']}: {shown}, recomputed {verdict!r} {label!r}"
    if findings_by_id or criteria:
        yield f"not published: {[*findings_by_id, *criteria]}"
    yield from differences(content["resolution"], findings.resolution_rows(), "resolution")
    yield from _prior(content["prior"], study, numbers)


def _prior(prior: Row, study: RawStudy, numbers: Recomputed) -> Iterator[str]:
    given, cell = study.config["hypotheses"]["prior"], numbers.cell_at("ref_safe")
    priors = {
        study.baseline: given["plain_ttft_p90_s"],
        "nixl_both": given["nixl_ttft_p90_s"],
        "mooncake_both": given["mooncake_both_ttft_p90_s"],
    }
    expected: list[Row] = []
    for config, seconds in priors.items():
        row: Row = {
            "config": config,
            "prior_ttft_p90_s": seconds,
            "prior_tax": seconds / given["plain_ttft_p90_s"] - 1,
            "measured_ttft_p90_s": None,
            "measured_tax": None,
        }
        where = (config, "A", cell or "")
        tax = None if config == study.baseline else numbers.taxes.tax(where, "ttft_p90")
        if config == study.baseline and cell is not None:
            plain_ms = numbers.plain_ms("A", cell, "ttft_p90")
            row["measured_ttft_p90_s"] = None if plain_ms is None else plain_ms / 1e3
        elif tax is not None:
            row["measured_ttft_p90_s"] = numbers.levels(where, "ttft_p90")[1] / 1e3
            row["measured_tax"] = tax.numbers()
        expected.append(row)
    yield from differences(prior["rows"], expected, "prior")


def _summary(launch: RawLaunch, numbers: Recomputed) -> Iterator[str]:
    content = read_json(launch.folder / paths.SUMMARY)
    yield from differences(content, numbers.summaries.get(launch.name, {}), "summary")


def _report(study: RawStudy) -> Iterator[str]:
    path = study.root / paths.REPORT
    if not path.exists():
        yield "report.html is missing"
        return
    text = path.read_text(encoding="utf-8")
    for picture in sorted((study.root / paths.FIGURES).glob("*.png")):
        svg = picture.with_suffix(".svg")
        forms = [base64.b64encode(p.read_bytes()).decode() for p in (picture, svg) if p.exists()]
        if not any(form in text for form in forms):
            yield f"the picture {picture.name} in the report is not the one in figures/"
    if study.document["design_sha256"] not in text:
        yield "the report is of another design"
    if str(study.document["engine_label"]) not in text:
        yield "the report does not name the engine"

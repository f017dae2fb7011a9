"""Claims about what is published: tables, figures' numbers, report, manifest."""

import base64
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from connector_tax.files import read_json
from connector_tax.provenance.audit_figures import check_figures
from connector_tax.provenance.audit_study import RawLaunch, RawStudy
from connector_tax.provenance.claims import MALFORMED, Ledger
from connector_tax.provenance.comparison import Table, differences, read_csv, text_differs
from connector_tax.provenance.manifest import parse
from connector_tax.provenance.recompute import Row
from connector_tax.provenance.recompute_findings import Findings
from connector_tax.provenance.recompute_tables import Recomputed

KEYS = {
    "aggregate.csv": ("config", "block", "phase", "cell"),
    "steps.csv": ("config", "block", "phase", "cell"),
    "step_taxes.csv": ("config", "phase", "cell", "metric"),
    "hooks.csv": ("config", "phase", "cell", "process", "child", "hook"),
    "step_cdf.csv": ("config", "cdf"),
    "taxes.csv": ("config", "phase", "cell", "metric"),
    "amplification.csv": ("config", "metric"),
}


def check_published(study: RawStudy, ledger: Ledger, manifest: Path) -> None:
    """Every claim about tables, figures, report and manifest."""
    try:
        numbers = Recomputed(study)
    except MALFORMED as error:
        text = f"the raw records cannot be read: {type(error).__name__}: {error}"
        for name in (*KEYS, "reference_rates.json", "hypotheses.json", "figures"):
            ledger.fail("numbers", name, text)
    else:
        _check_numbers(study, numbers, ledger)
    ledger.check("report", "report.html", _report(study), "holds every picture as it is on disk")
    for launch in study.launches:
        if launch.index is not None:
            ledger.check("manifest", launch.name, _manifest_row(study, launch))
    _check_markdown(study, manifest, ledger)


def _check_numbers(study: RawStudy, numbers: Recomputed, ledger: Ledger) -> None:
    tables = {
        "aggregate.csv": numbers.aggregate_rows,
        "steps.csv": numbers.steps_rows,
        "step_taxes.csv": lambda: numbers.step_numbers.tax_rows(),
        "hooks.csv": lambda: numbers.step_numbers.hook_rows(),
        "step_cdf.csv": lambda: numbers.step_numbers.curve_rows(numbers.cell_at("ref_safe")),
        "taxes.csv": numbers.tax_rows,
        "amplification.csv": numbers.amplification_rows,
    }
    found: dict[str, list[Row]] = {}
    for name, recompute in tables.items():
        with ledger.guarded("numbers", name):
            found[name] = recompute()
            table = read_csv(study.published / "analysis" / name)
            cells = sum(len(row) for row in table)
            note = f"{len(table)} rows, {cells} fields"
            ledger.check("numbers", name, compare(table, found[name], KEYS[name]), note)
    ledger.check(
        "numbers", "aggregate.json", _aggregate_json(study, found.get("aggregate.csv", []))
    )
    ledger.check("numbers", "reference_rates.json", _rates(study, numbers))
    ledger.check("numbers", "hypotheses.json", _hypotheses(study, numbers))
    for launch in study.launches:
        if launch.status == "done":
            ledger.check("summary", launch.name, _summary(launch, numbers))
    if "taxes.csv" in found and "aggregate.csv" in found:
        check_figures(study, numbers, found, ledger)


def compare(table: Table, found: Sequence[Row], keys: Sequence[str]) -> Iterator[str]:
    """Row by row, found by its keys, and field by field; no row may be more or less."""
    ours = {tuple(str(row[key]) for key in keys): row for row in found}
    seen = [tuple(row[key] for key in keys) for row in table]
    for key in dict.fromkeys((*ours, *seen)):
        if seen.count(key) != 1 or key not in ours:
            yield f"{' '.join(key)}: published {seen.count(key)} times, recomputed {key in ours:d}"
    for published, key in zip(table, seen, strict=True):
        for column, text in published.items() if key in ours else ():
            value = ours[key].get(column)
            # Where a number is missing the reason is recomputed; elsewhere it is a remark.
            remark = column == "reason" and (value is None or "reason" not in ours[key])
            if not remark and text_differs(text, value):
                shown = "" if value is None else value
                yield f"{' '.join(key)}: {column}: published {text!r}, recomputed {shown!r}"


def _aggregate_json(study: RawStudy, rows: Sequence[Row]) -> Iterator[str]:
    content = read_json(study.published / "analysis" / "aggregate.json")
    for key in ("engine_label", "emulated"):
        if content[key] != study.document[key]:
            yield f"{key} is {content[key]!r}, study.json says {study.document[key]!r}"
    if len(content["rows"]) != len(rows):
        yield f"published {len(content['rows'])} rows, recomputed {len(rows)}"
    keys = KEYS["aggregate.csv"]
    by_key = {tuple(row[key] for key in keys): row for row in rows}
    for published in content["rows"]:
        where = " ".join(str(published[key]) for key in keys)
        ours = by_key[tuple(published[key] for key in keys)]
        for column, value in published.items():
            yield from (f"{where}: {line}" for line in differences(value, ours.get(column), column))


def _rates(study: RawStudy, numbers: Recomputed) -> Iterator[str]:
    yield from differences(study.rates, numbers.reference_rates(), "rates")


def _hypotheses(study: RawStudy, numbers: Recomputed) -> Iterator[str]:
    content = read_json(study.published / "analysis" / "hypotheses.json")
    findings = Findings(numbers)
    found, criteria = findings.criteria()
    for entry in content["hypotheses"]:
        name = entry["id"]
        verdict, values = found.pop(name)
        if entry["verdict"] != verdict:
            yield f"{name}: verdict {entry['verdict']!r}, recomputed {verdict!r}"
        for key, value in values.items():
            yield from differences(entry["numbers"].get(key), value, f"{name}.{key}")
    for entry in content["criteria"]:
        verdict, label = criteria.pop(entry["id"])
        if (entry["verdict"], entry["numbers"].get("label")) != (verdict, label):
            shown = f"{entry['verdict']!r} {entry['numbers'].get('label')!r}"
            yield f"criterion {entry['id']}: {shown}, recomputed {verdict!r} {label!r}"
    if found or criteria:
        yield f"not published: {[*found, *criteria]}"
    yield from differences(content["resolution"], findings.resolution_rows(), "resolution")
    yield from _prior(content["prior"], study, numbers)


def _prior(prior: Row, study: RawStudy, numbers: Recomputed) -> Iterator[str]:
    given, cell = study.config["hypotheses"]["prior"], numbers.cell_at("ref_safe")
    names = {
        "plain": "plain_ttft_p90_s",
        "nixl_both": "nixl_ttft_p90_s",
        "mooncake_both": "mooncake_both_ttft_p90_s",
    }
    for row in prior["rows"]:
        value = given[names[row["config"]]]
        expected: Row = {
            "config": row["config"],
            "prior_ttft_p90_s": value,
            "prior_tax": value / given["plain_ttft_p90_s"] - 1,
            "measured_ttft_p90_s": None,
            "measured_tax": None,
        }
        where = (row["config"], "A", cell or "")
        tax = numbers.taxes.tax(where, "ttft_p90")
        if tax is not None:
            expected["measured_ttft_p90_s"] = numbers.taxes.absolute(where, "ttft_p90")[1] / 1e3
            expected["measured_tax"] = None if row["config"] == "plain" else tax.numbers()
        yield from differences(row, expected, f"prior of {row['config']}")


def _summary(launch: RawLaunch, numbers: Recomputed) -> Iterator[str]:
    content = read_json(launch.folder / "summary.json")
    yield from differences(content, numbers.summaries.get(launch.name, {}), "summary")


def _report(study: RawStudy) -> Iterator[str]:
    path = study.root / "report.html"
    if not path.exists():
        yield "report.html is missing"
        return
    text = path.read_text(encoding="utf-8")
    for picture in sorted((study.root / "figures").glob("*.png")):
        svg = picture.with_suffix(".svg")
        forms = [base64.b64encode(p.read_bytes()).decode() for p in (picture, svg) if p.exists()]
        if not any(form in text for form in forms):
            yield f"the picture {picture.name} in the report is not the one in figures/"
    if study.document["design_sha256"] not in text:
        yield "the report is of another design"
    if str(study.document["engine_label"]) not in text:
        yield "the report does not name the engine"


# ---- manifest


def artifacts_digest(study: RawStudy, folder: Path) -> str:
    """The digest of a run as the head of MANIFEST.md defines it."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    lines = [f"{study.sha256(p)}  {p.relative_to(folder).as_posix()}\n" for p in paths]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _manifest_row(study: RawStudy, launch: RawLaunch) -> Iterator[str]:
    assert launch.index is not None
    rows = read_json(study.root / "manifest.json")
    key = (launch.config, str(launch.block), launch.phase)
    mine = [r for r in rows if (r["configuration"], r["block"], r["phase"]) == key]
    if len(mine) != 1:
        yield f"manifest.json has {len(mine)} rows"
        return
    states = [cell["status"] for cell in launch.index["cells"]]
    counts = "/".join(str(states.count(s)) for s in ("valid", "void", "skipped", "missing"))
    environment = read_json(study.root / "environment.json")
    expected = {
        "study": study.document["study"],
        "engine": study.document["engine_label"],
        "status": launch.status.upper() if launch.status == "skipped" else launch.status,
        "reason": (launch.index["reason"] or "").split("\n")[0],
        "cells": counts,
        "step_timing": "available" if study.step_timing else "not available",
        "sha256": artifacts_digest(study, launch.folder),
        "vllm": environment["vllm"],
    }
    for column, value in expected.items():
        if mine[0][column] != value:
            told = {"sha256": ": an artifact of the run changed after the manifest was written"}
            yield f"{column} is {mine[0][column]!r}, found {value!r}{told.get(column, '')}"


def _check_markdown(study: RawStudy, manifest: Path, ledger: Ledger) -> None:
    name = study.document["study"]
    with ledger.guarded("manifest", "MANIFEST.md"):
        text = manifest.read_text(encoding="utf-8") if manifest.exists() else ""
        rows = [row for row in parse(text) if row["study"] == name]
        if not rows:
            reason = f"MANIFEST.md has no rows of study {name}"
            ledger.not_checkable("manifest", "MANIFEST.md", reason)
            return
        published = read_json(study.root / "manifest.json")
        ledger.check("manifest", "MANIFEST.md", _same_rows(rows, published), f"{len(rows)} rows")


def _same_rows(rows: Table, published: Any) -> Iterator[str]:
    if len(rows) != len(published):
        yield f"MANIFEST.md has {len(rows)} rows, manifest.json {len(published)}"
    for left, right in zip(rows, published, strict=False):
        where = f"{left['configuration']} block {left['block']} {left['phase']}"
        for column in {**left, **right}:
            if left.get(column) != right.get(column):
                yield f"{where}: {column}: MANIFEST.md and manifest.json differ"

"""Claims about the manifest and environment.json: every column against its source."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from connector_tax.artifacts import paths
from connector_tax.artifacts.names import Launch
from connector_tax.files import read_json
from connector_tax.provenance import manifest
from connector_tax.provenance.audit_study import RawLaunch, RawStudy
from connector_tax.provenance.claims import Ledger
from connector_tax.provenance.comparison import Table
from connector_tax.provenance.manifest import COLUMNS, LEFT_OUT, parse, section_of
from connector_tax.seals import read_links

CHANGED = ": an artifact of the run changed after the manifest was written"


def check_manifest(study: RawStudy, ledger: Ledger, markdown: Path) -> None:
    """Every claim about what was run where; `markdown` is MANIFEST.md."""
    ledger.check("environment", "environment.json", _environment(study), "what env.txt says")
    for launch in study.launches:
        if launch.index is not None:
            ledger.check("manifest", launch.name, _row(study, launch))
    _check_markdown(study, manifest.page_of(study.root, markdown), ledger)


def _environment(study: RawStudy) -> Iterator[str]:
    """env.txt begins with environment.json, a line each; every run has a copy of it."""
    environment = read_json(study.root / paths.ENVIRONMENT)
    text = (study.root / paths.ENV_TEXT).read_text(encoding="utf-8")
    lines = text.partition("\n\n")[0].splitlines()
    captured = [f"{key}: {value}" for key, value in environment.items()]
    for line in captured:
        if line not in lines:
            yield f"{line!r} is not in env.txt"
    yield from (f"env.txt has {line!r}" for line in lines if line not in captured)
    label = study.document["engine_label"]
    if environment.get("engine_label", label) != label:
        yield f"engine_label is {environment['engine_label']!r}, study.json says {label!r}"


def _row(study: RawStudy, launch: RawLaunch) -> Iterator[str]:
    rows = read_json(study.root / paths.MANIFEST)
    key = (launch.config, str(launch.block), launch.phase)
    mine = [r for r in rows if (r["configuration"], r["block"], r["phase"]) == key]
    if len(mine) != 1:
        yield f"manifest.json has {len(mine)} rows"
        return
    environment = read_json(study.root / paths.ENVIRONMENT)
    place = Launch(launch.config, launch.block, launch.phase)
    expected = manifest.row(study.document, study.root, place, environment, study.step_timing)
    columns = dict.fromkeys((*COLUMNS, *mine[0]))
    if not read_links(study.root):
        # Measured before studies were sealed: a column that came later is in none of its rows.
        columns = dict.fromkeys(column for r in rows for column in r)
    for column in columns:
        # A column that came later, of which an older study has nothing, is in none of its rows.
        published, recomputed = mine[0].get(column, ""), expected.get(column)
        if published != recomputed:
            told = CHANGED if column == "sha256" else ""
            yield f"{column} is {published!r}, found {recomputed!r}{told}"


def _check_markdown(study: RawStudy, markdown: Path, ledger: Ledger) -> None:
    name = study.document["study"]
    with ledger.guarded("manifest", markdown.name):
        rows = parse(section_of(markdown, name) or "")
        if not rows:
            reason = f"{markdown.name} has no rows of study {name}"
            ledger.not_checkable("manifest", markdown.name, reason)
            return
        published = read_json(study.root / paths.MANIFEST)
        problems = _same_rows(rows, published, markdown.name)
        ledger.check("manifest", markdown.name, problems, f"{len(rows)} rows")


def _same_rows(rows: Table, published: Any, page: str) -> Iterator[str]:
    if len(rows) != len(published):
        yield f"{page} has {len(rows)} rows, manifest.json {len(published)}"
    for left, right in zip(rows, published, strict=False):
        where = f"{left['configuration']} block {left['block']} {left['phase']}"
        for column in {**left, **right}.keys() - set(LEFT_OUT):
            if left.get(column) != right.get(column):
                yield f"{where}: {column}: {page} and manifest.json differ"

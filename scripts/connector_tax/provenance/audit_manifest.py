"""Claims about manifest.json, MANIFEST.md and environment.json: every column against its source."""

import hashlib
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from connector_tax.files import read_json
from connector_tax.provenance.audit_study import RawLaunch, RawStudy
from connector_tax.provenance.claims import Ledger
from connector_tax.provenance.comparison import Table
from connector_tax.provenance.manifest import COLUMNS, adapters_of, parse
from connector_tax.provenance.recompute import Row

OF_ENVIRONMENT = ("vllm", "vllm_sha", "mooncake", "nixl", "lmcache")
CHANGED = ": an artifact of the run changed after the manifest was written"


def check_manifest(study: RawStudy, ledger: Ledger, manifest: Path) -> None:
    """Every claim about what was run where."""
    ledger.check("environment", "environment.json", _environment(study), "what env.txt says")
    for launch in study.launches:
        if launch.index is not None:
            ledger.check("manifest", launch.name, _row(study, launch))
    _check_markdown(study, manifest, ledger)


def _environment(study: RawStudy) -> Iterator[str]:
    """env.txt begins with environment.json, a line each; every run has a copy of it."""
    environment = read_json(study.root / "environment.json")
    text = (study.root / "env.txt").read_text(encoding="utf-8")
    lines = text.partition("\n\n")[0].splitlines()
    found = [f"{key}: {value}" for key, value in environment.items()]
    for line in found:
        if line not in lines:
            yield f"{line!r} is not in env.txt"
    yield from (f"env.txt has {line!r}" for line in lines if line not in found)
    label = study.document["engine_label"]
    if environment.get("engine_label", label) != label:
        yield f"engine_label is {environment['engine_label']!r}, study.json says {label!r}"


def artifacts_digest(study: RawStudy, folder: Path) -> str:
    """The digest of a run as the head of MANIFEST.md defines it."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    lines = [f"{study.sha256(p)}  {p.relative_to(folder).as_posix()}\n" for p in paths]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _row(study: RawStudy, launch: RawLaunch) -> Iterator[str]:
    rows = read_json(study.root / "manifest.json")
    key = (launch.config, str(launch.block), launch.phase)
    mine = [r for r in rows if (r["configuration"], r["block"], r["phase"]) == key]
    if len(mine) != 1:
        yield f"manifest.json has {len(mine)} rows"
        return
    expected = _expected(study, launch)
    for column in dict.fromkeys((*COLUMNS, *mine[0])):
        published, found = mine[0].get(column), expected.get(column)
        if published != found:
            told = CHANGED if column == "sha256" else ""
            yield f"{column} is {published!r}, found {found!r}{told}"


def _expected(study: RawStudy, launch: RawLaunch) -> Row:
    assert launch.index is not None
    name = study.document["study"]
    states = [cell["status"] for cell in launch.index["cells"]]
    environment = read_json(study.root / "environment.json")
    command, adapters = "not launched", []
    if (launch.folder / "config.json").exists():
        launched = read_json(launch.folder / "config.json")
        command, adapters = shlex.join(launched["argv"]), adapters_of(launched["environment"])
    return {
        "date": launch.index["started_utc"],
        "study": name,
        "configuration": launch.config,
        "block": str(launch.block),
        "phase": launch.phase,
        "engine": study.document["engine_label"],
        **{key: environment[key] for key in OF_ENVIRONMENT},
        "gpu": "; ".join(environment["gpu"]),
        "step_timing": "available" if study.step_timing else "not available",
        "adapters": ", ".join(adapters),
        "placement": "; ".join(sorted(_amiss(launch.index["attempts"]))),
        "status": launch.status.upper() if launch.status == "skipped" else launch.status,
        "reason": (launch.index["reason"] or "").split("\n")[0],
        "cells": "/".join(str(states.count(s)) for s in ("valid", "void", "skipped", "missing")),
        "directory": f"results/{name}/runs/{launch.name}",
        "command": command,
        "sha256": artifacts_digest(study, launch.folder),
    }


def _amiss(attempts: Sequence[Row]) -> set[str]:
    """The warnings of the affinity plans a launch's attempts were measured with."""
    warnings: set[str] = set()
    for attempt in attempts:
        plan = attempt.get("load_generator", {}).get("affinity") or {"warnings": []}
        warnings.update(plan["warnings"])
    return warnings


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

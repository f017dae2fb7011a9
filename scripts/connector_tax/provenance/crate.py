"""Workflow Run RO-Crate metadata of an archive.

Sources: RO-Crate 1.1; Workflow RO-Crate 1.0; Workflow Run Crate 0.5 (Process Run Crate and
Workflow Run Crate). Every date comes from the study, so the same study gives the same text.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from connector_tax.artifacts.study_records import StudyDocument

Entity = dict[str, Any]

CONTEXT = "https://w3id.org/ro/crate/1.1/context"
PROFILES = {
    "https://w3id.org/ro/wfrun/process/0.5": ("Process Run Crate", "0.5"),
    "https://w3id.org/ro/wfrun/workflow/0.5": ("Workflow Run Crate", "0.5"),
    "https://w3id.org/workflowhub/workflow-ro-crate/1.0": ("Workflow RO-Crate", "1.0"),
}
WORKFLOW = "workflow/Snakefile"
README = "README.md"
SNAKEMAKE = "https://w3id.org/workflowhub/workflow-ro-crate#snakemake"
BIOSCHEMAS = "https://bioschemas.org/profiles/ComputationalWorkflow/1.0-RELEASE"
LICENCE = "https://spdx.org/licenses/Apache-2.0"
TEXTS = {
    "study.json": ("Resolved configuration", "grid, seeds, run order, design hash"),
    "environment.json": ("Environment", "versions and hardware the study ran on"),
    "env.txt": ("Environment, in full", "every installed package"),
    "reference_rates.json": ("Reference rates", "saturation of each configuration"),
    "manifest.json": ("Manifest rows", "one per server launch and phase"),
    "published/analysis/taxes.csv": ("Taxes", "each configuration's cost over plain"),
    "published/analysis/aggregate.csv": ("Cells", "percentiles of every measured cell"),
    "published/analysis/hypotheses.json": ("Hypotheses", "verdicts on H1 to H6"),
}
FORMATS = {
    ".json": "application/json",
    ".csv": "text/csv",
    ".txt": "text/plain",
    ".log": "text/plain",
    ".sh": "text/x-shellscript",
    ".jsonl": "application/jsonl",
}
RESULTS = ("reference_rates.json", "manifest.json")


def crate(study: StudyDocument, files: Mapping[str, bytes], members: Sequence[str]) -> bytes:
    """The bytes of ro-crate-metadata.json.

    Args:
        study: study.json.
        files: name to content of the members outside runs/.
        members: the names of all members.
    """
    launches = sorted({"/".join(name.split("/")[:4]) + "/" for name in members if _in_run(name)})
    data = sorted(name for name in files if name != "archive.json")
    started, ended = _span(files)
    graph: list[Entity] = [
        {
            "@id": "ro-crate-metadata.json",
            "@type": "CreativeWork",
            "about": _id("./"),
            "conformsTo": [
                _id("https://w3id.org/ro/crate/1.1"),
                _id("https://w3id.org/workflowhub/workflow-ro-crate/1.0"),
            ],
        },
        _root(study, [*data, *launches], ended),
        *({"@id": i, "@type": "CreativeWork", "name": name, "version": version}
          for i, (name, version) in PROFILES.items()),
        *(_file(name, len(files[name])) for name in data if name != WORKFLOW),
        *(_launch(name) for name in launches),
        *_workflow(study, data),
        *_run(study, data, launches, started, ended),
    ]  # fmt: skip
    return (json.dumps({"@context": CONTEXT, "@graph": graph}, indent=1) + "\n").encode()


def readme(study: StudyDocument) -> bytes:
    """README.md of an archive: what it is, and how to redraw and audit it."""
    text = f"""# Connector-tax study {study["study"]}

Engine: {study["engine_label"]}. Package {study["package_version"]}.
Design {study["design_sha256"]}.

- `runs/` raw records of every server launch, `published/` the tables and the numbers under each
  figure as they were published, `archive.json` the size and SHA-256 of every file.
- `tables/` holds the lines of `runs/*/*/*/*/*.jsonl` as parquet, a table for each kind of record;
  unpacked, each is a file again, to the byte. With the project's package installed,
  `python -c "from connector_tax.provenance.unpack import table; print(table('FILE', 'requests'))"`
  reads them.
- In a checkout of the project, `snakemake --cores 1 replot --config archive=FILE` checks every
  hash, redraws all figures and the report, and audits each published number against the raw
  records. It starts no server and needs no network.
"""
    return text.encode()


def _in_run(name: str) -> bool:
    return name.startswith("runs/") and name.count("/") >= 4


def _id(identifier: str) -> Entity:
    return {"@id": identifier}


def _span(files: Mapping[str, bytes]) -> tuple[str, str]:
    dates = sorted(row["date"] for row in json.loads(files["manifest.json"]))
    return dates[0], dates[-1]


def _root(study: StudyDocument, parts: Sequence[str], published: str) -> Entity:
    return {
        "@id": "./",
        "@type": "Dataset",
        "name": f"Connector-tax study {study['study']} ({study['engine_label']})",
        "description": (
            "Raw records, environment and published tables of a study of what an idle KV connector "
            f"costs in vLLM. Engine: {study['engine_label']}. Design {study['design_sha256']}."
        ),
        "datePublished": published,
        "license": _id(LICENCE),
        "conformsTo": [_id(identifier) for identifier in PROFILES],
        "author": _id("#operator"),
        "mainEntity": _id(WORKFLOW),
        "mentions": _id("#run"),
        "hasPart": [_id(part) for part in parts],
    }


def _file(name: str, size: int) -> Entity:
    if name == README:
        about = {"about": _id("./"), "encodingFormat": "text/markdown"}
        return {"@id": name, "@type": "File", "name": "Read me", **about}
    title, text = TEXTS.get(name, (name, None))
    suffix = name[name.rfind(".") :] if "." in name else ""
    entity: Entity = {
        "@id": name,
        "@type": "File",
        "name": title,
        "contentSize": str(size),
        "encodingFormat": FORMATS.get(suffix, "text/plain"),
    }
    return entity if text is None else {**entity, "description": text}


def _launch(name: str) -> Entity:
    _, config, block, phase = name.rstrip("/").split("/")
    return {
        "@id": name,
        "@type": "Dataset",
        "name": f"Launch of {config}, {block}, phase {phase}",
        "description": "Raw request, metrics and engine-step records of one server launch",
    }


def _workflow(study: StudyDocument, data: Sequence[str]) -> list[Entity]:
    return [
        {
            "@id": WORKFLOW,
            "@type": ["File", "SoftwareSourceCode", "ComputationalWorkflow"],
            "name": "The connector-tax study",
            "description": "Two-phase open-loop sweep over KV connector configurations",
            "version": study["package_version"],
            "programmingLanguage": _id(SNAKEMAKE),
            "license": _id(LICENCE),
            "encodingFormat": "text/plain",
            "conformsTo": _id(BIOSCHEMAS),
            "hasPart": [_id(name) for name in data if name.startswith("workflow/rules/")],
        },
        {
            "@id": SNAKEMAKE,
            "@type": "ComputerLanguage",
            "name": "Snakemake",
            "alternateName": "Snakemake",
            "identifier": _id("https://doi.org/10.1093/bioinformatics/bts480"),
            "url": _id("https://snakemake.readthedocs.io"),
            "version": "9",
        },
        {
            "@id": LICENCE,
            "@type": "CreativeWork",
            "name": "Apache License 2.0",
            "description": "A permissive licence",
            "identifier": LICENCE,
        },
    ]


def _run(
    study: StudyDocument, data: Sequence[str], launches: Sequence[str], started: str, ended: str
) -> list[Entity]:
    results = [n for n in data if n.startswith("published/") or n in RESULTS]
    return [
        {
            "@id": "#run",
            "@type": "CreateAction",
            "name": f"Run of study {study['study']}",
            "description": f"{study['blocks']} block(s), seed {study['seed']}",
            "instrument": _id(WORKFLOW),
            "agent": _id("#operator"),
            "startTime": started,
            "endTime": ended,
            "actionStatus": "http://schema.org/CompletedActionStatus",
            "object": _id("study.json"),
            "result": [_id(name) for name in (*results, *launches)],
        },
        {
            "@id": "#operator",
            "@type": "Person",
            "name": "The operator of the study",
        },
    ]

"""Write the manifest: method and package version, digests of published files, the launches' common
environment, and a row for each launch and phase.

A study's manifest is results/<study>/manifest.md; MANIFEST.md lists the archived studies. Rows are
in phase and run order. Two markers enclose a study's section, so that packing one study leaves the
other sections unchanged.
"""

import argparse
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from connector_tax import __version__
from connector_tax.artifacts import paths
from connector_tax.artifacts.folder import LaunchFolder, StudyFolder
from connector_tax.artifacts.index import CellEntry, LaunchIndex, launch_index
from connector_tax.artifacts.launch_files import AttemptRecord, nodes_of
from connector_tax.artifacts.names import Launch
from connector_tax.artifacts.record_reader import checked
from connector_tax.artifacts.stage_records import EnvironmentRecord, ManifestRecord
from connector_tax.artifacts.study_file import Study
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.artifacts.tables import FIRST_METHOD, METHOD
from connector_tax.commands import run_command, study_parser
from connector_tax.files import (
    locked,
    read_json,
    sha256_file,
    sha256_json,
    sha256_tree,
    write_json,
    write_text,
)
from connector_tax.foreign import one_line
from connector_tax.provenance.views import digest, views_in
from connector_tax.seals import read_links, seal_end
from connector_tax.text import markdown_table

COLUMNS = {
    "date": "date (UTC)",
    "study": "study",
    "configuration": "configuration",
    "block": "block",
    "phase": "phase",
    "engine": "engine",
    "vllm": "vLLM",
    "vllm_sha": "vLLM git SHA",
    "mooncake": "Mooncake",
    "nixl": "NIXL",
    "lmcache": "LMCache",
    "gpu": "GPU",
    "device": "measured on",
    "engine_files": "lock and vLLM sources",
    "step_timing": "step timing",
    "adapters": "adapters",
    "paths": "data paths",
    "placement": "CPU placement",
    "status": "status",
    "reason": "reason",
    "cells": "cells valid/void/skipped/missing",
    "directory": "result directory",
    "command": "launch command",
    "sha256": "sha256 of the run's artifacts",
}
# Columns of every row; any other column is shown only if the launches differ in it.
OF_LAUNCH = ("date", "configuration", "block", "phase", "cells", "sha256")
# Not in the Markdown: derived from the study, or written in launch.sh.
LEFT_OUT = ("study", "directory", "command")
# Published files of the analysis, without pictures and pages.
TABLES = tuple(f"{paths.ANALYSIS}/{name}" for name in paths.ANALYSIS_FILES)
CLAIMED = (*TABLES, paths.REFERENCE_RATES, paths.LOOKS)
HEAD = """# Manifest

Each study lists what all its launches share, then one row per server launch and phase. `plain_2` is
the second launch of `plain` in a block. A launch's files lie in
`results/<study>/runs/<configuration>/block<block>/<phase>`, its command in `launch.sh` there. The
last column is the SHA-256 of the lines `<sha256>  <path>` of these files, sorted by path. The
study's `manifest.json` holds all of this. `Seal` is the last link of the study's chain
(seals.jsonl); each launch was added to the chain when it ended. An engine labelled "emulated" is
not a measurement of vLLM. Adapters are this project's plugins that change vLLM so that a connector
starts on the machine. Data paths: how a connector's data would travel, by the log of its gate. CPU
placement: what server and load generator shared.
"""
# Labels of values, and the headings of a table.
_LABELS = re.compile(r"^- [^:\n]+: |^\|.*\|\n(?=\| --- )", re.MULTILINE)


def rows(study: StudyFolder) -> list[dict[str, str]]:
    """Return the manifest rows of one study, in phase and run order; values are plain text.

    A remeasured launch also has a row for each earlier run that was moved aside.
    """
    rows = []
    for launch in study.launches:
        folder = launch.folder
        names = [path.name for path in folder.parent.glob(f"{folder.name}.superseded*")]
        names.sort(key=lambda name: (len(name), name))
        runs = (LaunchFolder(study.root, replace(launch.launch, phase=name)) for name in names)
        rows += [row(study.study, launch.launch, run) for run in (*runs, launch)]
    return rows


def row(of: Study, launch: Launch, run: LaunchFolder) -> dict[str, str]:
    """Return the manifest row of a launch, for its present run or an earlier run."""
    study, folder, path = of.document, of.root, run.folder
    environment: EnvironmentRecord = read_json(folder / paths.ENVIRONMENT)
    timed = read_json(folder / paths.PATCH_STATUS)["step_timing_available"]
    # Data paths of a connector, from its gate's log.
    gate = read_json(folder / paths.PREFLIGHT_STATUS)[launch.configuration]
    index = run.index or _without_index(study, launch, run)
    attempts = index.attempts
    plans = [a["load_generator"]["affinity"] for a in attempts if a.get("load_generator")]
    warnings = {warning for plan in plans if plan for warning in plan["warnings"]}
    states = [cell.status for cell in index.cells]
    forms = study["config"]["engine"].get("forms", {})
    python = forms.get(launch.configuration, {}).get("python")
    versions = environment.get("further_engines", {}).get(python or "", environment)
    command, adapters = "not launched", []
    if (path / paths.LAUNCH_CONFIG).exists():
        launched = read_json(path / paths.LAUNCH_CONFIG)
        command, adapters = shlex.join(launched["argv"]), adapters_of(launched["environment"])
    status = index.status.upper() if index.status == "skipped" else index.status
    engines = ("vllm", "vllm_sha", "mooncake", "nixl", "lmcache")
    return {
        "date": index.started_utc,
        "study": study["study"],
        "configuration": launch.config,
        "block": str(launch.block),
        "phase": path.name,
        "engine": study["engine_label"],
        **{key: str(versions.get(key)) for key in engines},
        "gpu": "; ".join(environment["gpu"]),
        "device": "; ".join(dict.fromkeys(_devices(attempts))),
        "engine_files": "; ".join(dict.fromkeys(_engine_files(attempts))),
        "step_timing": "available" if timed else "not available",
        "adapters": ", ".join(adapters),
        "paths": ", ".join(map(" ".join, gate.get("paths", {}).items())),
        "placement": "; ".join(sorted(warnings)),
        "status": status if path.name == launch.phase else "measured again, not used",
        "reason": (index.reason or "").split("\n")[0],
        "cells": "/".join(str(states.count(s)) for s in ("valid", "void", "skipped", "missing")),
        "directory": f"results/{study['study']}/{path.relative_to(folder).as_posix()}",
        "command": command,
        "sha256": sha256_tree(path),
    }


def _without_index(study: StudyDocument, launch: Launch, run: LaunchFolder) -> LaunchIndex:
    """Return a substitute index for an earlier run that was moved aside without index.json."""
    attempts = run.attempts
    states = [(record["cell"], "valid" if record["valid"] else "void") for record in run.measured]
    cells = [CellEntry(*state, None, {}) for state in states]
    started_utc = attempts[0]["started_utc"] if attempts else "not launched"
    return launch_index(
        study, launch, cells, status="superseded", attempts=attempts, started_utc=started_utc
    )


def _devices(attempts: Sequence[AttemptRecord]) -> Iterator[str]:
    """Yield each attempt's device, if recorded, as `machine-01 GPU-0a, NUMA node 0, exclusive`."""
    for node in nodes_of(attempts):
        numa = sorted({n for n in node["gpu_numa_nodes"] if n is not None})
        notes = [f"NUMA node {n}" for n in numa]
        if node["exclusive"] is not None:
            notes.append("exclusive" if node["exclusive"] else "not exclusive")
        yield ", ".join([" ".join([node["machine"], *node["devices"]]), *notes])


def _engine_files(attempts: Sequence[AttemptRecord]) -> Iterator[str]:
    """Yield each attempt's engine, such as `envs/vllm-cpu/.venv/bin/python: lock 0123, sources
    4567`.
    """
    for node in nodes_of(attempts):
        for python, files in node["engine_files"].items():
            lock, sources = (
                (files[key] or "not known")[:12] for key in ("lock_sha256", "sources_sha256")
            )
            yield f"{python}: lock {lock}, sources {sources}"


def adapters_of(environment: Mapping[str, str]) -> list[str]:
    """Return this project's plugins that change vLLM, from the launch's PYTHONPATH."""
    folders = environment.get("PYTHONPATH", "").split(":")
    adapted = any(folder.endswith("/connector_tax/vllm/cpu_adapter") for folder in folders)
    return ["connector_tax_cpu_adapter"] if adapted else []


def section(study: str, record: ManifestRecord, seal: str | None = None) -> str:
    """Return the Markdown between a study's two markers, markers included.

    Args:
        seal: SHA-256 of the last link of its chain; None for a study without seals.
    """
    study_rows = record["launches"]
    # Rows of older studies lack newer columns.
    known = [key for key in COLUMNS if key not in LEFT_OUT and all(key in r for r in study_rows)]
    shared = [
        key for key in known if key not in OF_LAUNCH and len({r[key] for r in study_rows}) == 1
    ]
    columns = [key for key in known if key not in shared and key not in OF_LAUNCH[4:]]
    columns += OF_LAUNCH[4:]
    lines = [
        f"<!-- study {study} -->",
        f"## {study}",
        "",
        *([] if seal is None else [f"Seal: sha256 `{seal}`.", ""]),
        # Manifests have named a method since release 0.4.
        *([] if record["package"] is None else _made_by(record)),
        *(f"- {COLUMNS[key]}: {_escape(study_rows[0][key])}" for key in shared),
        "",
        *markdown_table(
            [COLUMNS[key] for key in columns],
            *([_escape(row[key]) for key in columns] for row in study_rows),
        ),
        f"<!-- end of study {study} -->",
    ]
    return "\n".join(lines) + "\n"


def _made_by(record: ManifestRecord) -> list[str]:
    """Return the method of a study's claims, and a digest over its published files."""
    return [
        f"- analysed by method: {record['method']}",
        f"- sha256 of the digests of its published files: {sha256_json(record['files'])}",
    ]


def section_of(text: str, study: str) -> str:
    """Return the study's section in a manifest's text, with its markers; "" if missing."""
    return _sections(text).get(study, "")


def named(body: str, what: str) -> str | None:
    """Return the SHA-256 of the `Archive` or `Seal` in a study's section, or None."""
    line = re.search(rf"^{what}: (`[^`]+`, \d+ bytes, )?sha256 `([0-9a-f]{{64}})`\.$", body, re.M)
    return line[2] if line else None


def published_body(body: str) -> str:
    """Return a study's section of MANIFEST.md without the lines for its archive and pictures."""
    for line in (r"Archive: `[^`]+`, \d+ bytes, sha256 `[0-9a-f]{64}`\.", "Pictures: .*"):
        body = re.sub(rf"^{line}\n\n", "", body, count=1, flags=re.MULTILINE)
    return body


def doubt_about(published: str, made: str, record: ManifestRecord) -> str:
    """Return why a text published by another version may differ from this version's, or "".

    Versions word the head, labels and headings differently. Any other difference gives "".
    """
    another = record["package"] != __version__
    only_words = another and _without_words(published) == _without_words(made)
    return "its head or labels are another version's" * only_words


def _without_words(text: str) -> str:
    return _LABELS.sub("", text[max(0, text.find("\n<!-- study ")) :])


def pictures_line(pictures: Mapping[str, str]) -> str:
    """Return the line of MANIFEST.md with the SHA-256 of each picture of a study."""
    return f"Pictures: {', '.join(f'`{name}` {pictures[name]}' for name in sorted(pictures))}."


def pictures_of(digests: Mapping[str, str]) -> dict[str, str]:
    """Return the digests of the PNG files among published files, by file name."""
    return {Path(n).name: sha256 for n, sha256 in digests.items() if n.endswith(".png")}


def wrong_pictures(body: str, digests: Mapping[str, str]) -> Iterator[str]:
    """Yield the errors in the section's line of pictures, given their SHA-256 by file name."""
    (line,) = re.findall(r"^Pictures: .*$", body, re.MULTILINE) or [""]
    listed = dict(re.findall(r"`([^`]+)` (\w+)", line))
    for name in sorted({*listed, *digests}):
        if listed.get(name) != digests.get(name):
            yield f"{name} has sha256 {digests.get(name)}, but {listed.get(name)} is listed"
    if listed == digests and line != pictures_line(digests):
        yield "the line contains more than the SHA-256 of each picture"


def name_archive(
    manifest: Path, study: str, archive: Path, body: str, pictures: Mapping[str, str]
) -> None:
    """Write a study's section into MANIFEST.md, with its archive above its rows.

    Concurrent updates wait for each other.

    Args:
        pictures: SHA-256 of each picture by file name.
    """
    line = (
        f"Archive: `results/archive/{archive.name}`, {archive.stat().st_size} bytes, "
        f"sha256 `{sha256_file(archive)}`."
    )
    # A lock file, since writing replaces the manifest itself.
    with locked(manifest.with_name(f".{manifest.name}.lock")):
        text = manifest.read_text(encoding="utf-8") if manifest.exists() else ""
        head = f"## {study}\n\n"
        added = f"{head}{line}\n\n{pictures_line(pictures)}\n\n"
        write_text(manifest, merge(text, study, body.replace(head, added, 1)))


def merge(text: str, study: str, new_section: str) -> str:
    """Return the manifest with this study's section replaced or added, sorted by study name."""
    sections = _sections(text) | {study: new_section}
    return HEAD + "".join("\n" + sections[name] for name in sorted(sections))


def _sections(text: str) -> dict[str, str]:
    pattern = r"<!-- study (?P<name>\S+) -->\n.*?<!-- end of study (?P=name) -->\n"
    return {match["name"]: match[0] for match in re.finditer(pattern, text, re.DOTALL)}


def _escape(value: str) -> str:
    """Return a field as a table cell, in which nothing can end the line, the cell or the section.

    Markdown's marks get a backslash.
    """
    if value == "-":
        return "\\-"
    marked = value.replace("\\", "\\\\").replace("|", "\\|").replace("<", "\\<")
    return one_line(marked) or "-"


def main(argv: Sequence[str] | None = None) -> int:
    """Write a study's manifest as JSON and Markdown."""
    return run_command(study_parser("provenance.manifest", main.__doc__), argv, _write)


def _write(arguments: argparse.Namespace) -> None:
    seal_end(arguments.study.parent)
    write(arguments.study)


def write(study_file: Path) -> None:
    """Write manifest.json and manifest.md of a study, with the last link of its chain."""
    root, record = study_file.parent, manifest_record(study_file)
    write_json(root / paths.MANIFEST, record)
    write_text(root / paths.MANIFEST_PAGE, page(root, record))


def manifest_record(study_file: Path) -> ManifestRecord:
    """Return the manifest of a study whose claims this code made."""
    return {
        "method": METHOD,
        "package": __version__,
        "files": {n: digest(path) for n, path in published_files(study_file.parent).items()},
        "launches": rows(StudyFolder.load(study_file)),
    }


def published_files(root: Path) -> dict[str, Path]:
    """Return every claim, picture and page of a measured study, by its name in the folder."""
    return {name: root / name for name in CLAIMED if (root / name).is_file()} | views_in(root)


def read_manifest(path: Path) -> ManifestRecord:
    """Read manifest.json; a manifest from before release 0.4 gets the first method.

    Raises:
        ArtifactError: a value is missing or malformed.
    """
    value = read_json(path)
    if isinstance(value, list):
        value = {"method": FIRST_METHOD, "package": None, "files": {}, "launches": value}
    return checked(value, ManifestRecord, path.name)


def page(root: Path, record: ManifestRecord) -> str:
    """Return the text of manifest.md of the study in `root`."""
    study, links = record["launches"][0]["study"], read_links(root)
    return merge("", study, section(study, record, links[-1][0] if links else None))


if __name__ == "__main__":
    sys.exit(main())

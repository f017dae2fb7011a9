"""seals.jsonl: the chain that fixes a study's files and analysis settings while it is measured.

Each line is a link and names the SHA-256 of the line before it. The first link of a design holds
the analysis settings, before anything of that design is measured; then each launch that ends adds
one with the hash of its index.json, which holds the hash of every other file of the launch. Every
link also names the files of the study itself (gates, environment) that are new or changed since the
link before. Whoever changes a measured file must forge every later link and the study's manifest,
which names the last one; of an archived study that is MANIFEST.md.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from connector_tax.artifacts import paths
from connector_tax.artifacts.stage_records import AnalysisSettings, SealContent, SealLink
from connector_tax.artifacts.study_records import StudyConfig, StudyDocument
from connector_tax.files import ArtifactError, locked, sha256_file, write_bytes

FIRST = "0" * 64
ANALYSIS_KEYS = ("saturation", "reference", "statistics", "hypotheses")
STUDY_FILES = (paths.ENVIRONMENT, paths.ENV_TEXT, paths.PATCH_STATUS, paths.COMPLETE)


def analysis_settings(config: StudyConfig) -> AnalysisSettings:
    """The sections of a configuration that decide what the measurements are said to mean."""
    return {
        "saturation": config["saturation"],
        "reference": config["reference"],
        "statistics": config["statistics"],
        "hypotheses": config["hypotheses"],
    }


def changed_settings(folder: Path, study: StudyDocument) -> list[str]:
    """`statistics.margins.ttft_p90: 0.03 -> 0.1` for each analysis setting that is not as sealed.

    None for a study without a chain, and for one whose chain holds no settings of its design.
    """
    design = study["design_sha256"]
    sealed = [link for _, link in read_links(folder) if link.get("design_sha256") == design]
    if not sealed:
        return []
    old = dict(_leaves(sealed[0]["settings"]))
    new = dict(_leaves(analysis_settings(study["config"])))
    return [
        f"{name}: {old.get(name, 'absent')} -> {new.get(name, 'absent')}"
        for name in dict.fromkeys((*old, *new))
        if old.get(name) != new.get(name)
    ]


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else key)
    else:
        yield path, json.dumps(value)


def read_links(folder: Path) -> list[tuple[str, SealLink]]:
    """SHA-256 and content of every link of a study's chain; none where there is no chain.

    Raises:
        ArtifactError: a line is no JSON object.
    """
    path = folder / paths.SEALS
    links = []
    for number, line in enumerate(_complete_lines(path), 1):
        try:
            link: SealLink = json.loads(line)
        except ValueError as error:
            raise ArtifactError(f"{path}:{number}: not valid JSON: {error}") from None
        if not isinstance(link, dict):
            raise ArtifactError(f"{path}:{number}: found {type(link).__name__}; allowed: an object")
        links.append((hashlib.sha256(line).hexdigest(), link))
    return links


def study_files(folder: Path) -> dict[str, str]:
    """SHA-256 by path of what a study knows of itself besides its launches: gates, environment."""
    own = [folder / name for name in STUDY_FILES]
    own += sorted((folder / paths.PREFLIGHT).rglob("*"))
    return {
        path.relative_to(folder).as_posix(): sha256_file(path) for path in own if path.is_file()
    }


def settled_files(links: list[tuple[str, SealLink]]) -> dict[str, str]:
    """The study's own files as the links leave them: the last one that names a file counts."""
    files: dict[str, str | None] = {}
    for _, link in links:
        files |= link["files"]
    return {name: digest for name, digest in files.items() if digest is not None}


def seal_settings(folder: Path, study: StudyDocument) -> None:
    """Seal the analysis settings, unless this design's are sealed."""
    design = study["design_sha256"]
    with _chain(folder) as links:
        if not any(link.get("design_sha256") == design for _, link in links):
            settings = analysis_settings(study["config"])
            _append(folder, links, {"design_sha256": design, "settings": settings})


def seal_launch(folder: Path, launch: str, index_file: Path, index: dict[str, Any]) -> None:
    """Write a launch's index.json with the hash of every file of the launch, its link first.

    Killed between the two, the launch has no index.json: it ends again and gets another link.

    Args:
        folder: results/<study>.
        launch: `plain/block0/A`.
        index_file: index.json of the launch.
        index: its content without `files` and `seal`.
    """
    measured = {entry["cell"] for entry in index["cells"] if entry["files"]}
    there = sorted(path for path in index_file.parent.rglob("*") if path.is_file())
    names = {path.relative_to(index_file.parent): path for path in there if path != index_file}
    files = {
        name.as_posix(): sha256_file(path)
        for name, path in names.items()
        if name.parts[0] not in measured
    }
    with _chain(folder) as links:
        content = {**index, "files": files, "seal": len(links)}
        text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        digest = hashlib.sha256(text.encode()).hexdigest()
        _append(folder, links, {"launch": launch, "index_sha256": digest})
    write_bytes(index_file, text.encode())


def seal_end(folder: Path) -> None:
    """Seal complete.json."""
    with _chain(folder) as links:
        if settled_files(links) != study_files(folder):
            _append(folder, links, {})


def _append(folder: Path, links: list[tuple[str, SealLink]], what: SealContent) -> None:
    """Add a link; the chain is written anew, so that no reader sees half a line."""
    before, now = settled_files(links), study_files(folder)
    link: SealLink = {
        "number": len(links),
        "previous": links[-1][0] if links else FIRST,
        "utc": datetime.now(UTC).isoformat(timespec="milliseconds"),
        **what,
        "files": {
            name: now.get(name)
            for name in sorted({*before, *now})
            if before.get(name) != now.get(name)
        },
    }
    line = json.dumps(link, ensure_ascii=False, allow_nan=False).encode()
    path = folder / paths.SEALS
    write_bytes(path, b"".join(part + b"\n" for part in (*_complete_lines(path), line)))


def _complete_lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


@contextlib.contextmanager
def _chain(folder: Path) -> Iterator[list[tuple[str, SealLink]]]:
    """The links, while nobody else adds one."""
    with locked(folder / paths.SEALS_LOCK):
        yield read_links(folder)

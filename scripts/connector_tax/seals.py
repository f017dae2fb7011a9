"""Chain the hashes that seal every file of a study during the measurement (seals.jsonl).

Each line is a link and contains the SHA-256 of the previous line. The first link of a design holds
the analysis settings and the configurations' names, before anything of that design is measured.
Each launch that ends adds a link with the hash of its index.json, which lists the hashes of all
other files of the launch. Every link also lists the study's further files (`study_files`) that are
new or changed since the previous link. Changing a file unnoticed requires forging every later link
and the record of the last one; for an archived study that is MANIFEST.md.
"""

import contextlib
import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from connector_tax.artifacts import paths
from connector_tax.artifacts.names import PHASES
from connector_tax.artifacts.stage_records import AnalysisSettings, SealContent, SealLink
from connector_tax.artifacts.study_records import StudyConfig, StudyDocument
from connector_tax.artifacts.tables import METHOD
from connector_tax.files import (
    ArtifactError,
    locked,
    parse_json,
    read_json,
    sha256_below,
    sha256_file,
    write_bytes,
)

FIRST = "0" * 64
Links = Sequence[tuple[str, SealLink]]
# Files that are not sealed: derived from sealed ones, or used only while the study runs. Studies of
# release 0.3 have a durations.json.
MADE = (
    paths.ANALYSIS, paths.FIGURES, paths.REPORT, paths.MANIFEST, paths.MANIFEST_PAGE, paths.AUDIT,
    paths.COMPLETE, "durations.json", paths.REHEARSAL_PAGE,
)  # fmt: skip
RUNNING = (paths.LOGS, paths.OWNERS, paths.DEVICES, paths.SEALS, paths.SEALS_LOCK)


def analysis_settings(config: StudyConfig) -> AnalysisSettings:
    """Return the sections of a configuration that determine the analysis."""
    return {
        "saturation": config["saturation"],
        "reference": config["reference"],
        "statistics": config["statistics"],
        "hypotheses": config["hypotheses"],
    }


def changed_settings(folder: Path, study: StudyDocument) -> list[str]:
    """Return a line such as `statistics.margins.ttft_p90: 0.03 -> 0.1` for each setting or name
    that differs from the seal.

    Empty for a study without a chain, or without settings of its design in the chain.
    """
    design = study["design_sha256"]
    sealed = next((s for _, s in read_links(folder) if s.get("design_sha256") == design), None)
    if sealed is None:
        return []
    names = {"configurations": study["configurations"]}
    old = dict(_leaves({**sealed["settings"], "configurations": sealed["configurations"]}))
    new = dict(_leaves({**analysis_settings(study["config"]), **names}))
    return [
        f"{name}: {old.get(name, 'absent')} -> {new.get(name, 'absent')}"
        for name in dict.fromkeys((*old, *new))
        if old.get(name) != new.get(name)
    ]


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        for entry in value:
            yield from _leaves(entry, f"{path}.{entry.get('id')}")
    else:
        yield path, json.dumps(value)


def read_links(folder: Path) -> list[tuple[str, SealLink]]:
    """Return SHA-256 and content of every link of a study's chain; empty without a chain.

    Raises:
        ArtifactError: a line is not a JSON object; names the line and the remedy.
    """
    path = folder / paths.SEALS
    links = []
    for number, line in enumerate(_complete_lines(path), 1):
        try:
            link: SealLink = parse_json(line)
            if not isinstance(link, dict):
                raise ValueError(f"found {type(link).__name__}; allowed: an object")
        except ValueError as error:
            raise ArtifactError(f"{path}:{number}: not a link: {error}. {_WAY_OUT}") from None
        links.append((hashlib.sha256(line).hexdigest(), link))
    return links


_WAY_OUT = (
    "Nothing was changed. Restore the file from a copy or an archive. Without it nothing shows "
    "that the study is as measured: move its folder away and measure the study again"
)


def study_files(folder: Path, excluded: Collection[str] = ()) -> dict[str, str]:
    """Return the SHA-256 of every file that no launch's index.json lists, by path.

    These are files shared by launches, the gates, the reference rates, and replaced launches
    (`<phase>.superseded<k>`).

    Args:
        excluded: names in the folder that are not part of the study.
    """
    tops = [top for top in sorted(folder.iterdir()) if top.name not in (*MADE, *RUNNING, *excluded)]
    files = {}
    for path in (path for top in tops for path in (top, *sorted(top.rglob("*")))):
        parts = path.relative_to(folder).parts
        of_launch = parts[0] == paths.RUNS and len(parts) > 4 and parts[3] in PHASES
        passing = "__pycache__" in parts or parts[-1].startswith(".")
        if path.is_file() and not of_launch and not passing:
            files["/".join(parts)] = sha256_file(path)
    return files


def settled_files(links: Links) -> dict[str, str]:
    """Return the hashes of the study's own files, each from the last link that lists it."""
    files: dict[str, str | None] = {}
    for _, link in links:
        files |= link["files"]
    return {name: digest for name, digest in files.items() if digest is not None}


def seal_settings(folder: Path, study: StudyDocument) -> str | None:
    """Seal the analysis settings and names, unless done for this design; return the link's SHA-256.

    Raises:
        ArtifactError: launches were sealed, and their chain is missing.
    """
    design = study["design_sha256"]
    with _chain(folder) as links:
        if any(link.get("design_sha256") == design for _, link in links):
            return None
        content: SealContent = {
            "design_sha256": design,
            "settings": analysis_settings(study["config"]),
            "method": METHOD,
            "configurations": study["configurations"],
        }
        return _append(folder, links, content)


def seal_launch(folder: Path, launch: str, index_file: Path, index: dict[str, Any]) -> None:
    """Add a launch's link, then write its index.json with the hash of every file of the launch.

    If it is killed between the two, the launch has no index.json; it is concluded again and gets
    another link.

    Args:
        folder: results/<study>.
        launch: name such as `plain/block0/A`.
        index_file: index.json of the launch.
        index: its content without `files` and `seal`.

    Raises:
        ArtifactError: launches were sealed, and their chain is missing.
    """
    measured = {entry["cell"] for entry in index["cells"] if entry["files"]}
    files = {
        name: sha256
        for name, sha256 in sha256_below(index_file.parent).items()
        if name != index_file.name and name.partition("/")[0] not in measured
    }
    with _chain(folder) as links:
        content = {**index, "files": files, "seal": len(links)}
        text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        digest = hashlib.sha256(text.encode()).hexdigest()
        _append(folder, links, {"launch": launch, "index_sha256": digest})
    write_bytes(index_file, text.encode())


def seal_end(folder: Path) -> None:
    """Add the study's last link, with everything new since the last launch."""
    with _chain(folder) as links:
        if settled_files(links) != study_files(folder):
            _append(folder, links, {})


def _append(folder: Path, links: Links, what: SealContent) -> str:
    """Append a link and return its SHA-256.

    The whole chain is rewritten, so that no reader sees half a line.
    """
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
    return hashlib.sha256(line).hexdigest()


def _complete_lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


@contextlib.contextmanager
def _chain(folder: Path) -> Iterator[list[tuple[str, SealLink]]]:
    """Lock the chain and yield its links.

    Raises:
        ArtifactError: there are no links, although a launch was sealed.
    """
    with locked(folder / paths.SEALS_LOCK):
        links = read_links(folder)
        for index_file in () if links else folder.glob(f"{paths.RUNS}/*/*/*/{paths.INDEX}"):
            if "seal" in read_json(index_file):
                reason = f"holds no link, although {index_file} was sealed"
                raise ArtifactError(f"{folder / paths.SEALS}: {reason}. {_WAY_OUT}")
        yield links

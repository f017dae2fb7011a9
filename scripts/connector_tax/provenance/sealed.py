"""Claims about the chain of seals: every file of the study is as it was when it was sealed.

Whoever seals a changed study anew, from the first link, leaves nothing in its folder that tells:
only a seal that was published elsewhere does. MANIFEST.md is asked for it in any case.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from connector_tax.artifacts import paths
from connector_tax.artifacts.index import LaunchIndex, read_index
from connector_tax.artifacts.stage_records import SealLink
from connector_tax.artifacts.study_file import Study, every_launch
from connector_tax.files import read_json, sha256_file
from connector_tax.provenance.claims import Ledger
from connector_tax.provenance.manifest import published_body, seal_of, section, section_of
from connector_tax.seals import (
    FIRST,
    MADE,
    RUNNING,
    Links,
    changed_settings,
    read_links,
    settled_files,
    study_files,
)

KIND = "seal"
LIMIT = (
    "What was sealed anew from its first link cannot be told from the folder alone: "
    "docs/reviewers.md"
)
# The step probe's compiled modules, and what a killed process was writing.
PASSING = re.compile(rf"{paths.PATCH}/.*__pycache__/|.*\.tmp$")


def check_seals(study: Study, ledger: Ledger, beside: tuple[str, ...] = ()) -> str | None:
    """A claim for the chain, the settings, the study's own files, and each launch; the last link.

    Args:
        beside: what may lie in the folder besides the study, as `replot` puts it there.
    """
    links = read_links(study.root)
    if not links:
        ledger.fail(KIND, "chain", f"{paths.SEALS} is missing or empty")
        return None
    files = {
        name: digest
        for name, digest in study_files(study.root, links).items()
        if name.split("/")[0] not in beside
    }
    ledger.check(KIND, "chain", _chain(links), f"{len(links)} links, each of the one before")
    ledger.check(KIND, "settings", _settings(study, links), "fixed before the first measurement")
    same = _same_files(settled_files(links), files)
    ledger.check(KIND, "study's own files", same, "as they were when sealed")
    if paths.STUDY not in links[0][1]["files"]:
        reason = "sealed by release 0.2, whose chain left them out"
        ledger.not_checkable(KIND, f"{paths.STUDY}, {paths.REFERENCE_RATES}", reason)
    else:
        ledger.check(KIND, "reference rates", _rates(links), "fixed before Phase B")
    ledger.check(KIND, "folder", _unknown(study, links, {*files}, beside), "holds nothing else")
    newest = {link["launch"]: link for _, link in links if "launch" in link}
    for launch in every_launch(study.document):
        with ledger.guarded(KIND, launch.name):
            index = read_index(launch.folder(study.root))
            link = newest.pop(launch.name, None)
            problems = _launch(launch.folder(study.root), index, link)
            ledger.check(KIND, launch.name, problems)
    gone = (f"{name} was measured, and is gone from the design" for name in newest)
    ledger.check(KIND, "launches", gone, "all there")
    return links[-1][0]


def check_published(study: Study, head: str | None, markdown: Path, ledger: Ledger) -> str:
    """Is it the study that MANIFEST.md names? What the audit says of it in its last line."""
    name, text = study.document["study"], ""
    if markdown.is_file():
        text = section_of(markdown.read_text(encoding="utf-8"), name) or ""
    named, shown = seal_of(text, name), (head or "none")[:12]
    if named is None or head is None:
        reason = f"{markdown.name} names no seal of study {name}"
        ledger.not_checkable(KIND, markdown.name, reason)
        told = "published nowhere: whoever can write this folder can have made it"
    elif named == head:
        body = section(name, read_json(study.root / paths.MANIFEST), head)
        wrong = [] if body == published_body(text) else [f"its rows are not {paths.MANIFEST}'s"]
        ledger.check(KIND, markdown.name, wrong, f"names seal {shown}")
        told = f"the one {markdown.name} names"
    else:
        told = f"not the study that {markdown.name} names, whose seal is {named[:12]}"
        digests = [digest for digest, _ in read_links(study.root)]
        if named in digests:
            after = len(digests) - 1 - digests.index(named)
            ledger.fail(KIND, markdown.name, f"{after} links were added after the published seal")
        else:
            ledger.not_checkable(KIND, markdown.name, f"seal {shown}: {told}")
    return f"Seal {shown}: {told}. {LIMIT}."


def _chain(links: Links) -> Iterator[str]:
    previous = FIRST
    for number, (digest, link) in enumerate(links):
        if link["number"] != number:
            yield f"link {number} says it is number {link['number']}"
        if link["previous"] != previous:
            yield f"link {number} follows {link['previous']}, not link {number - 1}"
        previous = digest


def _settings(study: Study, links: Links) -> Iterator[str]:
    document = study.document
    mine = [s for _, s in links if s.get("design_sha256") == document["design_sha256"]]
    if len(mine) != 1:
        yield f"sealed {len(mine)} times for this design"
        return
    for line in changed_settings(study.root, document):
        yield f"changed after the first measurement, sealed {mine[0]['utc']}: {line}"
    # A launch of this design that is sealed before its settings are.
    number = mine[0]["number"]
    later = {s["launch"] for _, s in links[number:] if "launch" in s}
    for link in (s for _, s in links[:number] if "launch" in s):
        folder = study.root / paths.RUNS / link["launch"]
        if link["launch"] not in later and (folder / paths.INDEX).exists():
            yield f"{link['launch']} was measured before they were sealed"


def _rates(links: Links) -> Iterator[str]:
    """The reference rates stay as they are from the first launch of Phase B on."""
    settled: str | None = None
    fixed: str | None = None
    for _, link in links:
        if "settings" in link:
            fixed = None
        settled = link["files"].get(paths.REFERENCE_RATES, settled)
        if "launch" in link and not link["launch"].endswith("/A"):
            fixed = fixed or settled
        if settled is not None and fixed not in (None, settled):
            yield f"{paths.REFERENCE_RATES} changed at link {link['number']}"
            fixed = settled


def _same_files(sealed: Mapping[str, str], there: Mapping[str, str]) -> Iterator[str]:
    for name in dict.fromkeys((*sealed, *there)):
        if name not in there:
            yield f"{name} is missing"
        elif name not in sealed:
            yield f"{name} came after the seal"
        elif sealed[name] != there[name]:
            yield f"{name} changed after it was sealed"


def _unknown(study: Study, links: Links, files: set[str], beside: Sequence[str]) -> Iterator[str]:
    """Files that are neither sealed, nor made again, nor kept while a study runs."""
    allowed = {*MADE, *RUNNING, *beside}
    covered = files | {*settled_files(links)}
    runs = {launch.folder(study.root) for launch in every_launch(study.document)}
    for path in sorted(study.root.rglob("*")):
        name = path.relative_to(study.root).as_posix()
        if path.is_symlink() and not path.is_file():
            yield f"{name} is a link to nowhere"
        if not path.is_file() or name.split("/")[0] in allowed or name in covered:
            continue
        if not runs.isdisjoint(path.parents) or PASSING.match(name):
            continue
        if paths.STUDY in covered or not _left_out_by_0_2(name):
            yield f"{name} is no file of a study"


def _left_out_by_0_2(name: str) -> bool:
    """Files of a study that release 0.2 did not seal."""
    known = (paths.STUDY, paths.REFERENCE_RATES, paths.MODEL)
    return name in known or name.startswith((f"{paths.PATCH}/", f"{paths.RUNS}/"))


def _launch(folder: Path, index: LaunchIndex | None, link: SealLink | None) -> Iterator[str]:
    if index is None:
        yield "index.json is missing"
        return
    if link is None:
        yield f"index.json names link {index.seal}, {paths.SEALS} has none of this launch"
        return
    index_file = folder / paths.INDEX
    if index.seal != link["number"]:
        yield f"index.json names link {index.seal}, its newest is {link['number']}"
    if sha256_file(index_file) != link["index_sha256"]:
        yield "index.json changed after it was sealed"
    listed = dict(index.files or {})
    for entry in index.cells:
        listed |= {f"{entry.cell}/{name}": digest for name, digest in entry.files.items()}
    there = {
        path.relative_to(folder).as_posix(): sha256_file(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != index_file
    }
    yield from _same_files(listed, there)

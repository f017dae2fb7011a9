"""Claims about the chain of seals: files and analysis settings are those of measuring time."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import UNSET, UnsetType

from connector_tax.artifacts import paths
from connector_tax.artifacts.stage_records import SealLink
from connector_tax.provenance.audit_study import RawLaunch, RawStudy
from connector_tax.provenance.claims import Ledger
from connector_tax.provenance.manifest import page_of, seal_of, section_of
from connector_tax.seals import (
    FIRST,
    changed_settings,
    read_links,
    settled_files,
    study_files,
)

UNSEALED = "measured before studies were sealed"
KIND = "seal"


def check_seals(study: RawStudy, manifest: Path, ledger: Ledger) -> None:
    """A claim for the chain, the settings, the study's own files, and each launch."""
    links = read_links(study.root)
    newest = {link["launch"]: link for _, link in links if "launch" in link}
    ended = [launch for launch in study.launches if launch.index is not None]
    sealed = [la for la in ended if la.name in newest or _sealed(la) is not None]
    name = study.document["study"]
    page = page_of(study.root, manifest)
    rows = section_of(page, name)
    head = seal_of(rows or "", name)
    if not (links or sealed or head):
        ledger.not_checkable(KIND, "whole study", UNSEALED)
        return
    ledger.check(KIND, "chain", _chain(links), f"{len(links)} links, each of the one before")
    ledger.check(KIND, "settings", _settings(study, links), "fixed before the first measurement")
    ledger.check(KIND, "study's own files", _files(study, links), "as they were when measured")
    gone = sorted(newest.keys() - {launch.name for launch in ended})
    ledger.check(KIND, "launches", (f"{n} was measured, and is gone" for n in gone), "all there")
    for launch in ended:
        if launch in sealed:
            ledger.check(KIND, launch.name, _launch(study, launch, newest.get(launch.name)))
        else:
            ledger.not_checkable(KIND, launch.name, UNSEALED)
    if rows is None:
        ledger.not_checkable(KIND, page.name, f"{page.name} has no rows of study {name}")
    else:
        known = {digest for digest, _ in links}
        wrong = [] if head in known else [f"{page.name} names {head}, no link of the chain"]
        ledger.check(KIND, page.name, wrong, "names a link of the chain")


def _sealed(launch: RawLaunch) -> int | None:
    """The link that index.json names; None of one from before studies were sealed."""
    seal = UNSET if launch.index is None else launch.index.seal
    return None if isinstance(seal, UnsetType) else seal


def _chain(links: list[tuple[str, SealLink]]) -> Iterator[str]:
    if not links:
        yield f"{paths.SEALS} is missing"
    previous = FIRST
    for number, (digest, link) in enumerate(links):
        if link["number"] != number:
            yield f"link {number} says it is number {link['number']}"
        if link["previous"] != previous:
            yield f"link {number} follows {link['previous']}, not link {number - 1}"
        previous = digest


def _settings(study: RawStudy, links: list[tuple[str, SealLink]]) -> Iterator[str]:
    design = study.document["design_sha256"]
    mine = [link for _, link in links if link.get("design_sha256") == design]
    if len(mine) != 1:
        yield f"sealed {len(mine)} times for this design"
        return
    link = mine[0]
    for line in changed_settings(study.root, study.document):
        yield f"changed after the first measurement, sealed {link['utc']}: {line}"
    earlier = {other["launch"] for _, other in links[: link["number"]] if "launch" in other}
    later = {other["launch"] for _, other in links[link["number"] :] if "launch" in other}
    for launch in study.launches:
        if launch.index is not None and launch.name in earlier - later:
            yield f"{launch.name} was measured before they were sealed"


def _files(study: RawStudy, links: list[tuple[str, SealLink]]) -> Iterator[str]:
    yield from _same_files(settled_files(links), study_files(study.root))


def _same_files(sealed: Mapping[str, str], there: Mapping[str, str]) -> Iterator[str]:
    for name in dict.fromkeys((*sealed, *there)):
        if name not in there:
            yield f"{name} is missing"
        elif name not in sealed:
            yield f"{name} came after the seal"
        elif sealed[name] != there[name]:
            yield f"{name} changed after it was sealed"


def _launch(study: RawStudy, launch: RawLaunch, link: SealLink | None) -> Iterator[str]:
    assert launch.index is not None
    if link is None:
        yield f"index.json names link {_sealed(launch)}, {paths.SEALS} has none of this launch"
        return
    index_file = launch.folder / paths.INDEX
    if _sealed(launch) != link["number"]:
        yield f"index.json names link {_sealed(launch)}, its newest is {link['number']}"
    if study.sha256(index_file) != link["index_sha256"]:
        yield "index.json changed after it was sealed"
    listed = dict(launch.index.recorded or {})
    for entry in launch.index.cells:
        listed |= {f"{entry.cell}/{name}": digest for name, digest in entry.files.items()}
    there = {
        path.relative_to(launch.folder).as_posix(): study.sha256(path)
        for path in sorted(launch.folder.rglob("*"))
        if path.is_file() and path != index_file
    }
    yield from _same_files(listed, there)

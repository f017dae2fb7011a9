"""Check every published claim of a study against its raw records (`snakemake audit`).

Three questions (docs/reviewers.md): are the files those that were sealed during the measurement;
does this code make the same claims from them; do the records agree with the seed, the design and
each other. PASS: yes. FAIL: no, with the reason. NOT CHECKABLE: the folder cannot show it, or
another version of this package or its method made the claim, with the reason.

A changed study that is re-sealed from its first link leaves no trace in its folder; only a seal
published elsewhere exposes it. So MANIFEST.md is always checked for the seal.
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from connector_tax.artifacts import paths
from connector_tax.artifacts.folder import LaunchFolder, StudyFolder
from connector_tax.artifacts.stage_records import SealLink
from connector_tax.artifacts.study_file import Study, every_launch
from connector_tax.artifacts.tables import FIRST_METHOD, METHOD
from connector_tax.commands import UNREADABLE, run_command, study_parser
from connector_tax.files import (
    ArtifactError,
    digests_kept,
    is_intact,
    is_temporary,
    read_json,
    sha256_below,
    write_json,
)
from connector_tax.foreign import one_line
from connector_tax.provenance.archive import BESIDE, HEADER, MADE_BY_REPLOT, PUBLISHED
from connector_tax.provenance.claims import FAIL, NOT_CHECKABLE, PASS, Ledger
from connector_tax.provenance.launches import check_launches
from connector_tax.provenance.manifest import (
    doubt_about,
    merge,
    named,
    pictures_of,
    published_body,
    read_manifest,
    section,
    section_of,
    wrong_pictures,
)
from connector_tax.provenance.records import check_records
from connector_tax.provenance.remade import (
    KIND,
    check_claims,
    check_views,
    is_archived,
    published_views,
    remake,
)
from connector_tax.seals import (
    FIRST,
    MADE,
    Links,
    changed_settings,
    read_links,
    settled_files,
    study_files,
)

# Kind of claims about a study's rows and pictures in MANIFEST.md, which packing writes.
LISTED = "listed"
VERDICTS = (PASS, FAIL, NOT_CHECKABLE)
LIMIT = "The folder alone cannot show whether the whole chain was sealed again: docs/reviewers.md"
# Logs of commands, owners and device claims. They are not sealed, and nothing is derived from them.
LOG = re.compile(rf"{paths.LOGS}/[^/]+\.log")
NOTE = re.compile(
    rf"{LOG.pattern}|{paths.OWNERS}/[^/]+\.block\d+\.[^/]+\.json|{paths.DEVICES}/block\d+\.json"
)
# Unsealed files that `replot` uses and makes, except its logs.
REPLOTTED = {*MADE_BY_REPLOT, *BESIDE, paths.MANIFEST, paths.COMPLETE, paths.SEALS} - {paths.LOGS}
# The step probe's compiled modules.
COMPILED = re.compile(rf"{paths.PATCH}/.*__pycache__/[^/]*\.pyc")


@dataclass
class Audit:
    """The result of an audit.

    Attributes:
        ledger: the claims with their verdicts.
        seal: a line about the study's origin.
        planned, analysed: method versions in its first seal and in its manifest.
        verdicts: verdicts that this code's method changes; empty if the methods agree.
        not_made_again: number of claims made by another method.
    """

    ledger: Ledger = field(default_factory=Ledger)
    seal: str = "No seal."
    planned: int = FIRST_METHOD
    analysed: int = METHOD
    verdicts: Sequence[str] = ()
    not_made_again: int = 0

    @property
    def by_another(self) -> bool:
        """Return whether the study's claims were made by another method than this code's."""
        return self.analysed != METHOD

    @property
    def method(self) -> str:
        """Return a line about the methods if they differ; else ""."""
        if self.by_another:
            return (
                f"analysed by method {self.analysed}: {self.not_made_again} claims not made again"
            )
        if self.planned != self.analysed:
            return f"planned with method {self.planned}, analysed by method {self.analysed}"
        return ""

    def status(self, accepted: int | None = None) -> int:
        """Return the exit status: 1 after a FAIL, 2 for another method unless it is `accepted`,
        else 0.
        """
        if self.ledger.count(FAIL):
            return 1
        return 2 * (self.by_another and self.analysed != accepted)


def audit(study_file: Path, manifest: Path) -> Audit:
    """Check every claim of a study that was measured here, or unpacked from an archive and redrawn.

    Args:
        study_file: results/<study>/study.json.
        manifest: MANIFEST.md.

    Raises:
        ArtifactError: there is no study to audit, or nothing of it was measured.
    """
    root = study_file.parent
    unmeasured = (
        f"nothing of the study {root.name} was measured yet. To measure it: snakemake --cores 1"
        " all, with the study's --configfile"
    )
    if not study_file.is_file():
        raise ArtifactError(f"{study_file}: no such file; {unmeasured}")
    if not is_archived(root) and not _was_measured(root):
        raise ArtifactError(unmeasured)
    with digests_kept():
        return _audit(study_file, manifest)


def _was_measured(root: Path) -> bool:
    """Return whether a launch was sealed, ended or has a cell; True for a malformed chain."""
    runs = root / paths.RUNS
    if any(path for name in (paths.INDEX, "cell_*.json") for path in runs.rglob(name)):
        return True
    try:
        return any("launch" in link for _, link in read_links(root))
    except ArtifactError:
        return True


def _audit(study_file: Path, manifest: Path) -> Audit:
    result = Audit()
    ledger = result.ledger
    with ledger.guarded("study", "study.json"):
        folder = StudyFolder.load(study_file)
        study = folder.study
        result.seal = check_study(folder, manifest, ledger)
        result.planned = planned_method(study)
        if is_archived(study.root):
            with ledger.guarded("archive", "files"):
                check_archive(study.root, manifest, ledger)
        with ledger.guarded(KIND, "study"):
            result.analysed = read_manifest(study.root / paths.MANIFEST)["method"]
            check_views(study.root, ledger)
            with tempfile.TemporaryDirectory(prefix="audit-") as temporary:
                claims = check_claims(folder, remake(folder, Path(temporary)), ledger)
            result.verdicts, result.not_made_again = claims.verdicts, claims.not_made_again
    return result


def planned_method(study: Study) -> int:
    """Return the method version in the seal of the study's settings."""
    design = study.document["design_sha256"]
    links = (link for _, link in read_links(study.root) if link.get("design_sha256") == design)
    return next((link.get("method", FIRST_METHOD) for link in links), FIRST_METHOD)


def check_study(folder: StudyFolder, manifest: Path, ledger: Ledger) -> str:
    """Check the claims that need no recomputation; return a line about the study's origin."""
    statement, study = "No seal.", folder.study
    with ledger.guarded("seal", "study"):
        links = read_links(study.root)
        check_seals(folder, links, ledger)
        statement = check_published(study, [sha256 for sha256, _ in links], manifest, ledger)
    with ledger.guarded("launch", "study"):
        check_launches(folder, ledger)
    with ledger.guarded("records", "study"):
        check_records(folder, ledger)
    return statement


# ---- seals


def check_seals(folder: StudyFolder, links: Links, ledger: Ledger) -> None:
    """Check the chain of seals, the settings, the study's own files, and each launch."""
    study = folder.study
    if not links:
        ledger.check("seal", "chain", [f"{paths.SEALS} is missing or empty"])
        return
    archived = is_archived(study.root)
    newest = {link["launch"]: link for _, link in links if "launch" in link}
    reason = f"{len(links)} links, each with the previous hash"
    ledger.check("seal", "chain", _chain(links), reason)
    passed = "fixed before the first measurement"
    ledger.check("seal", "settings", _settings(study, links, newest), passed)
    files = study_files(study.root, BESIDE if archived else ())
    settled = settled_files(links)
    ledger.check("seal", "folder", _unknown(study, files, archived), "contains no other file")
    same = _same_files(settled, files)
    ledger.check("seal", "study's own files", same, "as they were when sealed")
    for launch in folder.launches:
        name = launch.launch.name
        ledger.check("seal", name, _launch(launch, newest.pop(name, None)))
    gone = (f"{name} was measured, but is missing from the design" for name in newest)
    ledger.check("seal", "launches", gone, "all there")


def check_published(study: Study, chain: Sequence[str], markdown: Path, ledger: Ledger) -> str:
    """Check that MANIFEST.md lists this study; return the audit's last line about it.

    Args:
        chain: the SHA-256 of each link.
    """
    name, page, head = study.document["study"], markdown.name, chain[-1] if chain else None
    text = markdown.read_text(encoding="utf-8") if markdown.is_file() else ""
    body = section_of(text, name)
    seal, shown, doubt, kind = named(body, "Seal"), (head or "none")[:12], "", "seal"
    if seal is None or head is None:
        statement = "published nowhere: anyone with write access to this folder can have made it"
        wrong, doubt = [statement], f"{page} names no seal of study {name}"
        doubt *= not _is_published(study, body)
    elif seal == head:
        statement = f"the seal that {page} names"
        record, listed = read_manifest(study.root / paths.MANIFEST), published_body(body)
        made, wrong = section(name, record, head), []
        rows = [] if made == listed else [f"its rows differ from {paths.MANIFEST}"]
        words = doubt_about(listed, made, record)
        ledger.check(LISTED, "rows", rows, f"as {page} names them", words)
        pictures = wrong_pictures(body, pictures_of(published_views(study.root)))
        ledger.check(LISTED, paths.FIGURES, pictures, f"as {page} names them")
    else:
        statement = f"not the study that {page} names, whose seal is {seal[:12]}"
        wrong, doubt = [statement], f"seal {shown}" * (not _is_published(study, body))
        if seal in chain:
            after = len(chain) - 1 - chain.index(seal)
            wrong, doubt = [f"{after} links were added after the published seal"], ""
            kind = LISTED  # packing the study again publishes them
    if body and text != (merged := merge(text, name, body)):
        words = doubt_about(text, merged, read_manifest(study.root / paths.MANIFEST))
        if not (wrong and words):
            wrong = ["the page contains text outside its head and the sections of studies"]
            doubt = words
            kind = "seal"
    ledger.check(kind, page, wrong, f"names seal {shown}", doubt)
    return f"Seal {shown}: {statement}. {LIMIT}."


def _is_published(study: Study, body: str) -> bool:
    """Return whether the section describes this study, by its archive or one of its launches.

    A new study with the same name has its own launches and seal.
    """
    if not body or is_archived(study.root):
        return bool(body)
    record = read_manifest(study.root / paths.MANIFEST)
    return any(row["sha256"] in body for row in record["launches"])


def _chain(links: Links) -> Iterator[str]:
    previous = FIRST
    for number, (sha256, link) in enumerate(links):
        if link["previous"] != previous:
            yield f"link {number} follows {link['previous']}, not link {number - 1}"
        if link["number"] != number:
            yield f"link {number} has the number {link['number']}"
        previous = sha256


def _settings(study: Study, links: Links, newest: Mapping[str, SealLink]) -> Iterator[str]:
    design = study.document["design_sha256"]
    seals = [link for _, link in links if link.get("design_sha256") == design]
    if len(seals) != 1:
        yield f"sealed {len(seals)} times for this design"
        return
    for line in changed_settings(study.root, study.document):
        yield f"changed after the first measurement, sealed {seals[0]['utc']}: {line}"
    for name, link in newest.items():
        if link["number"] < seals[0]["number"]:
            yield f"{name} was measured before they were sealed"


def _same_files(sealed: Mapping[str, str], there: Mapping[str, str]) -> Iterator[str]:
    for name in dict.fromkeys((*sealed, *there)):
        if name not in there:
            yield f"{name} is missing"
        elif name not in sealed:
            yield f"{name} was added after the seal"
        elif sealed[name] != there[name]:
            yield f"{name} changed after it was sealed"


def _unknown(study: Study, files: Collection[str], archived: bool) -> Iterator[str]:
    """Yield the files that are neither sealed, nor recomputed, nor used by a running study."""
    allowed = REPLOTTED if archived else {*MADE, paths.SEALS, paths.SEALS_LOCK}
    note = LOG if archived else NOTE
    root = study.root.resolve()
    runs = {launch.folder(study.root) for launch in every_launch(study.document)}
    for path in sorted(study.root.rglob("*")):
        name = path.relative_to(study.root).as_posix()
        # Partial files of killed processes are not claims of the study.
        passing = COMPILED.fullmatch(name) or is_temporary(path) or note.fullmatch(name)
        if path.is_symlink() and not path.resolve().is_relative_to(root):
            yield f"{name} leads outside of the study"
        known = name.split("/")[0] in allowed or name in files or passing
        if (path.is_file() or path.is_symlink()) and not known and runs.isdisjoint(path.parents):
            yield f"{name} is no file of a study"


def _launch(launch: LaunchFolder, link: SealLink | None) -> Iterator[str]:
    index = launch.index
    if index is None:
        yield "index.json is missing"
        return
    if link is None:
        yield f"index.json names link {index.seal}, but {paths.SEALS} has no link of this launch"
        return
    there = sha256_below(launch.folder)
    if there.pop(paths.INDEX) != link["index_sha256"]:
        yield "index.json changed after it was sealed"
    listed = dict(index.files or {})
    for entry in index.cells:
        listed |= {f"{entry.cell}/{name}": sha256 for name, sha256 in entry.files.items()}
    yield from _same_files(listed, there)


# ---- archives


def check_archive(root: Path, manifest: Path, ledger: Ledger) -> None:
    """Check the unpacked files by archive.json, and the archive by MANIFEST.md."""
    header = read_json(root / HEADER)
    ledger.check("archive", "files", _unpacked(root, header["files"]), "every hash as listed")
    text = manifest.read_text(encoding="utf-8") if manifest.is_file() else ""
    listed_sha256 = named(section_of(text, header["study"]), "Archive")
    actual_sha256 = (root / paths.ORIGIN).read_text(encoding="utf-8").split()[0]
    wrong = (
        []
        if listed_sha256 == actual_sha256
        else [f"sha256 is {actual_sha256}, but {manifest.name} names {listed_sha256}"]
    )
    doubt = "" if listed_sha256 else f"{manifest.name} names no archive of study {header['study']}"
    ledger.check("archive", "file", wrong, f"the file that {manifest.name} names", doubt)


def _unpacked(root: Path, listed: Mapping[str, Any]) -> Iterator[str]:
    """Yield the files that changed since unpacking, and files added to the published ones."""
    for name, entry in listed.items():
        if not is_intact(root / name, entry["sha256"]):
            yield f"{name}: missing or changed since it was unpacked"
    for path in sorted((root / PUBLISHED).rglob("*")):
        name = path.relative_to(root).as_posix()
        if name not in listed and not path.is_dir():
            yield f"{name} is not listed"


# ---- the command


def show(result: Audit) -> None:
    """Print a line for each kind, every claim that did not pass, and the study's origin."""
    ledger = result.ledger
    print(f"{'claims about':14}{'of':58}", *(f"{verdict:>13}" for verdict in VERDICTS))
    for kind in dict.fromkeys(claim.kind for claim in ledger.claims):
        claims = [claim for claim in ledger.claims if claim.kind == kind]
        counts = [sum(claim.verdict == verdict for claim in claims) for verdict in VERDICTS]
        subject = (
            claims[0].subject if len(claims) == 1 else f"{claims[0].subject} ... ({len(claims)})"
        )
        print(f"{kind:14}{one_line(subject):58}", *(f"{count or '':>13}" for count in counts))
    for verdict in (NOT_CHECKABLE, FAIL):
        for claim in ledger.claims:
            if claim.verdict == verdict:
                print(one_line(f"{verdict} {claim.kind} {claim.subject}: {claim.message}"))
    for line in result.verdicts:
        print(one_line(f"other verdict: {line}"))
    total = ", ".join(f"{ledger.count(verdict)} {verdict}" for verdict in VERDICTS)
    print(f"{len(ledger.claims)} claims: {total}")
    print(one_line(result.seal))
    if result.method:
        print(one_line(result.method))


def main(argv: Sequence[str] | None = None) -> int:
    """Audit a study: write audit.json beside study.json and print the claims.

    Exit with 1 if a claim fails, and with 2 if another method made the claims, unless it is
    accepted.
    """
    parser = study_parser("provenance.audit", main.__doc__)
    parser.add_argument("--manifest", type=Path, required=True, help="MANIFEST.md")
    accept = "exit with 0 although method N, not this code's method, made the claims"
    parser.add_argument("--accept-method", type=int, metavar="N", help=accept)
    return run_command(parser, argv, _audit_study, UNREADABLE, label="audit: ")


def _audit_study(arguments: argparse.Namespace) -> int:
    result = audit(arguments.study, arguments.manifest)
    show(result)
    ledger = result.ledger
    write_json(
        arguments.study.parent / paths.AUDIT,
        {
            "study": arguments.study.parent.name,
            "counts": {verdict: ledger.count(verdict) for verdict in VERDICTS},
            "seal": result.seal,
            "method": {"planned": result.planned, "analysed": result.analysed, "here": METHOD},
            "claims": [asdict(claim) for claim in ledger.claims],
        },
    )
    return result.status(arguments.accept_method)


if __name__ == "__main__":
    sys.exit(main())

"""Recompute a study's claims from the raw records and compare them with the published ones.

Claims are the tables and hypotheses of `analysis/`, the reference rates, the interim analyses, the
manifest and complete.json. If the manifest names another version of this package, columns, rows and
files that only one version makes are NOT CHECKABLE. If it names another version of the method, all
claims of the method are, and the audit prints the verdicts that differ. Pictures and pages are not
claims: see `check_views`.
"""

from pathlib import Path

from connector_tax import __version__
from connector_tax.analysis.aggregate import write_tables
from connector_tax.analysis.looks import take_look
from connector_tax.analysis.reference import rates_of
from connector_tax.artifacts import paths
from connector_tax.artifacts.folder import StudyFolder
from connector_tax.artifacts.looks import read_looks
from connector_tax.artifacts.stage_records import ManifestRecord
from connector_tax.artifacts.study_file import Study, load_study
from connector_tax.artifacts.tables import METHOD
from connector_tax.files import is_intact, is_temporary, read_json, write_json
from connector_tax.provenance import manifest
from connector_tax.provenance.archive import HEADER, PUBLISHED
from connector_tax.provenance.claims import Ledger
from connector_tax.provenance.differences import Comparison, compare, compare_values
from connector_tax.provenance.manifest import TABLES
from connector_tax.provenance.views import changed_files, is_view, other_versions, views_in
from connector_tax.seals import MADE, read_links, settled_files

KIND = "made again"
LOOKED_EARLIER = "one of its launches has been remeasured"
ANOTHER = "made by another version of this package; only its hash is checked"


def is_archived(root: Path) -> bool:
    """Return whether the study in a folder was unpacked from an archive."""
    return (root / HEADER).is_file()


def remake(study: StudyFolder, folder: Path) -> Path:
    """Recompute the claims of a study into a folder below `folder`; return the path of this folder.

    The tables of an unpacked study are not recomputed here: `replot` writes them beside the
    published ones.

    Raises:
        ArtifactError: the raw records do not give the claims.
    """
    made, rates = folder / study.root.name, rates_of(study)
    made.mkdir()
    write_json(made / paths.REFERENCE_RATES, rates)
    if not is_archived(study.root):
        write_tables(study, made, rates)
    if (study.root / paths.LOOKS).exists():
        copy = folder / "looks"
        copy.mkdir()
        for path in study.root.iterdir():
            if path.name not in (*MADE, paths.LOOKS):
                (copy / path.name).symlink_to(path.resolve())
        take_looks_again(study.root, load_study(copy / paths.STUDY))
        (copy / paths.LOOKS).rename(made / paths.LOOKS)
    write_json(made / paths.COMPLETE, {"complete": True})
    return made


def take_looks_again(root: Path, copy: Study) -> None:
    """Repeat the interim analyses of `root` in a copy; link looks.json if their launches were
    remeasured.
    """
    for taken in read_looks(root):
        take_look(copy, taken["blocks"])
    made = copy.root / paths.LOOKS
    changed = made.exists() and measured_again(root, copy)
    if changed and compare(root / paths.LOOKS, made).wrong:
        made.unlink()
        made.symlink_to((root / paths.LOOKS).resolve())


def measured_again(root: Path, copy: Study) -> bool:
    """Return whether any Phase A launch was remeasured and its sealed first run still exists."""
    sealed = settled_files(read_links(root))
    for launch in StudyFolder(copy).of_phase("A"):
        for attempt in launch.index.attempts if launch.index is not None else ():
            aside = launch.folder.parent / str(attempt.get("supersedes")) / paths.INDEX
            seal = sealed.get(aside.relative_to(copy.root).as_posix())
            if seal is not None and is_intact(aside, seal):
                return True
    return False


class Claims:
    """The claims of one study, checked by the method and version in its manifest.

    Attributes:
        verdicts: verdicts that this code's method changes.
        not_made_again: number of claims made by another method.
    """

    def __init__(self, record: ManifestRecord, ledger: Ledger) -> None:
        self.record, self.ledger = record, ledger
        self.other_version = record["package"] != __version__
        self.other_method = record["method"] != METHOD
        self.verdicts: list[str] = []
        self.not_made_again = 0

    def compare(self, name: str, published: Path, made: Path) -> None:
        """Check a published file against the recomputed file of the same name."""
        with self.ledger.guarded(KIND, name):
            result = self._comparison(name, published / name, made / name)
            if not self.other_method:
                self.judge(name, result)
                return
            self.not_made_again += 1
            lines = result.wrong + result.only
            self.verdicts += (line for line in lines if ".verdict: " in line)
            by = f"made by method {self.record['method']}; this code has method {METHOD}"
            self.ledger.check(KIND, name, lines or ["no value differs"], doubt=by)

    def judge(self, name: str, result: Comparison) -> None:
        """Add a claim; a file that only one version makes is NOT CHECKABLE unless other values
        differ.
        """
        doubt = "" if result.wrong else ANOTHER
        self.ledger.check(KIND, name, result.wrong + result.only, "as published", doubt)

    def _comparison(self, name: str, published: Path, made: Path) -> Comparison:
        if name not in manifest.CLAIMED:
            lone, listed = "not a file of a study's analysis", self.other_version
        elif not published.is_file():
            lone = "is missing"
            listed = self.other_version and name not in self.record["files"]
        elif not made.is_file():
            lone, listed = "was not made again", False
        else:
            return compare(published, made, self.other_version)
        return Comparison(only=[lone]) if listed else Comparison(wrong=[lone])


def check_claims(study: StudyFolder, made: Path, ledger: Ledger) -> Claims:
    """Compare the claims in a study's folder with the recomputed claims in `made`."""
    root = study.root
    record = manifest.read_manifest(root / paths.MANIFEST)
    archived = is_archived(root)
    published, tables = (root / PUBLISHED, root) if archived else (root, made)
    claims = Claims(record, ledger)
    claims.compare(paths.REFERENCE_RATES, root, made)
    if (root / paths.LOOKS).exists():
        check_looks(root, made, claims)
    for name in sorted({*TABLES} | _tables_in(published)):
        claims.compare(name, published, tables)
    if archived:
        planted = sorted(_tables_in(root) - {*TABLES})
        ledger.check(KIND, "tables of replot", (f"{n}: not a table" for n in planted), "no others")
    with ledger.guarded(KIND, paths.MANIFEST):
        again = manifest.rows(study)
        claims.judge(
            paths.MANIFEST, compare_values(record["launches"], again, "row", claims.other_version)
        )
    complete = root / paths.COMPLETE
    wrong = compare(complete, made / paths.COMPLETE).wrong if complete.is_file() else ["is missing"]
    ledger.check(KIND, paths.COMPLETE, wrong)
    if not archived:
        page = (root / paths.MANIFEST_PAGE).read_text(encoding="utf-8")
        own = manifest.page(root, record)
        wrong = [] if page == own else [f"differs from the page that {paths.MANIFEST} gives"]
        words = manifest.doubt_about(page, own, record)
        ledger.check(KIND, paths.MANIFEST_PAGE, wrong, doubt=words)
    _check_digests(root, published, record, ledger)
    return claims


def _tables_in(folder: Path) -> set[str]:
    """Return the files below a folder's `analysis/`, by their name relative to the folder."""
    below = (path for path in (folder / paths.ANALYSIS).rglob("*") if not path.is_dir())
    return {path.relative_to(folder).as_posix() for path in below if not is_temporary(path)}


def _check_digests(root: Path, published: Path, record: ManifestRecord, ledger: Ledger) -> None:
    """Check the published tables by the digests in the manifest."""
    listed = {name: sha256 for name, sha256 in record["files"].items() if not is_view(name)}
    there = {n: (published if n in TABLES else root) / n for n in manifest.CLAIMED}
    there = {name: path for name, path in there.items() if path.is_file()}
    if record["package"] is not None:
        ledger.check("files", paths.ANALYSIS, changed_files(listed, there), "as the manifest says")


def check_looks(root: Path, made: Path, claims: Claims) -> None:
    """Check looks.json, unless a launch that the interim analyses used was remeasured."""
    if (made / paths.LOOKS).is_symlink():
        claims.ledger.check(
            KIND, paths.LOOKS, [LOOKED_EARLIER], doubt="each interim analysis runs once"
        )
    else:
        claims.compare(paths.LOOKS, root, made)


def check_views(root: Path, ledger: Ledger) -> None:
    """Check whether pictures and report equal the published files; add one line to `ledger`.

    `replot` redraws an archive's views with the local code and processor. Views are not claims, so
    the audit lists changed views but does not fail for them.
    """
    published, doubt = published_views(root), ""
    if is_archived(root):
        others = other_versions(read_json(root / HEADER)["versions"])
        doubt = f"drawn by other code ({', '.join(others) or 'or altered here'})"
    there = views_in(root)
    changed = [*changed_files(published, there)]
    passed = f"the {len(there)} published files"
    problem = [f"{len(changed)} of {len(there)}: {'; '.join(changed)}"] if changed else []
    ledger.check("views", f"{paths.FIGURES}, {paths.REPORT}", problem, passed, doubt)


def published_views(root: Path) -> dict[str, str]:
    """Return the published digests of a study's pictures and pages, by name.

    An archive from before release 0.4 lists its pictures in archive.json; a study measured before
    it lists none.
    """
    files = manifest.read_manifest(root / paths.MANIFEST)["files"]
    views = {name: sha256 for name, sha256 in files.items() if is_view(name)}
    if not views and is_archived(root):
        views = read_json(root / HEADER).get("redrawn", {})
    return views

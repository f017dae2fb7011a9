"""Claims about all that is made of the records: made again, is it bit for bit what was published?

Tables, pictures and report are made again by the study's own commands in processes of their own, in
a temporary folder: no code of theirs is loaded here, and nothing of the study changes. `replot` has
already made again what was in an archive. Their numbers are recomputed elsewhere (`recompute*`).
"""

import base64
import binascii
import hashlib
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from connector_tax import __version__
from connector_tax.artifacts import paths
from connector_tax.files import read_json, sha256_file
from connector_tax.machine import arithmetic
from connector_tax.provenance.archive_limits import HEADER, ORIGIN
from connector_tax.provenance.audit_study import RawStudy
from connector_tax.provenance.claims import Ledger
from connector_tax.provenance.comparison import differences
from connector_tax.provenance.manifest import archive_of

KIND = "made again"
MADE = (paths.ANALYSIS, paths.FIGURES, paths.REPORT)
NOT_COPIED = (*MADE, paths.LOGS, paths.AUDIT, "published")
# What the numbers and pictures depend on besides the raw records.
PACKAGES = (
    "numpy", "scipy", "polars", "pandas", "matplotlib", "pillow", "contourpy", "kiwisolver",
    "fonttools", "seaborn", "jinja2", "markupsafe",
)  # fmt: skip
# matplotlib names a clip path by a hash of its coordinates, whose last bits the layout's solver
# leaves to where variables lie in memory: the same picture, drawn again, may name it otherwise.
CLIP_PATH = re.compile(rb'(?<=["#])p[0-9a-f]{10}(?=[")])')
IN_REPORT = re.compile(rb"(?<=data:image/svg\+xml;base64,)[A-Za-z0-9+/=]+")


def versions() -> dict[str, str]:
    """What the bytes of what is made depend on besides the records: versions, and the processor."""
    own = {
        "python": platform.python_version(),
        "connector-tax": __version__,
        "processor": arithmetic(),
    }
    installed = {(d.metadata["Name"] or "").lower(): d.version for d in metadata.distributions()}
    return own | {name: installed.get(name, "absent") for name in PACKAGES}


def published_files(root: Path) -> dict[str, str]:
    """Digests of everything that is made of the records, by path below the study's folder."""
    paths = [path for name in MADE for path in (root / name, *sorted(root.glob(f"{name}/*")))]
    return {p.relative_to(root).as_posix(): _digest(p) for p in paths if p.is_file()}


def _digest(path: Path) -> str:
    """SHA-256 of a file in which pictures name their clip paths by number."""
    content = path.read_bytes()
    if path.suffix == ".svg":
        content = _numbered(content)
    elif path.suffix == ".html":
        content = IN_REPORT.sub(_numbered_in_report, content)
    return hashlib.sha256(content).hexdigest()


def _numbered_in_report(encoded: re.Match[bytes]) -> bytes:
    try:
        return _numbered(base64.b64decode(encoded[0]))
    except binascii.Error:
        return encoded[0]


def _numbered(picture: bytes) -> bytes:
    names: dict[bytes, int] = {}
    return CLIP_PATH.sub(lambda name: b"p%d" % names.setdefault(name[0], len(names)), picture)


def check_remade(study: RawStudy, ledger: Ledger) -> None:
    """Make everything again beside a study that was measured here, and compare."""
    published = published_files(study.root)
    with tempfile.TemporaryDirectory(prefix="audit-") as folder:
        copy = Path(folder) / study.root.name
        copy.mkdir()
        for path in study.root.iterdir():
            if path.name not in NOT_COPIED:
                (copy / path.name).symlink_to(path.resolve())
        figures = sorted({Path(name).stem for name in published if name.startswith("figures/")})
        commands = (["analysis.aggregate"], ["figures", *figures], ["report"])
        failed = next((said for command in commands if (said := _run(command, copy))), None)
        if failed:
            ledger.fail(KIND, "study", failed)
            return
        extra = published_files(copy).keys() - published.keys()
        ledger.check(KIND, "study", (f"{name} is missing" for name in sorted(extra)), "all there")
        _compare(study, published, copy, _other_versions(_measured_with(study.root)), ledger)


def check_redrawn(study: RawStudy, manifest: Path, ledger: Ledger) -> None:
    """Compare what a replot made with the hashes in archive.json."""
    header = read_json(study.root / HEADER)
    other = _other_versions(header["versions"])
    if study.older_form:
        other.insert(0, "the method of before `plain_launches`")
    _compare(study, header["redrawn"], study.root, other, ledger)
    _check_origin(study.root, header["study"], manifest, ledger)
    problems = _unpacked(study.root, header["files"])
    ledger.check("unpacked", "files", problems, "every hash as listed")


def _compare(
    study: RawStudy, published: Mapping[str, str], made: Path, other: list[str], ledger: Ledger
) -> None:
    """A difference is a FAIL; NOT CHECKABLE where other versions or another processor made it."""
    for name, digest in published.items():
        problems = list(_differs(study, name, digest, made / name))
        if problems and other and (made / name).is_file():
            ledger.not_checkable(KIND, name, f"{problems[0]}; made with {', '.join(other)}")
        else:
            ledger.check(KIND, name, problems, "bit for bit as published")


def _differs(study: RawStudy, name: str, digest: str, made: Path) -> Iterator[str]:
    if not made.is_file():
        yield "it was not made again"
        return
    # Archives of before were given the SHA-256 of the very bytes.
    if digest in (_digest(made), sha256_file(made)):
        return
    yield "it is not bit for bit what was published: not what this code makes of the study"
    original = study.published / name
    if not original.is_file() or original == made:
        return
    if name.endswith(".json"):
        yield from differences(read_json(original), read_json(made), Path(name).stem)
    elif not name.endswith((".png", ".parquet")):
        lines = (path.read_text(encoding="utf-8").splitlines() for path in (original, made))
        pairs = enumerate(zip(*lines, strict=False), 1)
        yield f"first in line {next((k for k, (old, new) in pairs if old != new), 'the last')}"
    yield (
        f"what is honest and only old is made anew by `snakemake --cores 1 -f {study.root / name}`"
    )


def _measured_with(root: Path) -> dict[str, str]:
    """The versions that env.txt tells of the pipeline."""
    text = (root / paths.ENV_TEXT).read_text(encoding="utf-8")
    own = text.partition("# pipeline packages\n")[2].partition("\n\n")[0].lower()
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", own, re.MULTILINE))


def _other_versions(there: Mapping[str, str]) -> list[str]:
    here = versions()
    return [
        f"{name} {there[name]} (here {version})"
        for name, version in here.items()
        if there.get(name, version) != version
    ]


def _run(command: list[str], copy: Path) -> str | None:
    """Run one of the study's commands on the copy; what it says where it fails."""
    module, *names = command
    study_file = str(copy / "study.json")
    done = subprocess.run(
        [sys.executable, "-m", f"connector_tax.{module}", *names, "--study", study_file],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return None
    last = done.stderr.strip().splitlines()[-1:] or ["no message"]
    return f"python -m connector_tax.{module} ended with status {done.returncode}: {last[0]}"


def _check_origin(root: Path, study: str, manifest: Path, ledger: Ledger) -> None:
    """Is it the archive that the MANIFEST.md of this checkout names?"""
    text = manifest.read_text(encoding="utf-8") if manifest.exists() else ""
    named = archive_of(text, study)
    digest = (root / ORIGIN).read_text(encoding="utf-8").split()[0]
    if named is None:
        reason = f"MANIFEST.md names no archive of study {study}"
        ledger.not_checkable("unpacked", "archive", reason)
    else:
        problems = [] if named == digest else [f"sha256 is {digest}, MANIFEST.md names {named}"]
        ledger.check("unpacked", "archive", problems, "the one MANIFEST.md names")


def _unpacked(root: Path, files: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    for name, entry in files.items():
        if not (root / name).is_file() or sha256_file(root / name) != entry["sha256"]:
            yield f"{name}: missing or changed since it was unpacked"

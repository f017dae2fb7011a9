"""Pictures and pages of a study: published as digests, redrawn by `replot`.

All their numbers are in tables, so another version may draw them differently. The audit reports
whether a folder's views are the published files.
"""

import base64
import binascii
import hashlib
import platform
import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from connector_tax import __version__
from connector_tax.artifacts import paths
from connector_tax.files import is_temporary
from connector_tax.machine import arithmetic

# Packages that pictures depend on, besides the raw records and this package.
DRAWN_WITH = (
    "numpy", "scipy", "pandas", "matplotlib", "pillow", "contourpy", "kiwisolver",
    "fonttools", "seaborn", "jinja2", "markupsafe",
)  # fmt: skip
# matplotlib names a clip path by a hash of its coordinates, whose last bits depend on memory
# addresses in the layout's solver: the name can change when the same picture is redrawn.
CLIP_PATH = re.compile(rb'(?<=["#])p[0-9a-f]{10}(?=[")])')
INLINED = re.compile(rb"data:([\w./+-]+);base64,([A-Za-z0-9+/=]+)")


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, equal for every drawing by the same code."""
    return hashlib.sha256(_settled(path.read_bytes(), path.suffix)).hexdigest()


def _settled(content: bytes, suffix: str) -> bytes:
    """Return a picture with numbered clip paths, or a page with digests instead of pictures."""
    names: dict[bytes, int] = {}
    if suffix == ".svg":
        return CLIP_PATH.sub(lambda n: b"p%d" % names.setdefault(n[0], len(names)), content)
    return INLINED.sub(_inlined, content) if suffix == ".html" else content


def _inlined(uri: re.Match[bytes]) -> bytes:
    try:
        picture = base64.b64decode(uri[2], validate=True)
    except binascii.Error:
        return uri[0]
    settled = _settled(picture, ".svg" if uri[1] == b"image/svg+xml" else "")
    return b"data:" + uri[1] + b"," + hashlib.sha256(settled).hexdigest().encode()


def views_in(root: Path) -> dict[str, Path]:
    """Return the pictures and pages in a study's folder, by name."""
    below = (root / paths.FIGURES).rglob("*")
    files = [path for path in below if path.is_file() and not is_temporary(path)]
    files += [root / paths.REPORT] * (root / paths.REPORT).is_file()
    return {path.relative_to(root).as_posix(): path for path in sorted(files)}


def is_view(name: str) -> bool:
    """Return whether this is the name of a picture or page of a study."""
    return name == paths.REPORT or name.startswith(f"{paths.FIGURES}/")


def changed_files(published: Mapping[str, str], there: Mapping[str, Path]) -> Iterator[str]:
    """Yield a line for each missing, added or changed file, by comparing digests."""
    for name in sorted({*published, *there}):
        if name not in there:
            yield f"{name} is missing"
        elif published.get(name) != digest(there[name]):
            yield f"{name} is not the published file"


def other_versions(there: Mapping[str, str]) -> list[str]:
    """Return the differences between the versions that published a study and the local versions."""
    return [
        f"{name} {there[name]} (here {version})"
        for name, version in versions().items()
        if there.get(name, version) != version
    ]


def versions() -> dict[str, str]:
    """Return the versions that pictures depend on: code, packages and processor."""
    package = Path(__file__).parents[1]
    kinds = (".py", ".j2", ".css", ".js")
    sources = (path for path in sorted(package.rglob("*")) if path.suffix in kinds)
    project_versions = {
        "drawing": hashlib.sha256(b"".join(p.read_bytes() for p in sources)).hexdigest()[:12],
        "python": platform.python_version(),
        "connector-tax": __version__,
        "processor": arithmetic(),
    }
    installed = {(d.metadata["Name"] or "").lower(): d.version for d in metadata.distributions()}
    return project_versions | {name: installed.get(name, "absent") for name in DRAWN_WITH}

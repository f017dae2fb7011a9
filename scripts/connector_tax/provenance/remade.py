"""Everything that is derived, made again by the same code from the raw records, and compared.

Numbers are compared by key or column at a relative 1e-8, all other text exactly, the report by its
words. Only pictures depend on versions and processor in ways that nobody can read: where these
differ from those of the study, a picture that differs is NOT CHECKABLE.
"""

import base64
import hashlib
import io
import math
import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import polars as pl

from connector_tax import __version__
from connector_tax.analysis.aggregate import table_parquet, write_tables
from connector_tax.analysis.looks import take_look
from connector_tax.analysis.reference import rates_of
from connector_tax.artifacts import paths
from connector_tax.artifacts.index import read_index
from connector_tax.artifacts.looks import read_looks
from connector_tax.artifacts.study_file import Study, launches, load_study
from connector_tax.figures import style
from connector_tax.figures.names import draw, figures_of
from connector_tax.figures.tables import StudyTables
from connector_tax.files import ArtifactError, read_json, sha256_file, write_json, write_text
from connector_tax.machine import arithmetic
from connector_tax.provenance import manifest
from connector_tax.provenance.claims import Ledger
from connector_tax.report.page import render
from connector_tax.seals import MADE, read_links, settled_files

KIND = "made again"
TREES = (paths.ANALYSIS, paths.FIGURES)
RELATIVE, ABSOLUTE = 1e-8, 1e-10
LOOKED_EARLIER = "a launch it saw was measured again since"
# What pictures depend on besides the raw records.
DRAWN_WITH = (
    "numpy", "scipy", "polars", "pandas", "matplotlib", "pillow", "contourpy", "kiwisolver",
    "fonttools", "seaborn", "jinja2", "markupsafe",
)  # fmt: skip
PICTURES = (".png", ".svg")
# matplotlib names a clip path by a hash of its coordinates, whose last bits the layout's solver
# leaves to where variables lie in memory: the same picture, drawn again, may name it otherwise.
CLIP_PATH = re.compile(rb'(?<=["#])p[0-9a-f]{10}(?=[")])')
DATA = re.compile(r"data:[^\s\"')]+")
NUMBER = re.compile(r"([−-]?\d[\d,]*\.?\d*(?:e[+-]?\d+)?)")


def remake(study_file: Path, folder: Path) -> Path:
    """Make everything derived of a study again in `folder`; the study's copy there, made of links.

    Raises:
        ArtifactError: the raw records do not give it.
    """
    copy = folder / study_file.parent.name
    copy.mkdir()
    for path in study_file.parent.iterdir():
        if path.name not in (*MADE, paths.REFERENCE_RATES, paths.LOOKS):
            (copy / path.name).symlink_to(path.resolve())
    study = load_study(copy / paths.STUDY)
    take_looks_again(study_file.parent, study)
    write_json(copy / paths.REFERENCE_RATES, rates_of(study))
    write_tables(study)
    tables = StudyTables(copy / paths.STUDY)
    redraw(tables, figures_of(study.config["engine"]), copy / paths.FIGURES)
    write_text(copy / paths.REPORT, render(tables))
    manifest.write(copy / paths.STUDY)
    write_json(copy / paths.COMPLETE, {"complete": True})
    return copy


def redraw(tables: StudyTables, names: Iterable[str], folder: Path) -> None:
    """Draw figures of a study again, from its tables as they are, into `folder`."""
    for name in names:
        style.save(draw(tables, name), folder, name)


def take_looks_again(root: Path, copy: Study) -> None:
    """Take the looks of `root` in a copy of it; a link where what they saw was measured again."""
    for taken in read_looks(root):
        take_look(copy, taken["blocks"])
    made = copy.root / paths.LOOKS
    if made.exists() and measured_again(root, copy) and any(differs(root / paths.LOOKS, made)):
        made.unlink()
        made.symlink_to((root / paths.LOOKS).resolve())


def measured_again(root: Path, copy: Study) -> bool:
    """Whether a launch of Phase A took the place of one that is still there, as it was sealed."""
    sealed = settled_files(read_links(root))
    for launch in launches(copy.document, "A"):
        index = read_index(launch.folder(root))
        for attempt in index.attempts if index is not None else ():
            aside = launch.folder(root).parent / str(attempt.get("supersedes")) / paths.INDEX
            seal = sealed.get(aside.relative_to(root).as_posix())
            if seal is not None and aside.is_file() and sha256_file(aside) == seal:
                return True
    return False


def check_remade(root: Path, made: Path, ledger: Ledger) -> None:
    """Compare a study's folder with everything made again in `made`; nothing else may lie there."""
    text = (root / paths.ENV_TEXT).read_text(encoding="utf-8")
    own = text.partition("# pipeline packages\n")[2].partition("\n\n")[0].lower()
    other = other_versions(dict(re.findall(r"^([\w.-]+)==(\S+)$", own, re.MULTILINE)))
    names = [paths.REFERENCE_RATES, paths.REPORT, paths.MANIFEST, paths.MANIFEST_PAGE]
    names.append(paths.COMPLETE)
    if (root / paths.LOOKS).exists():
        check_looks(root, made, ledger)
    for tree in TREES:
        names += sorted(below(root, tree) | below(made, tree))
    for name in names:
        compare(name, root / name, made / name, other, ledger)
    with ledger.guarded(KIND, paths.REPORT):
        pictures = differences(inlined(root), inlined(made), "picture")
        ledger.check(KIND, "report's pictures", pictures, "those beside it, each in its place")


def below(root: Path, tree: str) -> set[str]:
    """Everything below a folder of `root`, by its name there."""
    return {path.relative_to(root).as_posix() for path in (root / tree).rglob("*")}


def check_looks(root: Path, made: Path, ledger: Ledger) -> None:
    """A claim for looks.json."""
    earlier = (made / paths.LOOKS).is_symlink()
    wrong = [LOOKED_EARLIER] if earlier else differs(root / paths.LOOKS, made / paths.LOOKS)
    ledger.check(KIND, paths.LOOKS, wrong, "as published", "a look is taken once" * earlier)


def compare(name: str, published: Path, made: Path, other: Sequence[str], ledger: Ledger) -> None:
    """A claim for one file. `other`: in what versions differ from those it was published with."""
    if published.suffix in PICTURES and published.is_file() and made.is_file():
        check_picture(name, digest(published) == digest(made), other, ledger)
    else:
        ledger.check(KIND, name, differs(published, made), "as published")


def check_picture(name: str, same: bool, other: Sequence[str], ledger: Ledger) -> None:
    """A claim for a picture."""
    wrong = [] if same else ["not the picture that this code makes of the study"]
    doubt = f"made with {', '.join(other)}" if other else ""
    ledger.check(KIND, name, wrong, "bit for bit", doubt)


def differs(published: Path, made: Path) -> Iterator[str]:
    """What differs between two files of one kind; at once where one of them is not there."""
    if not made.is_file():
        yield "no file that is made of a study"
    elif not published.is_file():
        yield "is missing"
    elif published.suffix in (".json", ".csv", ".parquet", ".html"):
        yield from differences(_content(published), _content(made), published.stem)
    elif published.read_bytes() != made.read_bytes():
        yield "is not, byte for byte, what this code makes of the study"


def _content(path: Path) -> Any:
    """What a file says, to be compared by key, column or word."""
    if path.suffix == ".json":
        return read_json(path)
    if path.suffix == ".html":
        return {"word": words(page_text(path.read_text(encoding="utf-8")))}
    if path.suffix == ".parquet":
        return _parquet(path.read_bytes(), path.name)
    table = pl.read_csv(path, infer_schema=False)
    rows = [{key: _value(field) for key, field in row.items()} for row in table.to_dicts()]
    return {"columns": table.columns, "row": rows}


def _parquet(content: bytes, name: str) -> Any:
    try:
        table = pl.read_parquet(io.BytesIO(content))
        return {"columns": table.columns, "row": table.to_dicts()}
    # Damaged content makes polars panic, which is no Exception.
    except pl.exceptions.PanicException as error:
        raise ArtifactError(f"{name}: cannot be read: {error}") from None


def differs_from_csv(parquet: Path) -> Iterator[str]:
    """What differs between a table's parquet form and the CSV beside it."""
    csv = parquet.with_suffix(".csv")
    if csv.name not in paths.ANALYSIS_FILES:
        yield "no file that is made of a study"
    elif not parquet.is_file():
        yield "is missing"
    else:
        again = table_parquet(csv.name, csv.read_text(encoding="utf-8"))
        published = _parquet(parquet.read_bytes(), parquet.name)
        yield from differences(published, _parquet(again, parquet.name), parquet.stem)


def differences(published: Any, made: Any, where: str) -> Iterator[str]:
    """One line for each place in which two values differ: `key: published a, made again b`."""
    if isinstance(published, Mapping) and isinstance(made, Mapping):
        for key in dict.fromkeys((*made, *published)):
            if key not in published or key not in made:
                yield f"{where}.{key}: only {'published' if key in published else 'made again'}"
            else:
                yield from differences(published[key], made[key], f"{where}.{key}")
    elif isinstance(published, list | tuple) and isinstance(made, list | tuple):
        if len(published) != len(made):
            yield f"{where}: published {len(published)}, made again {len(made)}"
        for k, (old, new) in enumerate(zip(published, made, strict=False)):
            yield from differences(old, new, f"{where}[{k}]")
    elif not same(published, made):
        yield f"{where}: published {published!r}, made again {made!r}"


def same(published: Any, made: Any) -> bool:
    """Whether two scalars agree: numbers nearly, everything else exactly."""
    numbers = [type(value) in (int, float) for value in (published, made)]
    if all(numbers):
        return published == made or math.isclose(
            published, made, rel_tol=RELATIVE, abs_tol=ABSOLUTE
        )
    return type(published) is type(made) and bool(published == made)


def _value(text: str | None) -> Any:
    """A field of a table: its number, the numbers of a tuple, else its text."""
    if text is None:
        return None
    if text.startswith("(") and text.endswith(")"):
        return [_value(part) for part in text[1:-1].split(", ")]
    try:
        return float(text)
    except ValueError:
        return text


def words(text: str) -> list[Any]:
    """The tags, words and numbers of a page."""
    found: list[Any] = []
    for line in text.replace("<", "\n<").replace(">", ">\n").split("\n"):
        for part in filter(None, map(str.strip, NUMBER.split(line))):
            number = NUMBER.fullmatch(part) and part.replace("−", "-").replace(",", "")
            found.append(_value(number) if number else part)
    return found


def inlined(root: Path) -> list[str]:
    """The pictures and downloads that the report holds, by the name of the same file beside it."""
    files = [path for tree in TREES for path in (root / tree).glob("*") if path.is_file()]
    known = {
        base64.b64encode(path.read_bytes()).decode(): path.relative_to(root).as_posix()
        for path in files
    }
    held = DATA.findall((root / paths.REPORT).read_text(encoding="utf-8"))
    return [known.get(uri.partition(";base64,")[2], uri[:80]) for uri in held]


def other_versions(there: Mapping[str, str]) -> list[str]:
    """In what the versions of a study differ from those here."""
    return [
        f"{name} {there[name]} (here {version})"
        for name, version in versions().items()
        if there.get(name, version) != version
    ]


def versions() -> dict[str, str]:
    """What pictures depend on besides the records: versions, the code that draws, the processor."""
    package = Path(__file__).parents[1]
    drawing = (package / "marks.py", *sorted((package / "figures").glob("*.py")))
    own = {
        "drawing": hashlib.sha256(b"".join(p.read_bytes() for p in drawing)).hexdigest()[:12],
        "python": platform.python_version(),
        "connector-tax": __version__,
        "processor": arithmetic(),
    }
    installed = {(d.metadata["Name"] or "").lower(): d.version for d in metadata.distributions()}
    return own | {name: installed.get(name, "absent") for name in DRAWN_WITH}


def digest(path: Path) -> str:
    """SHA-256 of a picture in which clip paths are named by number."""
    content = path.read_bytes()
    names: dict[bytes, int] = {}
    if path.suffix == ".svg":
        content = CLIP_PATH.sub(
            lambda name: b"p%d" % names.setdefault(name[0], len(names)), content
        )
    return hashlib.sha256(content).hexdigest()


def page_text(html: str) -> str:
    """A page without its pictures and downloads."""
    return DATA.sub("data:", html)

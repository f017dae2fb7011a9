"""Everything that is derived, made again by the same code from the raw records, and compared.

Numbers are compared by key or column at a relative 1e-8, all other text exactly, the report by its
words. Only pictures depend on versions and processor in ways that nobody can read: where these
differ from those of the study, a picture that differs is NOT CHECKABLE.
"""

import base64
import csv
import hashlib
import io
import math
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from html.parser import HTMLParser
from importlib import metadata
from pathlib import Path
from typing import Any

import polars as pl

from connector_tax import __version__
from connector_tax.analysis.aggregate import write_tables
from connector_tax.analysis.device_time import device_values
from connector_tax.analysis.ingest import Cell, load_cells
from connector_tax.analysis.looks import read_looks, take_look
from connector_tax.analysis.machine import read_machine
from connector_tax.analysis.measure import summarise_cell
from connector_tax.analysis.reference import (
    judge_cells,
    measured_rates,
    read_loads,
    reference_rates,
)
from connector_tax.analysis.validity import assess, void_reasons
from connector_tax.artifacts import paths
from connector_tax.artifacts.index import read_index
from connector_tax.artifacts.names import Launch
from connector_tax.artifacts.study_file import Study, every_launch, launches, load_study
from connector_tax.figures import style
from connector_tax.figures.names import NAMES, draw
from connector_tax.figures.tables import StudyTables
from connector_tax.files import ArtifactError, read_json, read_jsonl, write_json, write_text
from connector_tax.machine import arithmetic
from connector_tax.provenance import manifest
from connector_tax.provenance.claims import Ledger
from connector_tax.report.page import render
from connector_tax.seals import MADE
from connector_tax.servers.kinds import engine_of

KIND = "made again"
TREES = (paths.ANALYSIS, paths.FIGURES)
PICTURES = (".png", ".svg")
RELATIVE, ABSOLUTE = 1e-8, 1e-10
# What pictures depend on besides the raw records.
PACKAGES = (
    "numpy", "scipy", "polars", "pandas", "matplotlib", "pillow", "contourpy", "kiwisolver",
    "fonttools", "seaborn", "jinja2", "markupsafe",
)  # fmt: skip
# matplotlib names a clip path by a hash of its coordinates, whose last bits the layout's solver
# leaves to where variables lie in memory: the same picture, drawn again, may name it otherwise.
CLIP_PATH = re.compile(rb'(?<=["#])p[0-9a-f]{10}(?=[")])')
# Checks of release 0.2 that judged the requests of quiet time: they are taken as they stand.
OF_QUIET_TIME = ("schedule_lag_p99_ms", "quiet_requests", "idle_memory_factor")
LEFT_OUT = "release 0.2 left out the requests of disturbed time"
LOOKED_EARLIER = "a launch it saw was measured again since: a look is taken once"
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
    write_json(copy / paths.REFERENCE_RATES, rates_again(study))
    write_tables(study)
    tables = StudyTables(copy / paths.STUDY)
    for name in NAMES:
        style.save(draw(tables, name), copy / paths.FIGURES, name)
    write_text(copy / paths.REPORT, render(tables))
    manifest.write(copy / paths.STUDY)
    write_json(copy / paths.COMPLETE, {"complete": True})
    return copy


def take_looks_again(root: Path, copy: Study) -> None:
    """Take the looks of `root` in a copy of it; a link where what they saw was measured again."""
    for taken in read_looks(root):
        take_look(copy, taken["blocks"])
    made = copy.root / paths.LOOKS
    indexes = [read_index(launch.folder(copy.root)) for launch in launches(copy.document, "A")]
    attempts = [attempt for index in indexes if index is not None for attempt in index.attempts]
    again = any(attempt.get("supersedes") for attempt in attempts)
    if made.exists() and again and any(differs(root / paths.LOOKS, made)):
        made.unlink()
        made.symlink_to((root / paths.LOOKS).resolve())


def rates_again(study: Study) -> Any:
    """The content of reference_rates.json, from the cells of Phase A."""
    cells = load_cells(study, "A")
    judged = judge_cells(study, cells, read_loads(cells))
    return reference_rates(study, cells, judged, measured_rates(study))


def check_remade(root: Path, made: Path, ledger: Ledger) -> None:
    """Compare a study's folder with everything made again in `made`; nothing else may lie there."""
    other = other_versions(_measured_with(root))
    names = [paths.REFERENCE_RATES, paths.REPORT, paths.MANIFEST, paths.MANIFEST_PAGE]
    names.append(paths.COMPLETE)
    if (root / paths.LOOKS).exists():
        check_looks(root, made, ledger)
    for tree in TREES:
        there = {path.relative_to(base).as_posix()
                 for base in (root, made) for path in (base / tree).rglob("*")}  # fmt: skip
        names += sorted(there)
    for name in names:
        compare(name, root / name, made / name, other, ledger)


def check_looks(root: Path, made: Path, ledger: Ledger) -> None:
    """A claim for looks.json."""
    if (made / paths.LOOKS).is_symlink():
        ledger.not_checkable(KIND, paths.LOOKS, LOOKED_EARLIER)
    else:
        compare(paths.LOOKS, root / paths.LOOKS, made / paths.LOOKS, (), ledger)


def compare(name: str, published: Path, made: Path, other: Sequence[str], ledger: Ledger) -> None:
    """A claim for one file. `other`: in what versions differ from those it was published with."""
    if published.suffix in PICTURES and published.is_file() and made.is_file():
        same = digest(published) == digest(made)
        check_picture(name, same, other, ledger)
    else:
        ledger.check(KIND, name, differs(published, made), "as published")


def check_picture(name: str, same: bool, other: Sequence[str], ledger: Ledger) -> None:
    """A claim for a picture."""
    if not same and other:
        ledger.not_checkable(KIND, name, f"differs; made with {', '.join(other)}")
    else:
        wrong = [] if same else ["not the picture that this code makes of the study"]
        ledger.check(KIND, name, wrong, "bit for bit")


def differs(published: Path, made: Path) -> Iterator[str]:
    """What differs between two files of one kind; at once where one of them is not there."""
    if not made.is_file():
        yield "no file that is made of a study"
    elif not published.is_file():
        yield "is missing"
    elif published.suffix == ".json":
        yield from differences(read_json(published), read_json(made), published.stem)
    elif published.suffix == ".csv":
        old, new = _rows(published), _rows(made)
        yield from differences(old[:1], new[:1], "columns")
        yield from differences(old[1:], new[1:], "row", old[0] if old else [])
    elif published.suffix == ".parquet":
        left, right = (pl.read_parquet(path) for path in (published, made))
        yield from differences(left.columns, right.columns, "columns")
        yield from differences(left.to_dicts(), right.to_dicts(), "row")
    elif published.suffix == ".html":
        was, now = (page_text(path.read_text(encoding="utf-8")) for path in (published, made))
        yield from differences(words(was), words(now), "word")
    elif published.read_bytes() != made.read_bytes():
        yield "is not, byte for byte, what this code makes of the study"


def differences(
    published: Any, made: Any, where: str, columns: Sequence[str] = ()
) -> Iterator[str]:
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
            at = f".{columns[k]}" if k < len(columns) and not isinstance(old, list) else f"[{k}]"
            yield from differences(old, new, f"{where}{at}", columns)
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


def _rows(path: Path) -> list[list[Any]]:
    text = path.read_text(encoding="utf-8")
    return [[_value(field) for field in row] for row in csv.reader(io.StringIO(text))]


def _value(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


class _Text(HTMLParser):
    """The text of a page, and of its attributes, without the data that are inlined."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep attributes: a series, a title or a link is content too."""
        self.parts += [tag, *(DATA.sub("data", f"{key}={value}") for key, value in attrs)]

    def handle_data(self, data: str) -> None:
        """Keep the text."""
        self.parts.append(data)


def words(text: str) -> list[Any]:
    """The words and numbers of a text."""
    found: list[Any] = []
    for part in filter(None, NUMBER.split(" ".join(text.split()))):
        number = NUMBER.fullmatch(part) and part.replace("−", "-").replace(",", "")
        found.append(_value(number) if number else part.strip())
    return found


def page_text(html: str) -> str:
    """What a page says, without its pictures and downloads."""
    parser = _Text()
    parser.feed(html)
    return "\n".join(" ".join(part.split()) for part in parser.parts if part.strip()) + "\n"


def digest(path: Path) -> str:
    """SHA-256 of a picture in which clip paths are named by number."""
    content = path.read_bytes()
    names: dict[bytes, int] = {}
    if path.suffix == ".svg":
        content = CLIP_PATH.sub(
            lambda name: b"p%d" % names.setdefault(name[0], len(names)), content
        )
    return hashlib.sha256(content).hexdigest()


def check_inlined(root: Path, ledger: Ledger) -> None:
    """What a report holds of other files, pictures and downloads, is what lies beside it."""
    page = (root / paths.REPORT).read_text(encoding="utf-8")
    files = [path for tree in TREES for path in (root / tree).glob("*") if path.is_file()]
    known = {base64.b64encode(path.read_bytes()).decode() for path in files}
    inlined = re.findall(r"data:([\w/+]+);base64,([^\s\"')]*)", page)
    wrong = [f"a {kind} in the report is none of figures/ or analysis/"
             for kind, content in inlined if content not in known]  # fmt: skip
    ledger.check(KIND, "report's pictures", wrong, "those beside it")


# ---- per launch and cell


def check_judged(study: Study, cell: Cell, ledger: Ledger) -> None:
    """Judge a measured cell again, by the very code that judged it, from its raw records."""
    ledger.check("validity", cell.name, _judged(study, cell), cell.status)


def _judged(study: Study, cell: Cell) -> Iterator[str]:
    record, device = cell.record, None
    assert record is not None
    machine = cell.file("machine")
    if study.config["engine"].get("device") == "emulated":
        steps, log = (list(read_jsonl(cell.file(k))) for k in ("engine_step", paths.DEVICE_LOG))
        device = device_values(log, steps, cell.configuration == study.baseline)
    checks = assess(
        records=list(read_jsonl(cell.file("requests"))),
        planned=record["counts"]["planned"],
        shape=(record["input_tokens"], record["output_tokens"]),
        window=record["window"],
        cell=study.config["cell"],
        wanted=study.config["cell"]["min_completed"],
        suspended_ms=record["suspended_ms"],
        counters=record["server_counters"],
        scrapes=list(read_jsonl(cell.file("metrics"))),
        health=record["load_generator"],
        clock=record["clock"],
        bounds=study.config["validity"],
        device=device,
        machine=read_machine(machine, None) if machine.exists() else None,
        watched="quiet" in study.config,
        counted_by_server=engine_of(study.config["engine"]).served.get("counters", True),
    )
    health, reasons = {**checks}, void_reasons(checks)
    if _left_out(study):
        given = {name: record["health"][name] for name in OF_QUIET_TIME}
        health |= given
        reasons = void_reasons({k: check for k, check in checks.items() if k not in given})
        reasons += [r for r in record["void_reasons"] if any(f": {name} " in r for name in given)]
    said = {"valid": record["valid"], "void_reasons": sorted(record["void_reasons"])}
    yield from differences(record["health"], health, "health")
    yield from differences(said, {"valid": not reasons, "void_reasons": sorted(reasons)}, "cell")


def _left_out(study: Study) -> bool:
    """Whether requests of disturbed time were left out, as release 0.2 did."""
    return "max_factor" in study.config.get("quiet", {})


def check_summaries(study: Study, ledger: Ledger) -> None:
    """summary.json of each launch: the percentiles of its cells."""
    for launch in every_launch(study.document):
        folder = launch.folder(study.root)
        if _left_out(study):
            ledger.not_checkable(KIND, f"{launch.name}/{paths.SUMMARY}", LEFT_OUT)
        elif (folder / paths.SUMMARY).exists():
            ledger.check(KIND, f"{launch.name}/{paths.SUMMARY}", _summary(study, launch, folder))


def _summary(study: Study, launch: Launch, folder: Path) -> Iterator[str]:
    cells = [cell["cell"] for cell in study.cells(launch.phase)]
    again = {cell: summarise_cell(folder / cell) for cell in cells if (folder / cell).is_dir()}
    summary = read_json(folder / paths.SUMMARY)
    yield from differences(summary, again, "summary")


# ---- versions


def versions() -> dict[str, str]:
    """What pictures depend on besides the records: versions, and the processor."""
    own = {
        "python": platform.python_version(),
        "connector-tax": __version__,
        "processor": arithmetic(),
    }
    installed = {(d.metadata["Name"] or "").lower(): d.version for d in metadata.distributions()}
    return own | {name: installed.get(name, "absent") for name in PACKAGES}


def other_versions(there: Mapping[str, str]) -> list[str]:
    """In what the versions of a study differ from those here."""
    return [
        f"{name} {there[name]} (here {version})"
        for name, version in versions().items()
        if there.get(name, version) != version
    ]


def _measured_with(root: Path) -> dict[str, str]:
    """The versions that env.txt tells of the pipeline.

    Raises:
        ArtifactError: there is no env.txt.
    """
    try:
        text = (root / paths.ENV_TEXT).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ArtifactError(f"{root / paths.ENV_TEXT}: no such file") from None
    own = text.partition("# pipeline packages\n")[2].partition("\n\n")[0].lower()
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", own, re.MULTILINE))

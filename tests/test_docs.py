"""Test that all references in the pages resolve, and that the pages match the declarations."""

import ast
import csv
import importlib.util
import io
import json
import re
import subprocess
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import pytest
import yaml

from connector_tax.analysis.aggregate import aggregate
from connector_tax.analysis.records import RequestRow
from connector_tax.artifacts.cell_records import RequestLine
from connector_tax.artifacts.folder import StudyFolder
from connector_tax.artifacts.record_reader import checked
from connector_tax.artifacts.study_records import meta
from connector_tax.config import ROOT, SCHEMAS
from connector_tax.loadgen.messages import STUDY_FIELDS
from tests.shared import members_of
from tests.study_folder import edited_json, on_machines, write_virtual_study

PACKAGE = ROOT / "scripts" / "connector_tax"
# Written by `make docs`, and not tracked.
WRITTEN = ROOT / "docs" / "artifacts.md"
DOCS = sorted({*(ROOT / "docs").rglob("*.md")} - {WRITTEN})
READMES = [ROOT / folder / "README.md" for folder in (".", "benchmarks", "config")]
PAPERS = [*DOCS, *READMES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
ARCHIVES = sorted((ROOT / "results" / "archive").glob("*.tar.zst"))
# Papers that readers cannot get, and paths of one machine.
PRIVATE = re.compile(
    r"\b(?:METHOD|CONTRACTS|FACTS|ARCHITECTURE|STYLE)\.md|\b[Ss]ource:? 00\d|\b[Ii]ssue [\d\"]"
    r"|\bdocument 00\d|/(?:Users|root|work)/|\b[0-9a-f]{16}\.txt"
)
TEXTS = {".cff", ".in", ".j2", ".md", ".py", ".rst", ".smk", ".toml", ".yaml", ".yml"}
NAMED = {"Makefile", "Snakefile"}
REFERENCE = re.compile(r"([\w./-]+\.(?:py|smk)):([A-Za-z_][\w.]*)")
PLACE = re.compile(r"([\w.-]+)/[\w./*-]*")
OURS = {path.name for base in (ROOT, PACKAGE) for path in base.iterdir() if path.is_dir()}
# Made by a command, and not in the repository.
MADE = re.compile(
    r"docs/artifacts\.md$|(?:build|runs|results/replot)/|.*\.(?:csv|json)$|(?:figures|preflight|patch|logs)/$"
)


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def fields() -> Iterator[types.ModuleType]:
    """Return docs/fields.py as a module."""
    spec = importlib.util.spec_from_file_location("docs_fields", ROOT / "docs" / "fields.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


# ---- references


def _slugs(text: str) -> set[str]:
    """Return the anchors of a page's headings, as mkdocs and the forges make them."""
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


@pytest.mark.parametrize("paper", PAPERS, ids=_name)
def test_every_relative_link_resolves(paper: Path, fields: types.ModuleType) -> None:
    for link, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", paper.read_text("utf-8")):
        if "://" in link:
            continue
        target = (paper.parent / link).resolve() if link else paper
        # A reader of the repository itself does not have it.
        written = target == WRITTEN and paper.is_relative_to(ROOT / "docs")
        assert written or target.exists(), f"{_name(paper)}: {link}"
        if anchor:
            text = fields.page() if written else target.read_text("utf-8")
            assert anchor in _slugs(text), f"{_name(paper)}: {link}#{anchor}"


def _defines(text: str, dotted: str) -> bool:
    """Return whether a module defines a function, class, method or name at its top."""
    body: list[ast.stmt] = ast.parse(text).body
    for name in dotted.split("."):
        bound = [b for node in body if (b := _binding(node, name)) is not None]
        if not bound:
            return False
        body = getattr(bound[0], "body", [])
    return True


def _binding(node: ast.stmt, name: str) -> ast.stmt | None:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node if node.name == name else None
    if isinstance(node, ast.If):
        return next((b for child in node.body if (b := _binding(child, name))), None)
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return node if any(isinstance(t, ast.Name) and t.id == name for t in targets) else None


@pytest.mark.parametrize("paper", PAPERS, ids=_name)
def test_every_function_named_in_the_pages_exists(paper: Path) -> None:
    for file, function in REFERENCE.findall(paper.read_text("utf-8")):
        path = next((p for p in (ROOT / file, PACKAGE / file) if p.is_file()), None)
        assert path is not None, f"{_name(paper)}: {file}:{function}: no such file"
        if path.suffix == ".smk":
            known = re.search(rf"^ *rule {function}:", path.read_text("utf-8"), re.M) is not None
        else:
            known = _defines(path.read_text("utf-8"), function)
        assert known, f"{_name(paper)}: {file}:{function}: no such name"


def test_deleted_function_in_a_page_is_detected() -> None:
    text = "class A:\n    def b(self): ...\nC: int = 1\nif C:\n    def d(): ...\n"
    assert all(_defines(text, name) for name in ("A", "A.b", "C", "d"))
    assert not any(_defines(text, name) for name in ("B", "A.c", "b", "C.b"))


@pytest.mark.parametrize("paper", PAPERS, ids=_name)
def test_every_file_named_in_the_pages_exists(paper: Path) -> None:
    for code in re.findall(r"`([^`\n]+)`", paper.read_text("utf-8")):
        place = PLACE.fullmatch(code)
        if place and place[1] in OURS and not MADE.match(code):
            there = any(list(base.glob(code.rstrip("/"))) for base in (ROOT, PACKAGE))
            assert there, f"{_name(paper)}: {code}"


def _written() -> Iterator[Path]:
    """Yield the files that a reader of the repository may open: code, rules, configuration,
    pages.
    """
    yield from (path for path in ROOT.iterdir() if path.suffix in TEXTS or path.name in NAMED)
    for folder in (
        "benchmarks",
        "config",
        "docs",
        "results/archive",
        "scripts",
        "tests",
        "workflow",
    ):
        yield from (path for path in (ROOT / folder).rglob("*") if path.suffix in TEXTS)


def test_pages_do_not_refer_to_private_files() -> None:
    places = []
    for path in _written():
        if path.name != Path(__file__).name:  # this file contains the pattern and its examples
            hits = PRIVATE.finditer(path.read_text("utf-8"))
            places += [f"{_name(path)}: {hit[0]}" for hit in hits]
    assert places == []


@pytest.mark.parametrize(
    "text",
    [
        *("see METHOD.md", "Source: 004", "issue 3, point 6", 'issue "x"', "document 002"),
        *(f"/{place}/x" for place in ("Users", "root", "work")),
    ],
)
def test_reference_to_a_private_paper_is_detected(text: str) -> None:
    assert PRIVATE.search(text)
    assert not PRIVATE.search("docs/method.md, issues, source of 3 files")


# ---- the pages' statements about the code


def _room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imports(path: Path) -> Iterator[str]:
    """Return the parts of the package that a module imports."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "connector_tax" and len(parts) > 1 and parts[1] != "__version__":
                yield parts[1]


def test_packages_import_only_those_the_architecture_page_allows() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([\w, ]*?) *\|$", page, re.M)
    may = {room: {name for name in allowed.split(", ") if name} for room, allowed in rows}
    modules = [p for p in PACKAGE.rglob("*.py") if p.name != "__init__.py" or p.parent != PACKAGE]
    assert {_room(path) for path in modules} == may.keys()
    for path in modules:
        for room in set(_imports(path)) - {_room(path)}:
            assert room in may[_room(path)], f"{_name(path)} imports {room}"


def test_glossary_terms_are_sorted_and_unique() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text("utf-8")
    terms = [term.lower() for term in re.findall(r"^- \*\*(.+?)\*\*:", page, re.M)]
    assert terms == sorted(set(terms))


# ---- files and fields


def test_tracked_schemas_follow_from_the_declarations(fields: types.ModuleType) -> None:
    tracked = {path.name: path.read_text("utf-8") for path in SCHEMAS.iterdir()}
    assert tracked == fields.schema_texts()


def test_field_only_in_code_or_only_in_docs_is_reported(fields: types.ModuleType) -> None:
    assert fields.differences("x", {"a", "b"}, {"b", "c"}) == [
        "x: c: no entry in docs/fields.yaml",
        "x: a: no such field in the code",
    ]
    assert fields.expanded("{a,b}_p{1,2}_x") == ["a_p1_x", "a_p2_x", "b_p1_x", "b_p2_x"]


def test_declaration_gives_its_schema_and_its_section_of_the_page(fields: types.ModuleType) -> None:
    class Part(TypedDict):
        """A part."""

        at: Annotated[int, meta(ge=0)]  #: when

    class Whole(TypedDict):
        """A file."""

        kind: Annotated[Literal["x"] | None, meta(default="x")]  #: which
        #: how
        #: often
        rates: Annotated[list[Annotated[float, meta(gt=0, le=2)]], meta(min_length=1)]
        forms: dict[str, Part]  #: by id
        rules: list[Part]  #: in order
        most: NotRequired[Annotated[float, meta(ge=1)] | None]  #: at most

    # Annotations are resolved in the module that defines the class.
    Whole.__annotations__ = typing.get_type_hints(Whole, None, {"Part": Part}, include_extras=True)
    schema = fields.made_of(Whole)
    whole = schema["$defs"]["Whole"]
    assert list(whole["properties"]) == ["kind", "rates", "forms", "rules", "most"]
    assert whole["required"] == ["rates", "forms", "rules"]
    assert whole["additionalProperties"] is False
    assert whole["properties"]["most"]["type"] == ["number", "null"]
    assert list(fields.keys_of(schema)) == [
        ("kind", "x, null", 'which (default "x")'),
        ("rates", "list of (number, > 0, ≤ 2)", "how often"),
        ("forms", "", "by id"),
        ("forms.<id>", "", "A part."),
        ("forms.<id>.at", "integer, ≥ 0", "when"),
        ("rules", "", "in order"),
        ("rules[].at", "integer, ≥ 0", "when"),
        ("most", "number or null, ≥ 1", "at most (optional)"),
    ]


def test_a_declaration_without_a_meaning_is_named(fields: types.ModuleType) -> None:
    class Part(TypedDict):
        """A part."""

        at: int

    with pytest.raises(fields.FieldsError, match=r"at: declared without a meaning"):
        list(fields.keys_of(fields.made_of(Part)))


def test_request_record_declaration_matches_writer_and_analysis() -> None:
    hints = typing.get_type_hints(RequestLine)
    assert (*hints,) == STUDY_FIELDS
    for name, hint in typing.get_type_hints(RequestRow).items():
        assert (type(None) in typing.get_args(hint)) == (type(None) in typing.get_args(hints[name]))


def test_every_column_of_the_tables_is_described(fields: types.ModuleType, tmp_path: Path) -> None:
    study_file = write_virtual_study(tmp_path, blocks=2, configurations=["plain", "mooncake_both"])
    nodes = on_machines("a", "b")
    for path in tmp_path.glob("runs/*/*/*/index.json"):
        with edited_json(path) as index:
            index["attempts"] = [{"node": nodes[index["block"]]}]
    written = aggregate(StudyFolder.load(study_file))
    files = fields.dictionary()["files"]
    described = {e["table"]: fields.described(n, e) for n, e in files.items() if "table" in e}
    assert written.keys() == described.keys()
    for name, known in described.items():
        content = written[name]
        head = next(csv.reader(io.StringIO(content))) if isinstance(content, str) else content
        assert fields.differences(name, set(known), set(head)) == []


def test_shipped_records_are_described_and_have_the_declared_types(
    fields: types.ModuleType,
) -> None:
    dictionary = fields.dictionary()["files"]
    described = {e["example"]: (n, e) for n, e in dictionary.items() if "example" in e}
    kinds = {e["example"]: fields.RECORDS.get(n) for n, e in dictionary.items() if "example" in e}
    seen: dict[str, set[str]] = {}
    for archive in ARCHIVES:
        for path, data in members_of(archive):
            name = re.sub(r"^cell_.*\.json", "cell", path.rpartition("/")[2])
            if name in described:
                content = json.loads(data)
                each = content.values() if "each" in described[name][1] else [content]
                seen.setdefault(name, set()).update(*each)
                for record in each if kinds[name] is not None else ():
                    checked(record, kinds[name], f"{archive.name}: {name}")
    assert seen.keys() == described.keys()
    for name, (key, entry) in described.items():
        assert seen[name] <= set(fields.described(key, entry)), name


def test_site_navigation_has_every_page_once() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))

    def pages(entries: list[Any]) -> Iterator[str]:
        for entry in entries:
            value = next(iter(entry.values())) if isinstance(entry, dict) else entry
            yield from pages(value) if isinstance(value, list) else [value]

    listed = list(pages(site["nav"]))
    pages_there = {path.relative_to(ROOT / "docs").as_posix() for path in [*DOCS, WRITTEN]}
    assert sorted(listed) == sorted(pages_there)


def test_measuring_pages_without_chromium_names_it(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("<p>A page.</p>")
    command = [sys.executable, str(ROOT / "docs" / "page_size.py")]
    runs = [
        subprocess.run(
            [*command, argument], cwd=tmp_path, env={"PATH": ""}, capture_output=True, text=True
        )
        for argument in ("page.html", "--help")
    ]
    assert runs[0].returncode == 2
    assert runs[0].stderr.endswith(
        "error: chromium, which measures the heights, is not in PATH; Debian: apt install"
        " chromium\n"
    )
    assert "Needs chromium in PATH" in runs[1].stdout

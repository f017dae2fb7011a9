"""The papers: every reference in them resolves, and they say what the code declares."""

import ast
import csv
import importlib.util
import io
import json
import re
import sys
import tarfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
import zstandard

from connector_tax.analysis.aggregate import aggregate
from connector_tax.analysis.records import REQUESTS
from connector_tax.artifacts.record_reader import checked
from connector_tax.artifacts.study_file import load_study
from connector_tax.config import ROOT
from tests.analysis.synthetic import write_synthetic_study
from tests.study_folder import on_machines

PACKAGE = ROOT / "scripts" / "connector_tax"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
READMES = [ROOT / folder / "README.md" for folder in (".", "benchmarks", "config")]
PAPERS = [*DOCS, *READMES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
ARCHIVES = sorted((ROOT / "results" / "archive").glob("*.tar.zst"))
# Papers nobody outside can read, and places on somebody's machine.
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
    r"(?:build|runs|results/replot)/|.*\.(?:csv|json)$|(?:figures|preflight|patch|logs)/$"
)


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def fields() -> Iterator[types.ModuleType]:
    """docs/fields.py, the command that writes docs/artifacts.md."""
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
    """The anchors of a page's headings, as mkdocs and the forges make them."""
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


@pytest.mark.parametrize("paper", PAPERS, ids=_name)
def test_every_relative_link_resolves(paper: Path) -> None:
    for link, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", paper.read_text("utf-8")):
        if "://" in link:
            continue
        target = paper.parent / link if link else paper
        assert target.exists(), f"{_name(paper)}: {link}"
        if anchor:
            assert anchor in _slugs(target.read_text("utf-8")), f"{_name(paper)}: {link}#{anchor}"


def _defines(text: str, dotted: str) -> bool:
    """Whether a module defines a function, class, method or name at its top."""
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
def test_every_function_that_is_named_is_there(paper: Path) -> None:
    for file, function in REFERENCE.findall(paper.read_text("utf-8")):
        path = next((p for p in (ROOT / file, PACKAGE / file) if p.is_file()), None)
        assert path is not None, f"{_name(paper)}: {file}:{function}: no such file"
        if path.suffix == ".smk":
            known = re.search(rf"^ *rule {function}:", path.read_text("utf-8"), re.M) is not None
        else:
            known = _defines(path.read_text("utf-8"), function)
        assert known, f"{_name(paper)}: {file}:{function}: no such name"


def test_a_function_that_is_gone_is_noticed() -> None:
    text = "class A:\n    def b(self): ...\nC: int = 1\nif C:\n    def d(): ...\n"
    assert all(_defines(text, name) for name in ("A", "A.b", "C", "d"))
    assert not any(_defines(text, name) for name in ("B", "A.c", "b", "C.b"))


@pytest.mark.parametrize("paper", PAPERS, ids=_name)
def test_every_file_that_is_named_is_there(paper: Path) -> None:
    for code in re.findall(r"`([^`\n]+)`", paper.read_text("utf-8")):
        place = PLACE.fullmatch(code)
        if place and place[1] in OURS and not MADE.match(code):
            there = any(list(base.glob(code.rstrip("/"))) for base in (ROOT, PACKAGE))
            assert there, f"{_name(paper)}: {code}"


def _written() -> Iterator[Path]:
    """What a reader of the repository may open: code, rules, configuration, papers."""
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


def test_nothing_refers_to_what_a_reader_does_not_have() -> None:
    places = []
    for path in _written():
        if path.name != Path(__file__).name:  # which holds the pattern and its examples
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
def test_a_reference_to_a_private_paper_is_noticed(text: str) -> None:
    assert PRIVATE.search(text)
    assert not PRIVATE.search("docs/method.md, issues, source of 3 files")


# ---- what the papers say of the code


def _room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imports(path: Path) -> Iterator[str]:
    """The rooms a module imports."""
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


def test_no_room_imports_one_it_may_not() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([\w, ]*?) *\|$", page, re.M)
    may = {room: {name for name in allowed.split(", ") if name} for room, allowed in rows}
    modules = [p for p in PACKAGE.rglob("*.py") if p.name != "__init__.py" or p.parent != PACKAGE]
    assert {_room(path) for path in modules} == may.keys()
    for path in modules:
        for room in set(_imports(path)) - {_room(path)}:
            assert room in may[_room(path)], f"{_name(path)} imports {room}"


def test_the_glossary_is_in_order() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text("utf-8")
    terms = [term.lower() for term in re.findall(r"^- \*\*(.+?)\*\*:", page, re.M)]
    assert terms == sorted(set(terms))


# ---- files and fields


def test_the_fields_page_is_what_its_command_writes(fields: types.ModuleType) -> None:
    assert fields.PAGE.read_text("utf-8") == fields.page()


def test_a_field_on_one_side_only_is_named(fields: types.ModuleType) -> None:
    assert fields.differences("x", {"a", "b"}, {"b", "c"}) == [
        "x: c: no entry in docs/fields.yaml",
        "x: a: no such field in the code",
    ]
    assert fields.expanded("{a,b}_p{1,2}_x") == ["a_p1_x", "a_p2_x", "b_p1_x", "b_p2_x"]


def test_a_key_of_a_schema_is_found_wherever_it_stands(fields: types.ModuleType) -> None:
    schema: dict[str, Any] = {
        "$defs": {"rate": {"type": "number", "exclusiveMinimum": 0, "maximum": 2}},
        "properties": {
            "kind": {"enum": ["x", None]},
            "rates": {"type": "array", "items": {"$ref": "#/$defs/rate"}},
            "forms": {"additionalProperties": {"properties": {"a": {"type": "string"}}}},
            "rules": {"type": "array", "items": {"properties": {"at": {"type": "integer"}}}},
        },
        "then": {"properties": {"kind": {}, "only_x": {"type": ["null", "integer"]}}},
        "else": {"properties": {"only_y": {"type": "boolean"}}},
    }
    assert {fields.dotted(key.path): key.allowed for key in fields.keys_of(schema)} == {
        "kind": "x, null",
        "rates": "list of (number, > 0, ≤ 2)",
        "forms": "",
        "forms.<id>": "",
        "forms.<id>.a": "string",
        "rules": "",
        "rules[]": "",
        "rules[].at": "integer",
        "only_x": "null or integer",
        "only_y": "boolean",
    }


def test_a_comment_belongs_to_the_key_on_its_line(fields: types.ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("a: 1  # of a\nb:  # of b\n  - c: '#no'\n    # not of d\n    d: 2\n")
    assert fields.comments(path) == {("a",): "of a", ("b",): "of b"}


def test_null_rules_agree_with_the_records_the_analysis_accepts(fields: types.ModuleType) -> None:
    described = fields.fields_of(fields.dictionary()["files"]["requests"])
    assert set(REQUESTS.required) <= {f.name for f in described.values() if f.null == "never"}
    nullable = {name for wanted in REQUESTS.required_if.values() for name in wanted}
    assert all(described[name].null != "never" for name in nullable)


def test_every_column_of_the_tables_is_described(fields: types.ModuleType, tmp_path: Path) -> None:
    small = {"phase_a": {"rates_rps": [20.0, 40.0]}, "statistics": {"resamples": 100}}
    study_file = write_synthetic_study(
        tmp_path / "s", blocks=2, nodes=on_machines("a", "b"), steps_per_cell=10, config=small
    )
    written = aggregate(load_study(study_file))
    described = {e["table"]: e for e in fields.dictionary()["files"].values() if "table" in e}
    assert written.keys() == described.keys()
    for name, entry in described.items():
        content = written[name]
        head = next(csv.reader(io.StringIO(content))) if isinstance(content, str) else content
        assert fields.differences(name, set(fields.fields_of(entry)), set(head)) == []


def _archived(archive: Path) -> Iterator[tuple[str, Any]]:
    """File name and content of every JSON member that describes something."""
    with archive.open("rb") as stream:
        reader = zstandard.ZstdDecompressor().stream_reader(stream)
        with tarfile.open(fileobj=reader, mode="r|") as tar:
            for member in tar:
                name = member.name.rpartition("/")[2]
                content = tar.extractfile(member)
                if name.endswith(".json") and content is not None:
                    yield re.sub(r"^cell_.*", "cell", name), json.load(content)


def test_the_shipped_records_are_described_and_keep_to_their_types(
    fields: types.ModuleType,
) -> None:
    dictionary = fields.dictionary()["files"]
    described = {e["example"]: e for e in dictionary.values() if "example" in e}
    kinds = {e["example"]: fields.RECORDS.get(n) for n, e in dictionary.items() if "example" in e}
    seen: dict[str, set[str]] = {}
    for archive in ARCHIVES:
        for name, content in _archived(archive):
            if name in described:
                each = content.values() if "each" in described[name] else [content]
                seen.setdefault(name, set()).update(*each)
                for record in each if kinds[name] is not None else ():
                    checked(record, kinds[name], f"{archive.name}: {name}")
    assert seen.keys() == described.keys()
    for name, entry in described.items():
        assert seen[name] <= set(fields.fields_of(entry)), name


def test_the_site_has_every_page_once() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))

    def pages(entries: list[Any]) -> Iterator[str]:
        for entry in entries:
            value = next(iter(entry.values())) if isinstance(entry, dict) else entry
            yield from pages(value) if isinstance(value, list) else [value]

    listed = list(pages(site["nav"]))
    assert sorted(listed) == [path.relative_to(ROOT / "docs").as_posix() for path in DOCS]

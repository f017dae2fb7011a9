"""Generate workflow/schemas/*.json and docs/artifacts.md from the declarations of fields.

    python docs/fields.py            write both
    python docs/fields.py --check    write the page; status 1 if a tracked schema is out of date

A field's meaning is the comment of its declaration (artifacts/study_records.py). docs/fields.yaml
lists the files, and the fields that have no declaration. A field without a meaning, or a meaning
without a field, is an error. The schemas are tracked, since Snakemake plans a study with them and
without msgspec. The page is not tracked.
"""

import argparse
import ast
import copy
import inspect
import itertools
import json
import re
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields as dataclass_fields
from functools import cache
from typing import Any, NamedTuple

import msgspec
import yaml

from connector_tax.artifacts import cell_records, launch_files, stage_records, study_records
from connector_tax.artifacts.index import LaunchIndex
from connector_tax.artifacts.metrics import LATENCY_METRICS
from connector_tax.artifacts.tables import COLUMNS
from connector_tax.config import ROOT, SCHEMAS, schema_of
from connector_tax.engine.config import EngineFile
from connector_tax.provenance import manifest
from connector_tax.provenance.claims import Claim
from connector_tax.servers.kinds import kind_of, kinds
from connector_tax.text import markdown_table

DICTIONARY = ROOT / "docs" / "fields.yaml"
PAGE = ROOT / "docs" / "artifacts.md"
# Configuration files, by the name of their schema.
FILES: Mapping[str, type] = {
    "config": study_records.StudyConfig,
    "configurations": study_records.ConfigurationsFile,
    "embedded": EngineFile,
    "accelerators": study_records.AcceleratorsFile,
}
# Entry of the dictionary to the record that declares its fields and their meanings.
RECORDS: Mapping[str, Any] = {
    "requests": cell_records.RequestLine,
    "metrics": cell_records.ScrapeLine,
    "engine_step": cell_records.StepLine,
    "device_lines": cell_records.DeviceLine,
    "machine": cell_records.MachineLine,
    "cell": cell_records.CellRecord,
    "index": LaunchIndex,
    "seals": stage_records.SealLink,
    "device": launch_files.DeviceClaim,
    "launch_config": launch_files.LaunchConfig,
    "resources": launch_files.ResourcesRecord,
    "settings": launch_files.SettingsRecord,
    "study": study_records.StudyDocument,
    "environment": stage_records.EnvironmentRecord,
    "model": stage_records.ModelRecord,
    "preflight": stage_records.GateRecord,
    "patch": stage_records.PatchStatus,
    "reference": stage_records.RatesRecord,
    "shape_rates": stage_records.ShapeRatesRecord,
    "hypotheses": stage_records.HypothesesRecord,
}
# Fields of a cell that was never measured.
REHEARSED = {"rehearsed"}


class FieldsError(Exception):
    """A field has no meaning, or a meaning has no field; the text names file and field."""


# ---- declarations


@cache
def meanings(kind: type) -> dict[str, str]:
    """Return the comment `#:` of each field of a declaration and its base classes."""
    source = textwrap.dedent(inspect.getsource(kind))
    lines, known = source.splitlines(), vars(sys.modules[kind.__module__])
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    meaning_of: dict[str, str] = {}
    for base in map(known.get, map(ast.unparse, definition.bases)):
        meaning_of |= meanings(base) if isinstance(base, type) else {}
    for field in definition.body:
        if isinstance(field, ast.AnnAssign):
            first = field.lineno - 1
            while lines[first - 1].lstrip().startswith("#:"):
                first -= 1
            comments = [line.partition("#:")[2].strip() for line in lines[first : field.end_lineno]]
            if meaning := " ".join(filter(None, comments)):
                meaning_of[ast.unparse(field.target)] = meaning
    return meaning_of


# ---- schemas


def made_of(kind: type) -> dict[str, Any]:
    """Return a declaration's JSON schema, which forbids undeclared keys.

    Keys with a default are optional.
    """
    schema: dict[str, Any] = msgspec.json.schema(kind)
    kinds = {record.__name__: record for record in _records(kind)}
    definitions = schema["$defs"]
    for name, node in definitions.items():
        if "properties" in node:
            # msgspec sorts them.
            meaning_of = meanings(kinds[name])
            properties = {
                key: ({"description": meaning_of[key]} if key in meaning_of else {})
                | _simple(node["properties"][key])
                for key in typing.get_type_hints(kinds[name])
            }
            required = [
                key
                for key, child in properties.items()
                if key in node["required"] and "default" not in child
            ]
            node |= {"properties": properties, "required": required, "additionalProperties": False}
    return schema


def _records(kind: Any) -> Iterator[type]:
    """Yield a declaration and its parts."""
    for argument in typing.get_args(kind):
        yield from _records(argument)
    if isinstance(kind, type) and not typing.get_origin(kind) and hasattr(kind, "__annotations__"):
        yield kind
        for hint in typing.get_type_hints(kind).values():
            yield from _records(hint)


def _simple(node: Any) -> Any:
    """Merge a schema's alternatives into one node if all are plain values or types."""
    if isinstance(node, list):
        return [_simple(item) for item in node]
    if not isinstance(node, dict):
        return node
    node = {key: _simple(value) for key, value in node.items()}
    parts = node.get("anyOf", [])
    rest = {key: value for key, value in node.items() if key != "anyOf"}
    if parts and all(part.keys() == {"enum"} or part == {"type": "null"} for part in parts):
        return {"enum": [v for part in parts for v in part.get("enum", [None])], **rest}
    limited = [part for part in parts if part.keys() != {"type"}]
    if parts and len(limited) <= 1 and all(isinstance(part.get("type"), str) for part in parts):
        return {**dict(*limited), "type": [part["type"] for part in parts], **rest}
    return node


def schema_texts() -> dict[str, str]:
    """Return the content of each schema by its file name in workflow/schemas/."""
    return {
        f"{name}.schema.json": json.dumps(made_of(kind), indent=1, ensure_ascii=False) + "\n"
        for name, kind in FILES.items()
    }


# ---- configuration files


def with_kinds(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema `config` with engine kinds, and with the kinds that need or allow each key.

    A study's file may not have a key that no kind lists.
    """
    named: dict[str, Any] = copy.deepcopy(dict(schema))
    known = {name: kind_of(name) for name in kinds()}
    for key, child in named["$defs"]["EngineSection"]["properties"].items():
        if key == "kind":
            child["enum"] = [*known]
        elif key != "label":
            child["kinds"] = [name for name, kind in known.items() if key in kind.needs]
            child["optional"] = [name for name, kind in known.items() if key in kind.may]
    return named


def keys_of(schema: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield path, allowed values and meaning of each key of a schema, in its order.

    `<id>` stands for a key of the user's choice; a section has no allowed values.
    """

    def resolved(node: Mapping[str, Any]) -> Mapping[str, Any]:
        named = [part for part in node.get("anyOf", []) if "$ref" in part] or [node]
        if "$ref" not in named[0]:
            return node
        return {**schema["$defs"][named[0]["$ref"].rpartition("/")[2]], **node}

    def walk(node: Mapping[str, Any], path: str) -> Iterator[tuple[str, str, str]]:
        required = node.get("required", ())
        children = {
            name: (child, name in required) for name, child in node.get("properties", {}).items()
        }
        others, items = node.get("additionalProperties"), resolved(node.get("items", {}))
        if isinstance(others, Mapping) and "properties" in resolved(others):
            children["<id>"] = (others, True)
        for name, (raw, needed) in children.items():
            child = resolved(raw)
            if child.get("kinds") == child.get("optional") == []:
                continue
            inner = list(walk(child, f"{path}.{name}" if path else name))
            meaning = child.get("description", "")
            if not inner and not meaning:
                raise FieldsError(f"{path}.{name}: declared without a meaning")
            if child.get("default", {}) != {}:
                meaning += f" (default {json.dumps(child['default'])})"
            elif not needed and not {"default", "kinds"} & child.keys():
                meaning += " (optional)"
            for word, of in (("", child.get("kinds")), ("optional, ", child.get("optional"))):
                meaning += f" ({word}engine.kind {', '.join(of)})" if of else ""
            full_path = f"{path}.{name}" if path else name
            yield full_path, "" if inner else allowed(child, resolved), meaning
            yield from inner
        if "properties" in items:
            yield from walk(items, f"{path}[]")

    return walk(resolved(schema), "")


def allowed(node: Mapping[str, Any], resolved: typing.Callable[[Any], Any]) -> str:
    """Return a value's allowed range, in words."""
    if "enum" in node:
        return ", ".join("null" if value is None else str(value) for value in node["enum"])
    if "const" in node:
        return str(node["const"])
    kinds = node.get("type", "any")
    text = " or ".join(kinds) if isinstance(kinds, list) else str(kinds)
    if isinstance(node.get("items"), Mapping):
        text = f"list of ({allowed(resolved(node['items']), resolved)})"
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    return ", ".join([text, *(f"{s} {node[name]}" for name, s in bounds.items() if name in node)])


# ---- a study's files


class Field(NamedTuple):
    """One field of a file."""

    name: str
    type: str
    meaning: str


def dictionary() -> dict[str, Any]:
    """Return the content of docs/fields.yaml."""
    content: dict[str, Any] = yaml.safe_load(DICTIONARY.read_text(encoding="utf-8"))
    return content


def expanded(name: str) -> list[str]:
    """Return the names that `name` stands for: `{a,b}_ms` is a_ms and b_ms.

    `{metrics}` stands for every latency metric. The last brace varies fastest.
    """
    name = name.replace("{metrics}", f"{{{','.join(LATENCY_METRICS)}}}")
    parts = re.split(r"\{([^}]*)\}", name)
    choices = [part.split(",") if i % 2 else [part] for i, part in enumerate(parts)]
    return ["".join(choice) for choice in itertools.product(*choices)]


def described(name: str, entry: Mapping[str, Any]) -> dict[str, Field]:
    """Return the fields of an entry of docs/fields.yaml by name, from its declaration or the entry.

    Raises:
        FieldsError: a declared field has no meaning.
    """
    if name in RECORDS:
        meaning_of = meanings(RECORDS[name])
        hints = typing.get_type_hints(RECORDS[name])
        if undescribed := hints.keys() - meaning_of.keys() - REHEARSED:
            raise FieldsError(
                f"{name}: {', '.join(sorted(undescribed))}: declared without a meaning"
            )
        return {
            key: Field(key, in_words(hints[key]), meaning_of[key])
            for key in hints
            if key in meaning_of
        }
    return {
        key: Field(key, str(kind), "; ".join(filter(None, (meaning, unit, _null(null)))))
        for pattern, (kind, unit, null, meaning) in entry["fields"].items()
        for key in expanded(pattern)
    }


def _null(rule: str) -> str:
    if rule == "never":
        return ""
    return rule if rule.startswith(("absent", "empty")) else f"null: {rule}"


def in_words(hint: Any) -> str:
    """Return a type as text for the page."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        some = [a for a in arguments if a is not type(None)]
        return " or ".join(dict.fromkeys(map(in_words, some)))
    if origin is typing.Literal:
        return ", ".join(map(str, arguments))
    if origin in (list, tuple):
        return f"list of {in_words(arguments[0])}"
    words = {str: "text", int: "integer", float: "number", bool: "boolean", Any: "any"}
    return words.get(hint, "object")


def declared() -> dict[str, set[str]]:
    """Return the field names that code defines, by the entry of docs/fields.yaml with their
    meanings."""
    files = dictionary()["files"]
    return {
        **{name: {*COLUMNS[e["table"]]} for name, e in files.items() if e.get("table") in COLUMNS},
        "manifest": set(manifest.COLUMNS),
        "audit": {field.name for field in dataclass_fields(Claim)},
    }


def differences(name: str, known: set[str], existing: set[str]) -> list[str]:
    """Return a sentence for each field that only the code or only docs/fields.yaml has."""
    return [
        *(f"{name}: {f}: no entry in docs/fields.yaml" for f in sorted(existing - known)),
        *(f"{name}: {f}: no such field in the code" for f in sorted(known - existing)),
    ]


# ---- the page


def _cell(text: str) -> str:
    """Return the text on one line, without `|` and without `<` outside code that would begin a
    tag.
    """
    plain = re.sub("(`[^`]*`)|<", lambda hit: hit[1] or "&lt;", " ".join(text.split()))
    return plain.replace("|", "\\|")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [*markdown_table(*([*map(_cell, cells)] for cells in (head, *rows))), ""]


def page() -> str:
    """Return the whole page.

    Raises:
        FieldsError: a field has no meaning, or a meaning no field.
    """
    content = dictionary()
    files = content["files"]
    problems = [
        problem
        for name, existing in declared().items()
        for problem in differences(name, {*described(name, files[name])}, existing)
    ]
    if problems:
        raise FieldsError("\n".join(problems))
    lines = [content["head"], "## A study's files", ""]
    for name, entry in files.items():
        rows = [(f"`{f.name}`", f.type, f.meaning) for f in described(name, entry).values()]
        lines += [f"### `{entry['file']}`", "", entry["what"], ""]
        lines += _table(("field", "type", "meaning"), rows)
    lines += ["## Configuration files", "", content["configuration"], ""]
    for name, kind in FILES.items():
        schema = with_kinds(schema_of(name)) if name == "config" else schema_of(name)
        rows = [(f"`{path}`", may, meaning) for path, may, meaning in keys_of(schema)]
        lines += [f"### `{name}.schema.json`", "", f"{kind.__doc__}", ""]
        lines += _table(("key", "allowed", "meaning"), rows)
    return "\n".join(lines).rstrip() + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page and the schemas, or the page alone and check them."""
    parser = argparse.ArgumentParser(prog="python docs/fields.py", description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="1 if a tracked schema is stale")
    arguments = parser.parse_args(argv)
    stale = 0
    for name, text in schema_texts().items():
        path = SCHEMAS / name
        if not arguments.check:
            path.write_text(text, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != text:
            print(f"{path}: stale; run python docs/fields.py", file=sys.stderr)
            stale = 1
    try:
        PAGE.write_text(page(), encoding="utf-8")
    except FieldsError as error:
        print(error, file=sys.stderr)
        return 1
    return stale


if __name__ == "__main__":
    sys.exit(main())

"""Write docs/artifacts.md, the dictionary of files, fields and configuration keys.

    python docs/fields.py            write the page
    python docs/fields.py --check    end with status 1 if the page is not what would be written

The meaning of a field stands in docs/fields.yaml, that of a configuration key in the comment beside
it in config/*.yaml or in its schema's description. Which fields and keys there are is asked of the
code that declares them; one without a meaning, or a meaning without a field, is an error.
"""

import argparse
import itertools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any

import msgspec
import yaml

from connector_tax.artifacts import cell_records, launch_files, stage_records, study_records
from connector_tax.artifacts.index import LaunchIndex
from connector_tax.artifacts.metrics import LATENCY_METRICS
from connector_tax.artifacts.tables import COLUMNS
from connector_tax.config import ConfigError
from connector_tax.engine.steplog import StepRecord
from connector_tax.loadgen.messages import STUDY_FIELDS
from connector_tax.provenance import manifest
from connector_tax.provenance.claims import Claim

ROOT = Path(__file__).resolve().parents[1]
DICTIONARY = ROOT / "docs" / "fields.yaml"
PAGE = ROOT / "docs" / "artifacts.md"
# Fields the step probe adds to the engine's own record (vllm/step_records.py).
PROBE_FIELDS = ("update_us", "hooks_us", "children_us")


class FieldsError(Exception):
    """The dictionary and the code differ; the text names file and field."""


@dataclass(frozen=True)
class Field:
    """One field of a file."""

    name: str
    type: str
    unit: str
    null: str
    meaning: str


@dataclass(frozen=True)
class Key:
    """One key of a configuration file; `allowed` is empty for a section."""

    path: tuple[str, ...]
    allowed: str
    description: str = ""


def dictionary() -> dict[str, Any]:
    """docs/fields.yaml."""
    content: dict[str, Any] = yaml.safe_load(DICTIONARY.read_text(encoding="utf-8"))
    return content


def expanded(name: str) -> list[str]:
    """The names `name` stands for: `{a,b}_ms` is a_ms and b_ms.

    `{metrics}` stands for every latency metric. The last brace varies fastest.
    """
    name = name.replace("{metrics}", f"{{{','.join(LATENCY_METRICS)}}}")
    parts = re.split(r"\{([^}]*)\}", name)
    choices = [part.split(",") if i % 2 else [part] for i, part in enumerate(parts)]
    return ["".join(choice) for choice in itertools.product(*choices)]


def fields_of(entry: Mapping[str, Any]) -> dict[str, Field]:
    """The fields an entry of the dictionary describes, by name."""
    return {
        name: Field(name, *map(str, values))
        for pattern, values in entry["fields"].items()
        for name in expanded(pattern)
    }


# Entry of the dictionary to the record that declares its fields.
RECORDS: Mapping[str, Any] = {
    "metrics": cell_records.ScrapeLine,
    "machine": cell_records.MachineLine,
    "cell": cell_records.CellRecord,
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
    "durations": stage_records.DurationsRecord,
    "hypotheses": stage_records.HypothesesRecord,
}
# Fields of a cell that was never measured.
REHEARSED = {"rehearsed"}


def declared() -> dict[str, set[str]]:
    """Entry of the dictionary to the fields the code declares, where it declares them."""
    return {
        **{name: set(record.__annotations__) - REHEARSED for name, record in RECORDS.items()},
        "requests": {*STUDY_FIELDS},
        "engine_step": {
            *(field.name for field in msgspec.structs.fields(StepRecord)),
            *PROBE_FIELDS,
        },
        "index": {field.name for field in msgspec.structs.fields(LaunchIndex)},
        **{
            name: {*COLUMNS[e["table"]]}
            for name, e in dictionary()["files"].items()
            if e.get("table") in COLUMNS
        },
        "manifest": set(manifest.COLUMNS),
        "audit": {field.name for field in dataclass_fields(Claim)},
    }


def differences(name: str, described: set[str], existing: set[str]) -> list[str]:
    """One sentence for each field that only one side has."""
    return [
        *(f"{name}: {f}: no entry in docs/fields.yaml" for f in sorted(existing - described)),
        *(f"{name}: {f}: no such field in the code" for f in sorted(described - existing)),
    ]


# ---- configuration files


def keys_of(schema: Mapping[str, Any]) -> Iterator[Key]:
    """Every key a JSON schema allows, in its order; `<id>` stands for one of the user's choice."""

    def walk(node: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[Key]:
        if "$ref" in node:
            node = {**_at(schema, node["$ref"]), **{k: v for k, v in node.items() if k != "$ref"}}
        parts = [node, node.get("then", {}), *_branches(node.get("else", {}))]
        children: dict[str, Any] = {}
        for part in parts:
            for name, child in part.get("properties", {}).items():
                if child and not (part is not node and name in children):
                    children[name] = child
        others, items = node.get("additionalProperties"), node.get("items", {})
        if isinstance(others, Mapping) and others.get("properties"):
            children["<id>"] = others
        if items.get("properties"):
            children["[]"] = items
        if path:
            default = f" (default {node['default']})" if "default" in node else ""
            yield Key(
                path,
                "" if children else allowed(_resolved(schema, node)),
                node.get("description", "") + default,
            )
        for name, child in children.items():
            yield from walk(child, (*path, name))

    return walk(schema, ())


def _branches(node: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A node and what it chooses between; what is otherwise comes first."""
    if node:
        yield node
        yield from _branches(node.get("else", {}))
        yield from _branches(node.get("then", {}))


def _at(schema: Mapping[str, Any], reference: str) -> Mapping[str, Any]:
    node: Any = schema
    for name in reference.removeprefix("#/").split("/"):
        node = node[name]
    result: Mapping[str, Any] = node
    return result


def _resolved(schema: Mapping[str, Any], node: Mapping[str, Any]) -> dict[str, Any]:
    if "$ref" in node:
        return _resolved(schema, _at(schema, node["$ref"]))
    copy = dict(node)
    if isinstance(copy.get("items"), Mapping):
        copy["items"] = _resolved(schema, copy["items"])
    return copy


def allowed(node: Mapping[str, Any]) -> str:
    """What a value may be, in words."""
    if "enum" in node:
        return ", ".join("null" if value is None else str(value) for value in node["enum"])
    types = node.get("type", "any")
    text = " or ".join(types) if isinstance(types, list) else str(types)
    if "items" in node:
        text = f"list of ({allowed(node['items'])})"
    bounds = (
        ("minimum", "≥"),
        ("exclusiveMinimum", ">"),
        ("maximum", "≤"),
        ("exclusiveMaximum", "<"),
    )
    limits = [f"{sign} {node[name]}" for name, sign in bounds if name in node]
    return ", ".join([text, *limits])


def comments(path: Path) -> dict[tuple[str, ...], str]:
    """Key path to the comment on the key's line of a YAML file."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    noted: dict[tuple[str, ...], str] = {}

    def walk(node: yaml.Node, where: tuple[str, ...]) -> None:
        if isinstance(node, yaml.SequenceNode):
            for item in node.value:
                walk(item, (*where, "[]"))
        if not isinstance(node, yaml.MappingNode):
            return
        for key, value in node.value:
            here = (*where, str(key.value))
            comment = re.search(r"\s#\s+(.+)$", lines[key.start_mark.line])
            if comment and not isinstance(node.flow_style, str) and not node.flow_style:
                noted.setdefault(here, comment[1].strip())
            walk(value, here)

    root = yaml.compose(text, Loader=yaml.SafeLoader)
    assert root is not None
    walk(root, ())
    return noted


def meaning_of(key: Key, sources: Sequence[Mapping[tuple[str, ...], str]]) -> str | None:
    """The first comment on this key; `<id>` matches any key."""
    for source in sources:
        for path, comment in source.items():
            if len(path) == len(key.path) and all(
                mine in ("<id>", theirs) for mine, theirs in zip(key.path, path, strict=True)
            ):
                return comment
    return None


def dotted(path: Sequence[str]) -> str:
    """`a.b[].c`."""
    return ".".join(path).replace(".[]", "[]")


# ---- the page


def config_section(entry: Mapping[str, Any], problems: list[str]) -> list[str]:
    """The table of one kind of configuration file; a key without a meaning is a problem."""
    schema = yaml.safe_load((ROOT / "workflow/schemas" / entry["schema"]).read_text("utf-8"))
    sources = [comments(ROOT / name) for name in entry["files"]]
    spoken: dict[str, str] = entry["keys"]
    rows = []
    known = set()
    for key in keys_of(schema):
        name = dotted(key.path)
        known.add(name)
        commented = meaning_of(key, sources)
        if commented and name in spoken:
            problems.append(f"{name}: docs/fields.yaml and a comment in {entry['files']}")
        meaning = commented or spoken.get(name) or key.description
        if not meaning and key.allowed:
            problems.append(
                f"{entry['files'][0]}: {name}: no comment, no description in the "
                "schema, and none in docs/fields.yaml"
            )
        rows.append((f"`{name}`", key.allowed, meaning or ""))
    problems += [f"docs/fields.yaml: {name}: no such key" for name in spoken.keys() - known]
    return [
        f"### `{entry['schema']}`",
        "",
        f"{entry['what']} Schema: `workflow/schemas/{entry['schema']}`.",
        "",
        *_table(("key", "allowed", "meaning"), rows),
    ]


def field_section(entry: Mapping[str, Any]) -> list[str]:
    """The table of one file."""
    rows = [(f"`{f.name}`", f.type, f.unit, f.null, f.meaning) for f in fields_of(entry).values()]
    source = f" Declared in `{entry['declared']}`." if "declared" in entry else ""
    return [
        f"### `{entry['file']}`",
        "",
        f"{entry['what']}{source}",
        "",
        *_table(("field", "type", "unit", "null", "meaning"), rows),
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [line(head), "|" + " --- |" * len(head), *map(line, rows), ""]


def page() -> str:
    """The whole page.

    Raises:
        FieldsError: dictionary and code differ.
    """
    content = dictionary()
    files = content["files"]
    problems = []
    for name, existing in declared().items():
        problems += differences(name, set(fields_of(files[name])), existing)
    lines = [content["head"], "## A study's files", ""]
    for entry in files.values():
        lines += field_section(entry)
    lines += [
        "## Configuration files",
        "",
        "Every key is required unless its meaning says otherwise.",
    ]
    lines += ["Unknown keys are refused.", ""]
    for entry in content["configuration files"]:
        lines += config_section(entry, problems)
    if problems:
        raise FieldsError("\n".join(problems))
    return "\n".join(lines).rstrip() + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write docs/artifacts.md, or check that it is what would be written."""
    parser = argparse.ArgumentParser(prog="python docs/fields.py", description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if it is stale")
    arguments = parser.parse_args(argv)
    try:
        text = page()
    except (ConfigError, FieldsError) as error:
        print(error, file=sys.stderr)
        return 1
    if not arguments.check:
        PAGE.write_text(text, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != text:
        print(f"{PAGE}: stale; run python docs/fields.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

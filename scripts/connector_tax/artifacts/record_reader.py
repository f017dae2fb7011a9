"""Records read from JSON files, each checked against the declaration of its fields.

What is wrong with a value is told key by key, by its schema; so it is of a configuration.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from connector_tax.files import ArtifactError, read_json

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError

Record = TypeVar("Record")
_ALLOWED = {
    "const": "{!r}",
    "type": "{}",
    "minimum": ">= {}",
    "maximum": "<= {}",
    "exclusiveMinimum": "> {}",
    "exclusiveMaximum": "< {}",
    "pattern": "text matching {}",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
    "uniqueItems": "no item twice",
    "minProperties": "at least {} keys",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
}


def offences(value: Any, schema: Mapping[str, Any]) -> list[str]:
    """One line for each: `key.path: found ..., allowed ...`; none where it keeps to the schema."""
    # Imported late: a launch validates nothing, and its server would start 100 ms later.
    from jsonschema import Draft202012Validator

    errors = Draft202012Validator(schema).iter_errors(value)
    lines = [line for e in sorted(errors, key=lambda e: [*map(str, e.path)]) for line in _lines(e)]
    return list(dict.fromkeys(lines))


def _lines(error: ValidationError) -> list[str]:
    from jsonschema.exceptions import best_match

    if error.context:
        deepest = best_match(error.context)
        if deepest is not None:
            error = deepest
    where = _dotted(error.absolute_path)
    schema: Any = error.schema
    wanted: Any = error.validator_value
    if error.validator == "additionalProperties" and isinstance(error.instance, dict):
        allowed = sorted(schema.get("properties", {}))
        unknown = [key for key in error.instance if key not in allowed]
        return [
            f"{join(where, key)}: unknown key;{meant(key, allowed)} allowed here: "
            + ", ".join(allowed)
            for key in unknown
        ]
    if error.validator == "required":
        section: Any = error.instance
        # A key whose name is mistyped is told once, as the unknown one.
        closed = schema.get("additionalProperties") is False
        unknown = section.keys() - schema["properties"] if closed else set()
        mistyped = {near for key in unknown for near in _near(key, schema["properties"])}
        missing = [key for key in wanted if key not in section and key not in mistyped]
        return [f"{join(where, key)}: missing; it is required" for key in missing]
    near = meant(error.instance, wanted) if error.validator == "enum" else ""
    return [f"{where or 'the file'}: found {error.instance!r};{near} allowed: {_allowed(error)}"]


def meant(found: Any, known: Iterable[Any]) -> str:
    """` did you mean ...?` where a known word is like the one found; else nothing."""
    return "".join(f" did you mean {near}?" for near in _near(found, known))


def _near(found: Any, known: Iterable[Any]) -> list[str]:
    """The known word that is most like the one found, if any is."""
    return difflib.get_close_matches(str(found), map(str, known), 1)


def _allowed(error: ValidationError) -> str:
    value: Any = error.validator_value
    if error.validator == "enum":
        return "one of " + ", ".join("null" if v is None else str(v) for v in value)
    if error.validator == "type" and isinstance(value, list):
        return " or ".join(value)
    words = _ALLOWED.get(str(error.validator))
    return words.format(value) if words else error.message


def _dotted(path: Iterable[str | int]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def join(where: str, key: str) -> str:
    """The path of a key of what stands at `where`."""
    return f"{where}.{key}" if where else key


def read_record(path: Path, kind: type[Record]) -> Record:
    """Read a JSON file that holds a record, or records, whose fields a TypedDict declares.

    Raises:
        ArtifactError: it is missing or not JSON, or a field is missing or of another type; names
            the file, the key, what stands there and what is allowed.
    """
    return checked(read_json(path), kind, str(path))


def checked(value: Any, kind: type[Record], source: str) -> Record:
    """A value that was read from `source`, as it is: numbers and unknown keys are left alone.

    Raises as `converted`.
    """
    converted(value, kind, source)
    return cast(Record, value)


def converted(value: Any, kind: type[Record], source: str) -> Record:
    """What a declaration makes of a value that was read from `source`.

    Raises:
        ArtifactError: it is no such record; names the key, what stands there and what is allowed.
    """
    # Imported late: Snakemake plans without it.
    import msgspec

    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        lines = offences(value, msgspec.json.schema(kind))
        raise ArtifactError(f"{source}: {'; '.join(lines) or error}") from None

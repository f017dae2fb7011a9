"""Read records from JSON files, and check each against the declaration of its fields.

Errors in a value, or in a configuration, are reported by key, from its schema.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from connector_tax.files import ArtifactError, read_json
from connector_tax.foreign import printable

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError

Record = TypeVar("Record")
# Follows the `$` of a pattern: in Python `$` also matches before a final line end.
NOT_BEFORE_LINE_END = r"(?!\n)"
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


# Most errors reported for a value, and most characters quoted from it. More would not help, and a
# hostile file could take minutes and gigabytes.
MOST_OFFENCES = 20
MOST_SHOWN = 300


def offences(value: Any, schema: Mapping[str, Any]) -> list[str]:
    """Return one line for each error: `key.path: found ..., allowed ...`.

    After `MOST_OFFENCES` errors a last line states that there are more.
    """
    errors = itertools.islice(_validator()(schema).iter_errors(value), MOST_OFFENCES + 1)
    ordered = sorted(errors, key=lambda e: [*map(str, e.path)])
    lines = dict.fromkeys(itertools.chain.from_iterable(map(_lines, ordered)))
    messages = [*itertools.islice(lines, MOST_OFFENCES + 1)]
    if len(messages) > MOST_OFFENCES:
        messages[MOST_OFFENCES:] = [f"more; these are {MOST_OFFENCES} of them"]
    return messages


@cache
def _validator() -> Any:
    """Return a JSON Schema validator that limits the number of errors it reports in one part."""
    # Imported late: a launch validates nothing, and the import would delay its server by 100 ms.
    from jsonschema import Draft202012Validator, ValidationError
    from jsonschema.validators import extend

    def any_of(validator: Any, parts: Any, instance: Any, _: Any) -> Iterator[Any]:
        context: list[Any] = []
        for index, part in enumerate(parts):
            errors = validator.descend(instance, part, schema_path=index)
            branch_errors = [*itertools.islice(errors, MOST_OFFENCES + 1)]
            if not branch_errors:
                return
            context += branch_errors
        yield ValidationError("matches none of the allowed forms", context=context)

    def unique_items(_: Any, wanted: bool, instance: Any, __: Any) -> Iterator[Any]:
        items = instance if wanted and isinstance(instance, list) else []
        # 1 and 1.0 are equal numbers; `True` is not a number.
        texts = {repr(float(i) if type(i) in (int, float) else i) for i in items}
        if len(texts) < len(items):
            yield ValidationError("an item twice")

    checks: dict[str, Any] = {"anyOf": any_of, "uniqueItems": unique_items}
    return extend(Draft202012Validator, checks)  # type: ignore[no-untyped-call]


def _lines(error: ValidationError) -> Iterator[str]:
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
        known = ", ".join(allowed)
        for key in error.instance:
            if key not in allowed:
                near = meant(key, allowed)
                yield f"{join(where, clipped(key))}: unknown key;{near} allowed here: {known}"
    elif error.validator == "required":
        section: Any = error.instance
        # A mistyped key is reported once, as the unknown one.
        closed = schema.get("additionalProperties") is False
        unknown = section.keys() - schema["properties"] if closed else set()
        mistyped = {
            near
            for key in itertools.islice(unknown, MOST_OFFENCES)
            for near in _near(key, schema["properties"])
        }
        missing = (key for key in wanted if key not in section and key not in mistyped)
        yield from (f"{join(where, key)}: missing; it is required" for key in missing)
    else:
        near = meant(error.instance, wanted) if error.validator == "enum" else ""
        value = clipped(repr(error.instance))
        yield f"{where or 'the file'}: found {value};{near} allowed: {_allowed(error)}"


def clipped(text: str) -> str:
    """Return a text cut to a length that fits an error message, on one line."""
    shown = " ".join(printable(text[: MOST_SHOWN + 1]).splitlines())
    return shown if len(text) <= MOST_SHOWN else f"{shown[:MOST_SHOWN]}..."


def meant(value: Any, known: Iterable[Any]) -> str:
    """Return ` did you mean ...?` if a known word resembles the given one; else ""."""
    return "".join(f" did you mean {near}?" for near in _near(value, known))


def _near(value: Any, known: Iterable[Any]) -> list[str]:
    """Return the known words that resemble the given word most."""
    return difflib.get_close_matches(clipped(str(value)), map(str, known), 1)


def _allowed(error: ValidationError) -> str:
    value: Any = error.validator_value
    if error.validator == "enum":
        return "one of " + ", ".join("null" if v is None else str(v) for v in value)
    if error.validator == "type" and isinstance(value, list):
        return " or ".join(value)
    if error.validator == "pattern":
        value = value.removesuffix(NOT_BEFORE_LINE_END)
    words = _ALLOWED.get(str(error.validator))
    return words.format(value) if words else clipped(error.message)


def _dotted(path: Iterable[str | int]) -> str:
    text = ""
    for part in path:
        name = part if isinstance(part, int) else clipped(part)
        text += f"[{name}]" if isinstance(name, int) else f".{name}" if text else name
    return text


def join(where: str, key: str) -> str:
    """Return the path of a key below `where`."""
    return f"{where}.{key}" if where else key


def read_record(path: Path, kind: type[Record]) -> Record:
    """Read a JSON file of a record, or of records, whose fields a TypedDict declares.

    Raises:
        ArtifactError: the file is missing or not JSON, or a field is missing or of another type.
            The message names the file, the key, the value and what is allowed.
    """
    return checked(read_json(path), kind, str(path))


def checked(value: Any, kind: type[Record], source: str) -> Record:
    """Check a value read from `source` and return it unchanged; unknown keys are allowed.

    Errors as in `converted`.
    """
    converted(value, kind, source)
    return cast(Record, value)


def converted(value: Any, kind: type[Record], source: str) -> Record:
    """Return a value read from `source`, converted to its declaration.

    Raises:
        ArtifactError: `value` does not fit the declaration; the message names the key, the value
            and what is allowed.
    """
    # Imported late: Snakemake plans without it.
    import msgspec

    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        lines = offences(value, msgspec.json.schema(kind))
        raise ArtifactError(f"{source}: {'; '.join(lines) or error}") from None

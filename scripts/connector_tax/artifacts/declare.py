"""Declare a field of a record: its meaning, what it may be, its default.

A declaration is a TypedDict whose fields are `Annotated` with `says`. From it come the type that
mypy checks, the check of what is read (`record_reader`), the JSON schema of what a user writes
(`schemas`) and the page of fields (docs/fields.py).
"""

from typing import Any

from msgspec import Meta

_MSGSPEC = ("gt", "ge", "lt", "le", "pattern", "min_length", "max_length")


def says(meaning: str | None = None, **limits: Any) -> Meta:
    """What a field means, and is limited to.

    Args:
        meaning: for the page of fields; None where the type says it.
        limits: those of msgspec.Meta; what else JSON Schema knows (`uniqueItems`); `default`, which
            a file may leave out.
    """
    checked = {name: limits.pop(name) for name in _MSGSPEC if name in limits}
    return Meta(description=meaning, extra_json_schema=limits or None, **checked)

"""Declare a field of a record: its type, what it may be, its default, its meaning.

A declaration is a field of a TypedDict, dataclass or Struct, its meaning a comment that begins with
`#:`, above it or beside it. From it come the type that mypy checks, the check of what is read
(`record_reader`), the JSON schema of what a user writes (`schemas`) and the page of fields
(docs/fields.py).
"""

from typing import Any

from msgspec import Meta

_MSGSPEC = ("gt", "ge", "lt", "le", "pattern", "min_length", "max_length")


def meta(**limits: Any) -> Meta:
    """What a field is limited to.

    Args:
        limits: those of msgspec.Meta; what else JSON Schema knows (`uniqueItems`); `default`, which
            a file may leave out.
    """
    checked = {name: limits.pop(name) for name in _MSGSPEC if name in limits}
    return Meta(extra_json_schema=limits or None, **checked)

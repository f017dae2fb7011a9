"""Records read from JSON files, each checked against the declaration of its fields."""

from pathlib import Path
from typing import Any, TypeVar, cast

from connector_tax.artifacts.offences import offences
from connector_tax.files import ArtifactError, read_json

Record = TypeVar("Record")


def read_record(path: Path, kind: type[Record]) -> Record:
    """Read a JSON file whose fields a TypedDict declares.

    Raises:
        ArtifactError: it is missing or not JSON, or a field is missing or of another type; names
            the file, the key, what stands there and what is allowed.
    """
    return checked(read_json(path), kind, str(path))


def read_records(path: Path, kind: type[Record]) -> list[Record]:
    """Read a JSON file that holds a list of such records; raises as `read_record`."""
    entries = checked(read_json(path), list[Any], str(path))
    return [checked(entry, kind, f"{path}[{number}]") for number, entry in enumerate(entries)]


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

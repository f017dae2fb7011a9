"""Strict streaming reader of the raw JSON-lines records (docs/artifacts.md: requests,
metrics, engine_step, device).

A file is read once, in blocks of whole lines: each block is hashed, then parsed by polars into the
columns the analysis needs. Memory is bounded by the block, not by the file.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import polars as pl

from connector_tax.artifacts.cell_records import MeasuredWindow
from connector_tax.artifacts.names import REQUEST_STATUSES
from connector_tax.files import ArtifactError, reading

BLOCK_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True)
class RecordKind:
    """What the lines of one kind of file must hold.

    Attributes:
        columns: key to polars type; other keys of a line are not read.
        required: keys that may never be null.
        allowed: closed sets of values, by key.
        required_if: (key, value) to the keys that may not be null in such a record.
        optional: keys that a line may lack, which reads as null.
        nested: keys that hold an object, which reads as its JSON text.
    """

    columns: Mapping[str, pl.DataType]
    required: tuple[str, ...]
    allowed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    required_if: Mapping[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    optional: tuple[str, ...] = ()
    nested: tuple[str, ...] = ()


INT, FLOAT, TEXT = pl.Int64(), pl.Float64(), pl.String()
# Of a success.
_ANSWERED = (
    "t_send_ns", "t_first_token_ns", "t_last_token_ns", "t_done_ns", "completion_tokens",
)  # fmt: skip
REQUESTS = RecordKind(
    columns={"seq": INT, "status": TEXT, "t_intended_ns": INT, **dict.fromkeys(_ANSWERED, INT)},
    required=("seq", "status", "t_intended_ns"),
    allowed={"status": REQUEST_STATUSES},
    required_if={("status", "ok"): _ANSWERED},
)
STEPS = RecordKind(
    columns={
        "t_ns": INT, "step_id": INT, "process": TEXT, "step_duration_us": FLOAT,
        "engine_step_us": FLOAT, "build_meta_us": FLOAT, "get_finished_us": FLOAT,
        "start_load_kv_us": FLOAT, "prefill_tokens": INT, "decode_tokens": INT,
        "hooks_us": TEXT, "children_us": TEXT,
    },
    required=("t_ns", "step_id", "process"),
    allowed={"process": ("scheduler", "worker")},
    required_if={("process", "scheduler"): ("step_duration_us", "prefill_tokens", "decode_tokens")},
    # Not among the design's fields: a log in its bare format has no whole steps and only the
    # three callbacks, and plain has no hooks.
    optional=("engine_step_us", "hooks_us", "children_us"),
    nested=("hooks_us", "children_us"),
)  # fmt: skip
DEVICE = RecordKind(
    columns=dict.fromkeys(
        ("t_ns", "step_id", "t_start_ns", "t_end_ns", "t_since_ns", "prefill_tokens",
         "decode_seqs", "t_wait_ns", "t_woken_ns"), INT
    ),
    required=("t_ns", "step_id", "t_start_ns", "t_end_ns", "prefill_tokens", "decode_seqs"),
)  # fmt: skip


def read_records(path: Path, kind: RecordKind, sha256: str | None) -> Iterator[pl.DataFrame]:
    """Yield an empty table, then the file's records in order, a block of lines at a time.

    Args:
        path: a JSON-lines file; every line ends in a newline, no line is blank.
        kind: what each line must hold.
        sha256: hex digest the file's bytes must have; None when no index vouches for it (yet).

    Raises:
        ArtifactError: the file is missing or has another hash, or a line is not an object holding
            the wanted keys and types; names the file and, for a line, its number.
    """
    digest, lines = hashlib.sha256(), 0
    yield pl.DataFrame(schema=kind.columns)
    with reading(path), path.open("rb") as stream:
        while data := stream.read(BLOCK_BYTES):
            block = data + stream.readline()
            digest.update(block)
            frame = _parse(path, block, kind, lines)
            lines += frame.height
            yield frame
    if sha256 is not None and digest.hexdigest() != sha256:
        raise ArtifactError(
            f"{path}: sha256 is {digest.hexdigest()}, index.json says {sha256}: the file changed"
            " after it was measured"
        )


def read_whole(path: Path, kind: RecordKind, sha256: str | None) -> pl.DataFrame:
    """The file's records as one table; arguments and errors are those of `read_records`."""
    return pl.concat(read_records(path, kind, sha256))


def in_window(column: str, window: MeasuredWindow) -> pl.Expr:
    """Whether a time, in ns, lies in a cell's measured window."""
    start, stop = window["t_warmup_end_ns"], window["t_stop_ns"]
    return pl.col(column).is_between(start, stop, closed="left")


def _parse(path: Path, block: bytes, kind: RecordKind, before: int) -> pl.DataFrame:
    try:
        frame = pl.read_ndjson(BytesIO(block), schema=kind.columns)
    except (pl.exceptions.PolarsError, UnicodeDecodeError) as error:
        raise _first_bad_line(path, block, kind, before, str(error)) from None
    complete = block.count(b"\n") == frame.height and block.endswith(b"\n")
    if not complete or not _admissible(frame, kind) or not _has_keys(block, kind):
        raise _first_bad_line(path, block, kind, before, "blank or unfinished line")
    return frame


def _admissible(frame: pl.DataFrame, kind: RecordKind) -> bool:
    checks = [pl.col(key).null_count() == 0 for key in kind.required]
    checks += [pl.col(key).is_in(values).all() for key, values in kind.allowed.items()]
    for (key, value), wanted in kind.required_if.items():
        checks += [(pl.col(w).is_not_null() | (pl.col(key) != value)).all() for w in wanted]
    return bool(frame.select(pl.all_horizontal(checks)).item())


def _has_keys(block: bytes, kind: RecordKind) -> bool:
    """Whether the block's first line has every key: a null value is allowed, a missing key is not.

    polars reads both as null; the keys are written by one writer, so one line per block tells.
    """
    first: dict[str, Any] = json.loads(block[: block.find(b"\n")])
    return kind.columns.keys() - set(kind.optional) <= first.keys()


def _first_bad_line(
    path: Path, block: bytes, kind: RecordKind, before: int, why: str
) -> ArtifactError:
    """The error of the first line that breaks the kind's rules, found line by line."""
    lines = block.removesuffix(b"\n").split(b"\n")
    for number, line in enumerate(lines, before + 1):
        if (problem := _line_problem(line, kind)) is not None:
            return ArtifactError(f"{path}:{number}: {problem}")
    if not block.endswith(b"\n"):
        number = before + len(lines)
        return ArtifactError(f"{path}:{number}: the last line has no newline: the file is cut off")
    return ArtifactError(f"{path}: {why}")


def _line_problem(line: bytes, kind: RecordKind) -> str | None:
    try:
        record: Any = json.loads(line.decode(), parse_constant=_refuse_constant)
    except ValueError as error:
        return f"not valid JSON: {error}" if line.strip() else "blank line"
    if not isinstance(record, dict):
        return f"a record must be a JSON object, found {type(record).__name__}"
    for key, dtype in kind.columns.items():
        if (problem := _value_problem(record, key, dtype, kind)) is not None:
            return problem
    for (key, value), wanted in kind.required_if.items():
        for name in wanted:
            if record[key] == value and record[name] is None:
                return f"{name} is null in a record with {key} {value!r}"
    return None


def _value_problem(
    record: dict[str, Any], key: str, dtype: pl.DataType, kind: RecordKind
) -> str | None:
    if key not in record:
        return None if key in kind.optional else f"key {key!r} is missing"
    value = record[key]
    if value is None:
        return f"{key} is null" if key in kind.required else None
    if key in kind.nested:
        kept = isinstance(value, dict)
        return None if kept else f"{key} is {value!r}, a {type(value).__name__}; wanted an object"
    numbers = (int,) if dtype == INT else (int, float)
    good = isinstance(value, str) if dtype == TEXT else isinstance(value, numbers)
    if not good or isinstance(value, bool):
        return f"{key} is {value!r}, a {type(value).__name__}; wanted {dtype}"
    if dtype == INT and not -(2**63) <= value < 2**63:
        return f"{key} is {value}, which does not fit 64 bits"
    if key in kind.allowed and value not in kind.allowed[key]:
        return f"{key} is {value!r}; allowed: {', '.join(kind.allowed[key])}"
    return None


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")

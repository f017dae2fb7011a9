"""Strict streaming reader of the raw JSON-lines records (docs/artifacts.md: requests,
engine_step, device).

A file is read once, in blocks of whole lines: each block is hashed, its lines are checked, then it
is parsed into the columns the analysis needs. Memory is bounded by the block, not by the file.
"""

import hashlib
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Annotated, Literal, get_args, get_type_hints

import msgspec
import polars as pl
from msgspec import Meta

from connector_tax.artifacts.cell_records import MeasuredWindow
from connector_tax.artifacts.names import REQUEST_STATUSES
from connector_tax.files import ArtifactError, reading

BLOCK_BYTES = 32 * 1024 * 1024
Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Status = Annotated[str, Meta(pattern=f"^({'|'.join(REQUEST_STATUSES)})$")]
Microseconds = Annotated[float, Meta(ge=0)]
BAD_LINE = (ValueError, RecursionError, msgspec.MsgspecError, pl.exceptions.PolarsError)
POLARS = {int: pl.Int64(), float: pl.Float64()}


class _Row(msgspec.Struct):
    """The keys of a line that are read; all must be there but those with a default."""

    def require(self, *names: str) -> None:
        """Refuse a null that this kind of line may not have."""
        for name in names:
            if getattr(self, name) is None:
                raise ValueError(f"{name} is null")


class RequestRow(_Row):
    """Of a line of requests_*.jsonl; a success has all of them."""

    seq: Int
    status: Status
    t_intended_ns: Int
    t_send_ns: Int | None
    t_first_token_ns: Int | None
    t_last_token_ns: Int | None
    t_done_ns: Int | None
    completion_tokens: Int | None

    def __post_init__(self) -> None:
        if self.status == "ok":
            self.require(*self.__struct_fields__)


class StepRow(_Row):
    """Of a line of engine_step_*.jsonl; an object is read as its JSON text."""

    t_ns: Int
    step_id: Int
    process: Literal["scheduler", "worker"]
    step_duration_us: float | None
    build_meta_us: float | None
    get_finished_us: float | None
    start_load_kv_us: float | None
    prefill_tokens: Int | None
    decode_tokens: Int | None
    # Not among the design's fields: a log in its bare format has no whole steps and only the
    # three callbacks, and plain has no hooks.
    engine_step_us: float | None = None
    hooks_us: dict[str, Microseconds] | None = None
    children_us: dict[str, dict[str, Microseconds]] | None = None

    def __post_init__(self) -> None:
        if self.process == "scheduler":
            self.require("step_duration_us", "prefill_tokens", "decode_tokens")


class DeviceRow(_Row):
    """Of a line of device_*.jsonl."""

    t_ns: Int
    step_id: Int
    t_start_ns: Int
    t_end_ns: Int
    t_since_ns: Int | None
    prefill_tokens: Int
    decode_seqs: Int
    t_wait_ns: Int | None
    t_woken_ns: Int | None


class RecordKind:
    """How the lines of one kind of file are checked, and their columns."""

    def __init__(self, row: type[_Row]) -> None:
        self.decoder = msgspec.json.Decoder(row)
        hints = {name: {hint, *get_args(hint)} for name, hint in get_type_hints(row).items()}
        self.columns: dict[str, pl.DataType] = {
            name: next((POLARS[of] for of in POLARS if of in hint), pl.String())
            for name, hint in hints.items()
        }


REQUESTS, STEPS, DEVICE = RecordKind(RequestRow), RecordKind(StepRow), RecordKind(DeviceRow)


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
    digest, number = hashlib.sha256(), 1
    yield pl.DataFrame(schema=kind.columns)
    with reading(path), path.open("rb") as stream:
        while data := stream.read(BLOCK_BYTES):
            block = data + stream.readline()
            digest.update(block)
            try:
                for line in block.splitlines(keepends=True):
                    kind.decoder.decode(line)
                    if not line.endswith(b"\n"):
                        raise ValueError("the last line has no newline: the file is cut off")
                    number += 1
                yield pl.read_ndjson(BytesIO(block), schema=kind.columns)
            except BAD_LINE as error:
                raise ArtifactError(f"{path}:{number}: {error}") from None
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

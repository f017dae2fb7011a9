"""The lines of the raw records, strictly typed (docs/artifacts.md: requests, engine_step, device).

Each line is decoded once, into the keys that the analysis needs. Files are read in blocks of
lines, which bounds the memory.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args, get_type_hints

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from connector_tax.artifacts.cell_records import MeasuredWindow
from connector_tax.artifacts.folder import CellFolder, decoded
from connector_tax.artifacts.names import REQUEST_STATUSES
from connector_tax.artifacts.study_records import meta

Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Status = Annotated[str, meta(pattern=f"^({'|'.join(REQUEST_STATUSES)})$")]
Microseconds = Annotated[float, Meta(ge=0)]
# The columns of records: whole numbers as int64, text as strings; floats, NaN if absent, for
# optional values. A double is exact to the ns for 104 days after the machine's start.
Table = dict[str, NDArray[Any]]


class _Row(msgspec.Struct):
    """The keys that are read from a line; all are required except those with a default."""

    def require(self, *names: str) -> None:
        """Raise if one of these keys is null."""
        for name in names:
            if getattr(self, name) is None:
                raise ValueError(f"{name} is null")


class RequestRow(_Row):
    """The columns of requests_*.jsonl; a success has all of them."""

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
    """The columns of engine_step_*.jsonl."""

    t_ns: Int
    step_id: Int
    process: Literal["scheduler", "worker"]
    step_duration_us: float | None
    build_meta_us: float | None
    get_finished_us: float | None
    start_load_kv_us: float | None
    prefill_tokens: Int | None
    decode_tokens: Int | None
    # Not fields of the design: a log in the design's format has only schedule() and the three
    # callbacks, and plain has no hooks.
    engine_step_us: float | None = None
    hooks_us: dict[str, Microseconds] | None = None
    children_us: dict[str, dict[str, Microseconds]] | None = None

    def __post_init__(self) -> None:
        if self.process == "scheduler":
            self.require("step_duration_us", "prefill_tokens", "decode_tokens")


class DeviceRow(_Row):
    """The columns of device_*.jsonl."""

    t_ns: Int
    step_id: Int
    t_start_ns: Int
    t_end_ns: Int
    t_since_ns: Int | None
    prefill_tokens: Int
    decode_seqs: Int
    t_wait_ns: Int | None
    t_woken_ns: Int | None


Row = TypeVar("Row", bound=_Row)


class RecordKind(Generic[Row]):
    """A kind of file: the decoder of its lines, and their columns."""

    def __init__(self, row: type[Row]) -> None:
        self.decode = msgspec.json.Decoder(row).decode
        hints = {name: {hint, *get_args(hint)} for name, hint in get_type_hints(row).items()}
        self.columns = {n: _dtype(hint) for n, hint in hints.items() if n not in NESTED}

    def rows(self, path: Path, blocks: Iterator[bytes]) -> Iterator[list[Row]]:
        """Yield the rows of each block of lines; `path` and errors as in `decoded`."""
        return decoded(path, blocks, self.decode)

    def table(self, rows: Sequence[Row]) -> Table:
        """Return the columns of these rows."""
        return {
            name: np.array([getattr(row, name) for row in rows], dtype)
            for name, dtype in self.columns.items()
        }


def _dtype(hints: set[Any]) -> type:
    """Return the type of a column from the types of its values."""
    if float in hints or (int in hints and type(None) in hints):
        return np.float64
    return np.int64 if int in hints else np.str_


# Objects in a line, which are not columns.
NESTED = ("hooks_us", "children_us")
REQUESTS, STEPS, DEVICE = RecordKind(RequestRow), RecordKind(StepRow), RecordKind(DeviceRow)


def whole_table(kind: RecordKind[Row], blocks: Iterable[Sequence[Row]]) -> Table:
    """Return the columns of all rows."""
    tables = [kind.table([]), *map(kind.table, blocks)]
    return {name: np.concatenate([table[name] for table in tables]) for name in kind.columns}


def request_table(cell: CellFolder, rows: Sequence[RequestRow] | None = None) -> Table:
    """Return the columns of a cell's requests; read once, then cached.

    Args:
        rows: all of its requests; if None, they are read.

    Raises:
        ArtifactError: as `RecordKind.rows`.
    """

    def make() -> Table:
        blocks = REQUESTS.rows(cell.file("requests"), cell.blocks("requests"))
        return whole_table(REQUESTS, blocks if rows is None else [rows])

    return cell.kept("request table", make)


def taken(table: Table, rows: NDArray[Any]) -> Table:
    """Return the selected rows of a table; `rows` is a mask or row numbers."""
    return {name: column[rows] for name, column in table.items()}


def in_window(t_ns: NDArray[np.int64], window: MeasuredWindow) -> NDArray[np.bool_]:
    """Return a mask of the times that lie in a cell's measured window."""
    return (t_ns >= window["t_warmup_end_ns"]) & (t_ns < window["t_stop_ns"])

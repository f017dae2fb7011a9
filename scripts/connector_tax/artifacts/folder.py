"""A study's folder: its launches, their cells, and their records.

All readers of launches and cells use these objects: each file is read once, checked against the
hash in its launch's index.json, and results derived from it are cached. All planned cells are
included: a skipped, failed, void or unmeasured cell has that state and its reason.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from connector_tax.artifacts import paths
from connector_tax.artifacts.cell_records import CellRecord
from connector_tax.artifacts.index import CellEntry, LaunchIndex, cell_state, read_index
from connector_tax.artifacts.launch_files import AttemptRecord, NodeRecord, nodes_of
from connector_tax.artifacts.names import CellKey, Launch, configuration_of
from connector_tax.artifacts.study_file import (
    Study,
    cell_rates,
    every_launch,
    load_study,
    shape_limits,
)
from connector_tax.artifacts.study_records import CellPlan
from connector_tax.files import (
    ArtifactError,
    check_sha256,
    compare_sha256,
    parse_json,
    read_json,
    reading,
)

BLOCK_BYTES = 32 * 1024 * 1024
Kept = TypeVar("Kept")
SPACED_KEY = re.compile(rb'"\s+:')
BAD_LINE = (ValueError, RecursionError, msgspec.MsgspecError)


def read_blocks(path: Path, sha256: str | None) -> Iterator[bytes]:
    """Yield a file in blocks of whole lines, so that only one block is in memory.

    Args:
        sha256: required hex digest of the file; if None, it is not checked.

    Raises:
        ArtifactError: the file is missing, or has another digest.
    """
    digest = hashlib.sha256()
    with reading(path), path.open("rb") as stream:
        while data := stream.read(BLOCK_BYTES):
            block = data + stream.readline()
            digest.update(block)
            yield block
    if sha256 is not None:
        compare_sha256(path, digest.hexdigest(), sha256)


def decoded(
    path: Path, blocks: Iterator[bytes], decode: Callable[[bytes], Kept]
) -> Iterator[list[Kept]]:
    """Yield the decoded lines of a JSON-lines file, as a list for each block.

    Args:
        path: the file, for messages.

    Raises:
        ArtifactError: a line does not decode, is blank, or is cut off; names its number.
    """
    number = 1
    for block in blocks:
        lines = block.split(b"\n")
        cut_off = lines.pop()
        rows = list[Kept]()
        try:
            for line in lines:
                rows.append(decode(line))
            if cut_off:
                decode(cut_off)
                raise ValueError("the last line has no newline: the file is cut off")
        except BAD_LINE as error:
            raise ArtifactError(f"{path}:{number + len(rows)}: {error}") from None
        yield rows
        number += len(rows)


def _decoder_of(content: bytes) -> Callable[[bytes], dict[str, Any]]:
    """Return a decoder of the content's lines into objects, which rejects duplicate keys."""
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    # Here `":` follows every key, so equal counts mean that no duplicate key was dropped.
    compact = SPACED_KEY.search(content) is None

    def decode_line(line: bytes) -> dict[str, Any]:
        value = decode(line)
        if not compact or line.count(b'":') != _keys(value):
            parse_json(line)
        return value

    return decode_line


def _keys(value: Mapping[str, Any]) -> int:
    """Count the keys of an object and of the objects nested in it, except those in lists."""
    count = len(value)
    for of in value.values():
        if type(of) is dict:
            count += _keys(of)
    return count


class CellState(NamedTuple):
    """The state of a planned cell (valid, void, skipped, missing, failed), and its reason."""

    status: str
    reason: str | None


@dataclass(frozen=True)
class LaunchFolder:
    """The folder of one launch of the run order."""

    root: Path
    launch: Launch

    @cached_property
    def folder(self) -> Path:
        """Return the folder of the launch's files."""
        return self.launch.folder(self.root)

    @cached_property
    def index(self) -> LaunchIndex | None:
        """Return the launch's index.json; None until the launch has ended."""
        return read_index(self.folder)

    @property
    def status(self) -> str:
        """Return the launch's state; `missing` until the launch has ended."""
        return "missing" if self.index is None else self.index.status

    def key(self, cell: str) -> CellKey:
        """Return the key of one of the launch's cells."""
        return CellKey(self.launch.config, self.launch.block, self.launch.phase, cell)

    def entry(self, cell: str) -> CellEntry | None:
        """Return the entry of a cell in the index; None if the cell is not listed."""
        return None if self.index is None else self.index.entry(cell)

    def state(self, cell: str) -> CellState:
        """Return the state of a planned cell."""
        return CellState(*cell_state(self.index, self.entry(cell)))

    @property
    def attempts(self) -> list[AttemptRecord]:
        """Return the attempts in the index, or in attempts.json if there is no index."""
        if self.index is not None:
            return self.index.attempts
        path = self.folder / paths.ATTEMPTS
        return read_json(path) if path.exists() else []

    @property
    def measured(self) -> list[CellRecord]:
        """Return all cell records in the launch's folder, by file name; the index may lack some."""
        return [read_json(path) for path in sorted(self.folder.glob("*/cell_*.json"))]

    def file(self, kind: str, cell: str) -> Path:
        """Return the path of one of a cell's files; `kind` is one of paths.ALL_LOGS."""
        return self.folder / cell / paths.cell_log(kind, self.launch.phase, cell)

    def record_path(self, cell: str) -> Path:
        """Return the path of a cell's record."""
        return self.folder / cell / paths.cell_record(self.launch.phase, cell)

    def record(self, cell: str) -> CellRecord | None:
        """Return a cell's record, not checked against the index; None if missing."""
        if cell not in self._records:
            path = self.record_path(cell)
            self._records[cell] = read_json(path) if path.exists() else None
        return self._records[cell]

    @cached_property
    def _records(self) -> dict[str, CellRecord | None]:
        return {}

    def cell(self, planned: CellPlan, rate_rps: float | None = None) -> "CellFolder":
        """Return a planned cell with its record, both unchecked."""
        name = planned["cell"]
        entry, (status, reason) = self.entry(name), self.state(name)
        return CellFolder(
            key=self.key(name),
            status=status,
            reason=reason,
            folder=self.folder / name,
            files={} if entry is None else entry.files,
            record=None if self.index is None else self.record(name),
            rate_rps=rate_rps,
            input_tokens=planned["input_tokens"],
            output_tokens=planned["output_tokens"],
            nodes=tuple(nodes_of([] if self.index is None else self.index.attempts)),
            _kept=self._kept.setdefault(name, {}),
        )

    @cached_property
    def _kept(self) -> dict[str, dict[str, Any]]:
        return {}

    def checked_record(self, cell: str) -> CellRecord:
        """Return the record of a measured cell.

        Raises:
            ArtifactError: the record differs from the index, or is of another cell or state.
        """
        path, entry = self.record_path(cell), self.entry(cell)
        if entry is None or path.name not in entry.files:
            raise ArtifactError(f"{self.folder / paths.INDEX}: no hash of {path.name}")
        check_sha256(path, entry.files[path.name])
        record: Any = self.record(cell)
        key = self.key(cell)
        for name in ("config", "block", "phase", "cell"):
            if record.get(name) != (wanted := getattr(key, name)):
                reason = f"{name} is {record.get(name)!r}, but its folder says {wanted!r}"
                raise ArtifactError(f"{path}: {reason}")
        for name in ("schedule", "window", "counts", "valid", "void_reasons"):
            if name not in record:
                raise ArtifactError(f"{path}: key {name!r} is missing")
        if record["valid"] != (entry.status == "valid"):
            reason = f"valid is {record['valid']}, but index.json says {entry.status!r}"
            raise ArtifactError(f"{path}: {reason}")
        checked: CellRecord = record
        return checked


@dataclass(frozen=True)
class CellFolder:
    """One planned cell of one launch.

    Attributes:
        key: its launch, block, phase and name.
        status: valid | void | skipped | missing | failed (the whole launch failed).
        reason: why it is not valid; None for a valid cell.
        folder: the folder of its files.
        files: SHA-256 of its files by name, from the launch's index.
        record: `cell_<phase>_<cell>.json`; None unless valid or void.
        rate_rps: offered rate; None if no rate was chosen.
        nodes: machines of the launch's attempts; empty in studies that did not record them.
    """

    key: CellKey
    status: str
    reason: str | None
    folder: Path
    files: Mapping[str, str]
    record: CellRecord | None
    rate_rps: float | None
    input_tokens: int
    output_tokens: int
    nodes: tuple[NodeRecord, ...] = ()
    _kept: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def configuration(self) -> str:
        """Return the configuration of the cell's server."""
        return configuration_of(self.key.config)

    @property
    def name(self) -> str:
        """Return the cell's path-like name, such as `plain_2/block0/A/r40`."""
        return "/".join((self.key.config, f"block{self.key.block}", *self.key[2:]))

    def file(self, kind: str) -> Path:
        """Return the path of one of the cell's files; `kind` is one of paths.ALL_LOGS."""
        return self.folder / paths.cell_log(kind, self.key.phase, self.key.cell)

    def counted(self, counter: str) -> float:
        """Return the increase of a server's counter (`server_counters`); 0 if it is not known."""
        assert self.record is not None
        counters = self.record["server_counters"]
        return (counters["after"].get(counter) or 0.0) - (counters["before"].get(counter) or 0.0)

    def sha256(self, kind: str) -> str | None:
        """Return the hash of one of the cell's files in the index; None if it is not listed."""
        return self.files.get(self.file(kind).name)

    def listed(self, kind: str) -> tuple[Path, str]:
        """Return path and hash of a file that a valid cell must have.

        Raises:
            ArtifactError: the index does not list it.
        """
        path, digest = self.file(kind), self.sha256(kind)
        if digest is None:
            index = self.folder.parent / paths.INDEX
            raise ArtifactError(f"{index}: no hash of {path.name}, which a valid cell must have")
        return path, digest

    def kept(self, name: str, make: Callable[[], Kept]) -> Kept:
        """Return the result of `make`, which is called once for this cell and name, then cached."""
        if name not in self._kept:
            self._kept[name] = make()
        value: Kept = self._kept[name]
        return value

    def blocks(self, kind: str) -> Iterator[bytes]:
        """Yield one of the cell's files in blocks of whole lines, checked against the index.

        Raises:
            ArtifactError: the index does not list the file, or has another hash for it.
        """
        if kind in self._contents:
            yield self._contents[kind]
        else:
            yield from read_blocks(*self.listed(kind))

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """Return every line of one of the cell's files; `release` frees the content.

        Raises:
            ArtifactError: as `blocks`; or a line is not JSON.
        """
        content = b"".join(self.blocks(kind))
        self._contents[kind] = content
        rows = decoded(self.file(kind), iter([content]), _decoder_of(content))
        return next(rows, [])

    @cached_property
    def _contents(self) -> dict[str, bytes]:
        return {}

    def release(self) -> None:
        """Free the files' contents; cached results stay."""
        self._contents.clear()


class StudyFolder:
    """A study with its launches and cells."""

    def __init__(self, study: Study) -> None:
        self.study, self.root = study, study.root
        self.launches = [LaunchFolder(self.root, launch) for launch in every_launch(study.document)]
        self._cells: dict[tuple[str, float | None], list[CellFolder]] = {}

    @classmethod
    def load(cls, study_file: Path) -> "StudyFolder":
        """Return the folder of a study.json; errors as in `load_study`."""
        return cls(load_study(study_file))

    def of_phase(self, phase: str) -> list[LaunchFolder]:
        """Return the launches of a phase in run order."""
        return [launch for launch in self.launches if launch.launch.phase == phase]

    def cells(self, phase: str, rate_rps: float | None = None) -> list[CellFolder]:
        """Return every planned cell of a phase, ordered by configuration, block and cell.

        Args:
            rate_rps: the phase's present reference rate, at which launches of Phases B and B' must
                have been measured; ignored in Phase A.

        Raises:
            ArtifactError: a launch belongs to another design or reference rate, or an index or
                record is malformed; names the file and the difference.
        """
        key = (phase, rate_rps)
        if key not in self._cells:
            study, order = self.study, self.study.configs(phase)
            limits = shape_limits(study.document, self.root, phase)
            rates = cell_rates(study.document, phase, rate_rps, limits)
            cells = list[CellFolder]()
            at = {config: place for place, config in enumerate(order)}
            of_phase = self.of_phase(phase)
            of_phase.sort(key=lambda la: (at[la.launch.config], la.launch.block))
            for launch in of_phase:
                self._check_index(launch, rate_rps)
                cells += (_cell(launch, c, rates[c["cell"]]) for c in study.cells(phase))
            self._cells[key] = cells
        return self._cells[key]

    def _check_index(self, launch: LaunchFolder, rate_rps: float | None) -> None:
        index, path, phase = launch.index, launch.folder / paths.INDEX, launch.launch.phase
        if index is None:
            return
        for key in ("config", "block", "phase"):
            recorded, wanted = getattr(index, key), getattr(launch.launch, key)
            if recorded != wanted:
                raise ArtifactError(
                    f"{path}: {key} is {recorded!r}, but its folder says {wanted!r}"
                )
        design = index.depends.get("design_sha256")
        if design != (wanted := self.study.document["design_sha256"]):
            raise ArtifactError(
                f"{path}: depends.design_sha256 is {design}, but this study has {wanted}:"
                " the launch belongs to another study; mixtures are refused"
            )
        if phase != "A" and index.status != "skipped" and index.rate_rps != rate_rps:
            raise ArtifactError(
                f"{path}: rate_rps is {index.rate_rps}, but the reference rate is now {rate_rps}:"
                " the launch was measured at another rate; mixtures are refused. To set the"
                " launches aside and measure the phase at one rate:"
                f" connector-tax remeasure {self.root} --phase {phase}"
            )
        unknown = {entry.cell for entry in index.cells}
        unknown -= {cell["cell"] for cell in self.study.cells(phase)}
        if unknown:
            raise ArtifactError(f"{path}: cell {min(unknown)!r} is not planned in study.json")


def _cell(launch: LaunchFolder, planned: CellPlan, rate_rps: float | None) -> CellFolder:
    index, name, record = launch.index, planned["cell"], None
    if planned["rate_rps"] is None and (index is None or index.rate_rps is None):
        rate_rps = None
    if launch.state(name).status in ("valid", "void"):
        record = launch.checked_record(name)
        if record["schedule"]["rate_rps"] != rate_rps:
            raise ArtifactError(
                f"{launch.record_path(name)}: rate_rps is {record['schedule']['rate_rps']}, but"
                f" the rate of this cell is now {rate_rps}: mixtures are refused. To set the"
                " launches aside and measure the phase at the new rate:"
                f" connector-tax remeasure {launch.root} --phase {launch.launch.phase}"
            )
    return replace(launch.cell(planned, rate_rps), record=record)

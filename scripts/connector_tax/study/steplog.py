"""The engine's step log, cut into cells.

The server writes one file per process (of a worker: per rank) for its whole life, the embedded
engine JSON lines
(`<prefix>.<process>.jsonl`, flushed every 20 ms), the step probe in a vLLM its own records
(`<prefix>.<process>.steps`, written when asked); a cell keeps the records written while it ran, as
JSON lines. Between two cells the server is drained, so a cell's records are those appended
between its start and its end.
"""

import time
from itertools import dropwhile
from pathlib import Path

import msgspec

from connector_tax.artifacts.cell_records import DeviceLine
from connector_tax.study.server_command import STEP_LOG_PREFIX, STEP_LOG_PROCESSES, ServerError
from connector_tax.vllm.step_records import (
    ProbeSocketError,
    ask_to_write,
    device_records,
    step_records,
)

_SUFFIXES = {"embedded": "jsonl", "vllm": "steps"}
# After this time a drained server has recorded its last step: the embedded engine flushes, a vLLM
# that schedules asynchronously ends the step it was ahead.
_SETTLED_S = 0.06


class _Stamp(msgspec.Struct):
    t_ns: int


class LaunchStepLog:
    """Reads the growing step-log files of the server launched in `folder`.

    Args:
        folder: where the server runs.
        kind: the kind of engine, embedded or vllm.

    `mark` and `take` raise ServerError where a process that records does not answer.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self._kind = kind
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        # Of an emulated device; another has none.
        self._device = folder / f"{STEP_LOG_PREFIX}.device.steps"

    def _paths(self) -> list[Path]:
        """The file of each process: the scheduler's, the worker's, those of its further ranks."""
        suffix, paths = _SUFFIXES[self._kind], []
        for process in STEP_LOG_PROCESSES:
            name = f"{STEP_LOG_PREFIX}.{process}"
            paths.append(self._folder / f"{name}.{suffix}")
            paths += sorted(self._folder.glob(f"{name}[0-9]*.{suffix}"))
        return paths

    def remove(self) -> None:
        """Delete the files; the cells of the launch hold their records."""
        for path in [*self._paths(), self._device]:
            path.unlink(missing_ok=True)
            path.with_suffix(".socket").unlink(missing_ok=True)

    def mark(self) -> None:
        """Start a cell here."""
        self._offsets = {path: self._size(path) for path in [*self._paths(), self._device]}

    def take(self, origin_ns: int, drained_ns: int) -> bytes:
        """The JSON lines of all processes since `mark`, without steps from before `origin_ns`.

        The server has had nothing to do since `drained_ns`.
        """
        # Nothing signals that it has.
        time.sleep(max(0.0, _SETTLED_S - (time.monotonic_ns() - drained_ns) / 1e9))
        decoder = msgspec.json.Decoder(_Stamp)
        taken: list[bytes] = []
        for path in self._paths():
            lines = self._since(path, self._offsets.get(path, 0)) if self._size(path) else []
            taken += dropwhile(lambda line: decoder.decode(line).t_ns < origin_ns, lines)
        return b"".join(taken)

    def take_device(self) -> list[DeviceLine]:
        """The steps of the emulated device since `mark`; call it after `take`."""
        if not self._size(self._device):
            return []
        return list(device_records(self._device.read_bytes(), self._offsets.get(self._device, 0)))

    def _size(self, path: Path) -> int:
        """The length of one process's file, when all that was recorded is in it."""
        if self._kind == "vllm":
            try:
                ask_to_write(path)
            except ProbeSocketError as error:
                raise ServerError(f"the server hangs: {error}") from error
        return path.stat().st_size if path.exists() else 0

    def _since(self, path: Path, offset: int) -> list[bytes]:
        """The whole lines of one process from the byte `offset` of its file on."""
        if self._kind == "vllm":
            records = step_records(path.read_bytes(), offset)
            return [msgspec.json.encode(record) + b"\n" for record in records]
        with path.open("rb") as stream:
            stream.seek(offset)
            lines = stream.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        return lines

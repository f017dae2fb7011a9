"""Divide the engine's step log into cells.

The server writes one file per process (worker: per rank) for its whole life. The embedded engine
writes JSON lines (`<prefix>.<process>.jsonl`, flushed every 20 ms); the step probe in vLLM writes
its own records (`<prefix>.<process>.steps`, on request). Between two cells the server is drained,
so a cell's records are those appended between its start and its end.
"""

import time
from collections.abc import Iterator
from itertools import dropwhile
from pathlib import Path

import msgspec

from connector_tax.artifacts.cell_records import DeviceLine
from connector_tax.artifacts.study_records import EngineSection
from connector_tax.servers.kinds import STEP_LOG_PREFIX, STEP_LOG_PROCESSES, engine_of
from connector_tax.vllm.device_time.copies import Copy
from connector_tax.vllm.step_records import copy_records, device_records, with_copies

# After this time a drained server has recorded its last step: the embedded engine has flushed, and
# an asynchronously scheduling vLLM has ended the step it had scheduled ahead.
_SETTLED_S = 0.06


class _Stamp(msgspec.Struct):
    t_ns: int


class LaunchStepLog:
    """The growing step-log files of the server launched in `folder`.

    `mark` and `take` raise ServerError if a recording process does not answer.
    """

    def __init__(self, folder: Path, engine: EngineSection) -> None:
        self._engine = engine_of(engine)
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        # Only an emulated device has this file.
        self._device = folder / f"{STEP_LOG_PREFIX}.device.steps"

    def _paths(self) -> list[Path]:
        """Return the files of all processes: scheduler, worker, and the other ranks' workers."""
        suffix, paths = self._engine.step_suffix, []
        for process in STEP_LOG_PROCESSES:
            name = f"{STEP_LOG_PREFIX}.{process}"
            paths.append(self._folder / f"{name}.{suffix}")
            paths += sorted(self._folder.glob(f"{name}[0-9]*.{suffix}"))
        return paths

    def remove(self) -> None:
        """Delete the step-log files, since the launch's cells contain their records."""
        for path in [*self._paths(), self._device, *self._copies()]:
            path.unlink(missing_ok=True)
            path.with_suffix(".socket").unlink(missing_ok=True)

    def mark(self) -> None:
        """Store the length of each log as the start of a cell."""
        every = [*self._paths(), self._device, *self._copies()]
        self._offsets = {path: self._size(path) for path in every}

    def take(self, origin_ns: int, drained_ns: int) -> bytes:
        """Return the JSON lines of all processes since `mark`, without steps before `origin_ns`.

        The server must have been idle since `drained_ns`.
        """
        # No event signals that the last step is recorded.
        time.sleep(max(0.0, _SETTLED_S - (time.monotonic_ns() - drained_ns) / 1e9))
        decoder = msgspec.json.Decoder(_Stamp)
        taken: list[bytes] = []
        for path in self._paths():
            lines: list[bytes] = []
            if self._size(path):
                lines = self._engine.step_lines(path, self._offsets.get(path, 0))
            taken += dropwhile(lambda line: decoder.decode(line).t_ns < origin_ns, lines)
        return b"".join(taken)

    def take_device(self) -> list[DeviceLine]:
        """Return the emulated device's steps since `mark`; call it after `take`."""
        if not self._size(self._device):
            return []
        steps = list(device_records(self._device.read_bytes(), self._offsets.get(self._device, 0)))
        return with_copies(steps, self.take_copies())

    def take_copies(self) -> Iterator[Copy]:
        """Yield the copies over the emulated link since `mark`, of all processes that copy."""
        for path in self._copies():
            if self._size(path):
                yield from copy_records(path.read_bytes(), self._offsets.get(path, 0))

    def _copies(self) -> list[Path]:
        return sorted(self._folder.glob(f"{STEP_LOG_PREFIX}.copies*.steps"))

    def _size(self, path: Path) -> int:
        """Make a process write its recorded steps; return the length of its file."""
        self._engine.write_steps(path)
        return path.stat().st_size if path.exists() else 0

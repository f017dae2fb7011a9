"""The engine's step log, cut into cells.

The server writes one file per process for its whole life (`<prefix>.<process>.jsonl`, flushed at
least every 100 ms, the embedded engine's every 20 ms); a cell keeps the records written while it
ran. Between two cells the server is drained, so a cell's records are the bytes appended between its
start and its end.
"""

import time
from pathlib import Path

import msgspec

from connector_tax.study.server import STEP_LOG_PREFIX, STEP_LOG_PROCESSES

# After this time the last record of a drained server is in its file, by kind of engine.
FLUSH_S = {"embedded": 0.06, "vllm": 0.12}


class _Stamp(msgspec.Struct):
    t_ns: int


def _paths(folder: Path) -> list[Path]:
    return [folder / f"{STEP_LOG_PREFIX}.{process}.jsonl" for process in STEP_LOG_PROCESSES]


class StepLog:
    """Reads the growing step-log files of the server launched in `folder`."""

    def __init__(self, folder: Path, flush_s: float) -> None:
        self._flush_s = flush_s
        self._paths = _paths(folder)
        self._offsets = [0, 0]

    @staticmethod
    def remove(folder: Path) -> None:
        """Delete the files of the launch in `folder`; its cells hold their records."""
        for path in _paths(folder):
            path.unlink(missing_ok=True)

    def mark(self) -> None:
        """Start a cell here."""
        self._offsets = [path.stat().st_size if path.exists() else 0 for path in self._paths]

    def take(self, origin_ns: int, drained_ns: int) -> bytes:
        """The JSON lines of both processes since `mark`, without steps from before `origin_ns`.

        The server has had nothing to do since `drained_ns`.
        """
        # The writer's flush interval is part of its contract and signals nothing to wait for.
        time.sleep(max(0.0, self._flush_s - (time.monotonic_ns() - drained_ns) / 1e9))
        return b"".join(
            self._since(path, offset, origin_ns)
            for path, offset in zip(self._paths, self._offsets, strict=True)
        )

    @staticmethod
    def _since(path: Path, offset: int, origin_ns: int) -> bytes:
        if not path.exists():
            return b""
        with path.open("rb") as stream:
            stream.seek(offset)
            lines = stream.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        decoder = msgspec.json.Decoder(_Stamp)
        first = next(
            (i for i, line in enumerate(lines) if decoder.decode(line).t_ns >= origin_ns), 0
        )
        return b"".join(lines[first:])

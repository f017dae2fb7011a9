"""The step log: one record for each step and process, as JSON lines.

One file for each process of a real vLLM: `<prefix>.scheduler.jsonl` and `<prefix>.worker.jsonl`.
`step_duration_us` is schedule() entry to exit in the scheduler's record (the host's share of the
step with build_meta, as modelled) and the model's execution with start_load_kv in the worker's.
Beyond the design's fields a record carries `engine_step_us`, the whole step as the step probe
records it, and `kv_tokens`, the KV tokens its decoding sequences read; the fit of the step's cost
needs both.
"""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

_FLUSH_S = 0.02


class StepRecord(msgspec.Struct):
    """One step as one process knows it; None where it cannot know."""

    t_ns: int
    step_id: int
    process: str
    step_duration_us: float
    engine_step_us: float | None
    build_meta_us: float | None
    get_finished_us: float | None
    start_load_kv_us: float | None
    num_running: int | None
    num_waiting: int | None
    prefill_tokens: int
    decode_tokens: int
    kv_tokens: int


class LogError(Exception):
    """A log could not be written; names the file and the cause."""


class LineLog:
    """A JSON-lines file, buffered and flushed every 20 ms while there is something to write.

    Records are encoded when the loop has nothing more urgent to do: a finished request's truth is
    long, and it ends among writes that must not be late. A file that takes no more is cut back to
    its last whole line, and later records are dropped: whoever owns the log must end the launch.

    Args:
        path: the file; its folder must exist.
        on_failure: called once when the file cannot be written, unless `close` raises it.

    Raises:
        OSError: the file cannot be created.
    """

    def __init__(self, path: Path, on_failure: Callable[[LogError], None]) -> None:
        self._path = path
        self._file = path.open("xb", buffering=0)
        self._on_failure = on_failure
        self._failed = False
        self._encoder = msgspec.json.Encoder()
        self._records: list[object] = []
        self._buffer = bytearray()
        self._timer: asyncio.TimerHandle | None = None

    def write(self, record: object) -> None:
        """Append one record, which does not change any more."""
        if not self._records:
            asyncio.get_running_loop().call_soon(self._encode)
        self._records.append(record)

    def _encode(self) -> None:
        for record in self._records:
            self._buffer += self._encoder.encode(record)
            self._buffer += b"\n"
        self._records.clear()
        if self._timer is None and self._buffer:
            self._timer = asyncio.get_running_loop().call_later(_FLUSH_S, self._flush_timed)

    def _flush_timed(self) -> None:
        self._timer = None
        try:
            self._flush()
        except LogError as error:
            self._on_failure(error)

    def _flush(self) -> None:
        """Write the buffer.

        Raises:
            LogError: not all of it could be written, for the first time.
        """
        written = 0
        try:
            # A write may take less than it is given, on a nearly full disk for example.
            while written < len(self._buffer) and not self._failed:
                written += self._file.write(memoryview(self._buffer)[written:])
        except OSError as error:
            self._failed = True
            whole = self._buffer.rfind(b"\n", 0, written) + 1
            os.ftruncate(self._file.fileno(), self._file.tell() - written + whole)
            raise LogError(f"{self._path}: {error.strerror}; the log ends here") from error
        finally:
            self._buffer = bytearray()

    def close(self) -> None:
        """Write what is left and close the file.

        Raises:
            LogError: what was left could not be written.
        """
        self._encode()
        if self._timer is not None:
            self._timer.cancel()
        try:
            self._flush()
        finally:
            self._file.close()


class StepLog:
    """The two files of a launch.

    Args:
        prefix: path and name of both, before `.scheduler.jsonl` and `.worker.jsonl`.
        on_failure: as for LineLog.
    """

    def __init__(self, prefix: str, on_failure: Callable[[LogError], None]) -> None:
        self._scheduler = LineLog(Path(f"{prefix}.scheduler.jsonl"), on_failure)
        self._worker = LineLog(Path(f"{prefix}.worker.jsonl"), on_failure)

    def write(self, record: StepRecord) -> None:
        """Append a record to its process's file."""
        (self._scheduler if record.process == "scheduler" else self._worker).write(record)

    def close(self) -> None:
        """Write what is left and close both files.

        Raises:
            LogError: what was left could not be written.
        """
        try:
            self._scheduler.close()
        finally:
            self._worker.close()

"""The step log, in the design's format (source 002, step-level timing; CONTRACTS.md, engine_step).

One file for each process of a real vLLM: `<prefix>.scheduler.jsonl` and `<prefix>.worker.jsonl`.
`step_duration_us` is schedule() entry to exit in the scheduler's record (the host's share of the
step with build_meta, as modelled) and the model's execution with start_load_kv in the worker's.
Beyond the design's fields a record carries `engine_step_us`, the whole step as the step probe
records it, and `kv_tokens`, the KV tokens its decoding sequences read; the fit of the step's cost
needs both.
"""

import asyncio
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


class LineLog:
    """A JSON-lines file, buffered and flushed every 20 ms while there is something to write.

    Records are encoded when the loop has nothing more urgent to do: a finished request's truth is
    long, and it ends among writes that must not be late.

    Args:
        path: the file; its folder must exist.

    Raises:
        OSError: the file cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb", buffering=0)
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
            self._timer = asyncio.get_running_loop().call_later(_FLUSH_S, self._flush)

    def _flush(self) -> None:
        self._timer = None
        self._file.write(self._buffer)
        self._buffer.clear()

    def close(self) -> None:
        """Write what is left and close the file."""
        self._encode()
        if self._timer is not None:
            self._timer.cancel()
        self._flush()
        self._file.close()


class StepLog:
    """The two files of a launch."""

    def __init__(self, prefix: str) -> None:
        self._scheduler = LineLog(Path(f"{prefix}.scheduler.jsonl"))
        self._worker = LineLog(Path(f"{prefix}.worker.jsonl"))

    def write(self, record: StepRecord) -> None:
        """Append a record to its process's file."""
        (self._scheduler if record.process == "scheduler" else self._worker).write(record)

    def close(self) -> None:
        """Write what is left and close both files."""
        self._scheduler.close()
        self._worker.close()

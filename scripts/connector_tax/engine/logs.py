"""Write the engine's logs: its steps, and the truth about each request, as JSON lines.

The step log has a file for each process of a real vLLM, `<prefix>.scheduler.jsonl` and
`<prefix>.worker.jsonl`, with a line (artifacts/cell_records.py:StepLine) for each step.
`step_duration_us` is schedule() entry to exit in the scheduler's line (the host's share of the step
with build_meta, as modelled) and the model's execution with start_load_kv in the worker's. The fit
of the step's cost needs `engine_step_us`, the whole step, and `kv_tokens`, the KV tokens that its
decoding sequences read.

The truth log has a line for the launch, then one for each finished request, in CLOCK_MONOTONIC ns.
"""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from connector_tax.engine.scheduler import StepPlan

_FLUSH_S = 0.02
STEP_PROCESSES = ("scheduler", "worker")


class Step(NamedTuple):
    """An executed step; times are in ns.

    Attributes:
        taxes_us: build_meta, get_finished and start_load_kv; None without a connector.
        running, waiting: requests when the step was planned.
    """

    number: int
    start_ns: int
    device_start_ns: int
    end_ns: int
    plan: StepPlan
    taxes_us: tuple[float, float, float] | None
    running: int
    waiting: int

    def line(self, process: str) -> dict[str, Any]:
        """Return the line of one of STEP_PROCESSES in its step log."""
        host, plan = process == "scheduler", self.plan
        meta, finished, load = self.taxes_us or (None, None, None)
        # get_finished runs on the host too, but outside schedule(), as in vLLM.
        schedule_us = (self.device_start_ns - self.start_ns) / 1000 - (finished or 0.0)
        device_us = (self.end_ns - self.device_start_ns) / 1000
        return {
            "t_ns": self.start_ns if host else self.device_start_ns,
            "step_id": self.number,
            "process": process,
            "step_duration_us": schedule_us if host else device_us,
            "engine_step_us": (self.end_ns - self.start_ns) / 1000 if host else None,
            "build_meta_us": meta if host else None,
            "get_finished_us": finished if host else None,
            "start_load_kv_us": None if host else load,
            "num_running": self.running if host else None,
            "num_waiting": self.waiting if host else None,
            "prefill_tokens": plan.prefill_tokens,
            "decode_tokens": plan.decode_seqs,
            "kv_tokens": plan.kv_tokens,
        }


class LaunchTruth(msgspec.Struct, tag="launch", tag_field="record"):
    """The launch's seeded offset and its injected taxes (None without a connector)."""

    configuration: str
    launch_seed: int
    launch_factor: float
    step_cost: dict[str, float]
    tax: dict[str, float] | None


class RequestTruth(msgspec.Struct, tag="request", tag_field="record"):
    """The true timing of one request.

    Attributes:
        request_id: the client's X-Request-Id, or the engine's id.
        t_arrival_ns: time of the read with the request's last byte.
        t_headers_ns: time of the write of the response's head.
        writes: [t_ns, tokens, deadline_ns] of each write of the body; t_ns is taken right before
            the system call, deadline_ns is the end of the step that made the tokens (0 without a
            step).
        outcome: ok, disconnected, stopped, or the name of the fault or error.
    """

    request_id: str
    t_arrival_ns: int
    t_headers_ns: int
    writes: list[tuple[int, int, int]]
    prompt_tokens: int
    completion_tokens: int
    preemptions: int
    fault: str | None
    outcome: str


class LogError(Exception):
    """A log could not be written; the text names the file and the cause."""


class LineLog:
    """A JSON-lines file whose buffer is flushed every 20 ms while it holds lines.

    Records are encoded when the event loop is idle, because a finished request's record is long and
    other requests' writes must not be late. After a failed write the file is truncated to its last
    whole line and later records are dropped; the owner of the log must then end the launch.

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
        """Append one record, which must not change afterwards."""
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
            LogError: the first time that a write fails.
        """
        written = 0
        try:
            # A write may be partial, for example on a nearly full disk.
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
        """Write the remaining lines and close the file.

        Raises:
            LogError: the lines could not be written.
        """
        self._encode()
        if self._timer is not None:
            self._timer.cancel()
        try:
            self._flush()
        finally:
            self._file.close()


def step_logs(prefix: str, on_failure: Callable[[LogError], None]) -> dict[str, LineLog]:
    """Return the step log's file of each process; their paths begin with `prefix`."""
    return {name: LineLog(Path(f"{prefix}.{name}.jsonl"), on_failure) for name in STEP_PROCESSES}

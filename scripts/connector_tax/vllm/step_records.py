"""Convert the step probe's binary records to JSON lines in the design's format.

The fields are in docs/artifacts.md, engine_step. The design's fields are extended by the
scheduler's `update_us` and `engine_step_us`, by `hooks_us` with the connector's other hooks, and by
`children_us` with hooks of a MultiConnector's children, by name. A hook called by another hook of
the same object counts as part of the outer one. Spans have four significant digits and none below
0.1 us, about the time of two clock readings; `t_ns` is rounded to 10 us. Finer digits would only
enlarge archives with noise.

The file of an emulated device holds whole ns; docs/artifacts.md, device, describes its lines.
"""

import math
import socket
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec

from connector_tax.artifacts.cell_records import DeviceLine, StepLine
from connector_tax.vllm.device_time.copies import Copy
from connector_tax.vllm.step_probe.log import COUNTS, socket_address
from connector_tax.vllm.step_probe.probe import FIELDS

# Steps in flight, at most the depth of vLLM's batch queue; an older step gets no update.
_PENDING_STEPS = 64
ANSWER_S = 10.0

_Call = tuple[float, float, int]


@dataclass(frozen=True, slots=True)
class _Hook:
    """The hook of the connector, or of one of its children, at a position."""

    group: int
    child: str | None
    name: str


class Header(msgspec.Struct):
    """The first line of a probe's file."""

    process: str
    groups: list[tuple[str | None, list[str], int]]

    def hooks(self) -> dict[int, _Hook]:
        """Return the timed hooks by position."""
        return {
            position: _Hook(group, child, name)
            for group, (child, names, first) in enumerate(self.groups)
            for position, name in enumerate(names, first)
        }


@dataclass(slots=True)
class _Step:
    """The record of one step in one process; times are in seconds."""

    step_id: int
    start: float
    spent: float
    counts: tuple[int, ...] = ()
    calls: list[_Call] = field(default_factory=list)
    update: float | None = None
    engine_step: float | None = None


class ProbeSocketError(Exception):
    """A recording process does not answer on its socket; the text names the socket."""


def ask_to_write(path: Path) -> None:
    """Make the process that records to `path` (`<prefix>.<process>.steps`) write its held records.

    Does nothing if no step was recorded yet, or the process has ended.

    Raises:
        ProbeSocketError: no answer in time.
    """
    address = path.with_suffix(".socket")
    try:
        with socket.socket(socket.AF_UNIX) as peer, socket_address(str(address)) as short:
            peer.settimeout(ANSWER_S)
            peer.connect(short)
            peer.sendall(b"w")
            peer.recv(1)
    except (FileNotFoundError, ConnectionError):
        return
    except TimeoutError:
        raise ProbeSocketError(f"{address}: no answer in {ANSWER_S:g} s") from None


def step_records(file: bytes, offset: int = 0) -> Iterator[StepLine]:
    """Yield the steps of a probe's file from the byte `offset` on, in the order of their ends.

    Incomplete steps and numbers are left out.

    Args:
        file: the content from its first byte.
        offset: 0, or the file's length at an earlier time.

    Raises:
        msgspec.DecodeError: the file does not begin with the probe's header.
    """
    if (header := _header(file)) is None:
        return
    hooks = header.hooks()
    steps = _scheduler_steps if header.process == "scheduler" else _worker_steps
    for step in steps(_timed(_numbers(file, offset))):
        yield _fields(header, hooks, step)


def device_records(file: bytes, offset: int = 0) -> Iterator[DeviceLine]:
    """Yield the steps of an emulated device's file, as `step_records` does for a probe's file."""
    if _header(file) is None:
        return
    for _, numbers in _timed(_numbers(file, offset)):
        queued, end, step_id, start, since, *counts, wait, woken = map(int, numbers)
        prefill, decode, kv, pairs = counts
        yield {
            "t_ns": queued, "step_id": step_id, "t_start_ns": start, "t_end_ns": end,
            "t_since_ns": since or None, "prefill_tokens": prefill, "decode_seqs": decode,
            "kv_tokens": kv, "prefill_pairs": pairs, "t_wait_ns": wait or None,
            "t_woken_ns": woken or None,
        }  # fmt: skip


def copy_records(file: bytes, offset: int = 0) -> Iterator[Copy]:
    """Yield the copies of an emulated link's file, as `step_records` does for a probe's file."""
    if _header(file) is None:
        return
    for _, numbers in _timed(_numbers(file, offset)):
        yield Copy(*map(int, numbers))


def with_copies(steps: Sequence[DeviceLine], copies: Iterable[Copy]) -> list[DeviceLine]:
    """Return the device's steps, each with the copies submitted before the next step was queued.

    Copies from before the first step belong to the first.
    """
    queued = [step["t_ns"] for step in steps]
    of_step = [[0, 0] for _ in steps]
    for copy in copies if steps else ():
        sums = of_step[max(0, bisect_right(queued, copy.submitted_ns) - 1)]
        sums[0] += copy.size
        sums[1] += copy.pieces
    return [
        {**step, "copied_bytes": size, "copied_pieces": pieces}
        for step, (size, pieces) in zip(steps, of_step, strict=True)
    ]


def _header(file: bytes) -> Header | None:
    head, newline, _ = file.partition(b"\n")
    return msgspec.json.decode(head, type=Header) if newline else None


def _numbers(file: bytes, offset: int) -> "array[float]":
    """Return the numbers after the header from `offset` on, without an incomplete last number."""
    numbers = array("d")
    body = memoryview(file)[max(offset, file.index(b"\n") + 1) :]
    numbers.frombytes(body[: len(body) // numbers.itemsize * numbers.itemsize])
    return numbers


def _timed(numbers: Iterable[float]) -> Iterator[tuple[int, list[float]]]:
    """Yield the position of each timing and its numbers: start, end, values."""
    collected: list[float] = []
    for number in numbers:
        if number < 0:
            # The inverse of step_probe.log.mark().
            yield int(-1 - number), collected
            collected = []
        else:
            collected.append(number)


def _scheduler_steps(timed: Iterable[tuple[int, list[float]]]) -> Iterator[_Step]:
    schedule, update, engine_step = range(3)
    scheduled: dict[int, _Step] = {}
    current: _Step | None = None
    complete: list[_Step] = []
    calls: list[_Call] = []
    for position, (start, end, *values) in timed:
        if position == schedule:
            step_id, *counts = map(int, values)
            current = _Step(step_id, start, end - start, tuple(counts), calls)
            scheduled[step_id], calls = current, []
            if len(scheduled) > _PENDING_STEPS:
                complete.append(scheduled.pop(next(iter(scheduled))))
        elif position == update:
            # Hooks called in the update belong to the updated step.
            if (step := scheduled.pop(int(values[0]), None)) is not None:
                step.update = end - start
                step.calls += calls
                complete.append(step)
            calls = []
        elif position == engine_step:
            if current is not None:
                current.engine_step = end - start
            yield from complete
            current, complete = None, []
        else:
            calls.append((start, end, position))


def _worker_steps(timed: Iterable[tuple[int, list[float]]]) -> Iterator[_Step]:
    execute_model, sample_tokens = range(2)
    step: _Step | None = None
    calls: list[_Call] = []
    for position, (start, end, *values) in timed:
        if position == execute_model:
            if step is not None:
                yield step
            step_id, complete = map(int, values)
            # A warm-up step has no id and is left out.
            step = _Step(step_id, start, end - start, calls=calls) if step_id else None
            calls = []
            if complete and step is not None:
                yield step
                step = None
        elif position == sample_tokens:
            if step is not None:
                step.spent += end - start
                step.calls += calls
                yield step
            step, calls = None, []
        else:
            calls.append((start, end, position))


def _fields(header: Header, hooks: Mapping[int, _Hook], step: _Step) -> StepLine:
    connector = _spent_in_hooks(hooks, step.calls)
    hook_times = connector.pop(None, {})
    record: dict[str, Any] = {"t_ns": int(step.start * 1e5) * 10_000, "step_id": step.step_id}
    record |= {"process": header.process, "step_duration_us": _us(step.spent)}
    for name in dict.fromkeys(FIELDS.values()):
        called = [hook_times[hook] for hook in hook_times if FIELDS.get(hook) == name]
        record[name] = _us(sum(called)) if called else None
    if header.groups:
        record["hooks_us"] = {
            name: _us(hook_times[name]) for name in hook_times if name not in FIELDS
        }
    if connector:
        record["children_us"] = {
            child: {name: _us(seconds) for name, seconds in times.items()}
            for child, times in connector.items()
        }
    counts = step.counts or (None,) * len(COUNTS)
    record |= dict(zip(COUNTS, counts, strict=True))
    if step.counts:
        record["update_us"] = None if step.update is None else _us(step.update)
        record["engine_step_us"] = None if step.engine_step is None else _us(step.engine_step)
    return cast(StepLine, record)


def _spent_in_hooks(
    hooks: Mapping[int, _Hook], calls: list[_Call]
) -> dict[str | None, dict[str, float]]:
    """Return the seconds in each hook of each child (None: the connector), ordered by position.

    Args:
        calls: (start, end, position) of each timing.
    """
    ended: dict[int, float] = {}
    spent: dict[int, float] = {}
    for start, end, position in sorted(calls, key=lambda call: (call[0], -call[1])):
        hook = hooks.get(position)
        # Inside another hook of the same object, whose time includes it.
        if hook is None or start < ended.get(hook.group, 0):
            continue
        ended[hook.group] = end
        spent[position] = spent.get(position, 0) + (end - start)
    by_child: dict[str | None, dict[str, float]] = {}
    for position in sorted(spent):
        times = by_child.setdefault(hooks[position].child, {})
        name = hooks[position].name
        # Two children may have the same name.
        times[name] = times.get(name, 0) + spent[position]
    return by_child


def _us(seconds: float) -> float:
    microseconds = seconds * 1e6
    digits = 3 - math.floor(math.log10(microseconds)) if microseconds >= 1000 else 1
    return round(microseconds, digits)

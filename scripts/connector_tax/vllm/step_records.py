"""The step probe's binary records as JSON lines in the design's format.

Source 002, "Step-level timing instrumentation"; CONTRACTS.md, engine_step. Beyond the design's
fields: `update_us` and `engine_step_us` of the scheduler, `hooks_us` with the connector's other
hooks, `children_us` with those timed of a MultiConnector's children, by name. A hook called by
another hook of the same object belongs to the outer one. Spans have four significant digits and
none below 0.1 us, about what two readings of the clock take; `t_ns` is given to 10 us. Finer digits
are noise that an archive has to carry.
"""

import io
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from connector_tax.vllm.step_probe import COUNTS, FIELDS

_NUMBER_BYTES = array("d").itemsize


@dataclass(frozen=True, slots=True)
class _Hook:
    """What a position stands for: a hook of the connector, or of its child of that name."""

    group: int
    child: str | None
    name: str


class Header(msgspec.Struct):
    """The first line of a file of the probe."""

    process: str
    counts: list[str]
    spans: list[str]
    groups: list[tuple[str | None, list[str], int]]

    def hooks(self) -> dict[int, _Hook]:
        """The timed hooks by position."""
        return {
            position: _Hook(group, child, name)
            for group, (child, names, first) in enumerate(self.groups)
            for position, name in enumerate(names, first)
        }


def step_records(file: bytes, offset: int = 0) -> Iterator[dict[str, Any]]:
    """The whole records of a file of the probe from the byte `offset` on.

    A record that is still being written is left out.

    Args:
        file: from its first byte.
        offset: 0, or the length the file had at an earlier time.

    Raises:
        msgspec.DecodeError: the file does not begin with the probe's header.
    """
    head, newline, _ = file.partition(b"\n")
    if not newline:
        return
    header = msgspec.json.decode(head, type=Header)
    hooks = header.hooks()
    body = io.BytesIO(file)
    body.seek(max(offset, len(head) + 1))
    while record := _next_record(body):
        yield _fields(header, hooks, record)


def _next_record(body: io.BytesIO) -> list[float]:
    """The numbers of one record; none at the end."""
    size = body.read(_NUMBER_BYTES)
    if len(size) < _NUMBER_BYTES:
        return []
    wanted = int(array("d", size)[0]) * _NUMBER_BYTES
    numbers = body.read(wanted)
    return array("d", numbers).tolist() if len(numbers) == wanted else []


def _fields(header: Header, hooks: dict[int, _Hook], numbers: list[float]) -> dict[str, Any]:
    start, step_id, spent = numbers[:3]
    counts = dict(zip(header.counts, map(int, numbers[3:]), strict=False))
    calls = _calls(numbers[3 + len(counts) :])
    connector = _spent_in_hooks(hooks, calls)
    own = connector.pop(None, {})
    record: dict[str, Any] = {"t_ns": int(start * 1e5) * 10_000, "step_id": int(step_id)}
    record |= {"process": header.process, "step_duration_us": _us(spent)}
    for field in dict.fromkeys(FIELDS.values()):
        called = [own[name] for name in own if FIELDS.get(name) == field]
        record[field] = _us(sum(called)) if called else None
    if header.groups:
        record["hooks_us"] = {name: _us(own[name]) for name in own if name not in FIELDS}
    if connector:
        record["children_us"] = {
            child: {name: _us(seconds) for name, seconds in times.items()}
            for child, times in connector.items()
        }
    record |= {name: counts.get(name) for name in COUNTS["scheduler"]}
    if counts:
        for position, span in enumerate(header.spans):
            found = [end - begin for begin, end, at in calls if at == position]
            record[f"{span}_us"] = _us(sum(found)) if found else None
    return record


def _calls(numbers: list[float]) -> list[tuple[float, float, int]]:
    """(start, end, position) of each thing timed, what was called inside another before it."""
    calls: list[tuple[float, float, int]] = []
    open_times: list[float] = []
    for number in numbers:
        if number < 0:
            end, start = open_times.pop(), open_times.pop()
            # The inverse of step_probe.mark().
            calls.append((start, end, int(-1 - number)))
        else:
            open_times.append(number)
    return calls


def _spent_in_hooks(
    hooks: dict[int, _Hook], calls: list[tuple[float, float, int]]
) -> dict[str | None, dict[str, float]]:
    """Seconds by child (None: the connector itself) and hook, in the order of the positions.

    Args:
        calls: (start, end, position) of each thing timed.
    """
    ended: dict[int, float] = {}
    spent: dict[int, float] = {}
    for start, end, position in sorted(calls, key=lambda call: (call[0], -call[1])):
        hook = hooks.get(position)
        # Inside another hook of the same object: that one has the time already.
        if hook is None or start < ended.get(hook.group, 0):
            continue
        ended[hook.group] = end
        spent[position] = spent.get(position, 0) + (end - start)
    by_child: dict[str | None, dict[str, float]] = {}
    for position in sorted(spent):
        times = by_child.setdefault(hooks[position].child, {})
        name = hooks[position].name
        # Two children may have one name.
        times[name] = times.get(name, 0) + spent[position]
    return by_child


def _us(seconds: float) -> float:
    microseconds = seconds * 1e6
    digits = 3 - math.floor(math.log10(microseconds)) if microseconds >= 1000 else 1
    return round(microseconds, digits)

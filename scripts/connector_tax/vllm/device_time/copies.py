# CONNECTOR_TAX_PATCH
"""Emulate the copy engines: a link to the host's memory, with streams and events in device time.

No byte moves. A copy's end is known when it is submitted: once earlier work on its stream is done
and its direction of the link is free, it takes its bytes over the bandwidth. The submitting thread
uses the CPU for it, without the GIL, as in a driver's call.
"""

import math
import mmap
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

_now = time.monotonic_ns
# Large enough for zlib to release the GIL.
_WORK = bytes(1 << 16)
# Not in Python's mmap before 3.13.
_MAP_NORESERVE = 0x4000


class Copy(NamedTuple):
    """A submitted copy; times are CLOCK_MONOTONIC ns, in the order of its log.

    Attributes:
        submitted_ns: when the host began to submit it.
        end_ns: when its last byte has arrived.
        host_ns: CPU time of the submitting thread.
    """

    submitted_ns: int
    end_ns: int
    size: int
    pieces: int
    host_ns: int


class Stream:
    """A stream of copies; `when_ns` is when everything queued on it is done."""

    by_handle: dict[int, "Stream"] = {}  # noqa: RUF012 (of the process)

    def __init__(self, *_args: Any, **_options: Any) -> None:
        self.when_ns = 0
        self.cuda_stream = len(self.by_handle) + 1
        self.by_handle[self.cuda_stream] = self

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -1

    def wait_stream(self, other: Any) -> None:
        self.when_ns = max(self.when_ns, other.when_ns)

    def wait_event(self, event: Any) -> None:
        self.when_ns = max(self.when_ns, event.when_ns)

    def synchronize(self) -> None:
        sleep_until(self.when_ns)


class Compute:
    """The device's own stream, which is its queue of steps; no copy delays it."""

    def __init__(self, free_ns: Callable[[], int]) -> None:
        self._free_ns = free_ns

    @property
    def when_ns(self) -> int:
        """Return when everything queued is done."""
        return self._free_ns()


def sleep_until(when_ns: int) -> None:
    """Sleep until a moment of CLOCK_MONOTONIC."""
    if (left := when_ns - _now()) > 0:
        time.sleep(left / 1e9)


class Link:
    """The link between a device and its host, with one server for each direction.

    Args:
        coefficients: the content of device_time.json.
        compute: the device's own stream.
        record: called with each submitted copy, from any thread.
    """

    def __init__(
        self, coefficients: Mapping[str, Any], compute: Any, record: Callable[[Copy], Any]
    ) -> None:
        self._bytes_s = coefficients["link_bytes_s"]
        self._submit_ns = coefficients["copy_us"] * 1e3
        self._piece_ns = coefficients["copy_piece_ns"]
        self._record = record
        self._compute = compute
        self._free_ns = {True: 0, False: 0}
        self._lock = threading.Lock()
        self._of_thread = threading.local()

    def copy(self, size: int, pieces: int, stream: Any, to_host: bool = True) -> None:
        """Queue a copy of `size` bytes in `pieces` on a stream; return when it is submitted."""
        begin = _now()
        until = begin + self._submit_ns + self._piece_ns * pieces
        with self._lock:
            start = max(begin, stream.when_ns, self._free_ns[to_host])
            end = start + round(size / self._bytes_s * 1e9)
            stream.when_ns = self._free_ns[to_host] = end
        while _now() < until:
            zlib.crc32(_WORK)
        self._record(Copy(begin, end, size, pieces, _now() - begin))

    def current_stream(self, *_device: Any) -> Any:
        """Return the stream that this thread has entered, or the device's own."""
        return getattr(self._of_thread, "stream", None) or self._compute

    def stream(self, stream: Any) -> Any:
        """Return a context in which `stream` is this thread's."""
        return _Entered(self._of_thread, stream)

    def event_class(self) -> type:
        """Return torch.Event: a moment of a stream."""
        link = self

        class Event:
            def __init__(self, *_args: Any, **_options: Any) -> None:
                self.when_ns = 0

            def record(self, stream: Any = None) -> None:
                self.when_ns = (stream or link.current_stream()).when_ns

            def query(self) -> bool:
                return _now() >= self.when_ns

            def elapsed_time(self, other: "Event") -> float:
                return (other.when_ns - self.when_ns) / 1e6

            def synchronize(self) -> None:
                sleep_until(self.when_ns)

        return Event


class _Entered:
    def __init__(self, of_thread: Any, stream: Any) -> None:
        self._of_thread, self._stream, self._before = of_thread, stream, None

    def __enter__(self) -> Any:
        self._before = getattr(self._of_thread, "stream", None)
        self._of_thread.stream = self._stream
        return self._stream

    def __exit__(self, *_: object) -> None:
        self._of_thread.stream = self._before


class Instead:
    """A stand-in for a module or object; `names` replace some of its attributes."""

    def __init__(self, original: Any, **names: Any) -> None:
        vars(self).update(names)
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def addresses(size: int) -> mmap.mmap:
    """Return `size` bytes of addresses; a page takes memory once it is written to."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return mmap.mmap(-1, size, flags=flags)


def zeros(shape: Any, dtype: Any, **_device: Any) -> Any:
    """Return torch.zeros(shape) as addresses without memory."""
    import torch

    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    return torch.frombuffer(addresses(math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)

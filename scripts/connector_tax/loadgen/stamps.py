"""Reading a socket with the time at which the kernel received the bytes.

A reader is called to read once, and returns the bytes, in a shared buffer, with their stamp:
when the kernel received the last segment among them, or, without kernel stamps, when the read
returned.
"""

import contextlib
import socket
import struct
import time

CLOCK_GAP_NS = 10_000
CLOCK_TRIES = 5
"""The two clocks are read between two readings of the one; further apart than CLOCK_GAP_NS, the
process was interrupted between them, and they are read again, up to CLOCK_TRIES times."""

_SO_TIMESTAMPNS = 35
_CONTROL_BYTES = socket.CMSG_SPACE(16)
_timespec = struct.Struct("qq").unpack_from
_monotonic_ns = time.monotonic_ns
_time_ns = time.time_ns


def enable_kernel_stamps(sock: socket.socket) -> bool:
    """Ask the kernel to stamp received segments (software, any interface); False if it cannot."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    except OSError:
        return False
    return True


def kernel_stamps_offered() -> bool:
    """True if this kernel offers receive stamps on a TCP socket."""
    with contextlib.closing(socket.socket()) as sock:
        return enable_kernel_stamps(sock)


class StampCounts:
    """What a pool's connections read: `reads`, those among them that were stamped by this process
    though the kernel was asked (`unstamped`), and those that read the clocks again (`clock_gaps`).
    """

    __slots__ = ("clock_gaps", "reads", "unstamped")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Count from zero."""
        self.reads = self.unstamped = self.clock_gaps = 0


def _read_clocks() -> tuple[int, int]:
    """Monotonic and wall time in ns, read as close together as some tries allow."""
    best = (1 << 62, 0, 0)
    for _ in range(CLOCK_TRIES):
        now, wall = _monotonic_ns(), _time_ns()
        best = min(best, (_monotonic_ns() - now, now, wall))
        if best[0] <= CLOCK_GAP_NS:
            break
    return best[1], best[2]


class KernelReader:
    """Reads `sock` with the kernel's stamps.

    `not_before_ns`: nothing read from here on can have arrived earlier (the last write, or read).
    """

    __slots__ = ("_buffer", "_buffers", "_receive", "_stamps", "not_before_ns")

    def __init__(self, sock: socket.socket, buffer: memoryview, stamps: StampCounts) -> None:
        self._receive = sock.recvmsg_into
        self._buffer = buffer
        self._buffers = [buffer]
        self._stamps = stamps
        self.not_before_ns = 0

    def __call__(self) -> tuple[memoryview, int]:
        """Read once; raises OSError."""
        size, control, _, _ = self._receive(self._buffers, _CONTROL_BYTES)
        stamp = now = _monotonic_ns()
        stamps = self._stamps
        stamps.reads += 1
        if control:
            # The kernel stamps in wall time; its age carries over to the monotonic clock.
            seconds, ns = _timespec(control[0][2])
            wall = _time_ns()
            if _monotonic_ns() - now > CLOCK_GAP_NS:
                stamps.clock_gaps += 1
                now, wall = _read_clocks()
            stamp = now - (wall - (seconds * 1_000_000_000 + ns))
        # A stamp out of these bounds was taken before a step of the wall clock.
        if size and (not control or not self.not_before_ns <= stamp <= now):
            stamps.unstamped += 1
            stamp = now
        self.not_before_ns = stamp
        return self._buffer[:size], stamp


class PlainReader:
    """Reads `sock` and stamps when the read has returned."""

    __slots__ = ("_buffer", "_receive", "not_before_ns")

    def __init__(self, sock: socket.socket, buffer: memoryview) -> None:
        self._receive = sock.recv_into
        self._buffer = buffer
        self.not_before_ns = 0

    def __call__(self) -> tuple[memoryview, int]:
        """Read once; raises OSError."""
        size = self._receive(self._buffer)
        return self._buffer[:size], _monotonic_ns()

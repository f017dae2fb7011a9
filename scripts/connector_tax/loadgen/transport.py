"""Connect the processes: ZMQ over ipc, the number of requests in flight, an event loop's lag.

A ZMQ descriptor is edge-triggered: it signals once, and not again until everything has been taken.
So every wake-up drains: the receiver until nothing is left, the sender until the socket is full or
its backlog empty. The waiting task is woken once for all messages.

If workers checked the number in flight and then raised it, several could take the last place at
once. A process-shared POSIX semaphore, sem_overview(7), takes a place atomically, without a system
call and on every architecture. Counts beside it record how many places each worker holds, because a
worker that dies does not give them back.
"""

import asyncio
import ctypes
import mmap
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from connector_tax.linux import TimerFd
from connector_tax.ranks import at_least

MAX_MESSAGE = 16 * 1024 * 1024
"""Largest frame between the processes, in bytes."""
BACKLOG = 65536


def private_socket(context: "zmq.Context[zmq.Socket[bytes]]", kind: int) -> "zmq.Socket[bytes]":
    """Return a PUSH or PULL socket that never blocks its process's exit and never reconnects."""
    socket = context.socket(kind)
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = 8192
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    return socket


class Sender:
    """A non-blocking sender of messages; at most `backlog` wait in memory.

    `dropped` counts messages refused because the backlog was full: a peer that no longer reads must
    not make this process grow or spin.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        socket: "zmq.Socket[bytes]",
        backlog: int = BACKLOG,
    ) -> None:
        self._loop = loop
        self._socket = socket
        self._limit = backlog
        self._backlog: deque[bytes] = deque()
        self.dropped = 0
        self._fd: int = socket.fileno()
        loop.add_reader(self._fd, self._drain)

    def send(self, message: bytes) -> bool:
        """Send or queue a message; return False if it was dropped because the backlog was full."""
        if not self._backlog and self._try(message):
            return True
        if len(self._backlog) >= self._limit:
            self.dropped += 1
            return False
        self._backlog.append(message)
        # Otherwise the edge that announces room could be missed between the try and the append.
        self._drain()
        return True

    def close(self) -> None:
        """Close the socket and discard queued messages."""
        self._loop.remove_reader(self._fd)
        self._socket.close()

    def _try(self, message: bytes) -> bool:
        try:
            self._socket.send(message, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _drain(self) -> None:
        backlog = self._backlog
        writable = True
        while writable:
            while backlog and self._try(backlog[0]):
                backlog.popleft()
            # Reading the events consumes the edge, so that the next one is signalled. The events
            # include a peer that attached since the last try; no later edge reports that peer.
            events = int(self._socket.getsockopt(zmq.EVENTS))
            writable = bool(backlog) and bool(events & zmq.POLLOUT)


class Receiver:
    """A receiver that decodes each message and passes it to `on_message`.

    Bad ones are counted, never raised: `undecodable` (not of the expected type) and `oversized`
    (longer than MAX_MESSAGE).
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        socket: "zmq.Socket[bytes]",
        decoder: "msgspec.msgpack.Decoder[Any]",
        on_message: Callable[[Any], None],
    ) -> None:
        self._loop = loop
        self._socket = socket
        self._decode = decoder.decode
        self._on_message = on_message
        self.undecodable = 0
        self.oversized = 0
        self._fd: int = socket.fileno()
        loop.add_reader(self._fd, self.drain)
        # An edge that came before the reader was registered would never be seen.
        loop.call_soon(self.drain)

    def drain(self) -> None:
        """Receive every message that has arrived."""
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if len(frame) > MAX_MESSAGE:
                self.oversized += 1
                continue
            try:
                message = self._decode(frame.buffer)
            except msgspec.DecodeError:  # a ValidationError is a DecodeError
                self.undecodable += 1
                continue
            self._on_message(message)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        self._socket.close()


# More than any C library's sem_t, which has 32 bytes in glibc and in musl.
_SEMAPHORE_BYTES = 64
_SEM_VALUE_MAX = 2**31 - 1

# PyDLL: the calls never block, so the interpreter lock need not be let go, which would cost more.
_libc = ctypes.PyDLL(None)
_sem_init, _sem_trywait, _sem_post = _libc.sem_init, _libc.sem_trywait, _libc.sem_post
_sem_init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
_sem_trywait.argtypes = _sem_post.argtypes = (ctypes.c_void_p,)


def shared_memory(workers: int) -> int:
    """Return a descriptor of the memory that `InFlight` shares among `workers` processes."""
    descriptor = os.memfd_create("loadgen-inflight")
    os.ftruncate(descriptor, _SEMAPHORE_BYTES + 8 * workers)
    return descriptor


class InFlight:
    """One process's view of the requests in flight.

    At every instant the counts add up to no more than the cap: a request is counted only after it
    has taken its place, and uncounted before it gives the place back.
    """

    def __init__(self, descriptor: int, workers: int) -> None:
        self._memory = mmap.mmap(descriptor, _SEMAPHORE_BYTES + 8 * workers)
        self._semaphore = (ctypes.c_char * _SEMAPHORE_BYTES).from_buffer(self._memory)
        self._address = ctypes.addressof(self._semaphore)
        with memoryview(self._memory) as whole, whole[_SEMAPHORE_BYTES:] as counts:
            self._counts = counts.cast("q")

    def limit(self, cap: int) -> None:
        """Allow `cap` requests in flight, including those in flight now; 0 means no limit."""
        free = max(0, (cap or _SEM_VALUE_MAX) - self.count())
        _sem_init(self._address, 1, free)

    def count(self) -> int:
        """Return the requests in flight in all workers, read one worker after the other."""
        return sum(self._counts)

    def enter(self, worker: int) -> bool:
        """Count a request of `worker` as in flight; at the cap, count nothing and return False."""
        if _sem_trywait(self._address) != 0:
            return False
        self._counts[worker] += 1
        return True

    def leave(self, worker: int) -> None:
        self._counts[worker] -= 1
        _sem_post(self._address)

    def forget_worker(self, worker: int) -> int:
        """Release every request of a worker that died; return their number.

        If the worker died after taking a place and before counting it, that place is lost until the
        next `limit`.
        """
        count = self._counts[worker]
        while self._counts[worker] > 0:
            self.leave(worker)
        return count

    def close(self) -> None:
        self._counts.release()
        del self._semaphore
        self._memory.close()


class LoopProbe:
    """A probe of an event loop's lag: the delay of a tick that is due every 10 ms."""

    INTERVAL_NS = 10_000_000

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = TimerFd(loop, self._tick)
        self.reset()

    def reset(self) -> None:
        self.lags_ns: list[int] = []
        self._cpu_ns = time.process_time_ns()
        self.start_ns = time.monotonic_ns()
        self._due_ns = self.start_ns + self.INTERVAL_NS
        self._timer.arm(self._due_ns, self.INTERVAL_NS)

    def values(self) -> dict[str, float]:
        """Return lag p99 and max in ms (0 before the first tick) and the process's CPU share.

        The p99 is the lower end of its 95% interval, because in a cell of three seconds a single
        stall of 30 ms is already 1% of the ticks.
        """
        lags = sorted(self.lags_ns) or [0]
        wall_ns = max(time.monotonic_ns() - self.start_ns, 1)
        return {
            "loop_lag_p99_ms": at_least(lags, 99) / 1e6,
            "loop_lag_max_ms": lags[-1] / 1e6,
            "cpu_share": (time.process_time_ns() - self._cpu_ns) / wall_ns,
        }

    def close(self) -> None:
        self._timer.close()

    def _tick(self) -> None:
        late_ns = max(time.monotonic_ns() - self._due_ns, 0)
        # Every tick that a stuck loop missed counts with its lateness: a stall of a second among
        # sixty is 1.7% of the samples.
        self.lags_ns += range(late_ns, -1, -self.INTERVAL_NS)
        self._due_ns += self.INTERVAL_NS * (1 + late_ns // self.INTERVAL_NS)

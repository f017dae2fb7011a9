"""The engine's device: a worker process that spends the time of each step.

Fixed-size frames pass over a socket pair, one step at a time; nothing polls. The step's times are
CLOCK_MONOTONIC ns. The device answers a moment before the deadline, which the receiver waits for.

    to the device     start_ns, host_tax_us, load_tax_us, prefill_tokens, decode_seqs, kv_tokens
    from the device   a byte when it is ready, then for each step device_start_ns, deadline_ns
"""

import asyncio
import contextlib
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import asdict

from connector_tax.engine.model import StepClock, StepCost
from connector_tax.linux import die_with_parent, ignore_warning, sharpen_timers

_STEP, _TIMES = struct.Struct("<qdd3q"), struct.Struct("<2q")
_READY = b"!"
_START_LIMIT_S = 60.0
_STOP_GRACE_S = 0.5
# The worker hands a step over this long before its end: the sleep ends late, and the way to the
# main process and preparing the step's events there take most of it.
_HAND_OVER_NS = 250_000
# More than a processor's last-level cache.
_STREAM_BYTES = 256 * 2**20


class WorkerDied(Exception):
    """The worker process ended, was never ready, or has been stopped."""


class StepDevice(asyncio.Protocol):
    """The engine's end of the socket to its worker process.

    Args:
        cost, launch_seed: of the steps.
        stream_mib: memory that each step reads; a step too short for that ends late.
        on_death: called once if the process ends on its own after its start.
    """

    def __init__(
        self,
        cost: StepCost,
        launch_seed: int,
        stream_mib: float,
        on_death: Callable[[WorkerDied], None],
    ) -> None:
        self._arguments = json.dumps([asdict(cost), launch_seed, stream_mib])
        self._on_death = on_death
        self._process: asyncio.subprocess.Process | None = None
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._answer: asyncio.Future[bytes] | None = None
        self._wanted = 0
        self._gone: WorkerDied | None = None
        self._ready = False

    async def start(self) -> None:
        """Launch the worker process; returns when it is ready.

        Raises:
            WorkerDied: it ended before that, or took too long.
        """
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            self._transport, _ = await loop.create_unix_connection(lambda: self, sock=ours)
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "connector_tax.engine.device"),
                *(str(theirs.fileno()), str(os.getpid()), self._arguments),
                pass_fds=(theirs.fileno(),),
            )
        try:
            async with asyncio.timeout(_START_LIMIT_S):
                await self._next(len(_READY))
        except TimeoutError:
            raise WorkerDied(
                f"worker process {self._process.pid} was not ready in {_START_LIMIT_S:g} s"
            ) from None
        self._ready = True

    async def spend(
        self, start_ns: int, host_tax_us: float, load_tax_us: float, *shape: int
    ) -> tuple[int, int]:
        """Where the device's part of a step starts, and the step's deadline.

        Raises:
            WorkerDied: nobody is there to answer.
        """
        if self._gone is not None:
            raise self._gone
        assert self._transport is not None
        self._transport.write(_STEP.pack(start_ns, host_tax_us, load_tax_us, *shape))
        device_start, deadline = _TIMES.unpack(await self._next(_TIMES.size))
        return device_start, deadline

    async def stop(self) -> None:
        """End the worker process; calling twice is safe."""
        self._lose(WorkerDied("the device has been stopped"))
        if self._transport is not None:
            self._transport.close()
        if self._process is not None and self._process.returncode is None:
            # In a cancelled task Python 3.11.2's asyncio.timeout() raises CancelledError.
            ended = asyncio.ensure_future(self._process.wait())
            if not (await asyncio.wait({ended}, timeout=_STOP_GRACE_S))[0]:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await ended

    def _next(self, size: int) -> "asyncio.Future[bytes]":
        """The next bytes of the device, as many as asked for."""
        self._wanted = size
        self._answer = asyncio.get_running_loop().create_future()
        if self._gone is not None:
            self._answer.set_exception(self._gone)
        return self._answer

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if len(self._buffer) < self._wanted or self._answer is None or self._answer.done():
            return
        self._answer.set_result(bytes(self._buffer[: self._wanted]))
        del self._buffer[: self._wanted]

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        if self._gone is None:
            pid = self._process.pid if self._process is not None else "?"
            error = WorkerDied(f"worker process {pid} ended unexpectedly")
            self._lose(error)
            if self._ready:
                self._on_death(error)

    def _lose(self, error: WorkerDied) -> None:
        if self._gone is not None:
            return
        self._gone = error
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)


class _Steps:
    """What the worker process does."""

    def __init__(self, cost: dict[str, float], launch_seed: int, stream_mib: float) -> None:
        self._clock = StepClock(StepCost(**cost), launch_seed)
        self._streamed = round(stream_mib * 2**20) // 8
        self._position = 0
        if self._streamed:
            # Imported late: most engines stream nothing.
            import numpy as np

            # What is read comes from memory: it has left every cache when its turn comes again.
            self._memory = np.ones(max(self._streamed, _STREAM_BYTES // 8))
        sharpen_timers()

    def spend(
        self, start_ns: int, host_tax_us: float, load_tax_us: float, *shape: int
    ) -> tuple[int, int]:
        """Spend a step, nearly to its deadline."""
        host_us, device_us = self._clock.draw_us(*shape)
        device_start = start_ns + round((host_us + host_tax_us) * 1000)
        deadline = device_start + round((load_tax_us + device_us) * 1000)
        if self._streamed:
            self._stream()
        ahead = deadline - time.monotonic_ns() - _HAND_OVER_NS
        if ahead > 0:
            time.sleep(ahead / 1e9)
        return device_start, deadline

    def _stream(self) -> None:
        if self._position + self._streamed > len(self._memory):
            self._position = 0
        self._memory[self._position : self._position + self._streamed].sum()
        self._position += self._streamed


def _serve(descriptor: int, parent: int, arguments: str) -> None:
    """Spend steps until the engine closes its end, which it may do in the middle of one."""
    die_with_parent(parent)
    ignore_warning()
    os.set_inheritable(descriptor, False)
    steps = _Steps(*json.loads(arguments))
    with (
        socket.socket(fileno=descriptor) as connection,
        contextlib.suppress(BrokenPipeError, ConnectionResetError),
    ):
        connection.sendall(_READY)
        while len(frame := connection.recv(_STEP.size, socket.MSG_WAITALL)) == _STEP.size:
            connection.sendall(_TIMES.pack(*steps.spend(*_STEP.unpack(frame))))


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])

"""The batched service's end of the socket to its worker process."""

import asyncio
import os
import socket
import sys
from collections.abc import Callable

from connector_tax.engine.service_errors import ServiceStopped, WorkerDied
from connector_tax.engine.transformer import split_frames


class WorkerConnection(asyncio.Protocol):
    """The socket to one worker process; silent once it is closed from this side.

    Args:
        on_frame: called with the body of each frame but the first, in the order they were sent.
        on_lost: called when the worker process closes its end after its first frame.

    Attributes:
        first: the body of the first frame; ServiceStopped or WorkerDied if none comes.
    """

    def __init__(self, on_frame: Callable[[bytes], None], on_lost: Callable[[], None]) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._closed = False
        self._buffer = bytearray()
        self.first: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def launch(self) -> asyncio.subprocess.Process:
        """Start the worker process at the other end."""
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            self._transport, _ = await asyncio.get_running_loop().create_unix_connection(
                lambda: self, sock=ours
            )
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "connector_tax.engine.worker_process"),
                *(str(theirs.fileno()), str(os.getpid())),
                pass_fds=(theirs.fileno(),),
            )

    def write(self, frame: bytes) -> None:
        """Send a frame."""
        assert self._transport is not None
        self._transport.write(frame)

    def close(self) -> None:
        """Close this end."""
        self._closed = True
        if not self.first.done():
            self.first.set_exception(ServiceStopped("the service has been stopped"))
            self.first.exception()  # Nobody may wait for it any more.
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        for body in split_frames(self._buffer):
            if not self.first.done():
                self.first.set_result(body)
            elif not self._closed:
                self._on_frame(body)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        if not self.first.done():
            self.first.set_exception(WorkerDied("the worker process ended unexpectedly"))
        elif not self._closed:
            self._on_lost()

"""A worker's process as the main process sees it: its start, its descriptor, its end."""

import asyncio
import os
import subprocess
import sys

import msgspec

from connector_tax.loadgen.messages import LoadGeneratorError, WorkerSettings
from connector_tax.loadgen.transport import Sender

START_S = 60.0


class WorkerProcess:
    """Started by the constructor, on `cpus` if there are any.

    `sender` is its way in, once there is one; `pidfd` becomes readable when it ends;
    `outstanding` requests were sent to it and have not come back.
    """

    def __init__(self, settings: WorkerSettings, cpus: tuple[int, ...] | None) -> None:
        self.settings = settings
        self.index = settings.worker
        self.sender: Sender | None = None
        self.outstanding = 0
        own = os.sched_getaffinity(0)
        if cpus is not None:
            # Inherited, so that the worker's memory comes from its own node from the first page on.
            os.sched_setaffinity(0, cpus)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "connector_tax.loadgen.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(settings.inflight_fd,),
            )
        finally:
            os.sched_setaffinity(0, own)
        self.pidfd = os.pidfd_open(self.process.pid)

    async def wait_up(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait for the worker's first line, written once it can be told its settings.

        Raises:
            LoadGeneratorError: it ended, or did not write within START_S.
        """
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        readable: asyncio.Future[None] = loop.create_future()
        loop.add_reader(descriptor, _resolve, readable)
        try:
            await asyncio.wait_for(readable, START_S)
        except TimeoutError:
            raise LoadGeneratorError(f"worker {self.index} did not start") from None
        finally:
            loop.remove_reader(descriptor)
        if os.read(descriptor, 16) != b"up\n":
            raise LoadGeneratorError(f"worker {self.index} ended at its start; see its stderr")

    def tell_settings(self, folder: str) -> None:
        """Write its settings with the `folder` of the sockets to its standard input."""
        self.settings.folder = folder
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(self.settings) + b"\n")
        self.process.stdin.flush()

    def close(self) -> None:
        """End the process and let go of it."""
        os.close(self.pidfd)
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        if self.sender is not None:
            self.sender.close()


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)

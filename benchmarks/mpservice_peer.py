"""The same squares on PyPI's `mpservice`, for comparison; the import fails without it."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any

_mpserver: Any = import_module("mpservice.mpserver")


class SquaresWorker(_mpserver.Worker):  # type: ignore[misc]
    """Squares a batch."""

    def call(self, x: list[int]) -> list[int]:
        """The squares."""
        return [v * v for v in x]


@asynccontextmanager
async def peer(
    batch_size: int, wait_s: float, capacity: int
) -> AsyncIterator[Callable[[int], Awaitable[int]]]:
    """A running server with one worker process; yields its `do_one`."""
    servlet = _mpserver.ProcessServlet(
        SquaresWorker, cpus=[None], batch_size=batch_size, batch_wait_time=wait_s
    )
    async with _mpserver.AsyncServer(servlet, capacity=capacity) as server:
        yield server.call

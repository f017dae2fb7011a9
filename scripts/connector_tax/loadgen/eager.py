"""Start a coroutine at once, up to its first real suspension.

Python 3.12 has this as eager tasks. On 3.11 the same path is taken by hand: the first step runs
synchronously, and only a coroutine that really suspended becomes a task.
"""

import asyncio
import sys
from collections.abc import Coroutine, Generator
from typing import Any

if sys.version_info >= (3, 12):

    def start(
        loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, None]
    ) -> asyncio.Task[None] | None:
        """Run `coroutine` until it suspends; return its task, or None if it already ended."""
        task = asyncio.Task(coroutine, loop=loop, eager_start=True)
        return None if task.done() else task

else:

    def start(
        loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, None]
    ) -> asyncio.Task[None] | None:
        """Run `coroutine` until it suspends; return its task, or None if it already ended."""
        try:
            pending = coroutine.send(None)
        except StopIteration:
            return None
        return loop.create_task(_Started(coroutine, pending))

    class _Started(Coroutine[Any, Any, None]):
        """A coroutine that has suspended once, for a task to carry on from there.

        A generator around it would not do: one that is cancelled before its own first step ends
        without the coroutine ever resuming.
        """

        def __init__(self, coroutine: Coroutine[Any, Any, None], pending: Any) -> None:
            self._coroutine = coroutine
            self._pending = pending

        def send(self, value: None) -> Any:
            """The first time, hand the task what the coroutine awaits already."""
            pending, self._pending = self._pending, None
            return self._coroutine.send(value) if pending is None else pending

        def throw(self, *error: Any) -> Any:
            """Resume the coroutine with an exception; what it awaited ends as in any task."""
            pending, self._pending = self._pending, None
            if pending is not None:
                pending.cancel()
            return self._coroutine.throw(*error)

        def close(self) -> None:
            """End the coroutine."""
            self._coroutine.close()

        def __await__(self) -> Generator[Any, Any, None]:
            """Tasks ask for send and throw only."""
            raise NotImplementedError

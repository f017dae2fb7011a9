"""Start a coroutine at once, up to its first real suspension.

Python 3.12 has this as eager tasks. On 3.11 the same path is taken by hand: the first step runs
synchronously, and only a coroutine that really suspended becomes a task.
"""

import asyncio
import sys
import types
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
        return loop.create_task(_carry_on(coroutine, pending))

    @types.coroutine
    def _carry_on(coroutine: Coroutine[Any, Any, None], pending: Any) -> Generator[Any, Any, None]:
        while True:
            try:
                yield pending
            except BaseException as error:  # a cancellation of the task is for the coroutine
                try:
                    pending = coroutine.throw(error)
                except StopIteration:
                    return
            else:
                break
        yield from coroutine

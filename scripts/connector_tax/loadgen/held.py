"""A request while a worker holds it, from its arrival there to its result."""

import asyncio

from connector_tax.loadgen.messages import Done, Issue, RequestFailed
from connector_tax.loadgen.sse import Usage


class HeldRequest:
    """The request, its task and its time-out once it was fired, and its result so far."""

    __slots__ = (
        "abort",
        "body",
        "completion_tokens",
        "done",
        "prompt_tokens",
        "request_id",
        "task",
        "timeout",
    )

    def __init__(self, issue: Issue, body: bytes, done: Done) -> None:
        self.body = body
        self.request_id = issue.request_id
        self.prompt_tokens = issue.prompt_tokens
        self.completion_tokens = issue.completion_tokens
        self.done = done
        self.task: asyncio.Task[None] | None = None
        self.timeout: asyncio.TimerHandle | None = None
        self.abort: str | None = None

    def count(self, usage: Usage | None, events: int | None, required: bool) -> None:
        """Compare the server's count of tokens with what was asked for.

        Without one, and if none is required, the number of token events of a stream is taken.

        Raises:
            RequestFailed: `missing_usage` or `wrong_length`.
        """
        done = self.done
        if usage is None:
            if required:
                raise RequestFailed("missing_usage")
            done.completion_tokens, done.counted_by = events, "client"
            return
        done.prompt_tokens, done.completion_tokens = usage.prompt_tokens, usage.completion_tokens
        done.counted_by = "server"
        for name, wanted, got in (
            ("prompt", self.prompt_tokens, usage.prompt_tokens),
            ("completion", self.completion_tokens, usage.completion_tokens),
        ):
            if wanted is not None and wanted != got:
                raise RequestFailed("wrong_length", f"{got} {name} tokens, asked for {wanted}")

"""A request while a worker holds it, from its arrival there to its result."""

import asyncio

from connector_tax.loadgen.messages import RequestFailed, RequestRecord
from connector_tax.loadgen.sse import Usage


class HeldRequest:
    """The record with the body, its task and its time-out once it was fired, why it was ended."""

    __slots__ = ("abort", "body", "record", "task", "timeout")

    def __init__(self, record: RequestRecord, body: bytes) -> None:
        self.record = record
        self.body = body
        self.task: asyncio.Task[None] | None = None
        self.timeout: asyncio.TimerHandle | None = None
        self.abort: str | None = None

    def count(self, usage: Usage | None, events: int | None, strict: bool) -> None:
        """Compare the server's count of tokens with what was asked for.

        Without one, unless `strict`, the number of token events of a stream is taken.

        Raises:
            RequestFailed: `missing_usage` or `wrong_length`.
        """
        record = self.record
        if usage is None or usage.completion_tokens is None:
            if strict:
                raise RequestFailed("missing_usage")
            record.completion_tokens, record.counted_by = events, "client"
            return
        prompt, completion = usage.prompt_tokens, usage.completion_tokens
        record.prompt_tokens, record.completion_tokens = prompt, completion
        record.counted_by = "server"
        wanted_prompt, wanted = record.wanted
        if wanted is not None and wanted != completion:
            raise RequestFailed("wrong_length", f"{completion} completion tokens, not {wanted}")
        if wanted_prompt is not None and wanted_prompt != prompt:
            if strict:
                raise RequestFailed("wrong_length", f"{prompt} prompt tokens, not {wanted_prompt}")
            record.tolerated = "prompt_length"

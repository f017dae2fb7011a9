"""A request in a worker: its answer, read as it arrives, and whether what came is a success."""

import asyncio
from array import array
from typing import TYPE_CHECKING

from connector_tax.loadgen.http import Connection
from connector_tax.loadgen.messages import RequestFailed, RequestRecord
from connector_tax.loadgen.sse import (
    StreamAccumulator,
    Usage,
    decode_response,
    excerpt,
    text_of,
    whole_ids,
)

if TYPE_CHECKING:
    from connector_tax.loadgen.worker import Worker

DONE_GRACE_S = 1.0
"""How long the end of a stream may take after [DONE], where the load generator is not strict."""
ERROR_BYTES = 1000
MAX_BODY_BYTES = 64 * 1024 * 1024


def as_failure(error: Exception) -> RequestFailed:
    """How a request failed: a copy, which was never raised.

    A traceback holds frames with their bodies, and the collector does not run during a cell.
    """
    if isinstance(error, RequestFailed):
        return RequestFailed(error.kind, error.detail)
    return RequestFailed("internal_error", f"{type(error).__name__}: {error}")


class HeldRequest:
    """A request while a worker holds it; takes its answer, as the `Reader` of a connection.

    `connection` and `head`: since it was fired; `sent`: it holds a place among those in flight;
    `task` opens its connection.
    """

    __slots__ = (
        *("_accumulator", "_body", "_owner", "_patience", "_reads", "_size", "_stamp", "_status"),
        *("body", "connection", "head", "record", "sent", "task", "timeout"),
    )

    def __init__(self, owner: "Worker", record: RequestRecord, body: bytes) -> None:
        self._owner = owner
        self.record = record
        self.body = body
        self.head = b""
        self.connection: Connection | None = None
        self.sent = False
        self.task: asyncio.Task[None] | None = None
        self.timeout: asyncio.TimerHandle | None = None
        self._accumulator: StreamAccumulator | None = None
        self._reads = array("q") if owner.run.keep_reads else None
        self._patience: asyncio.TimerHandle | None = None
        self._stamp = 0
        self._status = 0
        self._body: list[bytes] = []
        self._size = 0

    # ---- what the connection tells

    def on_head(self, status: int, stamp: int) -> None:
        """Take the status."""
        self._status, self.record.t_headers_ns = status, stamp
        owner = self._owner
        if status == 200 and owner.settings.stream:
            self._accumulator = StreamAccumulator(owner.settings.chat, owner.run.capture)

    def on_body(self, chunk: bytes, stamp: int) -> None:
        """Take what one read brought: count its token events, or keep it for the end."""
        accumulator = self._accumulator
        if accumulator is None:
            self._keep(chunk)
            return
        self._stamp = stamp
        try:
            events = accumulator.feed(chunk)
        except Exception as error:  # whatever it is must reach the record
            self.fail(as_failure(error))
            return
        if events:
            record = self.record
            if record.t_first_token_ns is None:
                record.t_first_token_ns = stamp
                record.first_read_tokens = events
            if record.t_first_answer_ns is None and accumulator.answered:
                record.t_first_answer_ns = stamp
            record.t_last_token_ns = stamp
            if self._reads is not None:
                self._reads.append(stamp)
                self._reads.append(events)
        if accumulator.done and self._patience is None and not self._owner.settings.strict:
            self._patience = self._owner.loop.call_later(
                DONE_GRACE_S, self.on_failure, RequestFailed("request_timeout")
            )

    def on_end(self, stamp: int) -> None:
        """The answer is whole: let go of the connection, then check what came."""
        if self._status != 200:
            self.fail(RequestFailed("http_status", self._error_text("")))
            return
        self.record.t_done_ns = stamp
        self._check()

    def on_failure(self, failure: RequestFailed) -> None:
        """The connection failed, or the end of a stream that is over did not come."""
        accumulator = self._accumulator
        if self._status not in (0, 200):
            text = self._error_text(f" ({failure.kind})")
            self.fail(RequestFailed("http_status", text))
        elif accumulator is None or self._owner.settings.strict or not accumulator.ended_well:
            self.fail(failure)
        else:
            self.record.tolerated = "not_closed"
            self.record.t_done_ns = self._stamp
            self._check()

    def fail(self, failure: RequestFailed) -> None:
        """End it, whatever has come."""
        if self._stamp:
            self.record.t_done_ns = self._stamp
        self._owner.on_answered(self, failure)

    def stop(self) -> None:
        """Take no more."""
        if self._patience is not None:
            self._patience.cancel()
        if self._reads:
            self.record.raw_reads = self._reads.tobytes()

    # ---- inside

    def _keep(self, chunk: bytes) -> None:
        if self._status != 200:
            chunk = chunk[: ERROR_BYTES - self._size]
        self._size += len(chunk)
        self._body.append(chunk)
        if self._size > MAX_BODY_BYTES:
            self.fail(RequestFailed("oversized_event", f"body over {MAX_BODY_BYTES} bytes"))

    def _error_text(self, cut: str) -> str:
        """What an answer with another status says, cut off as it may be."""
        where = ""
        if 300 <= self._status < 400:
            assert self.connection is not None
            location = self.connection.location
            where = " to " + location.decode("latin-1") if location else " without Location"
        return f"{self._status}{where}: {excerpt(b''.join(self._body))}{cut}"

    def _check(self) -> None:
        self._owner.on_whole(self)
        failure = None
        try:
            if self._accumulator is None:
                self._check_body()
            else:
                self._check_stream(self._accumulator)
        except Exception as error:  # whatever it is must reach the record
            failure = as_failure(error)
        self._owner.on_answered(self, failure)

    def _check_stream(self, accumulator: StreamAccumulator) -> None:
        record, owner = self.record, self._owner
        if accumulator.lacks_done(owner.settings.strict):
            record.tolerated = "no_done"
        if owner.run.capture == "text":
            record.output = "".join(accumulator.text)
        elif owner.run.capture == "token_ids":
            record.output = whole_ids(accumulator.token_ids, accumulator.usage)
        self._count(accumulator.usage, accumulator.token_events)

    def _check_body(self) -> None:
        record, capture = self.record, self._owner.run.capture
        response = decode_response(b"".join(self._body))
        choice = response.choices[0] if response.choices else None
        if choice is None or choice.finish_reason is None:
            raise RequestFailed("missing_done", "no choice with a finish reason")
        record.t_first_token_ns = record.t_last_token_ns = record.t_first_answer_ns = (
            record.t_done_ns
        )
        if capture == "text":
            record.output = text_of(choice)
        elif capture == "token_ids":
            record.output = whole_ids(choice.token_ids or [], response.usage)
        self._count(response.usage, None)

    def _count(self, usage: Usage | None, events: int | None) -> None:
        """Compare the server's count of tokens with what was asked for.

        Without one, unless strict, the number of token events of a stream is taken; some servers
        count none where tokens came.

        Raises:
            RequestFailed: `missing_usage` or `wrong_length`.
        """
        record, strict = self.record, self._owner.settings.strict
        completion = None if usage is None else usage.completion_tokens
        if usage is None or completion is None or (completion == 0 and events and not strict):
            if strict:
                raise RequestFailed("missing_usage")
            record.completion_tokens, record.counted_by = events, "client"
            return
        prompt = usage.prompt_tokens
        record.prompt_tokens, record.completion_tokens = prompt, completion
        record.counted_by = "server"
        wanted_prompt, wanted = record.wanted
        if wanted is not None and wanted != completion:
            raise RequestFailed("wrong_length", f"{completion} completion tokens, not {wanted}")
        if wanted_prompt is not None and wanted_prompt != prompt:
            if strict:
                raise RequestFailed("wrong_length", f"{prompt} prompt tokens, not {wanted_prompt}")
            record.tolerated = "prompt_length"

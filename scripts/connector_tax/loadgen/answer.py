"""One answer: status, stream or body, and whether what came is a success."""

import asyncio
from array import array
from collections.abc import Callable

from connector_tax.loadgen.held import HeldRequest
from connector_tax.loadgen.http import Connection
from connector_tax.loadgen.messages import Begin, RequestFailed, WorkerSettings
from connector_tax.loadgen.sse import (
    StreamAccumulator,
    decode_response,
    excerpt,
    text_of,
    whole_ids,
)

DONE_GRACE_S = 1.0
"""How long the end of a stream may take after [DONE], where the load generator is not strict."""
ERROR_BYTES = 1000


class AnswerReader:
    """Reads the answers of one run."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        settings: WorkerSettings,
        run: Begin,
        release: Callable[[Connection], None],
    ) -> None:
        """`release`: called with the connection once the answer has been read from it."""
        self._loop = loop
        self._settings = settings
        self._run = run
        self._release = release

    async def read(self, request: HeldRequest, connection: Connection) -> None:
        """Read the answer to `request` into its record.

        Raises:
            RequestFailed: it is no success.
        """
        status = await connection.read_headers()
        if status != 200:
            raise RequestFailed("http_status", await _error_text(status, connection))
        if self._settings.stream:
            await self._stream(request, connection)
        else:
            await self._body(request, connection)

    async def _stream(self, request: HeldRequest, connection: Connection) -> None:
        record, run, settings = request.record, self._run, self._settings
        accumulator = StreamAccumulator(settings.chat, run.capture)
        reads = array("q") if run.keep_reads else None
        patience: asyncio.TimerHandle | None = None
        stamp = 0
        try:
            while chunks := await connection.read_chunks():
                for stamp, chunk in chunks:
                    events = accumulator.feed(chunk)
                    if events:
                        if record.t_first_token_ns is None:
                            record.t_first_token_ns = stamp
                            record.first_read_tokens = events
                        if record.t_first_answer_ns is None and accumulator.answered:
                            record.t_first_answer_ns = stamp
                        record.t_last_token_ns = stamp
                        if reads is not None:
                            reads.append(stamp)
                            reads.append(events)
                if accumulator.done and patience is None and not settings.strict:
                    patience = self._loop.call_later(DONE_GRACE_S, connection.give_up)
        except RequestFailed:
            if settings.strict or not accumulator.ended_well:
                raise
            record.tolerated = "not_closed"
        finally:
            if patience is not None:
                patience.cancel()
            if reads is not None:
                record.raw_reads = reads.tobytes()
            record.t_done_ns = connection.t_done_ns or stamp or None
        self._release(connection)  # early: the next request need not wait for the checks
        if accumulator.lacks_done(settings.strict):
            record.tolerated = "no_done"
        if run.capture == "text":
            record.output = "".join(accumulator.text)
        elif run.capture == "token_ids":
            record.output = whole_ids(accumulator.token_ids, accumulator.usage)
        request.count(accumulator.usage, accumulator.token_events, settings.strict)

    async def _body(self, request: HeldRequest, connection: Connection) -> None:
        record, capture = request.record, self._run.capture
        body = await connection.read_body()
        record.t_done_ns = connection.t_done_ns
        self._release(connection)
        response = decode_response(body)
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
        request.count(response.usage, None, self._settings.strict)


async def _error_text(status: int, connection: Connection) -> str:
    """What an answer with another status says, cut off as it may be."""
    body, cut = b"", ""
    try:
        while chunks := await connection.read_chunks():
            body += b"".join(chunk for _, chunk in chunks)[: ERROR_BYTES - len(body)]
    except RequestFailed as failure:
        cut = f" ({failure.kind})"
    where = ""
    if 300 <= status < 400:
        location = connection.location
        where = " to " + location.decode("latin-1") if location else " without Location"
    return f"{status}{where}: {excerpt(body)}{cut}"

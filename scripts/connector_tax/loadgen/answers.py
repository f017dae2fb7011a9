"""Read and check the answer to a request while a worker holds it."""

import asyncio
import re
import time
from array import array
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

from connector_tax.loadgen.http import Connection
from connector_tax.loadgen.messages import (
    PAUSE_LIMITS_NS,
    PAUSE_NS,
    TOO_MANY,
    RequestFailed,
    RequestRecord,
)
from connector_tax.loadgen.sse import (
    StreamAccumulator,
    Usage,
    check_finish,
    decode_response,
    excerpt,
    only_choice,
    usage_of,
    whole_ids,
)
from connector_tax.loadgen.turns import output_of

if TYPE_CHECKING:
    from connector_tax.loadgen.worker import Worker

_monotonic_ns = time.monotonic_ns
_SECONDS = re.compile(r"[0-9]+(\.[0-9]*)?").fullmatch
DONE_GRACE_S = 1.0
"""How long the end of a stream may take after [DONE], where the load generator is not strict."""
ERROR_BYTES = 1000
OPENING_BYTES = 200
"""Bytes kept from an answer without tokens, to quote in its error."""
NAMED_ANYWAY = ("error_event", "bad_finish", "missing_finish", "several_choices")
"""Failures whose text quotes the server, whatever the form of its answer."""
MAX_BODY_BYTES = 64 * 1024 * 1024


def as_failure(error: Exception) -> RequestFailed:
    """Return an exception as a new RequestFailed that holds no traceback.

    A traceback would keep frames and request bodies alive, since the garbage collector is off
    during a cell.
    """
    if isinstance(error, RequestFailed):
        return RequestFailed(error.kind, error.detail)
    return RequestFailed("internal_error", f"{type(error).__name__}: {error}")


def pause_ns(retry_after: str, now_s: float) -> int:
    """Return the pause in ns that a Retry-After header requests, within PAUSE_LIMITS_NS.

    The header holds seconds or a date; a missing or other text gives PAUSE_NS. `now_s`: wall time.
    Source: RFC 9110, section 10.2.3.
    """
    text = retry_after.strip()
    if _SECONDS(text):
        wait_s = float(text)
    else:
        try:
            wait_s = parsedate_to_datetime(text).timestamp() - now_s
        except ValueError:
            return PAUSE_NS
    shortest_ns, longest_ns = PAUSE_LIMITS_NS
    return round(min(max(wait_s * 1e9, shortest_ns), longest_ns))


class HeldRequest:
    """A request that a worker holds, and the `Reader` of its answer.

    `connection` and `head` are set when it is fired. `sent`: it is counted as in flight. `task`
    opens its connection.
    """

    __slots__ = (
        *("_accumulator", "_body", "_headers", "_mute", "_muted", "_owner", "_patience"),
        *(
            "_reads",
            "_silenced",
            "_silent",
            "_size",
            "_spoken_ns",
            "_status",
            "_whole",
            "body",
            "connection",
            "head",
        ),
        *("record", "sent", "task"),
    )

    def __init__(self, owner: "Worker", record: RequestRecord, body: bytes) -> None:
        self._owner = owner
        self.record = record
        self.body = body
        self.head = b""
        self.connection: Connection | None = None
        self.sent = False
        self.task: asyncio.Task[None] | None = None
        self._accumulator: StreamAccumulator | None = None
        self._reads = array("q") if owner.run.keep_reads else None
        self._patience: asyncio.TimerHandle | None = None
        self._status = 0
        self._whole = False
        self._headers: dict[bytes, bytes] = {}
        self._silent: list[tuple[int, int]] = []  # silent events by read: stamp, number
        self._mute: list[tuple[int, int]] = []  # mute events by read: stamp, number
        self._silenced = self._muted = 0  # numbers of silent and of mute events
        self._spoken_ns: int | None = None  # last token with text before the latest mute event
        self._body: list[bytes] = []
        self._size = 0

    # ---- callbacks of the connection

    def on_head(self, status: int, stamp: int) -> None:
        self._status, self.record.t_headers_ns = status, stamp
        owner = self._owner
        assert self.connection is not None
        self._headers = self.connection.headers
        if status == 200 and owner.stream:
            self._accumulator = StreamAccumulator(owner.chat, owner.run.capture)

    def on_body(self, chunk: bytes, stamp: int) -> None:
        """Handle the bytes of one read: count their tokens, or keep them until the end."""
        accumulator = self._accumulator
        if accumulator is None:
            self._keep(chunk)
            return
        record = self.record
        if record.t_first_token_ns is None:
            self._keep_opening(chunk)
        try:
            tokens = accumulator.feed(chunk)
        except Exception as error:  # whatever it is must reach the record
            self.fail(self._named(as_failure(error)))
            return
        if record.t_first_token_ns is None and accumulator.silent > self._silenced:
            self._silent.append((stamp, accumulator.silent - self._silenced))
            self._silenced = accumulator.silent
        if accumulator.mute > self._muted:
            self._note_mute(accumulator.mute - self._muted, tokens, stamp)
            self._muted = accumulator.mute
        if tokens:
            if record.t_first_token_ns is None:
                record.t_first_token_ns = stamp
                record.first_read_tokens = tokens
                if self.connection is not None:
                    self.connection.has_begun()
            if record.t_first_answer_ns is None and accumulator.answered:
                record.t_first_answer_ns = stamp
            record.t_last_token_ns = stamp
            if self._reads is not None:
                self._reads.append(stamp)
                self._reads.append(tokens)
        if accumulator.done and not (self._whole or self._patience or self._owner.strict):
            self._patience = self._owner.loop.call_later(
                DONE_GRACE_S, self.on_failure, RequestFailed("request_timeout")
            )

    def on_last(self, chunk: bytes, stamp: int) -> None:
        """Release the connection, then handle the last bytes of the answer.

        The release comes first so that the next request of a closed loop can start.
        """
        if self._status == 200:
            self.record.t_done_ns = stamp
            self._owner.leave(self)
        self._whole = True
        self.on_body(chunk, stamp)
        if self._owner.holds(self):
            self.on_end(stamp)

    def on_end(self, stamp: int) -> None:
        """Release the connection, then check the whole answer."""
        if self._status != 200:
            self._fail_by_status("")
            return
        self.record.t_done_ns = stamp
        self._check()

    def on_failure(self, failure: RequestFailed) -> None:
        """Handle a failed connection, or a finished stream that did not close."""
        accumulator = self._accumulator
        if self._status not in (0, 200):
            self._fail_by_status(f" ({failure.kind})")
        elif accumulator is None or self._owner.strict or not accumulator.done:
            self.fail(failure)
        elif not accumulator.ended_well:
            self.record.t_done_ns = _monotonic_ns()
            self._check()
        else:
            self.record.tolerated = "not_closed"
            self.record.t_done_ns = _monotonic_ns()
            self._check()

    def fail(self, failure: RequestFailed) -> None:
        self._owner.on_answered(self, failure)

    def stop(self) -> None:
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

    def _keep_opening(self, chunk: bytes) -> None:
        if self._size < OPENING_BYTES:
            self._body.append(chunk)
            self._size += len(chunk)

    def _note_mute(self, mute: int, tokens: int, stamp: int) -> None:
        self._mute.append((stamp, mute))
        if mute < tokens:
            self._spoken_ns = stamp
        elif len(self._mute) == 1 or self._mute[-2][0] != self.record.t_last_token_ns:
            self._spoken_ns = self.record.t_last_token_ns

    def _named(self, failure: RequestFailed) -> RequestFailed:
        """Return the failure; if no token came, quote the answer or name it `not_a_stream`."""
        kind = self._header(b"content-type", "none")
        encoded = self._encoding != "identity"
        accumulator = self._accumulator
        if accumulator is None or accumulator.tokens or failure.kind in NAMED_ANYWAY:
            return failure
        of_events = kind.partition(";")[0].strip().lower() == "text/event-stream"
        opening = excerpt(b"".join(self._body))
        if of_events and not encoded and (accumulator.heard or not opening):
            detail = f"{failure.detail}: {opening}" if opening else failure.detail
            return RequestFailed(failure.kind, detail)
        text = f"Content-Type {kind}, Content-Encoding {self._encoding}: {opening}"
        return RequestFailed("not_a_stream", text)

    @property
    def _encoding(self) -> str:
        return self._header(b"content-encoding", "identity").strip().lower()

    def _header(self, name: bytes, absent: str) -> str:
        value = self._headers.get(name)
        return absent if value is None else value.decode("latin-1")

    def _fail_by_status(self, cut: str) -> None:
        if self._status == TOO_MANY or self._status >= 500 or b"retry-after" in self._headers:
            self.record.pause_ns = pause_ns(self._header(b"retry-after", ""), time.time())
        self.fail(RequestFailed("http_status", self._error_text(cut)))

    def _error_text(self, cut: str) -> str:
        """Return an error for a status other than 200: status, redirect, body excerpt and `cut`."""
        where = ""
        if 300 <= self._status < 400:
            location = self._header(b"location", "")
            where = f" to {location}" if location else " without Location"
        if self._encoding != "identity":
            where += f" (Content-Encoding {self._encoding})"
        text = excerpt(b"".join(self._body)) or "no body"
        return f"{self._status}{where}: {text}{cut}"

    def _check(self) -> None:
        self._owner.leave(self)
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
        record.finish_reason = accumulator.end(owner.ends)
        try:
            if accumulator.lacks_done(owner.strict, owner.ends):
                record.tolerated = "no_done"
        except RequestFailed as failure:
            raise self._named(failure) from None
        if accumulator.silent_are_tokens(owner.strict, record.wanted[1]):
            self._add_silent(accumulator)
        if accumulator.mute_are_none():
            self._drop_mute(accumulator)
        if owner.run.capture == "text":
            record.output = output_of(accumulator.choices)
        elif owner.run.capture == "token_ids":
            record.output = whole_ids(accumulator.token_ids, accumulator.usage)
        record.token_events = accumulator.token_events
        self._count(accumulator.usage, accumulator.tokens)

    def _add_silent(self, accumulator: StreamAccumulator) -> None:
        """Count events without text as tokens (see `StreamAccumulator`) in the record."""
        record, silent = self.record, self._silent
        accumulator.add_silent()
        first_ns, tokens = silent[0]
        pairs = dict(silent)
        later_ns = record.t_first_token_ns
        if later_ns is None:
            record.t_last_token_ns = silent[-1][0]
        elif first_ns == later_ns:
            tokens += record.first_read_tokens or 0
        if record.t_first_answer_ns == later_ns:
            record.t_first_answer_ns = first_ns
        record.t_first_token_ns, record.first_read_tokens = first_ns, tokens
        self._add_to_reads(pairs)

    def _drop_mute(self, accumulator: StreamAccumulator) -> None:
        """Remove events that brought no token (see `StreamAccumulator`) from the record."""
        record, mute = self.record, dict(self._mute)
        accumulator.drop_mute()
        if record.first_read_tokens is not None and record.t_first_token_ns is not None:
            record.first_read_tokens -= mute.get(record.t_first_token_ns, 0)
        if record.t_last_token_ns in mute:
            record.t_last_token_ns = self._spoken_ns
        self._add_to_reads({stamp: -count for stamp, count in mute.items()})

    def _add_to_reads(self, pairs: dict[int, int]) -> None:
        if self._reads is not None:
            reads = iter(self._reads)
            for stamp, count in zip(reads, reads, strict=True):
                pairs[stamp] = pairs.get(stamp, 0) + count
            kept = sorted((stamp, count) for stamp, count in pairs.items() if count > 0)
            self._reads = array("q", [number for pair in kept for number in pair])

    def _check_body(self) -> None:
        record, owner = self.record, self._owner
        try:
            response = decode_response(b"".join(self._body), owner.run.capture == "text")
        except RequestFailed as failure:
            kind = self._header(b"content-type", "none")
            text = f"Content-Type {kind}, Content-Encoding {self._encoding}: {failure.detail}"
            raise RequestFailed(failure.kind, text) from None
        choice = only_choice(response)
        if choice is None or not choice.finish_reason:
            text = excerpt(b"".join(self._body))
            raise RequestFailed("missing_done", f"no choice with a finish reason: {text}")
        record.finish_reason = choice.finish_reason
        check_finish(choice.finish_reason, owner.ends)
        record.t_last_token_ns = record.t_done_ns
        if owner.run.capture == "text":
            record.output = output_of([choice])
        elif owner.run.capture == "token_ids":
            record.output = whole_ids(choice.token_ids or [], response.usage)
        self._count(usage_of(response), None)

    def _count(self, usage: Usage | None, events: int | None) -> None:
        """Record the token counts and compare the server's with the requested numbers.

        Unless `strict` is set, the number of token events replaces a missing server count, and
        also a server count of 0 if tokens came.
        """
        record, strict = self.record, self._owner.strict
        completion = None if usage is None else usage.completion_tokens
        if usage is None or completion is None or (completion == 0 and events and not strict):
            if strict:
                raise RequestFailed("missing_usage")
            record.completion_tokens, record.counted_by = events, "client"
            return
        prompt = usage.prompt_tokens
        record.cached_tokens = usage.cached_tokens
        record.prompt_tokens, record.completion_tokens = prompt, completion
        record.counted_by = "server"
        wanted_prompt, wanted = record.wanted
        if wanted is not None and wanted != completion:
            raise RequestFailed("wrong_length", f"{completion} completion tokens, not {wanted}")
        if wanted_prompt is not None and wanted_prompt != prompt:
            if strict:
                raise RequestFailed("wrong_length", f"{prompt} prompt tokens, not {wanted_prompt}")
            record.tolerated = "prompt_length"

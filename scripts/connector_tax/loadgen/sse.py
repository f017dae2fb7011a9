"""Server-sent events: split a stream into events and interpret a completion stream.

Source: WHATWG HTML, "Server-sent events", event stream interpretation (lines end in LF, CRLF or CR;
a blank line dispatches the event; lines that begin with a colon are comments).
"""

import json
import re
from collections.abc import Collection
from typing import Any

import msgspec

from connector_tax.loadgen.messages import GOOD_ENDS, RequestFailed

MAX_EVENT_BYTES = 4 * 1024 * 1024

_BOM = b"\xef\xbb\xbf"
_HEARTBEATS = {b"ping", b"heartbeat", b"keepalive", b"keep-alive", b"keep_alive"}
"""Names of events to ignore, whatever their data; compared in lower case."""
_DONE_LINES = (b"data: [DONE]", b"data:[DONE]")
_NO_DATA = {b"", b"null", b'""', *_HEARTBEATS}
"""Data of events to ignore, whatever their name."""


class EventSplitter:
    """A splitter of a byte stream, which may be cut anywhere, into blocks of whole events.

    Time is linear in the bytes fed: an unfinished event is kept in pieces, and they are joined
    once, when its blank line arrives.
    """

    __slots__ = ("_after_cr", "_ends_line", "_pending", "_pending_bytes")

    def __init__(self) -> None:
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._ends_line = False  # the last pending byte is a line feed
        self._after_cr = False  # a line feed at the start of the next chunk belongs to this CR

    def feed(self, chunk: bytes) -> bytes:
        r"""Return the events that `chunk` completes; their lines end in LF, each event in "\n\n".

        Raises:
            RequestFailed: `oversized_event` when an unfinished event exceeds MAX_EVENT_BYTES.
        """
        if self._after_cr or b"\r" in chunk:
            chunk = self._to_line_feeds(chunk)
            if not chunk:
                return b""
        if not self._pending and chunk.endswith(b"\n\n"):
            return chunk
        newline = chunk.rfind(b"\n\n")
        if newline >= 0:
            end = newline + 2
        elif self._ends_line and chunk.startswith(b"\n"):
            end = 1
        else:
            self._keep(chunk)
            return b""
        block = b"".join((*self._pending, chunk[:end]))
        self._pending.clear()
        self._pending_bytes = 0
        self._ends_line = False
        if end < len(chunk):
            self._keep(chunk[end:])
        return block

    @property
    def between_events(self) -> bool:
        """Return whether the next byte begins an event."""
        return not (self._pending or self._after_cr)

    @property
    def rest(self) -> bytes:
        """Return the bytes of the unfinished event, whose blank line has not arrived yet."""
        return b"".join(self._pending)

    def _keep(self, piece: bytes) -> None:
        self._pending.append(piece)
        self._pending_bytes += len(piece)
        self._ends_line = piece.endswith(b"\n")
        if self._pending_bytes > MAX_EVENT_BYTES:
            raise RequestFailed("oversized_event", f"more than {MAX_EVENT_BYTES} bytes")

    def _to_line_feeds(self, chunk: bytes) -> bytes:
        if self._after_cr and chunk.startswith(b"\n"):
            chunk = chunk[1:]
            self._after_cr = False
        if chunk:
            self._after_cr = chunk.endswith(b"\r")
        return chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


class Usage(msgspec.Struct):
    """The token counts that the server reports for an answer; None where a count is missing."""

    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None


def usage_of(response: "Response") -> Usage | None:
    """Return the token usage in a chunk or a whole response; None without counts.

    It is in `usage`, in the `usage` of a choice (Moonshot) or in the `usage` of `x_groq`.
    """
    inner = response.x_groq.get("usage") if isinstance(response.x_groq, dict) else None
    places = [response.usage, *(choice.usage for choice in response.choices or ()), inner]
    for counts in places:
        if isinstance(counts, dict):
            details = counts.get("prompt_tokens_details")
            cached = details.get("cached_tokens") if isinstance(details, dict) else None
            for name in ("cached_tokens", "prompt_cache_hit_tokens"):
                cached = counts.get(name) if cached is None else cached
            usage = Usage(
                _count(counts.get("prompt_tokens")),
                _count(counts.get("completion_tokens")),
                _count(cached),
            )
            if usage.prompt_tokens is not None or usage.completion_tokens is not None:
                return usage
    return None


def _count(value: Any) -> int | None:
    """Return a number of tokens, which servers also write as 3.0 or "3"; None for anything else."""
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if value >= 0 and value == value // 1 else None


_NO_TEXT = ("type", "id", "index", "role")


def has_text(value: Any) -> bool:
    """Return whether a field of a message, or a part of the field at any depth, contains text."""
    if isinstance(value, list):
        return any(map(has_text, value))
    if isinstance(value, dict):
        return any(has_text(part) for name, part in value.items() if name not in _NO_TEXT)
    return bool(value) and isinstance(value, str)


class Message(msgspec.Struct):
    """The `delta` of a chat chunk or the `message` of a chat response.

    Reasoning has one of two field names, depending on the server. Content may be a list of parts.
    """

    role: Any = None
    content: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None
    function_call: Any = None
    refusal: Any = None

    @property
    def reasons(self) -> bool:
        return has_text([self.reasoning, self.reasoning_content])

    @property
    def answers(self) -> bool:
        """Return whether the message contains text of the answer, a refusal or part of a call."""
        return has_text([self.content, self.tool_calls, self.function_call, self.refusal])


class Choice(msgspec.Struct):
    """One choice of a completion or chat chunk or response; unknown fields are ignored."""

    text: str | None = None
    delta: Message | None = None
    message: Message | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: Any = None
    index: Any = 0
    usage: Any = None

    @property
    def speaks(self) -> bool:
        """Return whether the choice contains text, reasoning or a part of a tool call."""
        delta = self.delta
        return bool(self.text) if delta is None else delta.reasons or delta.answers

    @property
    def is_plain(self) -> bool:
        """Return whether the choice contains neither token ids nor logprobs."""
        return self.token_ids is None and self.logprobs is None

    @property
    def counted(self) -> int | None:
        """Return the choice's number of token ids or logprobs; None without either."""
        if self.token_ids is not None:
            return len(self.token_ids)
        if isinstance(self.logprobs, dict):
            for name in ("content", "tokens"):
                if isinstance(self.logprobs.get(name), list):
                    return len(self.logprobs[name])
        return None


class Response(msgspec.Struct):
    """A chunk of a stream or a whole non-streaming response."""

    choices: list[Choice] | None = None
    usage: Any = None
    x_groq: Any = None
    error: Any = None
    object: Any = None


_decode = msgspec.json.Decoder(Response).decode


def only_choice(response: Response) -> Choice | None:
    """Return the choice of a response; None if it has none.

    Raises:
        RequestFailed: `several_choices`.
    """
    choices = response.choices
    if not choices:
        return None
    index = choices[0].index
    if len(choices) > 1 or (isinstance(index, int) and index > 0):
        raise RequestFailed(
            "several_choices", f"{len(choices)} in an event, the first of index {index}"
        )
    return choices[0]


# Any of these makes an event more than a plain token. With other spacing or field order the plain
# form is not recognised, and the event is decoded instead.
_PLAIN_TEXT = re.compile(rb'[^"\\\r\n]+').fullmatch
_NOT_PLAIN = (
    *(b'"finish_reason":"', b'"usage":{', b'"token_ids":[', b'"logprobs":{'),
    *(b'"choices":[]', b'"error"', b"[DONE]", b"event:"),
)
_TEXT, _CONTENT = b'"text":"', b'"content":"'
_REASONING = (b'"reasoning":"', b'"reasoning_content":"')


class StreamAccumulator:
    """The totals of one completion stream.

    An event that carries a choice is a *token event*: at light load vLLM sends one per output
    token, even if the token's text is empty (half of a UTF-8 character). An event that counts its
    tokens (token ids, logprobs, or usage in every event) adds that count; any other adds one. An
    event without text before any text, or whose usage counts no token, is `silent`: it may be a
    token or an opening event without one; `silent_are_tokens` decides at the end. An event without
    text after that is counted, and also in `mute`: `mute_are_none` decides. `answered`: a token
    that is not reasoning has come. `strange`: the first event that is no part of a completion.

    Where only counts are needed, plain token events after the first are counted without decoding
    JSON. A read usually brings one event that differs from an earlier one only in its text: the
    bytes before and after the text are compared directly. A block of several events is counted by
    substring search: inside a JSON string a quote is always escaped, so `"text":"` can only be the
    field itself. Requests ask for one choice (n = 1).
    """

    __slots__ = (
        "_capture",
        "_empty",
        "_first_block",
        "_has_count",
        "_more_tokens",
        "_plain_field",
        "_plain_head",
        "_plain_tail",
        "_silent_speaks",
        "_splitter",
        "_strange_data",
        "_with_usage",
        "answered",
        "choices",
        "done",
        "finish_reasons",
        "heard",
        "mute",
        "silent",
        "strange",
        "token_events",
        "token_ids",
        "usage",
    )

    def __init__(self, chat: bool, capture: str) -> None:
        self._splitter = EventSplitter()
        self._plain_field = _CONTENT if chat else _TEXT
        self._plain_head = self._plain_tail = b""
        self._capture = capture != "counts"
        self._first_block = True
        self.token_events = 0
        self.silent = 0
        self._silent_speaks = False
        self.mute = 0
        self._empty = 0  # events without a token, the silent ones among them
        self._more_tokens = 0  # tokens beyond one per token event
        self._with_usage = 0  # token and silent events that carried usage
        self.answered = False
        self.heard = False  # an event has come
        self.usage: Usage | None = None
        self.finish_reasons: list[str] = []  # each reason once
        self.strange: str | None = None
        self._has_count = False  # the latest decoded event counts its tokens
        self._strange_data = False  # `strange` is not a JSON object
        self.done = False
        self.choices: list[Choice] = []
        self.token_ids: list[int] = []

    @property
    def tokens(self) -> int:
        """Return the number of tokens, by the counts in the token events, or one per event."""
        return self.token_events + self._more_tokens

    def feed(self, chunk: bytes) -> int:
        """Process the next bytes of the body; return the number of tokens in their events.

        Raises:
            RequestFailed: `malformed_event`, `oversized_event`, `error_event` or `data_after_done`.
        """
        head, splitter = self._plain_head, self._splitter
        if (
            head
            and chunk.startswith(head)
            and chunk.endswith(self._plain_tail)
            and _PLAIN_TEXT(chunk, len(head), len(chunk) - len(self._plain_tail))
            and splitter.between_events
            and not self.done
        ):
            self.token_events += 1
            return 1
        block = splitter.feed(chunk)
        if not block:
            return 0
        events = self.token_events
        if events and not self._capture and not self.done:
            plain = self._count_plain(block)
            if plain:
                self.token_events = events + plain
                return plain
        before = events + self._more_tokens
        self._decode_block(block)
        return self.token_events + self._more_tokens - before

    def _count_plain(self, block: bytes) -> int:
        """Return the number of events in `block` if all are surely plain token events with text,
        else 0.
        """
        events = block.count(b"\n\n")
        if block.count(self._plain_field) != events:
            return 0
        if self._plain_field + b'"' in block:  # without text
            return 0
        for mark in _NOT_PLAIN:
            if mark in block:
                return 0
        if not self.answered and _CONTENT in block:
            return 0
        if events == 1:
            start = block.index(self._plain_field) + len(self._plain_field)
            end = block.find(b'"', start)
            if _PLAIN_TEXT(block, start, end):
                self._plain_head, self._plain_tail = block[:start], block[end:]
        return events

    @property
    def ended_well(self) -> bool:
        """Return whether the stream has sent [DONE] and a finish reason."""
        return self.done and bool(self.finish_reasons)

    def end(self, ends: Collection[str] = GOOD_ENDS) -> str | None:
        """Return the finish reason: the first that is not in `ends`, or else the last."""
        reasons = self.finish_reasons
        bad = [reason for reason in reasons if reason not in ends]
        return bad[0] if bad else reasons[-1] if reasons else None

    def lacks_done(self, strict: bool, ends: Collection[str] = GOOD_ENDS) -> bool:
        """Check a stream that the server ended; return True if only [DONE] is missing.

        Args:
            ends: the finish reasons that count as success.

        Raises:
            RequestFailed: `missing_done`; `missing_finish` for [DONE] without a finish reason;
                `bad_finish` for a reason not in `ends`; `malformed_event` for data that are no JSON
                object, unless the stream ended well, which makes them a heartbeat; errors of
                `decode_response` where the body is JSON instead of a stream.
        """
        reason = self.end(ends)
        if reason is not None:
            check_finish(reason, ends)
        if self._strange_data and (strict or reason is None):
            raise RequestFailed("malformed_event", self.strange)
        after = f"after {self.tokens} tokens" + (
            f"; an event was {self.strange}" * bool(self.strange)
        )
        if self.done:
            if reason is None:
                raise RequestFailed("missing_finish", after)
            return False
        rest = self._splitter.rest
        if rest.strip() in _DONE_LINES:
            rest = b""  # an event ends with a blank line
        if self._first_block and rest.lstrip().startswith(b"{"):
            decode_response(rest)
        if strict or reason is None or rest:
            cut = " in the middle of an event" if rest else ""
            raise RequestFailed("missing_done", f"ended{cut} {after}")
        return True

    def silent_are_tokens(self, strict: bool, wanted: int | None) -> bool:
        """Return whether `silent` events (see the class) were tokens, by the server's final count.

        If other events have text, silent events are tokens only if the answer's length was fixed:
        otherwise the count may include an end-of-sequence token without an event. With `strict`
        they are tokens unless the count leaves no room for them: a strictly checked server sends
        no event without a token.

        Args:
            wanted: the tokens that the answer had to have; None if any number is allowed.
        """
        count = None if self.usage is None else self.usage.completion_tokens
        if not self.silent or count == self.tokens > 0:
            return False
        if not self.tokens and self._silent_speaks:
            return True  # without token counts only the text decides
        fixed = not self.tokens or wanted == count
        return strict or (fixed and count is not None and count == self.tokens + self.silent)

    def mute_are_none(self) -> bool:
        """Return whether the server's final count excludes the events without text.

        Only events after the first text are meant.
        """
        count = None if self.usage is None else self.usage.completion_tokens
        return self.mute > 0 and count is not None and 0 < count == self.tokens - self.mute

    def drop_mute(self) -> None:
        """Remove the events without text from the number of tokens."""
        self.token_events -= self.mute
        self.mute = 0

    def add_silent(self) -> None:
        """Count the `silent` events (see the class) as tokens."""
        self.token_events += self.silent
        self.silent = 0

    def _decode_block(self, block: bytes) -> None:
        if self._first_block:
            self._first_block = False
            block = block.removeprefix(_BOM)
        for event in block.split(b"\n\n"):
            if event:
                self._decode_event(event)

    def _decode_event(self, event: bytes) -> None:
        kind = b"message"
        data: list[bytes] = []
        for line in event.split(b"\n"):
            field, _, value = line.partition(b":")
            if field == b"data":
                data.append(value.removeprefix(b" "))
            elif field == b"event":
                kind = value.strip().lower()
        self.heard = self.heard or bool(data)
        payload = (data[0] if len(data) == 1 else b"\n".join(data)).strip()
        if kind == b"error" and data:
            raise RequestFailed("error_event", excerpt(payload))
        if payload == b"[DONE]":
            self.done = True
            return
        if kind in _HEARTBEATS:
            return
        if not payload.startswith(b"{"):
            if kind == b"message" and payload.strip(b"[]: ").lower() not in _NO_DATA:
                self.strange, self._strange_data = self.strange or excerpt(payload), True
            return
        try:
            response = decode_response(payload, exact=self._capture)
        except RequestFailed as failure:
            if kind != b"message" and failure.kind == "malformed_event":
                return  # an event of another protocol
            raise
        if response.choices is None and response.usage is None:
            self.strange = self.strange or excerpt(payload)
        self._take(response)

    def _take(self, response: Response) -> None:
        usage, before = usage_of(response), self.usage
        if usage is not None:
            self.usage = usage
        choice = only_choice(response)
        if choice is None:
            return
        if choice.finish_reason and choice.finish_reason not in self.finish_reasons:
            self.finish_reasons.append(choice.finish_reason)
        tokens: int | None = 1
        if not (choice.text and usage is None and choice.is_plain):
            tokens = self._tokens_of(choice, usage, before)
        if tokens is None:
            return
        if self.done:
            raise RequestFailed("data_after_done")
        self._with_usage += usage is not None and usage.completion_tokens is not None
        if self._capture:
            self.choices.append(choice)
            self.token_ids.extend(choice.token_ids or ())
        if tokens == 0:
            self._empty += 1
            if not self.token_events:
                self.silent += 1
                self._silent_speaks = self._silent_speaks or choice.speaks
            return
        self.token_events += 1
        self._more_tokens += tokens - 1
        self.mute += not (choice.speaks or self._has_count)
        delta = choice.delta
        if delta is not None:
            self._plain_field = _CONTENT
            if delta.reasons and not delta.answers:
                self._plain_field = _REASONING[delta.reasoning is None]
            # Empty content that is counted is a token too: half of a character.
            half = delta.content == "" and not delta.reasons and self._has_count
            self.answered = self.answered or delta.answers or half
        else:
            self.answered = True

    def _tokens_of(self, choice: Choice, usage: Usage | None, before: Usage | None) -> int | None:
        """Return the number of tokens in an event.

        0 if the number is unknown, None if the event is not part of the answer.
        """
        speaks, delta = choice.speaks, choice.delta
        counted = choice.counted
        total = None if usage is None else usage.completion_tokens
        if (
            counted is None
            and total is not None
            and self._with_usage == self.token_events + self._empty
        ):
            # Every event so far had usage, so its growth is this event's number of tokens.
            counted = max(0, total - ((before and before.completion_tokens) or 0))
        self._has_count = counted is not None
        if counted:
            return counted
        content = choice.text if delta is None else delta.content
        opens = delta is not None and delta.role and not choice.finish_reason
        if not speaks and (content is None or opens):
            return None
        if counted == 0 or (total == 0 and speaks):
            return 0
        return 1 if speaks or self.token_events else 0


def check_finish(reason: str, ends: Collection[str]) -> None:
    """Check that the finish reason is in `ends`.

    Raises:
        RequestFailed: `bad_finish`.
    """
    if reason not in ends:
        raise RequestFailed("bad_finish", f"finish_reason {reason!r}")


def text_of(choice: Choice) -> str:
    """Return the text of the answer, without reasoning."""
    message = choice.delta or choice.message
    content = message.content if message else None
    return choice.text or (content if isinstance(content, str) else "")


def decode_response(payload: bytes, exact: bool = False) -> Response:
    """Decode a chunk or a whole response; with `exact`, require valid UTF-8 (the text is used).

    Raises:
        RequestFailed: `malformed_event` for anything else, `error_event` for an error object:
            `{"error": ...}` or `{"object": "error", "message": ...}`.
    """
    try:
        response = _decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        try:
            response = _decode_loosely(payload, exact)
        except (ValueError, RecursionError):
            raise RequestFailed("malformed_event", f"{error}: {excerpt(payload)}") from None
    if response.error is not None or response.object == "error":
        raise RequestFailed("error_event", excerpt(payload))
    return response


def _decode_loosely(payload: bytes, exact: bool) -> Response:
    """Decode JSON with bytes, control characters or numbers that JSON's grammar forbids.

    Raises:
        ValueError: `payload` is not even such JSON, or with `exact` the answer's text has such
            bytes.
    """
    document = json.loads(payload.decode(errors="surrogateescape"), strict=False)
    response = msgspec.convert(document, Response)
    if exact:
        for choice in response.choices or ():
            msgspec.json.encode((choice.text, choice.delta, choice.message))  # no lone surrogates
    return response


def whole_ids(token_ids: list[int], usage: Usage | None) -> list[int]:
    """Return the token ids after checking that there are as many as the server counted.

    Raises:
        RequestFailed: `missing_token_ids`.
    """
    if usage is not None and len(token_ids) != (usage.completion_tokens or 0):
        raise RequestFailed(
            "missing_token_ids", f"{len(token_ids)} ids for {usage.completion_tokens} tokens"
        )
    return token_ids


def excerpt(payload: bytes) -> str:
    """Return the first 200 bytes of `payload` as text, for an error message."""
    return " ".join(payload[:200].decode(errors="replace").split())

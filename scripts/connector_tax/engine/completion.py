"""Answer a completion or chat request with an event for each token, or with one JSON object.

The JSON has the shape of vLLM's OpenAI-compatible server. The constant parts of an event are built
once for each request.
"""

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from zlib import crc32

import msgspec

from connector_tax.engine.faults import FaultKind, Rule
from connector_tax.engine.http import LAST_CHUNK, HttpProtocol, Request, error_body
from connector_tax.engine.logs import RequestTruth

_SSE = b"text/event-stream; charset=utf-8"
TOKEN_BYTES = array("I").itemsize
# Odd, so that the tokens of an output cycle through a vocabulary of any even size.
_STRIDE = 2_654_435_761
_EOS_SPREAD = 256


class Vocabulary:
    """The emulated vocabulary, in which token i is the word `wi`, and white space separates words.

    Output tokens depend only on the prompt, so the same prompt always gets the same text.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._words = [b" w%d" % i for i in range(size)]

    def tokenize(self, text: str) -> list[int]:
        """Return one id for each word; a word outside the vocabulary is hashed."""
        return [self._id(word) for word in text.split()]

    def _id(self, word: str) -> int:
        if word.startswith("w") and word[1:].isascii() and word[1:].isdigit():
            number = int(word[1:])
            if number < self.size:
                return number
        return crc32(word.encode()) % self.size

    def output_word(self, seed: int, position: int) -> bytes:
        """Return the word at `position` of the output for a prompt with this seed; plain ASCII."""
        return self._words[(seed + position * _STRIDE) % self.size]

    def outside(self, ids: Sequence[int]) -> int | None:
        """Return one of the ids that is outside the vocabulary, or None."""
        for extreme in (min(ids), max(ids)):
            if not 0 <= extreme < self.size:
                return extreme
        return None


@dataclass(frozen=True)
class Answer:
    """The answer to a request, fixed when the request was accepted.

    Attributes:
        request_id: the client's X-Request-Id, or an id of the engine.
        finish_reason: stop or length.
    """

    request_id: str
    created: int
    model: str
    chat: bool
    stream: bool
    include_usage: bool
    prompt_tokens: int
    finish_reason: str
    seed: int

    @property
    def public_id(self) -> str:
        """Return the id that the response contains."""
        return f"{'chatcmpl' if self.chat else 'cmpl'}-{self.request_id}"

    def usage(self, completion_tokens: int) -> dict[str, Any]:
        """Return the token counts as vLLM's `usage` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
            "completion_tokens": completion_tokens,
            "prompt_tokens_details": None,
        }


class Completion:
    """The writer of one answer to one connection, and the engine's sink for its sequence.

    `on_end` is called once, with the true timing, when the response has ended.
    """

    def __init__(
        self,
        answer: Answer,
        request: Request,
        protocol: HttpProtocol,
        vocabulary: Vocabulary,
        fault: Rule | None,
        on_end: Callable[["Completion", RequestTruth], None],
    ) -> None:
        self.answer = answer
        self.finish_reason = answer.finish_reason
        self.t_arrival_ns = request.t_arrival_ns
        self.t_admitted_ns = 0
        self.t_first_ns = 0
        self.t_token_ns = 0
        self._protocol = protocol
        self._vocabulary = vocabulary
        self._fault = fault
        self._on_end = on_end
        self._chunked = request.chunked
        self._t_headers_ns = 0
        self._writes: list[tuple[int, int, int]] = []
        self._sent = 0
        self._done = False
        self._event = b""
        self._prefix, self._middle, self._tail = _event_parts(answer)

    # -- the engine's side ----------------------------------------------------------------------

    def begin(self) -> None:
        """Send the head of a streamed response."""
        if self.answer.stream:
            self._t_headers_ns = self._protocol.begin_body(_SSE)

    def prepare(self, position: int, *, last: bool) -> None:
        """Build the event of the token at `position`, which `token` will send."""
        if self.answer.stream:
            word = self._vocabulary.output_word(self.answer.seed, position)
            reason = b'"%b"' % self.finish_reason.encode() if last else b"null"
            self._event = b"%b%b%b%b%b" % (self._prefix, word, self._middle, reason, self._tail)

    def token(self, position: int, *, last: bool, deadline_ns: int) -> None:
        """Send the prepared token at `position`; the last token ends the response."""
        if self._done:
            return
        self._sent = position + 1
        if not self.answer.stream:
            if last:
                self.respond(200, msgspec.json.encode(self._whole()), deadline_ns)
            return
        if position == 0 and self.answer.chat:
            self.write_event(_chat_opening(self.answer), 0, deadline_ns)
        self.write_event(self._event, 1, deadline_ns)
        if last:
            self.end_stream(self.closing_events())

    def fail(self, message: str) -> None:
        """Report the engine's death: with an error event and a cut body, or an error response."""
        if self._done:
            return
        body = error_body(500, message)
        if self.answer.stream:
            self.write_event(b"data: %b\n\n" % body, 0, 0)
            self.cut("engine dead", reset=False)
        else:
            self.respond(500, body, 0, "engine dead")

    # -- writing --------------------------------------------------------------------------------

    def closing_events(self) -> list[bytes]:
        """Return the events that follow the last token."""
        done = b"data: [DONE]\n\n"
        if self.answer.include_usage:
            return [_usage_event(self.answer, self._sent), done]
        return [done]

    def frame(self, event: bytes) -> bytes:
        """Return `event` as an HTTP chunk, or unchanged for HTTP/1.0."""
        return b"%x\r\n%b\r\n" % (len(event), event) if self._chunked else event

    def write_event(self, event: bytes, tokens: int, deadline_ns: int) -> None:
        """Send an event with `tokens` tokens in a separate write."""
        self.write(self.frame(event), tokens, deadline_ns)

    def end_stream(self, events: list[bytes], outcome: str = "ok") -> None:
        """Send the last events and the end of the body in one write, and end the response."""
        rest = b"".join(self.frame(event) for event in events)
        self.write(rest + (LAST_CHUNK if self._chunked else b""), 0, 0)
        self.close(outcome)
        self._protocol.end()

    def cut(self, outcome: str, *, reset: bool) -> None:
        """End the connection in the middle of the body."""
        self.close(outcome)
        self._protocol.drop(reset=reset)

    def respond(self, status: int, body: bytes, deadline_ns: int, outcome: str = "ok") -> None:
        """Send the whole response at once."""
        self._t_headers_ns = time.monotonic_ns()
        self._writes.append((self._t_headers_ns, self._sent, deadline_ns))
        self.close(outcome)
        self._protocol.respond(status, body)

    def write(self, data: bytes, tokens: int, deadline_ns: int) -> None:
        """Send bytes that contain `tokens` tokens, and record the time of the write."""
        self._writes.append((self._protocol.write(data), tokens, deadline_ns))

    def close(self, outcome: str) -> None:
        """End the response and pass its true timing to `on_end`."""
        if self._done:
            return
        self._done = True
        self._on_end(
            self,
            RequestTruth(
                request_id=self.answer.request_id,
                t_arrival_ns=self.t_arrival_ns,
                t_headers_ns=self._t_headers_ns,
                writes=self._writes,
                prompt_tokens=self.answer.prompt_tokens,
                completion_tokens=self._sent,
                preemptions=0,
                fault=self._fault.kind if self._fault else None,
                outcome=outcome,
            ),
        )

    def _whole(self) -> dict[str, Any]:
        answer = self.answer
        words = [self._vocabulary.output_word(answer.seed, i) for i in range(self._sent)]
        text = b"".join(words).decode()
        choice: dict[str, Any] = {"index": 0}
        if answer.chat:
            choice["message"] = {"role": "assistant", "content": text, "tool_calls": []}
        else:
            choice["text"] = text
        choice |= {"logprobs": None, "finish_reason": self.finish_reason, "stop_reason": None}
        return {
            "id": answer.public_id,
            "object": "chat.completion" if answer.chat else "text_completion",
            "created": answer.created,
            "model": answer.model,
            "choices": [choice],
            "usage": answer.usage(self._sent),
        }


class FaultyCompletion(Completion):
    """A completion whose output passes through a queue, where a fault delays, alters or cuts it."""

    _fault: Rule

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._operations: deque[Callable[[], None]] = deque()
        self._paused = False
        self._gathered: list[bytes] = []

    def begin(self) -> None:
        if self._fault.kind is FaultKind.DELAY_HEADERS:
            self._pause()
        self._queue(super().begin)

    def token(self, position: int, *, last: bool, deadline_ns: int) -> None:
        fault = self._fault
        if position >= fault.after_tokens and not self._done:
            if fault.kind is FaultKind.STALL and position == fault.after_tokens:
                self._pause()
            elif fault.kind in (FaultKind.FIN, FaultKind.RST):
                self.cut(fault.kind, reset=fault.kind is FaultKind.RST)
            elif fault.kind is FaultKind.ERROR_EVENT:
                error = b"data: %b\n\n" % error_body(500, "injected fault")
                self.end_stream([error, b"data: [DONE]\n\n"], fault.kind)
        super().token(position, last=last, deadline_ns=deadline_ns)

    def closing_events(self) -> list[bytes]:
        events = super().closing_events()
        if self._fault.kind is FaultKind.NO_DONE:
            return events[:-1]
        if self._fault.kind is FaultKind.CRLF:
            return [event.replace(b"\n", b"\r\n") for event in events]
        return events

    def write_event(self, event: bytes, tokens: int, deadline_ns: int) -> None:
        kind = self._fault.kind
        if kind is FaultKind.CRLF:
            event = event.replace(b"\n", b"\r\n")
        if kind is FaultKind.COALESCE:
            self._gathered.append(self.frame(event))
            if len(self._gathered) >= self._fault.tokens:
                self._flush_gathered(deadline_ns)
        elif kind is FaultKind.SPLIT_EVENT:
            frame = self.frame(event)
            cut = 1 + self._fault.at_byte % (len(frame) - 1)
            self._queue(partial(super().write, frame[:cut], 0, deadline_ns))
            self._queue(self._pause)
            self._queue(partial(super().write, frame[cut:], tokens, deadline_ns))
        else:
            super().write_event(event, tokens, deadline_ns)

    def write(self, data: bytes, tokens: int, deadline_ns: int) -> None:
        self._queue(partial(super().write, data, tokens, deadline_ns))

    def end_stream(self, events: list[bytes], outcome: str = "ok") -> None:
        if self._gathered:
            self._flush_gathered(0)
        self._queue(partial(super().end_stream, events, outcome))

    def respond(self, status: int, body: bytes, deadline_ns: int, outcome: str = "ok") -> None:
        self._queue(partial(super().respond, status, body, deadline_ns, outcome))

    def _flush_gathered(self, deadline_ns: int) -> None:
        data, count = b"".join(self._gathered), len(self._gathered)
        self._gathered = []
        self.write(data, count, deadline_ns)

    # -- the queue ------------------------------------------------------------------------------

    def _queue(self, operation: Callable[[], None]) -> None:
        self._operations.append(operation)
        self._drain()

    def _drain(self) -> None:
        while self._operations and not self._paused:
            self._operations.popleft()()

    def _pause(self) -> None:
        self._paused = True
        asyncio.get_running_loop().call_later(self._fault.ms / 1000, self._resume)

    def _resume(self) -> None:
        self._paused = False
        if not self._done:
            self._drain()


def _opening(answer: Answer) -> bytes:
    fields = {
        "id": answer.public_id,
        "object": "chat.completion.chunk" if answer.chat else "text_completion",
        "created": answer.created,
        "model": answer.model,
    }
    return msgspec.json.encode(fields)[:-1]


def _event_parts(answer: Answer) -> tuple[bytes, bytes, bytes]:
    """Return an event in three parts, which the word and the finish reason separate."""
    head = b"data: %b" % _opening(answer)
    if answer.chat:
        before = b',"choices":[{"index":0,"delta":{"content":"'
        middle = b'"},"logprobs":null,"finish_reason":'
    else:
        before = b',"choices":[{"index":0,"text":"'
        middle = b'","logprobs":null,"finish_reason":'
    return head + before, middle, b',"stop_reason":null}]}\n\n'


def _chat_opening(answer: Answer) -> bytes:
    delta = b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,'
    return b'data: %b,"choices":[%b"finish_reason":null}]}\n\n' % (_opening(answer), delta)


def _usage_event(answer: Answer, completion_tokens: int) -> bytes:
    usage = msgspec.json.encode(answer.usage(completion_tokens))
    return b'data: %b,"choices":[],"usage":%b}\n\n' % (_opening(answer), usage)


def prompt_bytes(ids: Sequence[int]) -> bytes:
    """Return the ids as bytes, `TOKEN_BYTES` each."""
    return array("I", ids).tobytes()


def natural_length(seed: int) -> int:
    """Return the number of tokens before the emulated model emits its end-of-sequence token."""
    return 16 + seed % _EOS_SPREAD

"""A completion that one thing goes wrong with."""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial

from connector_tax.engine.completion import Answer, Completion, error_body
from connector_tax.engine.faults import Fault, FaultKind
from connector_tax.engine.http import HttpProtocol, Request
from connector_tax.engine.tokens import Vocabulary
from connector_tax.engine.truth import RequestTruth


class FaultyCompletion(Completion):
    """Whatever leaves passes a queue of operations, which the fault can pause, change or cut."""

    def __init__(
        self,
        answer: Answer,
        request: Request,
        protocol: HttpProtocol,
        vocabulary: Vocabulary,
        fault: Fault,
        on_end: Callable[[Completion, RequestTruth], None],
    ) -> None:
        super().__init__(answer, request, protocol, vocabulary, fault, on_end)
        self._active = fault
        self._operations: deque[Callable[[], None]] = deque()
        self._paused = False
        self._gathered: list[bytes] = []

    def begin(self) -> None:
        if self._active.kind is FaultKind.DELAY_HEADERS:
            self._pause()
        self._queue(super().begin)

    def token(self, position: int, *, last: bool, deadline_ns: int) -> None:
        fault = self._active
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
        if self._active.kind is FaultKind.NO_DONE:
            return events[:-1]
        if self._active.kind is FaultKind.CRLF:
            return [event.replace(b"\n", b"\r\n") for event in events]
        return events

    def write_event(self, event: bytes, tokens: int, deadline_ns: int) -> None:
        kind = self._active.kind
        if kind is FaultKind.CRLF:
            event = event.replace(b"\n", b"\r\n")
        if kind is FaultKind.COALESCE:
            self._gathered.append(self.frame(event))
            if len(self._gathered) >= self._active.tokens:
                self._flush_gathered(deadline_ns)
        elif kind is FaultKind.SPLIT_EVENT:
            frame = self.frame(event)
            cut = 1 + self._active.at_byte % (len(frame) - 1)
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
        self._queue(partial(self._end_now, events, outcome))

    def respond(self, status: int, body: bytes, deadline_ns: int, outcome: str = "ok") -> None:
        self._queue(partial(super().respond, status, body, deadline_ns, outcome))

    def _end_now(self, events: list[bytes], outcome: str) -> None:
        super().end_stream(events, outcome)

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
        asyncio.get_running_loop().call_later(self._active.ms / 1000, self._resume)

    def _resume(self) -> None:
        self._paused = False
        if not self._done:
            self._drain()

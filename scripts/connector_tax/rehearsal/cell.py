"""One cell in virtual time: the load generator's plan against the virtual engine.

What is sent when, and when the cell ends, is the load generator's own code (`loadgen.plan`); what
the worker processes do, the in-flight cap, the request's and the drain's time-out, is done here.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from connector_tax.engine.scheduler import Sequence as Served
from connector_tax.engine.virtual import VirtualEngine
from connector_tax.loadgen import CellRule, Plan, PlannedRequest, open_loop
from connector_tax.loadgen.messages import RequestRecord
from connector_tax.loadgen.plan import LEAD_NS

REQUEST = PlannedRequest("simulated", b"{}", None, None)


class Scrape(NamedTuple):
    """What is seen of the server at one moment, in requests."""

    t_ns: int
    waiting: int
    inflight: int


@dataclass
class VirtualCell:
    """A cell being served.

    Attributes:
        offsets_ns: the arrivals.
        rule: when the cell is over.
        shape: input and output tokens of every request.
        scrape_ns: from one look at the server to the next.
        front_ns: what a request takes outside the engine.
        scrapes: what the looks saw.
        busy_ns: how long the engine was in a step.
    """

    offsets_ns: NDArray[np.int64]
    rule: CellRule
    shape: tuple[int, int]
    scrape_ns: int
    front_ns: int = 0
    scrapes: list[Scrape] = field(default_factory=list)
    busy_ns: int = 0
    _due: deque[RequestRecord] = field(default_factory=deque)
    _live: dict[int, tuple[RequestRecord, Served]] = field(default_factory=dict)
    _wake_ns: int | None = 0

    def __post_init__(self) -> None:
        requests = [REQUEST] * len(self.offsets_ns)
        self.plan = Plan(open_loop(self.offsets_ns, requests, self.rule), self.rule)

    def serve(self, engine: VirtualEngine) -> None:
        """Run the cell until it is drained."""
        origin_ns = engine.now_ns
        self.plan.start(origin_ns)
        scrape_ns = self._wake_ns = origin_ns
        while self._wake_ns is not None or self._due or engine.scheduler.has_work:
            if not engine.scheduler.has_work:
                events = [self._due[0].t_intended_ns] if self._due else []
                events += [self._wake_ns] if self._wake_ns is not None else []
                engine.now_ns = max(engine.now_ns, min(events))
            while scrape_ns <= engine.now_ns:
                depth = len(engine.scheduler.waiting)
                self.scrapes.append(Scrape(scrape_ns, depth, len(self._live)))
                scrape_ns += self.scrape_ns
            self._issue(engine.now_ns)
            self._arrive(engine)
            self._expire(engine)
            if engine.scheduler.has_work:
                before_ns = engine.now_ns
                emitted = engine.step()
                self.busy_ns += engine.now_ns - before_ns
                self._answer(emitted, engine.now_ns)

    def _issue(self, now_ns: int) -> None:
        if self._wake_ns is None or self._wake_ns > now_ns:
            return
        items, next_ns = self.plan.step(now_ns, now_ns + LEAD_NS)
        for item in items:
            # Single requests: none has others of its session to cancel.
            assert isinstance(item, tuple)
            self._due.append(item[0])
        self._wake_ns = None if next_ns is None else max(now_ns + 1, next_ns - LEAD_NS)

    def _arrive(self, engine: VirtualEngine) -> None:
        cap = self.rule.inflight_cap
        while self._due and self._due[0].t_intended_ns <= engine.now_ns:
            record = self._due.popleft()
            if cap is not None and len(self._live) >= cap:
                record.fail("inflight_cap")
                self.plan.take(record)
                continue
            self._live[record.seq] = record, engine.add(record.seq, *self.shape)

    def _expire(self, engine: VirtualEngine) -> None:
        """Give up what has outlived its time-out, and everything when the drain is over."""
        now_ns = engine.now_ns
        timeout_ns = round(self.rule.request_timeout_s * 1e9)
        while self._live:
            seq, (record, _) = next(iter(self._live.items()))
            if record.t_intended_ns + timeout_ns > now_ns:
                break
            self._abort(engine, seq, "request_timeout")
        if self._wake_ns is not None:
            return
        assert self.plan.stop_ns is not None
        if now_ns >= self.plan.stop_ns + round(self.plan.drain_s * 1e9):
            for seq in list(self._live):
                self._abort(engine, seq, "drain_timeout")

    def _abort(self, engine: VirtualEngine, seq: int, kind: str) -> None:
        record, sequence = self._live.pop(seq)
        engine.scheduler.abort(sequence)
        record.fail(kind)
        record.t_send_ns, record.t_done_ns = record.t_intended_ns, engine.now_ns
        self.plan.take(record)

    def _answer(self, emitted: Sequence[Served], now_ns: int) -> None:
        last_ns = now_ns + self.front_ns
        for served in emitted:
            record, _ = self._live[served.sink]
            if record.t_first_token_ns is None:
                record.t_first_token_ns = record.t_headers_ns = last_ns
            if not served.finished:
                continue
            del self._live[served.sink]
            record.t_worker_ns = record.t_conn_ns = record.t_send_ns = record.t_intended_ns
            record.t_last_token_ns = record.t_done_ns = last_ns
            record.prompt_tokens = served.prompt_len
            record.completion_tokens = served.output_len
            record.worker = 0
            self.plan.take(record)

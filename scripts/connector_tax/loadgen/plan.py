"""The plan of a run: the traffic, the rule that ends measuring, and the results so far.

Warm-up, measured window, cool-down: the same traffic runs through all three, so that the first and
the last measured requests meet the same load as those between them. A window may end on count or
interval width, never on significance.
"""

import hashlib
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from connector_tax.loadgen.messages import (
    WAITS,
    Cancel,
    Item,
    RequestRecord,
    Window,
)
from connector_tax.loadgen.sessions import (
    AHEAD,
    History,
    LookAhead,
    Node,
    PlannedRequest,
    RequestSource,
    Singles,
)
from connector_tax.loadgen.traffic import Load, Ready
from connector_tax.ranks import order_statistic_ranks, percentile_of

LEAD_NS = 20_000_000
"""Time in ns between handing a request to its worker and its due time."""
POLL_NS = 10_000_000
CooldownEnd = Literal["answered", "drain", "schedule", "interrupted", "off", "overloaded", "errors"]
"""The reasons why traffic ended, in order: every measured request has its result; the drain time
was over; all sessions ended before that; the run was interrupted; the rule has no cool-down;
`end_overloaded`; `max_errors`.
"""


@dataclass(frozen=True, slots=True)
class CellRule:
    """The rule for the length of a cell: warm-up, measured window, cool-down and drain.

    Requests due in the first `warmup_s` are not measured.

    Measuring ends at the first moment from warmup_s + floor_s on at which `min_completed` measured
    requests have succeeded and the percentiles are precise enough for the PrecisionRule, if any. It
    ends at the latest at warmup_s + cap_s, or when all sessions are over.

    With `cooldown` traffic continues, unmeasured, until every measured request has its result.
    Requests that still run `drain_s` after the window are cancelled. A request that is due while
    `inflight_cap` (None: no limit) are in flight is dropped. With `end_overloaded` the first
    dropped request ends window and traffic, after the warm-up at the earliest, and running requests
    are cancelled. `max_errors` (None: no limit) failed requests end window and traffic too.
    """

    warmup_s: float
    floor_s: float
    min_completed: int
    cap_s: float
    drain_s: float
    inflight_cap: int | None
    request_timeout_s: float
    cooldown: bool = True
    end_overloaded: bool = False
    max_errors: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("inflight_cap", "max_errors") and value is None:
                continue
            least = 1 if field.name in ("inflight_cap", "max_errors") else 0
            if not (math.isfinite(value) and value >= least):
                raise ValueError(f"{field.name} is {value!r}; it must be a number >= {least}")
        if self.cap_s < self.floor_s:
            raise ValueError(f"cap_s {self.cap_s} is below floor_s {self.floor_s}")
        if self.request_timeout_s == 0 or self.cap_s == 0:
            raise ValueError("request_timeout_s and cap_s must be positive")

    @property
    def schedule_s(self) -> float:
        """Return the length of the schedule in s: the cap plus the length of the shortest cell.

        If the last measured requests take longer, arrivals end with the schedule, and
        `cooldown_ended_by` is "schedule".
        """
        if not self.cooldown:
            return self.warmup_s + self.cap_s
        cooldown_s = min(self.drain_s, self.request_timeout_s, self.warmup_s + self.floor_s)
        return self.warmup_s + self.cap_s + cooldown_s


PERCENT = 90
CONFIDENCE = 0.95
# Growth of the number of successes, after which their precision is judged again.
GROWTH = 0.01


def relative_half_width(ordered: Sequence[float]) -> float:
    """Return half the width of the p90's interval over the p90, for an ascending sample >= 0.

    Infinite where the sample is too small for an interval, or its p90 is 0 (as a TPOT whose tokens
    all came in one read).
    """
    low, high = order_statistic_ranks(len(ordered), PERCENT, CONFIDENCE)
    if low is None or high is None:
        return math.inf
    p90 = percentile_of(ordered, PERCENT)
    return (ordered[high - 1] - ordered[low - 1]) / (2 * p90) if p90 > 0 else math.inf


class PrecisionRule:
    """A rule that ends one cell once the intervals of the TTFT and TPOT p90 are narrow enough.

    `target` is the relative half-width required of both; `seen` holds the number of successes at
    the last check, and the larger of the two half-widths.
    """

    def __init__(self, target: float) -> None:
        self.target = target
        self._fresh: deque[tuple[int, float]] = deque()
        self._ttft_ns: list[float] = []
        self._tpot_ns: list[float] = []
        self.seen = (0, math.inf)

    def add(self, record: RequestRecord) -> None:
        """Add a success; called from the issuing thread, which only appends.

        The TPOT of a single token counts as 0. A success without tokens has no latencies and is
        ignored.
        """
        first_ns, last_ns = record.t_first_token_ns, record.t_last_token_ns
        if first_ns is None or last_ns is None:
            return
        gaps = max((record.completion_tokens or 0) - 1, 1)
        self._fresh.append((first_ns - record.t_intended_ns, (last_ns - first_ns) / gaps))

    def look(self) -> None:
        """Update `seen`; call it from one thread only, the issuing thread or another."""
        for _ in range(len(self._fresh)):
            ttft_ns, tpot_ns = self._fresh.popleft()
            self._ttft_ns.append(ttft_ns)
            self._tpot_ns.append(tpot_ns)
        # A long run is not judged, which takes time in proportion to it, after every request.
        if len(self._ttft_ns) < (1 + GROWTH) * self.seen[0]:
            return
        self._ttft_ns.sort()
        self._tpot_ns.sort()
        widths = map(relative_half_width, (self._ttft_ns, self._tpot_ns))
        self.seen = len(self._ttft_ns), max(widths)


def open_loop(offsets_ns: NDArray[np.int64], requests: RequestSource, rule: CellRule) -> Load:
    """Return a load of independent requests, the k-th due `offsets_ns[k]` after the origin.

    `offsets_ns` has shape (n,), in ns, ascending. It must reach to warmup_s + cap_s and should
    reach to `rule.schedule_s`. Requests beyond its last offset are not sent.

    Raises:
        ValueError: the schedule is empty, not ascending, or ends before the rule's cap; while
            requests are made: there are fewer requests than offsets.
    """
    if len(offsets_ns) == 0:
        raise ValueError("the schedule is empty")
    if offsets_ns[0] < 0 or (np.diff(offsets_ns) < 0).any():
        raise ValueError("offsets_ns must be ascending and not negative")
    # The horizon is not known here; a tail far longer than any gap shows that it was too short.
    end_ns = round((rule.warmup_s + rule.cap_s) * 1e9)
    tail_ns = end_ns - int(offsets_ns[-1])
    if len(offsets_ns) > 1 and tail_ns > 10 * max(int(np.diff(offsets_ns).max()), 1):
        raise ValueError(
            f"the last offset is at {offsets_ns[-1] / 1e9:.3f} s; the schedule must reach "
            f"warmup_s + cap_s = {end_ns / 1e9:.3f} s"
        )
    in_order = iter(requests)

    def build(session: int, _node: int, _history: History) -> PlannedRequest:
        request = next(in_order, None)
        if request is None:
            raise ValueError(f"{len(offsets_ns)} offsets for {session} requests")
        return request

    nodes = Singles(len(offsets_ns), Node("0", "", 1))
    return Load(nodes, build, offsets_ns, horizon_s=end_ns / 1e9)


def closed_loop(concurrency: int, requests: RequestSource, count: int, rule: CellRule) -> Load:
    """Return at most `count` independent requests, `concurrency` of them in flight at a time."""
    in_order = iter(requests)
    return Load(
        Singles(count, Node("0", "", 1)),
        lambda _session, _node, _history: next(in_order),
        concurrency=concurrency,
        horizon_s=rule.warmup_s + rule.cap_s,
    )


@dataclass(frozen=True, slots=True)
class Progress:
    """A snapshot of a running cell; `issued` counts the requests handed to workers."""

    elapsed_s: float
    issued: int
    inflight: int
    ok: int
    measured_ok: int
    failed: int
    dropped: int


class Plan:
    """The state of a run: what to send next, and when to stop. Called by the issuing thread, unless
    stated otherwise.

    `outstanding` counts requests that were handed out and whose result is missing. `stop_ns`, the
    end of the measured window, is known at the latest when `step` has returned None. With
    `keeps_ended`, `ended` holds the results until another thread takes them out.
    """

    def __init__(
        self,
        load: Load,
        rule: CellRule,
        precision: PrecisionRule | None = None,
        keeps_ended: bool = False,
    ) -> None:
        self._load = load
        self._rule = rule
        self._precision = precision
        self._keeps_ended = keeps_ended
        self.ended: deque[RequestRecord] = deque()
        self.wakes_on_result = load.waits_for_results
        self._waits_in_workers = load.waits_in_workers
        first = 0
        if load.offsets_ns is not None:
            first = int(np.searchsorted(load.offsets_ns, LEAD_NS, "right"))
        # Requests that are due at the start are made before the start.
        self._ahead = LookAhead(load.sessions, load.build, max(AHEAD, first))
        self._digest = hashlib.sha256()
        self.drain_s = rule.drain_s
        self.stop_ns: int | None = None
        self.cooldown_ended_by: CooldownEnd | None = None
        self._interrupted = False
        self._overloaded = False
        self._failing = False
        self._records: list[RequestRecord | None] = []  # by seq; None: came back unsent
        self._open: dict[int, Ready] = {}
        self._unanswered: set[int] = set()  # requests of the ended window
        self._end_sent = False  # whether the workers know that the window has ended
        self._untold = 0  # workers that have not reported their requests
        self._last_due_ns: int | None = None
        self._last_end_ns = 0
        self._cancels: list[int] = []
        self._seq_of: dict[tuple[int, int], int] = {}
        self._given_up: list[tuple[int, int, int]] = []  # session, node, when
        self.ok = self.measured_ok = self.failed = self.dropped = 0

    def start(self, origin_ns: int, workers: int = 1) -> None:
        """Set the origin of the traffic's times, and the number of workers."""
        self.origin_ns = origin_ns
        self._workers = workers
        self._scheduler = self._load.scheduler(origin_ns)
        self._horizon_ns = origin_ns + round(self._load.horizon_s * 1e9)
        self.warmup_end_ns = origin_ns + round(self._rule.warmup_s * 1e9)
        self.floor_ns = self.warmup_end_ns + round(self._rule.floor_s * 1e9)
        self._cap_ns = self.warmup_end_ns + round(self._rule.cap_s * 1e9)

    @property
    def outstanding(self) -> int:
        return len(self._open)

    # ---- called by the issuing thread

    def prepare(self) -> bool:
        """Make one request body ahead of time; return False if no body can be made now."""
        return self._ahead.make_one()

    def step(self, now_ns: int, horizon_ns: int) -> tuple[list[Item], int | None]:
        """Return the items due before `horizon_ns`, and the next call's time (None: all sent)."""
        if self.stop_ns is None:
            self._look_for_end(now_ns, horizon_ns)
        items: list[Item] = [*self.take_cancels()]
        if self.stop_ns is not None and self._waits_in_workers and not self._end_sent:
            goes_on = self._rule.cooldown and not self._interrupted
            self._end_sent = True
            self._untold = self._workers if goes_on else 0
            items.append(Window(self.stop_ns, goes_on))
        if self.stop_ns is not None:
            items += self._issue(now_ns, min(horizon_ns, self.stop_ns - 1))
        self.cooldown_ended_by = self._cooldown_end(now_ns)
        if self.cooldown_ended_by is not None:
            if self._waits_in_workers and self._rule.cooldown:
                items.append(Window(now_ns, False))
            return items, None
        items += self._issue(now_ns, horizon_ns)
        next_ns = self._scheduler.next_ns(now_ns)
        due_ns = [] if next_ns is None else [max(next_ns, horizon_ns + 1)]
        if self.stop_ns is not None or self._scheduler.exhausted:
            return items, min([*due_ns, horizon_ns + POLL_NS])
        # From the floor on, look every few ms whether enough have completed.
        look_ns = max(self.floor_ns, horizon_ns + POLL_NS)
        if self._waits_in_workers or self._rule.max_errors is not None:
            look_ns = horizon_ns + POLL_NS
        return items, min([*due_ns, look_ns, self._cap_ns])

    def take_cancels(self) -> list[Cancel]:
        """Return the requests to cancel because another request of their session failed."""
        cancels, self._cancels = self._cancels, []
        return [Cancel("session_failed", cancels)] if cancels else []

    def take(self, record: RequestRecord) -> None:
        seq = record.seq
        ready = self._open.pop(seq)
        self._unanswered.discard(seq)
        end_ns = record.t_intended_ns if record.t_done_ns is None else record.t_done_ns
        self._last_end_ns = max(self._last_end_ns, end_ns)
        if record.t_intended_ns == WAITS:
            self._records[seq] = None
            self._scheduler.complete(ready.session, ready.node_index, end_ns, None, 0)
            return
        self._records[seq] = record
        record.warmup = record.t_intended_ns < self.warmup_end_ns
        record.cooldown = self._after_window(record.t_intended_ns)
        if record.status == "ok":
            self.ok += 1
            self.measured_ok += record.measured
            if record.measured and self._precision is not None:
                self._precision.add(record)
        elif record.status == "dropped":
            self.dropped += 1
            # After the window's end all of its requests have been sent, so a drop ends nothing.
            if self._rule.end_overloaded and self.stop_ns is None:
                self._overloaded = True
                self.drain_s = 0.0
        else:
            self.failed += 1
        output, record.output = record.output, None
        if record.status == "ok" and output is None:
            output = ""
        pause_ns = record.pause_ns if self._load.offsets_ns is None else 0
        session, node = ready.session, ready.node_index
        outcome = self._scheduler.complete(session, node, end_ns, output, pause_ns)
        self._cancels += [self._seq_of[session, node] for node in outcome.cancel]
        self._given_up += [(session, node, end_ns) for node in outcome.given_up]
        if self._keeps_ended:
            self.ended.append(record)

    def take_unanswered(self, seqs: list[int]) -> None:
        """Record the requests of a closed loop's window that a worker still holds."""
        self._untold -= 1
        self._unanswered |= self._open.keys() & seqs

    def stop(self, now_ns: int) -> None:
        """End the window now, if it has not ended, and send nothing more."""
        self._interrupted = True
        if self.stop_ns is None:
            self._end_window(self._end_after(now_ns))

    def give_up(self, kind: str) -> None:
        """Fail every outstanding request with `kind`, because its worker did not answer."""
        for seq in sorted(self._open):
            record = self._records[seq]
            assert record is not None
            record.fail(kind, "the worker did not answer")
            self.take(record)

    def look(self) -> None:
        """Update the precision rule; called from a thread that issues no requests."""
        if self.stop_ns is None and self._precision is not None:
            self._precision.look()

    # ---- inside

    def _issue(self, now_ns: int, until_ns: int) -> list[Item]:
        """Hand out the requests that are due at or before `until_ns`."""
        items: list[Item] = []
        for ready in self._scheduler.pop_ready(now_ns, until_ns):
            seq = len(self._records)
            request = self._ahead.take(ready.session, ready.node_index, ready.history)
            self._digest.update(request.body)
            self._digest.update(b"\n")
            record = _record(seq, ready.due_ns, ready.name, ready.node, request.request_id)
            record.t_issue_ns = now_ns
            record.wanted = request.prompt_tokens, request.completion_tokens
            self._records.append(record)
            self._open[seq] = ready
            if self.wakes_on_result:
                self._seq_of[ready.session, ready.node_index] = seq
            due_ns = ready.due_ns
            if self._last_due_ns is None or due_ns > self._last_due_ns:
                self._last_due_ns = due_ns
            if self.stop_ns is not None and self._is_measured(due_ns):
                self._unanswered.add(seq)
            items.append((record, request.body))
        return items

    def _look_for_end(self, now_ns: int, horizon_ns: int) -> None:
        # A closed loop's window ends only once its workers can be notified.
        soon_ns = horizon_ns if self._waits_in_workers else now_ns
        most = self._rule.max_errors
        if most is not None and self.failed >= most:
            self._failing = True
            self._end_window(self._end_after(max(soon_ns, self.warmup_end_ns)))
        elif self._overloaded:
            if now_ns > self.warmup_end_ns:
                self._end_window(self._end_after(now_ns))
        elif horizon_ns >= self.floor_ns and self._enough():
            self._end_window(min(self._end_after(max(self.floor_ns, soon_ns)), self._cap_ns))
        elif horizon_ns >= self._cap_ns:
            self._end_window(self._cap_ns)
        elif self._scheduler.finished and now_ns >= self._horizon_ns:
            # The window ends with the last answer, which was reported a little later.
            self._end_window(self._end_after(max(self._last_end_ns + 1, self._horizon_ns)))

    def _enough(self) -> bool:
        least = self._rule.min_completed
        if self.measured_ok < least:
            return False
        if self._precision is None:
            return True
        n, half_width = self._precision.seen
        return n >= least and half_width <= self._precision.target

    def _end_window(self, stop_ns: int) -> None:
        self.stop_ns = stop_ns
        due = ((seq, ready.due_ns) for seq, ready in self._open.items())
        self._unanswered = {
            seq for seq, due_ns in due if due_ns != WAITS and self._is_measured(due_ns)
        }

    def _is_measured(self, due_ns: int) -> bool:
        return self.warmup_end_ns <= due_ns and not self._after_window(due_ns)

    def _after_window(self, due_ns: int) -> bool:
        return self.stop_ns is not None and due_ns >= self.stop_ns

    def _cooldown_end(self, now_ns: int) -> CooldownEnd | None:
        """Return why sending ended after the window, or None while it continues."""
        if self.stop_ns is None:
            return None
        if self._overloaded:
            return "overloaded"
        if self._failing:
            return "errors"
        # Without a cool-down only the workers know what a closed loop still has of the window.
        unknown = self._waits_in_workers and not self._rule.cooldown and self._open
        if not self._unanswered and not self._untold and not unknown:
            return "answered"
        if self._interrupted:
            return "interrupted"
        if not self._rule.cooldown:
            return "off"
        if now_ns >= self.stop_ns + round(self.drain_s * 1e9):
            return "drain"
        return "schedule" if self._scheduler.exhausted else None

    def _end_after(self, moment_ns: int) -> int:
        """Return the earliest end of the window that includes every request already handed out."""
        return moment_ns if self._last_due_ns is None else max(moment_ns, self._last_due_ns + 1)

    # ---- results

    def progress(self, now_ns: int) -> Progress:
        """Return the counts so far; callable from any thread."""
        elapsed_s, inflight = (now_ns - self.origin_ns) / 1e9, self.outstanding
        issued = len(self._records)
        if self._waits_in_workers:
            inflight = min(inflight, self._scheduler.active)
            issued = inflight + self.ok + self.failed + self.dropped
        counts = self.ok, self.measured_ok, self.failed, self.dropped
        return Progress(elapsed_s, issued, inflight, *counts)

    @property
    def cooldown_end_ns(self) -> int:
        """Return the end of traffic (ns), after every request that was handed out."""
        assert self.stop_ns is not None
        return self._end_after(self.stop_ns)

    @property
    def handed_out(self) -> int:
        """Return the number of requests handed to workers, also those that came back unsent."""
        return len(self._records)

    @property
    def bodies_sha256(self) -> str:
        """Return the SHA-256 of the bodies handed out, in order, a newline after each."""
        return self._digest.hexdigest()

    def requests(self) -> list[RequestRecord]:
        """Return records of the requests handed out, in order, then of unsent requests.

        An unsent request belongs to the session of a request handed out; the session failed before,
        or the run ended.
        """
        assert self.stop_ns is not None
        made = [record for record in self._records if record is not None]
        cut = [(session, node, self.stop_ns) for session, node in self._scheduler.unsent()]
        for kind, unsent in (("session_failed", self._given_up), ("run_ended", cut)):
            for session, node, when_ns in unsent:
                graph = self._load.sessions[session]
                planned = graph.nodes[node]
                request_id = f"{graph.id}/{planned.id}"
                record = _record(len(made), when_ns, graph.id, planned, request_id)
                record.warmup = when_ns < self.warmup_end_ns
                record.cooldown = self._after_window(when_ns)
                record.fail(kind, "not sent")
                record.t_done_ns = when_ns
                made.append(record)
        return made


def _record(seq: int, due_ns: int, session: str, node: Node, request_id: str) -> RequestRecord:
    return RequestRecord(
        request_id=request_id,
        seq=seq,
        t_intended_ns=due_ns,
        session=session,
        node=node.id,
        parents=tuple([parent.node for parent in node.parents]) if node.parents else (),
        wait_after_ready_ns=round(node.wait_after_ready_s * 1e9),
    )

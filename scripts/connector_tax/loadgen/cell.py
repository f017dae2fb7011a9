"""An open-loop cell: a fixed schedule of independent requests, measured until there are enough.

Warm-up, measured window, cool-down: one arrival process runs through all three, so that the first
and the last measured requests meet the same load as those between them.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from connector_tax.loadgen.messages import FAILURES, Cancel, Done, Issue, RequestRecord, Status
from connector_tax.loadgen.precision import HalfWidths, PrecisionRule

POLL_NS = 10_000_000

CooldownEnd = Literal["answered", "drain", "schedule", "interrupted"]
"""Why arrivals ended: every measured request has its result; the drain time was over; the schedule
was used up before that; the run was told to stop."""
# Of the measured successes so far, each as (intended time, last token) in ns: which may be counted
# towards `min_completed`. The answer for one success may change from call to call.
MayCount = Callable[[Sequence[tuple[int, int]]], Sequence[bool]]


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request made before the run: `body` is the complete JSON of the POST.

    The response's usage must equal the token counts, else the request fails with `wrong_length`;
    None leaves a count unchecked. `request_id` is sent as X-Request-Id, so that a server's own log
    of the request can be joined to the record.
    """

    request_id: str
    body: bytes
    prompt_tokens: int | None
    completion_tokens: int | None

    def __post_init__(self) -> None:
        if not (self.request_id.isascii() and self.request_id.isprintable()):
            raise ValueError(f"request_id {self.request_id!r} is not printable ASCII")


@dataclass(frozen=True, slots=True)
class CellRule:
    """How long a cell lasts. Arrivals in the first `warmup_s` are not measured.

    Measuring ends at the first moment at or after warmup_s + floor_s at which `min_completed`
    measured arrivals have succeeded that may be counted (and, with a PrecisionRule, their
    percentiles are precise enough), at the latest at warmup_s + cap_s. Arrivals go on after it,
    unmeasured, until every measured request has its result. What is still running `drain_s` after
    the window is cancelled. A request due while `inflight_cap` are in flight is dropped.
    """

    warmup_s: float
    floor_s: float
    min_completed: int
    cap_s: float
    drain_s: float
    inflight_cap: int
    request_timeout_s: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 1 if field.name == "inflight_cap" else 0
            if not (math.isfinite(value) and value >= least):
                raise ValueError(f"{field.name} is {value!r}; it must be a number >= {least}")
        if self.cap_s < self.floor_s:
            raise ValueError(f"cap_s {self.cap_s} is below floor_s {self.floor_s}")
        if self.request_timeout_s == 0 or self.cap_s == 0:
            raise ValueError("request_timeout_s and cap_s must be positive")

    @property
    def schedule_s(self) -> float:
        """How far a schedule should reach: beyond the cap by as much as the shortest cell lasts.

        That bounds the bodies to be made. Where the last measured requests take longer, the end of
        the schedule is the end of arrivals, and `cooldown_ended_by` says so.
        """
        cooldown_s = min(self.drain_s, self.request_timeout_s, self.warmup_s + self.floor_s)
        return self.warmup_s + self.cap_s + cooldown_s


@dataclass(frozen=True, slots=True)
class Progress:
    """A glance at a running cell. `issued` counts requests handed to workers, dropped included."""

    elapsed_s: float
    issued: int
    inflight: int
    ok: int
    measured_ok: int
    failed: int
    dropped: int


def status_of(error_kind: str | None) -> Status:
    """Return the record status that a failure kind belongs to; None is success."""
    return "ok" if error_kind is None else FAILURES[error_kind][0]


class OpenLoopCell:
    """The plan (session.Plan) of a cell, and its counts."""

    wakes_on_result = False

    def __init__(
        self,
        offsets_ns: NDArray[np.int64],
        requests: Sequence[PlannedRequest],
        rule: CellRule,
        precision: PrecisionRule | None = None,
        may_count: MayCount | None = None,
    ) -> None:
        """See LoadGenerator.run_cell for the arguments and ValueError."""
        _check_schedule(offsets_ns, requests, rule)
        self._offsets_ns = offsets_ns
        self._requests = requests
        self._rule = rule
        self._precision = precision
        self._may_count = may_count
        self._spans: list[tuple[int, int]] = []
        self._counted = 0
        self.precise: HalfWidths | None = None
        self._min_completed = rule.min_completed
        self.drain_s = rule.drain_s
        self.stop_ns: int | None = None
        self.cooldown_ended_by: CooldownEnd | None = None
        self._interrupted = False
        self._unanswered = 0  # of the window, once it has ended
        self._issued_ns: list[int] = []
        self._done: list[Done | None] = [None] * len(requests)
        self.outstanding = 0
        self.ok = self.measured_ok = self.failed = self.dropped = 0

    def start(self, origin_ns: int) -> None:
        """Fix the schedule to the clock."""
        self.origin_ns = origin_ns
        self._due_ns: list[int] = (self._offsets_ns + origin_ns).tolist()
        self.warmup_end_ns = origin_ns + round(self._rule.warmup_s * 1e9)
        self.floor_ns = self.warmup_end_ns + round(self._rule.floor_s * 1e9)
        self._cap_ns = self.warmup_end_ns + round(self._rule.cap_s * 1e9)

    # ---- session.Plan

    def step(
        self, now_ns: int, horizon_ns: int
    ) -> tuple[list[tuple[Issue, bytes] | Cancel], int | None]:
        """Issue what is due before the horizon, until the cool-down is over."""
        if self.stop_ns is None and horizon_ns >= self.floor_ns and self._enough():
            self._end_window(min(self._end_after(max(self.floor_ns, now_ns)), self._cap_ns))
        elif self.stop_ns is None and horizon_ns >= self._cap_ns:
            self._end_window(self._cap_ns)
        self.cooldown_ended_by = self._cooldown_end(now_ns)
        if self.cooldown_ended_by is not None:
            assert self.stop_ns is not None
            return self._issue(now_ns, min(horizon_ns + 1, self.stop_ns)), None
        items = self._issue(now_ns, horizon_ns + 1)
        k = len(self._issued_ns)
        due_ns = self._due_ns[k : k + 1]
        if self.stop_ns is not None:
            return items, min([*due_ns, horizon_ns + POLL_NS])
        # From the floor on, look every few ms whether enough have completed.
        look_ns = max(self.floor_ns, horizon_ns + POLL_NS)
        return items, min([*due_ns, look_ns, self._cap_ns])

    def _issue(self, now_ns: int, until_ns: int) -> list[tuple[Issue, bytes] | Cancel]:
        """Hand out what is due before `until_ns`."""
        items: list[tuple[Issue, bytes] | Cancel] = []
        k = len(self._issued_ns)
        while k < len(self._due_ns) and self._due_ns[k] < until_ns:
            request = self._requests[k]
            issue = Issue(
                k,
                self._due_ns[k],
                request.request_id,
                request.prompt_tokens,
                request.completion_tokens,
            )
            items.append((issue, request.body))
            self._issued_ns.append(now_ns)
            k += 1
        self.outstanding += len(items)
        return items

    def take(self, done: Done) -> None:
        """Count a result."""
        self._done[done.seq] = done
        self.outstanding -= 1
        due_ns = self._due_ns[done.seq]
        measured = self.warmup_end_ns <= due_ns and not self._after_window(due_ns)
        if measured and self.stop_ns is not None:
            self._unanswered -= 1
        if done.error_kind is None:
            self.ok += 1
            self.measured_ok += measured
            if measured and self._precision is not None:
                self._precision.add(done, due_ns)
            if measured and self._may_count is not None:
                assert done.t_last_token_ns is not None
                self._spans.append((due_ns, done.t_last_token_ns))
        elif status_of(done.error_kind) == "dropped":
            self.dropped += 1
        else:
            self.failed += 1

    def stop(self, now_ns: int) -> None:
        """End the window now, if it has not ended, and send nothing after it."""
        self._interrupted = True
        if self.stop_ns is None:
            self._end_window(self._end_after(now_ns))

    def give_up(self, kind: str) -> None:
        """Fail what never came back."""
        for seq in range(len(self._issued_ns)):
            if self._done[seq] is None:
                self.take(Done(0, -1, seq, kind, "the worker did not answer"))

    def look(self) -> None:
        """Count what may be counted, and bring the precision up to date.

        Called from another thread than the session's.
        """
        if self.stop_ns is not None:
            return
        counted = None
        if self._may_count is not None:
            counted = self._may_count(self._spans[:])
            self._counted = sum(counted)
        if self._precision is not None:
            self._precision.look(counted)

    def _enough(self) -> bool:
        counted = self.measured_ok if self._may_count is None else self._counted
        if counted < self._min_completed:
            return False
        if self._precision is None:
            return True
        seen = self._precision.seen
        if seen.n < self._min_completed or not self._precision.reached(seen):
            return False
        self.precise = seen
        return True

    def _end_window(self, stop_ns: int) -> None:
        self.stop_ns = stop_ns
        first, last = (bisect_left(self._due_ns, t) for t in (self.warmup_end_ns, stop_ns))
        self._unanswered = sum(done is None for done in self._done[first:last])

    def _after_window(self, due_ns: int) -> bool:
        return self.stop_ns is not None and due_ns >= self.stop_ns

    def _cooldown_end(self, now_ns: int) -> CooldownEnd | None:
        """Why no request is to be sent after the window's any more; None: arrivals go on."""
        if self.stop_ns is None:
            return None
        if self._unanswered == 0:
            return "answered"
        if self._interrupted:
            return "interrupted"
        if now_ns >= self.stop_ns + round(self.drain_s * 1e9):
            return "drain"
        return "schedule" if len(self._issued_ns) == len(self._due_ns) else None

    def _end_after(self, moment_ns: int) -> int:
        """Return the first end of window that includes every request already handed out."""
        issued = len(self._issued_ns)
        return max(moment_ns, self._due_ns[issued - 1] + 1) if issued else moment_ns

    # ---- what came of it

    def progress(self, now_ns: int) -> Progress:
        """Return the counts; callable from any thread."""
        return Progress(
            (now_ns - self.origin_ns) / 1e9,
            len(self._issued_ns),
            self.outstanding,
            self.ok,
            self.measured_ok,
            self.failed,
            self.dropped,
        )

    @property
    def cooldown_end_ns(self) -> int:
        """The end of arrivals: every request due before it was issued, and no other."""
        assert self.stop_ns is not None
        return self._end_after(self.stop_ns)

    def records(self) -> list[RequestRecord]:
        """Return one record per request due before the end of arrivals, in schedule order."""
        return [self._record(seq, done) for seq, done in enumerate(self._done) if done is not None]

    def _record(self, seq: int, done: Done) -> RequestRecord:
        due_ns = self._due_ns[seq]
        return make_record(
            done,
            request_id=self._requests[seq].request_id,
            warmup=due_ns < self.warmup_end_ns,
            cooldown=self._after_window(due_ns),
            due_ns=due_ns,
            issued_ns=self._issued_ns[seq],
        )


def make_record(
    done: Done,
    *,
    request_id: str,
    warmup: bool = False,
    cooldown: bool = False,
    due_ns: int,
    issued_ns: int | None,
) -> RequestRecord:
    """Join a worker's result with what the main process knows of the request."""
    reads = None
    if done.reads is not None:
        pairs = np.frombuffer(done.reads, np.int64).reshape(-1, 2).tolist()
        reads = [(t_ns, events) for t_ns, events in pairs]
    return RequestRecord(
        request_id=request_id,
        seq=done.seq,
        status=status_of(done.error_kind),
        error_kind=done.error_kind,
        error_detail=done.error_detail,
        warmup=warmup,
        cooldown=cooldown,
        t_intended_ns=due_ns,
        t_issue_ns=issued_ns,
        t_worker_ns=done.t_worker_ns,
        t_conn_ns=done.t_conn_ns,
        t_send_ns=done.t_send_ns,
        t_headers_ns=done.t_headers_ns,
        t_first_token_ns=done.t_first_token_ns,
        t_last_token_ns=done.t_last_token_ns,
        t_done_ns=done.t_done_ns,
        prompt_tokens=done.prompt_tokens,
        completion_tokens=done.completion_tokens,
        inflight_at_send=done.inflight_at_send,
        worker=done.worker if done.worker >= 0 else None,
        reads=reads,
    )


def _check_schedule(
    offsets_ns: NDArray[np.int64], requests: Sequence[PlannedRequest], rule: CellRule
) -> None:
    if len(offsets_ns) != len(requests):
        raise ValueError(f"{len(offsets_ns)} offsets for {len(requests)} requests")
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

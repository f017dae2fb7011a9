"""A run of sessions on the real clock: the scheduler's plan, and what came of it."""

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from connector_tax.loadgen.cell import PlannedRequest, make_record, status_of
from connector_tax.loadgen.messages import Cancel, Done, Issue, RequestRecord
from connector_tax.loadgen.sessions import History, Node, Session
from connector_tax.loadgen.traffic import Ready, Scheduler

POLL_NS = 10_000_000


class SessionRecord(msgspec.Struct, kw_only=True):
    """A request of a session: which one, and its record (null in `record` only before it ended)."""

    session: str
    node: str
    parents: list[str]
    wait_after_ready_ns: int
    record: RequestRecord


class SessionOutcome(msgspec.Struct, kw_only=True):
    """What became of a session that started; times are CLOCK_MONOTONIC ns.

    `t_start_ns` is when its first request was sent (null: none was), less that request's own wait;
    `t_end_ns` when its last one ended. `status`: `cut` when the run ended before the session.
    """

    session: str
    status: Literal["ok", "failed", "cut"]
    requests: int
    ok: int
    t_start_ns: int | None
    t_end_ns: int


def session_outcomes(records: Sequence[SessionRecord]) -> list[SessionOutcome]:
    """Return one outcome per session, in the order of their first requests."""
    by_session: dict[str, list[SessionRecord]] = {}
    for entry in records:
        by_session.setdefault(entry.session, []).append(entry)
    return [_outcome(session, entries) for session, entries in by_session.items()]


def _outcome(session: str, entries: Sequence[SessionRecord]) -> SessionOutcome:
    kinds = [entry.record.error_kind for entry in entries]
    starts = [
        entry.record.t_send_ns - entry.wait_after_ready_ns
        for entry in entries
        if entry.record.t_send_ns is not None
    ]
    status: Literal["ok", "failed", "cut"] = "failed" if any(kinds) else "ok"
    if "run_ended" in kinds:
        status = "cut"
    return SessionOutcome(
        session=session,
        status=status,
        requests=len(kinds),
        ok=kinds.count(None),
        t_start_ns=min(starts, default=None),
        t_end_ns=max(entry.record.t_done_ns or 0 for entry in entries),
    )


class SessionPlan:
    """The plan (session.Plan) of a run of sessions until `end_ns` or until all have ended.

    At `end_ns` no further request is sent, also of sessions that have begun; what is in flight may
    take `drain_s`.
    """

    wakes_on_result = True

    def __init__(
        self,
        sessions: Sequence[Session],
        scheduler: Scheduler,
        build: Callable[[Session, Node, History], PlannedRequest],
        end_ns: int,
        drain_s: float,
    ) -> None:
        self._sessions = sessions
        self._scheduler = scheduler
        self._build = build
        self._end_ns = end_ns
        self.drain_s = drain_s
        self.stop_ns: int | None = None
        self.outstanding = 0
        self.sent: list[tuple[Ready, int]] = []  # by seq: request, when it was handed on
        self._done: dict[int, Done] = {}
        self._cancels: list[int] = []
        self._seq_of: dict[tuple[int, int], int] = {}
        self.given_up: list[tuple[int, int, int]] = []  # session, node, when
        self.ok = self.failed = 0

    # ---- session.Plan

    def step(
        self, now_ns: int, horizon_ns: int
    ) -> tuple[list[tuple[Issue, bytes] | Cancel], int | None]:
        """Send what is ready; ask again when the next is due or a result has come."""
        items: list[tuple[Issue, bytes] | Cancel] = []
        if self._cancels:
            items.append(Cancel("session_failed", self._cancels))
            self._cancels = []
        end_ns = self._end_ns if self.stop_ns is None else self.stop_ns
        if self.stop_ns is None:
            for ready in self._scheduler.pop_ready(now_ns, min(horizon_ns, end_ns - 1)):
                items.append(self._issue(ready, now_ns))
        if self._scheduler.finished or now_ns >= end_ns:
            self.stop_ns = min(now_ns, end_ns)
            return items, None
        next_ns = self._scheduler.next_ns(now_ns)
        return items, end_ns if next_ns is None else min(end_ns, max(next_ns, horizon_ns + 1))

    def take(self, done: Done) -> None:
        """Pass the end of a request to the scheduler, which may make others ready."""
        self._done[done.seq] = done
        self.outstanding -= 1
        ready, _ = self.sent[done.seq]
        ok = done.error_kind is None
        self.ok += ok
        self.failed += not ok
        output: str | list[int] | None = None
        if ok:
            output = done.token_ids if done.token_ids is not None else done.text or ""
        assert done.t_done_ns is not None
        outcome = self._scheduler.complete(ready.session, ready.node_index, done.t_done_ns, output)
        self._cancels += [self._seq_of[ready.session, node] for node in outcome.cancel]
        self.given_up += [(ready.session, node, done.t_done_ns) for node in outcome.given_up]

    def stop(self, now_ns: int) -> None:
        """Send nothing more."""
        self._scheduler.admitting = False
        if self.stop_ns is None:
            self.stop_ns = now_ns

    def give_up(self, kind: str) -> None:
        """Fail what never came back."""
        for seq in range(len(self.sent)):
            if seq not in self._done:
                due_ns = self.sent[seq][0].due_ns
                detail = "the worker did not answer"
                self.take(Done(0, -1, seq, kind, detail, t_done_ns=due_ns))

    def _issue(self, ready: Ready, now_ns: int) -> tuple[Issue, bytes]:
        seq = len(self.sent)
        request = self._build(self._sessions[ready.session], ready.node, ready.history)
        self.sent.append((ready, now_ns))
        self._seq_of[ready.session, ready.node_index] = seq
        self.outstanding += 1
        issue = Issue(
            seq,
            ready.due_ns,
            request.request_id,
            request.prompt_tokens,
            request.completion_tokens,
        )
        return issue, request.body

    # ---- what came of it

    def records(self) -> list[SessionRecord]:
        """Return a record per request sent, in the order of sending, then those of the same
        sessions that were not: given up after a failure, or cut off by the end of the run.
        """
        records = []
        for seq, (ready, issued_ns) in enumerate(self.sent):
            done = self._done[seq]
            records.append(self._record(ready.session, ready.node, done, ready.due_ns, issued_ns))
        assert self.stop_ns is not None
        cut = [(index, node_index, self.stop_ns) for index, node_index in self._scheduler.unsent()]
        for kind, unsent in (("session_failed", self.given_up), ("run_ended", cut)):
            for index, node_index, when_ns in unsent:
                node = self._sessions[index].nodes[node_index]
                done = Done(0, -1, len(records), kind, "not sent", t_done_ns=when_ns)
                records.append(self._record(index, node, done, when_ns, None))
        return records

    def _record(
        self, index: int, node: Node, done: Done, due_ns: int, issued_ns: int | None
    ) -> SessionRecord:
        session = self._sessions[index]
        return SessionRecord(
            session=session.id,
            node=node.id,
            parents=[parent.node for parent in node.parents],
            wait_after_ready_ns=round(node.wait_after_ready_s * 1e9),
            record=make_record(
                done,
                request_id=f"{session.id}/{node.id}",
                due_ns=due_ns,
                issued_ns=issued_ns,
            ),
        )


def count_statuses(records: Sequence[SessionRecord]) -> dict[str, int]:
    """Return how many requests ended in each status or, for failures, each kind."""
    counts: dict[str, int] = {}
    for entry in records:
        name = entry.record.error_kind or status_of(None)
        counts[name] = counts.get(name, 0) + 1
    return counts

"""What came of a run: a record per request, and per session."""

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from connector_tax.loadgen.messages import FAILURES, CountedBy, Done, RequestRecord, Status


class SessionRequest(msgspec.Struct, kw_only=True):
    """A request with its place in its session. Of one that was not sent, the record says why.

    `t_first_answer_ns` is when the first token came that is no reasoning; `counted_by` says whose
    count of tokens the record has: the server's usage, or the client's count of token events.
    """

    session: str
    node: str
    parents: list[str]
    wait_after_ready_ns: int
    t_first_answer_ns: int | None = None
    counted_by: CountedBy | None = None
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


def session_outcomes(entries: Sequence[SessionRequest]) -> list[SessionOutcome]:
    """Return one outcome per session, in the order of their first requests."""
    by_session: dict[str, list[SessionRequest]] = {}
    for entry in entries:
        by_session.setdefault(entry.session, []).append(entry)
    return [_outcome(session, entries) for session, entries in by_session.items()]


def _outcome(session: str, entries: Sequence[SessionRequest]) -> SessionOutcome:
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


# What the worker's result says as the record does.
_AS_SENT = (
    {*RequestRecord.__struct_fields__} & {*Done.__struct_fields__} - {"worker", "reads"}
)  # fmt: skip


def status_of(error_kind: str | None) -> Status:
    """Return the record status that a failure kind belongs to; None is success."""
    return "ok" if error_kind is None else FAILURES[error_kind][0]


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
        status=status_of(done.error_kind),
        warmup=warmup,
        cooldown=cooldown,
        t_intended_ns=due_ns,
        t_issue_ns=issued_ns,
        worker=done.worker if done.worker >= 0 else None,
        reads=reads,
        **{name: getattr(done, name) for name in _AS_SENT},
    )

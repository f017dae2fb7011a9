"""What came of each session of a run."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from connector_tax.loadgen.messages import RequestRecord


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


def session_outcomes(entries: Sequence[RequestRecord]) -> list[SessionOutcome]:
    """Return one outcome per session, in the order of their first requests."""
    by_session: dict[str, list[RequestRecord]] = {}
    for entry in entries:
        by_session.setdefault(entry.session, []).append(entry)
    return [_outcome(session, entries) for session, entries in by_session.items()]


def _outcome(session: str, entries: Sequence[RequestRecord]) -> SessionOutcome:
    kinds = [entry.error_kind for entry in entries]
    starts = [
        entry.t_send_ns - entry.wait_after_ready_ns
        for entry in entries
        if entry.t_send_ns is not None
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
        t_end_ns=max(entry.t_done_ns or 0 for entry in entries),
    )

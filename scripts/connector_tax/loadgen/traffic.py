"""Define traffic: when each session starts, and when each of its requests is ready.

`SessionScheduler` serves both kinds of traffic, which differ in when the next session may start:

- rate (open loop): session k starts at its own offset, whatever is running;
- concurrency (closed loop): a session starts as soon as fewer than target(t) are active, where
  target(t) = floor(N t / ramp) during the ramp and N after it. The ramp is a function of time
  alone, so sessions that outlast it neither hold it up nor let it overshoot. It lasts N x
  START_GAP_NS at least: N requests due at one moment would wait for each other in the client.

Sessions of one request each are handed out without a state for each (`OpenSingles`). In a closed
loop the next ones wait in the workers, and start there when one ends (`ClosedSingles`).

Arrivals at rate λ are gaps X₁, X₂, …; session k is due X₁ + … + X_k after the origin, except that
the fixed process starts at the origin itself. Offsets are absolute, so that a late request never
delays the following ones, and no gap is truncated: cutting the exponential at 3/λ raises the rate
by 5.2% and lowers the coefficient of variation (cv) to 0.88.

| kind     | gap                                 | cv   |
|----------|-------------------------------------|------|
| fixed    | 1/λ                                 | 0    |
| jittered | k is due anywhere in [k/λ, (k+1)/λ) | 1/√6 |
| poisson  | exponential(1/λ)                    | 1    |
| gamma    | gamma(shape k, scale 1/(λ k))       | 1/√k |

The schedulers have no clock: callers pass the time, and the same code runs on a virtual one in
tests.
"""

import bisect
import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from connector_tax.loadgen.messages import WAITS, Output
from connector_tax.loadgen.sessions import (
    Build,
    History,
    Node,
    Session,
    Sessions,
    Singles,
    Turn,
    node_of,
)
from connector_tax.seeds import named_generator

ArrivalKind = Literal["fixed", "jittered", "poisson", "gamma"]

_NS = 1_000_000_000
# Of constant size, so that earlier arrivals do not depend on the horizon.
_CHUNK = 4096
START_GAP_NS = 200_000
"""Least time between the first requests of a closed loop: several times the duration of a send."""


def make_offsets(
    kind: ArrivalKind,
    rate_rps: float,
    horizon_s: float,
    seed: str,
    gamma_shape: float | None = None,
    most: int | None = None,
) -> NDArray[np.int64]:
    """Return the offsets in ns, ascending, of every arrival in [0, horizon_s), `most` at most.

    A longer horizon keeps the earlier arrivals (the process is extended, not redrawn).

    Raises:
        ValueError: unknown kind, rate or horizon not positive and finite, or a gamma shape that is
            missing for `gamma` or given for another kind.
    """
    if kind not in get_args(ArrivalKind):
        raise ValueError(f"arrival kind is {kind!r}; allowed: {', '.join(get_args(ArrivalKind))}")
    for name, value in (("rate_rps", rate_rps), ("horizon_s", horizon_s)):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} is {value!r}; it must be a positive number")
    if (kind == "gamma") != (gamma_shape is not None):
        raise ValueError(
            f"gamma_shape is {gamma_shape!r} for kind {kind!r}; allowed: a number for gamma, "
            "None for other kinds"
        )
    if gamma_shape is not None and not (math.isfinite(gamma_shape) and gamma_shape > 0):
        raise ValueError(f"gamma_shape is {gamma_shape!r}; it must be a positive number")
    generator = named_generator(seed)
    if kind in ("fixed", "jittered"):
        count = math.ceil(horizon_s * rate_rps) + 1
        steps = np.arange(count if most is None else min(count, most), dtype=float)
        if kind == "jittered":
            steps += generator.random(len(steps))
        offsets_s = steps / rate_rps
    else:
        shape = gamma_shape or 1.0
        chunks: list[NDArray[np.float64]] = []
        reached_s = 0.0
        while reached_s < horizon_s and (most is None or len(chunks) * _CHUNK < most):
            gaps_s = generator.gamma(shape, 1.0 / (rate_rps * shape), size=_CHUNK)
            chunks.append(reached_s + np.cumsum(gaps_s))
            reached_s = float(chunks[-1][-1])
        offsets_s = np.concatenate(chunks)
    offsets_ns = np.rint(offsets_s * _NS).astype(np.int64)
    return offsets_ns[offsets_ns < round(horizon_s * _NS)][:most]


# (sessions started, sessions active, time) -> when the next may start; None: when another ends, or
# never.
Admission = Callable[[int, int, int], int | None]


def at_starts(starts_ns: Sequence[int]) -> Admission:
    """Return an admission that starts session k at `starts_ns[k]` (ascending, absolute)."""
    return lambda started, _active, _now_ns: (
        starts_ns[started] if started < len(starts_ns) else None
    )


def at_places(target: int, origin_ns: int, rampup_ns: int) -> Admission:
    """Return an admission that keeps `target` sessions active, after a linear ramp (ns)."""

    def next_start_ns(_started: int, active: int, now_ns: int) -> int | None:
        if active >= target:
            return None
        return max(now_ns, origin_ns - (-rampup_ns * (active + 1) // target))

    return next_start_ns


@dataclass(frozen=True, slots=True)
class Load:
    """The load to send: sessions, their start times, and how their requests are made.

    `offsets_ns` are the starts after the origin, ascending (open loop). If None, `concurrency`
    sessions are kept active after a linear ramp of `rampup_ns` (closed loop). The schedule is known
    up to `horizon_s`; a run that has served all sessions earlier continues until then. A failed
    request ends its session, unless `keep_going`.
    """

    sessions: Sessions
    build: Build
    offsets_ns: NDArray[np.int64] | None = None
    concurrency: int = 0
    rampup_s: float = 0.0
    horizon_s: float = 0.0
    keep_going: bool = False

    @property
    def rampup_ns(self) -> int:
        return max(round(self.rampup_s * 1e9), self.concurrency * START_GAP_NS)

    @property
    def waits_for_results(self) -> bool:
        """Return whether the end of one request can make another request due, or end it."""
        if isinstance(self.sessions, Singles):
            return False
        return any(len(session.nodes) > 1 for session in self.sessions)

    @property
    def waits_in_workers(self) -> bool:
        """Return whether requests wait in the workers until another one ends."""
        return self.offsets_ns is None and not self.waits_for_results

    def scheduler(self, origin_ns: int) -> "SessionScheduler | OpenSingles | ClosedSingles":
        admission = at_places(self.concurrency, origin_ns, self.rampup_ns)
        if self.waits_in_workers:
            return ClosedSingles(self.sessions, self.concurrency, admission)
        if self.offsets_ns is not None:
            starts_ns = (self.offsets_ns + origin_ns).tolist()
            if isinstance(self.sessions, Singles):
                return OpenSingles(self.sessions, starts_ns)
            admission = at_starts(starts_ns)
        return SessionScheduler(self.sessions, admission, not self.keep_going)


@dataclass(slots=True)
class _State:
    session: Session
    waits_for: list[int]  # per node: parents that have not ended
    ready_ns: list[int]  # per node: latest end of a parent so far
    in_flight: set[int] = field(default_factory=set)
    pending: set[int] = field(default_factory=set)  # neither issued nor given up
    histories: dict[str, History] = field(default_factory=dict)
    failed: bool = False
    pause_until_ns: int = 0  # when its place is free


class Ready(NamedTuple):
    """A request of session `name` to send at `due_ns`, or when it gets a place (WAITS)."""

    due_ns: int
    session: int
    node_index: int
    node: Node
    history: History
    name: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """The consequences of a request's end.

    `cancel`: in-flight nodes of its session to cancel. `given_up`: nodes that will never be sent.
    """

    cancel: tuple[int, ...] = ()
    given_up: tuple[int, ...] = ()


_NOTHING_MORE = Outcome()


class SessionScheduler:
    """A scheduler that starts sessions as `admission` allows and yields requests that are ready.

    Invariants: a request is due no earlier than the end of its last parent plus its own wait, and
    never before its session's start; equal due times keep the order in which they became ready;
    a session is active from its start until its last request has ended or been given up.
    """

    def __init__(
        self, sessions: Sessions, admission: Admission, cancel_session_on_failure: bool
    ) -> None:
        self._sessions = sessions
        self._admission = admission
        self._cancel_on_failure = cancel_session_on_failure
        self._active: dict[int, _State] = {}
        self._queue: list[tuple[int, int, int, int]] = []  # due_ns, arrival, session, node
        self._arrivals = 0
        self._paused_ns: list[int] = []  # heap: until when places are kept free
        self.started = 0

    @property
    def active(self) -> int:
        return len(self._active)

    @property
    def finished(self) -> bool:
        return self.started >= len(self._sessions) and not self._active

    @property
    def exhausted(self) -> bool:
        """Return whether no further request can become ready, however requests in flight end."""
        if self._queue or self.started < len(self._sessions):
            return False
        return not any(state.pending for state in self._active.values())

    def pop_ready(self, now_ns: int, horizon_ns: int) -> list[Ready]:
        """Start sessions as admission allows; return the requests due by `horizon_ns`."""
        ready: list[Ready] = []
        while True:
            start_ns = self._next_start_ns(now_ns)
            if start_ns is not None and start_ns <= horizon_ns:
                if self._paused_ns and self._paused_ns[0] <= start_ns:
                    heapq.heappop(self._paused_ns)
                self._start(start_ns)
            elif self._queue and self._queue[0][0] <= horizon_ns:
                due_ns, _, session, node = heapq.heappop(self._queue)
                state = self._active.get(session)
                if state is not None and node in state.pending:
                    ready.append(self._issue(due_ns, session, node, state))
            else:
                # Starting sessions first may queue requests out of order; sorted() is stable.
                return sorted(ready, key=lambda request: request.due_ns)

    def unsent(self) -> list[tuple[int, int]]:
        """Return (session, node) of every unissued request of an active session."""
        return [
            (session, node)
            for session, state in self._active.items()
            for node in sorted(state.pending)
        ]

    def next_ns(self, now_ns: int) -> int | None:
        """Return when the next request is due; None if that depends on a request in flight."""
        candidates = [self._next_start_ns(now_ns), self._queue[0][0] if self._queue else None]
        return min((t for t in candidates if t is not None), default=None)

    def complete(
        self,
        session: int,
        node_index: int,
        end_ns: int,
        output: Output | None,
        pause_ns: int = 0,
    ) -> Outcome:
        """Process the end of a request; `output` None means that the request failed.

        Where sessions are kept active, its session's place stays empty for `pause_ns` afterwards.
        """
        state = self._active[session]
        if pause_ns:
            state.pause_until_ns = end_ns + pause_ns
        state.in_flight.discard(node_index)
        node = state.session.nodes[node_index]
        if len(state.session.nodes) == 1:
            self._end(session, state)
            return _NOTHING_MORE
        outcome = _NOTHING_MORE
        if output is not None:
            known = self._history(state, node)
            state.histories[node.id] = (*known, Turn(node.id, node.prompt, output))
        elif self._cancel_on_failure and not state.failed:
            state.failed = True
            outcome = Outcome(tuple(sorted(state.in_flight)), tuple(sorted(state.pending)))
            state.pending.clear()
        if not state.failed:
            self._release_children(session, state, node, end_ns)
        if not state.in_flight and not state.pending:
            self._end(session, state)
        return outcome

    def _end(self, session: int, state: _State) -> None:
        del self._active[session]
        if state.pause_until_ns:
            heapq.heappush(self._paused_ns, state.pause_until_ns)

    def _next_start_ns(self, now_ns: int) -> int | None:
        if self.started >= len(self._sessions):
            return None
        while self._paused_ns and self._paused_ns[0] <= now_ns:
            heapq.heappop(self._paused_ns)
        taken = len(self._active) + len(self._paused_ns)
        # The next place may come from the end of a pause, before the next step of the ramp.
        candidates = [self._admission(self.started, taken, now_ns), *self._paused_ns[:1]]
        return min((t for t in candidates if t is not None), default=None)

    def _start(self, start_ns: int) -> None:
        index = self.started
        self.started += 1
        session = self._sessions[index]
        nodes = session.nodes
        waits_for = [len(node.parents) for node in nodes]
        state = _State(session, waits_for, [start_ns] * len(nodes), pending={*range(len(nodes))})
        self._active[index] = state
        for i, node in enumerate(nodes):
            if not node.parents:
                self._enqueue(index, i, start_ns + _wait_ns(node))

    def _issue(self, due_ns: int, session: int, node_index: int, state: _State) -> Ready:
        state.pending.discard(node_index)
        state.in_flight.add(node_index)
        node = state.session.nodes[node_index]
        history = self._history(state, node) if node.parents else ()
        return Ready(due_ns, session, node_index, node, history, state.session.id)

    @staticmethod
    def _history(state: _State, node: Node) -> History:
        # A parent that failed (and did not end the session) has no turn to hand on.
        inherited = (state.histories.get(p.node, ()) for p in node.parents if p.history)
        # Each turn once, in the order of first occurrence.
        return tuple({turn.node: turn for history in inherited for turn in history}.values())

    def _release_children(self, session: int, state: _State, ended: Node, end_ns: int) -> None:
        for i, node in enumerate(state.session.nodes):
            if all(parent.node != ended.id for parent in node.parents):
                continue
            state.waits_for[i] -= 1
            state.ready_ns[i] = max(state.ready_ns[i], end_ns)
            if state.waits_for[i] == 0:
                self._enqueue(session, i, state.ready_ns[i] + _wait_ns(node))

    def _enqueue(self, session: int, node_index: int, due_ns: int) -> None:
        heapq.heappush(self._queue, (due_ns, self._arrivals, session, node_index))
        self._arrivals += 1


class _OneByOne:
    """A scheduler of single-request sessions, in order; same interface as SessionScheduler."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._handed = 0
        self._ended = 0

    @property
    def finished(self) -> bool:
        return self.exhausted and self._ended == self._handed

    @property
    def exhausted(self) -> bool:
        return self._handed >= len(self._sessions)

    def complete(self, *_: object) -> Outcome:
        """Process the end of a request, or a request that came back unsent."""
        self._ended += 1
        return _NOTHING_MORE

    def unsent(self) -> list[tuple[int, int]]:
        return []

    def _hand_out(self, start_ns: int | None) -> Ready:
        index, self._handed = self._handed, self._handed + 1
        name, node = node_of(self._sessions, index, 0)
        due_ns = WAITS if start_ns is None else start_ns + _wait_ns(node)
        return Ready(due_ns, index, 0, node, (), name)


class OpenSingles(_OneByOne):
    """A scheduler of an open loop's single-request sessions, at ascending absolute times in ns."""

    def __init__(self, sessions: Singles, starts_ns: list[int]) -> None:
        super().__init__(sessions)
        self._starts_ns = starts_ns[: len(sessions)]

    @property
    def active(self) -> int:
        return self._handed - self._ended

    def pop_ready(self, now_ns: int, horizon_ns: int) -> list[Ready]:  # noqa: ARG002
        """Return every request due at or before `horizon_ns`."""
        first = self._handed
        end = bisect.bisect_right(self._starts_ns, horizon_ns, first)
        return [self._hand_out(start_ns) for start_ns in self._starts_ns[first:end]]

    def next_ns(self, now_ns: int) -> int | None:  # noqa: ARG002
        """Return when the next request is due; None if no request is left."""
        return None if self.exhausted else self._starts_ns[self._handed]


class ClosedSingles(_OneByOne):
    """A scheduler of a closed loop's single-request sessions.

    `admission` (`at_places`) gives the time of each of the `target` places; the request that takes
    the place is due then. The other requests have no due time (WAITS) and wait in a worker for a
    place. As many wait there as there are places, and at least STOCK, so that no place stays empty
    until the scheduler is called again.
    """

    STOCK = 128

    def __init__(self, sessions: Sessions, target: int, admission: Admission) -> None:
        super().__init__(sessions)
        self._target = target
        self._admission = admission
        self._places = 0  # handed out with a due time

    @property
    def active(self) -> int:
        return min(self._places, self._handed - self._ended)

    def pop_ready(self, now_ns: int, horizon_ns: int) -> list[Ready]:  # noqa: ARG002
        """Return requests that have a place by `horizon_ns`, and requests that wait for one."""
        ready: list[Ready] = []
        while not self.exhausted:
            place_ns = self.next_ns(horizon_ns)
            if place_ns is not None and place_ns <= horizon_ns:
                self._places += 1
                ready.append(self._hand_out(place_ns))
            elif self._may_stock():
                ready.append(self._hand_out(None))
            else:
                break
        return ready

    def _may_stock(self) -> bool:
        left = len(self._sessions) - self._handed
        waiting = self._handed - self._ended - self._places
        most = max(self.STOCK, self._places) if self._places else 0
        return left > self._target - self._places and waiting < most

    def next_ns(self, now_ns: int) -> int | None:  # noqa: ARG002
        """Return when the closed loop may send one more request; None if all places are taken."""
        return self._admission(self._handed, self._places, 0)


def _wait_ns(node: Node) -> int:
    return round(node.wait_after_ready_s * 1e9)

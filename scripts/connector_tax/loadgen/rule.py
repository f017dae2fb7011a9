"""The rule by which a cell ends, also when its latencies are known well enough.

A cell may stop on count or interval width, never on significance.
"""

import math
from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

from connector_tax.loadgen.messages import RequestRecord
from connector_tax.ranks import order_statistic_ranks, percentile_of

CooldownEnd = Literal["answered", "drain", "schedule", "interrupted", "off", "overloaded", "errors"]
"""Why traffic ended: every measured request has its result; the drain time was over; all sessions
were over before that; the run was told to stop; the rule has no cool-down; `end_overloaded`;
`max_errors`."""


@dataclass(frozen=True, slots=True)
class CellRule:
    """How long a cell lasts. Requests due in the first `warmup_s` are not measured.

    Measuring ends at the first moment at or after warmup_s + floor_s at which `min_completed`
    measured requests have succeeded (and, with a PrecisionRule, their percentiles are precise
    enough), at the latest at warmup_s + cap_s, and when all sessions are
    over. With `cooldown` traffic goes on after it, unmeasured, until every measured request has its
    result. What is still running `drain_s` after the window is cancelled. A request due while
    `inflight_cap` (None: any number) are in flight is dropped; with `end_overloaded` the first one
    ends window and traffic, not before the warm-up is over, and what is running is cancelled.
    `max_errors` (None: any number) that failed end both too.
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
        """How far a schedule should reach: beyond the cap by as much as the shortest cell lasts.

        Where the last measured requests take longer, the end of the schedule is the end of
        arrivals, and `cooldown_ended_by` says so.
        """
        if not self.cooldown:
            return self.warmup_s + self.cap_s
        cooldown_s = min(self.drain_s, self.request_timeout_s, self.warmup_s + self.floor_s)
        return self.warmup_s + self.cap_s + cooldown_s


PERCENT = 90
CONFIDENCE = 0.95


def relative_half_width(ordered: Sequence[float]) -> float:
    """Half the interval of p90 of an ascending sample (not negative) over its p90.

    Infinite where the sample is too small for an interval, or its p90 is 0 (a TPOT whose tokens
    all came in one read).
    """
    low, high = order_statistic_ranks(len(ordered), PERCENT, CONFIDENCE)
    if low is None or high is None:
        return math.inf
    p90 = percentile_of(ordered, PERCENT)
    return (ordered[high - 1] - ordered[low - 1]) / (2 * p90) if p90 > 0 else math.inf


class PrecisionRule:
    """Follows one cell until the intervals of TTFT p90 and TPOT p90 are narrow enough.

    `target` is the relative half-width wanted of both; `seen` how many successes there were at the
    last look, and the wider half-width of both.
    """

    def __init__(self, target: float) -> None:
        self.target = target
        self._fresh: deque[tuple[int, float]] = deque()
        self._ttft_ns: list[float] = []
        self._tpot_ns: list[float] = []
        self.seen = (0, math.inf)

    def add(self, record: RequestRecord) -> None:
        """Take a success (issuing thread, which only appends). A TPOT of one token is 0."""
        first_ns, last_ns = record.t_first_token_ns, record.t_last_token_ns
        assert first_ns is not None
        assert last_ns is not None
        gaps = max((record.completion_tokens or 0) - 1, 1)
        self._fresh.append((first_ns - record.t_intended_ns, (last_ns - first_ns) / gaps))

    def look(self) -> None:
        """Bring `seen` up to date; from one thread only, which need not be the issuing one."""
        for _ in range(len(self._fresh)):
            ttft_ns, tpot_ns = self._fresh.popleft()
            insort(self._ttft_ns, ttft_ns)
            insort(self._tpot_ns, tpot_ns)
        widths = map(relative_half_width, (self._ttft_ns, self._tpot_ns))
        self.seen = len(self._ttft_ns), max(widths)

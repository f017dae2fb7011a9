"""The rule by which a cell ends."""

import math
from dataclasses import dataclass, fields
from typing import Literal

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

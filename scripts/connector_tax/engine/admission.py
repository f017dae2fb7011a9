"""Which waiting requests may start their prefill in this round, under a budget of prompt tokens.

`fifo` takes from the head until the budget is used up; `pack` looks at a window of the queue and
takes the cheapest first, so that a long prompt at the head does not hold back the short ones behind
it. Both give the requests in their order of arrival. A head that alone exceeds the budget is taken
alone when nothing else can be, so the queue never stands still; every n-th round is FIFO, so a long
prompt is never passed over for ever. A round in which nothing can start (no free slot, no token
left, no KV blocks) is none and does not count.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, TypeVar

from connector_tax.artifacts.declare import says
from connector_tax.artifacts.study_records import Count


class Waiting(Protocol):
    """What the admission looks at."""

    @property
    def arrival(self) -> int:
        """Position in the order of arrival, unique."""

    @property
    def prefill_len(self) -> int:
        """Tokens to prefill."""


@dataclass(frozen=True)
class AdmissionOptions:
    """The options of an admission."""

    prefill_admission_policy: Annotated[
        Literal["fifo", "pack"], says("which waiting requests start")
    ] = "fifo"
    prefill_admission_lookahead: Annotated[Count, says("requests pack looks at")] = 64
    prefill_force_fifo_every: Annotated[int, says("every n-th round is FIFO; 0: never", ge=0)] = 0
    prefill_max_tokens: Annotated[
        Count | None, says("prompt tokens admitted in one round; null: no budget")
    ] = None
    prefill_max_batch_size: Annotated[
        Count | None, says("requests admitted in one round; null: max_num_seqs")
    ] = None
    decode_first: Annotated[
        bool, says("decode takes its share of a step's tokens before prefill")
    ] = False


R = TypeVar("R", bound=Waiting)


class Admission:
    """Counts the rounds and takes each round's requests off the waiting queue.

    Args:
        options: the policy.
        max_context: a longer prompt counts as this many tokens.
    """

    def __init__(self, options: AdmissionOptions, max_context: int) -> None:
        self._options = options
        self._max_context = max_context
        self._round = 0

    def take(self, waiting: deque[R], max_reqs: int) -> list[R]:
        """Take at most `max_reqs` requests, in order of arrival; what stays keeps its order."""
        options = self._options
        if max_reqs < 1 or not waiting:
            return []
        self._round += 1
        every = options.prefill_force_fifo_every
        forced = every > 0 and self._round % every == 0
        if options.prefill_max_batch_size is not None:
            max_reqs = min(max_reqs, options.prefill_max_batch_size)
        budget = options.prefill_max_tokens
        if forced or options.prefill_admission_policy == "fifo" or budget is None:
            return self._take_fifo(waiting, max_reqs, budget)
        return self._take_packed(waiting, max_reqs, budget)

    def withdraw(self) -> None:
        """The last round's requests were all put back: it does not count, and is due again."""
        self._round -= 1

    def _cost(self, request: Waiting) -> int:
        return min(request.prefill_len, self._max_context)

    def _take_fifo(self, waiting: deque[R], max_reqs: int, budget: int | None) -> list[R]:
        taken: list[R] = []
        used = 0
        while waiting and len(taken) < max_reqs:
            used += self._cost(waiting[0])
            if budget is not None and taken and used > budget:
                break
            taken.append(waiting.popleft())
            if budget is not None and used > budget:
                break
        return taken

    def _take_packed(self, waiting: deque[R], max_reqs: int, budget: int) -> list[R]:
        size = min(len(waiting), self._options.prefill_admission_lookahead)
        window = [waiting.popleft() for _ in range(size)]
        costs = [self._cost(request) for request in window]
        chosen: set[int] = set()
        used = 0
        for i in sorted(range(size), key=lambda i: (costs[i], i)):
            # From the cheapest on: once one does not fit, none after it does.
            if len(chosen) == max_reqs or used + costs[i] > budget:
                break
            chosen.add(i)
            used += costs[i]
        if window and not chosen:
            chosen.add(0)
        waiting.extendleft(window[i] for i in range(size - 1, -1, -1) if i not in chosen)
        return [window[i] for i in sorted(chosen)]


def put_back(waiting: deque[R], requests: Sequence[R]) -> None:
    """Return requests to the queue, each to its place in the order of arrival."""
    # From the last on: a head that goes back as it came is placed at the front, each at once.
    for request in reversed(requests):
        place = 0
        while place < len(waiting) and waiting[place].arrival < request.arrival:
            place += 1
        waiting.insert(place, request)

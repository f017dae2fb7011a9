"""Continuous batching: choose which sequences advance in the next step, and by how many tokens.

A step combines prefill chunks and decoding sequences within `max_num_batched_tokens`; at most
`max_num_seqs` sequences run. New sequences pass the admission and need KV blocks for their first
chunk. If a decoding sequence gets no block, the latest arrival loses its blocks and waits again
(recompute), so the oldest sequence always finishes. This module uses no clock and no I/O.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from connector_tax.artifacts.study_records import Count, meta
from connector_tax.engine.kv import BlockPool, Holding


@dataclass(frozen=True)
class AdmissionOptions:
    """The options of the admission."""

    #: policy: which waiting requests start
    prefill_admission_policy: Literal["fifo", "pack"] = "fifo"
    prefill_admission_lookahead: Count = 64  #: number of requests that `pack` considers
    #: n: every n-th round is FIFO; 0: never
    prefill_force_fifo_every: Annotated[int, meta(ge=0)] = 0
    #: most prompt tokens admitted in one round; null: no limit
    prefill_max_tokens: Count | None = None
    #: most requests admitted in one round; null: max_num_seqs
    prefill_max_batch_size: Count | None = None
    decode_first: bool = False  #: whether decode gets its tokens of a step before prefill


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions(AdmissionOptions):
    """The limits of a step, the KV pool, and the options of the admission."""

    max_num_batched_tokens: Count  #: most prefill and decode tokens of one step
    max_num_seqs: Count  #: most sequences that run at once
    #: most sequences that decode in one step, in turn; null: all, as in vLLM
    max_decode_seqs_per_step: Count | None
    kv_blocks: Count  #: number of KV blocks
    kv_block_size: Count  #: tokens per block
    enable_prefix_caching: bool  #: whether prompts share the KV blocks of equal prefixes


@dataclass(slots=True, eq=False)
class Sequence:
    """One request inside the engine.

    Attributes:
        arrival: position in the order of arrival, unique.
        prompt_len: prompt tokens, at least 1.
        output_len: tokens it will generate, at least 1.
        digests: digests of the prompt's full blocks, for the prefix cache.
        sink: receiver of its tokens; the scheduler does not use it.
    """

    arrival: int
    prompt_len: int
    output_len: int
    digests: list[bytes]
    sink: Any = None
    generated: int = 0
    computed: int = 0
    preemptions: int = 0
    aborted: bool = False
    holding: Holding = field(default_factory=Holding)

    @property
    def prefill_len(self) -> int:
        """Return the tokens to compute before the next new one: prompt and generated tokens."""
        return self.prompt_len + self.generated

    @property
    def finished(self) -> bool:
        return self.generated >= self.output_len


class Admission:
    """The rule for which waiting requests may start their prefill, within a budget of prompt
    tokens.

    `fifo` takes requests from the head until the budget is used up. `pack` considers a window of
    the queue and takes the shortest prompts first, so that a long prompt at the head does not block
    shorter ones. Both return requests in their order of arrival. A head that exceeds the budget is
    taken alone if nothing else can be, so the queue never stalls. Every n-th round is FIFO, so that
    a long prompt is not passed over forever. A round in which nothing can start (no free slot,
    tokens or KV blocks) does not count.

    Args:
        max_context: a longer prompt counts as this many tokens.
    """

    def __init__(self, options: AdmissionOptions, max_context: int) -> None:
        self._options = options
        self._max_context = max_context
        self._round = 0

    def take(self, waiting: deque[Sequence], max_reqs: int) -> list[Sequence]:
        """Take at most `max_reqs` requests, in order of arrival; the rest keep their order."""
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
        """Do not count the last round, because all of its requests were put back."""
        self._round -= 1

    def _cost(self, request: Sequence) -> int:
        return min(request.prefill_len, self._max_context)

    def _take_fifo(
        self, waiting: deque[Sequence], max_reqs: int, budget: int | None
    ) -> list[Sequence]:
        taken: list[Sequence] = []
        used = 0
        while waiting and len(taken) < max_reqs:
            used += self._cost(waiting[0])
            if budget is not None and taken and used > budget:
                break
            taken.append(waiting.popleft())
            if budget is not None and used > budget:
                break
        return taken

    def _take_packed(self, waiting: deque[Sequence], max_reqs: int, budget: int) -> list[Sequence]:
        size = min(len(waiting), self._options.prefill_admission_lookahead)
        window = [waiting.popleft() for _ in range(size)]
        costs = [self._cost(request) for request in window]
        chosen: set[int] = set()
        used = 0
        for i in sorted(range(size), key=lambda i: (costs[i], i)):
            # From the shortest on: once one does not fit, no later one does.
            if len(chosen) == max_reqs or used + costs[i] > budget:
                break
            chosen.add(i)
            used += costs[i]
        if window and not chosen:
            chosen.add(0)
        waiting.extendleft(window[i] for i in range(size - 1, -1, -1) if i not in chosen)
        return [window[i] for i in sorted(chosen)]


def put_back(waiting: deque[Sequence], requests: list[Sequence]) -> None:
    """Return requests to the queue, each at its position by arrival."""
    # From the last on, so that each request of an unchanged head is put directly at the front.
    for request in reversed(requests):
        place = 0
        while place < len(waiting) and waiting[place].arrival < request.arrival:
            place += 1
        waiting.insert(place, request)


@dataclass
class StepPlan:
    """One step: tokens to compute for each sequence, and the numbers that determine its cost.

    Attributes:
        kv_tokens: KV tokens that the decoding sequences read.
        prefill_pairs: pairs of a prefilled token and a token that it attends to, itself included.
    """

    tokens: dict[Sequence, int] = field(default_factory=dict)
    prefill_tokens: int = 0
    decode_seqs: int = 0
    kv_tokens: int = 0
    prefill_pairs: int = 0
    admitted: list[Sequence] = field(default_factory=list)


class Scheduler:
    """The waiting queue, running sequences and KV pool.

    Args:
        max_model_len: most tokens of a sequence, and the highest cost in the admission.

    Raises:
        ValueError: the KV pool cannot hold one sequence of `max_model_len` tokens.
    """

    def __init__(self, options: SchedulerOptions, max_model_len: int) -> None:
        needed = -(-max_model_len // options.kv_block_size)
        if options.kv_blocks < needed:
            raise ValueError(
                f"kv_blocks: found {options.kv_blocks}; allowed: at least {needed}, "
                f"one sequence of max_model_len {max_model_len}"
            )
        self._options = options
        self._admission = Admission(options, max_model_len)
        self.pool = BlockPool(
            options.kv_blocks, options.kv_block_size, options.enable_prefix_caching
        )
        self.waiting: deque[Sequence] = deque()
        self._prefilling: list[Sequence] = []
        self._decoding: list[Sequence] = []
        self._in_step: StepPlan | None = None
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0

    @property
    def running(self) -> int:
        """Return the number of sequences that hold KV blocks."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def has_work(self) -> bool:
        """Return whether a step would do any work."""
        return bool(self.waiting or self._prefilling or self._decoding)

    def add(self, sequence: Sequence) -> None:
        """Append a sequence to the waiting queue."""
        self.waiting.append(sequence)

    def abort(self, sequence: Sequence) -> None:
        """Drop a sequence; if it is in a step, its blocks are released after the step."""
        if sequence.aborted or sequence.finished:
            return
        sequence.aborted = True
        if sequence in self._prefilling:
            self._prefilling.remove(sequence)
        elif sequence in self._decoding:
            self._decoding.remove(sequence)
        else:
            self.waiting.remove(sequence)
        if self._in_step is None or sequence not in self._in_step.tokens:
            self.pool.release(sequence.holding)

    # -- planning a step ------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """Return the next step; call `commit` with it before the next `plan`."""
        plan = StepPlan()
        before = self.preemptions
        if self._options.decode_first:
            self._plan_decodes(plan)
            self._plan_prefills(plan)
        else:
            self._plan_prefills(plan)
        # After a preemption there is no room for newcomers, which must not take the blocks of the
        # preempted sequence.
        if self.preemptions == before:
            self._admit(plan)
        if not self._options.decode_first:
            self._plan_decodes(plan)
        self._count(plan)
        self._in_step = plan
        return plan

    def _budget(self, plan: StepPlan) -> int:
        return self._options.max_num_batched_tokens - sum(plan.tokens.values())

    def _plan_decodes(self, plan: StepPlan) -> None:
        limit = self._budget(plan)
        if self._options.max_decode_seqs_per_step is not None:
            limit = min(limit, self._options.max_decode_seqs_per_step)
        turn = self._decoding[:limit]
        for sequence in turn:
            # An earlier sequence of this step may have preempted this one.
            if sequence.holding.blocks and self._secure(sequence, sequence.computed + 1, plan):
                plan.tokens[sequence] = 1
        if self._options.max_decode_seqs_per_step is not None:
            kept = [s for s in turn if s.holding.blocks]
            self._decoding = [s for s in self._decoding if s not in turn] + kept

    def _plan_prefills(self, plan: StepPlan) -> None:
        for sequence in list(self._prefilling):
            chunk = min(sequence.prefill_len - sequence.computed, self._budget(plan))
            if chunk < 1 or not sequence.holding.blocks:
                continue
            if self._secure(sequence, sequence.computed + chunk, plan):
                plan.tokens[sequence] = chunk

    def _admit(self, plan: StepPlan) -> None:
        if not self.waiting:
            return
        budget = self._budget(plan)
        slots = self._options.max_num_seqs - self.running
        taken = self._admission.take(self.waiting, min(slots, budget))
        for position, sequence in enumerate(taken):
            chunk = self._enter(sequence, budget)
            if chunk < 1:
                put_back(self.waiting, taken[position:])
                if position == 0:
                    self._admission.withdraw()
                return
            plan.tokens[sequence] = chunk
            plan.admitted.append(sequence)
            budget -= chunk

    def _enter(self, sequence: Sequence, budget: int) -> int:
        """Give a waiting sequence its first blocks; return the tokens of its first chunk, or 0."""
        if budget < 1:
            return 0
        hit = self.pool.match(sequence.digests, sequence.prompt_len)
        self.pool.share(sequence.holding, sequence.digests[:hit])
        computed = hit * self._options.kv_block_size
        chunk = min(sequence.prefill_len - computed, budget)
        if not self.pool.grow(sequence.holding, computed + chunk):
            self.pool.release(sequence.holding)
            return 0
        sequence.computed = computed
        if sequence.preemptions == 0:
            self.prefix_queries += sequence.prompt_len
            self.prefix_hits += computed
        self._prefilling.append(sequence)
        return chunk

    def _secure(self, sequence: Sequence, tokens: int, plan: StepPlan) -> bool:
        """Allocate blocks for `tokens` tokens, if needed by preempting later arrivals.

        Returns whether the blocks were allocated.
        """
        while not self.pool.grow(sequence.holding, tokens):
            victim = max([*self._prefilling, *self._decoding], key=lambda s: s.arrival)
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: Sequence, plan: StepPlan) -> None:
        (self._prefilling if victim in self._prefilling else self._decoding).remove(victim)
        plan.tokens.pop(victim, None)
        self.pool.release(victim.holding)
        victim.computed = 0
        victim.preemptions += 1
        self.preemptions += 1
        put_back(self.waiting, [victim])

    def _count(self, plan: StepPlan) -> None:
        for sequence, tokens in plan.tokens.items():
            if sequence in self._prefilling:
                plan.prefill_tokens += tokens
                plan.prefill_pairs += tokens * (2 * sequence.computed + tokens + 1) // 2
            else:
                plan.decode_seqs += 1
                plan.kv_tokens += sequence.computed

    # -- after a step ---------------------------------------------------------------------------

    def commit(self, plan: StepPlan) -> list[Sequence]:
        """Account for a finished step; return the sequences that got a token, in plan order."""
        self._in_step = None
        emitted = []
        for sequence, tokens in plan.tokens.items():
            if sequence.aborted:
                self.pool.release(sequence.holding)
                continue
            sequence.computed += tokens
            if sequence.computed < sequence.prefill_len:
                continue
            sequence.generated += 1
            emitted.append(sequence)
            self._advance(sequence)
        return emitted

    def _advance(self, sequence: Sequence) -> None:
        if sequence in self._prefilling:
            self._prefilling.remove(sequence)
            self._decoding.append(sequence)
            self.pool.publish(sequence.holding, sequence.digests)
        if sequence.finished:
            self._decoding.remove(sequence)
            self.pool.release(sequence.holding)

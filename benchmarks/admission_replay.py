"""The source's admission experiment in virtual time, with its engine's way of spending time.

The source is the experiment that admission.py repeats. The embedded engine computes prefill and
decode in one pass; the source's engine runs one forward pass for the prefill of a round and one for
its decode batch, its first pass is slow (the device warms up), and its 128 requests come one after
the other. Those four facts, and not the admission, make what the embedded engine's table lacks: the
tail of the inter-token latency (a token that is waited for during the prefills waits for sixteen
rounds of two passes) and pack's median TTFT (all short prompts have come before the first pass
ends, and go together in the second). This replay has them, and takes every decision by the engine's
own scheduler and admission.
"""

from dataclasses import dataclass

from connector_tax.engine.scheduler import Scheduler, SchedulerOptions, Sequence


@dataclass(frozen=True)
class Passes:
    """What the passes cost, in milliseconds.

    Attributes:
        first_ms: beyond its cost, for the first pass.
        prefill_ms, prefill_request_ms: of a prefill pass, and for each request in it.
        decode_ms: of a decode pass.
        submit_ms: from one request to the next.
    """

    first_ms: float
    prefill_ms: float
    prefill_request_ms: float
    decode_ms: float
    submit_ms: float


# Fitted: first_ms and prefill_ms to fifo's TTFT p50 and p99, decode_ms to fifo's ITL p50,
# prefill_request_ms to pack's TTFT p50; submit_ms is fifo's submit wall over 127. The other figures
# of the source had no part in it.
SOURCE_PASSES = Passes(202.12, 5.905, 0.5835, 9.558, 103.464 / 127)


@dataclass(frozen=True)
class Times:
    """One request: when it was submitted and when each of its tokens came, in ms."""

    submitted_ms: float
    tokens_ms: list[float]


def replay(
    options: SchedulerOptions, prompt_lens: list[int], new_tokens: int, passes: Passes
) -> list[Times]:
    """The times of every request, in the order of their submission."""
    scheduler = Scheduler(options, max(prompt_lens) + new_tokens)
    requests = [Sequence(i, length, new_tokens, []) for i, length in enumerate(prompt_lens)]
    times = [Times(i * passes.submit_ms, []) for i in range(len(requests))]
    now, extra, submitted = 0.0, passes.first_ms, 0
    while submitted < len(requests) or scheduler.has_work:
        if not scheduler.has_work:
            now = max(now, times[submitted].submitted_ms)
        while submitted < len(requests) and times[submitted].submitted_ms <= now:
            scheduler.add(requests[submitted])
            submitted += 1
        plan = scheduler.plan()
        prefilling = [s for s in plan.tokens if s.generated == 0]
        if prefilling:
            now += extra + passes.prefill_ms + passes.prefill_request_ms * len(prefilling)
            extra = 0.0
        prefilled = now
        if plan.decode_seqs:
            now += passes.decode_ms
        for sequence in scheduler.commit(plan):
            first = sequence.generated == 1
            times[sequence.arrival].tokens_ms.append(prefilled if first else now)
    return times

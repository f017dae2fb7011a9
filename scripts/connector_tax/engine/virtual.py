"""Run one launch in virtual time, by the engine's scheduler and step cost, without clock and HTTP.

A step equals one of `engine.loop.Engine._run` without the waits. All code that determines times
(plan, cost draw, launch offset, taxes, commit) is the engine's own, and so are the step log's lines
and the page of /metrics, without histograms of single steps and tokens.
"""

from collections.abc import Callable

from connector_tax.engine.config import EngineConfig
from connector_tax.engine.connectors import taxes_of_step
from connector_tax.engine.logs import Step
from connector_tax.engine.metrics import Metrics
from connector_tax.engine.model import StepClock
from connector_tax.engine.scheduler import Scheduler, Sequence, StepPlan


class VirtualEngine:
    """A launch of the embedded engine in virtual time; `now_ns` is the current time.

    Args:
        seed: seed of the launch offset and step jitter, as for the engine.
        device_us: returns the device's share of a step in us, without jitter and offset. By
            default the configuration's step cost gives this share.

    Attributes:
        steps: executed steps, removed by the reader; None if steps are not kept.
    """

    steps: list[Step] | None = None

    def __init__(
        self,
        config: EngineConfig,
        seed: int,
        device_us: Callable[[StepPlan], float] | None = None,
    ) -> None:
        self._tax = config.tax
        self._cost = config.step_cost
        self._device_us = device_us or self._linear_us
        self.scheduler = Scheduler(config.scheduler, config.model.max_model_len)
        self._clock = StepClock(config.step_cost, seed)
        self._options = config.scheduler
        self._block_size = config.scheduler.kv_block_size
        self._caching = config.scheduler.enable_prefix_caching
        self._arrivals = self._number = 0
        # Arrival, admission and first token of each unfinished request.
        self._times: dict[Sequence, list[int]] = {}
        self.metrics = Metrics(config.model.served_name)
        self.now_ns = 0

    def add(self, seq: int, prompt: int, output: int, arrival_ns: int | None = None) -> Sequence:
        """Add a request that shares no prompt block with any other; by default it arrives now."""
        self._arrivals += 1
        blocks = range(prompt // self._block_size) if self._caching else range(0)
        digests = [b"%d/%d" % (self._arrivals, block) for block in blocks]
        sequence = Sequence(self._arrivals, prompt, output, digests, seq)
        self.scheduler.add(sequence)
        self._times[sequence] = [self.now_ns if arrival_ns is None else arrival_ns, 0, 0]
        return sequence

    def abort(self, sequence: Sequence) -> None:
        """Drop a request whose client has disconnected."""
        del self._times[sequence]
        self.metrics.finished["abort"] += 1
        self.scheduler.abort(sequence)

    def page(self) -> bytes:
        """Return the text of the page /metrics."""
        return self.metrics.render(self.scheduler, self._options)

    def step(self) -> list[Sequence]:
        """Run one step; return the requests that got a token; `sink` is the `seq` of `add`."""
        plan = self.scheduler.plan()
        cached, admitted = self.scheduler.pool.cached, len(plan.admitted)
        taxes_us = meta, finished, load_tax = taxes_of_step(self._tax, cached, admitted)
        factor = self._clock.next_factor()
        host, device = self._cost.delta_us * factor, self._device_us(plan) * factor
        start_ns = self.now_ns
        device_ns = start_ns + round((host + (meta + finished)) * 1000)
        self.now_ns = device_ns + round((load_tax + device) * 1000)
        if self.steps is not None:
            self._number += 1
            times, taxes = (start_ns, device_ns, self.now_ns), taxes_us if self._tax else None
            queues = self.scheduler.running, len(self.scheduler.waiting)
            self.steps.append(Step(self._number, *times, plan, taxes, *queues))
        for sequence in plan.admitted:
            times_ns = self._times[sequence]
            times_ns[1] = times_ns[1] or start_ns
        emitted = self.scheduler.commit(plan)
        self.metrics.generation_tokens += len(emitted)
        return emitted

    def count_first(self, sequence: Sequence) -> None:
        """Count a request's first token, which the last step made."""
        times_ns = self._times[sequence]
        times_ns[2] = self.now_ns
        self.metrics.prompt_tokens += sequence.prompt_len
        self.metrics.ttft.observe((self.now_ns - times_ns[0]) / 1e9)

    def count_finished(self, sequence: Sequence) -> None:
        """Count a request that the last step finished."""
        arrival_ns, admitted_ns, first_ns = self._times.pop(sequence)
        stamps = arrival_ns, admitted_ns, first_ns, self.now_ns
        self.metrics.count_finished("length", sequence, *stamps)

    def _linear_us(self, plan: StepPlan) -> float:
        return self._cost.device_us(plan.prefill_tokens, plan.decode_seqs, plan.kv_tokens)

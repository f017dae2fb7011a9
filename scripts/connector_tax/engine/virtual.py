"""Run one launch in virtual time, by the engine's scheduler and step cost, without clock and HTTP.

A step equals one of `engine.loop.Engine._run` without the waits. All code that determines times
(plan, cost draw, launch offset, taxes, commit) is the engine's own.
"""

from collections.abc import Callable

from connector_tax.engine.config import EngineConfig
from connector_tax.engine.connectors import taxes_of_step
from connector_tax.engine.model import StepClock
from connector_tax.engine.scheduler import Scheduler, Sequence, StepPlan


class VirtualEngine:
    """A launch of the embedded engine in virtual time, which stands at `now_ns`.

    Args:
        config: the launch's configuration.
        seed: seed of the launch offset and step jitter, as for the engine.
        device_us: returns the device's share of a step in us, without jitter and offset; None: use
            the configuration's step cost.
        slowness: factor on the duration of this launch's steps, without taxes.
    """

    def __init__(
        self,
        config: EngineConfig,
        seed: int,
        device_us: Callable[[StepPlan], float] | None = None,
        slowness: float = 1.0,
    ) -> None:
        self._slowness = slowness
        self._tax = config.tax
        self._cost = config.step_cost
        self._device_us = device_us or self._linear_us
        self.scheduler = Scheduler(config.scheduler, config.model.max_model_len)
        self._clock = StepClock(config.step_cost, seed)
        self._block_size = config.scheduler.kv_block_size
        self._caching = config.scheduler.enable_prefix_caching
        self._arrivals = 0
        self.now_ns = 0

    def add(self, seq: int, prompt: int, output: int) -> Sequence:
        """Add a request that shares no prompt block with any other."""
        self._arrivals += 1
        blocks = range(prompt // self._block_size) if self._caching else range(0)
        digests = [b"%d/%d" % (self._arrivals, block) for block in blocks]
        sequence = Sequence(self._arrivals, prompt, output, digests, seq)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> list[Sequence]:
        """Run one step; return the requests that got a token, with its number in `sink`."""
        plan = self.scheduler.plan()
        cached, admitted = self.scheduler.pool.cached, len(plan.admitted)
        meta, finished, load_tax = taxes_of_step(self._tax, cached, admitted)
        factor = self._clock.next_factor() * self._slowness
        host, device = self._cost.delta_us * factor, self._device_us(plan) * factor
        self.now_ns += round((host + (meta + finished)) * 1000) + round((load_tax + device) * 1000)
        return self.scheduler.commit(plan)

    def _linear_us(self, plan: StepPlan) -> float:
        return self._cost.device_us(plan.prefill_tokens, plan.decode_seqs, plan.kv_tokens)

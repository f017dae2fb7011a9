"""Model the cost of a step, and emulate the device that takes this time.

    t = delta + beta0 + beta1 * prefill tokens + beta2 * decoding sequences + beta3 * KV tokens

delta is the host's share of a step; the betas are the device's. A launch has a seeded offset and a
step a seeded jitter, both relative to t. A connector's tax is added without offset and jitter, so
that it is known exactly. Steps end at absolute deadlines on CLOCK_MONOTONIC: a step that directly
follows another starts at the other's deadline, even if the host is late.
"""

import math
import random
import time
from dataclasses import dataclass
from typing import Any

from connector_tax.artifacts.study_records import NonNegative, Share
from connector_tax.engine.transformer import VectorTransformer
from connector_tax.linux import sharpen_timers

# The worker returns a step this long before its end, to allow for a late wake-up, the transfer to
# the main process and the preparation of the step's events.
_HAND_OVER_NS = 250_000


@dataclass(frozen=True)
class StepCost:
    """Coefficients of the step's cost, in microseconds; the two spreads are relative."""

    delta_us: NonNegative  #: the host's share
    beta0_us: NonNegative  #: the device's fixed share of a step
    beta1_us_per_prefill_token: NonNegative  #: per prefill token
    beta2_us_per_decode_seq: NonNegative  #: per decoding sequence
    beta3_us_per_kv_token: NonNegative  #: per KV token that decoding sequences read
    jitter_rel_sd: Share  #: relative spread from step to step, seeded
    launch_offset_rel_sd: Share  #: relative spread from launch to launch, seeded

    def device_us(self, prefill_tokens: int, decode_seqs: int, kv_tokens: int) -> float:
        """Return the device's share of a step, without jitter and offset."""
        return (
            self.beta0_us
            + self.beta1_us_per_prefill_token * prefill_tokens
            + self.beta2_us_per_decode_seq * decode_seqs
            + self.beta3_us_per_kv_token * kv_tokens
        )


class StepClock:
    """A source of the random cost of each step of one launch, in step order."""

    def __init__(self, cost: StepCost, launch_seed: int) -> None:
        self._cost = cost
        self._jitter = random.Random(f"{launch_seed}/jitter")
        draw = random.Random(f"{launch_seed}/launch offset").gauss(0.0, 1.0)
        self.launch_factor = math.exp(cost.launch_offset_rel_sd * draw)

    def next_factor(self) -> float:
        """Return the factor on the next step's cost, from the launch's offset and jitter."""
        factor = self.launch_factor
        if self._cost.jitter_rel_sd:
            factor *= math.exp(self._cost.jitter_rel_sd * self._jitter.gauss(0.0, 1.0))
        return factor

    def draw_us(self, prefill_tokens: int, decode_seqs: int, kv_tokens: int) -> tuple[float, float]:
        """Return (host share, device share) of the next step, in microseconds."""
        factor = self.next_factor()
        device = self._cost.device_us(prefill_tokens, decode_seqs, kv_tokens)
        return self._cost.delta_us * factor, device * factor


class StepDevice(VectorTransformer):
    """The engine's worker process, which spends the time of each step until shortly before its end.

    An element is `[start_ns, host_tax_us, load_tax_us, prefill_tokens, decode_seqs, kv_tokens]`;
    its result is `[device_start_ns, deadline_ns]`, both CLOCK_MONOTONIC. The result comes shortly
    before the deadline, for which the receiver waits.
    """

    def __init__(self, cost: dict[str, float], launch_seed: int) -> None:
        self._clock = StepClock(StepCost(**cost), launch_seed)
        sharpen_timers()

    def transform(self, prepared: list[list[float]]) -> list[list[int]]:
        """Let the time of each step pass, one step after the other."""
        return [self._step(*step) for step in prepared]

    def _step(self, start: float, host_tax: float, load_tax: float, *shape: Any) -> list[int]:
        host_us, device_us = self._clock.draw_us(*shape)
        device_start = int(start) + round((host_us + host_tax) * 1000)
        deadline = device_start + round((load_tax + device_us) * 1000)
        ahead = deadline - time.monotonic_ns() - _HAND_OVER_NS
        if ahead > 0:
            time.sleep(ahead / 1e9)
        return [device_start, deadline]

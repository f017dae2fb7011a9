"""The step's cost: what device.py spends.

    t = delta + beta0 + beta1 * prefill tokens + beta2 * decoding sequences + beta3 * KV tokens

delta is the host's share of a step, the betas are the device's. A launch has a seeded offset, a
step a seeded jitter, both relative to t. A connector's tax is added on top, untouched by either, so
that it is known exactly. Steps end at absolute deadlines on CLOCK_MONOTONIC: a step that follows
another directly starts at the other's deadline, whatever the host lost in between.
"""

import math
import random
from dataclasses import dataclass
from typing import Annotated

from connector_tax.artifacts.declare import says
from connector_tax.artifacts.study_records import NonNegative, Share


@dataclass(frozen=True)
class StepCost:
    """Coefficients of the step's cost, in microseconds; the two spreads are relative."""

    delta_us: Annotated[NonNegative, says("the host's share")]
    beta0_us: Annotated[NonNegative, says("the device's fixed share of a step")]
    beta1_us_per_prefill_token: Annotated[NonNegative, says("per prefill token")]
    beta2_us_per_decode_seq: Annotated[NonNegative, says("per decoding sequence")]
    beta3_us_per_kv_token: Annotated[NonNegative, says("per KV token that decoding sequences read")]
    jitter_rel_sd: Annotated[Share, says("relative spread from step to step, seeded")]
    launch_offset_rel_sd: Annotated[Share, says("relative spread from launch to launch, seeded")]

    def device_us(self, prefill_tokens: int, decode_seqs: int, kv_tokens: int) -> float:
        """The device's share of a step, without jitter and offset."""
        return (
            self.beta0_us
            + self.beta1_us_per_prefill_token * prefill_tokens
            + self.beta2_us_per_decode_seq * decode_seqs
            + self.beta3_us_per_kv_token * kv_tokens
        )


class StepClock:
    """Draws the cost of each step of one launch, in step order."""

    def __init__(self, cost: StepCost, launch_seed: int) -> None:
        self._cost = cost
        self._jitter = random.Random(f"{launch_seed}/jitter")
        draw = random.Random(f"{launch_seed}/launch offset").gauss(0.0, 1.0)
        self.launch_factor = math.exp(cost.launch_offset_rel_sd * draw)

    def next_factor(self) -> float:
        """What launch and jitter make of the next step: its time over the cost's."""
        factor = self.launch_factor
        if self._cost.jitter_rel_sd:
            factor *= math.exp(self._cost.jitter_rel_sd * self._jitter.gauss(0.0, 1.0))
        return factor

    def draw_us(self, prefill_tokens: int, decode_seqs: int, kv_tokens: int) -> tuple[float, float]:
        """(host share, device share) of the next step, in microseconds."""
        factor = self.next_factor()
        device = self._cost.device_us(prefill_tokens, decode_seqs, kv_tokens)
        return self._cost.delta_us * factor, device * factor

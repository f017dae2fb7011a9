# CONNECTOR_TAX_PATCH
"""Compute a step's device time by a roofline: the slower of arithmetic and memory.

Matrix products and attention are added, each with its own roof. A mixture of experts reads the
weights of as many experts as the step's tokens are expected to choose, all equally likely. The
coefficients come from connector_tax.roofline:Roofline.coefficients.
"""

from collections.abc import Mapping
from typing import Any, Protocol


class Batch(Protocol):
    """The parts of a step that determine the device's time.

    Attributes:
        kv_tokens: KV tokens of the decoding sequences before this step.
        prefill_pairs: number of query-key pairs, over the prompt tokens.
    """

    @property
    def prefill_tokens(self) -> int: ...
    @property
    def decode_seqs(self) -> int: ...
    @property
    def kv_tokens(self) -> int: ...
    @property
    def prefill_pairs(self) -> int: ...


def device_us(coefficients: Mapping[str, Any], batch: Batch) -> float:
    """Return the device's time for a step in us."""
    c, tokens = coefficients, batch.prefill_tokens + batch.decode_seqs
    # The output's weights are read by every step, and used for the sequences that get a token.
    flops = c["layer_flops"] * tokens + c["head_flops"] * (batch.decode_seqs + 1)
    untouched = (1 - c["expert_share"]) ** tokens
    weights = c["dense_bytes"] + c["expert_bytes"] * (1 - untouched)
    linear_s = max(flops / c["linear_flops_s"], weights / c["bandwidth_bytes_s"])
    pairs = batch.prefill_pairs + batch.kv_tokens + batch.decode_seqs
    attention_s = max(
        c["attention_flops"] * pairs / c["attention_flops_s"],
        batch.kv_tokens * c["kv_bytes"] / c["bandwidth_bytes_s"],
    )
    return float(1e6 * (linear_s + attention_s) + c["besides_us"])

# CONNECTOR_TAX_PATCH
"""A decoder without weights, whose attention layers exist and whose forward is a device step.

The layers are vLLM's own, so that the KV cache has its usual form and connectors register each
layer.
"""

# mypy: disable-error-code="import-not-found,misc,no-untyped-call"

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer


def model_class(begin: Callable[[], bool], launched: Callable[[], None]) -> type:
    """Return the model's class; `begin` queues the step and returns whether layers are launched one
    by one."""

    class TimedModel(nn.Module):
        # vLLM inspects the parameter names, here and in `forward`.
        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:  # noqa: ARG002
            super().__init__()
            config = vllm_config.model_config.hf_config
            heads = config.num_attention_heads
            size = getattr(config, "head_dim", None) or config.hidden_size // heads
            layers = range(config.num_hidden_layers)
            self.names = [f"model.layers.{layer}.self_attn.attn" for layer in layers]
            self.attention = nn.ModuleList(
                Attention(
                    heads,
                    size,
                    size**-0.5,
                    num_kv_heads=config.num_key_value_heads,
                    cache_config=vllm_config.cache_config,
                    quant_config=None,
                    prefix=name,
                )
                for name in self.names
            )
            # The output of a layer or head is not used, so a single number replaces it.
            self.hidden = torch.empty(1, 1, dtype=torch.bfloat16)
            self.anchor = nn.Parameter(torch.zeros(1), requires_grad=False)

        def embed_input_ids(self, input_ids: Any) -> Any:
            return self.hidden.expand(input_ids.shape[0], 1)

        def forward(self, input_ids: Any, positions: Any, **_options: Any) -> Any:  # noqa: ARG002
            if begin():
                for name in self.names:
                    _layer(name)
            launched()
            return self.hidden.expand(positions.shape[-1], 1)

        def compute_logits(self, hidden_states: Any) -> Any:
            return hidden_states

        def load_weights(self, _weights: Any) -> set[str]:
            return {"anchor"}

    return TimedModel


@maybe_transfer_kv_layer  # type: ignore[untyped-decorator]
def _layer(layer_name: str) -> None:
    """Run a layer's host part of attention: the connector's hooks around it."""

"""What a model's config.json says of its size: weights, heads, experts."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from connector_tax.config import ConfigError
from connector_tax.files import ArtifactError, read_json

BYTES_OF_BF16 = 2


@dataclass(frozen=True)
class ModelSize:
    """What a model's config.json says of its size.

    Attributes:
        dense: weights of a layer that every token uses.
        expert: weights of one expert of a layer; 0 without experts.
        weight_bytes: of one weight.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    dense: int
    expert: int
    experts: int
    experts_per_token: int
    embedding: int
    tied: bool
    weight_bytes: int

    @property
    def parameters(self) -> int:
        """All weights."""
        layer = self.dense + self.experts * self.expert
        return self.layers * layer + self.embedding * (1 if self.tied else 2)

    @property
    def active_parameters(self) -> int:
        """Weights of the layers that one token uses, and those of the output."""
        layer = self.dense + self.experts_per_token * self.expert
        return self.layers * layer + self.embedding

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token, bfloat16."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES_OF_BF16


def read_model(path: Path, key: str = "rehearsal.model_config") -> ModelSize:
    """The sizes of a model of the Llama, Qwen or Mixtral kind from its config.json.

    Args:
        key: where the path stands in the configuration, for an error.

    Raises:
        ConfigError: the file is missing, lacks a key, or describes another kind; names the key.
    """
    try:
        content = read_json(path)
    except ArtifactError as error:
        raise ConfigError(f"{key}: {error}") from None
    try:
        return _model(content)
    except KeyError as error:
        raise ConfigError(f"{path}: key {error} is missing") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def _model(content: Mapping[str, Any]) -> ModelSize:
    hidden, heads = content["hidden_size"], content["num_attention_heads"]
    kv_heads = content["num_key_value_heads"]
    head_dim = content.get("head_dim") or hidden // heads
    attention = 2 * hidden * head_dim * (heads + kv_heads)
    experts = content.get("num_experts") or content.get("num_local_experts") or 0
    if experts and (content.get("decoder_sparse_step", 1) != 1 or content.get("mlp_only_layers")):
        raise ValueError("layers with and without experts; allowed: one kind of layer")
    width = content.get("moe_intermediate_size") if experts else content["intermediate_size"]
    feed_forward = 3 * hidden * (width or content["intermediate_size"])
    quantized = content.get("quantization_config", {}).get("quant_method")
    if quantized not in (None, "fp8"):
        raise ValueError(f"quantization_config.quant_method: found {quantized!r}; allowed: fp8")
    return ModelSize(
        layers=content["num_hidden_layers"],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dense=attention + (hidden * experts if experts else feed_forward),
        expert=feed_forward if experts else 0,
        experts=experts,
        experts_per_token=content["num_experts_per_tok"] if experts else 0,
        embedding=content["vocab_size"] * hidden,
        tied=content.get("tie_word_embeddings", False),
        weight_bytes=1 if quantized else BYTES_OF_BF16,
    )

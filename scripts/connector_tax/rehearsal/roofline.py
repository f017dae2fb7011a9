"""What a step costs on an accelerator, by roofline: the slower of arithmetic and memory.

The peaks are those of config/accelerators.yaml, the model's sizes those of its config.json. Matrix
products and attention are added, each by its own roof; a mixture of experts reads the weights of
the experts that the tokens of a step are expected to choose, each of them with the same chance.
Communication between the GPUs of a tensor-parallel engine is left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from connector_tax.config import ConfigError, load_yaml, shipped, validate
from connector_tax.engine.scheduler import StepPlan
from connector_tax.files import ArtifactError, read_json

TABLE = "config/accelerators.yaml"
BYTES_OF_BF16 = 2


@dataclass(frozen=True)
class Accelerator:
    """One row of the table; `fp8_tflops` is None where it has no fp8."""

    name: str
    bf16_tflops: float
    fp8_tflops: float | None
    bandwidth_gb_s: float
    memory_mib: float
    source: str


@dataclass(frozen=True)
class Efficiency:
    """What is reached of the peaks, and what a start takes; keys of the table."""

    linear: float
    attention: float
    bandwidth: float
    host_us: float
    reserve_gib: float
    start_s: float
    load_gb_s: float
    step_sd: float
    launch_sd: float


def read_accelerator(name: str) -> tuple[Accelerator, Efficiency]:
    """A row of the table, and its efficiencies.

    Raises:
        ConfigError: the table is unusable, or has no row of this name.
    """
    path = shipped(TABLE)
    table = load_yaml(path)
    validate(table, "accelerators.schema.yaml", str(path))
    rows = table["accelerators"]
    if name not in rows:
        raise ConfigError(f"rehearsal.accelerator: found {name!r}; allowed: {', '.join(rows)}")
    return Accelerator(name, **rows[name]), Efficiency(**table["efficiency"])


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

    def layer_weights_read(self, tokens: int) -> float:
        """Weights of all layers that a step of so many tokens reads."""
        if not self.experts:
            return float(self.layers * self.dense)
        untouched = (1 - self.experts_per_token / self.experts) ** tokens
        return self.layers * (self.dense + self.experts * (1 - untouched) * self.expert)


def read_model(path: Path) -> ModelSize:
    """The sizes of a model of the Llama, Qwen or Mixtral kind from its config.json.

    Raises:
        ConfigError: the file is missing, lacks a key, or describes another kind; names the key.
    """
    try:
        content = read_json(path)
    except ArtifactError as error:
        raise ConfigError(f"rehearsal.model_config: {error}") from None
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


@dataclass(frozen=True)
class Roofline:
    """The cost of a step, and the memory, of a model on `gpus` accelerators.

    Raises:
        ConfigError: the model's weights are fp8 and the accelerator has none.
    """

    model: ModelSize
    accelerator: Accelerator
    efficiency: Efficiency
    gpus: int

    def __post_init__(self) -> None:
        if self.model.weight_bytes == 1 and self.accelerator.fp8_tflops is None:
            raise ConfigError(f"rehearsal.accelerator: {self.accelerator.name} has no fp8")

    def device_us(self, plan: StepPlan) -> float:
        """The device's share of a step, in microseconds."""
        model, gpu, reached = self.model, self.accelerator, self.efficiency
        tokens = plan.prefill_tokens + plan.decode_seqs
        # The output's weights are read by every step, and used for the sequences that get a token.
        layers = 2 * (model.active_parameters - model.embedding) * tokens
        flops = layers + 2 * model.embedding * (plan.decode_seqs + 1)
        weights = (model.layer_weights_read(tokens) + model.embedding) * model.weight_bytes
        pairs = plan.prefill_pairs + plan.kv_tokens + plan.decode_seqs
        attention = 4 * model.layers * model.heads * model.head_dim * pairs
        peak = gpu.fp8_tflops if model.weight_bytes == 1 else gpu.bf16_tflops
        assert peak is not None
        bandwidth = gpu.bandwidth_gb_s * 1e9 * reached.bandwidth
        linear_s = max(flops / (peak * 1e12 * reached.linear), weights / bandwidth)
        attention_s = max(
            attention / (gpu.bf16_tflops * 1e12 * reached.attention),
            plan.kv_tokens * model.kv_bytes_per_token / bandwidth,
        )
        return 1e6 * (linear_s + attention_s) / self.gpus

    def kv_tokens(self, memory_share: float) -> int:
        """Tokens that the KV cache has room for; negative where the weights do not fit."""
        memory = self.accelerator.memory_mib * 2**20 * memory_share
        memory -= self.efficiency.reserve_gib * 2**30
        weights = self.model.parameters * self.model.weight_bytes
        return int((memory * self.gpus - weights) // self.model.kv_bytes_per_token)

    @property
    def startup_s(self) -> float:
        """From launch to ready."""
        weights = self.model.parameters * self.model.weight_bytes
        return self.efficiency.start_s + weights / self.efficiency.load_gb_s / 1e9

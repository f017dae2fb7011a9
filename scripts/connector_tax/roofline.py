"""Compute a model's cost on an accelerator: coefficients of its step time, and its memory.

The peaks come from config/accelerators.yaml; weights, heads and experts from the model's
config.json. Communication between the GPUs of a tensor-parallel engine is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from connector_tax.config import ConfigError, load_yaml, shipped, validate
from connector_tax.files import ArtifactError, read_json
from connector_tax.vllm.device_time.roofline import Batch, device_us

if TYPE_CHECKING:
    from connector_tax.artifacts.study_records import Accelerator, Efficiency, EngineSection

TABLE = "config/accelerators.yaml"
# vLLM's default on a GPU.
KV_BLOCK = 16
KINDS = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
BYTES_OF_BF16 = 2


def memory_share(flags: Mapping[str, Any]) -> float:
    """Return the share of a GPU's memory that vLLM uses with these flags."""
    return float(flags.get("--gpu-memory-utilization", 0.9))


@dataclass(frozen=True)
class ModelSize:
    """The sizes of a model, from its config.json.

    Attributes:
        dense: number of weights per layer that every token uses.
        expert: number of weights of one expert of a layer; 0 without experts.
        weight_bytes: bytes per weight.
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
        """Return the number of all weights."""
        layer = self.dense + self.experts * self.expert
        return self.layers * layer + self.embedding * (1 if self.tied else 2)

    @property
    def active_parameters(self) -> int:
        """Return the number of weights that one token uses, output layer included."""
        layer = self.dense + self.experts_per_token * self.expert
        return self.layers * layer + self.embedding

    @property
    def kv_bytes_per_token(self) -> int:
        """Return the bytes of one token's keys and values, in bfloat16."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES_OF_BF16


def read_model(path: Path, key: str = "rehearsal.model_config") -> ModelSize:
    """Return the sizes of a Llama, Qwen or Mixtral model from its config.json.

    Args:
        key: the configuration key of the path, for errors.

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
    if (kind := content.get("model_type")) not in (None, *KINDS):
        raise ValueError(
            f"model_type: found {kind!r}; allowed: {', '.join(KINDS)}, whose layers all attend to"
            " every token"
        )
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


def read_accelerator(
    name: str, key: str = "rehearsal.accelerator"
) -> tuple[Accelerator, Efficiency]:
    """Return an accelerator's row and efficiencies; values in the row replace the table's defaults.

    Args:
        key: the configuration key of the name, for errors.

    Raises:
        ConfigError: the table is unusable, or has no row of this name.
    """
    path = shipped(TABLE)
    table = load_yaml(path)
    validate(table, "accelerators", str(path))
    rows = table["accelerators"]
    if name not in rows:
        raise ConfigError(f"{key}: found {name!r}; allowed: {', '.join(rows)}")
    reached: Efficiency = table["efficiency"] | rows[name].get("efficiency", {})
    return rows[name], reached


@dataclass(frozen=True)
class Roofline:
    """A step's cost and the memory of a model on `gpus` accelerators.

    Raises:
        ConfigError: the model's weights are fp8, which the accelerator lacks.
    """

    model: ModelSize
    accelerator: Accelerator
    efficiency: Efficiency
    gpus: int

    def __post_init__(self) -> None:
        if self.model.weight_bytes == 1 and self.accelerator["fp8_tflops"] is None:
            raise ConfigError(
                "accelerator: found one without fp8; allowed: one that has it, as the "
                "model's weights are fp8"
            )

    @cached_property
    def coefficients(self) -> dict[str, float]:
        """Return the coefficients of `device_us`: operations, bytes, reached peaks per second."""
        model, gpu, reached = self.model, self.accelerator, self.efficiency
        peak = gpu["fp8_tflops"] if model.weight_bytes == 1 else gpu["bf16_tflops"]
        assert peak is not None
        experts = model.layers * model.experts * model.expert
        dense = model.layers * model.dense + model.embedding
        return {
            "layer_flops": 2 * (model.active_parameters - model.embedding),
            "head_flops": 2 * model.embedding,
            "expert_share": model.experts_per_token / model.experts if model.experts else 0,
            "dense_bytes": dense * model.weight_bytes,
            "expert_bytes": experts * model.weight_bytes,
            "linear_flops_s": peak * 1e12 * reached["linear"] * self.gpus,
            "bandwidth_bytes_s": gpu["bandwidth_gb_s"] * 1e9 * reached["bandwidth"] * self.gpus,
            "attention_flops": 4 * model.layers * model.heads * model.head_dim,
            "attention_flops_s": gpu["bf16_tflops"] * 1e12 * reached["attention"] * self.gpus,
            "kv_bytes": model.kv_bytes_per_token,
            "besides_us": reached["besides_us"],
        }

    def device_us(self, batch: Batch) -> float:
        """Return the device's time for a step, in us."""
        return device_us(self.coefficients, batch)

    def kv_tokens(self, flags: Mapping[str, Any]) -> int:
        """Return the KV cache's capacity in tokens; negative if the weights do not fit."""
        if (cache := flags.get("--kv-cache-memory-bytes")) is not None:
            return int(cache) * self.gpus // self.model.kv_bytes_per_token
        memory = self.accelerator["memory_mib"] * 2**20 * memory_share(flags)
        memory -= self.efficiency["reserve_gib"] * 2**30
        weights = self.model.parameters * self.model.weight_bytes
        return int((memory * self.gpus - weights) // self.model.kv_bytes_per_token)

    @property
    def startup_s(self) -> float:
        """Return the expected time from launch to ready, in s."""
        weights = self.model.parameters * self.model.weight_bytes
        return self.efficiency["start_s"] + weights / self.efficiency["load_gb_s"] / 1e9


def device_time(engine: EngineSection) -> dict[str, Any]:
    """Return the content of a launch's device_time.json, which describes the emulated device.

    Raises:
        ConfigError: the accelerator or model is unusable, or the engine has several GPUs; names the
            key.
    """
    section, flags = engine["device_time"], engine["flags"]
    for kind in ("tensor", "pipeline", "data"):
        if int(flags.get(key := f"--{kind}-parallel-size", 1)) != 1:
            raise ConfigError(f"engine.flags.{key}: found {flags[key]}; allowed: 1, or none")
    path = shipped(section["model_config"])
    if engine["model"] != (wanted := f"./build/models/{path.stem}"):
        raise ConfigError(
            f"engine.model: found {engine['model']!r}; allowed: {wanted!r}, which is made from "
            f"engine.device_time.model_config ({path})"
        )
    accelerator, reached = read_accelerator(
        section["accelerator"], "engine.device_time.accelerator"
    )
    roof = Roofline(read_model(path, "engine.device_time.model_config"), accelerator, reached, 1)
    blocks = roof.kv_tokens(flags) // KV_BLOCK
    if blocks <= 0:
        raise ConfigError(
            f"engine.device_time.accelerator: found {section['accelerator']}; allowed: one whose "
            "memory holds the model's weights"
        )
    return {
        "accelerator": section["accelerator"],
        "architecture": read_json(path)["architectures"][0],
        **roof.coefficients,
        "besides_us": section["besides_us"],
        "launch_us": section["launch_us"],
        "link_bytes_s": section["link_gb_s"] * 1e9,
        "copy_us": section["copy_us"],
        "copy_piece_ns": section["copy_piece_ns"],
        "block_size": KV_BLOCK,
        "kv_blocks": blocks,
    }

"""What a step costs on an accelerator, by roofline: the slower of arithmetic and memory.

The peaks are those of config/accelerators.yaml, the model's sizes those of its config.json. Matrix
products and attention are added, each by its own roof; a mixture of experts reads the weights of
the experts that the tokens of a step are expected to choose, each of them with the same chance.
Communication between the GPUs of a tensor-parallel engine is left out.
"""

from dataclasses import dataclass

from connector_tax.config import ConfigError, load_yaml, shipped, validate
from connector_tax.engine.scheduler import StepPlan
from connector_tax.model_size import ModelSize

TABLE = "config/accelerators.yaml"


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

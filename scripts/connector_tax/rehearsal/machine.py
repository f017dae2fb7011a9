"""The machine that a study is rehearsed on: an engine per configuration.

A study on the embedded engine defines its costs and taxes itself. For a real vLLM, `rehearsal` in
the configuration names an accelerator (`roofline`). Connector taxes are unknown before such a
study, so every configuration is given plain's costs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from connector_tax.artifacts import paths
from connector_tax.artifacts.names import baseline_of
from connector_tax.artifacts.study_records import RehearsalSection, StudyDocument
from connector_tax.config import ConfigError, shipped
from connector_tax.engine.config import EngineConfig, ModelOptions, config_of
from connector_tax.engine.faults import FaultPlan
from connector_tax.engine.model import StepCost
from connector_tax.engine.scheduler import SchedulerOptions, StepPlan
from connector_tax.roofline import (
    KV_BLOCK,
    Roofline,
    memory_share,
    read_accelerator,
    read_model,
)
from connector_tax.servers.kinds import engine_of
from connector_tax.study.durations import VLLM_SEQUENCES, VLLM_STEP_TOKENS

# Relative spread of TPOT p50 over launches of the first release's default study.
EMBEDDED_SD = 0.006


@dataclass(frozen=True)
class Machine:
    """The costs of each configuration's launches.

    Attributes:
        engines: engine by configuration id.
        device_us: as for `VirtualEngine`.
        startup_s: time from launch to ready.
        kv_tokens: capacity of the KV cache in tokens.
        source: sentences on the origin of these numbers.
        launch_sd: relative spread of a step's time between launches.
    """

    engines: Mapping[str, EngineConfig]
    device_us: Callable[[StepPlan], float] | None
    startup_s: float
    kv_tokens: int
    source: tuple[str, ...]
    launch_sd: float = 0.0

    def noisy(self, launch_sd: float) -> "Machine":
        """Return this machine with the spread `launch_sd` between its launches."""
        engines = {
            name: replace(
                engine, step_cost=replace(engine.step_cost, launch_offset_rel_sd=launch_sd)
            )
            for name, engine in self.engines.items()
        }
        return replace(self, engines=engines, launch_sd=launch_sd)


def has_machine(study: StudyDocument) -> bool:
    """Return whether a resolved design names a machine for rehearsal."""
    config = study["config"]
    named = "accelerator" in (config.get("rehearsal") or {})
    return named or "definition_content" in config["engine"]


def machine_of(study: StudyDocument) -> Machine:
    """Return the machine that a resolved design names.

    Raises:
        ConfigError: the design names no machine or an unknown one; the message names the key.
    """
    engine, names = study["config"]["engine"], study["config"].get("rehearsal")
    if "definition_content" in engine:
        return _embedded(study)
    if not has_machine(study) or names is None:
        raise ConfigError(
            "rehearsal: missing; a study of a real vLLM must name the accelerator and the "
            "model_config that its rehearsal assumes"
        )
    return _on_accelerator(study, names)


def _embedded(study: StudyDocument) -> Machine:
    content = study["config"]["engine"]["definition_content"]
    engines = {c["id"]: config_of(content, c["id"], paths.STUDY) for c in study["configurations"]}
    options = engines[baseline_of(study["config"])].scheduler
    machine = Machine(
        engines=engines,
        device_us=None,
        startup_s=engine_of(study["config"]["engine"]).startup_s,
        kv_tokens=options.kv_blocks * options.kv_block_size,
        source=(
            "Step costs and taxes come from the embedded engine's definition, the difference "
            "between launches from results/archive/default.tar.zst of the first release.",
        ),
    )
    return machine.noisy(EMBEDDED_SD)


def _on_accelerator(study: StudyDocument, names: RehearsalSection) -> Machine:
    engine = study["config"]["engine"]
    flags, emulated = engine["flags"], engine["device"] == "emulated"
    name = names["accelerator"]
    accelerator, reached = read_accelerator(name)
    if emulated:
        # Its steps end on a timer, so that they take the modelled time in every launch.
        besides_us = engine["device_time"]["besides_us"]
        reached = {**reached, "besides_us": besides_us, "step_sd": 0.0, "launch_sd": 0.0}
    model = read_model(shipped(names["model_config"]))
    roof = Roofline(model, accelerator, reached, int(flags.get("--tensor-parallel-size", 1)))
    kv_tokens, longest = roof.kv_tokens(flags), int(flags.get("--max-model-len", 0))
    if kv_tokens < longest or kv_tokens <= 0:
        raise ConfigError(
            f"engine.flags.--max-model-len: found {longest}; allowed: at most {max(kv_tokens, 0)}, "
            f"what {memory_share(flags):.0%} of {roof.gpus} x {name} leaves for the KV cache "
            f"beside {model.parameters * model.weight_bytes / 2**30:.1f} GiB of weights"
        )
    launch_sd = names.get("launch_sd", reached["launch_sd"])
    cost = StepCost(0.0, 0.0, 0.0, 0.0, 0.0, reached["step_sd"], 0.0)
    gpu = f"{roof.gpus} x {name}" if roof.gpus > 1 else name
    machine = Machine(
        engines=_same_for_all(study, cost, kv_tokens),
        # The host prepares a step while the device computes the previous one.
        device_us=lambda plan: max(reached["host_us"], roof.device_us(plan)),
        # With an emulated device there are no weights to read and nothing to compile.
        startup_s=engine_of(engine).startup_s if emulated else roof.startup_s,
        kv_tokens=kv_tokens,
        source=(
            f"{gpu}: {accelerator['bf16_tflops']:g} TFLOP/s bf16, "
            f"{accelerator['bandwidth_gb_s']:g} GB/s, "
            f"{accelerator['memory_mib'] / 1024:.0f} GiB ({accelerator['source']}).",
            f"Assumed: {reached['linear']:.0%} of the peak arithmetic in matrix products, "
            f"{reached['attention']:.0%} in attention, {reached['bandwidth']:.0%} of the "
            f"bandwidth; {reached['besides_us'] / 1e3:g} ms of other device time and "
            f"{reached['host_us'] / 1e3:g} ms of host time a step. A measured step log should "
            "replace these.",
            f"Model: {model.parameters / 1e9:.1f} billion weights, "
            f"{model.active_parameters / 1e9:.1f} used by a token, "
            f"{model.kv_bytes_per_token / 1024:.0f} KiB of KV cache a token "
            f"({names['model_config']}).",
        ),
    )
    return machine.noisy(launch_sd)


def _same_for_all(study: StudyDocument, cost: StepCost, kv_tokens: int) -> dict[str, EngineConfig]:
    engine = study["config"]["engine"]
    flags = engine["flags"]
    model = ModelOptions(
        engine["served_model_name"], int(flags.get("--max-model-len", kv_tokens)), 2
    )
    options = SchedulerOptions(
        max_num_batched_tokens=int(flags.get("--max-num-batched-tokens", VLLM_STEP_TOKENS)),
        max_num_seqs=int(flags.get("--max-num-seqs", VLLM_SEQUENCES)),
        max_decode_seqs_per_step=None,
        kv_blocks=kv_tokens // KV_BLOCK,
        kv_block_size=KV_BLOCK,
        # No prompt is sent twice, so a cache would only cost time.
        enable_prefix_caching=False,
        decode_first=True,
    )
    return {
        c["id"]: EngineConfig(c["id"], model, options, cost, None, FaultPlan(None))
        for c in study["configurations"]
    }

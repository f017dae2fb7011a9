# CONNECTOR_TAX_PATCH
"""What the emulated device replaces in a vLLM, and whether the one of this interpreter has it.

Also a program of its own, which prints the missing ones as JSON.
"""

# mypy: disable-error-code="import-not-found"

import json
import sys

from connector_tax_step_probe.hook_points import missing

_WORKER = "vllm.v1.worker"
# Module and what is replaced, called or read there, by name. The first are replaced before the
# others are imported: a kernel is what Triton's `jit` makes of it when its module is.
KERNEL_TARGETS = (
    ("vllm.triton_utils", "HAS_TRITON"),
    ("vllm.triton_utils", "triton"),
)
TARGETS = (
    ("vllm", "ModelRegistry.register_model"),
    ("vllm.config.vllm", "HAS_TRITON"),
    ("vllm.model_executor.layers.attention", "Attention"),
    ("vllm.model_executor.layers.attention.kv_transfer_utils", "maybe_transfer_kv_layer"),
    ("vllm.platforms.cpu", "CpuPlatform.check_and_update_config"),
    ("vllm.v1.attention.backend", "MultipleOf"),
    (
        "vllm.v1.attention.backends.cpu_attn",
        "CPUAttentionBackend.get_supported_kernel_block_sizes",
    ),
    ("vllm.v1.attention.backends.cpu_attn", "CPUAttentionBackend.supported_kv_cache_layouts"),
    ("vllm.v1.core.sched.scheduler", "Scheduler.add_request"),
    ("vllm.v1.kv_cache_layout", "KVCacheLayout.LBNHC"),
    ("vllm.v1.kv_cache_layout", "KVCacheLayout.LBHNC"),
    (f"{_WORKER}.cpu_worker", "CPUWorker.determine_available_memory"),
    (f"{_WORKER}.worker_base", "WorkerWrapperBase.init_device"),
)
# Of the model runner of a GPU, which asks for Triton when it is imported.
RUNNER_TARGETS = (
    (f"{_WORKER}.cpu.shm", "fake_pin_memory"),
    (f"{_WORKER}.cpu.model_runner", "CPUModelRunner"),
    (f"{_WORKER}.gpu.model_runner", "GPUModelRunner.execute_model"),
    (f"{_WORKER}.gpu.model_runner", "GPUModelRunner.sample"),
    (f"{_WORKER}.gpu.model_states.default", "DefaultModelState.prepare_attn"),
    (f"{_WORKER}.gpu.sample.output", "SamplerOutput"),
    (f"{_WORKER}.utils", "allocate_kv_cache"),
)


def main() -> None:
    """Print what is missing; what vLLM prints while it is imported comes before."""
    from .patches import without_kernels

    lacking = missing(KERNEL_TARGETS)
    if not lacking:
        without_kernels()
        lacking = missing(TARGETS)
    print(json.dumps(lacking or missing(RUNNER_TARGETS)))
    sys.exit(0)


if __name__ == "__main__":
    main()

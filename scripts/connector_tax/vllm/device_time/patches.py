# CONNECTOR_TAX_PATCH
"""Replace vLLM's own functions to emulate the device.

Replaced are: Triton's kernels, by calls that do nothing; the model, by one whose forward is a step
of the device; CUDA events, by moments of its queue; sampling, by token ids made on the host; the
metadata of attention, which no kernel reads; the KV cache's memory, by addresses; the restrictions
of vLLM's CPU platform and CPU attention. The rest is what a GPU's server runs.

Run as a program, it prints as JSON which of these this interpreter's vLLM lacks.
"""

# mypy: disable-error-code="import-not-found"

import importlib
import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from connector_tax_step_probe.hook_points import missing
from connector_tax_step_probe.log import Log, mark

from . import connectors
from .clock import Batch, Device, Step, event_class
from .copies import Compute, Copy, Instead, Link, zeros
from .roofline import device_us

# Start method of the engine core's process, which vLLM fixes on a CPU.
_START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
_STEP = mark(0)
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
    ("vllm.platforms.cpu", "CpuPlatform.register_triton_kernel_overrides"),
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
# Parts of a GPU's model runner, which needs Triton when it is imported.
RUNNER_TARGETS = (
    (f"{_WORKER}.cpu.shm", "fake_pin_memory"),
    (f"{_WORKER}.cpu.model_runner", "CPUModelRunner"),
    (f"{_WORKER}.gpu.model_runner", "GPUModelRunner.execute_model"),
    (f"{_WORKER}.gpu.model_runner", "GPUModelRunner.sample"),
    (f"{_WORKER}.gpu.model_states.default", "DefaultModelState.prepare_attn"),
    (f"{_WORKER}.gpu.sample.output", "SamplerOutput"),
    (f"{_WORKER}.utils", "allocate_kv_cache"),
)


class PatchError(Exception):
    """This vLLM lacks a part to replace; the text names it."""


class _NoKernel:
    """A Triton kernel that costs the host a call, and the device nothing."""

    def __init__(self, function: Any) -> None:
        self.fn = function
        self.__name__ = getattr(function, "__name__", "kernel")

    def __getitem__(self, _grid: Any) -> Any:
        return self

    def __call__(self, *_args: Any, **_options: Any) -> None:
        return None

    def warmup(self, *_args: Any, **_options: Any) -> None:
        return None


def _no_kernel(*args: Any, **_options: Any) -> Any:
    return _NoKernel(args[0]) if args and callable(args[0]) else _NoKernel


def without_kernels() -> None:
    """Make every kernel that is imported from now on do nothing."""
    triton = importlib.import_module("vllm.triton_utils").triton
    triton.jit = _no_kernel
    triton.next_power_of_2 = lambda n: 1 << (int(n) - 1).bit_length()


class Emulation:
    """The emulated device of one engine, with the functions that vLLM calls instead of real ones.

    Args:
        coefficients: the content of device_time.json.
    """

    def __init__(self, coefficients: Mapping[str, Any], log: Log, copies: Log) -> None:
        self._coefficients = coefficients
        self._log = log
        self._copies = copies
        self.device = Device(coefficients["launch_us"], self._record)
        compute = Compute(lambda: self.device.free_ns)
        self.link = Link(coefficients, compute, self._record_copy)
        # State of the step that the runner executes.
        self.output: Any = None
        self._batch: Any = None
        self._metadata: dict[str, Any] = {}
        # When the engine core received the first request that no step has begun to compute.
        self.arrived_ns: dict[str, int] = {}

    def _record(self, step: Step) -> None:
        self._log.add((*step.numbers(), _STEP))

    def _record_copy(self, copy: Copy) -> None:
        self._copies.add((*copy, _STEP))

    def begin(self) -> bool:
        """Queue the step that is being launched; return whether its layers are launched one by one.

        A GPU replays a step without prefill as one graph, in which no hook of a layer runs.
        """
        output, batch = self.output, self._batch
        n = batch.num_scheduled_tokens
        computed, prefilling = batch.num_computed_tokens_np[: len(n)], batch.is_prefilling_np
        new, before = n[prefilling].astype("int64"), computed[prefilling].astype("int64")
        decode = ~prefilling
        shape = Batch(
            int(new.sum()),
            int(decode.sum()),
            int(computed[decode].sum()),
            int((new * before + new * (new + 1) // 2).sum()),
        )
        arrived = [self.arrived_ns.pop(r.req_id, 0) for r in output.scheduled_new_reqs]
        carried_on = len(n) > len(arrived)
        since = 0 if carried_on else min(arrived, default=0)
        step_id = getattr(output, "connector_tax_step_id", 0)
        self.device.begin(step_id, shape, since, device_us(self._coefficients, shape))
        return bool(batch.has_prefill)

    def attention(self, batch: Any, kv_cache_config: Any) -> dict[str, Any]:
        """Return placeholder attention metadata for every layer; nothing reads it."""
        self._batch = batch
        if not self._metadata:
            for group in kv_cache_config.kv_cache_groups:
                self._metadata |= dict.fromkeys(group.layer_names, group)
        return self._metadata


def sample(_runner: Any, _hidden: Any, batch: Any, _grammar: Any) -> Any:
    """Return a token id for each sequence that gets one, instead of sampling."""
    import torch

    output = importlib.import_module("vllm.v1.worker.gpu.sample.output")
    n = batch.num_reqs
    computed = batch.num_computed_tokens_np[:n] + batch.num_scheduled_tokens[:n]
    sampled = torch.from_numpy((computed >= batch.prefill_len_np[:n]).astype("int32"))
    ids = torch.from_numpy(computed.astype("int64") % 20000 + 100).unsqueeze(1)
    none = torch.zeros(n, dtype=torch.int32)
    return output.SamplerOutput(ids, None, None, sampled, none), sampled, none


def install(coefficients: Mapping[str, Any], prefix: str) -> None:
    """Replace every emulated function in this process.

    Raises:
        PatchError: this vLLM lacks one of the functions, or has its own Triton.
    """
    _refuse(KERNEL_TARGETS)
    if importlib.import_module("vllm.triton_utils").HAS_TRITON:
        raise PatchError("the emulated device: Triton is installed; allowed: a vLLM without it")
    without_kernels()
    _refuse(TARGETS)
    # Model runner V2 asks for it; since 0.33 the worker does so too.
    for module in ("vllm.config.vllm", f"{_WORKER}.gpu_worker"):
        importlib.import_module(module).HAS_TRITON = True  # type: ignore[attr-defined]
    _lift_restrictions()
    logs = (Log(prefix, process, _fail) for process in ("device", "copies"))
    emulation = Emulation(coefficients, *logs)
    _replace_model(coefficients["architecture"], emulation)
    _note_arrivals(emulation)
    worker = importlib.import_module("vllm.v1.worker.worker_base").WorkerWrapperBase
    init_device = worker.init_device

    def emulated_init_device(self: Any, *args: Any, **options: Any) -> None:
        # Imported late, since the API server needs none of it.
        _refuse(RUNNER_TARGETS)
        _replace_runner(emulation)
        init_device(self, *args, **options)
        # Not before: vLLM puts its own stand-ins for CUDA in place. Not later: KV caches come next.
        transfer = self.vllm_config.kv_transfer_config
        if lacking := connectors.lacking(transfer):
            raise PatchError(_UNFIT + "; ".join(lacking))
        connectors.install(transfer, emulation.link)

    worker.init_device = emulated_init_device


_UNFIT = "the emulated device does not fit this vLLM, which lacks "


def _refuse(targets: tuple[tuple[str, str], ...]) -> None:
    if lacking := missing(targets):
        raise PatchError(_UNFIT + "; ".join(lacking))


def _fail(error: Exception) -> None:
    raise error


def _lift_restrictions() -> None:
    """Lift the CPU platform's restrictions; give its attention FlashAttention's block size and
    layouts.
    """
    platform = importlib.import_module("vllm.platforms.cpu").CpuPlatform
    check = platform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, config: Any) -> None:
        scheduler, parallel = config.scheduler_config, config.parallel_config
        requested = scheduler.async_scheduling, parallel.distributed_executor_backend
        start = os.environ.get(_START_METHOD, "spawn")
        check(cls, config)
        scheduler.async_scheduling, parallel.distributed_executor_backend = requested
        os.environ[_START_METHOD] = start

    platform.check_and_update_config = classmethod(check_and_update_config)
    # CPU kernels in the place of Triton's: not called here, and the search for them fails where
    # LMCache is imported.
    platform.register_triton_kernel_overrides = classmethod(lambda _cls: None)
    multiple_of = importlib.import_module("vllm.v1.attention.backend").MultipleOf
    layout = importlib.import_module("vllm.v1.kv_cache_layout").KVCacheLayout
    backend = importlib.import_module("vllm.v1.attention.backends.cpu_attn").CPUAttentionBackend
    backend.get_supported_kernel_block_sizes = staticmethod(lambda _spec=None: [multiple_of(16)])
    backend.supported_kv_cache_layouts = classmethod(lambda _cls: (layout.LBNHC, layout.LBHNC))


def _replace_model(architecture: str, emulation: Emulation) -> None:
    from .model import model_class

    model = model_class(emulation.begin, emulation.device.launched)
    importlib.import_module("vllm").ModelRegistry.register_model(architecture, model)


def _note_arrivals(emulation: Emulation) -> None:
    scheduler = importlib.import_module("vllm.v1.core.sched.scheduler").Scheduler
    add_request = scheduler.add_request

    def noted_add_request(self: Any, request: Any) -> None:
        emulation.arrived_ns[request.request_id] = time.monotonic_ns()
        add_request(self, request)

    scheduler.add_request = noted_add_request


def _replace_runner(emulation: Emulation) -> None:
    import torch

    # After vLLM's own replacements of CUDA; a runner binds events when it creates them.
    importlib.import_module("vllm.v1.worker.cpu.shm")
    torch.cuda.Event = event_class(emulation.device)
    cpu_worker = importlib.import_module("vllm.v1.worker.cpu_worker").CPUWorker
    cpu_worker.determine_available_memory = lambda worker: worker.cache_config.kv_cache_memory_bytes
    utils: Any = importlib.import_module("vllm.v1.worker.utils")
    utils.allocate_kv_cache.__globals__["torch"] = Instead(torch, zeros=zeros)

    runner = importlib.import_module("vllm.v1.worker.gpu.model_runner").GPUModelRunner
    execute = runner.execute_model

    def noted_execute(self: Any, output: Any, *args: Any, **options: Any) -> Any:
        emulation.output = output
        return execute(self, output, *args, **options)

    def prepare_attn(
        _state: Any, batch: Any, _mode: Any, _tables: Any, _slots: Any, _groups: Any,
        kv_cache_config: Any, **_options: Any,
    ) -> dict[str, Any]:  # fmt: skip
        return emulation.attention(batch, kv_cache_config)

    runner.execute_model = noted_execute
    runner.sample = sample
    state = importlib.import_module("vllm.v1.worker.gpu.model_states.default").DefaultModelState
    state.prepare_attn = prepare_attn


def _failed_step(model: str) -> list[str]:
    """Return why an engine in this process serves no request with the emulated device."""
    from vllm import LLM, SamplingParams

    prompt, tokens = 20, 3
    try:
        engine = LLM(
            model=model,
            load_format="dummy",
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=64,
            kv_cache_memory_bytes=2**26,
            distributed_executor_backend="uni",
        )
        parameters = SamplingParams(max_tokens=tokens, ignore_eos=True)
        (answer,) = engine.generate([{"prompt_token_ids": [3] * prompt}], parameters)
    except Exception as error:
        return [f"a step of the emulated device ({type(error).__name__}: {error})"]
    # As `sample` makes them.
    expected = [prompt + 100 + position for position in range(tokens)]
    got = list(answer.outputs[0].token_ids)
    return [] if got == expected else [f"a step of the emulated device returned the tokens {got}"]


def main() -> None:
    """Print the missing functions on the last line, after what vLLM prints at import."""
    lacking = missing(KERNEL_TARGETS)
    if not lacking:
        without_kernels()
        lacking = missing(TARGETS) or missing(RUNNER_TARGETS) or _failed_step(sys.argv[1])
    print(json.dumps(lacking), flush=True)
    # The engine's threads would hold up an ordinary exit.
    os._exit(0)


if __name__ == "__main__":
    main()

# CONNECTOR_TAX_PATCH
"""The settings probe: records the configuration that a starting vLLM resolved.

Loaded by vLLM as a `vllm.general_plugins` entry point from the overlay folder of the step probe
(connector_tax.vllm.overlay). With AGENTIC_STEP_LOG_PATH set, the engine core's process writes
`<prefix>.engine.settings` when its scheduler is created, and the first worker writes
`<prefix>.worker.settings` when its KV cache is. Both are JSON, `{"pid": ..., "settings": {name:
[value, reason]}}`, where the reason explains a null value. No code of this file runs in steps.
"""

import importlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PREFIX_VARIABLE = "AGENTIC_STEP_LOG_PATH"
SCHEDULER = ("vllm.v1.core.sched.scheduler", "Scheduler")
WORKER = ("vllm.v1.worker.worker_base", "WorkerWrapperBase")

_LOG = logging.getLogger("vllm.connector_tax_settings_probe")
_installed = False

Reader = Callable[[Any], Any]

# Settings from the engine core's resolved VllmConfig.
ENGINE: Mapping[str, Reader] = {
    "kv_cache_layout": lambda c: c.cache_config.kv_cache_layout,
    "kv_blocks": lambda c: c.cache_config.num_gpu_blocks,
    "block_size": lambda c: c.cache_config.block_size,
    "kv_tokens": lambda c: c.cache_config.kv_cache_size_tokens,
    "kv_cache_dtype": lambda c: c.cache_config.cache_dtype,
    "prefix_caching": lambda c: c.cache_config.enable_prefix_caching,
    "executor": lambda c: _name(c.parallel_config.distributed_executor_backend),
    "tensor_parallel_size": lambda c: c.parallel_config.tensor_parallel_size,
    "async_scheduling": lambda c: c.scheduler_config.async_scheduling,
    "hybrid_kv_cache_manager": lambda c: not c.scheduler_config.disable_hybrid_kv_cache_manager,
    "chunked_prefill": lambda c: c.scheduler_config.enable_chunked_prefill,
    "max_num_batched_tokens": lambda c: c.scheduler_config.max_num_batched_tokens,
    "max_num_seqs": lambda c: c.scheduler_config.max_num_seqs,
    "max_model_len": lambda c: c.model_config.max_model_len,
    "enforce_eager": lambda c: c.model_config.enforce_eager,
    "dtype": lambda c: str(c.model_config.dtype),
    "log_level": lambda _: logging.getLevelName(logging.getLogger("vllm").getEffectiveLevel()),
}
# Settings from the first worker, since backends resolve some after the engine core has read them.
OF_WORKER: Mapping[str, Reader] = {
    "attention_backend": lambda w: ", ".join(sorted({b.get_name() for b in _backends(w)})) or None,
    "cudagraph_mode": lambda w: _name(w.vllm_config.compilation_config.cudagraph_mode),
    "compilation_mode": lambda w: _name(w.vllm_config.compilation_config.mode),
    "model_runner": lambda w: _name(type(w.model_runner)),
}


def read(readers: Mapping[str, Reader], source: Any) -> dict[str, tuple[Any, str | None]]:
    """Return each setting with its value, or with null and the reason if this vLLM lacks it."""
    settings: dict[str, tuple[Any, str | None]] = {}
    for name, reader in readers.items():
        try:
            value = reader(source)
            reason = "this vLLM leaves it unset" if value is None else None
            settings[name] = (value, reason)
        except Exception as error:
            settings[name] = (None, f"{type(error).__name__}: {error}")
    return settings


def _name(value: Any) -> Any:
    """Return a class's full name, an enumeration member's name, or anything else as text."""
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    return None if value is None else str(getattr(value, "name", value))


def _backends(worker: Any) -> list[Any]:
    return [group.backend for groups in worker.model_runner.attn_groups for group in groups]


def _speaks_for_all(config: Any) -> bool:
    """Return whether this is the only engine core, or the first data-parallel one."""
    return not getattr(config.parallel_config, "data_parallel_index", 0)


def _write(path: str, settings: Mapping[str, Any]) -> None:
    """Write the file atomically."""
    partial = Path(f"{path}.partial")
    partial.write_text(json.dumps({"pid": os.getpid(), "settings": settings}), encoding="utf-8")
    partial.rename(path)


def _after(owner: type, name: str, on_return: Callable[[Any], None]) -> None:
    """Call `on_return` with the object after its method; errors are only logged."""
    method = getattr(owner, name)

    def followed(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        try:
            on_return(self)
        except Exception:
            _LOG.exception("connector_tax settings probe: nothing written")
        return result

    setattr(owner, name, followed)


def install(prefix: str) -> None:
    """Wrap the last functions in the creation of an engine core and of a worker."""

    def engine(scheduler: Any) -> None:
        if _speaks_for_all(scheduler.vllm_config):
            _write(f"{prefix}.engine.settings", read(ENGINE, scheduler.vllm_config))

    def worker(wrapper: Any) -> None:
        if wrapper.global_rank == 0 and _speaks_for_all(wrapper.worker.vllm_config):
            _write(f"{prefix}.worker.settings", read(OF_WORKER, wrapper.worker))

    _after(getattr(importlib.import_module(SCHEDULER[0]), SCHEDULER[1]), "__init__", engine)
    _after(getattr(importlib.import_module(WORKER[0]), WORKER[1]), "initialize_from_config", worker)


def register() -> None:
    """Install the probe if a step log is requested; vLLM's plugin entry point."""
    global _installed
    prefix = os.environ.get(PREFIX_VARIABLE)
    if not prefix or _installed:
        return
    _installed = True
    try:
        install(str(Path(prefix).resolve()))
    except Exception:
        _LOG.exception("connector_tax settings probe not installed")

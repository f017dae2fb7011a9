"""A KV connector that does nothing, so that only the framework's own cost remains.

Loaded by `--kv-transfer-config` through `kv_connector_module_path`. It overrides every hook of the
installed vLLM's KVConnectorBase_V1. `differences` compares the two, so that a hook added by a newer
vLLM is reported instead of silently running the base class's code.
"""

# The base class belongs to vLLM's environment, which the type checker of this package cannot see.
# mypy: disable-error-code="import-not-found, misc"
# A hook that does nothing uses no argument.
# ruff: noqa: ARG002, ARG003

import inspect
from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

# Inherited from the base class: object state and the binding of step metadata.
KEPT = frozenset({"__init__", "role", "_get_connector_metadata", "has_connector_metadata"})


class _Nothing(KVConnectorMetadata):
    """Empty metadata of a step."""


class NoOpConnector(KVConnectorBase_V1, SupportsHMA):
    """A connector whose hooks return the cheapest value that means "no transfer"."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._metadata = _Nothing()
        # Older versions lack this class and never call get_transfer_results.
        results = getattr(base, "KVConnectorTransferResults", None)
        self._results = results() if results is not None else None

    def _nothing(self) -> None:
        pass

    def _no(self) -> bool:
        return False

    # ---- called once

    supports_divergent_local_hybrid_hits = property(_no)
    requires_kv_delivery = property(_no)
    prefer_cross_layer_blocks = property(_no)
    get_mem_pool_context = _nothing
    get_handshake_metadata = _nothing
    get_finished_count = _nothing
    shutdown = _nothing
    unregister_kv_caches = _nothing
    restore_kv_caches = _nothing

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        pass

    def register_cross_layers_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        pass

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:
        pass

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        pass

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        pass

    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        pass

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        pass

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        return True

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> None:
        return None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> None:
        return None

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> None:
        return None

    # ---- worker side, each step

    wait_for_save = _nothing
    finish_forward = _nothing
    reset_capture_state = _nothing
    get_kv_connector_stats = _nothing
    get_kv_connector_kv_cache_events = _nothing
    build_connector_worker_meta = _nothing

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        pass

    def handle_preemptions(self, *args: Any, **kwargs: Any) -> None:
        pass

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, None]:
        return None, None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        return self._results

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()

    # ---- scheduler side

    has_pending_block_frees = _no
    has_pending_push_work = _no

    def on_new_request(self, request: Any) -> None:
        pass

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        return 0, False

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        return {}

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return ()

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._metadata

    def update_connector_output(self, connector_output: Any) -> None:
        pass

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def register_finished_partial_tail(
        self, request: Any, block_ids: Any, partial_tail_offloads: Any
    ) -> bool:
        return False

    def take_events(self) -> Iterable[Any]:
        return ()

    def reset_cache(self) -> bool:
        return True


def differences() -> list[str]:
    """Return the installed base classes' hooks that NoOpConnector lacks or that differ from its."""
    problems = []
    hooks = vars(SupportsHMA) | vars(KVConnectorBase_V1)
    for name, base_hook in hooks.items():
        if name.startswith(("__", "_abc")) or name in KEPT:
            continue
        if not (
            callable(base_hook) or isinstance(base_hook, property | classmethod | staticmethod)
        ):
            continue
        override = vars(NoOpConnector).get(name)
        if override is None:
            problems.append(f"{name}: not overridden")
        elif inspect.isfunction(base_hook) and inspect.isfunction(override):
            parameters = inspect.signature(override).parameters
            wanted = list(inspect.signature(base_hook).parameters)
            takes_all = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
            if not takes_all and list(parameters)[: len(wanted)] != wanted:
                problems.append(f"{name}: has {list(parameters)}, but the base class has {wanted}")
    return problems

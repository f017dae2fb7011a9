# CONNECTOR_TAX_PATCH
"""Replace a GPU's copies in the connectors that copy KV blocks to the host's memory.

Each is installed if the KVTransferConfig names its class, as the connector or as a MultiConnector's
child. Its host work runs; its streams, events and copies are replaced by `copies.Link`'s.
"""

# mypy: disable-error-code="import-not-found,misc"

import ctypes
import importlib
from collections.abc import Iterator
from typing import Any

from connector_tax_step_probe.hook_points import missing

from .copies import Instead, Link, Stream, sleep_until, zeros

_OFFLOAD = "vllm.v1.kv_offload.cpu"
_SIMPLE = "vllm.v1.simple_kv_offload"
_PR_SET_NAME = 15
_STORE = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker"
TARGETS = {
    "OffloadingConnector": (
        (f"{_OFFLOAD}.spec", "current_platform"),
        (f"{_OFFLOAD}.gpu_worker", "current_platform"),
        (f"{_OFFLOAD}.gpu_worker", "torch"),
        (f"{_OFFLOAD}.gpu_worker", "ops"),
        (f"{_OFFLOAD}.gpu_worker", "CPUOffloadingWorker"),
        (f"{_OFFLOAD}.shared_offload_region", "check_shm_free_space"),
        (f"{_OFFLOAD}.shared_offload_region", "_get_populate_write_fn"),
    ),
    "SimpleCPUOffloadConnector": (
        (f"{_SIMPLE}.worker", "torch"),
        (f"{_SIMPLE}.copy_backend", "torch"),
        (f"{_SIMPLE}.copy_backend", "DmaCopyBackend._copy_loop"),
        (f"{_SIMPLE}.cuda_mem_ops", "_batch_memcpy"),
    ),
    "MooncakeStoreConnector": (
        (_STORE, "torch"),
        (_STORE, "MooncakeStoreWorker.register_kv_caches"),
    ),
    "LMCacheMPConnector": (
        ("lmcache.v1.platform.devices.cpu.stub_cpu_device", "StubEvent"),
        ("lmcache.v1.platform.devices.cpu.shm", "CpuShmTensorWrapper"),
        ("lmcache.v1.gpu_connector.kv_format.contiguity", "attempt_permute_to_contiguous_view"),
    ),
}


def lacking(transfer: Any) -> list[str]:
    """Return the names that the installed connectors of a KVTransferConfig lack."""
    return [name for known in _known(transfer) for name in missing(TARGETS[known])]


def install(transfer: Any, link: Link) -> None:
    """Replace the copies of the connectors in a KVTransferConfig; do nothing for None."""
    for name in _known(transfer):
        _INSTALL[name](link)


def _known(transfer: Any) -> list[str]:
    return [name for name in dict.fromkeys(_classes(transfer)) if name in TARGETS]


def _classes(transfer: Any) -> Iterator[str]:
    if transfer is not None:
        yield transfer.kv_connector
        for child in (transfer.kv_connector_extra_config or {}).get("connectors", ()):
            yield child["kv_connector"]


def _torch(link: Link, **names: Any) -> Instead:
    """Return torch with the link's streams and events."""
    import torch

    event = link.event_class()
    cuda = Instead(
        torch.cuda,
        Stream=Stream, Event=event, current_stream=link.current_stream, stream=link.stream,
    )  # fmt: skip
    return Instead(torch, cuda=cuda, Event=event, **names)


def _offloading(link: Link) -> None:
    import torch

    spec: Any = importlib.import_module(f"{_OFFLOAD}.spec")
    worker: Any = importlib.import_module(f"{_OFFLOAD}.gpu_worker")
    spec.current_platform = worker.current_platform = Instead(
        worker.current_platform,
        Stream=Stream, current_stream=link.current_stream, stream=link.stream,
        is_cuda=lambda: True, is_cuda_alike=lambda: True, is_cpu=lambda: False,
        is_rocm=lambda: False, is_xpu=lambda: False,
    )  # fmt: skip
    worker.torch = _torch(link)
    # The host's memory is addresses too: as much as a server has, on a machine that has less.
    region: Any = importlib.import_module(f"{_OFFLOAD}.shared_offload_region")
    region.check_shm_free_space = lambda *_args, **_options: None
    region._get_populate_write_fn = lambda _area: lambda *_args: None

    def swap_blocks_batch(
        _src: Any, _dst: Any, sizes: Any, is_src_access_order_any: bool = False, **_options: Any
    ) -> None:
        # Only a copy to the device may read its source in any order.
        link.copy(int(sizes.sum()), len(sizes), link.current_stream(), not is_src_access_order_any)

    worker.ops = Instead(worker.ops, swap_blocks_batch=swap_blocks_batch)

    class OnDevice(torch.Tensor):
        is_cuda = True

    offloading_worker = worker.CPUOffloadingWorker
    init = offloading_worker.__init__

    def emulated_init(self: Any, kv_caches: Any, *args: Any, **options: Any) -> None:
        tensors = [cache.tensor for cache in kv_caches.tensors]
        for cache in kv_caches.tensors:
            cache.tensor = cache.tensor.as_subclass(OnDevice)
        init(self, kv_caches, *args, **options)
        for cache, tensor in zip(kv_caches.tensors, tensors, strict=True):
            cache.tensor = tensor
        for handler in (self._store_handler, self._load_handler):
            for name in ("src_tensors", "dst_tensors"):
                plain = [t.as_subclass(torch.Tensor) for t in getattr(handler, name)]
                setattr(handler, name, plain)

    offloading_worker.__init__ = emulated_init


def _simple(link: Link) -> None:
    import numpy as np

    worker: Any = importlib.import_module(f"{_SIMPLE}.worker")
    backend: Any = importlib.import_module(f"{_SIMPLE}.copy_backend")
    memory: Any = importlib.import_module(f"{_SIMPLE}.cuda_mem_ops")
    worker.torch = backend.torch = _torch(link, zeros=zeros)

    def memcpy_batch(
        _dst: Any, _src: Any, sizes: int, count: int, attributes: int, *_rest: Any
    ) -> int:
        values = (ctypes.c_uint64 * count).from_address(sizes)
        order = memory._CUmemcpyAttributes.from_address(attributes).srcAccessOrder
        stream = Stream.by_handle[_rest[-1]]
        size = int(np.ctypeslib.as_array(values).sum())
        link.copy(size, count, stream, order == memory.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM)
        return 0

    memory._batch_memcpy = (memcpy_batch, 1)
    # The thread that copies has no hook: its CPU time is read by its name.
    copy_loop = backend.DmaCopyBackend._copy_loop

    def named_copy_loop(*args: Any) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_NAME, b"kv-copy", 0, 0, 0)
        copy_loop(*args)

    backend.DmaCopyBackend._copy_loop = staticmethod(named_copy_loop)


# Of each slice of a put to Mooncake's store: keys, slices and the master are real.
_SLICE_BYTES = 64


class _Store:
    """A client of Mooncake's store whose puts send 64 bytes per slice and take the time of all
    bytes.
    """

    def __init__(self, store: Any, link: Link) -> None:
        self._store, self._link = store, link
        self._stream = Stream()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def batch_put_from_multi_buffers(
        self, keys: Any, addresses: Any, sizes: Any, *options: Any
    ) -> Any:
        self._link.copy(sum(map(sum, sizes)), sum(map(len, sizes)), self._stream)
        short = [[min(size, _SLICE_BYTES) for size in slices] for slices in sizes]
        result = self._store.batch_put_from_multi_buffers(keys, addresses, short, *options)
        sleep_until(self._stream.when_ns)
        return result


def _mooncake_store(link: Link) -> None:
    module: Any = importlib.import_module(_STORE)
    # Its thread waits for an event; by one of the device's own, the host has waited for a step.
    module.torch = _torch(link)
    worker = module.MooncakeStoreWorker
    register = worker.register_kv_caches

    def emulated_register(self: Any, kv_caches: Any) -> Any:
        self.store = _Store(self.store, link)
        return register(self, kv_caches)

    worker.register_kv_caches = emulated_register


def _lmcache(link: Link) -> None:
    from .lmcache_server import replace_events, replace_tensors

    replace_events(lambda: link.current_stream().when_ns)
    replace_tensors()


_INSTALL = {
    "OffloadingConnector": _offloading,
    "SimpleCPUOffloadConnector": _simple,
    "MooncakeStoreConnector": _mooncake_store,
    "LMCacheMPConnector": _lmcache,
}

# CONNECTOR_TAX_PATCH
"""Run `lmcache` beside an emulated device: `-m connector_tax_device_time.lmcache_server server`.

LMCache's server copies KV blocks in its own process when a vLLM requests it
(LMCACHE_MP_TRANSFER_MODE=lmcache_driven, as on a GPU). Here an event that passes between the
processes carries its CLOCK_MONOTONIC time, a KV cache only its geometry, and a copy only takes its
time.
"""

# mypy: disable-error-code="import-not-found"

import importlib
import json
import os
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from connector_tax_step_probe.hook_points import missing
from connector_tax_step_probe.log import Log, mark

from . import PREFIX_VARIABLE, VARIABLE
from .copies import Copy, Link, addresses, sleep_until

_CPU = "lmcache.v1.platform.devices.cpu"
_MEMORY = "lmcache.v1.platform.torch_ops.mem_alloc"
_TRANSFER = "lmcache.v1.multiprocess.modules.lmcache_driven_transfer"
TARGETS = (
    (f"{_CPU}.stub_cpu_device", "StubEvent"),
    (f"{_CPU}.shm", "CpuShmTensorWrapper"),
    (_MEMORY, "_alloc_page_aligned_pinned_view"),
    (_TRANSFER, "transfer_kv_per_object_group"),
)


def replace_events(now_queued: Callable[[], int]) -> None:
    """Make LMCache's events carry their time in ns, also to another process.

    Args:
        now_queued: returns the end (ns) of everything queued on a stream without a time.
    """
    event: Any = importlib.import_module(f"{_CPU}.stub_cpu_device").StubEvent

    def record(self: Any, stream: Any = None) -> None:
        self.when_ns = getattr(stream, "when_ns", 0) or now_queued()

    def wait(self: Any, stream: Any = None) -> None:
        if stream is not None:
            stream.when_ns = max(getattr(stream, "when_ns", 0), self.when_ns)

    def from_ipc_handle(cls: Any, _device: Any, handle: bytes) -> Any:
        new = cls(interprocess=True)
        (new.when_ns,) = struct.unpack("<q", handle)
        return new

    event.when_ns = 0
    event.record, event.wait = record, wait
    event.query = lambda self: time.monotonic_ns() >= self.when_ns
    event.synchronize = lambda self: sleep_until(self.when_ns)
    event.ipc_handle = lambda self: struct.pack("<q", self.when_ns)
    event.from_ipc_handle = classmethod(from_ipc_handle)


def replace_tensors() -> None:
    """Make LMCache share only a KV cache's geometry; no process reads or writes its memory."""
    contiguity = importlib.import_module("lmcache.v1.gpu_connector.kv_format.contiguity")
    wrapper: Any = importlib.import_module(f"{_CPU}.shm").CpuShmTensorWrapper
    areas: dict[str, Any] = {}

    def wrap(cls: Any, tensor: Any) -> Any:
        view = contiguity.attempt_permute_to_contiguous_view(tensor)
        return cls(view, "/emulated", tensor.untyped_storage().nbytes())

    def to_tensor(self: Any) -> Any:
        import torch

        area = areas.setdefault(self.shm_name, addresses(self.nbytes))
        flat = torch.frombuffer(area, dtype=self.dtype)
        return torch.as_strided(flat, self.shape, self.stride, self.storage_offset)

    wrapper.wrap, wrapper.to_tensor = classmethod(wrap), to_tensor


def _replace_copies(link: Link) -> None:
    module: Any = importlib.import_module(_TRANSFER)

    def transfer(cache_context: Any, _blocks: Any, objects: Any, **options: Any) -> None:
        stream = cache_context.stream
        stream.when_ns = getattr(stream, "when_ns", 0)
        size = sum(item.get_size() for item in objects if item is not None)
        blocks = sum(len(ids) for ids in options.get("block_ids_host", ()))
        link.copy(size, blocks * cache_context.num_layers, stream)

    def allocated(size: int) -> Any:
        import torch

        area = torch.frombuffer(addresses(size), dtype=torch.uint8)
        return area, area.data_ptr()

    module.transfer_kv_per_object_group = transfer
    memory: Any = importlib.import_module(_MEMORY)
    memory._alloc_page_aligned_pinned_view = allocated


def main() -> None:
    """Run `lmcache` with the copies of its server replaced."""
    if lacking := missing(TARGETS):
        sys.exit(f"the emulated device does not fit this LMCache, which lacks {'; '.join(lacking)}")
    coefficients = json.loads(Path(os.environ[VARIABLE]).read_text(encoding="utf-8"))
    log = Log(str(Path(os.environ[PREFIX_VARIABLE]).resolve()), "copies", _fail)

    def record(copy: Copy) -> None:
        log.add((*copy, mark(0)))

    replace_events(time.monotonic_ns)
    replace_tensors()
    _replace_copies(Link(coefficients, None, record))
    sys.argv[0] = "lmcache"
    sys.exit(importlib.import_module("lmcache.cli.main").main())


def _fail(error: Exception) -> None:
    raise error


if __name__ == "__main__":
    main()

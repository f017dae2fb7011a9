"""Provide vLLM's CUDA platform with a GPU that does not exist.

For the environment envs/vllm-settings: the Python files of vLLM's CUDA build, a CPU torch, triton.
Queries about the device (capability, memory, whether a kernel supports a shape) get the values of
one GPU model; nothing is computed. Imports the standard library, torch, triton and vLLM.

Call `install` before anything else of vLLM is imported.
"""

import importlib.abc
import importlib.machinery
import re
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple


class Gpu(NamedTuple):
    """A GPU model as vLLM sees it; sizes in bytes, from NVIDIA's data sheets."""

    name: str
    capability: tuple[int, int]
    memory: int
    multiprocessors: int
    l2_cache: int
    shared_memory_per_block: int


GPUS = {
    "h200": Gpu("NVIDIA H200", (9, 0), 141 << 30, 132, 50 << 20, 232_448),
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 80 << 30, 132, 50 << 20, 232_448),
    "a100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 80 << 30, 108, 40 << 20, 166_912),
}
DEVICES = 8
CUDA_VERSION = "12.9"
# Compiled modules of vLLM; here their import registers no operators.
_COMPILED = re.compile(r"vllm\.(?:vllm_flash_attn\.)?_\w*C\w*$|vllm\.cumem_allocator$")
# Python files that come with compiled kernels and may be missing too.
_KERNELS = re.compile(r"vllm\.vllm_flash_attn(?:\.|$)")
# Needs libcuda. vLLM asks whether it is installed and then imports it.
_HIDDEN = ("nixl_ep",)


class Nothing:
    """A stand-in for a stream, event or function of a missing module; its attributes do nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


class Operator:
    """A stand-in for an operator of a missing library; it reports support for everything."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *_: Any, **__: Any) -> bool | None:
        return True if "support" in self.__name__ else None

    def __getattr__(self, name: str) -> "Operator":
        if name.startswith("__"):
            raise AttributeError(name)
        return Operator(self.__name__)


class Modules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An importer of empty modules for one name pattern."""

    def __init__(self, pattern: re.Pattern[str], *, package: bool) -> None:
        self._pattern, self._package = pattern, package

    def find_spec(self, fullname: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        """Return a spec if the module's name matches the pattern."""
        if not self._pattern.match(fullname):
            return None
        return importlib.machinery.ModuleSpec(
            fullname, self, origin="not there", is_package=self._package
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Return an empty module that has a file name, since vLLM prints it."""
        module = types.ModuleType(spec.name)
        module.__file__ = "not there"
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Fill a package with functions that do nothing."""
        if self._package:
            module.__dict__["__getattr__"] = _function_that_does_nothing


def _function_that_does_nothing(name: str) -> Callable[..., None]:
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *_, **__: None


class Operators:
    """The lookup of `torch.ops`, with operators of missing libraries.

    Attributes:
        all_exist: provide every operator of a namespace with an underscore, not only those that
            report support. Set while a model is instantiated.
    """

    def __init__(self) -> None:
        from torch._ops import _OpNamespace

        self.all_exist = False
        lookup = _OpNamespace.__getattr__

        def with_missing(namespace: Any, name: str) -> Any:
            try:
                return lookup(namespace, name)
            except AttributeError:
                known = self.all_exist or "support" in name
                if namespace.name.startswith("_") and not name.startswith("__") and known:
                    return Operator(name)
                raise

        _OpNamespace.__getattr__ = with_missing


def install(gpu: Gpu) -> Operators:
    """Make this process's vLLM see its CUDA platform with eight GPUs of type `gpu`.

    Raises:
        AttributeError, ImportError: this version of torch, triton or vLLM has other names.
    """
    for name in _HIDDEN:
        sys.modules[name] = None  # type: ignore[assignment]
    sys.meta_path.insert(0, Modules(_COMPILED, package=False))
    sys.meta_path.append(Modules(_KERNELS, package=True))
    operators = Operators()
    _tell_torch(gpu)
    _tell_triton(gpu)
    _tell_vllm(gpu)
    return operators


def _tell_torch(gpu: Gpu) -> None:
    import torch

    properties = types.SimpleNamespace(
        name=gpu.name,
        total_memory=gpu.memory,
        multi_processor_count=gpu.multiprocessors,
        major=gpu.capability[0],
        minor=gpu.capability[1],
        is_integrated=False,
        L2_cache_size=gpu.l2_cache,
        warp_size=32,
        shared_memory_per_block_optin=gpu.shared_memory_per_block,
    )
    answers: dict[str, Any] = {
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: gpu.capability,
        "get_device_name": lambda *_: gpu.name,
        "is_available": lambda: True,
        "device_count": lambda: DEVICES,
        "current_device": lambda: 0,
        "current_stream": Nothing,
        "Stream": Nothing,
        "Event": Nothing,
    }
    for name, answer in answers.items():
        getattr(torch.cuda, name)  # fails by name where torch has it no more
        setattr(torch.cuda, name, answer)
    torch.version.cuda = CUDA_VERSION


def _tell_triton(gpu: Gpu) -> None:
    import torch
    import triton

    major, minor = gpu.capability
    target = types.SimpleNamespace(backend="cuda", arch=10 * major + minor, warp_size=32)
    memory = {
        "max_shared_mem": gpu.shared_memory_per_block,
        "multiprocessor_count": gpu.multiprocessors,
    }
    triton.runtime.driver.set_active(
        types.SimpleNamespace(
            get_current_target=lambda: target,
            get_current_device=lambda: 0,
            get_device_capability=lambda *_: gpu.capability,
            get_active_torch_device=lambda: torch.device("cpu"),
            utils=types.SimpleNamespace(get_device_properties=lambda *_: memory),
        )
    )


def _tell_vllm(gpu: Gpu) -> None:
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    answers: dict[str, Any] = {
        "get_device_capability": DeviceCapability(*gpu.capability),
        "get_device_name": gpu.name,
        "get_device_total_memory": gpu.memory,
        "device_count": DEVICES,
        "num_compute_units": gpu.multiprocessors,
        "is_fully_connected": True,
        "is_integrated_gpu": False,
        "import_kernels": None,
    }
    methods = {name: _class_method(answer) for name, answer in answers.items()}
    platform = type("StandInPlatform", (NonNvmlCudaPlatform,), methods)
    vllm.platforms._current_platform = platform()


def _class_method(answer: Any) -> Any:
    return classmethod(lambda *_, **__: answer)

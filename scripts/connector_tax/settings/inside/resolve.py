"""Resolve vLLM's settings for models and connectors, without server, weights or device memory.

Runs in vLLM's interpreter and imports only the standard library, torch and vLLM. For each model and
connector a forked process repeats the steps of a starting server: configuration, model class on the
`meta` device, each layer's KV cache spec, and `EngineCore._initialize_kv_caches` with an executor
that only reports a memory size. Each pair has its own process because resolving sets environment
variables.

usage: resolve.py REQUEST FD

REQUEST is a JSON file (`connector_tax.settings.request.Request`); JSON lines go to descriptor FD:
`vllm`, then `missing` (names, or plain of the tiny model, that the proof did not find), or
`connectors`, a `cell` for every model and case, and `end`; `failed` if an error ends the program.
"""

import argparse
import functools
import importlib
import importlib.util
import inspect
import json
import logging
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

# Used parts of vLLM: module, name, passed parameters. Checked before anything else.
USED: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("vllm.engine.arg_utils", "EngineArgs.add_cli_args", ("parser",)),
    ("vllm.engine.arg_utils", "EngineArgs.from_cli_args", ("args",)),
    ("vllm.engine.arg_utils", "EngineArgs.create_engine_config", ("usage_context",)),
    ("vllm.usage.usage_lib", "UsageContext.OPENAI_API_SERVER", ()),
    ("vllm.distributed.kv_transfer.kv_connector.factory", "KVConnectorFactory._registry", ()),
    (
        "vllm.distributed.kv_transfer.kv_connector.factory",
        "KVConnectorFactory.get_connector_class",
        ("kv_transfer_config",),
    ),
    (
        "vllm.distributed.kv_transfer.kv_connector.factory",
        "KVConnectorFactory.create_connector",
        ("config", "role", "kv_cache_config"),
    ),
    ("vllm.distributed.kv_transfer.kv_connector.v1", "KVConnectorRole.SCHEDULER", ()),
    ("vllm.model_executor.models.registry", "_run_in_subprocess", ("fn",)),
)
# Parts used to resolve the KV cache.
USED_FOR_CACHE: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("vllm.config", "set_current_vllm_config", ("vllm_config",)),
    ("vllm.config", "CompilationMode.NONE", ()),
    ("vllm.config", "get_layers_from_vllm_config", ("vllm_config", "layer_type")),
    ("vllm.distributed", "init_distributed_environment", ("world_size", "rank", "backend")),
    ("vllm.distributed", "initialize_model_parallel", ("tensor_model_parallel_size",)),
    ("vllm.distributed.parallel_state", "get_tp_group", ()),
    ("vllm.model_executor.model_loader.utils", "initialize_model", ("vllm_config",)),
    ("vllm.v1.engine.core", "EngineCore._initialize_kv_caches", ("vllm_config",)),
    (
        "vllm.v1.core.kv_cache_utils",
        "get_max_concurrency_for_kv_cache_config",
        ("vllm_config", "kv_cache_config"),
    ),
)
MESSAGE_CHARACTERS = 400
# A report of pydantic: the number of errors, then the first one's field, if any, and reason.
REPORT = re.compile(r"\d+ validation errors? for .*\n(?:(\S.*)\n)?  ((?s:.+?))(?: \[type=|\Z)")
# Bases that say nothing about an error.
ANY_ERROR = {"object", "BaseException", "Exception"}
# A cell takes a few seconds.
LONGEST_S = 300

Json = dict[str, Any]


class ContractError(AttributeError):
    """vLLM uses an attribute that a stand-in of this file lacks."""


class ArgumentsError(Exception):
    """vLLM's own parser rejects the arguments."""


def missing_part(module: str, name: str, parameters: tuple[str, ...]) -> str | None:
    """Return what vLLM lacks of a used name: the name itself, or parameters of the function."""
    try:
        value: Any = importlib.import_module(module)
    except Exception as error:
        return f"{module}: {type(error).__name__}: {error}"
    for part in name.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            return f"{module}.{name}"
    if not parameters:
        return None
    known = inspect.signature(value).parameters
    absent = [parameter for parameter in parameters if parameter not in known]
    return f"{module}.{name}: no parameter {', '.join(absent)}" if absent else None


# ---- stand-ins


class Executor:
    """An executor for an engine core that only reports memory for the KV cache.

    It also stands in for the engine core, whose method is called with it.
    """

    available_gpu_memory_for_kv_cache = -1

    def __init__(self, specs: Mapping[str, Any], layouts: list[str] | None, memory: int) -> None:
        self.model_executor = self
        self._specs, self._layouts, self._memory = specs, layouts, memory

    def get_kv_cache_specs(self) -> list[Mapping[str, Any]]:
        """Return the layers' specs of the only worker."""
        return [self._specs]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        """Return the layouts that all attention backends of the worker support."""
        if self._layouts is None:
            raise ContractError("vllm.v1.attention.backends.utils.get_supported_kv_cache_layouts")
        return [self._layouts]

    def determine_available_memory(self) -> list[int]:
        """Return the bytes for the KV cache."""
        return [self._memory]

    def set_kv_cache_layout(self, *_: Any) -> None:
        """Allocate nothing."""

    def initialize_from_config(self, *_: Any) -> None:
        """Allocate nothing."""

    def compile_or_warm_up_model(self) -> None:
        """Compile nothing."""

    def get_simple_cpu_offload_num_blocks(self) -> int:
        """Return SimpleCPUOffloadConnector's blocks on the host, which vLLM 0.33 asks for."""
        return 0

    def collective_rpc(self, *_: Any, **__: Any) -> None:
        """Do nothing, since there are no workers."""

    def __getattr__(self, name: str) -> Any:
        raise ContractError(f"Executor.{name}")


class Notes:
    """The first line of each warning that vLLM logs in this process.

    It precedes every logger's handlers, which vLLM reconfigures while it resolves.
    """

    def __init__(self) -> None:
        self.lines: set[str] = set()
        handle = logging.Logger.handle

        def noted(logger: logging.Logger, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING and logger.name.partition(".")[0] == "vllm":
                self.lines.add(first_line(record.getMessage()))
            handle(logger, record)

        logging.Logger.handle = noted  # type: ignore[assignment,method-assign]


@contextmanager
def on_meta() -> Iterator[None]:
    """Create every tensor on the `meta` device, even if code names another device."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Meta(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            named = dict(kwargs or {})
            if named.get("device") is not None:
                named["device"] = "meta"
            return func(*args, **named)

    with torch.device("meta"), Meta():
        yield


# ---- one cell


def first_line(text: str) -> str:
    """Return the first line of a text, and the next line if it ends in a colon.

    At most MESSAGE_CHARACTERS characters.
    """
    lines = text.strip().splitlines()
    words = lines[: 2 if lines and lines[0].endswith(":") else 1]
    return " ".join(map(str.strip, words))[:MESSAGE_CHARACTERS]


def described(error: BaseException) -> Json:
    """Return an error as a record: type, text, further types, frames of its traceback.

    `causes` are its other classes, and those of the errors that caused it. A frame is `file_of`
    with a line number.
    """
    causes, cause = type(error).__mro__[1:], error.__cause__
    while cause is not None:
        causes, cause = causes + type(cause).__mro__, cause.__cause__
    frames = [f"{file_of(frame)}:{line}" for frame, line in traceback.walk_tb(error.__traceback__)]
    return {"type": type(error).__name__, "text": first_line(reason_in(str(error))),
            "causes": [c.__name__ for c in causes if c.__name__ not in ANY_ERROR],
            "frames": frames[-12:]}  # fmt: skip


def reason_in(text: str) -> str:
    """Return an error's text, with a report of pydantic cut to its first field and reason."""
    if (report := REPORT.search(text)) is None:
        return text
    field = f"{report[1]}: " if report[1] else ""
    reason = report[2].removeprefix("Value error, ").replace("\n  ", " ")
    return f"{text[: report.start()]}{field}{reason}"


def file_of(frame: FrameType) -> str:
    """Return the file of a frame, from its top-level package on, wherever that is installed."""
    file = Path(frame.f_code.co_filename)
    *package, name = str(frame.f_globals.get("__name__")).split(".")
    if file.stem == "__init__":
        package.append(name)
    elif file.stem != name:  # code of a text, or the program itself
        return file.name
    return "/".join([*package, file.name])


def named(value: Any) -> Any:
    """Return the name of a class or a member of an enumeration, else the value as text."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    return getattr(value, "name", None) or getattr(value, "__name__", None) or str(value)


# Settings known from the resolved configuration.
CONFIGURATION: Mapping[str, Callable[[Any], Any]] = {
    "hybrid_manager": lambda c: not c.scheduler_config.disable_hybrid_kv_cache_manager,
    "prefix_caching": lambda c: c.cache_config.enable_prefix_caching,
    "chunked_prefill": lambda c: c.scheduler_config.enable_chunked_prefill,
    "async_scheduling": lambda c: c.scheduler_config.async_scheduling,
    "scheduler": lambda c: named(c.scheduler_config.get_scheduler_cls()),
    "runner": lambda c: "v2" if getattr(c, "use_v2_model_runner", False) else "v1",
    "executor": lambda c: named(c.parallel_config.distributed_executor_backend),
    "max_num_batched_tokens": lambda c: c.scheduler_config.max_num_batched_tokens,
    "max_num_seqs": lambda c: c.scheduler_config.max_num_seqs,
    "max_model_len": lambda c: c.model_config.max_model_len,
}
# Settings that a model's layers may change later.
RESOLVED: Mapping[str, Callable[[Any], Any]] = {
    "graphs": lambda c: named(c.compilation_config.cudagraph_mode),
    "compilation": lambda c: named(c.compilation_config.mode),
    "block_size": lambda c: c.cache_config.block_size,
    "mamba_cache_mode": lambda c: getattr(c.cache_config, "mamba_cache_mode", None),
}


class Resolver:
    """The properties shared by all cells of a request.

    Attributes:
        operators: operators of the emulated GPU (`gpu_stand_in.Operators`), None on a real
            platform.
    """

    def __init__(self, request: Json, operators: Any) -> None:
        from vllm.engine.arg_utils import EngineArgs

        self._request, self._operators = request, operators
        self._arguments: Any = EngineArgs
        self._parser: argparse.ArgumentParser = EngineArgs.add_cli_args(_parser_class()())
        self._parser.error = _refuse
        registry: Any = importlib.import_module("vllm.model_executor.models.registry")
        # vLLM would inspect each model class in a separate process, which takes 16 to 31 s.
        registry._run_in_subprocess = lambda fn: fn()
        if operators is not None:
            _import_classes(registry, request["models"])

    def cell(self, model: Json, case: Json) -> Json:
        """Return the resolved settings of one model and one case."""
        record: Json = {"model": model["name"], "case": case["name"], "settings": {}}
        notes = Notes()
        try:
            configuration = self._configuration(model, case)
            record["settings"] = {n: read(configuration) for n, read in CONFIGURATION.items()}
            if self._request["capacity"]:
                specs, backends = self._specs(configuration)
                record["settings"]["attention_backends"] = sorted(backends)
                record["settings"]["specs"] = _counted(specs.values())
                record["capacity"] = self._capacities(configuration, specs, backends)
                record["settings"] |= {n: read(configuration) for n, read in RESOLVED.items()}
                _lift(record)
            else:
                record["settings"] |= {n: read(configuration) for n, read in RESOLVED.items()}
            if case["transfer"] is not None and "error" not in record:
                check_creation(configuration)
        except BaseException as error:
            record["error"] = described(error)
            record.pop("capacity", None)  # a server that refuses its connector serves nothing
        record["notes"] = sorted(notes.lines)
        return record

    def _configuration(self, model: Json, case: Json) -> Any:
        from vllm.usage.usage_lib import UsageContext

        arguments = ["--model", model["folder"], "--skip-tokenizer-init", "--load-format", "dummy"]
        if case["transfer"] is not None:
            arguments += ["--kv-transfer-config", json.dumps(case["transfer"])]
        if self._request["max_model_len"] is not None:
            arguments += ["--max-model-len", str(self._request["max_model_len"])]
        arguments += ["--tensor-parallel-size", str(self._request["tp"])]
        parsed = self._parser.parse_args([*arguments, *self._request["arguments"],
                                          *case["arguments"]])  # fmt: skip
        if getattr(parsed, "trust_remote_code", False):
            raise ArgumentsError("--trust-remote-code: no code of a model is run")
        engine = self._arguments.from_cli_args(parsed)
        # As in the API server: other contexts have other limits of batched tokens.
        resolved = engine.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
        transfer = getattr(resolved, "kv_transfer_config", None)
        connector = getattr(transfer, "kv_connector", None)
        if connector != (case["transfer"] or {}).get("kv_connector"):
            raise ArgumentsError(
                f"the arguments after -- set the connector {connector}; allowed: --connector or"
                " --kv-transfer-config"
            )
        if getattr(getattr(resolved, "speculative_config", None), "method", "ngram") != "ngram":
            raise ArgumentsError("--speculative-config: a draft model's KV cache is not resolved")
        return resolved

    def _specs(self, configuration: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the KV cache spec of each layer, and the attention backends by name."""
        import torch
        from vllm.config import CompilationMode, get_layers_from_vllm_config
        from vllm.config import set_current_vllm_config as current
        from vllm.distributed import init_distributed_environment, initialize_model_parallel
        from vllm.distributed.parallel_state import get_tp_group
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
        from vllm.model_executor.model_loader.utils import initialize_model
        from vllm.platforms import current_platform

        parallel, size = configuration.parallel_config, self._request["tp"]
        if parallel.world_size != size:
            raise ArgumentsError(
                f"found a world size of {parallel.world_size} with --tp {size}; allowed: tensor"
                " parallelism only"
            )
        compilation = configuration.compilation_config
        mode, compilation.mode = compilation.mode, CompilationMode.NONE
        with tempfile.TemporaryDirectory() as folder, current(configuration):
            init_distributed_environment(
                world_size=1, rank=0, distributed_init_method=f"file://{folder}/rendezvous",
                local_rank=0, backend="gloo",
            )  # fmt: skip
            initialize_model_parallel(tensor_model_parallel_size=1)
            # Layers divide their heads by the group's size; the group never communicates.
            get_tp_group().world_size = size
            if self._operators is not None:
                self._operators.all_exist = True
            before = torch.get_default_dtype()
            torch.set_default_dtype(configuration.model_config.dtype)
            try:
                with on_meta():
                    initialize_model(vllm_config=configuration)
            finally:
                torch.set_default_dtype(before)
            compilation.mode = mode
            update = getattr(current_platform, "update_block_size_for_backend", None)
            if update is not None:
                update(configuration)
            layers = get_layers_from_vllm_config(configuration, AttentionLayerBase)
            specs = _layer_specs(configuration, layers)
            backends = {
                backend.get_name(): backend
                for name in specs
                if (get := getattr(layers[name], "get_attn_backend", None)) is not None
                for backend in [get()]
            }
        return specs, backends

    def _capacities(
        self, configuration: Any, specs: dict[str, Any], backends: dict[str, Any]
    ) -> list[Json]:
        """Return the KV cache at the model's own length, then at each shorter requested length."""
        longest = configuration.model_config.max_model_len
        shorter = [length for length in self._request["lengths"] if length < longest]
        capacities = []
        for length in shorter:
            configuration.model_config.max_model_len = length
            capacities.append(
                forked(lambda: self._capacity(configuration, specs, backends))
                | {"length": length}
            )  # fmt: skip
        configuration.model_config.max_model_len = longest
        return [self._capacity(configuration, specs, backends) | {"length": longest}, *capacities]

    def _capacity(
        self, configuration: Any, specs: dict[str, Any], backends: dict[str, Any]
    ) -> Json:
        from vllm.config import set_current_vllm_config
        from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config
        from vllm.v1.engine.core import EngineCore

        memory = int(self._request["kv_gib"] * 2**30)
        try:
            with set_current_vllm_config(configuration):
                layouts = _layouts(list(backends.values()))
                executor: Any = Executor(specs, layouts, memory)
                cache: Any = EngineCore._initialize_kv_caches(executor, configuration)
                cache = cache[-1] if isinstance(cache, tuple) else cache
                requests = get_max_concurrency_for_kv_cache_config(configuration, cache)
                layout = _layout(configuration)
        except BaseException as error:
            return {"error": described(error)}
        groups = cache.kv_cache_groups
        return {
            "requests": round(requests, 3),
            "blocks": cache.num_blocks,
            "tokens": getattr(configuration.cache_config, "kv_cache_size_tokens", None),
            "groups": len(groups),
            "group_block_sizes": sorted({x.kv_cache_spec.block_size for x in groups}),
            "layout": layout,
        }  # fmt: skip


def check_creation(configuration: Any) -> None:
    """Run vLLM's checks before it creates the connector, without creating it.

    Raises:
        ValueError: the hybrid manager is on and the connector does not support it.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

    connector: Any = KVConnectorFactory.get_connector_class(configuration.kv_transfer_config)
    # `__new__` returns None, so that the constructor is not called.
    connector.__new__ = lambda *_, **__: None
    KVConnectorFactory.create_connector(configuration, KVConnectorRole.SCHEDULER, None)


def _lift(record: Json) -> None:
    """Move values that do not depend on the length to the settings, and an error to the cell."""
    capacity_at_own_length = record["capacity"][0]
    if "error" in capacity_at_own_length:
        record["error"] = capacity_at_own_length["error"]
    for name in ("groups", "group_block_sizes", "layout"):
        values = [capacity.pop(name) for capacity in record["capacity"] if name in capacity]
        record["settings"][name] = values[0] if values else None


def _layer_specs(configuration: Any, layers: Mapping[str, Any]) -> dict[str, Any]:
    try:
        from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec
    except ImportError:
        get_kv_cache_spec = None
    if get_kv_cache_spec is not None:
        try:
            return dict(get_kv_cache_spec(configuration))
        except AttributeError:
            pass  # this version's function takes only attention layers
    found_specs = {name: layer.get_kv_cache_spec(configuration) for name, layer in layers.items()}
    return {name: spec for name, spec in found_specs.items() if spec}


def _layouts(backends: list[Any]) -> list[str] | None:
    utilities = importlib.import_module("vllm.v1.attention.backends.utils")
    supported = getattr(utilities, "get_supported_kv_cache_layouts", None)
    return None if supported is None else [layout.name for layout in supported(backends)]


def _layout(configuration: Any) -> str | None:
    layout = getattr(configuration.cache_config, "kv_cache_layout", None)
    if layout is None:
        utilities = importlib.import_module("vllm.v1.attention.backends.utils")
        layout = utilities.get_kv_cache_layout()
    return None if layout is None else str(named(layout))


def _counted(specs: Any) -> dict[str, int]:
    """Return the number of layers for each kind, block size and page size (bytes) of a spec."""
    counts: dict[str, int] = {}
    for spec in specs:
        kind = f"{type(spec).__name__}, block {spec.block_size}, page {spec.page_size_bytes}"
        counts[kind] = counts.get(kind, 0) + 1
    return counts


def _import_classes(registry: Any, models: list[Json]) -> None:
    """Import the models' modules once for all forked processes.

    Only without a GPU, since such a module may initialise CUDA, which does not survive a fork.
    """
    for model in models:
        config = Path(model["folder"], "config.json")
        names = json.loads(config.read_bytes())["architectures"] if config.exists() else []
        for name in names:
            if name in registry.ModelRegistry.models:
                # The model's own rows report the error.
                with suppress(Exception):
                    registry.ModelRegistry.models[name].load_model_cls()


def _parser_class() -> Any:
    for module in ("vllm.utils.argparse_utils", "vllm.utils"):
        try:
            return importlib.import_module(module).FlexibleArgumentParser
        except (ImportError, AttributeError):
            continue
    raise ContractError("vllm.utils.argparse_utils.FlexibleArgumentParser")


def _refuse(message: str) -> Any:
    raise ArgumentsError(message)


# ---- processes


def forked(work: Callable[[], Json]) -> Json:
    """Return the result of `work` in a forked process; `died` if the process returns none."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        signal.alarm(LONGEST_S)
        try:
            os.close(reading)
            answer = json.dumps(work(), default=str).encode()
            with os.fdopen(writing, "wb") as stream:
                stream.write(answer)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        data = stream.read()
    _, ended = os.waitpid(pid, 0)
    if ended:
        code = os.waitstatus_to_exitcode(ended)
        late = f" after {LONGEST_S} s, the longest time" if code == -signal.SIGALRM else ""
        return {"died": f"signal {-code}{late}" if code < 0 else f"status {code}"}
    answer_of: Json = json.loads(data)
    return answer_of


def head() -> Json:
    """Return the version of this vLLM and its platform."""
    import torch
    import vllm
    from vllm.platforms import current_platform

    device = getattr(current_platform, "device_type", None)
    named_by_vllm = device and device != "cpu"
    return {
        "version": vllm.__version__,
        "torch": torch.__version__,
        "transformers": importlib.import_module("transformers").__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "platform": device,
        "device": str(current_platform.get_device_name()) if named_by_vllm else device,
    }


def cases_of(request: Json, registered: list[str]) -> list[Json]:
    """Return the cases; if all are requested, add one for each registered connector."""
    cases: list[Json] = request["cases"]
    if request["every"]:
        cases = [c for c in cases if c["registered"] is None or c["registered"] in registered]
        have = {case["registered"] for case in cases}
        cases += [
            {"name": name, "registered": name, "arguments": [],
             "transfer": {"kv_connector": name, "kv_role": "kv_both"}}
            for name in registered
            if name not in have
        ]  # fmt: skip
    return cases


def unproven(request: Json, operators: Any) -> str | None:
    """Return why the tiny model without a connector is not resolved; None if it is."""
    only_tiny = {"models": [request["proof"]], "kv_gib": 1.0, "lengths": [],
                 "max_model_len": None, "tp": 1, "arguments": []}  # fmt: skip
    case: Json = {"name": "plain", "registered": None, "transfer": None, "arguments": []}
    resolver = Resolver(request | only_tiny, operators)
    cell = forked(functools.partial(resolver.cell, request["proof"], case))
    if "died" in cell:
        return f"plain of {request['proof']['name']}: the process ended with {cell['died']}"
    if error := cell.get("error"):
        return (
            f"plain of {request['proof']['name']}: {error['type']}: {error['text']}"
            f" ({error['frames'][-1]})"
        )
    return None


def answer(request: Json, say: Callable[..., None]) -> None:
    """Send the answers to a request, followed by `end`."""
    os.environ.update(request["environment"])
    operators = None
    if request["gpu"] is not None:
        import gpu_stand_in

        operators = gpu_stand_in.install(gpu_stand_in.GPUS[request["gpu"]])
    used = USED + (USED_FOR_CACHE if request["capacity"] else ())
    missing = [text for entry in used if (text := missing_part(*entry)) is not None]
    this = head()
    say("vllm", **this)
    if not this["platform"]:
        missing.insert(0, "a device on this machine that it supports")
    if missing:
        say("missing", names=missing)
        return
    import torch
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if reason := unproven(request, operators):
        say("missing", names=[reason])
        return
    resolver = Resolver(request, operators)
    registered = list(KVConnectorFactory._registry)
    packages = {name: _installed(name) for name in request["packages"]}
    cases = cases_of(request, registered)
    say("connectors", registered=registered, packages=packages, cases=cases)
    for model in request["models"]:
        for case in cases:
            if case["registered"] is not None and case["registered"] not in registered:
                say("cell", model=model["name"], case=case["name"], absent=True)
                continue
            if torch.cuda.is_initialized():
                raise ContractError("CUDA was initialised before a process is forked")
            cell = forked(functools.partial(resolver.cell, model, case))
            say("cell", **cell | {"model": model["name"], "case": case["name"]})
            plain = case["transfer"] is None and not case["arguments"]
            if plain and {"error", "died"} & cell.keys():
                break  # nothing of this model can be compared
    say("end")


def main(request_file: str, descriptor: int) -> None:
    """Answer the request; also send an error that ends the program."""
    request: Json = json.loads(Path(request_file).read_text(encoding="utf-8"))
    with os.fdopen(descriptor, "w", encoding="utf-8", buffering=1) as out:

        def say(kind: str, **fields: Any) -> None:
            out.write(json.dumps({"kind": kind, **fields}, default=str) + "\n")

        try:
            answer(request, say)
        except Exception as error:
            say("failed", **described(error))
            raise


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

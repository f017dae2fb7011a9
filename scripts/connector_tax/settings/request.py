"""A request to the program in vLLM's interpreter: models, connectors, memory, arguments of vLLM."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from connector_tax.config import DEFAULTS
from connector_tax.files import ArtifactError, parse_json, read_json

# Shapes in config/models that are resolved by default.
MODELS = (
    "Qwen3-8B",
    "Qwen3-30B-A3B",
    "DeepSeek-V2-Lite",
    "gpt-oss-20b",
    "gemma-3-12b-it",
    "Qwen3-Next-80B-A3B-Instruct",
    "granite-4.0-h-tiny",
    "Nemotron-H-8B-Base-8K",
)
# Lengths at which the capacity is resolved besides the model's own.
LENGTHS = (8192, 32768)
# The shape that tests whether a vLLM works with this program.
PROOF = "tiny-qwen3"
PLAIN = "plain"
# Extra configuration that a connector needs to be resolved or to be meaningful.
_HOST_CACHE = {"cpu_bytes_to_use": 1 << 30}
EXTRA: Mapping[str, Mapping[str, Any]] = {
    "OffloadingConnector": _HOST_CACHE,
    "SimpleCPUOffloadConnector": _HOST_CACHE,
    "ExampleConnector": {"shared_storage_path": "kv-storage"},
}
# Beginning of a connector's name -> package that it needs to start; others are part of vLLM.
PACKAGES = {
    "Nixl": "nixl",
    "Mooncake": "mooncake",
    "LMCache": "lmcache",
    "FlexKV": "flexkv",
    "HF3FS": "hf3fs_fuse",
    "MoRIIO": "mori",
}


# Connectors with which a server of this project has started, some beside an emulated device.
STARTED = frozenset(
    (
        "ExampleConnector",
        "LMCacheConnectorV1",
        "LMCacheMPConnector",
        "MooncakeConnector",
        "MooncakeStoreConnector",
        "NixlConnector",
        "NixlPullConnector",
        "NixlPushConnector",
        "OffloadingConnector",
        "SimpleCPUOffloadConnector",
    )
)
STARTED_TOGETHER = (["MooncakeConnector", "LMCacheMPConnector"],)


class Case(TypedDict):
    """A way to start vLLM: with a connector's configuration, or without a connector.

    Attributes:
        registered: the connector's name if vLLM must have registered it.
        arguments: further arguments of vLLM, only for this case.
    """

    name: str
    registered: str | None
    transfer: dict[str, Any] | None
    arguments: list[str]


class Model(TypedDict):
    """A model: its name, and a folder with its config.json or its name in the hub's cache."""

    name: str
    folder: str


class Request(TypedDict):
    """The input of `inside/resolve.py`.

    Attributes:
        gpu: the emulated GPU; None for vLLM's own platform.
        proof: the model whose plain row must resolve before any other is tried.
        every: add a case for each registered connector that has none.
        capacity: resolve the KV cache too, not only the configuration.
        lengths: further lengths for the capacity, in tokens.
        max_model_len: in tokens; None is each model's own.
        arguments: further arguments of vLLM.
        packages: modules to look for.
        environment: variables to set before vLLM is imported.
    """

    gpu: str | None
    proof: Model
    models: list[Model]
    cases: list[Case]
    every: bool
    capacity: bool
    kv_gib: float
    lengths: list[int]
    max_model_len: int | None
    tp: int
    arguments: list[str]
    packages: list[str]
    environment: dict[str, str]


def plain() -> Case:
    """Return the case without a connector."""
    return {"name": PLAIN, "registered": None, "transfer": None, "arguments": []}


def transfer(name: str, **extra: Any) -> dict[str, Any]:
    """Return a connector's configuration, with the extra configuration that it needs."""
    configuration: dict[str, Any] = {"kv_connector": name, "kv_role": "kv_both"}
    if more := {**EXTRA.get(name, {}), **extra}:
        configuration["kv_connector_extra_config"] = more
    return configuration


def connector(name: str) -> Case:
    """Return the case of a registered connector."""
    return {"name": name, "registered": name, "transfer": transfer(name), "arguments": []}


def multi(*names: str) -> Case:
    """Return the case of a MultiConnector with these children."""
    configuration = transfer("MultiConnector", connectors=[transfer(name) for name in names])
    return {"name": f"Multi({', '.join(names)})", "registered": "MultiConnector",
            "transfer": configuration, "arguments": []}  # fmt: skip


def layerwise() -> Case:
    """Return the case of LMCache's mode that saves layer by layer."""
    return {"name": "LMCacheConnectorV1 (use_layerwise)", "registered": "LMCacheConnectorV1",
            "transfer": transfer("LMCacheConnectorV1", use_layerwise=True),
            "arguments": []}  # fmt: skip


def all_cases() -> list[Case]:
    """Return plain, the connectors that need a configuration, and combinations.

    vLLM's other registered connectors follow (`Request.every`).
    """
    return [
        plain(),
        *map(connector, EXTRA),
        connector("LMCacheConnectorV1"),
        multi("NixlConnector", "OffloadingConnector"),
        multi("NixlConnector", "LMCacheConnectorV1"),
        layerwise(),
    ]


def given(text: str) -> Case:
    """Return the case that tests the value `text` of `--kv-transfer-config`.

    Raises:
        ValueError: `text` is not a JSON object, or lacks a connector's name, also of a child.
    """
    try:
        value = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not JSON: {error}") from None
    name = value.get("kv_connector") if isinstance(value, dict) else None
    if not isinstance(name, str):
        raise ValueError(f"{text!r} has no key kv_connector with a connector's name")
    if not _is_configuration(value):
        raise ValueError(
            f"{text!r}: kv_connector_extra_config, or a child in it, is not a connector's"
            " configuration"
        )
    registered = None if value.get("kv_connector_module_path") else name
    return {"name": json.dumps(value), "registered": registered, "transfer": value,
            "arguments": []}  # fmt: skip


def _is_configuration(value: Any) -> bool:
    """Return whether a value and its children have the form of a connector's configuration."""
    if not isinstance(value, dict) or not isinstance(value.get("kv_connector"), str):
        return False
    extra = value.get("kv_connector_extra_config")
    children = extra.get("connectors") if isinstance(extra, dict) else None
    formed = isinstance(extra, dict | None) and isinstance(children, list | None)
    return formed and all(map(_is_configuration, children or []))


def _children(configuration: Mapping[str, Any]) -> list[dict[str, Any]]:
    return (configuration.get("kv_connector_extra_config") or {}).get("connectors") or []


def connectors_in(configuration: Mapping[str, Any] | None) -> list[str]:
    """Return the connectors that a configuration starts; for a MultiConnector, its children."""
    if configuration is None:
        return []
    return [name for child in _children(configuration) for name in connectors_in(child)] or [
        configuration["kv_connector"]
    ]


def identity(configuration: Mapping[str, Any]) -> list[Any]:
    """Return the parts of a connector's configuration that tell the rows of the matrix apart."""
    extra = configuration.get("kv_connector_extra_config") or {}
    return [
        configuration["kv_connector"],
        configuration.get("kv_connector_module_path"),
        bool(extra.get("use_layerwise")),
        [identity(child) for child in _children(configuration)],
    ]


def registered_in(configuration: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield the connectors that vLLM must have registered: those without a module of their own."""
    if configuration is None:
        return
    if not configuration.get("kv_connector_module_path"):
        yield configuration["kv_connector"]
    for child in _children(configuration):
        yield from registered_in(child)


def package_of(name: str) -> str | None:
    """Return the module that a connector needs to start; None if it is part of vLLM."""
    return next((module for start, module in PACKAGES.items() if name.startswith(start)), None)


def was_started(configuration: Mapping[str, Any] | None) -> bool:
    """Return whether a server of this project's studies has started with these connectors."""
    names = connectors_in(configuration)
    extra = (configuration or {}).get("kv_connector_extra_config") or {}
    together = len(names) == 1 or names in STARTED_TOGETHER
    return together and STARTED.issuperset(names) and not extra.get("use_layerwise")


def model(name: str, scratch: Path) -> Model:
    """Return a model by a shipped name, a folder with a config.json, or its name on the hub.

    Args:
        scratch: folder that the shapes of shipped models are written to.

    Raises:
        ArtifactError: there is no such model, or its config.json cannot be used.
    """
    folder, shapes = Path(name), DEFAULTS / "models"
    shape = shapes / f"{name}.json"
    try:
        if folder.is_dir():
            _check_config(folder / "config.json")
            return {"name": folder.resolve().name, "folder": str(folder.resolve())}
        shipped = "/" not in name and shape.is_file()
    except OSError as error:
        raise ArtifactError(f"--model {name}: {error.strerror}") from None
    if shipped:
        target = scratch / name
        target.mkdir(exist_ok=True)
        (target / "config.json").write_bytes(shape.read_bytes())
        return {"name": name, "folder": str(target)}
    if name.count("/") == 1 and not name.startswith((".", "/")):
        return {"name": name, "folder": name}
    known = ", ".join(sorted(path.stem for path in shapes.glob("*.json")))
    raise ArtifactError(f"{name}: no such folder; allowed: a folder, OWNER/NAME, or {known}")


def _check_config(file: Path) -> None:
    if not file.is_file():
        raise ArtifactError(f"{file}: not found; allowed: a folder with a config.json")
    config = read_json(file)
    names = config.get("architectures") if isinstance(config, dict) else None
    if names is None:
        raise ArtifactError(f"{file}: no key architectures, by which vLLM finds the model")
    if not names or not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise ArtifactError(
            f"{file}: architectures: found {repr(names)[:100]}; allowed: a list of names"
        )


def names_of(cases: Sequence[Case]) -> list[str]:
    """Return all known modules, and the modules that the connectors of these cases need."""
    names = {package_of(name) for case in cases for name in connectors_in(case["transfer"])}
    return sorted({*PACKAGES.values(), *(name for name in names if name)})

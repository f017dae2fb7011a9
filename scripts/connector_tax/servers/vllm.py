"""A real vLLM as a server of a study: environment, flags and connectors are part of the design.

A configuration (config/configurations.yaml) becomes vLLM's `--kv-transfer-config`. `engine.forms`
of the study's configuration adapts it to this machine (connector class, protocol, companion
process), or defines a control's changes to the engine (flags, environment). Everything else is the
same for every configuration, so that two servers differ only in the connector. A value
`{companion.port}` in a connector's extra configuration starts that companion and is replaced by its
port.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from connector_tax.artifacts.names import Launch
from connector_tax.artifacts.paths import DEVICE_TIME
from connector_tax.config import is_fetched
from connector_tax.machine import engine_versions
from connector_tax.servers.kinds import (
    HOST,
    ROOT_MARK,
    STEP_LOG_PREFIX,
    STEP_LOG_VARIABLE,
    Companion,
    ProbedEngine,
    ServerCommand,
    ServerError,
    below_root,
    free_port,
    lasting_port,
)

if TYPE_CHECKING:
    from connector_tax.artifacts.study_records import (
        ConfigurationEntry,
        EngineSection,
        FormSection,
        ServedSection,
        StudyDocument,
    )

# The module of vLLM's server from 0.31 on; `engine.entry_point` names an older one.
ENTRY_POINT = "vllm.entrypoints.launchers.api_server.entry"
CPU_ADAPTER = f"{ROOT_MARK}/scripts/connector_tax/vllm/cpu_adapter"
# LMCache's server beside an emulated device: a module of the overlay, and the size of its cache,
# which is addresses without memory.
EMULATED_LMCACHE, EMULATED_LMCACHE_GB = "connector_tax_device_time.lmcache_server", "64"
# Log lines of a server whose engine has died while its HTTP process still answers.
DEAD_ENGINE = re.compile(
    r"EngineDeadError|EngineCore (?:encountered (?:an issue|a fatal error)|failed to start)"
)

# The same for every configuration, plain included.
_ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "LMCACHE_TRACK_USAGE": "false",
    # Without this the engine core's own title overwrites its environment in /proc, by which
    # processes that a killed driver left behind are found.
    "SPT_NOENV": "1",
    "PYTHONHASHSEED": "0",  # LMCache's keys: server and engine must hash alike
    # The server must not require a key, whatever the caller's shell sets, since none is sent.
    "VLLM_API_KEY": "",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
}
# Also the same for every configuration, unless the study's flags differ: vLLM's own sampling,
# without the defaults of a model's generation_config.json, such as a repetition penalty.
_FLAGS = {"--generation-config": "vllm"}
# For an emulated device: features of a GPU's server that vLLM disables on a CPU.
_EMULATED_ENVIRONMENT = {
    "CONNECTOR_TAX_DEVICE_TIME": DEVICE_TIME,
    # LMCache's server copies; by default on a CPU the engine copies, inside its step.
    "LMCACHE_MP_TRANSFER_MODE": "lmcache_driven",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
}
# Ports vLLM's connectors listen on, whatever the configuration. vLLM's cache of compiled graphs
# depends on them (vllm/envs.py:compile_factors): with other ports each launch would compile anew.
_PORT_VARIABLES = ("VLLM_MOONCAKE_BOOTSTRAP_PORT", "VLLM_NIXL_SIDE_CHANNEL_PORT")
_COMPANION_PORT = re.compile(r"\{([a-z_]+)\.port\}")


class Vllm(ProbedEngine):
    """vLLM from an environment of this machine, with the step probe if it is compatible."""

    needs = (
        "device", "python", "model", "served_model_name", "vocab_size", "flags", "environment",
        "forms",
    )  # fmt: skip
    may = ("device_time", "build_python", "revision", "pythonpath", "entry_point")
    configured = True

    def resolve(self, _configurations: Sequence[str], /) -> None:
        """Compute the coefficients of an emulated device."""
        if "device_time" in self.section:
            from connector_tax.roofline import device_time

            self.section["device_time_content"] = device_time(self.section)

    @property
    def served(self) -> ServedSection:
        """Return name and vocabulary from the study's file."""
        section = self.section
        return {"model": section["served_model_name"], "vocab_size": section["vocab_size"]}

    def command(
        self, study: StudyDocument, launch: Launch, port: int, probe: Path | None, /
    ) -> ServerCommand:
        """Return the command of vLLM's server with the configuration's connector.

        Raises:
            ServerError: a companion is unknown, or the study lacks a child connector.
        """
        engine, configuration = self.section, launch.configuration
        by_id = {entry["id"]: entry for entry in study["configurations"]}
        form = engine["forms"].get(configuration, {})
        python = _below_root(form.get("python", engine["python"]))
        entry_point = engine.get("entry_point", ENTRY_POINT)
        argv = [python, "-m", entry_point, "--model", _model(engine["model"])]
        argv += ["--served-model-name", engine["served_model_name"], "--host", HOST]
        emulated, fetched = engine["device"] == "emulated", is_fetched(engine)
        base_flags = {**_FLAGS, **(_emulated_flags(engine) if emulated else {})}
        flags = _without_null({**base_flags, **engine["flags"], **form.get("flags", {})})
        argv += ["--port", str(port), *_flags(flags)]
        if fetched and "revision" in engine:
            argv += ["--revision", engine["revision"], "--tokenizer-revision", engine["revision"]]
        members = [configuration, *by_id[configuration]["children"]]
        companions = _Companions(
            {
                name: companion
                for member in members
                if member in by_id
                for name, companion in by_id[member].get("companions", {}).items()
            },
            python,
            emulated,
        )
        transfer = transfer_config(by_id, configuration, engine["forms"], companions.port_of)
        if transfer is not None:
            argv += ["--kv-transfer-config", json.dumps(transfer, separators=(",", ":"))]
        path = [below_root(probe)] if probe else []
        path += [f"{ROOT_MARK}/scripts", *([CPU_ADAPTER] if engine["device"] != "cuda" else [])]
        path += [_below_root(folder) for folder in engine.get("pythonpath", [])]
        environment = {
            **_ENVIRONMENT,
            **{name: str(lasting_port(f"{study['study']}/{name}")) for name in _PORT_VARIABLES},
            **({"HF_HUB_OFFLINE": "1"} if fetched else {}),
            **(_EMULATED_ENVIRONMENT if emulated else {}),
            **_without_null({**engine["environment"], **form.get("environment", {})}),
            **({STEP_LOG_VARIABLE: STEP_LOG_PREFIX} if probe else {}),
            "PYTHONPATH": ":".join(path),
        }
        content = engine.get("device_time_content")
        files = {DEVICE_TIME: content} if content else {}
        return ServerCommand(argv, environment, files, list(companions.started.values()))

    def gate_of(self, entry: ConfigurationEntry, /) -> str | None:
        """Return the gate that proves a configuration's connector to be active."""
        return entry["gate"] or f"verify_{entry['id']}"

    def versions(self) -> dict[str, str]:
        """Return the versions of the packages in the interpreter's environment."""
        return engine_versions(self.section["python"])


def _emulated_flags(engine: EngineSection) -> dict[str, Any]:
    """Return flags for values that vLLM would detect on a GPU: memory, and a GPU's defaults.

    Asynchronous scheduling is left to vLLM: requested explicitly, an incompatible connector would
    end the server, while the default switches it off.
    """
    device = engine["device_time_content"]
    cache = device["kv_blocks"] * device["block_size"] * device["kv_bytes"]
    return {
        "--block-size": device["block_size"],
        "--distributed-executor-backend": "uni",
        "--kv-cache-memory-bytes": cache,
    }


def transfer_config(
    by_id: Mapping[str, ConfigurationEntry],
    configuration: str,
    forms: Mapping[str, FormSection],
    port_of: Callable[[str], int],
) -> dict[str, Any] | None:
    """Return the KVTransferConfig of a configuration; None for one without a connector.

    Raises:
        ServerError: a child is not among the study's configurations.
    """
    entry, form = by_id[configuration], forms.get(configuration, {})
    connector = form.get("connector", entry["connector"])
    if connector is None:
        return None
    extra = {**entry["extra_config"], **form.get("extra_config", {})}
    extra = {key: _with_ports(value, port_of) for key, value in extra.items()}
    if entry["children"]:
        missing = [child for child in entry["children"] if child not in by_id]
        if missing:
            raise ServerError(
                f"{configuration} is made of {', '.join(missing)}, which the study's "
                "`configurations` leave out; add them"
            )
        extra["connectors"] = [
            transfer_config(by_id, child, forms, port_of) for child in entry["children"]
        ]
    module = {"kv_connector_module_path": entry["module_path"]} if entry["module_path"] else {}
    return {
        "kv_connector": connector,
        **module,
        "kv_role": entry["role"],
        **form.get("transfer_config", {}),
        **({"kv_connector_extra_config": extra} if extra else {}),
    }


def connector_classes(transfer: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield the connector class of a KVTransferConfig, then its children's classes."""
    if transfer is not None:
        yield transfer["kv_connector"]
        for child in transfer.get("kv_connector_extra_config", {}).get("connectors", []):
            yield from connector_classes(child)


def transfer_of(argv: Sequence[str]) -> dict[str, Any] | None:
    """Return the KVTransferConfig on a vLLM command line, or None."""
    if "--kv-transfer-config" not in argv:
        return None
    transfer: dict[str, Any] = json.loads(argv[argv.index("--kv-transfer-config") + 1])
    return transfer


def _with_ports(value: Any, port_of: Callable[[str], int]) -> Any:
    if not isinstance(value, str):
        return value
    if whole := _COMPANION_PORT.fullmatch(value):
        return port_of(whole[1])
    return _COMPANION_PORT.sub(lambda match: str(port_of(match[1])), value)


class _Companions:
    """The companions of a launch, each with its own port.

    Args:
        configured: the configuration's `companions`, which are always started.
        emulated: whether the device is emulated, and so the copies from and to it.
    """

    def __init__(self, configured: Mapping[str, Any], python: str, emulated: bool) -> None:
        self._configured = configured
        self._python = python
        self._emulated = emulated
        self.started: dict[str, Companion] = {}
        for name in configured:
            self.port_of(name)

    def port_of(self, name: str) -> int:
        """Return the port of a companion.

        Raises:
            ServerError: there is no companion of this name.
        """
        if name not in self.started:
            port, ready = free_port(), None
            if name in self._configured:
                companion = self._configured[name]
                companion = companion if isinstance(companion, Mapping) else {"command": companion}
                marked = (a.replace("{port}", str(port)) for a in companion["command"])
                argv = [argument.replace("{python}", self._python) for argument in marked]
                ready = companion.get("ready")
            else:
                argv = self._known(name, str(port))
            self.started[name] = Companion(name, argv, port, ready)
        return self.started[name].port

    def _known(self, name: str, port: str) -> list[str]:
        if name == "dummy_bootstrap":
            return [self._python, "-m", "connector_tax.vllm.dummy_bootstrap", "--port", port]
        if name == "lmcache_server":
            argv, size = [str(PurePosixPath(self._python).parent / "lmcache")], "1"
            if self._emulated:
                argv, size = [self._python, "-m", EMULATED_LMCACHE], EMULATED_LMCACHE_GB
            argv += ["server", "--host", "localhost", "--port", port]
            argv += ["--http-host", HOST, "--http-port", str(free_port())]
            argv += ["--l1-size-gb", size, "--eviction-policy", "LRU"]
            return [*argv, "--supported-transfer-mode", "auto", "--disable-observability"]
        raise ServerError(
            f"extra_config: found {{{name}.port}}; allowed: "
            + ", ".join([*self._configured, "dummy_bootstrap", "lmcache_server"])
        )


def _without_null(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without null values."""
    return {name: value for name, value in settings.items() if value is not None}


def _flags(flags: Mapping[str, Any]) -> Iterator[str]:
    """Yield vLLM's flags in order: true gives the flag alone, false its `--no-` form."""
    for flag, value in flags.items():
        if value is False:
            yield f"--no-{flag.removeprefix('--')}"
        else:
            yield flag
            if value is not True:
                yield str(value)


def _below_root(path: str) -> str:
    return path if Path(path).is_absolute() else f"{ROOT_MARK}/{path}"


def _model(name: str) -> str:
    """Return the model's name or folder; `./folder` becomes a folder of the project."""
    return f"{ROOT_MARK}/{name[2:]}" if name.startswith("./") else name


KIND = Vllm

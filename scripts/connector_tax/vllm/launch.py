"""The command line and environment of a real vLLM, for each configuration of the study.

A configuration (config/configurations.yaml) becomes vLLM's `--kv-transfer-config`; `engine.forms`
of the study's configuration says where this machine needs another form of it (a connector class
that works there, a protocol, a companion process), or what a control changes in the engine (flags,
environment). Everything else is the same for every configuration, so that two servers differ by
the connector alone.

Paths below the project are written `{root}/...`, those in the server's own temporary folder
`{tmp}/...`; launch.sh resolves both, so that no path of the machine stands in an artifact. A value
`{companion.port}` in a connector's extra configuration asks for that companion process and stands
for its port.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from connector_tax.artifacts.paths import DEVICE_TIME
from connector_tax.config import is_fetched

if TYPE_CHECKING:
    from connector_tax.artifacts.study_records import ConfigurationEntry, EngineSection, FormSection

ROOT_MARK = "{root}"
TMP_MARK = "{tmp}"
ENTRY_POINT = "vllm.entrypoints.launchers.api_server.entry"
CPU_ADAPTER = f"{ROOT_MARK}/scripts/connector_tax/vllm/cpu_adapter"
STEP_LOG_VARIABLE = "AGENTIC_STEP_LOG_PATH"


# Lines of a server whose engine is gone though its HTTP process still answers.
DEAD_ENGINE = re.compile(r"EngineDeadError|EngineCore encountered (?:an issue|a fatal error)")

# The same for every configuration, plain included.
_ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "LMCACHE_TRACK_USAGE": "false",
    # The engine core names itself; without this that overwrites its environment in /proc, by which
    # what a killed driver left behind is known.
    "SPT_NOENV": "1",
    "PYTHONHASHSEED": "0",  # LMCache's keys: server and engine must hash alike
    # Whatever the caller's shell holds, the server asks nobody for a key: no key is ever sent.
    "VLLM_API_KEY": "",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
}
# So too, unless the study's own flags say otherwise: vLLM's own sampling, and none of the defaults
# that a model's generation_config.json brings along, such as a repetition penalty.
_FLAGS = {"--generation-config": "vllm"}
# Where the device is emulated: what a GPU's server runs, which vLLM takes from a CPU's.
_EMULATED_ENVIRONMENT = {
    "CONNECTOR_TAX_DEVICE_TIME": DEVICE_TIME,
    "VLLM_USE_V2_MODEL_RUNNER": "1",
}
# Ports vLLM's connectors listen on, whatever the configuration.
_PORT_VARIABLES = ("VLLM_MOONCAKE_BOOTSTRAP_PORT", "VLLM_NIXL_SIDE_CHANNEL_PORT")
_COMPANION_PORT = re.compile(r"\{([a-z_]+)\.port\}")


class LaunchError(Exception):
    """A configuration cannot be turned into a command; names the configuration and the key."""


@dataclass(frozen=True, slots=True)
class Companion:
    """A process a connector needs beside its vLLM.

    Attributes:
        port: of 127.0.0.1; it is ready when it listens there ...
        ready_path: ... and, unless None, answers 200 to a GET of this path.
    """

    name: str
    argv: list[str]
    port: int
    ready_path: str | None = None


@dataclass(frozen=True, slots=True)
class VllmCommand:
    """A vLLM launch: arguments, added environment, and the companions started before it."""

    argv: list[str]
    environment: dict[str, str]
    companions: list[Companion]


def vllm_command(
    engine: EngineSection,
    configurations: Sequence[ConfigurationEntry],
    configuration: str,
    *,
    host: str,
    port: int,
    probe: str | None,
    free_port: Callable[[], int],
) -> VllmCommand:
    """The command that serves `configuration` on `host`:`port`.

    Args:
        engine: the `engine` section of a study's configuration, of kind vllm.
        configurations: the study's configurations, the children of a MultiConnector included.
        probe: the step probe's overlay folder (`{root}` allowed), None for a launch without it.
        free_port: a TCP port of 127.0.0.1 that nobody listens on.

    Raises:
        LaunchError: an unknown companion, or a child connector the study does not hold.
    """
    form = engine["forms"].get(configuration, {})
    python = _below_root(form.get("python", engine["python"]))
    argv = [python, "-m", ENTRY_POINT, "--model", _model(engine["model"])]
    argv += ["--served-model-name", engine["served_model_name"], "--host", host]
    emulated = engine["device"] == "emulated"
    own = {**_FLAGS, **(_emulated_flags(engine) if emulated else {})}
    flags = _without_null({**own, **engine["flags"], **form.get("flags", {})})
    argv += ["--port", str(port), *_flags(flags)]
    fetched = is_fetched(engine)
    if fetched and "revision" in engine:
        argv += ["--revision", engine["revision"], "--tokenizer-revision", engine["revision"]]
    by_id = {entry["id"]: entry for entry in configurations}
    companions: dict[str, Companion] = {}
    members = [configuration, *by_id[configuration]["children"]]
    own_companions = {
        name: asked
        for member in members
        if member in by_id
        for name, asked in by_id[member].get("companions", {}).items()
    }

    def port_of(name: str) -> int:
        if name not in companions:
            companions[name] = _companion(name, own_companions, python, free_port)
        return companions[name].port

    for name in own_companions:
        port_of(name)
    transfer = transfer_config(by_id, configuration, engine["forms"], port_of)
    if transfer is not None:
        argv += ["--kv-transfer-config", json.dumps(transfer, separators=(",", ":"))]
    path = [f"{ROOT_MARK}/scripts", *([CPU_ADAPTER] if engine["device"] != "cuda" else [])]
    path += [_below_root(folder) for folder in engine.get("pythonpath", [])]
    environment = {
        **_ENVIRONMENT,
        **{name: str(free_port()) for name in _PORT_VARIABLES},
        **({"HF_HUB_OFFLINE": "1"} if fetched else {}),
        **(_EMULATED_ENVIRONMENT if emulated else {}),
        **_without_null({**engine["environment"], **form.get("environment", {})}),
        **({STEP_LOG_VARIABLE: "engine_step"} if probe else {}),
        "PYTHONPATH": ":".join([*([probe] if probe else []), *path]),
    }
    return VllmCommand(argv, environment, list(companions.values()))


def _emulated_flags(engine: EngineSection) -> dict[str, Any]:
    """What vLLM finds out of a GPU by itself: its memory, and the defaults it has there.

    Asynchronous scheduling is left to it: asked for, a connector that it does not go with would end
    the server, where by default it is switched off.
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
    """vLLM's KVTransferConfig of a configuration; None for one without a connector.

    Raises:
        LaunchError: a child is not among the study's configurations.
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
            raise LaunchError(
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
    """The connector class of a KVTransferConfig, then those of its children."""
    if transfer is not None:
        yield transfer["kv_connector"]
        for child in transfer.get("kv_connector_extra_config", {}).get("connectors", []):
            yield from connector_classes(child)


def transfer_of(argv: Sequence[str]) -> dict[str, Any] | None:
    """The KVTransferConfig on a command line made by `vllm_command`."""
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


def _companion(
    name: str, own: Mapping[str, Any], python: str, free_port: Callable[[], int]
) -> Companion:
    port = free_port()
    if name in own:
        values = {"{port}": str(port), "{python}": python}
        asked = own[name] if isinstance(own[name], Mapping) else {"command": own[name]}
        argv = [_replaced(argument, values) for argument in asked["command"]]
        return Companion(name, argv, port, asked.get("ready"))
    if name == "dummy_bootstrap":
        argv = [python, "-m", "connector_tax.vllm.dummy_bootstrap", "--port", str(port)]
    elif name == "lmcache_server":
        argv = [str(PurePosixPath(python).parent / "lmcache"), "server"]
        argv += ["--host", "localhost", "--port", str(port)]
        argv += ["--http-host", "127.0.0.1", "--http-port", str(free_port())]
        argv += ["--l1-size-gb", "1", "--eviction-policy", "LRU"]
        argv += ["--supported-transfer-mode", "auto", "--disable-observability"]
    else:
        raise LaunchError(
            f"extra_config asks for {{{name}.port}}; allowed: "
            + ", ".join([*own, "dummy_bootstrap", "lmcache_server"])
        )
    return Companion(name, argv, port)


def _replaced(text: str, values: Mapping[str, str]) -> str:
    for mark, value in values.items():
        text = text.replace(mark, value)
    return text


def _without_null(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those a form has not taken away by giving null."""
    return {name: value for name, value in settings.items() if value is not None}


def _flags(flags: Mapping[str, Any]) -> Iterator[str]:
    """vLLM's flags in order: true is the bare flag, false its `--no-` form."""
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
    """`./folder` is a folder of the project; anything else is passed on as it stands."""
    return f"{ROOT_MARK}/{name[2:]}" if name.startswith("./") else name

"""Define the interface of a kind of engine, and list the kinds.

Each other module of this package is a kind and has its name: `embedded.py`, `vllm.py`,
`command.py`. A new kind is a new module with a subclass of `Engine` under the name `KIND`.
Snakemake plans with these modules, so imports beyond the standard library are late.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from connector_tax import servers
from connector_tax.artifacts.names import Launch
from connector_tax.artifacts.record_reader import meant
from connector_tax.config import ROOT, ConfigError
from connector_tax.foreign import LogSecrets, printable
from connector_tax.machine import ABSENT, ENGINE_PACKAGES

if TYPE_CHECKING:
    from connector_tax.artifacts.study_records import (
        AccessSection,
        ConfigurationEntry,
        EngineSection,
        ServedSection,
        StudyDocument,
    )

# Marks for the project's folder and the temporary folder. launch.sh resolves them, so that no
# artifact contains a path of this machine.
ROOT_MARK, TMP_MARK = "{root}", "{tmp}"
# The address of every server of a study (`server.host`).
HOST = "127.0.0.1"
STEP_LOG_PREFIX = "engine_step"
STEP_LOG_VARIABLE = "AGENTIC_STEP_LOG_PATH"
STEP_LOG_PROCESSES = ("scheduler", "worker")

# Settings in vLLM's log.
_LOG_LINES = {
    "attention_backend": re.compile(r"Using (\w+) (?:attention )?backend out of"),
    "kv_cache_layout": re.compile(r"Using (\w+) KV cache layout"),
}


class ServerError(Exception):
    """The server cannot be started, died or did not stop; the text quotes the end of its log."""


@dataclass(frozen=True, slots=True)
class Companion:
    """A process that a server needs besides its own.

    Attributes:
        port: port of 127.0.0.1 on which it listens once it is ready.
        ready_path: path that must then answer 200 to a GET; None if listening is enough.
    """

    name: str
    argv: list[str]
    port: int
    ready_path: str | None = None


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """The content of launch.sh: arguments, added environment, JSON files, companions.

    Companions are started first. The server is not ready without them, and is stopped if one ends.

    Attributes:
        callers: it runs in the folder and with the environment of the user who started the study.
        running: base URL of a server that runs already and is not started; the command waits.
        access: key and certificate settings; None without key and custom certificate.
    """

    argv: list[str]
    environment: dict[str, str]
    files: dict[str, Any] = field(default_factory=dict)
    companions: list[Companion] = field(default_factory=list)
    callers: bool = False
    running: str | None = None
    access: AccessSection | None = None


class Engine:
    """A kind of engine, with the study's `engine` section.

    The defaults describe a kind without step log, special gate and versions; a kind overrides the
    defaults that do not apply to it.

    Attributes:
        needs: required keys of the section in a study's file, besides `kind` and `label`.
        may: optional keys; no others are allowed.
        emulated: marked as emulated in every record of the study.
        design_keys: keys of a configuration that affect the server; None for all.
        configured: its configurations are connectors of vLLM, proved active by a gate.
        takes_probe: the step probe's overlay can be on its PYTHONPATH.
        gate_s: seconds of a gate besides the start.
        startup_s: default seconds from launch to the first cell: measured in the shipped studies;
            with a GPU an assumption, without reading weights.
        server_gib: host memory of a server and the pipeline; with a GPU including driver and pinned
            buffers.
        lacks: why a setting of vLLM is null; if None, the record lists the searched sources.
        step_suffix: suffix of its step log's files.
        steps_method: the writer of the step log.
        no_steps: why there is no step log; None if there is one.
    """

    needs: tuple[str, ...] = ()
    may: tuple[str, ...] = ()
    emulated = False
    design_keys: tuple[str, ...] | None = None
    configured = False
    takes_probe: bool = False
    gate_s = 10.0
    startup_s = 28.0
    server_gib = 4.0
    lacks: str | None = None
    step_suffix = "jsonl"
    steps_method = "the engine writes its step log itself"
    no_steps: str | None = "this kind of engine writes no step log"

    def __init__(self, section: EngineSection) -> None:
        self.section = section

    def resolve(self, _configurations: Sequence[str], /) -> None:
        """Add the content of the files that the section names to the section.

        Raises:
            ConfigError: a file is unusable, or lacks one of the configurations.
        """

    @property
    def served(self) -> ServedSection:
        """Return the served model and the form of its requests."""
        raise NotImplementedError

    def command(
        self, study: StudyDocument, launch: Launch, port: int, probe: Path | None, /
    ) -> ServerCommand:
        """Return the command that starts the launch's server on `port`.

        Args:
            probe: the step probe's overlay folder; None without a step log.

        Raises:
            ServerError: this configuration cannot be launched; the text names what is missing.
        """
        raise NotImplementedError

    def gate_of(self, entry: ConfigurationEntry, /) -> str | None:
        """Return the gate that a configuration must pass, or None."""
        return entry["gate"]

    def write_steps(self, path: Path) -> None:
        """Make the running server write the step records in its memory to the file `path`.

        Raises:
            ServerError: the server does not answer.
        """

    def step_lines(self, path: Path, offset: int) -> list[bytes]:
        """Return the complete step records of a file from the byte `offset` on, as JSON lines."""
        with path.open("rb") as stream:
            stream.seek(offset)
            lines = stream.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        return lines

    def log_settings(self, _log: str, /) -> Mapping[str, str]:
        """Return the settings of vLLM found in the server's log, by name."""
        return {}

    def versions(self) -> dict[str, str]:
        """Return the versions of vLLM and the connectors, and vLLM's commit, for the manifest."""
        return {**dict.fromkeys(ENGINE_PACKAGES, ABSENT), "vllm_sha": "unknown"}


class ProbedEngine(Engine):
    """A kind whose servers can be a vLLM with the step probe, which writes the step log."""

    takes_probe = True
    step_suffix = "steps"
    steps_method = "vLLM plugin in an overlay folder on the server's PYTHONPATH"
    no_steps: str | None = None

    def __init__(self, section: EngineSection) -> None:
        super().__init__(section)
        if section.get("device") == "cuda":
            self.startup_s, self.server_gib = 60.0, 16.0

    def write_steps(self, path: Path) -> None:
        """Request the records from the step probe of the process."""
        from connector_tax.vllm.step_records import ProbeSocketError, ask_to_write

        try:
            ask_to_write(path)
        except ProbeSocketError as error:
            raise ServerError(f"the server hangs: {error}") from error

    def step_lines(self, path: Path, offset: int) -> list[bytes]:
        """Return the probe's binary records, decoded."""
        import msgspec

        from connector_tax.vllm.step_records import step_records

        records = step_records(path.read_bytes(), offset)
        return [msgspec.json.encode(record) + b"\n" for record in records]

    def log_settings(self, log: str, /) -> Mapping[str, str]:
        """Return the attention settings that vLLM prints."""
        lines = {name: pattern.search(log) for name, pattern in _LOG_LINES.items()}
        return {name: line[1] for name, line in lines.items() if line is not None}


def kind_of(name: str) -> type[Engine]:
    """Return the kind of engine of this name."""
    kind: type[Engine] = import_module(f"connector_tax.servers.{name}").KIND
    return kind


def kinds() -> list[str]:
    """Return the names of all kinds."""
    return [module.name for module in iter_modules(servers.__path__) if module.name != "kinds"]


def engine_of(section: EngineSection) -> Engine:
    """Return the engine that a study's `engine` section describes."""
    return kind_of(section["kind"])(section)


def check_engine(engine: EngineSection, source: str) -> None:
    """Check that an engine has the keys of its kind and no others.

    Raises:
        ConfigError: one line for each error; `source` is the file's name.
    """
    name = engine["kind"]
    if name not in kinds():
        allowed = f"{meant(name, kinds())} allowed: one of {', '.join(kinds())}"
        raise ConfigError(f"{source}: engine.kind: found {name!r};{allowed}")
    kind = kind_of(name)
    lines = [
        f"engine.{key}: not allowed with engine.kind {name}; remove the key"
        for key in engine
        if key not in ("kind", "label", *kind.needs, *kind.may)
    ]
    lines += [f"engine.{key}: missing; it is required" for key in kind.needs if key not in engine]
    device = engine.get("device")
    if (device == "emulated") != ("device_time" in engine):
        presence = "found" if "device_time" in engine else "none found"
        lines.append(
            f"engine.device_time: {presence} with engine.device {device}; required with emulated,"
            " and not allowed with another device"
        )
    # The label accompanies each of its numbers.
    if device == "emulated" and "device time emulated" not in engine["label"]:
        lines.append(
            f"engine.label: found {engine['label']!r}; allowed: one with the words 'device time "
            "emulated'"
        )
    if lines:
        raise ConfigError("\n".join(f"{source}: {line}" for line in lines))


def command_for(
    study: StudyDocument, launch: Launch, port: int, probe: Path | None = None
) -> ServerCommand:
    """Return the command that starts a launch's server (`Engine.command` of its engine)."""
    return engine_of(study["config"]["engine"]).command(study, launch, port, probe)


def free_port() -> int:
    """Return a TCP port of HOST on which no process listens."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
    return port


def lasting_port(name: str) -> int:
    """Return a free TCP port of HOST that stays the same for a name on the same CPUs.

    It is below the kernel's range for automatic ports (ip(7), ip_local_port_range).

    Raises:
        ServerError: the port and the 99 after it are all in use.
    """
    cpus = sorted(
        os.sched_getaffinity(0)
    )  # part of the name, since two slots of a machine start at the same time
    first = 20_000 + zlib.crc32(f"{name}/{cpus}".encode()) % 100 * 100
    for port in range(first, first + 100):
        with contextlib.suppress(OSError), socket.create_server((HOST, port)):
            return port
    raise ServerError(f"{HOST}: none of the ports {first} to {first + 99} is free")


def below_root(path: Path) -> str:
    """Return `{root}/...` for a path in the project's folder, else the absolute path."""
    path = path.resolve()
    if path.is_relative_to(ROOT):
        return f"{ROOT_MARK}/{path.relative_to(ROOT).as_posix()}"
    return str(path)


def without_root(text: str) -> str:
    """Return `text` with project folder, home folder and host name replaced by `{root}`, `~`,
    `host`.

    Records are published. The host name is only recognised where UCX writes it before each log
    line: `[host:pid:thread]`.
    """
    # Not a folder whose name only begins with the project's.
    text = re.sub(rf"{re.escape(str(ROOT))}(?![\w-]|\.\w)", lambda _: ROOT_MARK, text)
    text = re.sub(rf"\[{re.escape(socket.gethostname())}(?=:\d+ *:\d+\])", "[host", text)
    # `~` stays if HOME is not set and the user has no entry in the password file.
    home = os.path.expanduser("~")  # noqa: PTH111 - Path.home() raises there
    return text if home in ("/", "~") else text.replace(f"{home}/", "~/")


def publishable(text: str) -> str:
    """Return output of a server or its environment in a form that can be recorded and printed.

    Applies `without_root` and removes lines that look like secrets, and escape sequences.
    """
    return printable(LogSecrets().redacted(without_root(text))[0])

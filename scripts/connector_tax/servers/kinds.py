"""Define what the study needs of a kind of engine, and list the kinds.

Each other module of this room is a kind and has its name: `embedded.py`, `vllm.py`, `command.py`. A
further kind is a further module with a subclass of `Engine` under the name `KIND`.
Snakemake plans with these modules: what needs more than the standard library is imported late.
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

# The project's folder, the temporary folder: launch.sh resolves both, so that no path of this
# machine stands in an artifact.
ROOT_MARK, TMP_MARK = "{root}", "{tmp}"
# Where every server of a study listens (`server.host`).
HOST = "127.0.0.1"
STEP_LOG_PREFIX = "engine_step"
STEP_LOG_VARIABLE = "AGENTIC_STEP_LOG_PATH"
STEP_LOG_PROCESSES = ("scheduler", "worker")

# What vLLM's log tells of its settings.
_LOG_LINES = {
    "attention_backend": re.compile(r"Using (\w+) (?:attention )?backend out of"),
    "kv_cache_layout": re.compile(r"Using (\w+) KV cache layout"),
}


class ServerError(Exception):
    """The server cannot be started, died or did not stop; the text carries the end of its log."""


@dataclass(frozen=True, slots=True)
class Companion:
    """A process that a server needs beside it.

    Attributes:
        port: of 127.0.0.1; it is ready when it listens there ...
        ready_path: ... and, unless None, answers 200 to a GET of this path.
    """

    name: str
    argv: list[str]
    port: int
    ready_path: str | None = None


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """The content of launch.sh: arguments, added environment, JSON files beside it, companions.

    Companions are started first and belong to the server: it is not ready without them, and dead
    with them.

    Attributes:
        callers: it runs in the folder and with the environment of the user who started the study.
        running: base URL of a server that runs already and is not started; the command waits.
        access: how the server is reached; None: without a key and a custom certificate.
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

    The defaults here describe a kind which writes no step log, has no special gate and
    tells no versions: a kind overrides what it has.

    Attributes:
        needs: keys of the section, besides `kind` and `label`, that a study's file must have.
        may: those it may have; no others.
        emulated: every record of its study says so.
        design_keys: keys of a configuration that reach the server; None: all.
        configured: its configurations are connectors of vLLM, whose activity is proved by a gate.
        takes_probe: the step probe's overlay can be on its PYTHONPATH.
        gate_s: seconds of a gate beside the start.
        startup_s: from launch to the first cell, where nothing else is known: what the launches of
            the shipped studies took; with a GPU an assumption, without the reading of weights.
        server_gib: host memory of a server and the pipeline; with a GPU, its driver's and pinned
            buffers.
        lacks: why a setting of vLLM is null; None: the record says where it was looked for.
        step_suffix: of the files of its step log.
        steps_method: who writes it.
        no_steps: why there is none; None: there is one.
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
        """Add to the section what stands in the files that it names.

        Raises:
            ConfigError: one of them is unusable, or lacks one of the configurations.
        """

    @property
    def pythons(self) -> list[str]:
        """The interpreters whose vLLM serves, the engine's own first."""
        return []

    @property
    def served(self) -> ServedSection:
        """Return what the servers serve, and how to send requests to them."""
        raise NotImplementedError

    def command(
        self, study: StudyDocument, launch: Launch, port: int, probe: Path | None, /
    ) -> ServerCommand:
        """Return the command that starts the launch's server on `port`.

        Args:
            probe: the step probe's overlay folder; None: it is not to write the step log.

        Raises:
            ServerError: this configuration cannot be launched; the text says what is missing.
        """
        raise NotImplementedError

    def gate_of(self, entry: ConfigurationEntry, /) -> str | None:
        """Return the gate that a configuration must pass, or None."""
        return entry["gate"]

    def write_steps(self, path: Path) -> None:
        """Have the running server write what it has recorded for the file `path`.

        Raises:
            ServerError: it does not answer.
        """

    def step_lines(self, path: Path, offset: int) -> list[bytes]:
        """Return the whole step records of a file from the byte `offset` on, as JSON lines."""
        with path.open("rb") as stream:
            stream.seek(offset)
            lines = stream.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        return lines

    def log_settings(self, _log: str, /) -> Mapping[str, str]:
        """Return settings of vLLM that the server's log gives, by name."""
        return {}

    def versions(self) -> dict[str, str]:
        """Return versions for the manifest: of vLLM, of the connectors, and vLLM's commit."""
        return {**dict.fromkeys(ENGINE_PACKAGES, ABSENT), "vllm_sha": "unknown"}


class ProbedEngine(Engine):
    """A kind whose servers may be a vLLM with the step probe in it, which writes the step log."""

    takes_probe = True
    step_suffix = "steps"
    steps_method = "vLLM plugin in an overlay folder on the server's PYTHONPATH"
    no_steps: str | None = None

    def __init__(self, section: EngineSection) -> None:
        super().__init__(section)
        if section.get("device") == "cuda":
            self.startup_s, self.server_gib = 60.0, 16.0

    def write_steps(self, path: Path) -> None:
        """Ask the step probe of the process."""
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
    """Return the engine of an `engine` section."""
    return kind_of(section["kind"])(section)


def check_engine(engine: EngineSection, source: str) -> None:
    """Check that an engine has the keys of its kind and no others.

    Raises:
        ConfigError: one line for each offence; `source` is the file's name.
    """
    name = engine["kind"]
    if name not in kinds():
        allowed = f"{meant(name, kinds())} allowed: one of {', '.join(kinds())}"
        raise ConfigError(f"{source}: engine.kind: found {name!r};{allowed}")
    kind = kind_of(name)
    lines = [
        f"engine.{key}: found with engine.kind {name}; allowed: no such key"
        for key in engine
        if key not in ("kind", "label", *kind.needs, *kind.may)
    ]
    lines += [f"engine.{key}: missing; it is required" for key in kind.needs if key not in engine]
    device = engine.get("device")
    if (device == "emulated") != ("device_time" in engine):
        presence = "found" if "device_time" in engine else "none found"
        lines.append(
            f"engine.device_time: {presence} with engine.device {device}; allowed: with emulated,"
            " and with that alone"
        )
    # The words appear beside each of its numbers.
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
    """Return `Engine.command` of the study's engine."""
    return engine_of(study["config"]["engine"]).command(study, launch, port, probe)


def free_port() -> int:
    """Return a TCP port of HOST that no process listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
    return port


def lasting_port(name: str) -> int:
    """Return a free TCP port of HOST that stays the same for a name on the same CPUs.

    It lies below the range from which the kernel assigns free ports (ip(7), ip_local_port_range).

    Raises:
        ServerError: of the 100 from its own on none is free.
    """
    cpus = sorted(os.sched_getaffinity(0))  # of a slot: two of one machine start side by side
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
    """Return `text` with `{root}` for the project's folder, `~` for the user's home, `host` for its
    name.

    What is recorded is published. Of the machine's name only what UCX puts before each line of its
    log is known: `[host:pid:thread]`.
    """
    # Not of a folder whose name begins as the project's does.
    text = re.sub(rf"{re.escape(str(ROOT))}(?![\w-]|\.\w)", lambda _: ROOT_MARK, text)
    text = re.sub(rf"\[{re.escape(socket.gethostname())}(?=:\d+ *:\d+\])", "[host", text)
    # `~` itself: no HOME is set, and the user has no entry in the password file.
    home = os.path.expanduser("~")  # noqa: PTH111 - Path.home() raises there
    return text if home in ("/", "~") else text.replace(f"{home}/", "~/")


def publishable(text: str) -> str:
    """Return what a server or its environment wrote as it may be recorded and printed.

    That is `without_root`, without lines that hold what looks like a secret, and without escape
    sequences.
    """
    return printable(LogSecrets().redacted(without_root(text))[0])

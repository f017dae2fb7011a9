"""A real vLLM as a server of a study: environment, flags and connectors are part of the design."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from connector_tax.artifacts.names import Launch
from connector_tax.artifacts.paths import DEVICE_TIME
from connector_tax.config import pythons_of
from connector_tax.machine import engine_versions
from connector_tax.servers.kinds import Engine, ServerCommand, ServerError, below_root, free_port
from connector_tax.vllm.launch import LaunchError, vllm_command

if TYPE_CHECKING:
    from connector_tax.artifacts.study_records import (
        ConfigurationEntry,
        EngineSection,
        ServedSection,
        StudyDocument,
    )

PROBE_METHOD = "vLLM plugin in an overlay folder on the server's PYTHONPATH"
_LOG_LINES = {
    "attention_backend": re.compile(r"Using (\w+) (?:attention )?backend out of"),
    "kv_cache_layout": re.compile(r"Using (\w+) KV cache layout"),
}


class Vllm(Engine):
    """vLLM from an environment of this machine, with the step probe in it where that fits."""

    configured = True
    takes_probe = True
    step_suffix = "steps"
    steps_method = PROBE_METHOD
    no_steps = None

    def __init__(self, section: EngineSection) -> None:
        super().__init__(section)
        if section.get("device") == "cuda":
            self.startup_s, self.server_gib = 60.0, 16.0

    @property
    def pythons(self) -> list[str]:
        """The engine's own interpreter, then those of single configurations."""
        return pythons_of(self.section)

    def resolve(self, _configurations: Sequence[str], /) -> None:
        """Reckon the device's coefficients, where it is emulated."""
        if "device_time" in self.section:
            from connector_tax.roofline import device_time

            self.section["device_time_content"] = device_time(self.section)

    @property
    def served(self) -> ServedSection:
        """Name and vocabulary, as the study's file has them."""
        section = self.section
        return {"model": section["served_model_name"], "vocab_size": section["vocab_size"]}

    def command(
        self, study: StudyDocument, launch: Launch, port: int, probe: Path | None, /
    ) -> ServerCommand:
        """vLLM's own server with the configuration's connector."""
        host = study["config"]["server"]["host"]
        try:
            command = vllm_command(
                self.section,
                study["configurations"],
                launch.configuration,
                host=host,
                port=port,
                probe=below_root(probe) if probe else None,
                free_port=lambda: free_port(host),
            )
        except LaunchError as error:
            raise ServerError(str(error)) from error
        content = self.section.get("device_time_content")
        files = {DEVICE_TIME: content} if content else {}
        return ServerCommand(command.argv, command.environment, files, command.companions)

    def gate_of(self, entry: ConfigurationEntry, /) -> str | None:
        """Each configuration has one: its connector must be really active."""
        return entry["gate"] or f"verify_{entry['id']}"

    def write_steps(self, path: Path) -> None:
        """Ask the step probe of the process."""
        from connector_tax.vllm.step_records import ProbeSocketError, ask_to_write

        try:
            ask_to_write(path)
        except ProbeSocketError as error:
            raise ServerError(f"the server hangs: {error}") from error

    def step_lines(self, path: Path, offset: int) -> list[bytes]:
        """The probe's binary records, decoded."""
        import msgspec

        from connector_tax.vllm.step_records import step_records

        records = step_records(path.read_bytes(), offset)
        return [msgspec.json.encode(record) + b"\n" for record in records]

    def log_settings(self, log: str, /) -> Mapping[str, str]:
        """What vLLM prints of its attention."""
        lines = {name: pattern.search(log) for name, pattern in _LOG_LINES.items()}
        return {name: cast(str, line[1]) for name, line in lines.items() if line is not None}

    def versions(self) -> dict[str, str]:
        """Those of the packages beside its interpreter."""
        return engine_versions(self.section["python"])


KIND = Vllm

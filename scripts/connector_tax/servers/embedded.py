"""The embedded engine as a server of a study; its definition file is part of the design."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from connector_tax import __version__
from connector_tax.artifacts.names import Launch
from connector_tax.config import ConfigError, load_yaml, shipped, validate
from connector_tax.machine import git_sha
from connector_tax.seeds import named_generator
from connector_tax.servers.kinds import (
    HOST,
    ROOT_MARK,
    STEP_LOG_PREFIX,
    STEP_LOG_VARIABLE,
    Engine,
    ServerCommand,
)

if TYPE_CHECKING:
    from connector_tax.artifacts.study_records import ServedSection, StudyDocument


class EmbeddedEngine(Engine):
    """The emulated engine with known costs; it writes its step log itself, as JSON lines."""

    needs = ("definition",)
    emulated = True
    # It uses only a configuration's id and gate.
    design_keys = ("id", "gate")
    gate_s = 1.0
    startup_s = 2.0
    server_gib = 0.5
    lacks = "the embedded engine has no such setting"
    steps_method = "the embedded engine writes the step log itself"
    no_steps = None

    def resolve(self, configurations: Sequence[str], /) -> None:
        """Read the definition, which must have an entry for each configuration."""
        definition = self.section["definition"]
        content = load_yaml(shipped(definition))
        validate(content, "embedded", definition)
        self.section["definition_content"] = content
        missing = [name for name in configurations if name not in content["connectors"]]
        if missing:
            raise ConfigError(
                f"{definition}: connectors: no entry for {', '.join(missing)}. The embedded engine "
                "runs no connector; it adds costs from its definition. Measure a connector on a"
                " real vLLM (--configfile config/vllm-cpu.yaml MINE.yaml -- all), or set a cost:"
                f" copy the file, add `{missing[0]}: null` (no cost) or numbers as for nixl_both,"
                " and name the copy under engine.definition."
            )

    @property
    def served(self) -> ServedSection:
        """Return name and vocabulary from the definition."""
        model = self.section["definition_content"]["model"]
        return {"model": model["served_name"], "vocab_size": model["vocab_size"]}

    def command(
        self, study: StudyDocument, launch: Launch, port: int, _probe: Path | None, /
    ) -> ServerCommand:
        """Return the embedded engine's command; its definition is written beside launch.sh."""
        argv = ["python", "-m", "connector_tax.engine", "--config", "engine.json"]
        argv += ["--configuration", launch.configuration]
        argv += ["--host", HOST, "--port", str(port)]
        argv += ["--launch-seed", str(launch_seed(study, launch))]
        return ServerCommand(
            argv,
            {STEP_LOG_VARIABLE: STEP_LOG_PREFIX, "PYTHONPATH": f"{ROOT_MARK}/scripts"},
            {"engine.json": self.section["definition_content"]},
        )

    def versions(self) -> dict[str, str]:
        """Return the version and commit of this package."""
        return super().versions() | {
            "vllm": f"embedded engine {__version__}",
            "vllm_sha": git_sha(),
        }


def launch_seed(study: StudyDocument, launch: Launch) -> int:
    """Return the seed of the embedded engine's per-launch offset."""
    return int(named_generator(f"{study['seed']}/launch/{launch.name}").integers(2**31))


KIND = EmbeddedEngine

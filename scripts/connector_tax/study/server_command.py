"""The command of a server launch, and launch.sh that runs it.

The study cannot tell which engine is behind a server except through what is recorded
(docs/architecture.md); `command_for` is the one place that knows the engines.
"""

import os
import re
import shlex
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from connector_tax.artifacts.names import Launch
from connector_tax.artifacts.paths import DEVICE_TIME
from connector_tax.artifacts.study_records import EngineSection, StudyDocument
from connector_tax.config import ROOT
from connector_tax.linux import format_cpus
from connector_tax.loadgen.affinity import (
    AffinityPlan,
    plan_affinity,
    read_topology,
)
from connector_tax.study.design import launch_seed
from connector_tax.study.gpu_needs import gpu_node
from connector_tax.study.server_environment import unset_lines
from connector_tax.vllm.launch import (
    ROOT_MARK,
    TMP_MARK,
    Companion,
    LaunchError,
    vllm_command,
)

STEP_LOG_PREFIX = "engine_step"
_MARKS = {ROOT_MARK: '"$root"', TMP_MARK: '"${TMPDIR:-/tmp}"'}
# The kernel ends a companion with the server, which launch.sh's shell becomes.
_DIES = ("setpriv", "--pdeathsig", "KILL")
STEP_LOG_PROCESSES = ("scheduler", "worker")


class ServerError(Exception):
    """The server cannot be started, died or did not stop; the text carries the end of its log."""


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """What launch.sh runs: arguments, added environment, JSON files that lie beside it, companions.

    `{root}` in an argument or a value is the project's folder, as launch.sh finds it, `{tmp}` the
    temporary folder. Companions
    are started first and belong to the server: it is not ready without them, and dead with them.
    """

    argv: list[str]
    environment: dict[str, str]
    files: dict[str, Any] = field(default_factory=dict)
    companions: list[Companion] = field(default_factory=list)


def free_port(host: str) -> int:
    """A TCP port of `host` nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
    return port


def served_model(engine: EngineSection) -> tuple[str, int]:
    """Served model name and vocabulary size of a resolved `engine` section."""
    if engine["kind"] == "embedded":
        model = engine["definition_content"]["model"]
        return model["served_name"], model["vocab_size"]
    return engine["served_model_name"], engine["vocab_size"]


def affinity_plan(study: StudyDocument) -> AffinityPlan:
    """Where the server and the load generator of this study run on this machine."""
    options = study["config"]["load_generator"]
    cores = study["config"]["server"]["cores"]
    return plan_affinity(
        read_topology(),
        options["workers"],
        cores,
        options["enable_cpu_affinity"],
        gpu_node(study["config"]),
    )


def server_cpus(plan: AffinityPlan) -> tuple[int, ...]:
    """The logical CPUs the server is pinned to; empty: it is not pinned."""
    return plan.server if plan.enabled else ()


def command_for(
    study: StudyDocument, launch: Launch, port: int, probe: Path | None = None
) -> ServerCommand:
    """The command that starts the launch's server on `port`.

    Args:
        probe: the step probe's overlay folder, for a real vLLM that is to write the step log.

    Raises:
        ServerError: this configuration cannot be launched; the text says what is missing.
    """
    engine = study["config"]["engine"]
    host = study["config"]["server"]["host"]
    if engine["kind"] == "vllm":
        try:
            command = vllm_command(
                engine,
                study["configurations"],
                launch.configuration,
                host=host,
                port=port,
                probe=below_root(probe) if probe else None,
                free_port=lambda: free_port(host),
            )
        except LaunchError as error:
            raise ServerError(str(error)) from error
        files = {DEVICE_TIME: content} if (content := engine.get("device_time_content")) else {}
        return ServerCommand(command.argv, command.environment, files, command.companions)
    argv = ["python", "-m", "connector_tax.engine", "--config", "engine.json"]
    argv += ["--configuration", launch.configuration]
    argv += ["--host", host, "--port", str(port)]
    argv += ["--launch-seed", str(launch_seed(study, launch))]
    return ServerCommand(
        argv,
        {"AGENTIC_STEP_LOG_PATH": STEP_LOG_PREFIX, "PYTHONPATH": f"{ROOT_MARK}/scripts"},
        {"engine.json": engine["definition_content"]},
    )


def below_root(path: Path) -> str:
    """`{root}/...` for a path in the project's folder, else the absolute path."""
    path = path.resolve()
    if path.is_relative_to(ROOT):
        return f"{ROOT_MARK}/{path.relative_to(ROOT).as_posix()}"
    return str(path)


def without_root(text: str) -> str:
    """`text` with `{root}` for the project's folder, `~` for the user's home, `host` for its name.

    What is recorded is published. Of the machine's name only what UCX puts before each line of its
    log is known: `[host:pid:thread]`.
    """
    text = text.replace(str(ROOT), ROOT_MARK)
    text = re.sub(rf"\[{re.escape(socket.gethostname())}(?=:\d+ *:\d+\])", "[host", text)
    # `~` itself: no HOME is set, and the user has no entry in the password file.
    home = os.path.expanduser("~")  # noqa: PTH111 - Path.home() raises there
    return text if home in ("/", "~") else text.replace(f"{home}/", "~/")


def launch_script(command: ServerCommand, title: str, root: str, cpus: tuple[int, ...] = ()) -> str:
    """The text of launch.sh; every value is quoted, so none is ever interpreted by the shell.

    Args:
        root: the project's folder, absolute or as seen from the script's.
        cpus: logical CPUs the server and its companions are pinned to; empty: not pinned.
    """
    pinned = ["taskset", "--cpu-list", format_cpus(cpus)] if cpus else []
    lines = [
        "#!/usr/bin/env bash",
        f"# {title}".replace("\n", " "),
        "set -euo pipefail",
        'cd -- "$(dirname -- "${BASH_SOURCE[0]}")"',
        f"root={shlex.quote(root)}",
        *unset_lines(),
        *(f"export {name}={_quoted(value)}" for name, value in command.environment.items()),
        *(
            f"{_joined([*_DIES, *pinned, *c.argv])} >{c.name}.log 2>&1 & echo $! >{c.name}.pid"
            for c in command.companions
        ),
        *(
            f"until ({_answers(c)}) 2>/dev/null; do\n  kill -0 $(<{c.name}.pid); sleep 0.1\ndone"
            for c in command.companions
        ),
        f"exec {_joined([*pinned, *command.argv])}",
    ]
    return "\n".join(lines) + "\n"


def _answers(companion: Companion) -> str:
    """Shell commands that succeed when the companion is ready: it listens, or answers 200."""
    place = f"/dev/tcp/127.0.0.1/{companion.port}"
    if companion.ready_path is None:
        return f": <{place}"
    request = r"'GET %s HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n'"
    return (
        f"exec 3<>{place} && printf {request} {shlex.quote(companion.ready_path)} >&3 "
        '&& read -r -t 5 _ status _ <&3 && [ "$status" = 200 ]'
    )


def _joined(arguments: Sequence[str]) -> str:
    return " ".join(_quoted(argument) for argument in arguments)


def _quoted(value: str) -> str:
    """`value` for the shell, with `{root}` and `{tmp}` left to variables."""
    parts = re.split(f"({re.escape(ROOT_MARK)}|{re.escape(TMP_MARK)})", value)
    return "".join(_MARKS.get(part) or shlex.quote(part) for part in parts if part) or "''"

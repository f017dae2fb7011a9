"""launch.sh, which runs a server's command, and the CPUs that a server is pinned to."""

import re
import shlex
from collections.abc import Sequence

from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.linux import format_cpus
from connector_tax.loadgen.affinity import (
    AffinityPlan,
    plan_affinity,
    read_topology,
)
from connector_tax.servers.kinds import ServerCommand
from connector_tax.study.gpu_needs import gpu_node
from connector_tax.study.server_environment import unset_lines
from connector_tax.vllm.launch import ROOT_MARK, TMP_MARK, Companion

# In a command of the caller's: the launch's folder, which it does not run in.
HERE_MARK = "{here}"
_MARKS = {ROOT_MARK: '"$root"', TMP_MARK: '"${TMPDIR:-/tmp}"', HERE_MARK: '"$here"'}
# The kernel ends a companion with the server, which launch.sh's shell becomes.
_DIES = ("setpriv", "--pdeathsig", "KILL")


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


def launch_script(
    command: ServerCommand,
    title: str,
    root: str,
    cpus: tuple[int, ...] = (),
    callers_folder: str = ".",
) -> str:
    """The text of launch.sh; every value is quoted, so none is ever interpreted by the shell.

    Args:
        root: the project's folder, absolute or as seen from the script's.
        cpus: logical CPUs the server and its companions are pinned to; empty: not pinned.
        callers_folder: where a command of the caller's runs, as seen from the script's.
    """
    pinned = ["taskset", "--cpu-list", format_cpus(cpus)] if cpus else []
    lines = [
        "#!/usr/bin/env bash",
        f"# {title}".replace("\n", " "),
        "set -euo pipefail",
        'cd -- "$(dirname -- "${BASH_SOURCE[0]}")"',
        f"root={shlex.quote(root)}",
        "here=$PWD",
        # It runs elsewhere, where a relative path would lead to something else.
        *(['root=$(cd -- "$root" && pwd)'] if command.callers else unset_lines()),
        *(f"export {name}={_quoted(value)}" for name, value in command.environment.items()),
        *([f"cd -- {shlex.quote(callers_folder)}"] if command.callers else []),
        *(
            f'{_joined([*_DIES, *pinned, *c.argv])} >"$here"/{c.name}.log 2>&1 &'
            f' echo $! >"$here"/{c.name}.pid'
            for c in command.companions
        ),
        *(
            f"until ({_answers(c)}) 2>/dev/null; do\n"
            f'  kill -0 $(<"$here"/{c.name}.pid); sleep 0.1\ndone'
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
    """`value` for the shell, with the marks left to variables."""
    parts = re.split(f"({'|'.join(map(re.escape, _MARKS))})", value)
    return "".join(_MARKS.get(part) or shlex.quote(part) for part in parts if part) or "''"

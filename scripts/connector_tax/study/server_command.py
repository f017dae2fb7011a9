"""Write launch.sh, which runs a server's command with its CPUs, environment and probe.

A variable in the user's shell (a thread count, a log level, a transport) could change the
measurement. So launch.sh drops every such variable that the study does not set itself.
"""

import fnmatch
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from connector_tax.artifacts import paths
from connector_tax.artifacts.record_reader import read_record
from connector_tax.artifacts.stage_records import PatchStatus
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.files import ArtifactError
from connector_tax.linux import format_cpus
from connector_tax.loadgen.affinity import AffinityPlan, plan_affinity, read_topology
from connector_tax.servers.kinds import ROOT_MARK, TMP_MARK, Companion, ServerCommand, engine_of
from connector_tax.study.device import gpu_node
from connector_tax.vllm import overlay

# ---- launch.sh

# Mark of the launch's folder in a user's command, which runs in another folder.
HERE_MARK = "{here}"
MARKS = {ROOT_MARK: '"$root"', TMP_MARK: '"${TMPDIR:-/tmp}"', HERE_MARK: '"$here"'}
# The kernel ends a companion with its parent, launch.sh's shell, which becomes the server.
_DIES = ("setpriv", "--pdeathsig", "KILL")


def affinity_plan(study: StudyDocument) -> AffinityPlan:
    """Return the CPUs of server and load generator for this study on this machine."""
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
    """Return the logical CPUs to which the server is pinned; empty if it is not pinned."""
    return plan.server if plan.enabled else ()


def launch_script(
    command: ServerCommand,
    title: str,
    root: str,
    cpus: tuple[int, ...] = (),
    callers_folder: str = ".",
) -> str:
    """Return the text of launch.sh; values are quoted, so that the shell interprets none of them.

    Args:
        root: the project's folder, absolute or relative to the script's.
        cpus: logical CPUs to pin the server and its companions to; empty if not pinned.
        callers_folder: the folder in which a user's command runs, relative to the script's.
    """
    pinned = ["taskset", "--cpu-list", format_cpus(cpus)] if cpus else []
    lines = [
        "#!/usr/bin/env bash",
        f"# {title}".replace("\n", " "),
        "set -euo pipefail",
        'cd -- "$(dirname -- "${BASH_SOURCE[0]}")"',
        # Absolute, since vLLM's cache of compiled graphs depends on the model's path, and a
        # caller's command runs in another folder.
        f"root=$(cd -- {shlex.quote(root)} && pwd)",
        "here=$PWD",
        *([] if command.callers else unset_lines()),
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
    """Return shell commands that succeed when the companion listens or answers 200."""
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
    """Return `value` quoted for the shell; marks become unquoted shell variables."""
    parts = re.split(f"({'|'.join(map(re.escape, MARKS))})", value)
    return "".join(MARKS.get(part) or shlex.quote(part) for part in parts if part) or "''"


# ---- the caller's environment

# Patterns for both bash's `case` and fnmatch.
CLEARED = (
    "AGENTIC_*", "CUBLAS_*", "CUDA_*", "CUDNN_*", "FLASHINFER_*", "GLIBC_TUNABLES", "GLOO_*",
    "GOMP_*", "HF_*", "HUGGINGFACE_*", "KMP_*", "LD_*", "LMCACHE_*", "MALLOC_*", "MC_*",
    "MKL_*", "MOONCAKE_*", "NCCL_*", "NIXL_*", "NUMEXPR_*", "OMP_*", "OPENBLAS_*", "PYTHON*",
    "PYTORCH_*", "RAY_*", "SAFETENSORS_*", "TOKENIZERS_*", "TORCH*", "TRANSFORMERS_*",
    "TRITON_*", "UCX_*", "VLLM_*",
)  # fmt: skip
# Properties of the machine: visible GPUs, the models' folder, and the token to fetch models.
KEPT = ("CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_CACHE", "HF_TOKEN")
# Variables that change vLLM, torch, OpenMP and the connectors. Other values are not recorded, since
# they may be secrets; those that the study sets are in launch.sh.
SHOWN = (
    "AGENTIC_STEP_LOG_PATH", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "LD_PRELOAD",
    "LMCACHE_CHUNK_SIZE", "LMCACHE_LOCAL_CPU", "LMCACHE_MAX_LOCAL_CPU_SIZE",
    "LMCACHE_TRACK_USAGE", "MKL_NUM_THREADS", "MOONCAKE_CONFIG_PATH", "NUMEXPR_NUM_THREADS",
    "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED",
    "PYTHONPATH", "PYTHONUNBUFFERED", "TRANSFORMERS_OFFLINE", "UCX_NET_DEVICES", "UCX_TLS",
    "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_HOST_IP", "VLLM_KV_CACHE_LAYOUT", "VLLM_LOGGING_LEVEL",
    "VLLM_MOONCAKE_BOOTSTRAP_PORT", "VLLM_NIXL_SIDE_CHANNEL_PORT", "VLLM_NO_USAGE_STATS",
)  # fmt: skip


def unset_lines() -> list[str]:
    """Return the lines of launch.sh that drop the caller's variables."""
    return [
        "for name in $(compgen -e); do",
        "  case $name in",
        f"    {' | '.join(KEPT)}) ;;",
        f'    {" | ".join(CLEARED)}) unset -v "$name" ;;',
        "  esac",
        "done",
    ]


def can_change(name: str) -> bool:
    """Return whether a variable of this name can change a server's behaviour."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in CLEARED)


def shown(environment: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return the variables, with null for values that must not be recorded."""
    return {
        name: value if not value or name in SHOWN else None for name, value in environment.items()
    }


# ---- the step probe

OVERLAY = "overlay"


def probe_overlay(study: StudyDocument, study_folder: Path) -> Path | None:
    """Return the overlay of a launch; None without step timing or without vLLM.

    A reverted overlay is installed again when the study is measured again.

    Raises:
        ArtifactError: the probe has changed since patch_status.json was written.
    """
    if not engine_of(study["config"]["engine"]).takes_probe:
        return None
    path = study_folder / paths.PATCH_STATUS
    status = read_record(path, PatchStatus)
    if not status["step_timing_available"]:
        return None
    folder = study_folder / paths.PATCH / OVERLAY
    if overlay.install(folder) != status.get("overlay"):
        raise ArtifactError(
            f"{path}: the step probe has changed since it was applied; delete this file and "
            f"{study_folder / paths.PREFLIGHT_STATUS} to prove and apply the new one"
        )
    return folder

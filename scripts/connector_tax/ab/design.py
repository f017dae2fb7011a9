"""Make a study of Phase A from the arguments and the servers' properties."""

import argparse
import hashlib
import json
import math
import secrets
from pathlib import Path
from typing import Any, cast

import psutil

from connector_tax.ab.arguments import BASELINE, access_of, judged_of
from connector_tax.ab.ask import GRACE_S, Asked
from connector_tax.ab.load import Load, load_of
from connector_tax.artifacts.metrics import METRICS, VERDICT_METRICS
from connector_tax.artifacts.names import UNNAMED
from connector_tax.artifacts.study_records import EngineSection
from connector_tax.config import DEFAULTS, filled, load_yaml
from connector_tax.figures.compared import label_of
from connector_tax.files import sha256_file
from connector_tax.machine import GpuError, query_gpus
from connector_tax.servers.command import split_command
from connector_tax.study.durations import expected_cell_s

# The total alpha, to which the levels of the interim analyses add up.
FAMILY_LEVEL = 0.05
# Blocks before the first analysis; a candidate's error comes only from its own block differences.
FIRST_ANALYSIS = 3
# Seconds of a launch besides start and cell: stopping the server and writing the records.
AROUND_A_LAUNCH_S = 8.0
# A candidate that is undecided after this many blocks is rarely decided by further ones.
MOST_BLOCKS = 12


def arguments_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments that a measurement depends on."""
    unused = (
        "api_key_env",
        "api_key_header",
        "dry_run",
        "export_markdown",
        "json",
        "max",
        "name",
        "device",
        "ready_timeout",
    )
    arguments = {key: value for key, value in sorted(vars(options).items()) if key not in unused}
    for key, value in arguments.items():
        if isinstance(value, Path):
            arguments[key] = {"file": str(value), "sha256": sha256_file(value)}
    return arguments


def study_name(options: argparse.Namespace) -> str:
    """Return the study's name, which is determined by the arguments."""
    if options.name:
        return str(options.name)
    text = json.dumps(arguments_of(options), sort_keys=True)
    return f"ab-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def engine_section(options: argparse.Namespace) -> EngineSection:
    """Return the configuration's section `engine`, without the properties of the servers."""
    try:
        gpus = bool(query_gpus(("uuid",)))
    except GpuError:
        gpus = False
    section: EngineSection = {
        "kind": "command",
        "label": "server by its command",
        "device": "cuda" if gpus else "cpu",
        "commands": {BASELINE: options.baseline, **dict(options.candidate)},
        "beside": options.beside,
        "environment": dict(options.env),
        "pythonpath": options.pythonpath,
    }
    if access := access_of(options):
        section["access"] = access
    return section


def labels_of(options: argparse.Namespace) -> dict[str, str]:
    """Return the servers' labels by name; a candidate without a name is called by what differs in
    its command.
    """
    base = _parts(options.baseline)
    return {BASELINE: "baseline"} | {
        name: label_of(base, _parts(command)) if name == UNNAMED else name
        for name, command in options.candidate
    }


def _parts(line: str) -> list[str]:
    """Return the words of a command line; a quoted script, as of `bash -c`, is split as well."""
    parts = []
    for word in split_command(line):
        try:
            parts += split_command(word)
        except ValueError:
            parts.append(word)
    return parts


def planned_load(
    options: argparse.Namespace, startup_s: float, life_s: float, rate_rps: float | None = None
) -> Load:
    """Return the load; a trace is cut so that the blocks of the first analysis fit --minutes.

    Args:
        rate_rps: expected throughput of a closed loop; None if not known yet.

    Raises:
        LoadError, ValueError, OSError: as in `load_of`.
    """
    most_s = math.inf
    if options.minutes is not None:
        launches = FIRST_ANALYSIS * (2 + len(options.candidate))
        most_s = options.minutes * 60 / launches - startup_s - life_s - AROUND_A_LAUNCH_S
    return load_of(options, life_s, most_s, rate_rps)


def block_s(options: argparse.Namespace, load: Load, startup_s: float, life_s: float) -> float:
    """Return the expected duration of a block in seconds."""
    cells_s = sum(expected_cell_s(cast(Any, load.cell), rate) + life_s for rate in load.rates)
    launches = 2 + len(options.candidate)
    return launches * (startup_s + cells_s + AROUND_A_LAUNCH_S)


def planned_blocks(options: argparse.Namespace, each_s: float) -> int:
    """Return --blocks, or the number of blocks of `each_s` seconds that fit into --minutes."""
    if options.blocks is not None:
        return int(options.blocks)
    fitting: int = math.floor(options.minutes * 60 / each_s)
    return min(max(FIRST_ANALYSIS, fitting), MOST_BLOCKS)


def study_config(
    options: argparse.Namespace,
    engine: EngineSection,
    baseline: Asked,
    load: Load,
    life_s: float = 1.0,
) -> dict[str, Any]:
    """Return the configuration of the study, as in a configuration file.

    Args:
        life_s: duration of a request among others, s.
    """
    config: dict[str, Any] = filled(load_yaml(DEFAULTS / "config.yaml"), "config")
    del config["phase_b"], config["phase_bp"]
    blocks = planned_blocks(options, block_s(options, load, baseline.startup_s, life_s))
    looks = blocks - FIRST_ANALYSIS + 1
    labels = labels_of(options)
    judged = judged_of(options)
    cores = (psutil.cpu_count(logical=False) or 2) - 2
    config |= {
        "study": study_name(options),
        "seed": secrets.randbelow(2**31) if options.seed is None else options.seed,
        "blocks": blocks,
        "baseline": BASELINE,
        "plain_launches": 2,
        "engine": {**engine, "label": baseline.label, "served": baseline.served},
        "server": {
            "ready_timeout_s": options.ready_timeout,
            "stop_grace_s": GRACE_S,
            "release_s": 1.0 if engine["device"] == "cuda" else 0.0,
            "device": options.device or "cpu",
            "cores": max(1, cores),
        },
        "connectors": [
            {"id": name, "connector": None, "label": label} for name, label in labels.items()
        ],
        "configurations": list(labels),
        "arrivals": {"process": "jittered", "gamma_shape": None},
        "phase_a": load.phase_a,
        "cell": load.cell,
        "reference": {"fallback_rps": load.rates[0]},
    }
    config["load_generator"] |= {"connections_per_worker": load.cell["inflight_cap"]}
    config["resources"] = {"idle_s": 1.0}
    config["statistics"] |= {
        "margins": dict.fromkeys((*METRICS, *judged), options.margin),
        "confirmatory": ["ref_safe"],
        "looks": [FAMILY_LEVEL / looks] * looks,
        "first_look": FIRST_ANALYSIS,
    }
    if judged != list(VERDICT_METRICS):
        config["statistics"]["judged"] = judged
    if options.goodput:
        config["statistics"]["goodput"] = options.goodput
    if options.shared_machine:
        # Checks that fail because of other processes are relaxed, so that such cells are valid.
        config["validity"] = {
            "max_foreign_cpu": 1.0,
            "loop_lag_p99_ms": 1000.0,
            "loop_lag_max_ms": 10000.0,
            "schedule_lag_p99_ms": 1000.0,
            "max_cpu_share": 1.0,
            "sent_rate_tolerance": 0.2,
        }
    return config

"""Write the common files of the tests' study folders: study.json and the early stages' files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from connector_tax.artifacts import paths
from connector_tax.artifacts.checks import BOUNDS
from connector_tax.artifacts.launch_files import NodeRecord
from connector_tax.artifacts.names import PHASES, PLAIN, Launch
from connector_tax.artifacts.study_records import CellPlan, StudyConfig
from connector_tax.config import DEFAULTS, filled, load_yaml
from connector_tax.files import write_json, write_text

DEFAULT: Mapping[str, Any] = filled(load_yaml(DEFAULTS / "config.yaml"), "config")
# Sections that a study of any age has.
SECTIONS = StudyConfig.__required_keys__ - {"validity"}
# What a launch ran on.
NODE: Any = {
    **{"machine": "machine-0123456789ab", "boot": "0b00t", "devices": ["none"], "gpus": []},
    **{"cpu": "synthetic", "cpus": "0-7", "quota_cpus": None, "job": None, "exclusive": None},
    **{"gpu_numa_nodes": [], "engine_files": {}},
}


def on_machines(*blocks: str) -> list[NodeRecord]:
    """Return the node of each block, measured on machines of these names."""
    return [NODE | {"machine": f"machine-{name}"} for name in blocks]


def study_document(
    config: Mapping[str, Any],
    labels: Mapping[str, str],
    cells: Mapping[str, Sequence[CellPlan]],
    order: Sequence[Launch],
    **rest: Any,
) -> Any:
    """Return the content of study.json.

    Args:
        config: the configuration, with `seed` and `blocks`; config/config.yaml supplies keys that
        every study has and `config` lacks.
        labels: configuration id to label, in the study's order.
        cells: phase to its planned cells; a phase that is left out has none.
        order: every launch, in run order.
        rest: replaces what is the same in all of these studies.
    """
    whole = {key: DEFAULT[key] for key in SECTIONS} | {"validity": dict(BOUNDS), **config}
    document = {
        "study": "synthetic",
        "design_sha256": "0" * 64,
        "engine_label": "embedded (emulated)",
        "emulated": True,
        "package_version": "0.1.0",
        "created_utc": "2026-05-26T09:00:00+00:00",
        "seed": config["seed"],
        "blocks": config["blocks"],
        "config": whole,
        "configurations": [
            {
                "id": name,
                "label": label,
                "connector": None if name == PLAIN else "Connector",
                "module_path": None,
                "role": None if name == PLAIN else "kv_both",
                "extra_config": {},
                "children": [],
                "purpose": f"Purpose of {name}.",
                "gate": None,
            }
            for name, label in labels.items()
        ],
        "run_order": {
            phase: [{"config": e.config, "block": e.block} for e in order if e.phase == phase]
            for phase in PHASES
        },
        "cells": {phase: list(cells.get(phase, ())) for phase in PHASES},
    }
    return document | rest


def write_stages(
    root: Path,
    document: Mapping[str, Any],
    skipped: Mapping[str, str] | None = None,
    *,
    step_timing: bool = True,
    environment: Mapping[str, Any] | None = None,
) -> Path:
    """Write study.json, env.txt, environment.json and the status of pre-flight and patch.

    Args:
        root: the study's folder.
        document: the content of study.json.
        skipped: configuration to the reason why pre-flight left it out.
        step_timing: whether the patch stage switched step timing on.
        environment: the content of environment.json.

    Returns:
        the path of study.json.
    """
    lost = skipped or {}
    write_json(root / paths.STUDY, document)
    write_json(root / paths.ENVIRONMENT, environment or {"cpu": "synthetic", "vllm": None})
    write_text(root / paths.ENV_TEXT, "synthetic\n")
    status = {
        entry["id"]: {
            "include": entry["id"] not in lost,
            "reason": lost.get(entry["id"], "no gate"),
            "evidence": None,
        }
        for entry in document["configurations"]
    }
    write_json(root / paths.PREFLIGHT_STATUS, status)
    reason = None if step_timing else "the probe does not fit this engine version"
    patch = {"step_timing_available": step_timing, "method": "built in", "reason": reason}
    write_json(root / paths.PATCH_STATUS, {**patch, "targets": [], "reverted": True})
    return root / paths.STUDY

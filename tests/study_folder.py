"""Write study folders for tests: launches in virtual time, then edits of single files."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

from connector_tax.analysis.aggregate import write_tables
from connector_tax.analysis.reference import rates_of
from connector_tax.artifacts import paths
from connector_tax.artifacts.folder import StudyFolder
from connector_tax.artifacts.launch_files import NodeRecord
from connector_tax.artifacts.names import PHASES, Launch
from connector_tax.artifacts.study_file import launches
from connector_tax.artifacts.study_records import EIGHT, StudyDocument
from connector_tax.config import DEFAULTS, filled, load_yaml
from connector_tax.engine.model import StepCost
from connector_tax.files import read_json, read_jsonl, sha256_below, write_json, write_text
from connector_tax.rehearsal.launch import rehearse_launch
from connector_tax.rehearsal.machine import Machine, machine_of
from connector_tax.rehearsal.study import rehearse_shapes
from connector_tax.study.design import resolve
from connector_tax.study.shape_rates import shape_rates_content

DEFAULT: Mapping[str, Any] = filled(load_yaml(DEFAULTS / "config.yaml"), "config")
# What a launch ran on.
NODE: Any = {
    **{"machine": "machine-0123456789ab", "boot": "0b00t", "devices": ["none"], "gpus": []},
    **{"cpu": "synthetic", "cpus": "0-7", "quota_cpus": None, "job": None, "exclusive": None},
    **{"gpu_numa_nodes": [], "engine_files": {}},
}
CONFIG: Mapping[str, Any] = {
    "study": "synthetic",
    "configurations": [*EIGHT],
    "arrivals": {"process": "fixed", "gamma_shape": None},
    "phase_a": {"rates_rps": [40.0, 80.0], "input_tokens": 256, "output_tokens": 32},
    "phase_b": {"input_tokens": [128, 512], "output_tokens": [16]},
    "phase_bp": {"configurations": ["plain", "mooncake_both"], "shapes": [[128, 16]]},
}
CELL = {"warmup_s": 0.5, "floor_s": 1.5, "cap_s": 10.0, "min_completed": 40}
# Changes of CONFIG for tests that need a sweep of one connector.
ONE_CONNECTOR: dict[str, Any] = {
    "configurations": ["plain", "nixl_both"], "phase_b": None, "phase_bp": None,
    "reference": {"fallback_rps": None},
}  # fmt: skip

# A step's time at any load, the requests that are served at once, and the parts of a tax.
STEP_US, SEQUENCES = 8_000.0, 26
CALLBACKS = {"build_meta_us": 0.3, "get_finished_us": 0.2, "start_load_kv_us": 0.1}
OUTSIDE = 0.4
TAXES: Mapping[str, float] = {
    "noop_connector": 0.10,
    "mooncake_producer": 0.20,
    "mooncake_consumer": 0.15,
    "mooncake_both": 0.45,
    "nixl_both": 0.38,
    "lmcache_only": 0.08,
    "multi_mooncake_lmcache": 0.53,
}


def on_machines(*blocks: str) -> list[NodeRecord]:
    """Return the node of each block, measured on machines of these names."""
    return [NODE | {"machine": f"machine-{name}"} for name in blocks]


def study_design(**config: Any) -> StudyDocument:
    """Return the content of study.json for config/config.yaml, CONFIG and `config`.

    A key of `config` replaces a whole section, only `cell` and `statistics` key by key; None
    removes one.
    """
    whole = load_yaml(DEFAULTS / "config.yaml")
    given = {"blocks": 1, "plain_launches": 2, "seed": 1, **CONFIG, **config}
    given["cell"] = whole["cell"] | CELL | config.get("cell", {})
    given["statistics"] = whole["statistics"] | config.get("statistics", {})
    document = resolve({k: v for k, v in (whole | given).items() if v is not None}, "synthetic")
    return {**document, "created_utc": "2026-05-26T09:00:00+00:00"}


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


def taxed_machine(document: StudyDocument, taxes: Mapping[str, float], launch_sd: float) -> Machine:
    """Return a machine whose steps take STEP_US with plain, and (1 + tax) times as long with a
    connector.

    Three fifths of a tax are in callbacks (CALLBACKS), the rest is in schedule() beside them.

    Args:
        launch_sd: relative standard deviation between launches.
    """
    machine = machine_of(document)
    engines = {}
    for name, engine in machine.engines.items():
        tax_us = STEP_US * taxes.get(name, 0.0)
        free = {"admission_us_per_request": 0.0, "build_meta_us_per_cached_block": 0.0}
        own = free | {key: share * tax_us for key, share in CALLBACKS.items()}
        host_us = 1_000 + OUTSIDE * tax_us
        engines[name] = changed(
            engine,
            step_cost=StepCost(host_us, STEP_US - 1_000, 0.0, 0.0, 0.0, 0.01, launch_sd),
            tax=engine.tax and changed(engine.tax, **own),
            scheduler=changed(
                engine.scheduler, max_num_seqs=SEQUENCES, enable_prefix_caching=False
            ),
        )
    return changed(machine, engines=engines)


def rehearse_study(
    root: Path,
    document: StudyDocument,
    machine: Machine,
    finish: Callable[[Launch], None],
) -> None:
    """Run every launch of a study in virtual time, with the rates of the later phases.

    Args:
        finish: called after each launch.
    """
    for phase in PHASES:
        for launch in launches(document, phase):
            rehearse_launch(document, launch, root, machine)
            finish(launch)
        if phase == "A":
            rates = rates_of(StudyFolder.load(root / paths.STUDY))
            write_json(root / paths.REFERENCE_RATES, rates)
            if document["config"].get("shape_rates"):
                completed_s, _ = rehearse_shapes(document, machine)
                write_json(root / paths.SHAPE_RATES, shape_rates_content(document, completed_s))


def write_virtual_study(
    root: Path,
    *,
    taxes: Mapping[str, float] = TAXES,
    launch_sd: float = 0.005,
    skipped: Mapping[str, str] | None = None,
    step_timing: bool = True,
    void: Mapping[tuple[str, int, str, str], str] | None = None,
    **config: Any,
) -> Path:
    """Write a study on `taxed_machine`; return the path of study.json.

    Args:
        skipped: configuration to the reason why its gate left it out.
        step_timing: whether steps are recorded.
        void: cell (configuration, block, phase, cell) to the reason why it is void.
        config: as for `study_design`.
    """
    document = study_design(**config)
    study_file = write_stages(root, document, skipped, step_timing=step_timing)

    def finish(launch: Launch) -> None:
        for (name, block, phase, cell), reason in (void or {}).items():
            if Launch(name, block, phase) == launch:
                void_cell(launch.folder(root) / cell, reason)

    rehearse_study(root, document, taxed_machine(document, taxes, launch_sd), finish)
    return study_file


def write_analysed_study(root: Path, **given: Any) -> Path:
    """Write a study by `write_virtual_study`, and its analysis."""
    study_file = write_virtual_study(root, **given)
    write_tables(StudyFolder.load(study_file))
    return study_file


# ---- edits


def void_cell(cell: Path, reason: str) -> None:
    """Mark a measured cell as void."""
    with edited_json(next(cell.glob("cell_*"))) as record:
        record |= {"valid": False, "void_reasons": [reason]}
    with edited_json(cell.parent / paths.INDEX) as index:
        for entry in index["cells"]:
            if entry["cell"] == cell.name:
                entry |= {"status": "void", "reason": reason}
    seal_cell(cell)


def fail_launch(launch: Path, reason: str) -> None:
    """Turn a launch into one that failed before its first cell."""
    with edited_json(launch / paths.INDEX) as index:
        index |= {"status": "failed", "reason": reason}
        for entry in index["cells"]:
            shutil.rmtree(launch / entry["cell"])
            entry |= {"status": "missing", "reason": reason, "files": {}}


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    """Write JSON lines, breaking any hard link."""
    replace(path, "".join(json.dumps(record) + "\n" for record in records))


def replace(path: Path, text: str) -> None:
    """Write a file anew, so that hard-linked copies keep their content."""
    path.unlink(missing_ok=True)
    path.write_text(text)


def linked_copy(source: Path, target: Path) -> Path:
    """Return a copy made of hard links; to change a file, write it anew (`replace`)."""
    shutil.copytree(source, target, copy_function=os.link)
    return target


def seal_cell(cell: Path) -> None:
    """Update the hashes of a changed cell, in its record and in its launch's index.json."""
    others = {k: v for k, v in sha256_below(cell).items() if not k.startswith("cell_")}
    for record_file in cell.glob("cell_*.json"):
        with edited_json(record_file) as record:
            record["files"] = others
    with edited_json(cell.parent / "index.json") as index:
        for entry in index["cells"]:
            if entry["cell"] == cell.name:
                entry["files"] = sha256_below(cell)


@contextlib.contextmanager
def edited_json(path: Path) -> Iterator[Any]:
    """Change a JSON file inside the block."""
    value = read_json(path)
    yield value
    write_json(path, value)


@contextlib.contextmanager
def edited_lines(path: Path) -> Iterator[list[dict[str, Any]]]:
    """Change the records of a JSON-lines file inside the block."""
    records = list(read_jsonl(path))
    yield records
    write_lines(path, records)

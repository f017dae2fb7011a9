"""Resolve the design of a study: its launches and cells, their order, and the hash over them.

Source: docs/study.md, "Workload"; docs/method.md, "Design: blocks of launches". `study.json` holds
the result. A study folder belongs to one design, identified by the SHA-256 of everything a
measurement depends on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from connector_tax import __version__
from connector_tax.artifacts import paths
from connector_tax.artifacts.checks import BOUNDS, DEVICE_BOUNDS
from connector_tax.artifacts.names import (
    PHASES,
    Launch,
    baseline_of,
    cell_of_rate,
    cell_of_shape,
    members_of,
    plain_names,
)
from connector_tax.commands import run_command
from connector_tax.config import (
    ConfigError,
    check_study,
    load_configurations,
    shipped,
    with_entries,
)
from connector_tax.files import read_json, sha256_json, write_json
from connector_tax.seeds import named_generator
from connector_tax.servers.kinds import check_engine, engine_of
from connector_tax.study.device import check_slots

if TYPE_CHECKING:
    from connector_tax.artifacts.study_records import (
        CellPlan,
        ConfigurationEntry,
        LaunchPlan,
        StudyConfig,
        StudyDocument,
    )

MEASUREMENT_KEYS = (
    "seed",
    "blocks",
    "baseline",
    "plain_launches",
    "engine",
    "server",
    "arrivals",
    "phase_a",
    "phase_b",
    "phase_bp",
    "shape_rates",
    "cell",
    "load_generator",
    "metrics",
    "quiet",  # of studies of release 0.3
    "resources",
    "validity",
)
COSMETIC_KEYS = ("label", "purpose")


def resolve(config: Mapping[str, Any], source: str, *, shuffled: bool = True) -> StudyDocument:
    """Return the content of `study.json` for a configuration.

    Args:
        config: the merged Snakemake configuration.
        source: the configuration file's name, for errors.
        shuffled: as for `run_order`. Snakemake plans unshuffled, without numpy: it needs the
            launches, not their order.

    Raises:
        ConfigError: the configuration, config/configurations.yaml or the engine's file is unusable.
    """
    configurations = load_configurations(shipped("config/configurations.yaml"))
    engine_section = config.get("engine")
    if isinstance(engine_section, Mapping) and engine_section.get("kind") == "command":
        # Studies of servers by their commands name the configurations themselves.
        configurations = {}
    resolved = check_study(config, source, list(configurations))
    check_engine(resolved["engine"], source)
    check_slots(resolved, source)
    connectors = resolved.get("connectors", [])
    configurations = with_entries(connectors, configurations, f"{source}: connectors")
    engine = resolved["engine"]
    bounds = {**BOUNDS, **DEVICE_BOUNDS.get(engine.get("device", ""), {})}
    resolved["validity"] = {**bounds, **resolved["validity"]}
    kind = engine_of(engine)
    kind.resolve(resolved["configurations"])
    chosen = [configurations[identifier] for identifier in resolved["configurations"]]
    return {
        "study": resolved["study"],
        "design_sha256": sha256_json(measured_design(resolved, chosen)),
        "engine_label": engine["label"],
        "emulated": kind.emulated,
        "package_version": __version__,
        "created_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": resolved["seed"],
        "blocks": resolved["blocks"],
        "config": resolved,
        "configurations": chosen,
        "run_order": run_order(resolved, shuffled=shuffled),
        "cells": {phase: cells_of(resolved, phase) for phase in PHASES},
    }


def measured_design(
    config: StudyConfig, configurations: Sequence[ConfigurationEntry]
) -> dict[str, Any]:
    """Return the part of the configuration that the design hash covers: all a measurement depends
    on.
    """
    design: dict[str, Any] = {k: v for k, v in config.items() if k in MEASUREMENT_KEYS}
    excluded = ("definition", "build_python")
    design["engine"] = {k: v for k, v in design["engine"].items() if k not in excluded}
    keys = engine_of(config["engine"]).design_keys
    design["configurations"] = [
        {
            key: value
            for key, value in entry.items()
            if key not in COSMETIC_KEYS and (keys is None or key in keys)
        }
        for entry in configurations
    ]
    return design


def run_order(config: StudyConfig, *, shuffled: bool = True) -> dict[str, list[LaunchPlan]]:
    """Return the launches of each phase in run order: seeded randomised complete blocks.

    Each block holds the baseline `plain_launches` times and each other configuration once, in
    random order, so that a drift within blocks affects all configurations alike. A phase that the
    study omits has no launches.

    Args:
        shuffled: if false, the launches of a block have the configuration's order.
    """
    baseline = baseline_of(config)
    orders: dict[str, list[LaunchPlan]] = {phase: [] for phase in PHASES}
    for phase in (phase for phase in PHASES if cells_of(config, phase)):
        for block in range(config["blocks"]):
            names = [member for member in members_of(config, phase) if member != baseline]
            names += plain_names(config["plain_launches"], baseline)
            if shuffled:
                named_generator(f"{config['seed']}/run_order/{phase}/block{block}").shuffle(names)
            orders[phase] += [{"config": name, "block": block} for name in names]
    return orders


def cells_of(config: StudyConfig, phase: str) -> list[CellPlan]:
    """Return the cells of a phase; in Phases B and B' the rate is null, since it depends on
    results.

    A phase without a section in the study has no cells.
    """
    if phase == "A":
        sweep = config["phase_a"]
        shape = sweep["input_tokens"], sweep["output_tokens"]
        return [planned_cell(*shape, rate) for rate in sweep["rates_rps"]]
    if phase == "B":
        grid = config.get("phase_b") or {"input_tokens": [], "output_tokens": []}
        shapes = [[i, o] for i in grid["input_tokens"] for o in grid["output_tokens"]]
    else:
        shapes = config["phase_bp"]["shapes"] if "phase_bp" in config else []
    return [planned_cell(i, o) for i, o in shapes]


def planned_cell(input_tokens: int, output_tokens: int, rate_rps: float | None = None) -> CellPlan:
    """Return a cell named by its rate (Phase A) or by its shape (Phases B and B')."""
    shape = cell_of_shape(input_tokens, output_tokens)
    return {
        "cell": shape if rate_rps is None else cell_of_rate(rate_rps),
        "rate_rps": None if rate_rps is None else float(rate_rps),
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
    }


def cell_order(study: StudyDocument, launch: Launch) -> list[CellPlan]:
    """Return the launch's cells in their seeded run order."""
    cells = list(study["cells"][launch.phase])
    order = named_generator(f"{study['seed']}/cell_order/{launch.name}").permutation(len(cells))
    return [cells[position] for position in order]


def described(study: StudyDocument, launch: Launch) -> dict[str, Any]:
    """Return the fields of config.json that the design determines, except the command."""
    entries = {entry["id"]: entry for entry in study["configurations"]}
    return {
        "study": study["study"],
        "design_sha256": study["design_sha256"],
        "configuration": entries[launch.configuration],
        "config": launch.config,
        "block": launch.block,
        "phase": launch.phase,
        "engine": study["config"]["engine"],
        "cells": cell_order(study, launch),
    }


def differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """Yield one line for each key in which two designs differ: `key: old -> new`."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted({*old, *new}):
            yield from differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (left, right) in enumerate(zip(old, new, strict=True)):
            yield from differences(left, right, f"{path}[{index}]")
    elif old != new:
        yield f"{path}: {json.dumps(old)} -> {json.dumps(new)}"


def has_begun(folder: Path) -> bool:
    """Return whether the study's folder contains a device claim, a gate or a launch."""
    begun = (paths.ENVIRONMENT, paths.PATCH, paths.PREFLIGHT, paths.RUNS)
    return any((folder / name).exists() for name in begun)


def refuse_changed_design(existing: Path, resolved: StudyDocument, source: str) -> None:
    """Raise if a study of another design has begun in the folder.

    Before it begins, the design may change, as after a rehearsal.

    Raises:
        ConfigError: names the keys that differ and the possible remedies.
    """
    if not existing.exists() or not has_begun(existing.parent):
        return
    old: StudyDocument = read_json(existing)
    if old["design_sha256"] == resolved["design_sha256"]:
        return
    lines = differences(
        measured_design(old["config"], old["configurations"]),
        measured_design(resolved["config"], resolved["configurations"]),
    )
    raise ConfigError(
        f"{existing.parent} holds measurements of another design than {source} describes:\n  "
        + "\n  ".join(lines)
        + "\nNothing was started and nothing is overwritten. Give the changed design its own name "
        "(key `study`), undo the change, or set all measurements aside, without deleting any:  "
        f"connector-tax remeasure {existing.parent} --all"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Write `study.json` from a configuration given as JSON text."""
    parser = argparse.ArgumentParser(
        prog="python -m connector_tax.study.design", description=main.__doc__
    )
    parser.add_argument("--config-json", required=True, help="the merged configuration")
    parser.add_argument("--source", required=True, help="configuration file name(s), for errors")
    parser.add_argument("--out", type=Path, required=True)
    return run_command(parser, argv, _write, (ConfigError,))


def _write(arguments: argparse.Namespace) -> None:
    resolved = resolve(json.loads(arguments.config_json), arguments.source)
    refuse_changed_design(arguments.out, resolved, arguments.source)
    write_json(arguments.out, resolved)


if __name__ == "__main__":
    sys.exit(main())

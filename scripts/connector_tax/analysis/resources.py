"""Estimate what a connector costs besides latency, and how its settings differ from plain's.

CPU time, memory, GPU memory, KV blocks and start-up time of each configuration are compared with
the baseline's, over the launches of Phase A, by the error model (docs/method.md, "Resources"), as
rows of effects.csv. A connector can make vLLM choose another KV-cache layout or leave fewer blocks;
then a tax is not caused by the connector's code alone. engine.csv holds the resolved settings.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from connector_tax.analysis.block_model import Launches, LaunchId
from connector_tax.analysis.effect import EXACT, Levels, family_levels
from connector_tax.analysis.ingest import merged_reasons
from connector_tax.artifacts import paths, tables
from connector_tax.artifacts.cell_records import QuantityRecord
from connector_tax.artifacts.folder import CellFolder, LaunchFolder, StudyFolder
from connector_tax.artifacts.launch_files import ResourcesRecord, SettingRecord
from connector_tax.artifacts.tables import LOG, RAW, Row
from connector_tax.files import ArtifactError, is_intact, read_json

SERVER = "server"
NOT_RECORDED = "not recorded: measured before launches kept it"
VARIES = "differs between launches"
# Text of a setting's value, its source, and why it is unknown.
Found = tuple[str | None, str | None, str | None]


# ---- records of launches


@dataclass(frozen=True)
class LaunchRecords:
    """One planned launch: its cells by name, and its records if it has them.

    Attributes:
        reason: why there are no records; None if there are.
    """

    launch: LaunchId
    configuration: str
    cells: Mapping[str, CellFolder]
    resources: ResourcesRecord | None
    settings: Mapping[str, SettingRecord] | None
    reason: str | None


def read_launch_records(folder: StudyFolder) -> list[LaunchRecords]:
    """Read the launches of Phase A, in the study's order.

    Raises:
        ArtifactError: a record is missing, malformed or has changed since it was measured.
    """
    groups: dict[tuple[str, int, str], list[CellFolder]] = {}
    for cell in folder.cells("A"):
        groups.setdefault(cell.key[:3], []).append(cell)
    launches = {la.key("")[:3]: la for la in folder.of_phase("A")}
    return [_records(launches[key], members) for key, members in groups.items()]


def _records(launch: LaunchFolder, cells: Sequence[CellFolder]) -> LaunchRecords:
    folder, index = launch.folder, launch.index
    listed: Mapping[str, str] = {}
    measured = [cell for cell in cells if cell.status in ("valid", "void")]
    reason = None if measured else cells[0].reason
    if index is not None:
        listed = index.files or {}
        if index.files is None:
            reason = reason or NOT_RECORDED
    settings = _read(folder / paths.SETTINGS, listed)
    return LaunchRecords(
        launch=LaunchId(launch.launch.config, launch.launch.block),
        configuration=cells[0].configuration,
        cells={cell.key.cell: cell for cell in cells},
        resources=_read(folder / paths.RESOURCES, listed),
        settings=None if settings is None else settings["settings"],
        reason=reason or (None if paths.RESOURCES in listed else "the server was never ready"),
    )


def _read(path: Path, listed: Mapping[str, str]) -> Any:
    if path.name not in listed:
        return None
    if not is_intact(path, listed[path.name]):
        raise ArtifactError(
            f"{path}: missing, or changed after it was measured: its sha256 is not that of"
            " index.json"
        )
    return read_json(path)


# ---- resources


class Resource(NamedTuple):
    """A quantity measured for each launch.

    Attributes:
        scale: the scale of comparison: LOG or RAW.
        place: its source: a key of resources.json, SETTINGS or CELL.
    """

    name: str
    unit: str
    scale: str
    place: str


# Other sources: settings.json, and `server_cpu` of the Phase A cell at ref_safe.
SETTINGS, CELL = "settings", "cell"
RESOURCES = (
    # RAW, since zero has no logarithm.
    Resource("idle_cpu", "CPU s per s", RAW, "idle_cpu"),
    Resource("cpu_s_per_1000", "CPU s per 1000 requests", LOG, CELL),
    Resource("memory_pss_mib", "MiB", LOG, "before_load"),
    Resource("memory_pss_loaded_mib", "MiB", LOG, "after_load"),
    Resource("gpu_memory_mib", "MiB", LOG, "before_load"),
    Resource("kv_blocks", "blocks", LOG, SETTINGS),
    Resource("kv_tokens", "tokens", LOG, SETTINGS),
    Resource("startup_s", "s", LOG, "startup_s"),
)


def _quantity(resource: Resource, launch: LaunchRecords, cell: str | None) -> QuantityRecord:
    """Return one resource's value in a launch with records; `cell` is the cell at ref_safe."""

    def bare(value: float | None, reason: str | None = None) -> QuantityRecord:
        return {"value": value, "parts": {}, "reason": reason}

    reading: Any
    records: Any = launch.resources
    name = resource.name
    if resource.place == SETTINGS:
        if launch.settings is None:
            return bare(None, "no settings.json")
        return bare(launch.settings[name]["value"], launch.settings[name]["reason"])
    if resource.place == CELL:
        if cell is None:
            return bare(None, "ref_safe is not a rate of Phase A")
        measured = launch.cells[cell]
        if measured.status != "valid" or measured.record is None:
            return bare(None, f"{cell}: {measured.status}: {measured.reason}")
        reading = measured.record["server_cpu"]
        return _with_threads(reading["cpu_s_per_1000"], reading.get("threads", {}))
    if (reading := records[resource.place]) is None:
        return bare(None, records["after_load_reason"])
    if name == "startup_s":
        return bare(reading)
    if name == "idle_cpu":
        return _with_threads(reading, reading.get("threads", {}))
    quantity: QuantityRecord = reading[name.replace("_loaded", "")]
    return quantity


def _with_threads(quantity: QuantityRecord, threads: Mapping[str, float]) -> QuantityRecord:
    """Return a quantity whose parts also name the busy threads of the engine core."""
    parts = dict(quantity["parts"])
    for thread, share in threads.items():
        named = f"thread {thread.rpartition(' ')[0]}"
        parts[named] = parts.get(named, 0.0) + share
    return {"value": quantity["value"], "parts": parts, "reason": quantity["reason"]}


@dataclass(frozen=True)
class _Sample:
    """One resource over the launches: known values, their parts, and reasons for missing values."""

    resource: Resource
    values: Mapping[LaunchId, float]
    parts: Mapping[LaunchId, Mapping[str, float]]
    reasons: Mapping[LaunchId, str]


def resource_rows(
    launches: Sequence[LaunchRecords],
    baseline: str,
    cell: str | None,
    confidence: float,
    borrow: bool = True,
) -> list[Row]:
    """Return a row for each resource of each configuration and of the baseline's last launch.

    Args:
        launches: all planned launches of Phase A, in the study's order.
        baseline: the configuration to compare with.
        cell: the Phase A cell at ref_safe; None if that rate is not in the grid.
        confidence: confidence of the intervals.
        borrow: whether configurations inform each other's noise.
    """
    plains = list(dict.fromkeys(r.launch.name for r in launches if r.configuration == baseline))
    others = dict.fromkeys(r.configuration for r in launches if r.configuration != baseline)
    samples = [_sample(resource, launches, cell) for resource in RESOURCES]
    # A comparison of two studies corrects for the number of configurations.
    sizes = dict.fromkeys(others, len(others)) | dict.fromkeys(plains[1:][-1:], 1)
    return [
        _row(sample, name, plains, family_levels(confidence, size), confidence, borrow)
        for name, size in sizes.items()
        for sample in samples
    ]


def _sample(resource: Resource, launches: Sequence[LaunchRecords], cell: str | None) -> _Sample:
    values: dict[LaunchId, float] = {}
    parts: dict[LaunchId, Mapping[str, float]] = {}
    reasons: dict[LaunchId, str] = {}
    for records in launches:
        if records.reason is not None:
            reasons[records.launch] = records.reason
            continue
        try:
            quantity = _quantity(resource, records, cell)
            value, reason = quantity["value"], quantity["reason"]
            parts[records.launch] = quantity["parts"]
        except (KeyError, TypeError) as error:
            raise ArtifactError(
                f"{records.launch.name}/block{records.launch.block}/A: {resource.name}:"
                f" malformed: {error!r}"
            ) from None
        if value is None or (resource.scale == LOG and value <= 0):
            reasons[records.launch] = reason or f"{value:g}, which has no logarithm"
        else:
            values[records.launch] = float(value)
    return _Sample(resource, values, parts, reasons)


def _row(
    sample: _Sample,
    config: str,
    plains: Sequence[str],
    levels: Levels,
    confidence: float,
    borrow: bool,
) -> Row:
    """Return the row of a resource: a tax if it is compared on the log scale, else a difference."""
    is_log = sample.resource.scale == LOG
    launches = Launches.of(sample.values, sample.resource.scale, borrow)
    scaled = replace(launches, y=np.log(launches.y)) if is_log else launches
    row: Row = {
        "quantity": tables.RESOURCE, "config": config, "phase": "A",
        "metric": sample.resource.name, "item": _companions(sample, config),
        "unit": sample.resource.unit, "scale": sample.resource.scale, "n_blocks": 0,
        "reason": _reason(sample, (config, *(name for name in plains if name != config))),
    }  # fmt: skip
    effect = scaled.contrast(config, plains, confidence, levels)
    if effect is None:
        return row | {"status": "missing"}
    weights = scaled.weights(config, plains, effect.blocks)
    sides = [launches.y[side] for side in (weights < 0, weights > 0)]
    base, config_level = (
        float(np.exp(level)) if is_log else level for level in scaled.levels(weights)
    )
    if effect.n_blocks > 1 and all(len(set(side.tolist())) == 1 for side in sides):
        # A constant count is compared without logarithms, to avoid rounding errors.
        base, config_level = (float(side[0]) for side in sides)
        point = config_level / base - 1 if is_log else config_level - base
        effect = replace(effect, combined=point, error=0.0, df=np.inf, method=EXACT)
    return row | {"status": "valid"} | effect.columns() | {"base": base, "own": config_level}


def _reason(sample: _Sample, names: Sequence[str]) -> str | None:
    """Return why values of the configuration or plain are unknown; None if all are known."""
    reason_of = {launch: r for launch, r in sample.reasons.items() if launch.name in names}
    for side in (names[:1], names[1:]):
        side_reasons = {r for launch, r in reason_of.items() if launch.name in side}
        if len(side_reasons) == 1 and not any(launch.name in side for launch in sample.values):
            # Plain's reasons count only if the configuration has none.
            return side_reasons.pop()
    pairs = dict.fromkeys((launch.block, f"{launch.name}: {r}") for launch, r in reason_of.items())
    return merged_reasons(list(pairs)) or None


def _companions(sample: _Sample, config: str) -> str | None:
    """Return a sentence with the companion processes' mean share of the quantity, or None."""
    parts_of = [parts for launch, parts in sample.parts.items() if launch.name == config]
    names = sorted({name for parts in parts_of for name in parts if name != SERVER})
    means = [
        f"{name} {np.mean([parts.get(name, 0.0) for parts in parts_of]):.4g}" for name in names
    ]
    return "; ".join(means) or None


# ---- settings


def engine_rows(launches: Sequence[LaunchRecords], baseline: str) -> list[Row]:
    """Return a row per configuration and setting; a configuration without settings has one row.

    Args:
        launches: all planned launches of Phase A, in the study's order.
    """
    configurations = list(dict.fromkeys(r.configuration for r in launches))
    recorded = [r.settings for r in launches if r.settings is not None]
    settings = list(recorded[0]) if recorded else []
    rows: list[Row] = []
    for config in configurations:
        config_launches = [r for r in launches if r.configuration == config]
        if not any(r.settings for r in config_launches):
            reasons = dict.fromkeys(r.reason or NOT_RECORDED for r in config_launches)
            rows.append({"config": config, "reason": "; ".join(reasons)})
            continue
        config_rows: list[Row] = []
        for setting in settings:
            value, source, reason = _found(launches, config, setting)
            plain, _, _ = _found(launches, baseline, setting)
            known = value is not None and plain is not None
            config_rows.append({
                "config": config, "setting": setting, "value": value, "plain": plain,
                "differs": value != plain if known else None, "source": source, "reason": reason,
            })  # fmt: skip
        changed = [
            f"{r['setting']} {r['value']} ({baseline} {r['plain']})"
            for r in config_rows
            if r["differs"]
        ]
        rows += [row | {"also_differs": "; ".join(changed) or None} for row in config_rows]
    return rows


def _found(launches: Sequence[LaunchRecords], config: str, setting: str) -> Found:
    """Return a configuration's value of a setting; all values if its launches disagree."""
    known = [r.settings[setting] for r in launches if r.configuration == config and r.settings]
    values = sorted({_text(entry["value"]) for entry in known if entry["value"] is not None})
    sources = sorted({entry["source"] for entry in known if entry["source"] is not None})
    reasons = list(dict.fromkeys(entry["reason"] for entry in known if entry["reason"] is not None))
    if len(values) > 1:
        reasons.append(VARIES)
    return " | ".join(values) or None, ", ".join(sources) or None, "; ".join(reasons) or None


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

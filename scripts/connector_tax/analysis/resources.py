"""What an idle connector costs besides latency: resources.csv.

CPU time, memory, GPU memory, KV blocks, threads and start-up time of each configuration against
the baseline's, from the launches of Phase A, by the block model (docs/method.md, "Resources").
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, cast

import numpy as np

from connector_tax.analysis.block_model import Estimate, LaunchId, Layout, Term
from connector_tax.analysis.device_model import over_devices
from connector_tax.analysis.devices import block_devices
from connector_tax.analysis.ingest import merged_reasons
from connector_tax.analysis.launch_records import LaunchRecords
from connector_tax.artifacts.cell_records import QuantityRecord
from connector_tax.artifacts.tables import Row
from connector_tax.files import ArtifactError

SERVER = "server"
# Studies measured before it was kept have no row of it.
QUEUED: Final = "engine_queued"
CpuQuantity = Literal["cpu_s_per_1000", "engine_queued"]
LOG, RAW = "log", "raw"
EXACT = "exact"


class Resource(NamedTuple):
    """A quantity of a launch; `scale` is where its launches are compared: logs, or as they are."""

    name: str
    unit: str
    scale: str
    read: Callable[[LaunchRecords, str | None], QuantityRecord]


def _of(*keys: str) -> Callable[[LaunchRecords, str | None], QuantityRecord]:
    """The quantity under these keys of resources.json."""

    def read(launch: LaunchRecords, _: str | None) -> QuantityRecord:
        value: Any = launch.resources
        for key in keys:
            if value is None:
                assert launch.resources is not None
                return {"value": None, "parts": {}, "reason": launch.resources["after_load_reason"]}
            value = value[key]
        return cast(QuantityRecord, value) if isinstance(value, dict) else _plain_number(value)

    return read


def _plain_number(value: float) -> QuantityRecord:
    return {"value": value, "parts": {}, "reason": None}


def _cell_cpu(name: CpuQuantity) -> Callable[[LaunchRecords, str | None], QuantityRecord]:
    """A quantity of `server_cpu` in the Phase A cell at ref_safe."""

    def read(launch: LaunchRecords, cell: str | None) -> QuantityRecord:
        if cell is None:
            return {"value": None, "parts": {}, "reason": "ref_safe is not a rate of Phase A"}
        measured = launch.cells[cell]
        if measured.status != "valid" or measured.record is None:
            reason = f"{cell}: {measured.status}: {measured.reason}"
            return {"value": None, "parts": {}, "reason": reason}
        use = measured.record["server_cpu"]
        if name == QUEUED and name not in use:
            return {"value": None, "parts": {}, "reason": f"{cell}: measured before it was kept"}
        return use[name]

    return read


def _setting(name: str) -> Callable[[LaunchRecords, str | None], QuantityRecord]:
    def read(launch: LaunchRecords, _: str | None) -> QuantityRecord:
        if launch.settings is None:
            return {"value": None, "parts": {}, "reason": "no settings.json"}
        setting = launch.settings[name]
        return {"value": setting["value"], "parts": {}, "reason": setting["reason"]}

    return read


RESOURCES = (
    # Zero is possible, so that there are no logs.
    Resource("idle_cpu", "CPU s per s", RAW, _of("idle_cpu")),
    Resource("cpu_s_per_1000", "CPU s per 1000 requests", LOG, _cell_cpu("cpu_s_per_1000")),
    Resource(QUEUED, "s per s", RAW, _cell_cpu(QUEUED)),
    Resource("memory_pss_mib", "MiB", LOG, _of("before_load", "memory_pss_mib")),
    Resource("memory_pss_loaded_mib", "MiB", LOG, _of("after_load", "memory_pss_mib")),
    Resource("gpu_memory_mib", "MiB", LOG, _of("before_load", "gpu_memory_mib")),
    Resource("kv_blocks", "blocks", LOG, _setting("kv_blocks")),
    Resource("kv_tokens", "tokens", LOG, _setting("kv_tokens")),
    Resource("threads", "threads", LOG, _of("before_load", "threads")),
    Resource("processes", "processes", LOG, _of("before_load", "processes")),
    Resource("startup_s", "s", LOG, _of("startup_s")),
)


@dataclass(frozen=True)
class _Sample:
    """One resource over the launches: the values known, their parts, and why others are not."""

    resource: Resource
    values: Mapping[LaunchId, float]
    parts: Mapping[LaunchId, Mapping[str, float]]
    reasons: Mapping[LaunchId, str]
    layout: Layout

    def side(self, weights: Mapping[LaunchId, float], ours: bool) -> list[float]:
        """The values of one side of a contrast, which its weights' signs tell apart."""
        return [self.values[launch] for launch, w in weights.items() if (w > 0) is ours]

    def mean(self, weights: Mapping[LaunchId, float], ours: bool) -> float:
        """Mean of one side over the blocks: geometric where logs are compared."""
        values, shares = (
            self.side(weights, ours),
            [abs(w) for w in weights.values() if (w > 0) is ours],
        )
        if len(set(values)) == 1:
            return values[0]
        if self.resource.scale == RAW:
            return float(np.dot(shares, values))
        return float(np.exp(np.dot(shares, np.log(values))))


@dataclass(frozen=True)
class _Effect:
    """Both sides' means, difference and tax with their intervals, how they were had, and p."""

    ours: float
    base: float
    difference: tuple[float | None, ...]
    tax: tuple[float | None, ...]
    method: str | None
    p: float | None

    def columns(self, prefix: str) -> Row:
        """Difference and tax by their columns."""
        return dict(zip(_columns(prefix), (*self.difference, *self.tax), strict=True))


def resource_rows(
    launches: Sequence[LaunchRecords], baseline: str, cell: str | None, confidence: float
) -> list[Row]:
    """One row for each configuration but the baseline and each resource, valid or with its reason.

    Args:
        launches: all planned launches of Phase A, in the study's order.
        baseline: the configuration that the others are compared with.
        cell: the Phase A cell at ref_safe; None where that rate is not in the grid.
    """
    plains, configurations = _compared(launches, baseline)
    samples = [_sample(resource, launches, cell) for resource in _kept(launches)]
    return [
        _row(sample, configuration, plains, confidence)
        for configuration in configurations
        for sample in samples
    ]


def resource_estimates(
    launches: Sequence[LaunchRecords], baseline: str, cell: str | None
) -> dict[tuple[str, str], Estimate]:
    """(configuration, resource) to its contrast with the baseline, where there is one.

    Arguments as `resource_rows` takes them; on logs or on the values, as the resource's scale says.
    """
    plains, configurations = _compared(launches, baseline)
    samples = [_sample(resource, launches, cell) for resource in _kept(launches)]
    known = {
        (configuration, sample.resource.name): over_devices(
            sample.layout, [Term(1.0, configuration, plains)]
        )
        for configuration in configurations
        for sample in samples
    }
    return {key: estimate for key, estimate in known.items() if estimate is not None}


def _kept(launches: Sequence[LaunchRecords]) -> list[Resource]:
    cells = (c.record for launch in launches for c in launch.cells.values())
    queued = any(QUEUED in record.get("server_cpu", {}) for record in cells if record is not None)
    return [resource for resource in RESOURCES if queued or resource.name != QUEUED]


def _compared(
    launches: Sequence[LaunchRecords], baseline: str
) -> tuple[tuple[str, ...], list[str]]:
    """The launches of the baseline, and the configurations that are compared with them."""
    plains = dict.fromkeys(r.launch.name for r in launches if r.configuration == baseline)
    others = dict.fromkeys(r.configuration for r in launches if r.configuration != baseline)
    return tuple(plains), list(others)


def _sample(resource: Resource, launches: Sequence[LaunchRecords], cell: str | None) -> _Sample:
    values: dict[LaunchId, float] = {}
    parts: dict[LaunchId, Mapping[str, float]] = {}
    reasons: dict[LaunchId, str] = {}
    for records in launches:
        if records.reason is not None:
            reasons[records.launch] = records.reason
            continue
        try:
            quantity = resource.read(records, cell)
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
    scaled = {k: float(np.log(v)) if resource.scale == LOG else v for k, v in values.items()}
    names = {records.launch.name: records.configuration for records in launches}
    devices = block_devices(cell for records in launches for cell in records.cells.values())
    return _Sample(resource, values, parts, reasons, Layout(scaled, names, devices))


def _row(sample: _Sample, config: str, plains: tuple[str, ...], confidence: float) -> Row:
    term = Term(1.0, config, plains)
    estimate = over_devices(sample.layout, [term])
    row: Row = {
        "config": config,
        "resource": sample.resource.name,
        "unit": sample.resource.unit,
        "scale": sample.resource.scale,
        **dict.fromkeys(("plain_mean", "config_mean", *_columns(""), "p_value")),
        "interval_method": None,
        **dict.fromkeys(_columns("aa_")),
        "n_blocks": 0,
        "n_launches": 0,
        "companions": _companions(sample, config),
        "status": "valid" if estimate else "missing",
        "reason": _reason(sample, (config, *plains)),
    }
    if estimate is None:
        return row
    effect = _effect(sample, term, estimate, confidence)
    row |= {"plain_mean": effect.base, "config_mean": effect.ours, **effect.columns("")}
    row |= {"p_value": effect.p, "interval_method": effect.method}
    row |= {"n_blocks": len(estimate.blocks)}
    row |= {"n_launches": len(sample.layout.launch_weights([term]))}
    again = Term(1.0, plains[-1], plains[:-1])
    noise = over_devices(sample.layout, [again])
    if noise is not None:
        row |= _effect(sample, again, noise, confidence).columns("aa_")
    return row


def _reason(sample: _Sample, names: Sequence[str]) -> str | None:
    """Why values of a configuration's and of plain's launches are not known; None: all are."""
    lost = {launch: r for launch, r in sample.reasons.items() if launch.name in names}
    for side in (names[:1], names[1:]):
        own = {r for launch, r in lost.items() if launch.name in side}
        if len(own) == 1 and not any(launch.name in side for launch in sample.values):
            # All that the configuration, or else plain, has to say.
            return own.pop()
    pairs = dict.fromkeys((launch.block, f"{launch.name}: {r}") for launch, r in lost.items())
    return merged_reasons(list(pairs)) or None


def _columns(prefix: str) -> tuple[str, ...]:
    names = ("difference", "difference_lo", "difference_hi", "tax", "tax_lo", "tax_hi")
    return tuple(f"{prefix}{name}" for name in names)


def _effect(sample: _Sample, term: Term, estimate: Estimate, confidence: float) -> _Effect:
    """The contrast on the resource's scale, as a difference and, of logs, as a tax."""
    weights = sample.layout.launch_weights([term])
    repeated = len({launch.block for launch in sample.values}) > 1
    exact = repeated and all(len(set(sample.side(weights, mine))) == 1 for mine in (True, False))
    half = estimate.half_width(confidence) if repeated and not exact else None
    ours, base = (sample.mean(weights, mine) for mine in (True, False))
    # A count that never changes is compared without the rounding of a logarithm.
    point = estimate.point if sample.resource.scale == LOG and not exact else ours - base
    ends = (None, None) if half is None else (point - half, point + half)
    method = EXACT if exact else estimate.source if half is not None else None
    p = None if half is None else estimate.p
    if sample.resource.scale == RAW:
        return _Effect(ours, base, (point, *ends), (None, None, None), method, p)
    if exact:
        return _Effect(ours, base, (point, None, None), (ours / base - 1, None, None), method, p)
    tax = tuple(None if end is None else float(np.expm1(end)) for end in (point, *ends))
    difference = (ours - base, *(None if share is None else base * share for share in tax[1:]))
    return _Effect(ours, base, difference, tax, method, p)


def _companions(sample: _Sample, config: str) -> str | None:
    """What a configuration's companion processes have in the quantity, on average."""
    mine = [parts for launch, parts in sample.parts.items() if launch.name == config]
    names = sorted({name for parts in mine for name in parts if name != SERVER})
    means = [f"{name} {np.mean([parts.get(name, 0.0) for parts in mine]):.4g}" for name in names]
    return "; ".join(means) or None

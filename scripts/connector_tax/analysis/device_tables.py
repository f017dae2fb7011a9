"""Rows of effects.csv about an emulated device's steps: what of the host's work it waits for.

Source: docs/method.md, "Device time". For each configuration, cell, kind of step and size of the
batch. A launch counts as one value: `exposed_us` is a mean, since most steps have none of it, the
rest are medians. Intervals are of the configuration's own launches, since a connector's exposed
time differs between launches as plain's does not; what lies over the baseline is compared within
blocks by the block model, as every step tax is.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from connector_tax.analysis.block_model import Launches, LaunchId, known_launches
from connector_tax.analysis.device_time import DeviceSteps, only
from connector_tax.analysis.step_tables import MIN_STEPS, contrast_columns, mean_columns
from connector_tax.analysis.steps import kinds
from connector_tax.artifacts import tables
from connector_tax.artifacts.names import CellKey, configuration_of
from connector_tax.artifacts.study_file import Study
from connector_tax.artifacts.tables import ALL_SIZES, KINDS, Row, StepGroup

METRICS = ("device_us", "period_us", "exposed_us", "exposed_share", "host_busy_us")
OVER_PLAIN = "over_plain_us"


def _order(group: StepGroup) -> tuple[int, float, int]:
    """By kind, time and size, all sizes together first."""
    first = -1 if group.batch == ALL_SIZES else int(group.batch.partition("-")[0])
    return KINDS.index(group.kind), group.device_time_us or 0.0, first


def device_rows(study: Study, cells: Mapping[CellKey, DeviceSteps]) -> list[Row]:
    """Every group of steps of every configuration and of the baseline's last launch.

    Args:
        study: one with an emulated device.
        cells: the steps of every valid cell.
    """
    sweep = study.config["engine"]["device_time"].get("sweep_us")
    launches: dict[
        tuple[str, str], dict[StepGroup, dict[LaunchId, Mapping[str, float | None]]]
    ] = {}
    for key, steps in cells.items():
        here = launches.setdefault((key.phase, key.cell), {})
        for group, members in _groups(steps, sweep):
            if members.sum() >= MIN_STEPS:
                own = here.setdefault(group, {})
                own[LaunchId(key.config, key.block)] = _values(only(steps, members))
    return [
        {"quantity": tables.DEVICE, "phase": phase, "cell": cell, "item": group.item, **row}
        for (phase, cell), groups in sorted(launches.items())
        for group in sorted(groups, key=_order)
        for row in _rows(study, study.configs(phase), study.plains(phase), groups[group])
    ]


def _groups(
    steps: DeviceSteps, sweep: Sequence[float] | None
) -> Iterator[tuple[StepGroup, NDArray[np.bool_]]]:
    sizes = [(ALL_SIZES, steps.decode_seqs >= 0), *_sizes(steps.decode_seqs)]
    kind_of = kinds(steps.prefill, steps.decode_seqs > 0)
    times: list[tuple[float | None, NDArray[np.bool_]]] = [(None, np.ones(len(steps), bool))]
    if sweep is not None:
        # Of a step whose predecessor took as long.
        given = np.array(sweep)[np.abs(steps.device_us[:, None] - np.array(sweep)).argmin(axis=1)]
        before = np.concatenate(([np.nan], given[:-1]))
        times = [(us, (given == us) & (before == us)) for us in sweep]
    for kind in KINDS:
        for time_us, of_time in times:
            for batch, of_size in sizes:
                yield StepGroup(kind, batch, time_us), (kind_of == kind) & of_time & of_size


def _sizes(decode_seqs: NDArray[np.int64]) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """Sizes of the batch, each twice the one before: 1, 2-3, 4-7 and so on."""
    low, most = 1, int(decode_seqs.max(initial=0))
    while low <= most:
        high = 2 * low - 1
        name = str(low) if low == high else f"{low}-{high}"
        yield name, (decode_seqs >= low) & (decode_seqs <= high)
        low *= 2


def _values(steps: DeviceSteps) -> Mapping[str, float | None]:
    """One launch's value of each of METRICS, and how many steps it has."""
    exposed = steps.exposed_us[~np.isnan(steps.exposed_us)]
    return {
        "n": len(steps),
        "device_us": float(np.median(steps.device_us)),
        "period_us": _median(steps.period_us),
        "exposed_us": float(exposed.mean()) if len(exposed) else None,
        "exposed_share": float((exposed > 0).mean()) if len(exposed) else None,
        "host_busy_us": _median(steps.host_busy_us),
    }


def _median(values: NDArray[np.float64]) -> float | None:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else None


def _rows(
    study: Study,
    names: Sequence[str],
    plains: Sequence[str],
    launches: Mapping[LaunchId, Mapping[str, float | None]],
) -> Iterator[Row]:
    confidence = study.config["statistics"]["confidence"]
    exposed = known_launches((la, of["exposed_us"]) for la, of in launches.items())
    for name in names:
        config = configuration_of(name)
        # All launches of the baseline are one row, and its last is another: the A/A comparison.
        if (config == study.baseline and name not in (plains[0], plains[-1])) or not any(
            launch.name == name for launch in launches
        ):
            continue
        own = [of for launch, of in launches.items() if configuration_of(launch.name) == config]
        row = {"config": name, "scale": tables.RAW, "status": "valid", "n_blocks": len(own)}
        row["n"] = sum(int(of["n"] or 0) for of in own)
        for metric in METRICS:
            if values := [value for of in own if (value := of[metric]) is not None]:
                unit = "us" if metric.endswith("_us") else "fraction"
                columns = mean_columns(values, confidence)
                yield row | {"metric": metric, "unit": unit} | columns
        if config != study.baseline or (name == plains[-1] and len(plains) > 1):
            over = contrast_columns(Launches.of(exposed), name, plains, confidence)
            if over:
                yield row | {"metric": OVER_PLAIN, "unit": "us"} | over

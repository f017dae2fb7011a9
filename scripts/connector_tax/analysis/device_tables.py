"""The table of an emulated device's steps: what of the host's work it waits for, by batch size.

Source: docs/method.md, "Device time". A row for each configuration, cell, kind of step and size of
the batch. A launch counts as one value: `exposed_us` is a mean, since most steps have none of it,
the rest are medians. Intervals are over launches; what lies over the baseline is compared within
blocks by the block model, as every step tax is.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student

from connector_tax.analysis.block_model import LaunchId, Layout, Term
from connector_tax.analysis.device_model import over_devices
from connector_tax.analysis.device_time import DeviceSteps, only
from connector_tax.artifacts import paths
from connector_tax.artifacts.names import CellKey
from connector_tax.artifacts.study_file import Study
from connector_tax.artifacts.tables import Row, empty_row

KINDS = ("decode", "prefill")
ALL = "all"
# A launch with fewer steps of a kind and size has no value of them.
MIN_STEPS = 20
MIN_LAUNCHES = 2


class _Group(NamedTuple):
    """Steps that are alike: where, kind, sequences that decode, the time given by a sweep."""

    phase: str
    cell: str
    kind: str
    batch: str
    device_time_us: float | None


class _Launch(NamedTuple):
    """The steps of one group in one launch, in us."""

    n_steps: int
    device: float
    period: float | None
    exposed: float | None
    exposed_share: float | None
    host_busy: float | None


def device_time_rows(
    study: Study,
    cells: Mapping[CellKey, DeviceSteps],
    configuration_of: Mapping[str, str],
    device_of: Mapping[int, str],
) -> list[Row]:
    """device_time.csv.

    Args:
        cells: the steps of every valid cell.
        configuration_of: the configuration each launch name is started with.
        device_of: as `Layout` takes it.
    """
    sweep = study.config["engine"]["device_time"].get("sweep_us")
    groups: dict[_Group, dict[LaunchId, _Launch]] = {}
    for key, steps in cells.items():
        for group, members in _groups(key, steps, sweep):
            if members.sum() >= MIN_STEPS:
                launch = _launch(only(steps, members))
                groups.setdefault(group, {})[LaunchId(key.config, key.block)] = launch
    rows = [
        row
        for group in sorted(groups, key=_order)
        for row in _rows(study, group, groups[group], configuration_of, device_of)
    ]
    return rows or [empty_row(paths.DEVICE_STEPS)]


def _groups(
    key: CellKey, steps: DeviceSteps, sweep: Sequence[float] | None
) -> Iterator[tuple[_Group, NDArray[np.bool_]]]:
    sizes = [(ALL, steps.decode_seqs >= 0), *_sizes(steps.decode_seqs)]
    times: list[tuple[float | None, NDArray[np.bool_]]] = [(None, np.ones(len(steps), bool))]
    if sweep is not None:
        # Of a step whose predecessor took as long.
        given = np.array(sweep)[np.abs(steps.device_us[:, None] - np.array(sweep)).argmin(axis=1)]
        before = np.concatenate(([np.nan], given[:-1]))
        times = [(us, (given == us) & (before == us)) for us in sweep]
    for kind, of_kind in zip(KINDS, (~steps.prefill, steps.prefill), strict=True):
        for time_us, of_time in times:
            for batch, of_size in sizes:
                yield _Group(*key[2:], kind, batch, time_us), of_kind & of_time & of_size


def _sizes(decode_seqs: NDArray[np.int64]) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """Sizes of the batch, each twice the one before: 1, 2-3, 4-7 and so on; 0 beside a prefill."""
    yield "0", decode_seqs == 0
    low, most = 1, int(decode_seqs.max(initial=0))
    while low <= most:
        high = 2 * low - 1
        name = str(low) if low == high else f"{low}-{high}"
        yield name, (decode_seqs >= low) & (decode_seqs <= high)
        low *= 2


def _launch(steps: DeviceSteps) -> _Launch:
    exposed = steps.exposed_us[~np.isnan(steps.exposed_us)]
    return _Launch(
        n_steps=len(steps),
        device=float(np.median(steps.device_us)),
        period=_median(steps.period_us),
        exposed=float(exposed.mean()) if len(exposed) else None,
        exposed_share=float((exposed > 0).mean()) if len(exposed) else None,
        host_busy=_median(steps.host_busy_us),
    )


def _median(values: NDArray[np.float64]) -> float | None:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else None


def _order(group: _Group) -> tuple[str, str, int, float, int]:
    first = -1 if group.batch == ALL else int(group.batch.partition("-")[0])
    time_us = group.device_time_us or 0.0
    return group.phase, group.cell, KINDS.index(group.kind), time_us, first


def _rows(
    study: Study,
    group: _Group,
    launches: Mapping[LaunchId, _Launch],
    configuration_of: Mapping[str, str],
    device_of: Mapping[int, str],
) -> Iterator[Row]:
    confidence = study.config["statistics"]["confidence"]

    def known(name: str) -> dict[LaunchId, float]:
        values = {launch: getattr(of, name) for launch, of in launches.items()}
        return {launch: value for launch, value in values.items() if value is not None}

    means = {n: _means(known(n), configuration_of, confidence) for n in _Launch._fields[1:]}
    exposed = known("exposed")
    layout = Layout(exposed, configuration_of, device_of)
    names = [name for name in configuration_of if any(i.name == name for i in launches)]
    plains = [name for name in names if configuration_of[name] == study.baseline]
    for name in names:
        config = configuration_of[name]
        # All launches of the baseline are one row, and its last is another: the A/A comparison.
        if config == study.baseline and name not in (plains[0], plains[-1]):
            continue
        own = [of for launch, of in launches.items() if configuration_of[launch.name] == config]
        row: Row = empty_row(paths.DEVICE_STEPS) | group._asdict() | {"config": name}
        row["n_launches"], row["n_steps"] = len(own), sum(of.n_steps for of in own)
        for column in ("device", "period", "exposed", "exposed_share", "host_busy"):
            if (level := means[column].get(config)) is None:
                continue
            unit = "" if column == "exposed_share" else "_us"
            row[f"{column}{unit}"] = level[0]
            if f"{column}_lo{unit}" in row:
                row |= {f"{column}_lo{unit}": level[1], f"{column}_hi{unit}": level[2]}
        others = tuple(plain for plain in plains if plain != name)
        if others and (config != study.baseline or name == plains[-1]):
            row |= _over_plain(layout, name, others, confidence)
        yield row


def _means(
    values: Mapping[LaunchId, float], configuration_of: Mapping[str, str], confidence: float
) -> dict[str, tuple[float, float | None, float | None]]:
    """By configuration the mean of its launches and its interval by Student's t, not below 0.

    Of its own launches: a connector's exposed time differs between launches as plain's does not.
    """
    own: dict[str, list[float]] = {}
    for launch, value in values.items():
        own.setdefault(configuration_of[launch.name], []).append(value)
    means: dict[str, tuple[float, float | None, float | None]] = {}
    for config, of in own.items():
        mean, n = float(np.mean(of)), len(of)
        if n < MIN_LAUNCHES:
            means[config] = (mean, None, None)
            continue
        quantile = float(student.ppf((1 + confidence) / 2, n - 1))
        half = quantile * float(np.std(of, ddof=1)) / n**0.5
        means[config] = (mean, max(0.0, mean - half), mean + half)
    return means


def _over_plain(
    layout: Layout, config: str, plains: tuple[str, ...], confidence: float
) -> dict[str, float | None]:
    estimate = over_devices(layout, [Term(1.0, config, plains)])
    if estimate is None:
        return {}
    half = estimate.half_width(confidence)
    point = estimate.point
    ends = (None, None) if half is None else (point - half, point + half)
    names = ("over_plain_us", "over_plain_lo_us", "over_plain_hi_us")
    return dict(zip(names, (point, *ends), strict=True))

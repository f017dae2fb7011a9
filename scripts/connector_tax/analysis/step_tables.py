"""Rows of effects.csv about engine steps, hooks and an emulated device's steps; step_cdf.csv.

Source: docs/method.md, "Steps" and "Device time". For each kind of step a launch's value is the
mean over its steps, so that hooks and remainder add up to the step. The design's step taxes use
medians over all steps. Differences use their own blocks for the error; hooks, which plain does not
have, are means over the configuration's own launches.

For an emulated device the rows give the host's work that the device waits for, by kind and size of
the batch: `exposed_us` as a mean, since it is zero in most steps, other columns as medians.
Intervals come from the configuration's own launches, since a connector's exposed time varies more
between launches than plain's; differences from the baseline are taken within blocks.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from connector_tax.analysis.block_model import OWN_DIFFERENCES, Launches, LaunchId
from connector_tax.analysis.effect import mean_of
from connector_tax.analysis.effects import compared
from connector_tax.analysis.records import Table
from connector_tax.analysis.steps import Hook, Steps, kinds_of, step_cdf
from connector_tax.artifacts import tables
from connector_tax.artifacts.folder import CellFolder
from connector_tax.artifacts.names import NOOP, CellKey, configuration_of
from connector_tax.artifacts.study_file import Study
from connector_tax.artifacts.tables import ALL_SIZES, KINDS, Row, StepGroup

Value = TypeVar("Value")
CALLBACKS = "callbacks"
# Step tax of the design -> the median that it compares, and why a launch lacks it.
STEP_METRICS: Mapping[str, tuple[str, str]] = {
    "step": ("step_duration_us", "no step with tokens in the measured window"),
    "engine_step": ("engine_step_us", "no engine_step_us in the records of both sides"),
    CALLBACKS: ("connector_total_us", "no step has all three callbacks"),
}
DEVICE_METRICS = ("device_us", "period_us", "exposed_us", "exposed_share", "host_busy_us")
OVER_PLAIN = "over_plain_us"
# A launch with fewer steps in a group has no value for it.
MIN_STEPS = 20
OWN_LAUNCHES = "own launches"


def by_cell(cells: Mapping[CellKey, Value]) -> dict[tuple[str, str], dict[LaunchId, Value]]:
    """Group values by (phase, cell), then by launch."""
    by_place: dict[tuple[str, str], dict[LaunchId, Value]] = {}
    for key, value in cells.items():
        by_place.setdefault((key.phase, key.cell), {})[LaunchId(key.config, key.block)] = value
    return by_place


def contrast_columns(
    launches: Launches, config: str, base: Sequence[str], confidence: float
) -> Row:
    """Return a difference in the values' unit, with its interval; empty without a shared block."""
    blocks = launches.blocks(config, base)
    if not blocks:
        return {}
    base_level, level = launches.levels(launches.weights(config, base, blocks))
    # Without the other configurations' residuals: longer steps vary more.
    each = [launches.value(launches.weights(config, base, [block])) for block in blocks]
    effect = mean_of(each, blocks, OWN_DIFFERENCES, confidence)
    return effect.columns() | {"base": base_level, "own": level}


def mean_columns(values: Sequence[float], confidence: float) -> Row:
    """Return the mean over a configuration's launches, with a t interval that is cut at 0."""
    row = mean_of(values, tuple(range(len(values))), OWN_LAUNCHES, confidence).columns()
    if "lo" in row:
        row |= {"lo": max(0.0, row["lo"]), "p": None}
    return row


# ---- engine steps and hooks


def step_rows(
    study: Study,
    planned: Sequence[CellFolder],
    cells: Mapping[CellKey, Steps],
    unavailable: str | None,
) -> list[Row]:
    """Return the step taxes of each configuration and of the baseline's last launch, by cell.

    Args:
        planned: every planned cell of the study.
        cells: the steps of the valid cells; empty without step timing.
        unavailable: why the study has no step timing; None if it has.
    """
    of_cells = by_cell(cells)
    rows = []
    for phase, cell in dict.fromkeys((cell.key.phase, cell.key.cell) for cell in planned):
        launched = of_cells.get((phase, cell), {})
        made = [
            *(
                row
                for metric in STEP_METRICS
                for row in _step_rows(study, phase, metric, launched, unavailable)
            ),
            *(row for kind in KINDS for row in _kind_rows(study, phase, kind, launched)),
        ]
        rows += [{"phase": phase, "cell": cell, "scale": tables.RAW, **row} for row in made]
    return rows


def _step_rows(
    study: Study,
    phase: str,
    metric: str,
    launched: Mapping[LaunchId, Steps],
    unavailable: str | None,
) -> Iterator[Row]:
    """Yield the rows of one step tax of the design."""
    plains, confidence = study.plains(phase), study.config["statistics"]["confidence"]
    medians = {
        launch: float(np.percentile(values, 50))
        for launch, steps in launched.items()
        if len(values := steps.known(STEP_METRICS[metric][0]))
    }
    # If the baseline has no callbacks, means over the blocks in which it has steps.
    bare = metric == CALLBACKS and study.bare_baseline
    blocks = {la.block for la, s in launched.items() if la.name in plains and len(s.kinds)}
    launches = Launches.of(medians)
    for config in compared(study, phase):
        row: Row = {"quantity": tables.STEP, "config": config, "metric": metric, "unit": "us"}
        if bare and config in plains:
            continue
        if bare:
            config_medians = [
                us for la, us in medians.items() if la.name == config and la.block in blocks
            ]
            known = mean_columns(config_medians, confidence) if config_medians else {}
        else:
            known = contrast_columns(launches, config, plains, confidence)
        if not known:
            reason = unavailable or _lost(study.baseline, config, metric, launched)
            known = {"status": "missing", "reason": reason}
        yield row | {"status": "valid"} | known


def _lost(baseline: str, config: str, metric: str, launched: Iterable[LaunchId]) -> str:
    """Return why a cell has no step tax in any block."""
    valid = {launch.name for launch in launched}
    if config not in valid:
        return f"no valid cell of {config}"
    plain = any(configuration_of(name) == baseline for name in valid)
    why = STEP_METRICS[metric][1] if plain else f"{baseline} is not valid here"
    return f"no block with {config} and {baseline}: {why}"


class _Costs(NamedTuple):
    """Mean times (us) over one launch's steps of a kind: whole step, each hook, all hooks."""

    step_us: float
    hooks: Mapping[Hook, float]
    hooks_us: float
    n: int


def _costs(steps: Steps, kind: str) -> _Costs | None:
    """Return the means over the steps of a kind; None if a launch has too few such steps."""
    whole_us = steps.samples["engine_step_us"]
    kept = (steps.kinds == kind) & ~np.isnan(whole_us)
    if kept.sum() < MIN_STEPS:
        return None
    hooks = {hook: float(us[kept].mean()) for hook, us in steps.hooks.items()}
    # The connector's own hooks include its children's time.
    parent_us = sum(us for hook, us in hooks.items() if not hook.child)
    return _Costs(float(whole_us[kept].mean()), hooks, parent_us, int(kept.sum()))


def _kind_rows(
    study: Study, phase: str, kind: str, launched: Mapping[LaunchId, Steps]
) -> Iterator[Row]:
    """Yield, for a kind of step, its time above the baseline's, its hooks' time, and the remainder.

    The remainder is the step time outside hooks above the no-op connector's, so that the
    framework's share is removed. For the no-op connector, or in a cell without it, it is above the
    baseline's.
    """
    plains, confidence = study.plains(phase), study.config["statistics"]["confidence"]
    costs = {la: cost for la, steps in launched.items() if (cost := _costs(steps, kind))}
    whole = Launches.of({launch: cost.step_us for launch, cost in costs.items()})
    outside = Launches.of({la: cost.step_us - cost.hooks_us for la, cost in costs.items()})
    hooks = Launches.of({launch: cost.hooks_us for launch, cost in costs.items()})
    valid: Row = {"item": StepGroup(kind).item, "unit": "us", "status": "valid"}
    for config in compared(study, phase):
        config_costs = {launch: cost for launch, cost in costs.items() if launch.name == config}
        row = valid | {"quantity": tables.STEP, "config": config}
        row |= {"n": sum(cost.n for cost in config_costs.values())}
        over = contrast_columns(whole, config, plains, confidence)
        if over:
            yield row | {"metric": "step_us"} | over
        if not over or config in plains:
            continue
        if study.bare_baseline:
            blocks = whole.blocks(config, plains)
            us = [cost.hooks_us for launch, cost in config_costs.items() if launch.block in blocks]
            yield row | {"metric": "hooks_us"} | mean_columns(us, confidence)
        else:
            yield row | {"metric": "hooks_us"} | contrast_columns(hooks, config, plains, confidence)
        split = NOOP not in (config, study.baseline) and NOOP in {la.name for la in costs}
        left = contrast_columns(outside, config, [NOOP] if split else plains, confidence)
        if left:
            yield row | {"metric": "left_us"} | left
    for config in dict.fromkeys(configuration_of(launch.name) for launch in costs):
        each = [cost for launch, cost in costs.items() if configuration_of(launch.name) == config]
        for hook in sorted({hook for cost in each for hook in cost.hooks}):
            row = valid | {"quantity": tables.HOOK, "config": config, "metric": "/".join(hook)}
            row |= {"n": sum(cost.n for cost in each)}
            yield row | mean_columns([cost.hooks.get(hook, 0.0) for cost in each], confidence)


def cdf_rows(cells: Mapping[CellKey, Steps], cell: str | None) -> list[Row]:
    """Return step_cdf.csv: durations of schedule() and engine step in a Phase A cell."""
    launches: dict[str, list[Steps]] = {}
    for launch, steps in by_cell(cells).get(("A", cell or ""), {}).items():
        launches.setdefault(configuration_of(launch.name), []).append(steps)
    columns = ("step_duration_us", "engine_step_us")
    return [
        {"config": config, **point}
        for config, members in launches.items()
        for point in step_cdf({name: [of.known(name) for of in members] for name in columns})
    ]


def wait_rows(study: Study, waits: Mapping[CellKey, float]) -> list[Row]:
    """Return, by cell, how many ms longer a configuration's requests wait than the baseline's."""
    confidence = study.config["statistics"]["confidence"]
    return [
        {"quantity": tables.WAIT, "config": config, "phase": phase, "cell": cell, "metric": "wait",
         "unit": "ms", "scale": tables.RAW, "status": "valid", **known}
        for (phase, cell), launched in by_cell(waits).items()
        for config in compared(study, phase)
        if (known := contrast_columns(
            Launches.of(launched), config, study.plains(phase), confidence
        ))
    ]  # fmt: skip


# ---- an emulated device's steps


def device_rows(study: Study, cells: Mapping[CellKey, Table]) -> list[Row]:
    """Return a row per group of steps, for configurations and the baseline's last launch."""
    rows: list[Row] = []
    for (phase, cell), launched in sorted(by_cell(cells).items()):
        groups: dict[StepGroup, dict[LaunchId, Row]] = {}
        for launch, steps in launched.items():
            for group, values in _groups(steps):
                groups.setdefault(group, {})[launch] = values
        here: Row = {"quantity": tables.DEVICE, "phase": phase, "cell": cell, "scale": tables.RAW}
        rows += [
            here | {"item": group.item, "status": "valid"} | row
            for group in sorted(groups, key=_order)
            for row in _device_rows(study, phase, groups[group])
        ]
    return rows


def _order(group: StepGroup) -> tuple[int, int]:
    """Return a group's sort key: its kind, then its size; the group of all sizes is first."""
    first = -1 if group.batch == ALL_SIZES else int(group.batch.partition("-")[0])
    return KINDS.index(group.kind), first


def _groups(steps: Table) -> Iterator[tuple[StepGroup, Row]]:
    """Yield, for each kind and size of step, a launch's DEVICE_METRICS and number of steps."""
    kinds = kinds_of(steps["prefill_tokens"] > 0, steps["decode_seqs"] > 0)
    sizes = np.array([_size(int(n)) for n in steps["decode_seqs"]])
    for batch in [ALL_SIZES, *sorted(set(sizes) - {""})]:
        of_batch = (sizes == batch) | (batch == ALL_SIZES)
        for kind in KINDS:
            kept = of_batch & (kinds == kind)
            if (n := int(kept.sum())) < MIN_STEPS:
                continue
            row: Row = {"n": n}
            for name in ("device_us", "period_us", "host_busy_us", "exposed_us"):
                values = steps[name][kept]
                values = values[~np.isnan(values)]
                middle = np.mean if name == "exposed_us" else np.median
                row[name] = float(middle(values)) if len(values) else None
            # `values` holds exposed_us, the last column of the loop.
            row["exposed_share"] = float(np.mean(values > 0)) if len(values) else None
            yield StepGroup(kind, batch), row


def _size(decode_seqs: int) -> str:
    """Return the size class of a batch (1, 2-3, 4-7, 8-15, ...), or "" for an empty batch."""
    if decode_seqs < 2:
        return str(decode_seqs or "")
    low = 1 << decode_seqs.bit_length() - 1
    return f"{low}-{2 * low - 1}"


def _device_rows(study: Study, phase: str, launches: Mapping[LaunchId, Row]) -> Iterator[Row]:
    confidence, plains = study.config["statistics"]["confidence"], study.plains(phase)
    exposed = {la: us for la, of in launches.items() if (us := of["exposed_us"]) is not None}
    # The baseline's launches share one row; its last launch has another, the A/A comparison.
    left_out = plains[1:-1]
    for name in study.configs(phase):
        config = configuration_of(name)
        if name in left_out or not any(launch.name == name for launch in launches):
            continue
        config_values = [
            of for launch, of in launches.items() if configuration_of(launch.name) == config
        ]
        row: Row = {"config": name, "n": sum(of["n"] for of in config_values)}
        for metric in DEVICE_METRICS:
            if values := [value for of in config_values if (value := of[metric]) is not None]:
                unit = "us" if metric.endswith("_us") else "fraction"
                yield row | {"metric": metric, "unit": unit} | mean_columns(values, confidence)
        if config != study.baseline or name in plains[1:]:
            over = contrast_columns(Launches.of(exposed), name, plains, confidence)
            if over:
                yield row | {"metric": OVER_PLAIN, "unit": "us"} | over

"""Rows of effects.csv about engine steps and hooks, and the distribution of steps at ref_safe.

Source: docs/method.md, "Steps". By kind of step a launch's value is the mean over its steps, so
that what the hooks take and what is left add up to the step. The design's step taxes are of medians
over all steps. Differences are by the block model; hooks, which plain does not have, are means over
the configuration's own launches.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from scipy.stats import t as student
from scipy.stats import ttest_1samp

from connector_tax.analysis.block_model import Launches, LaunchId
from connector_tax.analysis.hooks import Hook
from connector_tax.analysis.ingest import Cell
from connector_tax.analysis.steps import Steps, step_cdf
from connector_tax.analysis.taxes import compared
from connector_tax.artifacts import tables
from connector_tax.artifacts.names import NOOP, CellKey, configuration_of
from connector_tax.artifacts.study_file import Study
from connector_tax.artifacts.tables import KINDS, Row, StepGroup

Value = TypeVar("Value")
CALLBACKS = "callbacks"
# The design's step taxes: the medians they compare, and why a launch has none.
STEP_METRICS: Mapping[str, tuple[str, str]] = {
    "step": ("duration_us", "no step with tokens in the measured window"),
    "engine_step": ("known_engine_us", "no engine_step_us in the records of both sides"),
    CALLBACKS: ("total_us", "no step has all three callbacks"),
}
# A launch with fewer steps of a group has no value of them.
MIN_STEPS = 20
OWN_LAUNCHES, OWN_BLOCKS = "own launches", "own differences in blocks"


class _Costs(NamedTuple):
    """Means over one launch's steps of a kind, in us: the whole step, each hook, all hooks."""

    step_us: float
    hooks: Mapping[Hook, float]
    hooks_us: float
    n: int


def step_rows(
    study: Study,
    planned: Sequence[Cell],
    cells: Mapping[CellKey, Steps],
    unavailable: str | None,
) -> list[Row]:
    """The step taxes of each configuration but the baseline and of its last launch, by cell.

    Args:
        study: the study.
        planned: every planned cell of it.
        cells: the steps of its valid cells; empty where the study has no step timing.
        unavailable: why the study has no step timing; None when it has.
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


def by_cell(cells: Mapping[CellKey, Value]) -> dict[tuple[str, str], dict[LaunchId, Value]]:
    """(phase, cell) to what its launches have."""
    found: dict[tuple[str, str], dict[LaunchId, Value]] = {}
    for key, value in cells.items():
        found.setdefault((key.phase, key.cell), {})[LaunchId(key.config, key.block)] = value
    return found


def _step_rows(
    study: Study,
    phase: str,
    metric: str,
    launched: Mapping[LaunchId, Steps],
    unavailable: str | None,
) -> Iterator[Row]:
    """One of the design's step taxes."""
    plains, confidence = study.plains(phase), study.config["statistics"]["confidence"]
    medians = {
        launch: float(np.percentile(values, 50))
        for launch, steps in launched.items()
        if len(values := getattr(steps, STEP_METRICS[metric][0]))
    }
    # Where the baseline has no callbacks, means in the blocks in which it has steps.
    bare = metric == CALLBACKS and study.bare_baseline
    blocks = {la.block for la, s in launched.items() if la.name in plains and len(s.duration_us)}
    launches = Launches.of(medians)
    for config in compared(study, phase):
        row: Row = {"quantity": tables.STEP, "config": config, "metric": metric, "unit": "us"}
        if bare and config in plains:
            continue
        if bare:
            own = [us for la, us in medians.items() if la.name == config and la.block in blocks]
            known = mean_columns(own, confidence) if own else {}
        else:
            known = contrast_columns(launches, config, plains, confidence)
        if not known:
            reason = unavailable or _lost(study.baseline, config, metric, launched)
            known = {"status": "missing", "reason": reason}
        yield row | {"status": "valid"} | known


def _lost(baseline: str, config: str, metric: str, launched: Iterable[LaunchId]) -> str:
    """Why there is no step tax in any block of a cell."""
    valid = {launch.name for launch in launched}
    if config not in valid:
        return f"no valid cell of {config}"
    plain = any(configuration_of(name) == baseline for name in valid)
    why = STEP_METRICS[metric][1] if plain else f"{baseline} is not valid here"
    return f"no block with {config} and {baseline}: {why}"


def _kind_rows(
    study: Study, phase: str, kind: str, launched: Mapping[LaunchId, Steps]
) -> Iterator[Row]:
    """What steps of a kind take over the baseline's, what their hooks take, and what is left.

    Left is what a step takes outside its hooks over the no-op connector's, the framework's share
    being taken off so; of the no-op connector, and in a cell without it, over the baseline's.
    """
    plains, confidence = study.plains(phase), study.config["statistics"]["confidence"]
    costs = {la: cost for la, steps in launched.items() if (cost := _costs(steps, kind))}
    whole = Launches.of({launch: cost.step_us for launch, cost in costs.items()})
    outside = Launches.of({la: cost.step_us - cost.hooks_us for la, cost in costs.items()})
    hooks = Launches.of({launch: cost.hooks_us for launch, cost in costs.items()})
    valid: Row = {"item": StepGroup(kind).item, "unit": "us", "status": "valid"}
    for config in compared(study, phase):
        own = {launch: cost for launch, cost in costs.items() if launch.name == config}
        row = valid | {"quantity": tables.STEP, "config": config}
        row |= {"n": sum(cost.n for cost in own.values())}
        over = contrast_columns(whole, config, plains, confidence)
        if over:
            yield row | {"metric": "step_us"} | over
        if not over or config in plains:
            continue
        if study.bare_baseline:
            blocks = whole.blocks(config, plains)
            us = [cost.hooks_us for launch, cost in own.items() if launch.block in blocks]
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


def _costs(steps: Steps, kind: str) -> _Costs | None:
    """Means over the steps of a kind; None where a launch has too few."""
    kept = (steps.kind == kind) & ~np.isnan(steps.engine_us)
    if kept.sum() < MIN_STEPS:
        return None
    hooks = {hook: float(us[kept].mean()) for hook, us in steps.hooks.items()}
    # The connector's own hooks hold its children's time.
    own = sum(us for hook, us in hooks.items() if not hook.child)
    return _Costs(float(steps.engine_us[kept].mean()), hooks, own, int(kept.sum()))


def cdf_rows(cells: Mapping[CellKey, Steps], cell: str | None) -> list[Row]:
    """step_cdf.csv: schedule() and the engine step in a Phase A cell, by configuration."""
    launches: dict[str, list[Steps]] = {}
    for launch, steps in by_cell(cells).get(("A", cell or ""), {}).items():
        launches.setdefault(configuration_of(launch.name), []).append(steps)
    return [
        {"config": config, **point}
        for config, members in launches.items()
        for point in step_cdf(
            {
                "step_duration_us": [steps.duration_us for steps in members],
                "engine_step_us": [steps.known_engine_us for steps in members],
            }
        )
    ]


def contrast_columns(
    launches: Launches, config: str, base: Sequence[str], confidence: float
) -> Row:
    """A difference in the values' own unit, with its interval; empty without a shared block."""
    blocks = launches.blocks(config, base)
    if not blocks:
        return {}
    weights = launches.weights(config, base, blocks)
    own, less = (float(np.clip(side * weights, 0, None) @ launches.y) for side in (1, -1))
    row: Row = {"estimate": launches.value(weights), "n_blocks": len(blocks)}
    row |= {"base": less, "own": own}
    # Not the residual of all configurations: what a step takes varies more where it takes more.
    each = [launches.value(launches.weights(config, base, [block])) for block in blocks]
    if len(each) < 2:
        return row
    point, spread, df = float(np.mean(each)), float(np.std(each, ddof=1)), len(each) - 1
    half = float(student.ppf((1 + confidence) / 2, df)) * spread / len(each) ** 0.5
    p = float(ttest_1samp(each, 0).pvalue) if spread else float(point == 0)
    row |= {"lo": point - half, "hi": point + half, "p": p}
    return row | {"df": df, "method": OWN_BLOCKS}


def mean_columns(values: Sequence[float], confidence: float) -> Row:
    """A mean over a configuration's own launches; its interval by Student's t, not below 0."""
    mean, n = float(np.mean(values)), len(values)
    row: Row = {"estimate": mean, "n_blocks": n}
    if n < 2:
        return row
    half = float(student.ppf((1 + confidence) / 2, n - 1) * np.std(values, ddof=1) / n**0.5)
    row |= {"lo": max(0.0, mean - half), "hi": mean + half}
    return row | {"df": n - 1, "method": OWN_LAUNCHES}

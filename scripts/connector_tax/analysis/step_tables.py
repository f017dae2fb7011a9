"""Rows of effects.csv about engine steps and hooks, and the distribution of steps at ref_safe.

Source: docs/method.md, "Steps". A step tax is a difference of medians in us, by the block model;
the callbacks and hooks, which plain does not have, are means over the configuration's own launches.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from connector_tax.analysis.block_model import Launches, LaunchId, known_launches, levels
from connector_tax.analysis.hooks import Hook
from connector_tax.analysis.ingest import Cell
from connector_tax.analysis.steps import Steps, step_cdf
from connector_tax.artifacts import tables
from connector_tax.artifacts.names import CellKey, configuration_of
from connector_tax.artifacts.study_file import Study
from connector_tax.artifacts.tables import Row

CALLBACKS = "callbacks"
# The step taxes: the medians they compare, and why a launch has none.
STEP_METRICS: Mapping[str, tuple[str, str]] = {
    "step": ("duration_us", "no step with tokens in the measured window"),
    "engine_step": ("engine_us", "no engine_step_us in the records of both sides"),
    CALLBACKS: ("total_us", "no step has all three callbacks"),
}
HOOK_UNITS = {"p50": "us", "mean": "us", "share": "fraction", "empty": "us"}


@dataclass(frozen=True)
class StepTable:
    """The steps of every valid cell, and the rows made of them.

    Attributes:
        study: the study.
        planned: every planned cell of it.
        cells: the steps of its valid cells; empty where the study has no step timing.
        unavailable: why the study has no step timing; None when it has.
    """

    study: Study
    planned: Sequence[Cell]
    cells: Mapping[CellKey, Steps]
    unavailable: str | None

    def rows(self) -> list[Row]:
        """The step taxes of each configuration but the baseline and of its last launch, by cell."""
        where = dict.fromkeys((cell.key.phase, cell.key.cell) for cell in self.planned)
        return [row for at in where for metric in STEP_METRICS for row in self._rows(at, metric)]

    def cdf_rows(self, cell: str | None) -> list[Row]:
        """step_cdf.csv: schedule() and the engine step in a Phase A cell, by configuration."""
        launches: dict[str, list[Steps]] = {}
        for key, steps in self.cells.items():
            if (key.phase, key.cell) == ("A", cell):
                launches.setdefault(configuration_of(key.config), []).append(steps)
        return [
            {"config": config, **point}
            for config, members in launches.items()
            for point in step_cdf(
                {
                    "step_duration_us": [steps.duration_us for steps in members],
                    "engine_step_us": [steps.engine_us for steps in members],
                }
            )
        ]

    def _rows(self, where: tuple[str, str], metric: str) -> Iterator[Row]:
        study, (phase, cell) = self.study, where
        plains, bare = study.plains(phase), study.bare_baseline and metric == CALLBACKS
        launches = Launches.of(self._medians(where, metric))
        confidence = study.config["statistics"]["confidence"]
        based = launches.only(np.isin(launches.block, launches.block[self._is_plain(launches)]))
        own = dict(zip(based.ids, based.y.tolist(), strict=True))
        means = levels(
            {launch: y for launch, y in own.items() if launch.name not in plains}, confidence
        ) if bare else {}  # fmt: skip
        compared = [c for c in study.configs(phase) if c not in (plains[:-1] or plains)]
        for config in compared:
            row = {"quantity": tables.STEP, "config": config, "phase": phase, "cell": cell}
            row |= {"metric": metric, "unit": "us", "scale": tables.RAW}
            if bare and config in plains:
                continue
            if config in means:
                numbers: Row = dict(zip(("estimate", "lo", "hi", "method", "n_blocks"),
                                        means[config], strict=True))  # fmt: skip
            else:
                numbers = {} if bare else contrast_columns(launches, config, plains, confidence)
            status = {"status": "valid"} if numbers else {
                "status": "missing", "reason": self._lost(config, where, metric)
            }  # fmt: skip
            yield row | numbers | status

    def _medians(self, where: tuple[str, str], metric: str) -> dict[LaunchId, float]:
        """The median of each launch; 0 for the callbacks of a baseline without a connector."""
        bare = self.study.bare_baseline and metric == CALLBACKS
        medians: dict[LaunchId, float] = {}
        for key, steps in self.cells.items():
            if (key.phase, key.cell) != where:
                continue
            plain = configuration_of(key.config) == self.study.baseline
            values = getattr(steps, STEP_METRICS[metric][0])
            if bare and plain:
                values = np.zeros(len(steps.duration_us))
            if len(values):
                medians[LaunchId(key.config, key.block)] = float(np.percentile(values, 50))
        return medians

    def _is_plain(self, launches: Launches) -> Any:
        return launches.config == self.study.baseline

    def _lost(self, config: str, where: tuple[str, str], metric: str) -> str:
        """Why there is no step tax in any block."""
        if self.unavailable is not None:
            return self.unavailable
        valid = {key.config for key in self.cells if (key.phase, key.cell) == where}
        if config not in valid:
            return f"no valid cell of {config}"
        baseline = self.study.baseline
        plain = any(configuration_of(name) == baseline for name in valid)
        why = STEP_METRICS[metric][1] if plain else f"{baseline} is not valid here"
        return f"no block with {config} and {baseline}: {why}"


def contrast_columns(
    launches: Launches, config: str, base: Sequence[str], confidence: float
) -> Row:
    """A difference in the values' own unit, with its interval; empty without a shared block."""
    estimate = launches.contrast(config, base)
    if estimate is None:
        return {}
    row: Row = {"estimate": estimate.point, "n_blocks": len(estimate.blocks)}
    half = estimate.half_width(confidence)
    # Two launches of plain in a single block are no repetition of the block.
    if half is None or len(set(launches.block.tolist())) < 2:
        return row
    row |= {"lo": estimate.point - half, "hi": estimate.point + half, "p": estimate.p}
    return row | {"df": estimate.df, "method": estimate.method}


def hook_rows(cells: Mapping[CellKey, Steps], confidence: float) -> list[Row]:
    """What every hook costs that ran in one of a configuration's launches; plain has none.

    In steps with tokens: the median of those in which it ran (p50), us per step, 0 where it did not
    run (mean), the share of the whole engine steps' time (share); and its time in empty polling
    steps, in us per step with tokens (empty). A hook that does not run in one of the launches
    counts as zero in it.

    Args:
        cells: the steps of every valid cell, in the study's order.
        confidence: of the intervals.
    """
    rows: list[Row] = []
    by_cell: dict[tuple[str, str], dict[LaunchId, Steps]] = {}
    for key, steps in cells.items():
        by_cell.setdefault((key.phase, key.cell), {})[LaunchId(key.config, key.block)] = steps
    for (phase, cell), launches in by_cell.items():
        ran: dict[str, set[Hook]] = {}
        for launch, steps in launches.items():
            ran.setdefault(configuration_of(launch.name), set()).update(steps.hooks)
        for hook in sorted(set[Hook]().union(*ran.values())):
            costs = {
                launch: _cost(steps, hook)
                for launch, steps in launches.items()
                if hook in ran[configuration_of(launch.name)] and len(steps.duration_us)
            }
            here = {"quantity": tables.HOOK, "phase": phase, "cell": cell, "item": "/".join(hook)}
            rows += [here | row for row in _hook_rows(costs, confidence)]
    return rows


def _hook_rows(costs: Mapping[LaunchId, Mapping[str, Any]], confidence: float) -> Iterator[Row]:
    """How much launches differ is pooled over the configurations that have the hook."""
    for metric, unit in HOOK_UNITS.items():
        known = known_launches((launch, cost[metric]) for launch, cost in costs.items())
        for config, level in levels(known, confidence).items():
            own = [c for launch, c in costs.items() if configuration_of(launch.name) == config]
            counted = sum(cost["n_ran" if metric == "p50" else "n_steps"] for cost in own)
            row: Row = {"config": config, "metric": metric, "unit": unit, "scale": tables.RAW}
            row |= {"estimate": level.point, "n_blocks": level.n_launches, "n": counted}
            if metric != "empty":
                row |= {"lo": level.lo, "hi": level.hi, "method": level.method}
            yield row | {"status": "valid"}


def _cost(steps: Steps, hook: Hook) -> dict[str, Any]:
    """One hook in the steps with tokens of one launch, by metric, and how many steps."""
    n_steps, times = len(steps.duration_us), steps.hooks.get(hook)
    ran_us = np.zeros(0) if times is None else times.ran_us
    mean = float(ran_us.sum()) / n_steps
    return {
        "p50": float(np.median(ran_us)) if len(ran_us) else None,
        "mean": mean,
        "share": mean / float(steps.engine_us.mean()) if len(steps.engine_us) else None,
        "empty": 0.0 if times is None else times.empty_us / n_steps,
        "n_steps": n_steps,
        "n_ran": len(ran_us),
    }

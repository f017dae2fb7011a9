"""The table of hooks: what each timed hook of a connector costs in a step.

Source: docs/method.md, "Steps". One row for each configuration, cell and hook; plain has no hooks.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from connector_tax.analysis.block_model import LaunchId
from connector_tax.analysis.hooks import Hook
from connector_tax.analysis.levels import Level, levels
from connector_tax.analysis.steps import Steps
from connector_tax.artifacts import paths
from connector_tax.artifacts.names import CellKey
from connector_tax.artifacts.tables import Row, empty_row

# Columns of a number: itself, the ends of its interval, how that was made.
NUMBERS = {
    "p50": ("p50_us", "p50_lo_us", "p50_hi_us", "p50_method"),
    "mean": ("mean_us", "mean_lo_us", "mean_hi_us", "mean_method"),
    "share": ("share", "share_lo", "share_hi", "share_method"),
}

Where = tuple[str, str]  # phase, cell


@dataclass(frozen=True)
class _Cost:
    """One hook in the steps with tokens of one launch.

    Attributes:
        p50: median in us over the steps in which it ran; None where it ran in none.
        mean: us per step, 0 in a step in which it did not run.
        share: of the whole engine steps' time; None where the records have no whole steps.
        empty_us: time in empty polling steps, in us per step with tokens.
    """

    p50: float | None
    mean: float
    share: float | None
    empty_us: float
    n_steps: int
    n_ran: int


def hook_rows(
    cells: Mapping[CellKey, Steps], configuration_of: Mapping[str, str], confidence: float
) -> list[Row]:
    """hooks.csv: every configuration, cell and hook that ran in one of its launches.

    Args:
        cells: the steps of every valid cell, in the study's order.
        configuration_of: the configuration each launch name is started with.
        confidence: of the intervals.
    """
    costs: dict[tuple[Where, Hook], dict[LaunchId, _Cost]] = {}
    for key, hook in _hooks_of_configurations(cells, configuration_of):
        cost = _cost(cells[key], hook)
        if cost is not None:
            launch = LaunchId(key.config, key.block)
            costs.setdefault(((key.phase, key.cell), hook), {})[launch] = cost
    rows = [
        row
        for (where, hook), launches in costs.items()
        for row in _rows(where, hook, launches, configuration_of, confidence)
    ]
    order = {name: i for i, name in enumerate(dict.fromkeys(configuration_of.values()))}
    cell_order = {
        where: i for i, where in enumerate(dict.fromkeys((k.phase, k.cell) for k in cells))
    }
    rows.sort(key=lambda row: (cell_order[row["phase"], row["cell"]], order[row["config"]]))
    return rows or [empty_row(paths.HOOKS)]


def _hooks_of_configurations(
    cells: Mapping[CellKey, Steps], configuration_of: Mapping[str, str]
) -> list[tuple[CellKey, Hook]]:
    """Each cell with every hook that any launch of its configuration ran there.

    A hook that does not run in one of the launches counts as zero in it.
    """
    ran: dict[tuple[str, Where], set[Hook]] = {}
    for key, steps in cells.items():
        ran.setdefault((configuration_of[key.config], key[2:]), set()).update(steps.hooks)
    return [
        (key, hook) for key in cells for hook in sorted(ran[configuration_of[key.config], key[2:]])
    ]


def _cost(steps: Steps, hook: Hook) -> _Cost | None:
    """None in a cell without a step that scheduled tokens."""
    n_steps = len(steps.duration_us)
    if n_steps == 0:
        return None
    times = steps.hooks.get(hook)
    ran_us = np.zeros(0) if times is None else times.ran_us
    mean = float(ran_us.sum()) / n_steps
    return _Cost(
        p50=float(np.median(ran_us)) if len(ran_us) else None,
        mean=mean,
        share=mean / float(steps.engine_us.mean()) if len(steps.engine_us) else None,
        empty_us=0.0 if times is None else times.empty_us / n_steps,
        n_steps=n_steps,
        n_ran=len(ran_us),
    )


def _rows(
    where: Where,
    hook: Hook,
    launches: Mapping[LaunchId, _Cost],
    configuration_of: Mapping[str, str],
    confidence: float,
) -> list[Row]:
    by_number: dict[str, dict[str, Level]] = {}
    for number in NUMBERS:
        values = {
            launch: value
            for launch, cost in launches.items()
            if (value := getattr(cost, number)) is not None
        }
        by_number[number] = levels(values, configuration_of, confidence)
    rows = []
    for config in by_number["mean"]:
        row: Row = empty_row(paths.HOOKS)
        row |= {"config": config, "phase": where[0], "cell": where[1]}
        row |= {"process": hook.process, "child": hook.child, "hook": hook.name}
        for number, columns in NUMBERS.items():
            level = by_number[number].get(config)
            if level is not None:
                row |= dict(zip(columns, level[:4], strict=True))
        own = [cost for launch, cost in launches.items() if configuration_of[launch.name] == config]
        row |= {
            "empty_us": float(np.mean([cost.empty_us for cost in own])),
            "n_steps": sum(cost.n_steps for cost in own),
            "n_ran": sum(cost.n_ran for cost in own),
            "n_launches": len(own),
        }
        rows.append(row)
    return rows

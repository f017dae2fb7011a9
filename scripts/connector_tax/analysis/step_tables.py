"""The tables of engine steps: each launch, step taxes, and the distribution at ref_safe.

Source: docs/method.md, "Steps". A step tax is a difference of medians in us, by the block model;
the callbacks, which plain does not have, are a mean over the configuration's own launches.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from connector_tax.analysis.block_model import LaunchId, Layout, Term
from connector_tax.analysis.device_model import over_devices
from connector_tax.analysis.devices import block_devices
from connector_tax.analysis.ingest import Cell
from connector_tax.analysis.levels import levels
from connector_tax.analysis.steps import (
    Steps,
    launch_values,
    step_cdf,
    step_columns,
)
from connector_tax.artifacts import paths
from connector_tax.artifacts.names import CellKey
from connector_tax.artifacts.study_file import Study
from connector_tax.artifacts.tables import STEP_TAXES, Row, empty_row

CALLBACK_TAX = "tax_callback_p50"
NO_VALUE = {
    "tax_step_p50": "no step with tokens in the measured window",
    "tax_engine_step_p50": "no engine_step_us in the records of both sides",
    CALLBACK_TAX: "no step has all three callbacks",
    "unattributed": "no step has all three callbacks",
}

Where = tuple[str, str]  # phase, cell


class StepTax(NamedTuple):
    """One step tax in us; the bounds, p and the method are None where nothing repeats."""

    us: float
    lo_us: float | None
    hi_us: float | None
    p: float | None
    n_blocks: int
    method: str | None


class StepTable:
    """The steps of every valid cell, and the tables made of them.

    Args:
        study: the study.
        planned: every planned cell of it.
        cells: the steps of its valid cells; empty where the study has no step timing.
        unavailable: why the study has no step timing; None when it has.
    """

    def __init__(
        self,
        study: Study,
        planned: Sequence[Cell],
        cells: Mapping[CellKey, Steps],
        unavailable: str | None,
    ) -> None:
        self.study = study
        self.cells = cells
        self.unavailable = unavailable
        self.confidence = study.config["statistics"]["confidence"]
        self._planned = planned
        self._device_of = block_devices(planned)
        self.configuration_of = {cell.key.config: cell.configuration for cell in planned}
        self._values: dict[tuple[Where, str], dict[LaunchId, float]] = {}
        for key, steps in cells.items():
            bare = study.bare_baseline and self._is_plain(key.config)
            for metric, value in launch_values(steps, bare).items():
                values = self._values.setdefault(((key.phase, key.cell), metric), {})
                if value is not None:
                    values[LaunchId(key.config, key.block)] = value

    @cached_property
    def taxes(self) -> dict[tuple[str, str, str, str], StepTax]:
        """(config, phase, cell, metric) to the step tax, where it has a number.

        A launch of the baseline is compared with the block's other launches of it.
        """
        taxes: dict[tuple[str, str, str, str], StepTax] = {}
        for (where, metric), values in self._values.items():
            layout = Layout(values, self.configuration_of, self._device_of)
            for config in {launch.name for launch in values}:
                tax = self._tax(layout, values, config)
                if tax is not None:
                    taxes[config, *where, metric] = tax
            if metric == CALLBACK_TAX and self.study.bare_baseline:
                taxes |= {
                    (config, *where, metric): tax
                    for config, tax in self._callback_taxes(values).items()
                    if (config, *where, metric) in taxes
                }
        return taxes

    def points(self) -> dict[tuple[str, str, str], dict[str, float]]:
        """(config, phase, cell) to its step taxes in us, by metric."""
        points: dict[tuple[str, str, str], dict[str, float]] = {}
        for (config, phase, cell, metric), tax in self.taxes.items():
            points.setdefault((config, phase, cell), {})[metric] = tax.us
        return points

    def tax_rows(self) -> list[Row]:
        """step_taxes.csv: a row for each configuration but the baseline, cell and step tax."""
        keys = {(c.key.config, c.key.phase, c.key.cell): c for c in self._planned}
        return [
            self._tax_row(*where, metric)
            for where, cell in keys.items()
            if cell.configuration != self.study.baseline
            for metric in STEP_TAXES
        ]

    def rows(self) -> list[Row]:
        """steps.csv: a row for each planned cell, in us."""
        return [self._row(cell) for cell in self._planned]

    def cdf_rows(self, cell: str | None) -> list[Row]:
        """step_cdf.csv: schedule() and the engine step in a Phase A cell, by configuration."""
        launches: dict[str, list[Steps]] = {}
        for key, steps in self.cells.items():
            if (key.phase, key.cell) == ("A", cell):
                launches.setdefault(self.configuration_of[key.config], []).append(steps)
        rows = [
            {"config": config, **point}
            for config, members in launches.items()
            for point in step_cdf(
                {
                    "step_duration_us": [steps.duration_us for steps in members],
                    "engine_step_us": [steps.engine_us for steps in members],
                }
            )
        ]
        return rows or [empty_row(paths.STEP_CDF)]

    def _is_plain(self, config: str) -> bool:
        return self.configuration_of[config] == self.study.baseline

    def _base(self, config: str) -> tuple[str, ...]:
        """The launches of the baseline that a launch is compared with in its block: not itself."""
        return tuple(
            name for name in self.configuration_of if self._is_plain(name) and name != config
        )

    def _tax(self, layout: Layout, values: Mapping[LaunchId, float], config: str) -> StepTax | None:
        estimate = over_devices(layout, [Term(1.0, config, self._base(config))])
        if estimate is None:
            return None
        half = estimate.half_width(self.confidence)
        # Two launches of plain in a single block are no repetition of the block.
        if half is None or len({launch.block for launch in values}) < 2:
            return StepTax(estimate.point, None, None, None, len(estimate.blocks), None)
        lo, hi = estimate.point - half, estimate.point + half
        return StepTax(estimate.point, lo, hi, estimate.p, len(estimate.blocks), estimate.source)

    def _callback_taxes(self, values: Mapping[LaunchId, float]) -> dict[str, StepTax]:
        """By configuration: the mean over its launches in the blocks that have a baseline."""
        blocks = {launch.block for launch in values if self._is_plain(launch.name)}
        own = {
            launch: value
            for launch, value in values.items()
            if launch.block in blocks and not self._is_plain(launch.name)
        }
        means = levels(own, self.configuration_of, self.confidence)
        return {
            config: StepTax(mean.point, mean.lo, mean.hi, None, mean.n_launches, mean.method)
            for config, mean in means.items()
        } | {
            name: StepTax(0.0, None, None, None, len(blocks), None)
            for name in self.configuration_of
            if self._is_plain(name)
        }

    def _tax_row(self, config: str, phase: str, cell: str, metric: str) -> Row:
        tax = self.taxes.get((config, phase, cell, metric))
        numbers = dict.fromkeys(StepTax._fields) if tax is None else tax._asdict()
        plains = [name for name in self.configuration_of if self._is_plain(name)]
        noise = None
        if metric != CALLBACK_TAX or not self.study.bare_baseline:
            noise = self.taxes.get((plains[-1], phase, cell, metric))
        row: Row = {"config": config, "phase": phase, "cell": cell, "metric": metric, **numbers}
        for name in ("us", "lo_us", "hi_us"):
            row[f"aa_{name}"] = getattr(noise, name, None)
        row["reason"] = self._lost(config, phase, cell, metric) if tax is None else None
        return row

    def _lost(self, config: str, phase: str, cell: str, metric: str) -> str:
        """Why there is no step tax in any block."""
        if self.unavailable is not None:
            return self.unavailable
        valid = {key.config for key in self.cells if (key.phase, key.cell) == (phase, cell)}
        if config not in valid:
            return f"no valid cell of {config}"
        baseline = self.study.baseline
        both = f"no block with {config} and {baseline}"
        plain = any(self._is_plain(name) for name in valid)
        return f"{both}: {NO_VALUE[metric] if plain else f'{baseline} is not valid here'}"

    def _row(self, cell: Cell) -> Row:
        row = empty_row(paths.STEPS) | cell.key._asdict()
        row |= {"configuration": cell.configuration, "status": cell.status, "reason": cell.reason}
        steps = self.cells.get(cell.key)
        if steps is None:
            return row | {"reason": cell.reason or self.unavailable}
        row |= {**step_columns(steps), **self._launch_taxes(cell.key)}
        row["reason"] = self._row_reason(cell.key, row)
        return row

    def _launch_taxes(self, key: CellKey) -> dict[str, float | None]:
        """Over the mean of the block's baseline launches; theirs over the other ones."""
        taxes: dict[str, float | None] = {}
        for metric in STEP_TAXES:
            values = self._values[(key.phase, key.cell), metric]
            ours = values.get(LaunchId(key.config, key.block))
            launches = [LaunchId(name, key.block) for name in self._base(key.config)]
            base = [values[launch] for launch in launches if launch in values]
            taxes[metric] = None if ours is None or not base else ours - float(np.mean(base))
        return taxes

    def _row_reason(self, key: CellKey, row: Row) -> str | None:
        if row["n_steps"] == 0:
            return NO_VALUE["tax_step_p50"]
        if not any(key._replace(config=name) in self.cells for name in self._base(key.config)):
            name = self.study.baseline
            other = (
                f"no other launch of {name} is" if self._is_plain(key.config) else f"{name} is not"
            )
            return f"{other} valid here"
        missing = ("tax_callback_p50", "tax_engine_step_p50")
        return "; ".join(NO_VALUE[name] for name in missing if row[name] is None) or None

"""Step taxes and hooks a second time, from the raw step records.

Written from docs/method.md, "Steps". Nothing is shared with connector_tax.analysis. Source of the
effective degrees of freedom: Satterthwaite, Biometrics Bulletin 2 (1946) 110.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache, cached_property

import numpy as np

from connector_tax.artifacts.names import configuration_of, launched_plains
from connector_tax.artifacts.tables import STEP_TAXES
from connector_tax.provenance.audit_study import RawStudy
from connector_tax.provenance.cell_steps import CellSteps, Hook
from connector_tax.provenance.device_spread import difference
from connector_tax.provenance.distributions import t_quantile
from connector_tax.provenance.layout import (
    OWN_P,
    UNEQUAL_P,
    IntervalEstimate,
    Values,
    layout_of,
    plain_values,
)
from connector_tax.provenance.recompute import Row

CURVE_POINTS = 400

Key = tuple[str, int, str, str]  # launch, block, phase, cell
Where = tuple[str, str]  # phase, cell


class StepNumbers:
    """Every published number of steps that compares launches.

    Args:
        study: the raw study.
        cells: the steps of its valid cells.
    """

    def __init__(self, study: RawStudy, cells: Mapping[Key, CellSteps]) -> None:
        self.study, self.cells = study, cells
        self.confidence = float(study.config["statistics"]["confidence"])
        self.baseline = study.baseline
        self.launches = list(dict.fromkeys(launch.config for launch in study.launches))

    @cached_property
    def values(self) -> Mapping[tuple[Where, str], Values]:
        """((phase, cell), metric) to the value of each launch."""
        values: dict[tuple[Where, str], dict[tuple[str, int], float]] = {}
        for (launch, block, *where), cell in self.cells.items():
            bare = self.study.bare_baseline and configuration_of(launch) == self.baseline
            for metric, value in cell.values(bare).items():
                key = ((where[0], where[1]), metric)
                values.setdefault(key, {})[launch, block] = value
        return values

    @cache  # noqa: B019 - one object for each audit
    def tax(self, config: str, where: Where, metric: str) -> IntervalEstimate | None:
        """A step tax in us over plain's launches; None without a block that has both."""
        values = self.values.get((where, metric), {})
        at_zero = metric == "tax_callback_p50" and self.study.bare_baseline
        if at_zero and plain_values(values, config, self.baseline):
            return self._callbacks(config, values)
        return difference(values, config, self.confidence, self.baseline, self.study.devices)

    def _callbacks(self, config: str, values: Values) -> IntervalEstimate:
        plain = {block for launch, block in values if configuration_of(launch) == self.baseline}
        if configuration_of(config) == self.baseline:
            return IntervalEstimate(0.0, None, None, None, None, len(plain))
        own = {
            (launch, block): value
            for (launch, block), value in values.items()
            if block in plain and configuration_of(launch) != self.baseline
        }
        return level(own, config, self.confidence)

    def launch_taxes(self, key: Key) -> Row:
        """steps.csv: the difference of one launch from its block's other launches of plain."""
        launch, block, phase, cell = key
        taxes: Row = {}
        for metric in STEP_TAXES:
            values = self.values.get(((phase, cell), metric), {})
            plain = plain_values(values, launch, self.baseline).get(block)
            taxes[metric] = values[launch, block] - float(np.mean(plain)) if plain else None
        return taxes

    def tax_rows(self) -> list[Row]:
        """step_taxes.csv: every configuration but the baseline, planned cell and metric."""
        rows: list[Row] = []
        configs = dict.fromkeys((one.config, one.phase) for one in self.study.launches)
        for config, phase in configs:
            for planned in self.study.document["cells"][phase]:
                where = (phase, str(planned["cell"]))
                if configuration_of(config) != self.baseline:
                    rows += [self._tax_row(config, where, metric) for metric in STEP_TAXES]
        return rows

    def _tax_row(self, config: str, where: Where, metric: str) -> Row:
        row: Row = {"config": config, "phase": where[0], "cell": where[1], "metric": metric}
        tax = self.tax(config, where, metric)
        if tax is not None:
            row |= {"us": tax.point, "lo_us": tax.low, "hi_us": tax.high, "p": tax.p}
            row |= {"n_blocks": tax.launches, "method": tax.method}
        noise = None
        if metric != "tax_callback_p50" or not self.study.bare_baseline:
            noise = self.tax(launched_plains(self.launches, self.baseline)[-1], where, metric)
        if noise is not None:
            row |= {"aa_us": noise.point, "aa_lo_us": noise.low, "aa_hi_us": noise.high}
        return row

    def hook_rows(self) -> list[Row]:
        """hooks.csv: every configuration, cell and hook that ran in a launch of it."""
        hooks: dict[tuple[Where, str], set[Hook]] = {}
        for (launch, _, phase, cell), steps in self.cells.items():
            hooks.setdefault(((phase, cell), configuration_of(launch)), set()).update(steps.ran)
        rows: list[Row] = []
        for where in dict.fromkeys(where for where, _ in hooks):
            mine = {config: ran for (at, config), ran in hooks.items() if at == where}
            for hook in sorted(set().union(*mine.values())):
                having = [config for config, ran in mine.items() if hook in ran]
                rows += self._hook_rows(where, hook, having)
        return rows

    def _hook_rows(self, where: Where, hook: Hook, configs: Sequence[str]) -> list[Row]:
        costs = {
            (key[0], key[1]): steps.cost(hook) | {"n_steps": steps.n}
            for key, steps in self.cells.items()
            if key[2:] == where and configuration_of(key[0]) in configs and steps.n
        }
        rows: list[Row] = []
        for config in configs:
            own = [
                cost for (launch, _), cost in costs.items() if configuration_of(launch) == config
            ]
            if not own:
                continue
            row: Row = {"config": config, "phase": where[0], "cell": where[1]}
            row |= dict(zip(("process", "child", "hook"), hook, strict=True))
            for name, unit in (("p50", "_us"), ("mean", "_us"), ("share", "")):
                known = {at: c[name] for at, c in costs.items() if c[name] is not None}
                if any(configuration_of(launch) == config for launch, _ in known):
                    mean = level(known, config, self.confidence)
                    row |= {f"{name}{unit}": mean.point, f"{name}_method": mean.method}
                    row |= {f"{name}_lo{unit}": mean.low, f"{name}_hi{unit}": mean.high}
            row["empty_us"] = float(np.mean([cost["empty"] for cost in own]))
            row |= {n: sum(cost[n] for cost in own) for n in ("n_steps", "n_ran")}
            rows.append(row | {"n_launches": len(own)})
        return rows

    def curve_rows(self, cell: str | None) -> list[Row]:
        """step_cdf.csv: means over a configuration's launches of each launch's quantile."""
        rows: list[Row] = []
        shares = [i / CURVE_POINTS for i in range(1, CURVE_POINTS + 1)]
        for config in dict.fromkeys(configuration_of(name) for name in self.launches):
            mine = [
                steps.samples
                for (launch, _, phase, at), steps in self.cells.items()
                if (configuration_of(launch), phase, at) == (config, "A", cell) and steps.n
            ]
            curves: dict[str, list[float]] = {}
            for name in ("step_duration_us", "engine_step_us"):
                known = [np.quantile(sample[name], shares) for sample in mine if len(sample[name])]
                if known:
                    curves[name] = np.mean(known, axis=0).tolist()
            if curves:
                rows += [
                    {"config": config, "cdf": share, "engine_step_us": None}
                    | {name: curve[i] for name, curve in curves.items()}
                    for i, share in enumerate(shares)
                ]
        return rows


def level(values: Values, config: str, confidence: float) -> IntervalEstimate:
    """The mean of a configuration's launches with the interval of means that plain has not."""
    means: dict[str, float] = {}
    for name in dict.fromkeys(configuration_of(launch) for launch, _ in values):
        means[name] = float(
            np.mean([v for (launch, _), v in values.items() if configuration_of(launch) == name])
        )
    z = {
        at: v / means[configuration_of(at[0])] - 1
        for at, v in values.items()
        if means[configuration_of(at[0])] > 0
    }
    own = [v for (launch, _), v in z.items() if configuration_of(launch) == config]
    n = sum(configuration_of(launch) == config for launch, _ in values)
    nothing = IntervalEstimate(means[config], None, None, None, None, n)
    if not own:
        return nothing
    layout = layout_of(z)
    unequal = [name for name, test in layout.spreads.items() if test.p < UNEQUAL_P]
    pool = {at: v for at, v in z.items() if configuration_of(at[0]) not in unequal}
    kept = {configuration_of(launch) for launch, _ in pool}
    df = len(pool) - len(kept)
    if df < 1 or len({block for _, block in pool}) < 2:
        return nothing
    total = sum(v * v for v in pool.values())
    rest, df_rest = layout.residual(unequal)
    parts = [(rest, df_rest), (max(0.0, total - rest), df - df_rest)]
    below = sum(squares**2 / f for squares, f in parts if f > 0)
    effective = total**2 / below if below > 0 else float(df)
    half = t_quantile(confidence, effective) * math.sqrt(total / df / n)
    method = "own launches" if kept == {config} else "pooled launches"
    test = layout.spreads.get(config)
    if test is not None and test.p < OWN_P and n > 1:
        alone = t_quantile(confidence, n - 1) * math.sqrt(float(np.var(own, ddof=1)) / n)
        if alone >= half:
            half, method = alone, "own launches" if alone > half else method
    ends = (means[config] * math.exp(-half), means[config] * math.exp(half))
    return IntervalEstimate(means[config], *ends, None, method, n)

"""Step taxes and hooks a second time, from the raw step records.

Written from docs/method.md, "Steps". Nothing is shared with connector_tax.analysis. Source of the
effective degrees of freedom: Satterthwaite, Biometrics Bulletin 2 (1946) 110.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np

from connector_tax.artifacts.names import configuration_of
from connector_tax.provenance.audit_study import RawStudy
from connector_tax.provenance.distributions import t_quantile, t_two_sided
from connector_tax.provenance.layout import OWN_P, UNEQUAL_P, Layout
from connector_tax.provenance.recompute import CALLBACKS, Row, Steps

METRICS = ("tax_step_p50", "tax_engine_step_p50", "tax_callback_p50", "unattributed")
METHODS_OF = {
    "build_connector_meta": "build_meta",
    "get_finished": "get_finished",
    "get_transfer_results": "get_finished",
    "start_load_kv": "start_load_kv",
}
CURVE_POINTS = 400

Key = tuple[str, int, str, str]  # launch, block, phase, cell
Where = tuple[str, str]  # phase, cell
Hook = tuple[str, str, str]  # process, child, hook
Values = dict[tuple[str, int], float]  # (launch, block) to a number


class Interval(NamedTuple):
    """A number with the ends of its interval, its p-value and method; None: nothing repeats."""

    point: float
    low: float | None
    high: float | None
    p: float | None
    method: str | None
    launches: int


class CellSteps:
    """The steps with tokens of one cell, and the time of each hook in them."""

    def __init__(self, records: Sequence[Row], window: Mapping[str, int]) -> None:
        self.steps = Steps(records, window)
        self.n = len(self.steps.duration)
        inside: dict[int, bool] = {}
        for r in records:
            if r["process"] == "scheduler" and (
                window["t_warmup_end_ns"] <= r["t_ns"] < window["t_stop_ns"]
            ):
                inside[r["step_id"]] = r["prefill_tokens"] + r["decode_tokens"] > 0
        slowest: dict[tuple[Hook, int], float] = {}
        for r in records:
            for child, name, us in _timed(r) if r["step_id"] in inside else ():
                at = ((r["process"], child, name), r["step_id"])
                slowest[at] = max(slowest.get(at, 0.0), us)
        self.ran: dict[Hook, list[float]] = {}
        self.empty: dict[Hook, float] = {}
        for (hook, step_id), us in slowest.items():
            self.ran.setdefault(hook, [])
            if inside[step_id]:
                self.ran[hook].append(us)
            else:
                self.empty[hook] = self.empty.get(hook, 0.0) + us

    def values(self, is_plain: bool) -> dict[str, float]:
        """What a launch brings to each step tax; absent where it has no number."""
        samples = self.steps.samples
        found = {"tax_step_p50": samples["step_duration_us"]}
        found["tax_engine_step_p50"] = samples["engine_step_us"]
        found["tax_callback_p50"] = np.zeros(self.n) if is_plain else samples["connector_total_us"]
        medians = {name: float(np.median(v)) for name, v in found.items() if len(v)}
        if "tax_step_p50" in medians and "tax_callback_p50" in medians:
            medians["unattributed"] = medians["tax_step_p50"] - medians["tax_callback_p50"]
        return medians

    def cost(self, hook: Hook) -> Row:
        """p50, mean, share and empty time of a hook per step, and how often it ran."""
        ran = self.ran.get(hook, [])
        mean = sum(ran) / self.n
        engine = self.steps.engine
        return {
            "p50": float(np.median(ran)) if ran else None,
            "mean": mean,
            "share": mean / float(np.mean(engine)) if len(engine) else None,
            "empty": self.empty.get(hook, 0.0) / self.n,
            "n_ran": len(ran),
        }


def _timed(record: Row) -> Iterator[tuple[str, str, float]]:
    """(child, hook, us) of a record: callbacks, other hooks, the children's, each name once."""
    for name in CALLBACKS:
        if record[name] is not None:
            yield "", name[: -len("_us")], record[name]
    groups = {"": record.get("hooks_us") or {}, **(record.get("children_us") or {})}
    for child, times in groups.items():
        merged: dict[str, float] = {}
        for name, us in times.items():
            hook = METHODS_OF.get(name, name)
            merged[hook] = merged.get(hook, 0.0) + us
        for hook, us in merged.items():
            yield child, hook, us


class StepNumbers:
    """Every published number of steps that compares launches.

    Args:
        study: the raw study.
    """

    def __init__(self, study: RawStudy) -> None:
        self.study = study
        self.confidence = float(study.config["statistics"]["confidence"])
        self.launches = list(dict.fromkeys(launch.config for launch in study.launches))
        self.plains = [name for name in self.launches if configuration_of(name) == "plain"]
        valid = [cell for cell in study.cells if cell.status == "valid"]
        self.cells: dict[Key, CellSteps] = {
            cell.key: CellSteps(cell.steps(), cell.record["window"])
            for cell in (valid if study.step_timing else ())
        }

    @cached_property
    def values(self) -> dict[tuple[Where, str], Values]:
        """((phase, cell), metric) to the value of each launch."""
        values: dict[tuple[Where, str], Values] = {}
        for (launch, block, *where), cell in self.cells.items():
            for metric, value in cell.values(configuration_of(launch) == "plain").items():
                key = ((where[0], where[1]), metric)
                values.setdefault(key, {})[launch, block] = value
        return values

    def _differences(self, config: str, values: Values) -> dict[int, tuple[float, int]]:
        """Block to (value over the mean of the other launches of plain, how many these are)."""
        found = {}
        for (launch, block), value in values.items():
            plain = [values[p, block] for p in self.plains if p != config and (p, block) in values]
            if launch == config and plain:
                found[block] = value - float(np.mean(plain)), len(plain)
        return found

    @cache  # noqa: B019 - one object for each audit
    def tax(self, config: str, where: Where, metric: str) -> Interval | None:
        """A step tax in us over plain's launches; None without a block that has both."""
        values = self.values.get((where, metric), {})
        by_block = self._differences(config, values)
        if not by_block:
            return None
        if metric == "tax_callback_p50":
            return self._callbacks(config, values)
        differences = [d for d, _ in by_block.values()]
        n, point = len(differences), float(np.mean(differences))
        layout = _layout(values)
        if layout.pooled[1] == 0 or len({block for _, block in values}) < 2:
            return Interval(point, None, None, None, None, n)
        squares = {"plain": sum(1 / plains for _, plains in by_block.values()) / n**2}
        name = configuration_of(config)
        squares[name] = squares.get(name, 0.0) + 1 / n
        error = layout.error(squares)
        deviation = math.sqrt(error.variance)
        half = deviation * t_quantile(self.confidence, error.df)
        p = t_two_sided(point / deviation, error.df) if deviation > 0 else float(point == 0)
        return Interval(point, point - half, point + half, p, error.name, n)

    def _callbacks(self, config: str, values: Values) -> Interval:
        plain = {block for launch, block in values if configuration_of(launch) == "plain"}
        if configuration_of(config) == "plain":
            return Interval(0.0, None, None, None, None, len(plain))
        own = {
            (launch, block): value
            for (launch, block), value in values.items()
            if block in plain and configuration_of(launch) != "plain"
        }
        return level(own, config, self.confidence)

    def launch_taxes(self, key: Key) -> Row:
        """steps.csv: the difference of one launch from its block's other launches of plain."""
        launch, block, phase, cell = key
        taxes: Row = {}
        for metric in METRICS:
            values = self.values.get(((phase, cell), metric), {})
            difference = self._differences(launch, values).get(block)
            taxes[metric] = None if difference is None else difference[0]
        return taxes

    def tax_rows(self) -> list[Row]:
        """step_taxes.csv: every configuration but plain, planned cell and metric."""
        rows: list[Row] = []
        configs = dict.fromkeys((one.config, one.phase) for one in self.study.launches)
        for config, phase in configs:
            for planned in self.study.document["cells"][phase]:
                where = (phase, str(planned["cell"]))
                if configuration_of(config) != "plain":
                    rows += [self._tax_row(config, where, metric) for metric in METRICS]
        return rows

    def _tax_row(self, config: str, where: Where, metric: str) -> Row:
        row: Row = {"config": config, "phase": where[0], "cell": where[1], "metric": metric}
        tax = self.tax(config, where, metric)
        if tax is not None:
            row |= {"us": tax.point, "lo_us": tax.low, "hi_us": tax.high, "p": tax.p}
            row |= {"n_blocks": tax.launches, "method": tax.method}
        noise = None
        if metric != "tax_callback_p50":
            noise = self.tax(self.plains[-1], where, metric)
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
                    found = level(known, config, self.confidence)
                    row |= {f"{name}{unit}": found.point, f"{name}_method": found.method}
                    row |= {f"{name}_lo{unit}": found.low, f"{name}_hi{unit}": found.high}
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
                steps.steps.samples
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


def _layout(values: Values) -> Layout:
    configs = [configuration_of(launch) for launch, _ in values]
    return Layout([block for _, block in values], configs, np.array(list(values.values())))


def level(values: Values, config: str, confidence: float) -> Interval:
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
    nothing = Interval(means[config], None, None, None, None, n)
    if not own:
        return nothing
    layout = _layout(z)
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
    return Interval(means[config], *ends, None, method, n)

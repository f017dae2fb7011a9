"""What many virtual studies say of the analysis: coverage, A/A false positives, power.

A study's launches differ equally, or those of one configuration three times as much (`spread`).
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from itertools import pairwise
from queue import SimpleQueue
from typing import Any, Self

import numpy as np
import polars as pl
from scipy.stats import binomtest
from scipy.stats import t as student

from connector_tax.analysis.block_model import OWN
from connector_tax.analysis.effects import BOOTSTRAP
from connector_tax.artifacts.names import NO_TAX, TAX
from connector_tax.calibration.design import AA, ARRIVALS, NOISY, SPREADS, STEP_TAX_US, CellTimes
from connector_tax.calibration.truth import Logs, TrueTax, taxes_of
from connector_tax.study.child import CommandChild

BLOCKS = (3, 5)
SIGNIFICANCE = 0.05
POWER = 0.80
TARGET = (0.93, 0.97)
WORKER = "connector_tax.calibration.worker"
# Launches of one task for the true taxes.
TRUTH_SHARE = 50

KEYS = ("spread", "arrivals", "metric", "blocks")

Truths = Mapping[tuple[str, str], Mapping[tuple[str, str], TrueTax]]


class Workers:
    """Simulating processes, one for each CPU this one may use; a context manager."""

    def __init__(self) -> None:
        self._count = len(os.sched_getaffinity(0))
        self._idle: SimpleQueue[CommandChild] = SimpleQueue()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for _ in range(self._count):
            self._idle.put(self._stack.enter_context(CommandChild(WORKER, [])))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, do: str, tasks: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Any]]:
        """Each task's number and its result, as they come."""

        def one(task: Mapping[str, Any]) -> Any:
            child = self._idle.get()
            result = child.ask(do, **task)["result"]
            self._idle.put(child)
            return result

        with ThreadPoolExecutor(self._count) as pool:
            futures = {pool.submit(one, task): number for number, task in enumerate(tasks)}
            for future in as_completed(futures):
                yield futures[future], future.result()


def run_studies(
    workers: Workers, studies: int, seed: int, on_study: Callable[[int, int], None]
) -> pl.DataFrame:
    """The outcomes of `studies` studies for each spread and arrival process (`TaxOutcome`)."""
    tasks = [
        {"spread": s, "arrivals": a, "number": number, "seed": seed, "blocks": BLOCKS}
        for s in SPREADS
        for a in ARRIVALS
        for number in range(studies)
    ]
    rows: list[dict[str, Any]] = []
    for done, (_, outcomes) in enumerate(workers.run("study", tasks), 1):
        rows += outcomes
        on_study(done, len(tasks))
    return pl.DataFrame(rows).sort(*KEYS, "config", "study")


def truths(workers: Workers, launches: int, cell: CellTimes, seed: int) -> Truths:
    """(spread, arrivals) to the true taxes; arguments as `truth.log_ratios` takes them."""
    shares: list[dict[str, Any]] = [
        {"spread": s, "arrivals": a, "cell": cell, "seed": seed, "first": k,
         "launches": min(TRUTH_SHARE, launches - k)}
        for s in SPREADS
        for a in ARRIVALS
        for k in range(0, launches, TRUTH_SHARE)
    ]  # fmt: skip
    merged: dict[tuple[str, str], Logs] = {}
    results = dict(workers.run("truth", shares))
    for number, share in enumerate(shares):
        of = merged.setdefault((share["spread"], share["arrivals"]), {})
        for name, by_metric in results[number].items():
            for metric, values in by_metric.items():
                of.setdefault(name, {}).setdefault(metric, []).extend(values)
    return {of: taxes_of(ratios) for of, ratios in merged.items()}


def with_truth(outcomes: pl.DataFrame, of_cells: Truths, long_run: Truths) -> pl.DataFrame:
    """The outcomes with both true values, and whether each interval covers them.

    Args:
        outcomes: of `run_studies`.
        of_cells: the true taxes in cells of the studies' length.
        long_run: those of long cells.
    """
    table = pl.DataFrame(
        [
            {
                "spread": spread,
                "arrivals": arrivals,
                "config": config,
                "metric": metric,
                "truth": true.tax,
                "truth_se": true.standard_error,
                "long_run": long_run[spread, arrivals][config, metric].tax,
                "long_run_se": long_run[spread, arrivals][config, metric].standard_error,
            }
            for (spread, arrivals), taxes in of_cells.items()
            for (config, metric), true in taxes.items()
        ]
    )
    joined = outcomes.join(table, on=["spread", "arrivals", "config", "metric"], how="left")
    covers = {
        name: (pl.col(lo) <= pl.col("truth")) & (pl.col("truth") <= pl.col(hi))
        for name, (lo, hi) in {
            "covered": ("lo", "hi"),
            "model_covered": ("model_lo", "model_hi"),
        }.items()
    }
    covers["long_run_covered"] = pl.col("long_run").is_between("lo", "hi")
    return joined.with_columns(
        **covers,
        detected=(pl.col("lo") > 0) & (pl.col("p_adjusted") < SIGNIFICANCE),
        excludes_zero=(pl.col("lo") > 0) | (pl.col("hi") < 0),
        log_error=pl.col("tax").log1p() - pl.col("truth").log1p(),
    )


def level_rows(outcomes: pl.DataFrame) -> list[dict[str, Any]]:
    """One row for each (arrivals, metric, blocks, configuration), by true tax: what it gave."""
    rows = [{**where, **_level(part)} for where, part in _parts(outcomes, *KEYS, "config")]
    return sorted(rows, key=lambda r: (*_key(r), r["truth"]))


def _level(part: pl.DataFrame) -> dict[str, Any]:
    errors = part["log_error"].to_numpy()
    n = len(errors)
    covered = int(part["covered"].sum())
    low, high = _binomial(covered, n)
    return {
        "studies": n,
        "truth": part["truth"][0],
        "truth_se": part["truth_se"][0],
        "long_run": part["long_run"][0],
        "long_run_se": part["long_run_se"][0],
        "covered": covered / n,
        "covered_lo": low,
        "covered_hi": high,
        "model_covered": _share(part, "model_covered"),
        **_methods(part),
        "half_width": float(np.median((part["hi"] - part["lo"]).to_numpy()) / 2),
        "log_bias": float(errors.mean()),
        "log_bias_se": float(errors.std(ddof=1) / np.sqrt(n)) if n > 1 else None,
        "excludes_zero": _share(part, "excludes_zero"),
        "detected": _share(part, "detected"),
        "verdict_tax": _mean(part["verdict"] == TAX),
        "verdict_no_tax": _mean(part["verdict"] == NO_TAX),
    }


def coverage_rows(outcomes: pl.DataFrame) -> list[dict[str, Any]]:
    """One row for each of KEYS: coverage over the seven known taxes, and of NOISY's alone.

    The taxes of one study share its plain launches, so the interval of the pooled coverage is made
    from one number for each study (Student's t), not from single taxes.
    """
    taxed = outcomes.filter(pl.col("config") != AA)
    rows = []
    for where, part in _parts(taxed, *KEYS):
        row: dict[str, Any] = {**where, "studies": part["study"].n_unique()}
        for name in ("covered", "model_covered", "long_run_covered"):
            by_study = part.group_by("study").agg(pl.col(name).mean())[name].to_numpy()
            mean, low, high = _mean_interval(by_study)
            row |= {name: mean, f"{name}_lo": low, f"{name}_hi": high}
        row["in_target"] = bool(TARGET[0] <= row["covered"] <= TARGET[1])
        noisy = part.filter(pl.col("config") == NOISY)
        row["noisy_covered"] = _share(noisy, "covered") if noisy.height else None
        rows.append(row | _methods(part))
    return rows


def aa_rows(outcomes: pl.DataFrame) -> list[dict[str, Any]]:
    """One row for each of KEYS: plain's last launches called different from the others."""
    rows = []
    noise = outcomes.filter(pl.col("config") == AA)
    for where, part in _parts(noise, *KEYS):
        n = part.height
        excluded = int(part["excludes_zero"].sum())
        tax = int((part["verdict"] == TAX).sum())
        low, high = _binomial(excluded, n)
        rows.append(
            {
                **where,
                "studies": n,
                "excludes_zero": excluded / n,
                "excludes_zero_lo": low,
                "excludes_zero_hi": high,
                "p_below_0.05": _mean(part["p_value"] < SIGNIFICANCE),
                "verdict_tax": tax / n,
                "within_target": excluded / n <= SIGNIFICANCE,
            }
        )
    return rows


def power_rows(levels: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The smallest tax detected in 80% of the studies, for each of KEYS.

    Detected: positive and significant after Dunnett's adjustment over the seven taxes. Between two
    levels the detection rate is read off a straight line; None: not even the largest tax. Where
    launches differ unequally, NOISY is none of the levels.
    """
    rows = []
    for key in sorted({_key(r) for r in levels}):
        named = dict(zip(KEYS, key, strict=True))
        curve = [
            (0.0, 0.0),
            *sorted(
                (r["truth"], r["detected"])
                for r in levels
                if _key(r) == key
                and r["config"] in STEP_TAX_US
                and (r["config"] != NOISY or named["spread"] == "equal")
            ),
        ]
        rows.append(
            {
                **named,
                "smallest_tax_detected": _crossing(curve),
                "smallest_level_detected": next((t for t, d in curve if d >= POWER), None),
                "largest_tax": curve[-1][0],
            }
        )
    return rows


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in KEYS)


def _methods(part: pl.DataFrame) -> dict[str, float]:
    """How often the bootstrap's interval and that of a configuration's own spread are printed."""
    return {
        "bootstrap_printed": _mean(part["method"].str.starts_with(BOOTSTRAP)),
        "own_printed": _mean(part["method"].str.starts_with(OWN)),
    }


def _crossing(curve: Sequence[tuple[float, float]]) -> float | None:
    for (left, below), (right, above) in pairwise(curve):
        if below < POWER <= above:
            return left + (right - left) * (POWER - below) / (above - below)
    return None


def _parts(table: pl.DataFrame, *keys: str) -> Iterator[tuple[dict[str, Any], pl.DataFrame]]:
    for values, part in table.group_by(keys, maintain_order=True):
        yield dict(zip(keys, values, strict=True)), part


def _share(part: pl.DataFrame, name: str) -> float:
    return _mean(part[name])


def _mean(values: pl.Series) -> float:
    return float(values.to_numpy().mean())


def _binomial(successes: int, n: int) -> tuple[float, float]:
    """Clopper and Pearson's 95% interval."""
    interval = binomtest(successes, n).proportion_ci(0.95, method="exact")
    return float(interval.low), float(interval.high)


def _mean_interval(values: Any) -> tuple[float, float | None, float | None]:
    mean, n = float(values.mean()), len(values)
    if n < 2:
        return mean, None, None
    half = float(student.ppf(0.975, n - 1) * values.std(ddof=1) / np.sqrt(n))
    return mean, max(0.0, mean - half), min(1.0, mean + half)

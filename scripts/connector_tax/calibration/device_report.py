"""Calibrate taxes of several devices: coverage, A/A and the test of one tax, from virtual studies.

With two devices the truth is the mean of the taxes on these two, with four the mean over all
devices that there could have been.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
from numpy.polynomial import Polynomial
from scipy.stats import norm

from connector_tax.artifacts.names import DEVICES_DIFFER
from connector_tax.calibration.coverage import TARGET, Workers, truth_logs
from connector_tax.calibration.design import AA, STEP_TAX_US, CellTimes, study_document
from connector_tax.calibration.devices import EFFECTS_US
from connector_tax.calibration.report import command_parser, publish, table_lines
from connector_tax.calibration.studies import METRICS
from connector_tax.machine import machine

# Devices there could have been: quantiles of their effects, in standard deviations.
COULD_BE = norm.ppf((np.arange(400) + 0.5) / 400)

Curves = Mapping[str, Polynomial]
Row = Mapping[str, Any]


def true_curves(workers: Workers, launches: int, cell: CellTimes, seed: int) -> Curves:
    """The log of one plus the tax over the step tax (us), by metric; cubics through the levels."""
    task = {"spread": "equal", "arrivals": "poisson", "cell": cell, "seed": seed}
    (logs,) = truth_logs(workers, "truth", launches, [task])
    levels = [0.0, *STEP_TAX_US.values()]
    return {
        metric: Polynomial.fit(levels, [0.0, *(np.mean(logs[n][metric]) for n in STEP_TAX_US)], 3)
        for metric in METRICS
    }


def truth(row: Row, curves: Curves) -> float:
    """The true tax that an interval is to cover."""
    if row["config"] == AA:
        return 0.0
    curve, level = curves[row["metric"]], STEP_TAX_US[row["config"]]
    shifts = np.array(row["shifts_us"])
    if len(shifts) > 2:
        shifts = row["effect_us"] * COULD_BE
    return float(np.expm1(curve(level + shifts).mean()))


def summary(outcomes: Sequence[Row], curves: Curves) -> list[dict[str, Any]]:
    """One row for each effect, design and metric: coverage over the taxes, and the rest."""
    table = pl.DataFrame(
        [
            {key: value for key, value in row.items() if key != "shifts_us"}
            | {"truth": truth(row, curves)}
            for row in outcomes
        ],
        infer_schema_length=None,
    ).with_columns(
        covered=pl.col("truth").is_between("lo", "hi"),
        model_covered=pl.col("truth").is_between("model_lo", "model_hi"),
    )
    rows = []
    for (effect, design, metric), part in table.group_by(
        "effect_us", "design", "metric", maintain_order=True
    ):
        noise = part.filter((pl.col("config") == AA) & (pl.col("device") == ""))
        taxes = part.filter(pl.col("config") != AA)
        over, on = (taxes.filter((pl.col("device") == "") == pooled) for pooled in (True, False))
        by_study = over.group_by("study").agg(pl.col("covered").mean())["covered"].to_numpy()
        known = on.filter(pl.col("covered").is_not_null())
        rows.append(
            {
                "effect_us": effect,
                "design": design,
                "metric": metric,
                "studies": len(by_study),
                "covered": float(by_study.mean()),
                "standard_error": float(by_study.std(ddof=1) / np.sqrt(len(by_study))),
                "model_covered": _share(over["model_covered"]),
                "covered_on_a_device": _share(known["covered"]),
                "aa_excludes_zero": _share(~noise["covered"]),
                "same_p_below_0.05": _share(over["same_p"] < 0.05),
                "devices_differ": _share(over["verdict"] == DEVICES_DIFFER),
                "half_width": _share((over["hi"] - over["lo"]) / 2),
            }
        )
    return rows


def _share(values: pl.Series) -> float | None:
    return float(values.cast(pl.Float64).to_numpy().mean()) if len(values) else None


def _shown(key: str) -> Callable[[Row], str]:
    return lambda row: str(row[key])


def _percent(key: str) -> Callable[[Row], str]:
    return lambda row: "-" if row[key] is None else f"{100 * row[key]:.1f}"


def report(result: Row) -> str:
    """The result as a text."""
    columns = {"effect, us": "effect_us", "design": "design", "metric": "metric"}
    shares = {"covered": "covered", "standard error": "standard_error",
              "model alone": "model_covered", "covered on a device": "covered_on_a_device",
              "A/A excludes 0": "aa_excludes_zero", "p of one tax < 0.05": "same_p_below_0.05",
              "devices differ": "devices_differ", "half-width": "half_width"}  # fmt: skip
    lines = [
        f"{result['studies']} virtual studies for each effect, seed {result['seed']}",
        f"machine: {result['machine']}",
        "Effect: standard deviation of a connector's step tax from device to device; a step takes",
        f"3.03 ms. All in %; target {TARGET[0]:.0%} to {TARGET[1]:.0%} covered.",
        *table_lines(
            result["rows"],
            {name: _shown(key) for name, key in columns.items()}
            | {name: _percent(key) for name, key in shares.items()},
        ),
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run studies on several devices and write how their intervals cover."""
    parser = command_parser("calibration.device_report", main.__doc__)
    parser.add_argument("--studies", type=int, default=200)
    parser.add_argument("--truth-launches", type=int, default=400)
    arguments = parser.parse_args(argv)
    rules = study_document("poisson", arguments.seed, 1)["config"]["cell"]
    tasks = [
        {"number": number, "seed": arguments.seed, "effect_us": effect}
        for effect in EFFECTS_US
        for number in range(arguments.studies)
    ]
    with Workers() as workers:
        curves = true_curves(workers, arguments.truth_launches, rules, arguments.seed)
        by_task = dict(workers.run("device_study", tasks))
    outcomes = [row for number in sorted(by_task) for row in by_task[number]]
    result = {"machine": machine(), "seed": arguments.seed, "studies": arguments.studies}
    result["rows"] = summary(outcomes, curves)
    publish(arguments.out / "devices", result, report(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())

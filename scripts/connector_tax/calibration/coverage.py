"""What many virtual studies say of the analysis: coverage, A/A false positives, power."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import binomtest
from scipy.stats import t as student

from connector_tax.analysis.block_model import POWER
from connector_tax.artifacts.verdicts import costs
from connector_tax.calibration.design import AA
from connector_tax.calibration.virtual import TrueTax

TARGET = (0.93, 0.97)
KEYS = ["spread", "arrivals", "metric", "blocks"]

# By configuration and metric.
Taxes = Mapping[tuple[str, str], TrueTax]


def with_truth(outcomes: pd.DataFrame, truths: Mapping[str, Taxes]) -> pd.DataFrame:
    """The rows of `virtual_study` with the true tax (by arrivals), and what became of each."""
    rows = [
        (arrivals, config, metric, true.tax)
        for arrivals, taxes in truths.items()
        for (config, metric), true in taxes.items()
    ]
    truth = pd.DataFrame(rows, columns=["arrivals", "config", "metric", "truth"])
    table = outcomes.merge(truth)
    return table.assign(
        covered=table.truth.between(table.lo, table.hi),
        excludes_zero=(table.lo > 0) | (table.hi < 0),
        detected=table.verdict.map(costs),
    )


def summary(table: pd.DataFrame) -> list[dict[str, Any]]:
    """A row for each of KEYS.

    covered: share of the intervals of the known taxes that hold the true one. The taxes of one
    study share its plain launches, so its bounds are made from one number for each study (Student's
    t), not from single taxes. aa: share of the A/A intervals without zero, its bounds Clopper and
    Pearson's; aa_costs: that are said to cost. smallest: the tax that is said to cost in 80% of the
    studies, by a straight line between the levels; None: not even the largest. half_width: the
    median.
    """
    rows = []
    for key, part in table.groupby(KEYS):
        row = dict(zip(KEYS, key, strict=True))
        aa, taxed = part[part.config == AA], part[part.config != AA]
        by_study = taxed.groupby("study").covered.mean().to_numpy()
        curve = taxed.groupby("config")[["truth", "detected"]].mean().sort_values("truth")
        points = [(0.0, 0.0), *curve.itertuples(index=False, name=None)]
        excluded = int(aa.excludes_zero.sum())
        bounds = binomtest(excluded, len(aa)).proportion_ci(0.95, method="exact")
        rows.append(
            row
            | {
                "studies": len(by_study),
                "covered": by_study.mean(),
                "covered_within": _half_width(by_study),
                "aa": excluded / len(aa),
                "aa_lo": bounds.low,
                "aa_hi": bounds.high,
                "aa_costs": aa.verdict.map(costs).mean(),
                "half_width": ((aa.hi - aa.lo) / 2).median(),
                "smallest": _crossing(points),
                "largest": points[-1][0],
            }
        )
    return rows


def _crossing(curve: list[tuple[float, float]]) -> float | None:
    for (left, below), (right, above) in pairwise(curve):
        if below < POWER <= above:
            return left + (right - left) * (POWER - below) / (above - below)
    return None


def _half_width(values: Any) -> float | None:
    n = len(values)
    if n < 2:
        return None
    return float(student.ppf(0.975, n - 1) * values.std(ddof=1) / np.sqrt(n))

"""Bounds on costs for `gate` and `ab --max`: parsing, result and exit status.

A cost is below (or above) its bound if its whole interval is below (or above) the bound. The
intervals of all costs that are checked together hold jointly (Bonferroni).
"""

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from connector_tax import text
from connector_tax.analysis.block_model import MIXTURE
from connector_tax.analysis.effect import POWER, Effect, effect_of
from connector_tax.artifacts.metrics import METRICS, THROUGHPUT_METRICS
from connector_tax.artifacts.names import ALL_RATES
from connector_tax.artifacts.tables import EffectRow
from connector_tax.artifacts.verdicts import CANNOT_TELL, MIN_BLOCKS_FOR_VERDICT

BELOW, ABOVE, NO_NUMBER = "below", "above", "void or missing"
STATUS = {BELOW: 0, ABOVE: 1, CANNOT_TELL: 2, NO_NUMBER: 3}
# A violated bound decides, even if other costs could not be measured.
WORST_FIRST = (ABOVE, NO_NUMBER, CANNOT_TELL, BELOW)
_BOUND = re.compile(r"(?:(\w+)=)?([-+]?\d+(?:\.\d+)?)\s*%")


@dataclass(frozen=True)
class Bound:
    """The highest allowed cost.

    Attributes:
        most: a fraction.
        metric: the metric of the cost; None for every judged metric that no other bound names.
    """

    most: float
    metric: str | None = None


def bounded(bounds: Sequence[Bound], judged: Sequence[str]) -> list[tuple[Bound, str]]:
    """Return each bound with each metric to which it applies.

    Args:
        judged: the metrics of a bound without a metric, except those that another bound names.
    """
    named = {bound.metric for bound in bounds}
    general = [metric for metric in judged if metric not in named]
    return [
        (bound, metric)
        for bound in bounds
        for metric in (general if bound.metric is None else [bound.metric])
    ]


def bound_of(argument: str) -> Bound:
    """Parse a bound such as `5%` or `ttft_p90=5%`.

    Raises:
        argparse.ArgumentTypeError: `argument` has neither form.
    """
    match = _BOUND.fullmatch(argument)
    if match is None or match[1] not in (None, *METRICS, *THROUGHPUT_METRICS):
        raise argparse.ArgumentTypeError(
            f"found {argument!r}; allowed: NUMBER%, or METRIC=NUMBER% with METRIC one of"
            f" {', '.join((*METRICS, *THROUGHPUT_METRICS))}"
        )
    return Bound(float(match[2]) / 100, match[1])


@dataclass(frozen=True)
class BoundCheck:
    """One cost against its bound; numbers are fractions.

    Attributes:
        decides: the smallest bound this study would have passed in 80% of its repetitions if there
            were no cost.
    """

    config: str
    metric: str
    bound: float
    result: str
    reason: str
    tax: float | None = None
    lo: float | None = None
    hi: float | None = None
    decides: float | None = None

    def __str__(self) -> str:
        size = f"{text.percent(self.tax)} {text.interval(self.lo, self.hi)}"
        size_text = "" if self.tax is None else f" {size},"
        return (
            f"{self.config} {self.metric}:{size_text} bound {text.percent(self.bound)}:"
            f" {self.result} ({self.reason})"
        )


def check(
    row: EffectRow | None,
    config: str,
    metric: str,
    most: float,
    confidence: float,
    looked: bool,
    mixture: Callable[[EffectRow], Effect] | None = None,
) -> BoundCheck:
    """Compare a cost with its bound.

    Args:
        row: the row of the cost; None if the study has none.
        most: the bound, a fraction.
        confidence: confidence of the cost's interval.
        looked: whether interim analyses judge the metric, whose intervals are then used over all
            rates.
        mixture: returns the effect of a row at `confidence`; the row's own t distribution
            approximates the mixture at other levels.
    """
    none = BoundCheck(config, metric, most, NO_NUMBER, "")
    if row is None:
        return replace(none, reason="not part of the design")
    if row.estimate is None:
        return replace(none, reason=f"{row.status}: {row.reason}")
    if row.mark:
        return replace(none, reason=row.mark, tax=row.estimate)
    effect = effect_of(row, confidence)
    if mixture is not None and row.method == MIXTURE:
        effect = mixture(row)
    undecided = replace(none, result=CANNOT_TELL, tax=row.estimate, lo=row.lo, hi=row.hi)
    if looked and row.cell == ALL_RATES:
        lo, hi, decides = row.family_lo, row.family_hi, None
    elif not effect.repeats or effect.n_blocks < MIN_BLOCKS_FOR_VERDICT:
        lo, hi, decides = None, None, None
    else:
        lo, hi = effect.interval(confidence)
        decides = replace(effect, contrast=0.0).interval(confidence, POWER).hi
    if lo is None or hi is None:
        few = f"{effect.n_blocks} block(s); at least {MIN_BLOCKS_FOR_VERDICT} are needed"
        return replace(undecided, reason=few)
    result = BELOW if hi < most else ABOVE if lo > most else CANNOT_TELL
    reason = "the interval contains the bound"
    if result != CANNOT_TELL:
        reason = f"the whole interval is {result}"
    return replace(undecided, result=result, reason=reason, lo=lo, hi=hi, decides=decides)


def worst(results: Sequence[str]) -> str:
    """Return the worst of several gate results."""
    return next(result for result in WORST_FIRST if result in results)

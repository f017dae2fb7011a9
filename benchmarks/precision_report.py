"""What the simulated grids say of precision-targeted cells: agreement, wrong verdicts, time."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from connector_tax.artifacts.names import INCONCLUSIVE, NO_TAX, TAX
from connector_tax.artifacts.stage_records import RatesRecord
from connector_tax.machine import cpu

FULL, PRECISE = range(2)
PLACES = ("none", "within margin", "near margin", "above margin")

# (configuration, reference rate's name, metric)
Key = tuple[str, str, str]
Verdicts = dict[Key, str]


@dataclass(frozen=True)
class Truth:
    """The tax of the cost model in one cell (0.1 is +10%) and its Monte-Carlo standard error."""

    tax: float
    standard_error: float

    def place(self, margin: float) -> str:
        """Where the tax lies against the margin; `near margin`: within two standard errors."""
        if self.tax == 0:
            return "none"
        if abs(abs(self.tax) - margin) <= 2 * self.standard_error:
            return "near margin"
        return "within margin" if abs(self.tax) < margin else "above margin"

    def refutes(self, verdict: str, margin: float) -> bool:
        """Whether a verdict is wrong.

        TAX says that the tax is positive, NO TAX that it is below the margin: both are right about
        a tax between zero and the margin. INCONCLUSIVE claims nothing.
        """
        if verdict == TAX:
            return self.tax <= 0
        return verdict == NO_TAX and abs(self.tax) >= margin


@dataclass(frozen=True)
class Replication:
    """One seed: the verdicts of both grids, their rates, and what they took."""

    verdicts: tuple[Verdicts, Verdicts]
    rates: tuple[RatesRecord, RatesRecord]
    cell_s: tuple[float, float]
    around_s: float

    @property
    def same_rates(self) -> bool:
        """Whether both grids found the same reference rates and saturation rates."""
        full, precise = (
            (r["ref_safe"], r["ref_load"], r["saturation_rate_rps"])
            for r in (self.rates[FULL], self.rates[PRECISE])
        )
        return full == precise


def agreement(
    replications: Sequence[Replication], grid: int, keys: Collection[Key], *, same_seed: bool
) -> float:
    """The share of verdicts on which `grid` agrees with the full grid, over pairs of studies.

    Args:
        replications: the studies; at least 2 unless `same_seed`.
        grid: FULL or PRECISE.
        keys: the taxes that count.
        same_seed: compare each study with the full grid of its own seed; else with those of every
            other seed, with which it shares neither launch offsets nor jitter nor arrivals.
    """
    same = [
        one.verdicts[grid].get(key) == other.verdicts[FULL].get(key)
        for i, one in enumerate(replications)
        for j, other in enumerate(replications)
        if (i == j) is same_seed
        for key in keys
    ]
    return sum(same) / len(same)


def agreement_lost(
    replications: Sequence[Replication], keys: Collection[Key]
) -> tuple[float, float]:
    """How much less the precision-targeted grid agrees with another seed's full grid than a full
    grid does, and the jackknife standard error over seeds; at least 3 replications."""

    def lost(chosen: Sequence[Replication]) -> float:
        full, precise = (agreement(chosen, g, keys, same_seed=False) for g in (FULL, PRECISE))
        return full - precise

    n = len(replications)
    left_out = [lost([*replications[:i], *replications[i + 1 :]]) for i in range(n)]
    return lost(replications), float(np.std(left_out) * np.sqrt(n - 1))


def report(
    replications: Sequence[Replication],
    truths: Mapping[float, Mapping[tuple[str, str], Truth]],
    margins: Mapping[str, float],
    confidence: float,
) -> bool:
    """Print the tables; whether the precision-targeted grid gives the full one's verdicts in at
    most half its time.

    It does when the time ratio, start-ups included, is at most 50%, when it agrees with a full grid
    of another seed no less than a full grid does (but for two standard errors of that difference),
    and when no more of its verdicts are wrong than the confidence allows.
    """
    keys = sorted({key for r in replications for grid in r.verdicts for key in grid})
    taxes = {key: _truth(key, replications, truths) for key in keys}
    _print_taxes(replications, taxes, margins)
    places = {key: truth.place(margins[key[2]]) for key, truth in taxes.items()}
    groups = {place: [k for k in keys if places[k] == place] for place in PLACES} | {"all": keys}
    _print_groups(replications, {n: g for n, g in groups.items() if g}, taxes, margins)
    cells, total = _time_ratios(replications)
    lost, error = agreement_lost(replications, keys)
    wrong = _wrong(replications, PRECISE, keys, taxes, margins) / (len(keys) * len(replications))
    kept = sum(r.same_rates for r in replications)
    print(f"reference and saturation rates are the full grid's in {kept} of {len(replications)}")
    print(f"time: {cells:.1%} of the full grid's in cells, {total:.1%} with start-ups (bound 50%)")
    print(
        f"agreement lost against a repetition of the full grid: {lost:+.1%} +- {error:.1%}; "
        f"wrong: {wrong:.1%} (bound {1 - confidence:.0%})"
    )
    return total <= 0.5 and lost <= 2 * error and wrong <= 1 - confidence


def _truth(
    key: Key,
    replications: Sequence[Replication],
    truths: Mapping[float, Mapping[tuple[str, str], Truth]],
) -> Truth:
    config, reference, metric = key
    # The grids that found another reference rate than most are judged by the rate of most.
    used = Counter(
        rates["ref_safe"] if reference == "ref_safe" else rates["ref_load"]
        for r in replications
        for rates in r.rates
    )
    return truths[used.most_common(1)[0][0]][config, metric]


def _time_ratios(replications: Sequence[Replication]) -> tuple[float, float]:
    full, precise = (sum(r.cell_s[grid] for r in replications) for grid in (FULL, PRECISE))
    around = sum(r.around_s for r in replications)
    return precise / full, (precise + around) / (full + around)


def _wrong(
    replications: Sequence[Replication],
    grid: int,
    keys: Collection[Key],
    taxes: Mapping[Key, Truth],
    margins: Mapping[str, float],
) -> int:
    return sum(
        taxes[key].refutes(r.verdicts[grid].get(key, ""), margins[key[2]])
        for r in replications
        for key in keys
    )


def _count(replications: Sequence[Replication], grid: int, keys: Collection[Key], said: str) -> int:
    return sum(r.verdicts[grid].get(key) == said for r in replications for key in keys)


def _print_taxes(
    replications: Sequence[Replication], taxes: Mapping[Key, Truth], margins: Mapping[str, float]
) -> None:
    table = Table(title="verdicts over the seeds: TAX / NO TAX / INCONCLUSIVE")
    for name in ("tax", "true tax (%)", "against margin", "full grid", "precision-targeted"):
        table.add_column(name)
    for key, truth in taxes.items():
        counts = (
            " / ".join(str(_count(replications, g, [key], v)) for v in (TAX, NO_TAX, INCONCLUSIVE))
            for g in (FULL, PRECISE)
        )
        size = f"{100 * truth.tax:.2f} +- {100 * truth.standard_error:.2f}"
        table.add_row(" ".join(key), size, truth.place(margins[key[2]]), *counts)
    Console(width=120).print(table)


def _print_groups(
    replications: Sequence[Replication],
    groups: Mapping[str, Collection[Key]],
    taxes: Mapping[Key, Truth],
    margins: Mapping[str, float],
) -> None:
    table = Table(title=f"{cpu()}; {len(replications)} seeds; full grid | precision-targeted")
    table.add_column("true tax")
    for name in ("verdicts", "agree, other seed", "agree, same seed", "wrong", "undecided"):
        table.add_column(name, justify="right")
    for name, keys in groups.items():
        agree = [agreement(replications, g, keys, same_seed=False) for g in (FULL, PRECISE)]
        same = agreement(replications, PRECISE, keys, same_seed=True)
        wrong = [_wrong(replications, g, keys, taxes, margins) for g in (FULL, PRECISE)]
        open_ = [_count(replications, g, keys, INCONCLUSIVE) for g in (FULL, PRECISE)]
        table.add_row(
            name,
            str(len(keys) * len(replications)),
            " | ".join(f"{share:.1%}" for share in agree),
            f"{same:.1%}",
            " | ".join(map(str, wrong)),
            " | ".join(map(str, open_)),
        )
    Console(width=120).print(table)

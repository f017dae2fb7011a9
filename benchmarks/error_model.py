"""Measure how often the error model is right about launches with known taxes.

Here a launch is a number, the log of a percentile; taxes and verdicts are computed by the study's
functions. `aims` prints a line for each aim, with the worst configuration of simulated studies of
two, three, four and six blocks. The studies have seven configurations and a baseline that is
launched twice, then eleven configurations, then noise ratios that were not used to choose the
prior. A quiet launch's standard deviation is 0.5%, the margin 1%. An aim that is missed within 2.6
standard errors is repeated with ten times the studies.

`ab`: verdicts of its interim analyses, from the third block on, of both metrics.

`steps`: studies of six blocks in virtual time whose connector adds 60 us to each step in its hooks
and 30 us outside. Printed are the shares of 95% intervals that contain the step's tax, the hooks'
time and the remainder. Hooks take exactly the configured time in virtual time.

`virtual`: whole studies of three and five blocks in virtual time (docs/calibration.md), with three
kinds of noise. Printed are the shares of 95% intervals that contain seven known taxes, of A/A
intervals that exclude zero, and the smallest tax that costs, after Sidak, in 80% of the studies.
"""

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import machine, parser_of, virtual_studies
from benchmarks.launch_errors import (
    ANY_CONFIGURATION,
    BASELINES,
    Errors,
    alike,
    block_by_configuration,
    noisier,
)
from connector_tax.ab.design import FAMILY_LEVEL, FIRST_ANALYSIS
from connector_tax.analysis.block_model import Launches
from connector_tax.analysis.effect import Effect, Levels, family_levels, judge
from connector_tax.analysis.looks import shared
from connector_tax.artifacts.metrics import VERDICT_METRICS
from connector_tax.artifacts.names import plain_names
from connector_tax.artifacts.verdicts import MIN_BLOCKS_FOR_VERDICT, costs, gains, less
from connector_tax.seeds import named_generator

PLAINS = plain_names(BASELINES)
SD, BLOCK_SD, CONFIDENCE, MARGIN, SOUGHT = 0.005, 0.03, 0.95, 0.01, 0.03
BLOCKS = (2, 3, 4, 6)
# Margins, in sd, for the test of `less` at a true cost equal to the margin.
AT_MARGIN = (0.01, 0.03)
NEAR, AGAIN = 2.6, 10


@dataclass(frozen=True)
class Scenario:
    """Studies with one kind of launch errors.

    Attributes:
        name: name of the errors.
        configurations: number of configurations besides the baseline.
        errors: errors of launches, in units of SD.
        noisy: numbers of the noisier configurations, from 0.
        left_out: configurations that are not measured after the second block.
        failed: whether the first of them fails in the first block.
    """

    name: str
    configurations: int
    errors: Errors
    noisy: tuple[int, ...] = ()
    left_out: tuple[int, ...] = ()
    failed: bool = False

    @property
    def names(self) -> list[str]:
        """Return the names of a block's launches."""
        return [*PLAINS, *(f"c{number}" for number in range(self.configurations))]

    def study(self, rng: np.random.Generator, blocks: int) -> Launches:
        """Return the launches of one study whose configurations have no cost."""
        names = self.names
        place = rng.permuted(np.tile(np.arange(float(len(names))), (blocks, 1)), axis=1)
        y = rng.normal(0, BLOCK_SD, (blocks, 1)) + SD * self.errors(rng, place)
        kept = np.ones(y.shape, bool)
        kept[2:, [BASELINES + number for number in self.left_out]] = False
        if self.failed:
            kept[0, BASELINES] = False
        block = np.repeat(np.arange(blocks), len(names))
        launches = Launches(np.tile(names, blocks), block, y.ravel())
        return launches if kept.all() else launches.only(kept.ravel())


def scenarios(configurations: int, ratios: Sequence[float], few: bool) -> Iterator[Scenario]:
    """Yield the studies of a layout: with each kind of errors, and with noisier configurations.

    Args:
        ratios: noise ratios of one noisy configuration.
        few: whether to include families of two and three configurations.
    """
    some = ratios[min(1, len(ratios) - 1)]
    one = (BASELINES,)
    for name, errors in ANY_CONFIGURATION.items():
        yield Scenario(name, configurations, errors)
    for ratio in ratios:
        yield Scenario(f"one x{ratio:g}", configurations, noisier(one, ratio), (0,))
    three = range(BASELINES, BASELINES + 3)
    yield Scenario(f"three x{some:g}", configurations, noisier(three, some), (0, 1, 2))
    yield Scenario(f"baseline x{some:g}", configurations, noisier(range(BASELINES), some))
    left = tuple(range(3, configurations))
    yield Scenario(f"one x{some:g}, left out", configurations, noisier(one, some), (0,), left)
    yield Scenario(f"one x{some:g}, failed", configurations, noisier(one, some), (0,), (), True)
    for size in (2, 3) if few else ():
        for ratio in (3.0, 5.0):
            yield Scenario(f"{size} beside, one x{ratio:g}", size, noisier(one, ratio), (0,))


@dataclass(frozen=True)
class Shares:
    """The outcomes of a scenario's studies, as shares of `studies`.

    Attributes:
        studies: number of studies.
        covered: share of 95% intervals that contain the truth, by configuration.
        costs: share of studies with a false cost of any configuration; of any quiet configuration.
        less: share of "less than the margin", by configuration.
        detected: share that detects a cost of 3% of the last configuration, first by the error
            model, then by a pooled error. at_margin: share of "less" at a true cost of the margin,
            worst configuration, by margin.
    """

    studies: int
    covered: list[float]
    costs: tuple[float, float]
    less: list[float]
    detected: tuple[float, float]
    at_margin: tuple[float, ...]


def shifted(effect: Effect, by: float) -> Effect:
    """Return the effect with an added cost of `by` (a fraction)."""
    return replace(effect, contrast=effect.contrast + float(np.log1p(by)))


def simulate(scenario: Scenario, blocks: int, studies: int) -> Shares:
    """Simulate seeded studies; return the shares of right and wrong results."""
    rng = named_generator(f"error model/{scenario.name}/{scenario.configurations}/{blocks}")
    names = scenario.names[BASELINES:]
    levels = family_levels(CONFIDENCE, len(names))
    quiet = [number for number in range(len(names)) if number not in scenario.noisy]
    every = np.array([_outcomes(scenario, blocks, levels, rng) for _ in range(studies)])
    covered, cost, small, *at_margin = np.moveaxis(every[:, :, :-2], 2, 0)
    decided_last = every[:, -1, -2:].mean(0)
    return Shares(
        studies, covered.mean(0).tolist(),
        (float(cost.any(1).mean()), float(cost[:, quiet].any(1).mean())), small.mean(0).tolist(),
        (float(decided_last[0]), float(decided_last[1])),
        tuple(float(of.mean(0).max()) for of in at_margin),
    )  # fmt: skip


def _outcomes(
    scenario: Scenario, blocks: int, levels: Levels, rng: np.random.Generator
) -> list[list[float]]:
    """Simulate one study; return which of its results are right or wrong, by configuration."""
    launches = scenario.study(rng, blocks)
    rows = []
    names = scenario.names
    for name in names[BASELINES:]:
        effect = launches.contrast(name, PLAINS, CONFIDENCE, levels)
        assert effect is not None

        def verdict(cost: float, margin: float, effect: Effect = effect) -> str:
            judged = shifted(effect, cost)
            return judge(judged, margin, levels, fewest=min(blocks, MIN_BLOCKS_FOR_VERDICT)).verdict

        equal = verdict(0, MARGIN)
        row = [
            effect.lo <= 0 <= effect.hi, costs(equal), less(equal),
            *(less(verdict(margin, margin)) for margin in AT_MARGIN), False, False,
        ]  # fmt: skip
        if name == names[-1]:
            row[-2:] = costs(verdict(SOUGHT, MARGIN)), costs(_pooled(launches, effect, levels))
        rows.append([float(value) for value in row])
    return rows


def _pooled(launches: Launches, effect: Effect, levels: Levels) -> str:
    """Return the verdict on a cost of SOUGHT from pooled errors, as before the mixture model.

    Args:
        launches: launches of a study, whose last effect is judged.
    """
    residual, df = launches.residual
    weights = launches.weights(launches.name[-1], PLAINS, effect.blocks)
    error = float(np.sqrt(residual @ residual / df * (weights**2).sum()))
    pooled = replace(shifted(effect, SOUGHT), error=error, df=df, own_spread=None)
    return judge(pooled, MARGIN, levels, fewest=2).verdict


# ---- aims


@dataclass(frozen=True)
class Aim:
    """A measured share and the bound that it must keep.

    Attributes:
        what: name of the bounded share.
        value: the measured share.
        bound: None: printed without an aim.
        at_least: whether the bound is a lower one.
    """

    what: str
    value: float
    bound: float | None
    at_least: bool

    @property
    def missed(self) -> bool:
        """Return whether the bound is missed."""
        if self.bound is None:
            return False
        return self.value < self.bound if self.at_least else self.value > self.bound

    def near(self, studies: int) -> bool:
        """Return whether the bound is missed by no more than chance can explain."""
        error = np.sqrt(max(self.value * (1 - self.value), 1e-4) / studies)
        return self.missed and abs(self.value - (self.bound or 0)) <= NEAR * error


def aims(scenario: Scenario, blocks: int, shares: Shares, equal: Shares) -> Iterator[Aim]:
    """Yield the aims of a scenario with the measured shares.

    Args:
        equal: the outcomes of the same layout with equal launch errors.
    """
    noisy, of_ratio = scenario.noisy, scenario.name.partition(" x")[2]
    quiet = [number for number in range(scenario.configurations) if number not in noisy]
    worst = min(shares.covered)
    if not noisy and not of_ratio:
        yield Aim("covered, worst", worst, 0.935, True)
        if scenario.name == "alike":
            yield Aim("covered, best", max(shares.covered), 0.975, False)
            loss = shares.detected[1] - shares.detected[0]
            yield Aim("3% cost detected less often than by pooled errors", loss,
                      0.03 if blocks > 2 else None, False)  # fmt: skip
        yield Aim("any false cost", shares.costs[0], 0.025, False)
    elif scenario.configurations < 4:
        yield Aim("covered, worst", worst, 0.83, True)
        yield Aim("any false cost", shares.costs[0], 0.055, False)
    elif len(noisy) == 1:
        yield Aim("noisy configuration covered", shares.covered[0],
                  least_covered(float(of_ratio.partition(",")[0]), blocks), True)  # fmt: skip
        bound = {2: 0.045, 3: 0.04}.get(blocks, 0.035)
        yield Aim("any false cost", shares.costs[0], bound, False)
        yield Aim("false cost of a quiet configuration if the noisy one costs", shares.costs[1],
                  bound, False)  # fmt: skip
        if not scenario.left_out:
            share = float(np.mean([shares.less[number] for number in quiet]))
            share /= max(float(np.mean(equal.less)), 1e-9)
            yield Aim("share of 'less' for the others, relative to equal errors", share,
                      0.85 if blocks > 2 else None, True)  # fmt: skip
    else:
        yield Aim("covered, worst", worst, 0.86 if noisy else 0.93, True)
        most = {2: None, 3: 0.055}.get(blocks, 0.045)
        yield Aim("any false cost", shares.costs[0], most, False)
    if (scenario.name == "alike" or noisy) and scenario.configurations > 3:
        limit = 0.06 if scenario.name == "alike" else {2: None, 3: 0.12}.get(blocks, 0.10)
        for margin, share in zip(AT_MARGIN, shares.at_margin, strict=True):
            yield Aim(f"'less' at a cost equal to the margin, {margin:.0%}", share, limit, False)


def least_covered(ratio: float, blocks: int) -> float | None:
    """Return the required coverage of a noisy configuration; None for two blocks."""
    if blocks == 2:
        return None
    if blocks == 3:
        return 0.84
    if blocks < 6:
        return 0.84 if ratio <= 3 else 0.90
    return 0.87 if ratio <= 2 else 0.90 if ratio <= 3 else 0.93


def layouts() -> list[tuple[Scenario, int]]:
    """Return every scenario with the numbers of blocks to simulate."""
    of_prior = itertools.product(scenarios(7, (2, 3, 5, 10, 100), few=True), BLOCKS)
    others = itertools.product(scenarios(11, (2, 4, 7), few=False), BLOCKS[1:])
    return [*of_prior, *others]


def aim_table(studies: int, workers: int) -> Table:
    """Simulate every scenario; repeat scenarios that may have missed an aim by chance."""
    tasks = layouts()
    shares = divided([(number, studies) for number in range(len(tasks))], workers)

    def all_aims() -> Iterator[tuple[int, Aim]]:
        alike = {
            (scenario.configurations, blocks): shares[number]
            for number, (scenario, blocks) in enumerate(tasks) if scenario.name == "alike"
        }  # fmt: skip
        for number, (scenario, blocks) in enumerate(tasks):
            equal = alike.get((scenario.configurations, blocks), shares[number])
            for aim in aims(scenario, blocks, shares[number], equal):
                yield number, aim

    near = {number for number, aim in all_aims() if aim.near(shares[number].studies)}
    shares |= divided([(number, AGAIN * studies) for number in sorted(near)], workers)
    table = Table("launches", "configurations", "blocks", "studies", "what", "measured", "aim", "")
    for number, aim in all_aims():
        scenario, blocks = tasks[number]
        bound = "" if aim.bound is None else f"{'≥' if aim.at_least else '≤'} {100 * aim.bound:.1f}"
        table.add_row(
            scenario.name, str(scenario.configurations), str(blocks), str(shares[number].studies),
            aim.what, f"{100 * aim.value:.1f}", bound, "MISS" if aim.missed else "",
        )  # fmt: skip
    for ratio in (1, 3, 10):
        median = planned_over_true(ratio, studies // 4)
        missed = "" if 0.75 <= median <= 1.25 else "MISS"
        table.add_row(f"one x{ratio}", "7", "3 → 6", str(studies // 4), "planned / true width",
                      f"{median:.2f}", "0.75 to 1.25", missed)  # fmt: skip
    return table


def divided(tasks: Sequence[tuple[int, int]], workers: int) -> dict[int, Shares]:
    """Simulate scenarios of `layouts`, given as (number, studies), in separate processes."""
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    running = []
    for worker in range(workers):
        command = [sys.executable, "-m", "benchmarks.error_model", "worker"]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | one_thread
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(tasks[worker::workers]))
        process.stdin.close()
        running.append(process)
    shares: dict[int, Shares] = {}
    for process in running:
        assert process.stdout is not None
        for line in process.stdout:
            shares |= msgspec.json.decode(line, type=dict[int, Shares])
        if status := process.wait():
            raise RuntimeError(f"a worker of the simulation ended with status {status}")
    return shares


def work() -> None:
    """Simulate the scenarios on standard input, and write a line of JSON for each."""
    tasks = layouts()
    for number, studies in msgspec.json.decode(sys.stdin.buffer.read(), type=list[tuple[int, int]]):
        shares = simulate(*tasks[number], studies)
        sys.stdout.buffer.write(msgspec.json.encode({number: shares}) + b"\n")
        sys.stdout.buffer.flush()


def planned_over_true(ratio: float, studies: int) -> float:
    """Return the median ratio of the half-width planned after 3 blocks to the one after 6."""
    scenario = Scenario(f"planning x{ratio:g}", 7, noisier((BASELINES,), ratio), (0,))
    rng, levels = named_generator(f"error model/{scenario.name}"), family_levels(CONFIDENCE, 7)
    shares = []
    for _ in range(studies):
        six = scenario.study(rng, 6)
        now, later = (
            of.contrast("c0", PLAINS, CONFIDENCE, levels) for of in (six.only(six.block < 3), six)
        )
        assert now is not None
        assert later is not None
        planned = now.with_blocks(6, levels)
        shares.append(planned.half_width(levels.wide) / later.half_width(levels.wide))
    return float(np.median(shares))


# ---- ab


def ab_table(studies: int, workers: int) -> Table:
    """Return how often `ab` has a verdict: on equal servers, and on a server that costs 3 or 6%."""
    del workers
    kinds: dict[str, Callable[[int], Errors]] = {"alike": lambda _: alike}
    for ratio in (3, 5, 10):
        kinds[f"one x{ratio}"] = lambda _, ratio=ratio: noisier((BASELINES,), ratio)  # type: ignore[misc]
    kinds["candidate x block, twice the noise"] = lambda _: block_by_configuration(2.0)
    table = Table("launches", "candidates", "most blocks", "cost", "any verdict", "aim", "",
                  "blocks used")  # fmt: skip
    for name, errors in kinds.items():
        for candidates in (1, 2):
            for most in (4, 6, 8):
                rng = named_generator(f"ab/{name}/{candidates}/{most}")
                runs = [_run(rng, errors(candidates), candidates, most, 0) for _ in range(studies)]
                share = float(np.mean([decided for decided, _ in runs]))
                table.add_row(name, str(candidates), str(most), "none", f"{100 * share:.1f}",
                              "≤ 5.0", "MISS" if share > 0.05 else "",
                              f"{np.mean([used for _, used in runs]):.1f}")  # fmt: skip
    for cost in (0.06, 0.03):
        for most in (4, 6, 8):
            rng = named_generator(f"ab/cost {cost}/{most}")
            runs = [_run(rng, alike, 1, most, cost, 0.01) for _ in range(studies)]
            share = float(np.mean([decided for decided, _ in runs]))
            table.add_row("alike", "1", str(most), f"{cost:.0%}", f"{100 * share:.1f}", "", "",
                          f"{np.mean([used for _, used in runs]):.1f}")  # fmt: skip
    return table


def _run(
    rng: np.random.Generator, errors: Errors, candidates: int, most: int, cost: float,
    sd: float = SD,
) -> tuple[bool, int]:  # fmt: skip
    """Return whether any candidate got a verdict, costs or gains, and the number of blocks."""
    names = [*PLAINS, *(f"c{number}" for number in range(candidates))]
    place = np.tile(np.arange(float(len(names))), (most, 1))
    truth = np.log1p(cost) * ~np.isin(names, PLAINS)
    values = [truth + sd * errors(rng, rng.permuted(place, axis=1)) for _ in VERDICT_METRICS]
    levels = shared(FAMILY_LEVEL / (most - FIRST_ANALYSIS + 1), candidates, len(VERDICT_METRICS))
    decided: dict[str, bool] = {}
    for blocks in range(FIRST_ANALYSIS, most + 1):
        for name in names[BASELINES:]:
            if name in decided:
                continue
            verdicts = []
            for y in values:
                launches = Launches(
                    np.tile(names, blocks), np.repeat(np.arange(blocks), len(names)),
                    y[:blocks].ravel(), borrow=False,
                )  # fmt: skip
                effect = launches.contrast(name, PLAINS, CONFIDENCE, levels)
                assert effect is not None
                verdicts.append(judge(effect, MARGIN, levels).verdict)
            signs = [costs(verdict) or gains(verdict) for verdict in verdicts]
            if all(
                sign or less(one_verdict) for sign, one_verdict in zip(signs, verdicts, strict=True)
            ):
                decided[name] = any(signs)
            elif any(signs) and blocks == most:
                decided[name] = True
        if len(decided) == candidates:
            break
    return any(decided.values()), blocks


TABLES: Mapping[str, Callable[[int, int], Table]] = {
    "aims": aim_table,
    "ab": ab_table,
    "steps": lambda studies, _: virtual_studies.steps(studies),
    "virtual": lambda studies, _: virtual_studies.table(studies),
}


def main() -> int:
    """Print the tables."""
    if sys.argv[1:] == ["worker"]:
        work()
        return 0
    parser = parser_of(__file__, __doc__)
    parser.add_argument("tables", nargs="*", metavar="TABLE",
                        help=f"tables to print: {', '.join(TABLES)} [aims ab]")  # fmt: skip
    parser.add_argument("--studies", type=int, default=1000, help="simulated studies in each row")
    parser.add_argument("--workers", type=int, default=2, help="processes that compute `aims`")
    arguments = parser.parse_args()
    if unknown := sorted({*arguments.tables} - {*TABLES}):
        parser.error(f"TABLE: found {', '.join(unknown)}; allowed: {', '.join(TABLES)}")
    console = Console(width=120)
    console.print(f"{machine('numpy', 'scipy')}\n{arguments.studies} studies a row, in %")
    for name in arguments.tables or ("aims", "ab"):
        began = time.monotonic()
        table = TABLES[name](arguments.studies, arguments.workers)
        console.print(table, f"{name}: {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

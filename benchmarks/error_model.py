"""How often the error model is right about launches whose taxes are known.

A launch is a number here, the log of a percentile; what is made of it is the analysis's own code.

`generators`: studies of six blocks, plain twice and configurations with TAXES, in random order.
Launches differ by SD and by what the row says. Shares in %: 95% intervals that hold the tax, of all
configurations; A/A intervals without zero; studies that find the tax of 5% after Sidak. Each by
least squares and by Huber's estimate.

`plans`: studies of as many blocks as are planned for a power of 80%, by the true spread and tax,
and how many of them decide. With few blocks, one of them more is much: only plans of many come
close to 80. `pilot` plans by a study of three blocks instead, where that one cannot tell.

`looks`: `connector-tax ab`, which looks after each block from the second on, until all is decided
or the blocks are used up; shares of runs with a verdict of any candidate.

`steps`: studies of six blocks in virtual time, whose connector adds 60 us to each step in its hooks
and 30 outside; shares of 95% intervals that hold the step's tax, the hooks' and what is left.
Hooks take in virtual time exactly what they are told to.

`virtual`: whole studies of three and five blocks in virtual time (docs/calibration.md), whose
launches differ in three ways; shares of the 95% intervals of seven known taxes that hold the tax
and of A/A intervals without zero; the smallest tax that costs, after Sidak, in 80% of the studies.
"""

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from rich.console import Console
from rich.table import Table

from benchmarks import parser_of, virtual_studies
from benchmarks.virtual_studies import (
    CELL,
    PHASE,
    RATE_RPS,
    SHAPE,
    machine_with,
    study_document,
)
from connector_tax.ab.design import FAMILY_LEVEL
from connector_tax.analysis.block_model import (
    Floats,
    Launches,
    huber,
)
from connector_tax.analysis.effect import Effect, Judged, family_levels, judge
from connector_tax.analysis.effects import LogSample, TaxTable
from connector_tax.analysis.looks import findings_of
from connector_tax.analysis.step_tables import step_rows
from connector_tax.analysis.steps import Hook, Steps
from connector_tax.artifacts.folder import CellFolder
from connector_tax.artifacts.looks import FIRST_LOOK, Finding, decided
from connector_tax.artifacts.metrics import VERDICT_METRICS
from connector_tax.artifacts.names import CellKey, Launch, plain_names
from connector_tax.artifacts.study_file import Study
from connector_tax.artifacts.study_file import launches as launches_of
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.artifacts.tables import DECODE, PREFILL, STEP_SAMPLES
from connector_tax.artifacts.verdicts import CANNOT_TELL, DECIDED, costs, gains
from connector_tax.engine.virtual import VirtualEngine
from connector_tax.machine import machine
from connector_tax.rehearsal.machine import Machine, slowness
from connector_tax.seeds import named_generator
from connector_tax.servers.embedded import launch_seed

PLAINS = plain_names(2)
TAXES = {"none": 0.0, "small": 0.02, "sought": 0.05, "large": 0.20}
NAMES = [*PLAINS, *TAXES]
SHIFTS = np.log1p([0.0] * len(PLAINS) + [*TAXES.values()])
BLOCKS, SD, BLOCK_SD = 6, 0.02, 0.02
CONFIDENCE, MARGIN, PILOT = 0.95, 0.03, 3
LEVELS = family_levels(CONFIDENCE, len(TAXES))
# Of `steps`: a configuration of the virtual studies, and the requests of a launch.
CONNECTOR, HOOKS_US, OUTSIDE_US, REQUESTS = "step_tax_60us", 60.0, 30.0, 40

# Errors of launches, by block and NAMES; `place` is where in its block each ran, 0 first.
Generator = Callable[[np.random.Generator, Floats], Any]


def _iid(rng: np.random.Generator, place: Floats, sd: Any = SD) -> Any:
    return rng.normal(0, sd, place.shape)


def _t3(rng: np.random.Generator, place: Floats) -> Any:
    return SD * rng.standard_t(3, place.shape) / np.sqrt(3)


def _bad(rng: np.random.Generator, place: Floats) -> Any:
    slower = np.log1p(rng.choice([0.2, 0.4], place.shape))
    return _iid(rng, place) + slower * (rng.random(place.shape) < 0.05)


def _walk(rng: np.random.Generator, place: Floats) -> Any:
    steps = np.cumsum(rng.normal(0, SD / 2, place.size)).reshape(place.shape)
    return _iid(rng, place) + np.take_along_axis(steps, place.astype(int), axis=1)


def _drift(rng: np.random.Generator, place: Floats) -> Any:
    slope = rng.normal(0, 0.05, (len(place), 1))
    return _iid(rng, place) + slope * place / (place.shape[1] - 1)


def _bursts(rng: np.random.Generator, place: Floats) -> Any:
    """In every other block two launches, one after the other, are slow."""
    first = rng.integers(place.shape[1] - 1, size=(len(place), 1))
    struck = (rng.random((len(place), 1)) < 0.5) & (place >= first) & (place <= first + 1)
    return _iid(rng, place) + 0.10 * struck


def _interaction(rng: np.random.Generator, place: Floats) -> Any:
    """Each configuration differs from block to block; both launches of plain by the same."""
    own = rng.normal(0, SD, place.shape)
    own[:, : len(PLAINS)] = own[:, :1]
    return _iid(rng, place) + own


GENERATORS: Mapping[str, Generator] = {
    "iid": _iid,
    "t3": _t3,
    "5% bad launches": _bad,
    "random walk": _walk,
    "drift in the block": _drift,
    "bursts": _bursts,
    "block x configuration": _interaction,
    "noisy configurations": partial(_iid, sd=SD * ~np.isin(NAMES, PLAINS) * 2 + SD),
    "noisy plain": partial(_iid, sd=SD * np.isin(NAMES, PLAINS) * 2 + SD),
    "spread grows with the tax": partial(_iid, sd=SD * (1 + 10 * SHIFTS)),
}


def study(rng: np.random.Generator, generator: Generator, blocks: int = BLOCKS) -> Launches:
    """The launches of one study."""
    place = rng.permuted(np.tile(np.arange(float(len(NAMES))), (blocks, 1)), axis=1)
    y = rng.normal(0, BLOCK_SD, (blocks, 1)) + SHIFTS + generator(rng, place)
    return Launches(np.tile(NAMES, blocks), np.repeat(np.arange(blocks), len(NAMES)), y.ravel())


def effect_of(launches: Launches, name: str) -> Effect:
    """A tax, as the analysis has it."""
    effect = launches.contrast(name, PLAINS, CONFIDENCE)
    assert effect is not None
    return effect


def generators(studies: int) -> Table:
    """Coverage, false positives and power under errors that the model does not have."""
    table = Table("launches", "held", "Huber", "A/A", "Huber", "5% found", "Huber", "s")
    for name, generator in GENERATORS.items():
        rng, began = named_generator(f"error model/{name}"), time.monotonic()
        shares = np.mean([_answers(study(rng, generator)) for _ in range(studies)], axis=0)
        table.add_row(name, *(f"{100 * share:.1f}" for share in shares),
                      f"{time.monotonic() - began:.0f}")  # fmt: skip
    return table


def _answers(launches: Launches) -> list[float]:
    effects = {name: effect_of(launches, name) for name in (*TAXES, PLAINS[-1])}
    robust = {
        name: own.interval(CONFIDENCE) if (own := huber(launches, name, PLAINS)) else (0.0, 0.0)
        for name in effects
    }
    aa, robust_aa = effects[PLAINS[-1]], robust[PLAINS[-1]]
    found = huber(launches, "sought", PLAINS)
    sought = found.interval(CONFIDENCE ** (1 / len(TAXES))) if found else None
    return [
        float(np.mean([effects[n].lo <= tax <= effects[n].hi for n, tax in TAXES.items()])),
        float(np.mean([
            robust[name][0] <= tax <= robust[name][1] for name, tax in TAXES.items()
        ])),
        not aa.lo <= 0 <= aa.hi,
        not robust_aa[0] <= 0 <= robust_aa[1],
        costs(judge(effects["sought"], MARGIN, LEVELS).verdict),
        sought is not None and sought[0] > 0,
    ]  # fmt: skip


def plans(studies: int) -> Table:
    """How many studies of a planned number of blocks decide."""
    table = Table("launches differ by", "tax", "blocks", "decide", "pilot: blocks", "decide")
    added = len(NAMES) - 1
    for sd, name in (
        (sd, name) for sd in (0.02, 0.03, 0.05) for name in ("none", "small", "sought")
    ):
        rng = named_generator(f"plans/{sd}/{name}")

        def judged(blocks: int) -> Judged:
            launches = study(rng, partial(_iid, sd=sd), blocks)  # noqa: B023
            return judge(effect_of(launches, name), MARGIN, LEVELS)  # noqa: B023

        error = sd * float(np.sqrt((1 + 1 / len(PLAINS)) / PILOT))
        df = PILOT * added - len(TAXES)
        pilot = tuple(range(PILOT))
        truth = Effect(float(np.log1p(TAXES[name])), error, df, pilot, added_df=added)
        blocks = truth.blocks_needed(MARGIN, LEVELS)
        pilots = [needed for _ in range(studies) if (needed := judged(PILOT).blocks_needed)]
        row = [[blocks] * studies if blocks else [], pilots]
        outcomes = [[judged(count).verdict in DECIDED for count in counts] for counts in row]
        table.add_row(
            f"{sd:.0%}", f"{TAXES[name]:.0%}", str(blocks), _share(outcomes[0]),
            f"{np.median(pilots):.0f}" if pilots else "-", _share(outcomes[1]),
        )  # fmt: skip
    return table


def _share(outcomes: list[bool]) -> str:
    return f"{100 * np.mean(outcomes):.1f} of {len(outcomes)}" if outcomes else "-"


def looks(studies: int) -> Table:
    """Verdicts of `ab` by tax, spread, blocks and candidates."""
    headings = ("costs", "faster", "cannot tell", "blocks used")
    table = Table("tax", "spread", "blocks", "candidates", *headings)
    for tax in (0.0, 0.02, 0.06):
        for sd in (0.005, 0.02):
            for blocks, candidates in ((3, 1), (8, 1), (8, 3)):
                rng = named_generator(f"ab/{tax}/{sd}/{blocks}/{candidates}")
                runs = [_run(rng, tax, sd, blocks, candidates) for _ in range(studies)]
                shares = [
                    np.mean([any(is_(finding.verdict) for finding in found) for _, found in runs])
                    for is_ in (costs, gains, lambda verdict: verdict == CANNOT_TELL)
                ]
                table.add_row(f"{tax:.0%}", f"{sd:.1%}", str(blocks), str(candidates),
                              *(f"{100 * share:.1f}" for share in shares),
                              f"{np.mean([used for used, _ in runs]):.1f}")  # fmt: skip
    return table


def _run(
    rng: np.random.Generator, tax: float, sd: float, blocks: int, candidates: int
) -> tuple[int, list[Finding]]:
    """The blocks it took, and what was said of each candidate when it left."""
    plains = plain_names(2, "baseline")
    names = [f"candidate{chr(97 + number)}" for number in range(candidates)]
    levels = [FAMILY_LEVEL / (blocks - 1)] * (blocks - 1)
    order = [{"config": name, "block": b} for b in range(blocks) for name in (*plains, *names)]
    statistics = {"confidence": CONFIDENCE, "looks": levels, "confirmatory": [],
                  "margins": dict.fromkeys(VERDICT_METRICS, MARGIN)}  # fmt: skip
    document: Any = {
        "blocks": blocks, "run_order": {"A": order},
        "cells": {"A": [{"cell": CELL, "rate_rps": 1}]},
        "config": {"statistics": statistics, "baseline": plains[0]},
        "configurations": [{"id": name} for name in (plains[0], *names)],
    }  # fmt: skip
    samples: dict[CellKey, dict[str, LogSample]] = {}
    kept: dict[str, list[Finding]] = {}
    for block in range(blocks):
        for metric in VERDICT_METRICS:
            shift = rng.normal(0, BLOCK_SD)
            for name in (*plains, *(n for n in names if n not in kept)):
                mean = shift + (0.0 if name in plains else np.log1p(tax))
                of = samples.setdefault(CellKey(name, block, "A", CELL), {})
                of[metric] = LogSample(float(mean + rng.normal(0, sd)), 1)
        if block + 1 >= FIRST_LOOK:
            taxes = TaxTable(Study(Path(), document), [], samples, {}, block + 1)
            findings = findings_of(taxes, block + 1)
            for name in decided(findings) - kept.keys():
                kept[name] = [finding for finding in findings if finding.config == name]
            if len(kept) == candidates:
                break
    last = [f for f in findings if f.config not in kept]
    return block + 1, [*last, *(finding for found in kept.values() for finding in found)]


def steps(studies: int) -> Table:
    """Coverage of the step table: a connector with HOOKS_US in its hooks and OUTSIDE_US beside."""
    truths = {"step_us": HOOKS_US + OUTSIDE_US, "hooks_us": HOOKS_US, "left_us": OUTSIDE_US}
    table = Table("launches", "steps", *truths)
    for spread in ("engine", "vllm-cpu"):
        found: dict[tuple[str, str], list[bool]] = {}
        for number in range(studies):
            document = study_document("jittered", number, BLOCKS, [CONNECTOR])
            study, machine = Study(Path(), document), machine_with(spread)
            each = {
                CellKey(launch.config, launch.block, PHASE, CELL): _steps(document, launch, machine)
                for launch in launches_of(document, PHASE)
            }
            planned = [
                CellFolder(key, "valid", None, Path(), {}, None, RATE_RPS, *SHAPE) for key in each
            ]
            for row in step_rows(study, planned, each, None):
                if row["config"] == CONNECTOR and row.get("item") and row["metric"] in truths:
                    held = row["lo"] - 1e-9 <= truths[row["metric"]] <= row["hi"] + 1e-9
                    found.setdefault((row["item"], row["metric"]), []).append(held)
        for item in dict.fromkeys(item for item, _ in found):
            table.add_row(spread, item, *(_share(found[item, metric]) for metric in truths))
    return table


def _steps(document: StudyDocument, launch: Launch, machine: Machine) -> Steps:
    """The steps of a launch that answers one request at a time."""
    served = machine.engines[launch.configuration]
    taxed = launch.configuration == CONNECTOR
    cost = served.step_cost
    if taxed:
        served = replace(served, step_cost=replace(cost, delta_us=cost.delta_us + OUTSIDE_US))
    slow = slowness(machine.noise, document, launch)
    engine = VirtualEngine(served, launch_seed(document, launch), None, slow)
    kinds, took_us = [], []
    for seq in range(REQUESTS):
        engine.add(seq, *SHAPE)
        for token in range(SHAPE[1]):
            began_ns = engine.now_ns
            engine.step()
            kinds.append(PREFILL if token == 0 else DECODE)
            took_us.append((engine.now_ns - began_ns) / 1e3)
    samples = dict.fromkeys(STEP_SAMPLES, took_us)
    table = pl.DataFrame({"kind": kinds, **samples})
    hooks = {Hook("scheduler", "", "build_meta"): np.full(len(kinds), HOOKS_US * taxed)}
    return Steps(table, hooks if taxed else {}, 0, np.zeros(0, np.int64))


TABLES = {"generators": generators, "plans": plans, "looks": looks, "steps": steps,
          "virtual": virtual_studies.table}  # fmt: skip


def main() -> int:
    """Print the tables."""
    parser = parser_of(__file__, __doc__)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"of {', '.join(TABLES)}; all")
    parser.add_argument("--studies", type=int, default=500, help="of each row")
    arguments = parser.parse_args()
    if unknown := sorted({*arguments.tables} - {*TABLES}):
        parser.error(f"TABLE: found {', '.join(unknown)}; allowed: {', '.join(TABLES)}")
    console = Console(width=100)
    console.print(f"{machine('numpy', 'scipy')}\n{arguments.studies} studies a row")
    for name in arguments.tables or TABLES:
        began = time.monotonic()
        console.print(TABLES[name](arguments.studies), f"{name}: {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Simulate seeded studies with known taxes in virtual time, and analyse them.

A study has one cell, plain and seven configurations of known step tax, the number of the real
study, so that the adjustment for multiplicity is the same. Cell and statistics come from
config/config.yaml, step costs from config/embedded.yaml.

The true tax is exp(mean over launches of log(p_X / p_plain)) - 1 over many virtual launches. Plain
and the taxed configuration of such a launch share arrivals, launch offset and jitter, which cancels
most of the noise. The spread between launches changes the tax by less than a hundredth, so launches
without spread are used.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from dataclasses import asdict, replace
from functools import cache, partial
from itertools import chain, pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from connector_tax.analysis.effect import POWER
from connector_tax.analysis.effects import LogSample, TaxTable, sample_launch, tax_rows
from connector_tax.analysis.measure import Requests
from connector_tax.analysis.step_tables import step_rows
from connector_tax.analysis.steps import Hook, Steps
from connector_tax.artifacts.folder import CellFolder
from connector_tax.artifacts.metrics import HEADLINE
from connector_tax.artifacts.names import PHASES, PLAIN, REFERENCES, CellKey, Launch, plain_names
from connector_tax.artifacts.study_file import Study, launches
from connector_tax.artifacts.study_records import StudyConfig, StudyDocument
from connector_tax.artifacts.tables import DECODE, PREFILL, STEP_SAMPLES, Row
from connector_tax.artifacts.verdicts import costs
from connector_tax.config import DEFAULTS, load_yaml, validate
from connector_tax.engine.config import EngineConfig
from connector_tax.engine.virtual import VirtualEngine
from connector_tax.loadgen.traffic import make_offsets
from connector_tax.rehearsal.launch import VirtualCell
from connector_tax.rehearsal.machine import Machine, machine_of
from connector_tax.seeds import named_generator
from connector_tax.servers.embedded import launch_seed
from connector_tax.study.cell import cell_rule
from connector_tax.study.design import cells_of, resolve, run_order

AA = plain_names(2)[-1]
PHASE, CELL, RATE_RPS, SHAPE = "A", "r60", 60.0, (64, 8)
ARRIVALS = ("jittered", "poisson")
BLOCKS = (3, 5)
# us added to every step; the emulated step without prefill takes 3.03 ms.
STEP_TAX_US = {f"step_tax_{us}us": float(us) for us in (15, 30, 60, 90, 150, 240, 360)}
# The engine takes a tax as callbacks; the shares are arbitrary, only the sum matters here.
CALLBACK_SHARES = {"build_meta_us": 0.5, "get_finished_us": 0.3, "start_load_kv_us": 0.2}


# For the step table: a connector of STEP_TAX_US, and the requests of a launch.
CONNECTOR, HOOKS_US, OUTSIDE_US, REQUESTS, STEP_BLOCKS = "step_tax_60us", 60.0, 30.0, 40, 6
# Slowdowns of a bad launch.
SLOW_BY = (0.2, 0.4)


class Noise(NamedTuple):
    """The differences between launches of one configuration, relative to a step's time.

    Attributes:
        launch_sd: standard deviation between launches.
        bad_share: share of launches that are slow from start to end, by one of SLOW_BY.
        drift_sd: standard deviation of a block's last launch's slowdown relative to its first.
    """

    launch_sd: float
    bad_share: float = 0.0
    drift_sd: float = 0.0


SPREADS: Mapping[str, Noise] = {
    # That of the engine's own random draws in config/embedded.yaml.
    "engine": Noise(0.005),
    # TPOT p50 of the cells of results/archive/vllm-cpu.tar.zst of commit b3c47e2, by release 0.3.
    "vllm-cpu": Noise(0.026, drift_sd=0.017),
    # Assumed: one launch in 20 is bad, and more drift.
    "hostile": Noise(0.026, 0.05, drift_sd=0.05),
}


def slowness(noise: Noise, study: StudyDocument, launch: Launch) -> float:
    """Return a launch's step time relative to an undisturbed launch in the middle of its block."""
    order = [
        entry["config"]
        for entry in study["run_order"][launch.phase]
        if entry["block"] == launch.block
    ]
    place = order.index(launch.config) / max(1, len(order) - 1) - 0.5
    name = f"{study['seed']}/noise"
    slope = named_generator(f"{name}/block{launch.block}/{launch.phase}").normal(0, noise.drift_sd)
    generator = named_generator(f"{name}/{launch.name}")
    bad = generator.random() < noise.bad_share
    return float(np.exp(slope * place) * (1 + bad * generator.choice(SLOW_BY)))


def study_document(
    arrivals: str, seed: int, blocks: int, taxed: Sequence[str] = tuple(STEP_TAX_US)
) -> StudyDocument:
    """Return `study.json` for a study of the configurations `taxed` (ids from STEP_TAX_US)."""
    document = deepcopy(_default())
    config: Any = document["config"]
    config["engine"]["definition_content"] = _engine_definition()
    config |= {"seed": seed, "blocks": blocks, "plain_launches": 2}
    config["configurations"] = [PLAIN, *taxed]
    config["arrivals"]["process"] = arrivals
    shape = {"input_tokens": SHAPE[0], "output_tokens": SHAPE[1]}
    config["phase_a"] = {"rates_rps": [RATE_RPS], **shape}
    config.pop("phase_b", None)
    config.pop("phase_bp", None)
    entry = document["configurations"][0]
    document["configurations"] = [
        {**entry, "id": name, "label": name} for name in config["configurations"]
    ]
    document["seed"], document["blocks"], document["run_order"] = seed, blocks, run_order(config)
    document["cells"] = {phase: cells_of(config, phase) for phase in PHASES}
    return document


@cache
def _default() -> StudyDocument:
    return resolve({**load_yaml(DEFAULTS / "config.yaml"), "study": "virtual"}, "virtual")


@cache
def _engine_definition() -> dict[str, Any]:
    definition: dict[str, Any] = load_yaml(DEFAULTS / "embedded.yaml")
    nothing = {
        "admission_us_per_request": 0.0,
        "build_meta_us_per_cached_block": 0.0,
        "kv_capacity_fraction": 1.0,
        "background_cpu": 0.0,
    }
    definition["connectors"] = {PLAIN: None} | {
        name: {**{key: share * tax for key, share in CALLBACK_SHARES.items()}, **nothing}
        for name, tax in STEP_TAX_US.items()
    }
    validate(definition, "embedded", "virtual")
    return definition


@cache
def machine_with(spread: str) -> Machine:
    """Return the engine of these studies with the launch noise `spread`, one of SPREADS."""
    return machine_of(study_document("jittered", 0, 1)).noisy(SPREADS[spread].launch_sd)


def engine_of_launch(
    engine: EngineConfig, spread: str, document: StudyDocument, launch: Launch
) -> VirtualEngine:
    """Return a launch of `engine`, as slow as `spread` makes it."""
    slow = slowness(SPREADS[spread], document, launch)
    us = {k: v * slow for k, v in asdict(engine.step_cost).items() if "_us" in k}
    engine = replace(engine, step_cost=replace(engine.step_cost, **us))
    return VirtualEngine(engine, launch_seed(document, launch))


def serve(engine: VirtualEngine, config: StudyConfig, arrivals: str) -> Requests:
    """Serve one cell and return its requests; `arrivals` seeds their send times."""
    rule = replace(cell_rule(config, PHASE), cooldown=False)
    process = config["arrivals"]["process"]
    offsets = make_offsets(process, RATE_RPS, rule.schedule_s, arrivals)
    cell = VirtualCell(offsets, rule, SHAPE, round(config["metrics"]["interval_s"] * 1e9))
    cell.serve(engine)
    plan = cell.plan
    assert plan.stop_ns is not None
    records = [record for record in plan.requests() if record.measured]
    names = ("t_intended_ns", "t_first_token_ns", "t_last_token_ns")
    due, first, last = np.array([[getattr(r, n) for n in names] for r in records], np.int64).T
    ttft_ms, gaps = (first - due) / 1e6, SHAPE[1] - 1
    start_ns = plan.warmup_end_ns
    return Requests(
        ttft_ms, ttft_ms, (last - first) / gaps / 1e6, (last - due) / 1e6, (due - start_ns) / 1e9,
        (plan.stop_ns - start_ns) / 1e9, len(records), failed=0, dropped=0,
    )  # fmt: skip


def virtual_study(spread: str, arrivals: str, number: int) -> list[Row]:
    """Run study `number`; return a row for each number of blocks (BLOCKS), tax and metric.

    A study of fewer blocks consists of the largest one's first blocks.
    """
    document = study_document(arrivals, number, max(BLOCKS))
    config = document["config"]
    samples: dict[CellKey, dict[str, LogSample]] = {}
    for launch in launches(document, PHASE):
        # As in a study, all configurations share the same arrivals.
        name = f"{document['seed']}/arrivals/block{launch.block}/{PHASE}/{CELL}"
        key = CellKey(launch.config, launch.block, PHASE, CELL)
        engine = machine_with(spread).engines[launch.configuration]
        served = serve(engine_of_launch(engine, spread, document, launch), config, name)
        samples[key] = sample_launch(served)
    cells = [CellFolder(key, "valid", None, Path(), {}, None, RATE_RPS, *SHAPE) for key in samples]
    rows = []
    for count in BLOCKS:
        study = Study(Path(), document | {"blocks": count})
        taxes = TaxTable(study, cells, samples, dict.fromkeys(REFERENCES, RATE_RPS))
        rows += [
            {"number": number, "blocks": count, **row}
            for row in tax_rows(taxes)
            if row["metric"] in HEADLINE and row["cell"] == CELL
        ]
    return rows


def log_ratios(arrivals: str, number: int) -> list[tuple[str, str, float]]:
    """Return each configuration's log percentile minus plain's in one launch, by metric."""
    config, name = study_document(arrivals, 0, 1)["config"], f"truth/{arrivals}/launch{number}"
    drawn = int(named_generator(f"{name}/offset").integers(2**31))
    served = {
        config_id: sample_launch(serve(VirtualEngine(engine, drawn), config, f"{name}/arrivals"))
        for config_id, engine in machine_with("engine").engines.items()
    }
    return [
        (config_id, metric, estimates[metric].point - served[PLAIN][metric].point)
        for metric in HEADLINE
        for config_id, estimates in served.items()
    ]


def true_taxes(ratios: Sequence[tuple[str, str, float]]) -> dict[tuple[str, str], float]:
    """Return the true tax as a fraction (0.1 is +10%) by configuration and metric."""
    values: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for config, metric, ratio in ratios:
        values[config, metric].append(ratio)
    return {(AA, metric): 0.0 for metric in HEADLINE} | {
        key: float(np.expm1(np.mean(logs))) for key, logs in values.items()
    }


def smallest_found(rows: Sequence[Row], truths: Mapping[tuple[str, str], float]) -> float | None:
    """Return the smallest tax that 80% of the studies detect; None if even the largest is missed.

    Between two levels it is interpolated linearly.
    """
    decided_by_tax: defaultdict[float, list[bool]] = defaultdict(list)
    for row in rows:
        decided_by_tax[truths[row["config"], row["metric"]]].append(costs(row["verdict"]))
    curve = [
        (0.0, 0.0),
        *sorted((tax, float(np.mean(decided))) for tax, decided in decided_by_tax.items()),
    ]
    for (left, below), (right, above) in pairwise(curve):
        if below < POWER <= above:
            return left + (right - left) * (POWER - below) / (above - below)
    return None


def table(studies: int) -> Table:
    """Return a table of coverage, A/A intervals that exclude zero, and smallest detected taxes."""
    table = Table("launches", "arrivals", "metric", "blocks", "held", "A/A", "found in 80%")
    with ProcessPoolExecutor() as pool:
        for arrivals in ARRIVALS:
            launched = pool.map(partial(log_ratios, arrivals), range(3 * studies), chunksize=8)
            truths = true_taxes([*chain.from_iterable(launched)])
            for spread in SPREADS:
                made = pool.map(partial(virtual_study, spread, arrivals), range(studies))
                rows = [*chain.from_iterable(made)]
                for metric, count in product(HEADLINE, BLOCKS):
                    matching_rows = [
                        r for r in rows if (r["metric"], r["blocks"]) == (metric, count)
                    ]
                    table.add_row(
                        spread, arrivals, metric, str(count), *_shares(matching_rows, truths)
                    )
    return table


def _shares(rows: Sequence[Row], truths: Mapping[tuple[str, str], float]) -> list[str]:
    aa, taxed = [r for r in rows if r["config"] == AA], [r for r in rows if r["config"] != AA]
    held = [r["lo"] <= truths[r["config"], r["metric"]] <= r["hi"] for r in taxed]
    off = [not row["lo"] <= 0 <= row["hi"] for row in aa]
    smallest = smallest_found(taxed, truths)
    largest = max(tax for (_, metric), tax in truths.items() if metric == rows[0]["metric"])
    detectable = f"more than {100 * largest:.1f}" if smallest is None else f"{100 * smallest:.1f}"
    return [f"{100 * np.mean(held):.1f}", f"{100 * np.mean(off):.1f}", detectable]


# ---- steps


def steps(studies: int) -> Table:
    """Return the step table's coverage, for a connector with HOOKS_US in hooks and OUTSIDE_US
    outside.
    """
    truths = {"step_us": HOOKS_US + OUTSIDE_US, "hooks_us": HOOKS_US, "left_us": OUTSIDE_US}
    table = Table("launches", "steps", *truths)
    for spread in ("engine", "vllm-cpu"):
        held_by_metric: dict[tuple[str, str], list[bool]] = {}
        for number in range(studies):
            document = study_document("jittered", number, STEP_BLOCKS, [CONNECTOR])
            study = Study(Path(), document)
            each = {
                CellKey(launch.config, launch.block, PHASE, CELL): _steps(document, launch, spread)
                for launch in launches(document, PHASE)
            }
            planned = [
                CellFolder(key, "valid", None, Path(), {}, None, RATE_RPS, *SHAPE) for key in each
            ]
            for row in step_rows(study, planned, each, None):
                if row["config"] == CONNECTOR and row.get("item") and row["metric"] in truths:
                    held = row["lo"] - 1e-9 <= truths[row["metric"]] <= row["hi"] + 1e-9
                    held_by_metric.setdefault((row["item"], row["metric"]), []).append(held)
        for item in dict.fromkeys(item for item, _ in held_by_metric):
            table.add_row(
                spread, item, *(_share(held_by_metric[item, metric]) for metric in truths)
            )
    return table


def _steps(document: StudyDocument, launch: Launch, spread: str) -> Steps:
    """Return the steps of a launch that answers one request at a time."""
    served = machine_with(spread).engines[launch.configuration]
    taxed = launch.configuration == CONNECTOR
    cost = served.step_cost
    if taxed:
        served = replace(served, step_cost=replace(cost, delta_us=cost.delta_us + OUTSIDE_US))
    engine = engine_of_launch(served, spread, document, launch)
    kinds, took_us = [], []
    for seq in range(REQUESTS):
        engine.add(seq, *SHAPE)
        for token in range(SHAPE[1]):
            began_ns = engine.now_ns
            engine.step()
            kinds.append(PREFILL if token == 0 else DECODE)
            took_us.append((engine.now_ns - began_ns) / 1e3)
    samples = dict.fromkeys(STEP_SAMPLES, np.array(took_us))
    hooks = {Hook("scheduler", "", "build_meta"): np.full(len(kinds), HOOKS_US * taxed)}
    return Steps(np.array(kinds), samples, hooks if taxed else {}, 0, np.zeros(0, np.int64))


def _share(outcomes: Sequence[bool]) -> str:
    return f"{100 * np.mean(outcomes):.1f} of {len(outcomes)}"

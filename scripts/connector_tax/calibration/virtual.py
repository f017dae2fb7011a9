"""Seeded studies in virtual time and the real analysis of them; the true taxes of the same cells.

The study has one cell, plain, and seven configurations of known step tax, as many as the real
study, so that the adjustment for them costs what it costs there. Cell and statistics rules are
those of config/config.yaml, the step costs those of config/embedded.yaml; the prompt is shorter, so
that two cores can emulate the cell over HTTP.

The tax of the analysis is exp(mean over launches of log(p_X / p_plain)) - 1, and its interval
speaks of the launches there could have been: each with its own offset and jitter, arrivals drawn
afresh, and a cell of the study's length. The true value is the same with the mean taken over many
virtual launches. Plain and the taxed configuration of a launch share arrivals, launch offset and
jitter, which leaves the expectation of the difference of logs unchanged and takes most of its noise
away. How launches differ moves it by less than a hundredth of itself, so it is that of equal ones.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pandas as pd
from scipy.special import stdtrit
from scipy.stats import binomtest, sem

from connector_tax.analysis.block_model import POWER
from connector_tax.analysis.effects import LogSample, TaxTable, sample_launch, tax_rows
from connector_tax.analysis.ingest import Cell
from connector_tax.analysis.measure import Requests
from connector_tax.artifacts.metrics import HEADLINE
from connector_tax.artifacts.names import PHASES, PLAIN, REFERENCES, CellKey, plain_names
from connector_tax.artifacts.study_file import Study, launches
from connector_tax.artifacts.study_records import CellSection, StudyConfig, StudyDocument
from connector_tax.artifacts.tables import Row
from connector_tax.artifacts.verdicts import costs
from connector_tax.config import DEFAULTS, load_yaml, validate
from connector_tax.engine.virtual import VirtualEngine
from connector_tax.loadgen import make_offsets
from connector_tax.rehearsal.launch import VirtualCell, answer_tasks, virtual_engine
from connector_tax.rehearsal.machine import NOISES, Machine, machine_of
from connector_tax.seeds import named_generator
from connector_tax.study.cell import cell_rule
from connector_tax.study.design import cells_of, resolve, run_order

PLAIN_LAUNCHES = 2
AA = plain_names(PLAIN_LAUNCHES)[-1]  # the launch of plain that is compared with the others
PHASE = "A"
RATE_RPS = 60.0
CELL = "r60"
SHAPE = (64, 8)
Arrivals = Literal["jittered", "poisson"]
ARRIVALS: tuple[Arrivals, ...] = ("jittered", "poisson")
# Added to every step; 3.03 ms is the emulated step without prefill.
STEP_TAX_US: Mapping[str, float] = {
    f"step_tax_{us}us": float(us) for us in (15, 30, 60, 90, 150, 240, 360)
}
# How launches differ: rows of `rehearsal.machine.NOISES`.
SPREADS = ("engine", "vllm-cpu", "hostile")
# The engine knows a tax by its callbacks; the shares are arbitrary, the sum is what counts here.
CALLBACK_SHARES = {"build_meta_us": 0.5, "get_finished_us": 0.3, "start_load_kv_us": 0.2}

# ---- the study


def study_document(
    arrivals: Arrivals,
    seed: int,
    blocks: int,
    taxed: Sequence[str] = tuple(STEP_TAX_US),
    *,
    cell: Mapping[str, float] | None = None,
    faults: Sequence[Mapping[str, Any]] = (),
) -> StudyDocument:
    """The content of `study.json` of one calibration study.

    Args:
        arrivals: jittered or poisson.
        seed: the study's seed; everything random in it follows.
        blocks: launches of each configuration.
        taxed: ids of STEP_TAX_US.
        cell: values that replace those of the `cell` section.
        faults: rules of the engine's `faults` section; none: no such section.
    """
    document = deepcopy(_default())
    config = document["config"]
    config["engine"]["definition_content"] = _engine_definition(faults)
    config["seed"], config["blocks"], config["plain_launches"] = seed, blocks, PLAIN_LAUNCHES
    config["configurations"] = [PLAIN, *taxed]
    config["arrivals"]["process"] = arrivals
    config["phase_a"] = {
        "rates_rps": [RATE_RPS],
        "input_tokens": SHAPE[0],
        "output_tokens": SHAPE[1],
    }
    config["cell"] = cast(CellSection, {**config["cell"], **(cell or {})})
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
    return resolve({**load_yaml(DEFAULTS / "config.yaml"), "study": "calibration"}, "calibration")


def _engine_definition(faults: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The embedded engine's file with the calibration's connectors, checked against its schema."""
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
    if faults:
        definition["faults"] = {"seed": 1, "rules": [dict(rule) for rule in faults]}
    validate(definition, "embedded", "calibration")
    return definition


@cache
def machine_with(spread: str) -> Machine:
    """The engine of these studies with launches that differ as `spread` of SPREADS says."""
    return machine_of(study_document("jittered", 0, 1)).noisy(NOISES[spread])


# ---- in virtual time


def serve(engine: VirtualEngine, config: StudyConfig, arrivals: str) -> Requests:
    """The requests of one cell whose arrivals, none after its window, are of this stream's name."""
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


def known_taxes(
    study: Study, cells: Sequence[Cell], samples: Mapping[CellKey, dict[str, LogSample]]
) -> list[Row]:
    """The taxes of a study of the calibration, as the analysis finds them."""
    taxes = TaxTable(study, cells, samples, dict.fromkeys(REFERENCES, RATE_RPS))
    names = ("config", "metric", "estimate", "lo", "hi", "verdict", "p_adjusted")
    return [
        {name: row.get(name) for name in names}
        for row in tax_rows(taxes)
        if row["metric"] in HEADLINE and row["cell"] == CELL
    ]


def virtual_study(
    spread: str, arrivals: Arrivals, number: int, seed: int, blocks: Sequence[int]
) -> list[Row]:
    """Run study `number` and analyse it with each count of blocks: a row for each tax.

    A study of fewer blocks is the first blocks of the largest one.
    """
    document = study_document(arrivals, seed + number, max(blocks))
    machine, config = machine_with(spread), document["config"]
    samples: dict[CellKey, dict[str, LogSample]] = {}
    for launch in launches(document, PHASE):
        # As in a study, arrivals are named without the configuration: all get the same.
        name = f"{document['seed']}/arrivals/block{launch.block}/{PHASE}/{CELL}"
        key = CellKey(launch.config, launch.block, PHASE, CELL)
        samples[key] = sample_launch(serve(virtual_engine(document, launch, machine), config, name))
    cells = [Cell(key, "valid", None, Path(), {}, None, RATE_RPS, *SHAPE) for key in samples]
    where = {"spread": spread, "arrivals": arrivals, "study": number}
    return [
        {**where, "blocks": count, **row}
        for count in blocks
        for row in known_taxes(Study(Path(), document | {"blocks": count}), cells, samples)
    ]


def log_ratios(config: StudyConfig, number: int, seed: int) -> list[Row]:
    """A launch's log percentiles minus plain's, a row for each configuration and metric.

    Args:
        config: of `study_document`; its arrivals and its cell are meant.
        number: of the launch.
        seed: names the random streams; another seed is an independent estimate.
    """
    name = f"{seed}/truth/{config['arrivals']['process']}/launch{number}"
    drawn = int(named_generator(f"{name}/offset").integers(2**31))
    served = {
        config_id: sample_launch(serve(VirtualEngine(engine, drawn), config, f"{name}/arrivals"))
        for config_id, engine in machine_with("engine").engines.items()
    }
    return [
        {
            "config": config_id,
            "metric": metric,
            "log_ratio": own[metric].point - served[PLAIN][metric].point,
        }
        for metric in HEADLINE
        for config_id, own in served.items()
    ]


def true_taxes(ratios: Sequence[Row]) -> pd.Series:
    """The true tax as a fraction (0.1 is +10%) by configuration and metric, of these log ratios."""
    means = pd.DataFrame(ratios).groupby(["config", "metric"]).log_ratio.mean()
    aa = pd.Series(0.0, pd.MultiIndex.from_product([[AA], HEADLINE]))
    taxes: pd.Series = pd.concat([np.expm1(means), aa]).rename("truth")
    return taxes.rename_axis(["config", "metric"])


# ---- what many studies say: coverage, A/A false positives, power

KEYS = ["spread", "arrivals", "metric", "blocks"]


def with_truth(outcomes: pd.DataFrame, truths: Mapping[str, pd.Series]) -> pd.DataFrame:
    """The rows of `virtual_study` with the true tax (by arrivals), and what became of each."""
    table = outcomes.merge(pd.concat(truths, names=["arrivals"]).reset_index())
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
        aa, taxed = part[part.config == AA], part[part.config != AA]
        by_study = taxed.groupby("study").covered.mean().to_numpy()
        n = len(by_study)
        curve = taxed.groupby("config")[["truth", "detected"]].mean().sort_values("truth")
        points = [(0.0, 0.0), *curve.itertuples(index=False, name=None)]
        excluded = int(aa.excludes_zero.sum())
        bounds = binomtest(excluded, len(aa)).proportion_ci(0.95, method="exact")
        rows.append(
            dict(zip(KEYS, key, strict=True))
            | {
                "studies": n,
                "covered": by_study.mean(),
                "covered_within": (float(stdtrit(n - 1, 0.975) * sem(by_study)) if n > 1 else None),
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


if __name__ == "__main__":
    SIMULATIONS: dict[str, Callable[..., Any]] = {"study": virtual_study, "truth": log_ratios}
    answer_tasks(lambda name, *task: SIMULATIONS[name](*task))

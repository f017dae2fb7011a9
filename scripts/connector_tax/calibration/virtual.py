"""Seeded studies in virtual time and the real analysis of them; the true taxes of the same cells.

The tax of the analysis is exp(mean over launches of log(p_X / p_plain)) - 1, and its interval
speaks of the launches there could have been: each with its own offset and jitter, arrivals drawn
afresh, and a cell of the study's length. The true value is the same with the mean taken over many
virtual launches. Plain and the taxed configuration of a launch share arrivals, launch offset and
jitter, which leaves the expectation of the difference of logs unchanged and takes most of its noise
away. How launches differ moves it by less than a hundredth of itself, so it is that of equal ones.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from connector_tax.analysis.aggregate import sample_cells
from connector_tax.analysis.effects import LogSample, Tables, TaxTable, tax_rows
from connector_tax.analysis.ingest import Cell
from connector_tax.analysis.measure import Requests
from connector_tax.artifacts.metrics import HEADLINE, LATENCY_METRICS
from connector_tax.artifacts.names import PLAIN, CellKey, configuration_of
from connector_tax.artifacts.stage_records import RatesRecord
from connector_tax.artifacts.study_file import Study, launches
from connector_tax.artifacts.study_records import StudyConfig
from connector_tax.artifacts.tables import Row
from connector_tax.calibration.design import (
    AA,
    CELL,
    PHASE,
    RATE_RPS,
    SHAPE,
    Arrivals,
    machine_with,
    study_document,
)
from connector_tax.engine.virtual import VirtualEngine
from connector_tax.loadgen import make_offsets
from connector_tax.rehearsal.cell import VirtualCell
from connector_tax.rehearsal.launch import virtual_engine
from connector_tax.rehearsal.processes import answer_tasks
from connector_tax.seeds import named_generator
from connector_tax.study.cell import cell_rule

# What reference_rates.json of a study of one rate holds.
KNOWN_RATES: RatesRecord = {
    "ref_safe": RATE_RPS,
    "ref_load": RATE_RPS,
    "rates_rps": [RATE_RPS],
    "saturation_rate_rps": {},
    "criteria": {},
    "left_out": {},
    "fallback_used": False,
}
# By configuration and metric, a number of each launch.
Logs = dict[str, dict[str, list[float]]]


@dataclass(frozen=True)
class TrueTax:
    """A tax in fractions (0.1 is +10%) and the standard error of its Monte-Carlo estimate."""

    tax: float
    standard_error: float


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
    table = TaxTable(study, cells, samples)
    names = ("config", "metric", "estimate", "lo", "hi", "verdict", "p_adjusted")
    return [
        {name: row.get(name) for name in names}
        for row in tax_rows(Tables(study, table, KNOWN_RATES))
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
    requests: dict[CellKey, Requests] = {}
    for launch in launches(document, PHASE):
        # As in a study, arrivals are named without the configuration: all get the same.
        name = f"{document['seed']}/arrivals/block{launch.block}/{PHASE}/{CELL}"
        key = CellKey(launch.config, launch.block, PHASE, CELL)
        requests[key] = serve(virtual_engine(document, launch, machine), config, name)
    samples = sample_cells(requests)
    cells = [
        Cell(
            key, configuration_of(key.config), "valid", None, Path(), {}, None, RATE_RPS, *SHAPE, ()
        )
        for key in requests
    ]
    where = {"spread": spread, "arrivals": arrivals, "study": number}
    return [
        {**where, "blocks": count, **row}
        for count in blocks
        for row in known_taxes(Study(Path(), document | {"blocks": count}), cells, samples)
    ]


def log_ratios(config: StudyConfig, first: int, count: int, seed: int) -> Logs:
    """By configuration and metric, each launch's log percentile minus plain's.

    Args:
        config: of `study_document`; its arrivals and its cell are meant.
        first, count: numbers of the launches.
        seed: names the random streams; another seed is an independent estimate.
    """
    engines = machine_with("engine").engines
    ratios: Logs = {name: {metric: [] for metric in HEADLINE} for name in engines}
    for launch in range(first, first + count):
        name = f"{seed}/truth/{config['arrivals']['process']}/launch{launch}"
        drawn = int(named_generator(f"{name}/offset").integers(2**31))
        logs = {
            config_id: _log_percentiles(
                serve(VirtualEngine(engine, drawn), config, f"{name}/arrivals")
            )
            for config_id, engine in engines.items()
        }
        for config_id, metric in ((c, m) for c in engines for m in HEADLINE):
            ratios[config_id][metric].append(logs[config_id][metric] - logs[PLAIN][metric])
    return ratios


def _log_percentiles(requests: Requests) -> dict[str, float]:
    of = {metric: LATENCY_METRICS[metric] for metric in HEADLINE}
    return {
        name: float(np.log(np.percentile(getattr(requests, metric.latency), metric.percent)))
        for name, metric in of.items()
    }


def true_taxes(shares: Sequence[Logs]) -> dict[tuple[str, str], TrueTax]:
    """(configuration, metric) to the true tax, of the log ratios of at least two launches."""
    taxes = {}
    for name, metric in ((n, m) for n in shares[0] for m in HEADLINE):
        values = np.concatenate([share[name][metric] for share in shares])
        tax = float(np.expm1(values.mean()))
        error = (1 + tax) * float(np.std(values, ddof=1) / np.sqrt(len(values)))
        taxes[name, metric] = TrueTax(tax, error)
    return taxes | {(AA, metric): TrueTax(0.0, 0.0) for metric in HEADLINE}


if __name__ == "__main__":
    SIMULATIONS: dict[str, Callable[..., Any]] = {"study": virtual_study, "truth": log_ratios}
    answer_tasks(lambda name, *task: SIMULATIONS[name](*task))

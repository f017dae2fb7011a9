"""Pairs of virtual studies whose taxes differ by known factors, compared and gated.

A is the study of `design`. B runs on another machine: its steps cost a quarter more, its launches
differ half as much again, it has more blocks, and one of its connectors has become slower and
one faster. So nothing is equal but what must be found equal, and the two studies bring unequal
degrees of freedom. Arrivals are Poisson's, drawn apart.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from connector_tax.analysis.rows import pooled_quantile
from connector_tax.artifacts.names import PLAIN, configuration_of
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.artifacts.tables import TaxRow
from connector_tax.calibration.design import (
    AA,
    CELL,
    PHASE,
    RATE_RPS,
    SHAPE,
    CellTimes,
    engine_configs,
)
from connector_tax.calibration.design import study_document as document_of
from connector_tax.calibration.studies import METRICS, Samples, simulate, tax_table
from connector_tax.calibration.truth import Logs, launch_logs
from connector_tax.compare.contrast import Known
from connector_tax.compare.gate import ABOVE, BELOW, BoundCheck, judge
from connector_tax.compare.rows import AA as AA_PAIR
from connector_tax.compare.rows import (
    LATENCY,
    TAX,
    ComparedRow,
    Side,
    compared,
    judged,
    latency_side,
    tax_side,
)
from connector_tax.engine.config import EngineConfig
from connector_tax.loadgen import make_offsets
from connector_tax.seeds import named_generator

BLOCKS = {"A": 3, "B": 5}
# Configuration to the connector that it is in B.
IN_B = {
    "step_tax_30us": "step_tax_30us",
    "step_tax_90us": "step_tax_240us",
    "step_tax_150us": "step_tax_150us",
    "step_tax_360us": "step_tax_150us",
}
COST_FACTOR, SPREAD_FACTOR = 1.25, 1.5
# The gate's bounds, off the true tax of A.
OFFSETS = (0.0, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04)
MARGIN, CONFIDENCE = 0.03, 0.95


@cache
def engines() -> dict[str, dict[str, EngineConfig]]:
    """The engines of both sides, by launch name."""
    a = engine_configs("equal")
    b = {}
    for name in (PLAIN, AA, *IN_B):
        engine = a[IN_B.get(name, name)]
        cost = engine.step_cost
        dearer = {
            field: COST_FACTOR * getattr(cost, field)
            for field in ("delta_us", "beta0_us", "beta1_us_per_prefill_token")
        }
        spread = SPREAD_FACTOR * cost.launch_offset_rel_sd
        b[name] = replace(engine, step_cost=replace(cost, **dearer, launch_offset_rel_sd=spread))
    return {"A": {name: a[name] for name in b}, "B": b}


def virtual_pair(number: int, seed: int) -> list[dict[str, Any]]:
    """Pair `number`: every comparison as compare.csv has it, and A's taxes as a gate has them."""
    taxes: dict[str, dict[tuple[str, str], Side]] = {}
    latencies: dict[str, dict[tuple[str, str], Side]] = {}
    for side, blocks in BLOCKS.items():
        study_seed = int(named_generator(f"{seed}/pair{number}/{side}").integers(2**31))
        document = document_of("poisson", study_seed, blocks, tuple(IN_B))
        samples = simulate(document, engines()[side])
        taxes[side] = dict(_taxes(document, samples))
        latencies[side] = dict(_latencies(samples))
    rows = []
    for quantity, sides in ((TAX, taxes), (LATENCY, latencies)):
        for config, metric in sides["A"]:
            blank = ComparedRow(quantity, config, PHASE, CELL, RATE_RPS, *SHAPE, metric, "", "log",
                        margin=MARGIN)  # fmt: skip
            a, b = (sides[name][config, metric] for name in ("A", "B"))
            rows.append(compared(blank, a, b, CONFIDENCE))
    gated = {
        key: {"point": side.known.point, "error": side.known.error, "df": side.known.df}
        for key, side in taxes["A"].items()
    }
    return [
        {"pair": number, **vars(row), "gate": gated.get((row.config, row.metric))}
        for row in judged(rows, CONFIDENCE)
    ]


def _taxes(document: StudyDocument, samples: Samples) -> Iterator[tuple[tuple[str, str], Side]]:
    for row in tax_table(document, samples)[1]:
        side = tax_side(TaxRow(**row), CONFIDENCE)
        assert isinstance(side, Side)
        yield (AA_PAIR if row["config"] == AA else row["config"], row["metric"]), side


def _latencies(samples: Samples) -> Iterator[tuple[tuple[str, str], Side]]:
    for config in (PLAIN, *IN_B):
        for metric in METRICS:
            rows = [
                {"block": key.block, f"{metric}_ms": float(np.exp(sample[metric].point))}
                for key, sample in samples.items()
                if configuration_of(key.config) == config
            ]
            value, lo, hi = pooled_quantile(metric, rows, CONFIDENCE).values()
            blocks = len({row["block"] for row in rows})
            yield (config, metric), latency_side(value, lo, hi, blocks, CONFIDENCE)


def pair_logs(first: int, launches: int, cell: CellTimes, seed: int) -> Logs:
    """By `A config` or `B config` and metric, the log percentiles of many launches.

    Both sides of a launch share arrivals, offset and jitter, which leaves the expectation of a
    difference unchanged.

    Args:
        first: number of the first launch.
        launches: virtual launches of each configuration and side from there on.
        cell: `warmup_s` and `floor_s` of each launch's cell, in s.
        seed: names the random streams.
    """
    both = {f"{side} {name}": engine for side, own in engines().items()
            for name, engine in own.items() if name != AA}  # fmt: skip
    logs: Logs = {name: {metric: [] for metric in METRICS} for name in both}
    for launch in range(first, first + launches):
        name = f"{seed}/pair truth/launch{launch}"
        span = cell["warmup_s"] + cell["floor_s"]
        offsets = make_offsets("poisson", RATE_RPS, span, f"{name}/arrivals")
        measured = offsets >= round(cell["warmup_s"] * 1e9)
        launch_seed = int(named_generator(f"{name}/offset").integers(2**31))
        for key, by_metric in launch_logs(both, launch_seed, offsets, measured).items():
            for metric in METRICS:
                logs[key][metric].append(by_metric[metric])
    return logs


def truths(logs: Logs) -> dict[tuple[str, str, str], tuple[float, float]]:
    """(quantity, configuration, metric) to the true log ratio, B over A, and its standard error.

    Under the quantity `A`: the log of A's own tax plus one.
    """
    known = {}
    for metric in METRICS:
        a, b = ({c: np.array(logs[f"{s} {c}"][metric]) for c in (PLAIN, *IN_B)} for s in BLOCKS)
        known[TAX, AA_PAIR, metric] = (0.0, 0.0)
        for config in (PLAIN, *IN_B):
            latency = b[config] - a[config]
            known[LATENCY, config, metric] = _mean(latency)
            if config != PLAIN:
                known[TAX, config, metric] = _mean(latency - (b[PLAIN] - a[PLAIN]))
                known["A", config, metric] = _mean(a[config] - a[PLAIN])
    return known


def _mean(values: np.ndarray[Any, Any]) -> tuple[float, float]:
    return float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values)))


def gate_results(
    gates: Sequence[Mapping[str, float]], truth: float, offset: float, comparisons: int = 1
) -> dict[str, float]:
    """How often taxes of one true value are called below and above a bound that is `offset` off.

    Args:
        gates: point, error and df of each tax, on the scale of logs.
        truth: the true log.
        offset: the bound less the true tax, a fraction.
        comparisons: taxes judged together.
    """
    bound = float(np.expm1(truth)) + offset
    results = [one_gate(gate, bound, comparisons) for gate in gates]
    return {name: float(np.mean([r == name for r in results])) for name in (BELOW, ABOVE)}


def one_gate(gate: Mapping[str, float], bound: float, comparisons: int = 1) -> str:
    """What the gate says of one tax."""
    known = Known(gate["point"], gate["error"], gate["df"])
    side = Side(float(np.expm1(known.point)), None, None, known, BLOCKS["A"])
    together = 1 - (1 - CONFIDENCE) / comparisons
    return judge(BoundCheck("", "", bound, "", ""), side, together).result

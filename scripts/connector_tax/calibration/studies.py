"""Seeded studies in virtual time, taken through the real analysis, and what each one concluded."""

import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from connector_tax.analysis.bootstrap import block_draws, hierarchical_mean, interval
from connector_tax.analysis.effects import LogSample, TaxTable, sample_launch
from connector_tax.analysis.ingest import Cell, CellKey, Study
from connector_tax.analysis.measure import read_requests
from connector_tax.analysis.taxes import Tables, tax_rows
from connector_tax.calibration.design import (
    CELL,
    PHASE,
    PLAIN,
    RATE_RPS,
    SHAPE,
    STEP_TAX_US,
    engine_configs,
    study_document,
)
from connector_tax.calibration.virtual import request_records, serve
from connector_tax.engine.config import EngineConfig
from connector_tax.loadgen import make_offsets
from connector_tax.seeds import named_generator
from connector_tax.study.design import Launch, launch_seed, launches

ORIGIN_NS = 10**15
NS = 1_000_000_000
METRICS = ("ttft_p90", "tpot_p90")

Samples = Mapping[CellKey, dict[str, LogSample]]


@dataclass(frozen=True)
class Outcome:
    """One tax of one study, as analysis/taxes.csv has it, and the two intervals it chose from.

    Attributes:
        t_lo, t_hi: Student's t on the block values alone, as fractions.
        boot_lo, boot_hi: the hierarchical bootstrap alone.
    """

    arrivals: str
    study: int
    blocks: int
    config: str
    metric: str
    tax: float
    lo: float
    hi: float
    method: str
    verdict: str
    p_value: float
    p_holm: float
    t_lo: float
    t_hi: float
    boot_lo: float
    boot_hi: float


@cache
def _engines() -> dict[str, EngineConfig]:
    return engine_configs()


def virtual_study(
    arrivals: str, number: int, seed: int, blocks: tuple[int, ...]
) -> list[dict[str, Any]]:
    """Run study `number` and analyse it with each count of blocks; its outcomes as dicts.

    A study of fewer blocks is the first blocks of the largest one.
    """
    document = study_document(arrivals, seed + number, max(blocks), tuple(STEP_TAX_US))
    samples: dict[CellKey, dict[str, LogSample]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for launch in launches(document, PHASE):
            key = CellKey(launch.config, launch.block, PHASE, CELL)
            samples[key] = _sample(document, launch, key, Path(folder) / "requests.jsonl")
    return [
        asdict(outcome)
        for count in blocks
        for outcome in _outcomes(arrivals, number, {**document, "blocks": count}, samples)
    ]


def _sample(
    document: Mapping[str, Any], launch: Launch, key: CellKey, path: Path
) -> dict[str, LogSample]:
    rules = document["config"]["cell"]
    warmup_end = ORIGIN_NS + round(rules["warmup_s"] * NS)
    stop = warmup_end + round(rules["floor_s"] * NS)
    # As in the study, arrivals are named without the configuration: all get the same.
    offsets = make_offsets(
        document["config"]["arrivals"]["process"],
        RATE_RPS,
        rules["warmup_s"] + rules["floor_s"],
        f"{document['seed']}/arrivals/block{launch.block}/{PHASE}/{CELL}",
    ).tolist()
    tokens = serve(_engines()[launch.config], launch_seed(document, launch), offsets, SHAPE)
    records = request_records(ORIGIN_NS, warmup_end, offsets, tokens, SHAPE)
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
    requests = read_requests(path, None, {"t_warmup_end_ns": warmup_end, "t_stop_ns": stop})
    return sample_launch(requests, document["config"]["statistics"], document["seed"], key)


def analysed(document: Mapping[str, Any], samples: Samples) -> list[dict[str, Any]]:
    """The rows of analysis/taxes.csv of a calibration study from its samples."""
    study = Study(Path(), document)
    table = TaxTable(study, [_cell(key) for key in samples], samples)
    rates = {"ref_safe": RATE_RPS, "ref_load": RATE_RPS, "saturation_rate_rps": {}}
    return tax_rows(Tables(study, table, rates, {}))


def _cell(key: CellKey) -> Cell:
    configuration = PLAIN if key.config == "plain_last" else key.config
    return Cell(key, configuration, "valid", None, Path(), {}, None, RATE_RPS, *SHAPE)


def _outcomes(
    arrivals: str, number: int, document: Mapping[str, Any], samples: Samples
) -> list[Outcome]:
    blocks = document["blocks"]
    outcomes = []
    for row in analysed(document, samples):
        if row["metric"] not in METRICS:
            continue
        t, boot = _both_intervals(document, samples, row["config"], row["metric"])
        numbers = {
            name: row[name] for name in ("config", "metric", "tax", "verdict", "p_value", "p_holm")
        }
        outcomes.append(
            Outcome(
                arrivals=arrivals,
                study=number,
                blocks=blocks,
                lo=row["tax_lo"],
                hi=row["tax_hi"],
                method=row["interval_method"],
                t_lo=t[0],
                t_hi=t[1],
                boot_lo=boot[0],
                boot_hi=boot[1],
                **numbers,
            )
        )
    return outcomes


def _both_intervals(
    document: Mapping[str, Any], samples: Samples, config: str, metric: str
) -> tuple[tuple[float, float], tuple[float, float]]:
    """The t interval and the bootstrap interval the analysis printed the wider of."""
    statistics, blocks = document["config"]["statistics"], document["blocks"]
    pairs = [
        (samples[CellKey(config, b, PHASE, CELL)], samples[CellKey(PLAIN, b, PHASE, CELL)])
        for b in range(blocks)
    ]
    points = np.array([ours[metric].point - plain[metric].point for ours, plain in pairs])
    replicates = np.array(
        [ours[metric].replicates - plain[metric].replicates for ours, plain in pairs]
    )
    rng = named_generator(f"{document['seed']}/bootstrap/{blocks} blocks")
    means = hierarchical_mean(points, replicates, block_draws(blocks, statistics["resamples"], rng))
    tail = (1 - statistics["confidence"]) / 2
    low, high = np.expm1(np.quantile(means, [tail, 1 - tail]))
    # Without any spread in the replicates the wider of the two is the t interval.
    mean = float(points.mean())
    t = interval(mean, points, np.full(2, mean), statistics["confidence"])
    assert t.lo is not None
    assert t.hi is not None
    return (float(np.expm1(t.lo)), float(np.expm1(t.hi))), (float(low), float(high))

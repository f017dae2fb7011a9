"""Seeded studies in virtual time, taken through the real analysis, and what each one concluded."""

import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import msgspec
import numpy as np

from connector_tax.analysis.effects import TaxTable
from connector_tax.analysis.ingest import Cell
from connector_tax.analysis.measure import Requests, read_requests
from connector_tax.analysis.samples import LogSample, chunk_seconds, sample_launch
from connector_tax.analysis.taxes import Tables, tax_rows
from connector_tax.artifacts.names import CellKey, Launch, configuration_of
from connector_tax.artifacts.stage_records import RatesRecord
from connector_tax.artifacts.study_file import Study, launches
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.artifacts.tables import Row
from connector_tax.calibration.design import (
    CELL,
    PHASE,
    RATE_RPS,
    SHAPE,
    STEP_TAX_US,
    Arrivals,
    engine_configs,
    study_document,
)
from connector_tax.calibration.virtual import request_records, serve
from connector_tax.engine.config import EngineConfig
from connector_tax.loadgen import make_offsets
from connector_tax.loadgen.messages import STUDY_FIELDS
from connector_tax.servers.embedded import launch_seed

ORIGIN_NS = 10**15
NS = 1_000_000_000
METRICS = ("ttft_p90", "tpot_p90")
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

Samples = Mapping[CellKey, dict[str, LogSample]]


@dataclass(frozen=True)
class TaxOutcome:
    """One tax of one study, as effects.csv has it, and the block model's interval alone.

    Attributes:
        spread: of `design.SPREADS`.
        model_lo, model_hi: without the bootstrap, as fractions.
    """

    spread: str
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
    p_adjusted: float
    model_lo: float
    model_hi: float


@cache
def _engines(spread: str) -> dict[str, EngineConfig]:
    return engine_configs(spread)


def virtual_study(
    spread: str, arrivals: Arrivals, number: int, seed: int, blocks: tuple[int, ...]
) -> list[Row]:
    """Run study `number` and analyse it with each count of blocks; its outcomes as dicts.

    A study of fewer blocks is the first blocks of the largest one.
    """
    document = study_document(arrivals, seed + number, max(blocks), tuple(STEP_TAX_US))
    samples = simulate(document, _engines(spread))
    return [
        asdict(outcome)
        for count in blocks
        for outcome in _outcomes(spread, arrivals, number, document | {"blocks": count}, samples)
    ]


def simulate(document: StudyDocument, engines: Mapping[str, EngineConfig]) -> Samples:
    """Run the launches of Phase A of a study in virtual time; the samples of every cell.

    Args:
        document: the content of study.json.
        engines: by launch name.
    """
    statistics = document["config"]["statistics"]
    requests: dict[CellKey, Requests] = {}
    with tempfile.TemporaryDirectory() as folder:
        for launch in launches(document, PHASE):
            key = CellKey(launch.config, launch.block, PHASE, CELL)
            path = Path(folder) / "requests.jsonl"
            requests[key] = _serve(document, launch, engines[launch.config], path)
    chunk_s = chunk_seconds(requests, statistics["chunk_s"])[PHASE, CELL]
    return {
        key: sample_launch(measured, statistics["resamples"], chunk_s, document["seed"], key)
        for key, measured in requests.items()
    }


def _serve(document: StudyDocument, launch: Launch, engine: EngineConfig, path: Path) -> Requests:
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
    tokens = serve(engine, launch_seed(document, launch), offsets, SHAPE)
    records = request_records(ORIGIN_NS, warmup_end, offsets, tokens, SHAPE)
    lines = (msgspec.json.encode(record.fields(STUDY_FIELDS)) + b"\n" for record in records)
    path.write_bytes(b"".join(lines))
    return read_requests(path, None, {"t_warmup_end_ns": warmup_end, "t_stop_ns": stop})


def _outcomes(
    spread: str, arrivals: str, number: int, document: StudyDocument, samples: Samples
) -> list[TaxOutcome]:
    study = Study(Path(), document)
    table = TaxTable(study, [_cell(key) for key in samples], samples, {})
    rows = tax_rows(Tables(study, table, KNOWN_RATES))
    outcomes = []
    for row in (row for row in rows if row["metric"] in METRICS):
        model = _model_interval(table, row["config"], row["metric"])
        names = ("config", "metric", "verdict", "p_adjusted")
        outcomes.append(
            TaxOutcome(
                spread=spread,
                arrivals=arrivals,
                study=number,
                blocks=document["blocks"],
                tax=row["estimate"],
                lo=row["lo"],
                hi=row["hi"],
                method=row["method"],
                p_value=row["p"],
                model_lo=model[0],
                model_hi=model[1],
                **{name: row[name] for name in names},
            )
        )
    return outcomes


def _cell(key: CellKey) -> Cell:
    configuration = configuration_of(key.config)
    return Cell(key, configuration, "valid", None, Path(), {}, None, RATE_RPS, *SHAPE, ())


def _model_interval(table: TaxTable, config: str, metric: str) -> tuple[float, float]:
    """The block model's 95% interval, which the analysis prints where the bootstrap's is inside."""
    effect = table.tax(config, PHASE, CELL, metric)
    assert effect is not None
    half = effect.estimate.half_width(0.95)
    assert half is not None
    low, high = np.expm1([effect.estimate.point - half, effect.estimate.point + half])
    return float(low), float(high)

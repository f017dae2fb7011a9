"""Launches in virtual time: what the driver of a launch does, its cells served by `rehearsal.cell`.

Order of cells, arrivals, the rule by which a cell ends, the reasons to leave one out and the checks
it must pass are the driver's own (`study.launch`). A folder as a driver leaves it comes of it, so
that the analysis reads it as it reads any study.
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from connector_tax.analysis.measure import WAITING, summarise_cell
from connector_tax.analysis.validity import assess, void_reasons
from connector_tax.artifacts import paths
from connector_tax.artifacts.cell_records import (
    CellRecord,
    GeneratorHealth,
    RequestLine,
    is_answered,
)
from connector_tax.artifacts.index import CellEntry, finished_cell, launch_index, write_index
from connector_tax.artifacts.names import Launch
from connector_tax.artifacts.rates import cell_rates, shape_limits
from connector_tax.artifacts.study_file import read_study
from connector_tax.artifacts.study_records import CellPlan, StudyDocument
from connector_tax.engine.virtual import VirtualEngine
from connector_tax.files import sha256_file, write_bytes, write_json
from connector_tax.loadgen import CellResult
from connector_tax.loadgen.messages import STUDY_FIELDS
from connector_tax.rehearsal.cell import VirtualCell
from connector_tax.rehearsal.machine import Machine, machine_of
from connector_tax.rehearsal.noise import slowness
from connector_tax.rehearsal.processes import answer_tasks
from connector_tax.servers.embedded import launch_seed
from connector_tax.study.cell import PreparedCell, cell_record, cell_rule, prepare
from connector_tax.study.design import cell_order
from connector_tax.study.launch import MEASUREMENTS_OF_A_VOID_CELL, launch_skip_reason
from connector_tax.study.plan import reference_rate

BEGUN = "1970-01-01T00:00:00+00:00"
# What a load generator that never lags says of itself.
HEALTHY: GeneratorHealth = {
    "processes": {
        name: {
            **dict.fromkeys(("loop_lag_p99_ms", "loop_lag_max_ms", "cpu_share"), 0.0),
            **dict.fromkeys(("undecodable", "oversized", "dropped_messages", "late_results"), 0),
        }
        for name in ("main", "worker0")
    },
    "workers": 1,
    "workers_died": [],
    "connections_per_worker": 1,
    "connections": {"worker0": 1},
}


def virtual_engine(study: StudyDocument, launch: Launch, machine: Machine) -> VirtualEngine:
    """The engine that a launch is, in virtual time."""
    return VirtualEngine(
        machine.engines[launch.configuration],
        launch_seed(study, launch),
        machine.device_us,
        slowness(machine.noise, study, launch),
    )


def rehearse_launch(study: StudyDocument, launch: Launch, root: Path, machine: Machine) -> None:
    """Write what the launch would leave, below the study's folder `root`."""
    folder = launch.folder(root)
    folder.mkdir(parents=True, exist_ok=True)
    reason = launch_skip_reason(root, launch)
    cells = cell_order(study, launch)
    seconds = startup_s = release_s = 0.0
    if reason is None:
        status, rate = "done", reference_rate(root, launch.phase)
        startup_s, release_s = machine.startup_s, float(study["config"]["server"]["release_s"])
        rates = cell_rates(study, launch.phase, rate, shape_limits(study, root, launch.phase))
        engine = virtual_engine(study, launch, machine)
        entries, summary = [], {}
        for cell in cells:
            offered = rates[cell["cell"]]
            assert offered is not None
            record = _rehearse_cell(study, launch, cell, offered, engine, machine, folder)
            seconds += record["rehearsed"]["seconds"]
            entries.append(finished_cell(record, folder / cell["cell"]))
            summary[cell["cell"]] = summarise_cell(folder / cell["cell"])
        # What a look reads.
        write_json(folder / paths.SUMMARY, summary)
    else:
        status, rate = "skipped", None
        entries = [CellEntry(cell["cell"], status, reason, {}) for cell in cells]
    timing = {"startup_s": startup_s, "cells_s": seconds, "release_s": release_s}
    index = launch_index(
        study, launch, entries, status=status, reason=reason, rate_rps=rate, started_utc=BEGUN,
        ended_utc=BEGUN, timing=timing,
    )  # fmt: skip
    write_index(folder, index)


def _rehearse_cell(
    study: StudyDocument,
    launch: Launch,
    planned: CellPlan,
    rate_rps: float,
    engine: VirtualEngine,
    machine: Machine,
    launch_folder: Path,
) -> CellRecord:
    """Serve one cell and write its folder; the content of its record."""
    config, name = study["config"], planned["cell"]
    prepared = prepare(study, launch, planned, rate_rps, attempt=1, measurement=1)
    rule = cell_rule(config, launch.phase)
    shape = (planned["input_tokens"], planned["output_tokens"])
    scrape_ns = round(config["metrics"]["interval_s"] * 1e9)
    cell = VirtualCell(prepared.offsets_ns, rule, shape, scrape_ns, machine.front_ns)
    began_ns, preempted = engine.now_ns, engine.scheduler.preemptions
    cell.serve(engine)
    result = CellResult.of(cell.plan, engine.now_ns, "worker", HEALTHY)
    records = [cast(RequestLine, record.fields(STUDY_FIELDS)) for record in result.records]
    record = _judged(study, launch, prepared, cell, result, records)
    seconds = (engine.now_ns - began_ns) / 1e9
    again = not record["valid"] and result.cooldown_ended_by != "overloaded"
    inflight = [scrape.inflight for scrape in cell.scrapes if scrape.t_ns < result.t_stop_ns]
    record["rehearsed"] = {
        "seconds": seconds * (MEASUREMENTS_OF_A_VOID_CELL if again else 1),
        "load": cell.busy_ns / (engine.now_ns - began_ns),
        "inflight_p50": float(np.median(inflight)),
        "inflight_max": max(inflight),
        "preemptions": engine.scheduler.preemptions - preempted,
    }
    folder = launch_folder / name
    folder.mkdir(parents=True)
    scrapes = (
        {"t_ns": s.t_ns, "ok": True, "scrape_ms": 0.0, "values": {WAITING: float(s.waiting)}}
        for s in cell.scrapes
    )
    lines: dict[str, Iterable[Any]] = {"requests": records, "metrics": scrapes, "engine_step": ()}
    for kind, values in lines.items():
        content = b"".join(msgspec.json.encode(value) + b"\n" for value in values)
        write_bytes(folder / paths.cell_log(kind, launch.phase, name), content)
    record["files"] = {path.name: sha256_file(path) for path in sorted(folder.iterdir())}
    write_json(folder / paths.cell_record(launch.phase, name), record)
    return record


def _judged(
    study: StudyDocument,
    launch: Launch,
    prepared: PreparedCell,
    cell: VirtualCell,
    result: CellResult,
    records: list[RequestLine],
) -> CellRecord:
    """The cell's record, judged as a measured one is; the machine is taken to be undisturbed."""
    config = study["config"]
    record = cell_record(study, launch, prepared, result, records, BEGUN)
    ok = [r for r in records if is_answered(r)]
    counters: dict[str, float | None] = {
        "success": len(ok),
        "prompt_tokens": sum(r["prompt_tokens"] for r in ok),
        "generation_tokens": sum(r["completion_tokens"] for r in ok),
        "prefix_cache_hits": 0,
        "external_prefix_cache_hits": 0,
    }
    checks = assess(
        records=records,
        planned=record["counts"]["planned"],
        shape=cell.shape,
        window=record["window"],
        cell=config["cell"],
        wanted=config["cell"]["min_completed"],
        suspended_ms=0,
        counters={"before": dict.fromkeys(counters, 0), "after": counters},
        scrapes=[{"t_ns": s.t_ns, "ok": True} for s in cell.scrapes],
        health=HEALTHY,
        clock="worker",
        bounds=config["validity"],
    )
    reasons = void_reasons(checks)
    return {
        **record,
        "health": checks,
        "valid": not reasons,
        "void_reasons": reasons,
        "files": {},
    }


if __name__ == "__main__":
    ROOT = Path(sys.argv[1])
    STUDY = read_study(ROOT / paths.STUDY)
    MACHINE = machine_of(STUDY)
    answer_tasks(lambda *launch: rehearse_launch(STUDY, Launch(*launch), ROOT, MACHINE))

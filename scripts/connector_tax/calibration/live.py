"""The calibration over real HTTP: small studies of a known tax, and a cell with each fault.

One launch is the study's own server, load generator, sampler and cell, plus the engine's truth log,
which a study does not ask for. Server and client stamp one clock (CLOCK_MONOTONIC), so their stamps
subtract directly. The server stamps right before it writes; what lies between is the kernel, the
wake-up and the client.

A fault of what the client is told (a cut stream, an error, a wrong count, a cache hit, an
unreadable /metrics) must void the cell or fail the launch. A fault that only changes how correct
bytes are packed or how long the server takes must not: the cell stays valid, and its stamps must
still be those of the truth log.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pandas as pd

from connector_tax.analysis.effects import sample_launch
from connector_tax.analysis.ingest import load_cells
from connector_tax.analysis.measure import measure_requests
from connector_tax.analysis.validity import in_window
from connector_tax.artifacts import paths
from connector_tax.artifacts.cell_records import (
    AnsweredRequest,
    CellRecord,
    RequestLine,
    is_answered,
)
from connector_tax.artifacts.index import finished_cell, launch_index, write_index
from connector_tax.artifacts.names import PLAIN, Launch
from connector_tax.artifacts.study_file import launches, load_study
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.calibration.virtual import (
    PHASE,
    known_taxes,
    log_ratios,
    study_document,
    true_taxes,
)
from connector_tax.engine.logs import LaunchTruth, RequestTruth
from connector_tax.files import read_jsonl, write_json
from connector_tax.servers.kinds import ServerError, command_for, free_port
from connector_tax.study import cell as cells
from connector_tax.study.device import devices_of, hold_devices
from connector_tax.study.processes import ServerProcesses
from connector_tax.study.scraper import MetricsSampler
from connector_tax.study.server import Server
from connector_tax.study.server_command import affinity_plan, server_cpus
from connector_tax.study.steplog import LaunchStepLog

TRUTH_LOG = "truth.jsonl"
READY_S = 30.0
Say = Callable[[str], None]

# ---- a launch


@dataclass(frozen=True)
class LiveCell:
    """A measured cell, its requests, and what the server knows of each (by request id)."""

    record: CellRecord
    requests: list[RequestLine]
    truth: dict[str, RequestTruth]

    def errors(self, of: Callable[[RequestTruth], bool] = lambda _: True) -> pd.DataFrame:
        """A row for each measured success that the server knows as `of` wants it.

        Columns: `first_us`, `last_us`: the client's stamp of the first and the last token minus the
        server's write; `late_us`: the server's first write minus the end of the step that made the
        token; `ttft_ms`, `tpot_ms` as the client measured them, and `true_ttft_ms`, `true_tpot_ms`
        from the server's writes.
        """
        measured = in_window(self.requests, self.record["window"])
        rows = [
            _row(request, self.truth[request["request_id"]])
            for request in measured
            if is_answered(request) and of(self.truth[request["request_id"]])
        ]
        return pd.DataFrame(rows)


def _row(request: AnsweredRequest, truth: RequestTruth) -> dict[str, float]:
    writes = [(t, deadline) for t, tokens, deadline in truth.writes if tokens]
    (first, deadline), (last, _) = writes[0], writes[-1]
    gaps = request["completion_tokens"] - 1
    t_first, t_last = request["t_first_token_ns"], request["t_last_token_ns"]
    intended = request["t_intended_ns"]
    return {
        "first_us": (t_first - first) / 1e3,
        "last_us": (t_last - last) / 1e3,
        "late_us": (first - deadline) / 1e3,
        "ttft_ms": (t_first - intended) / 1e6,
        "tpot_ms": (t_last - t_first) / gaps / 1e6,
        "true_ttft_ms": (first - intended) / 1e6,
        "true_tpot_ms": (last - first) / gaps / 1e6,
    }


def measure_launch(document: StudyDocument, launch: Launch, root: Path) -> LiveCell:
    """Launch the engine, measure its only cell once, stop it, write its index.json.

    Raises:
        ServerError: the server did not start, or ended during the cell.
        DeviceError: something else is measured on the device.
    """
    folder, config = launch.folder(root), document["config"]
    folder.mkdir(parents=True)
    planned = document["cells"][PHASE][0]
    rate_rps = planned["rate_rps"]
    assert rate_rps is not None
    with contextlib.ExitStack() as stack:
        stack.enter_context(hold_devices(devices_of(config)))
        plan = affinity_plan(document)
        if plan.enabled:
            stack.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))
            os.sched_setaffinity(0, plan.loadgen)
        port = free_port()
        command = command_for(document, launch, port)
        command = replace(command, argv=[*command.argv, "--truth-log", TRUTH_LOG])
        title = f"calibration {launch.name}"
        server = Server(folder, command, title, port, server_cpus(plan))
        server.start()
        stack.callback(server.stop, config["server"]["stop_grace_s"])
        interval_s = config["metrics"]["interval_s"]
        sampler = stack.enter_context(MetricsSampler(server.url, interval_s, ()))
        server.wait_ready(READY_S)
        generator = stack.enter_context(cells.load_generator(document, server, plan))
        step_log = LaunchStepLog(folder, config["engine"])
        processes = ServerProcesses(server.pid, {})
        record = cells.measure(
            document,
            launch,
            cells.prepare(document, launch, planned, rate_rps, attempt=1, measurement=1),
            cells.Instruments(server, processes, generator, sampler, step_log, watch=None),
            lambda _: None,
        )
    entry = finished_cell(record, folder / planned["cell"])
    started_utc = record["window"]["started_utc"]
    write_index(folder, launch_index(document, launch, [entry], started_utc=started_utc))
    requests = folder / planned["cell"] / paths.cell_log("requests", PHASE, planned["cell"])
    return LiveCell(record, list(read_jsonl(requests)), _read_truth(folder / TRUTH_LOG))


def _read_truth(path: Path) -> dict[str, RequestTruth]:
    """The requests of an engine's truth log, by request id."""
    decoder = msgspec.json.Decoder(LaunchTruth | RequestTruth)
    records = decoder.decode_lines(path.read_bytes())
    return {r.request_id: r for r in records if isinstance(r, RequestTruth)}


# ---- studies of a known tax

TAXED = "step_tax_240us"
# Short cells: a launch's start-up takes most of its time either way.
STUDY_CELL = {"warmup_s": 0.3, "floor_s": 2.0, "cap_s": 2.0, "min_completed": 1}


def measure_studies(
    root: Path, studies: int, blocks: int, truth_launches: int, seed: int, say: Say
) -> dict[str, Any]:
    """Measure `studies` studies of one known tax and of plain: their taxes, cells and stamps.

    Returns:
        taxes: each with the true one. cells: how many; not_valid: of each that was not, why;
        again: of each that was void at first, why. stamps: percentiles of the stamps' errors, us.
        p90_errors: of each cell's TTFT and TPOT p90, measured over true, minus 1.
    """
    config = study_document("jittered", seed, 1, (TAXED,), cell=STUDY_CELL)["config"]
    ratios = (row for launch in range(truth_launches) for row in log_ratios(config, launch, seed))
    truths = true_taxes([*ratios])
    taxes, stamps, not_valid, again = [], [], [], []
    for number in range(studies):
        own_seed = seed + 10_000 + number
        document = study_document("jittered", own_seed, blocks, (TAXED,), cell=STUDY_CELL)
        folder = root / f"study{number}"
        for launch in launches(document, PHASE):
            live = measure_launch(document, launch, folder)
            if not live.record["valid"]:
                # As in a study, a void cell is measured once more; here with a launch of its own.
                again.append({"launch": launch.name, "reasons": live.record["void_reasons"]})
                shutil.rmtree(launch.folder(folder))
                live = measure_launch(document, launch, folder)
            stamps.append(live.errors())
        write_json(folder / paths.STUDY, document)
        study = load_study(folder / paths.STUDY)
        measured = load_cells(study, PHASE)
        valid = [cell for cell in measured if cell.status == "valid"]
        not_valid += [f"{c.key}: {c.status}, {c.reason}" for c in measured if c.status != "valid"]
        samples = {cell.key: sample_launch(measure_requests(cell)) for cell in valid}
        for row in known_taxes(study, measured, samples):
            truth = float(truths[row["config"], row["metric"]])
            covered = None if row["lo"] is None else bool(row["lo"] <= truth <= row["hi"])
            taxes.append({"study": number, **row, "truth": truth, "covered": covered})
        say(f"http: {number + 1} of {studies} studies")
    every = pd.concat(stamps)
    p90 = [cell.quantile(0.9) for cell in stamps]
    return {
        "taxes": taxes,
        "cells": len(stamps),
        "not_valid": not_valid,
        "again": again,
        "requests": len(every),
        "stamps": {
            name: list(np.percentile(every[name], (50, 90, 99)))
            for name in ("first_us", "last_us", "late_us")
        },
        "p90_errors": {
            name: [cell[f"{name}_ms"] / cell[f"true_{name}_ms"] - 1 for cell in p90]
            for name in ("ttft", "tpot")
        },
    }


# ---- faults

VOID, VALID, FAILED = "void", "valid", "failed"
FAULT_CELL = {
    "warmup_s": 0.3,
    "floor_s": 1.5,
    "cap_s": 1.5,
    "min_completed": 1,
    "request_timeout_s": 3.0,
}
# Only the fault may void a cell here, whatever else this machine is doing.
VALIDITY = {
    "schedule_lag_p99_ms": 1000.0,
    "schedule_lag_ttft_fraction": 1.0,
    "sent_rate_tolerance": 0.9,
    "loop_lag_p99_ms": 1000.0,
    "loop_lag_max_ms": 10_000.0,
    "max_cpu_share": 1.0,
}
SHARE = 0.2
# A stamp taken at the wrong event is off by at least a step, 3 ms.
STAMP_ERROR_MAX_US = 1000.0
SCRAPE_S = 0.25


class Case(NamedTuple):
    """A fault rule, and what must become of its cell.

    Attributes:
        name: of the row; the kind, with what tells two cases of one kind apart.
        rule: of the engine's `faults` section.
        expected: void, valid, or failed (the launch, so that no cell is kept).
        must_name: part of the void reason or of the launch's failure; for a valid cell, why it is.
    """

    name: str
    rule: Mapping[str, Any]
    expected: str
    must_name: str


def _struck(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"kind": kind, "probability": SHARE, **parameters}


CASES = (
    Case("fin", _struck("fin", after_tokens=2), VOID, "error_rate"),
    Case("rst", _struck("rst", after_tokens=2), VOID, "error_rate"),
    Case("error_event", _struck("error_event", after_tokens=2), VOID, "error_rate"),
    Case("no_done", _struck("no_done"), VOID, "error_rate"),
    Case("http_429", _struck("http_429"), VOID, "error_rate"),
    Case("http_500", _struck("http_500"), VOID, "error_rate"),
    Case("wrong_length +1", _struck("wrong_length", tokens=1), VOID, "error_rate"),
    Case("wrong_length -1", _struck("wrong_length", tokens=-1), VOID, "error_rate"),
    Case("delay_headers > time-out", _struck("delay_headers", ms=4500.0), VOID, "error_rate"),
    Case("stall > time-out", _struck("stall", after_tokens=2, ms=4500.0), VOID, "error_rate"),
    Case("prefix_hit, once", {"kind": "prefix_hit", "at": [40]}, VOID, "prefix_cache_hits"),
    Case("slow_metrics > time-out", {"kind": "slow_metrics", "at": [2], "ms": 6000.0}, VOID,
         "metrics_scrapes"),
    Case("malformed_metrics, once", {"kind": "malformed_metrics", "at": [2]}, VOID,
         "metrics_scrapes"),
    Case("refuse_start", {"kind": "refuse_start"}, FAILED, "before it was ready"),
    Case("die", {"kind": "die", "at": [40]}, FAILED, "ended with status"),
    Case("none (control)", _struck("crlf") | {"probability": 0.0}, VALID, "nothing is injected"),
    Case("coalesce", _struck("coalesce", tokens=4), VALID,
         "every token arrives; a read's stamp is that of its write, and events are not counted"),
    Case("split_event", _struck("split_event", at_byte=12, ms=2.0), VALID,
         "an event is complete, and stamped, with its last byte"),
    Case("crlf", _struck("crlf"), VALID, "CR LF ends a line of an event stream as LF does"),
    Case("delay_headers < time-out", _struck("delay_headers", ms=20.0), VALID,
         "a slower server is what is measured: the delay is in TTFT, as it should be"),
    Case("stall < time-out", _struck("stall", after_tokens=2, ms=20.0), VALID,
         "a slower server is what is measured: the stall is in TPOT, as it should be"),
    Case("slow_metrics < time-out", {"kind": "slow_metrics", "at": [2], "ms": 200.0}, VALID,
         "the sampler is a process of its own; a late scrape delays no request"),
)  # fmt: skip


def inject_faults(
    root: Path, names: Sequence[str] | None, seed: int, say: Say
) -> list[dict[str, Any]]:
    """One row for each case: what became of its cell, why, and how far its stamps are off."""
    chosen = [case for case in CASES if names is None or case.name.partition(",")[0] in names]
    rows = []
    for number, case in enumerate(chosen):
        rows.append(_inject(case, root / f"case{number}", seed))
        say(f"fault {case.name}: {rows[-1]['outcome']}")
    return rows


def _inject(case: Case, folder: Path, seed: int) -> dict[str, Any]:
    document = study_document("jittered", seed, 1, (), cell=FAULT_CELL, faults=[case.rule])
    document["config"]["validity"] |= VALIDITY
    document["config"]["metrics"]["interval_s"] = SCRAPE_S
    row: dict[str, Any] = {"fault": case.name, "struck": None, "requests": None, "stamps_us": None}
    try:
        cell = measure_launch(document, Launch(PLAIN, 0, PHASE), folder)
    except ServerError as error:
        outcome, why = FAILED, str(error).splitlines()[0]
        right = case.must_name in why
    else:
        outcome = VALID if cell.record["valid"] else VOID
        row["struck"] = sum(truth.fault is not None for truth in cell.truth.values())
        row["requests"] = len(cell.requests)
        # Of the successes the fault struck; of all where it struck none.
        struck = cell.errors(lambda truth: truth.fault is not None)
        off = struck if len(struck) else cell.errors()
        row["stamps_us"] = [float(off[name].median()) for name in ("first_us", "last_us")]
        why = case.must_name if outcome == VALID else "; ".join(cell.record["void_reasons"])
        right = case.must_name in why
        if outcome == VALID:
            right = all(abs(us) < STAMP_ERROR_MAX_US for us in row["stamps_us"])
    as_designed = outcome == case.expected and right
    return row | {"outcome": outcome, "why": why, "as_designed": as_designed}

"""Run launches in virtual time, with the virtual engine in place of a server.

Cell order, arrivals, skip reasons and checks are the driver's own code (`study.launch`); sending
times and the end of a cell are the load generator's (`loadgen.plan`). The work of its worker
processes (in-flight cap, timeouts of requests and drain) is done here. The result is a folder like
a driver's, so that the analysis reads it like any study: steps are recorded where the patch stage
allows it, and a request has no id and no body.
"""

import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from connector_tax.analysis.measure import summarise_cell
from connector_tax.analysis.validity import assess, server_counters, void_reasons
from connector_tax.artifacts import paths
from connector_tax.artifacts.cell_records import (
    CellRecord,
    GeneratorHealth,
    RequestLine,
    ScrapeLine,
    ServerCounters,
)
from connector_tax.artifacts.index import CellEntry, finished_cell, launch_index, write_index
from connector_tax.artifacts.names import Launch
from connector_tax.artifacts.study_file import cell_rates, read_study, shape_limits
from connector_tax.artifacts.study_records import CellPlan, StudyDocument
from connector_tax.engine.logs import STEP_PROCESSES
from connector_tax.engine.scheduler import Sequence as Served
from connector_tax.engine.virtual import VirtualEngine
from connector_tax.files import read_json, sha256_file, write_json
from connector_tax.linux import die_with_parent
from connector_tax.loadgen.generator import CellResult
from connector_tax.loadgen.messages import STUDY_FIELDS, RequestRecord
from connector_tax.loadgen.plan import LEAD_NS, CellRule, Plan, open_loop
from connector_tax.loadgen.sessions import PlannedRequest
from connector_tax.rehearsal.machine import Machine, machine_of
from connector_tax.servers.embedded import launch_seed
from connector_tax.study.cell import cell_record, cell_rule, prepare
from connector_tax.study.design import cell_order
from connector_tax.study.launch import MEASUREMENTS_OF_A_VOID_CELL, launch_skip_reason
from connector_tax.study.plan import reference_rate
from connector_tax.study.processes import SERVER, ServerCpu
from connector_tax.study.remeasure import OVERLOADED, void_cause
from connector_tax.study.resources import cell_cpu, virtual_engine_record, virtual_resources

REQUEST = PlannedRequest("simulated", b"{}", None, None)
BEGUN = "1970-01-01T00:00:00+00:00"
# Health report of a load generator that never lags.
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

# ---- a cell


class Scrape(NamedTuple):
    """A scrape of the server, with the server's requests at that moment."""

    line: ScrapeLine
    inflight: int


@dataclass
class VirtualCell:
    """A cell that is being served.

    Attributes:
        offsets_ns: the arrivals.
        rule: the rule that ends the cell.
        shape: input and output tokens of every request.
        scrape_ns: interval of the scrapes.
        scrapes: results of the scrapes.
        busy_ns: total time of the engine's steps.
    """

    offsets_ns: NDArray[np.int64]
    rule: CellRule
    shape: tuple[int, int]
    scrape_ns: int
    scrapes: list[Scrape] = field(default_factory=list)
    busy_ns: int = 0
    _due: deque[RequestRecord] = field(default_factory=deque)
    _live: dict[int, tuple[RequestRecord, Served]] = field(default_factory=dict)
    _wake_ns: int | None = 0

    def __post_init__(self) -> None:
        requests = [REQUEST] * len(self.offsets_ns)
        self.plan = Plan(open_loop(self.offsets_ns, requests, self.rule), self.rule)

    def serve(self, engine: VirtualEngine) -> None:
        """Run the cell until it is drained."""
        origin_ns = engine.now_ns
        self.plan.start(origin_ns)
        scrape_ns = self._wake_ns = origin_ns
        self._scrape(engine, origin_ns - 1, page=True)
        while self._wake_ns is not None or self._due or engine.scheduler.has_work:
            if not engine.scheduler.has_work:
                events = [self._due[0].t_intended_ns] if self._due else []
                events += [self._wake_ns] if self._wake_ns is not None else []
                engine.now_ns = max(engine.now_ns, min(events))
            while scrape_ns <= engine.now_ns:
                self._scrape(engine, scrape_ns)
                scrape_ns += self.scrape_ns
            self._issue(engine.now_ns)
            self._arrive(engine)
            self._expire(engine)
            if engine.scheduler.has_work:
                before_ns = engine.now_ns
                emitted = engine.step()
                self.busy_ns += engine.now_ns - before_ns
                self._answer(emitted, engine)
        self._scrape(engine, engine.now_ns + 1, page=True)

    def _scrape(self, engine: VirtualEngine, t_ns: int, *, page: bool = False) -> None:
        values = engine.metrics.values(engine.scheduler)
        line: ScrapeLine = {"t_ns": t_ns, "ok": True, "scrape_ms": 0.0, "values": values}
        if page:
            line["raw"] = engine.page().decode()
        self.scrapes.append(Scrape(line, len(self._live)))

    def _issue(self, now_ns: int) -> None:
        if self._wake_ns is None or self._wake_ns > now_ns:
            return
        items, next_ns = self.plan.step(now_ns, now_ns + LEAD_NS)
        for item in items:
            # Single requests, so there are no other requests of a session to cancel.
            assert isinstance(item, tuple)
            record, _ = item
            # Called between steps only, which may be long; a load generator is not late.
            record.t_issue_ns = min(now_ns, record.t_intended_ns)
            self._due.append(record)
        self._wake_ns = None if next_ns is None else max(now_ns + 1, next_ns - LEAD_NS)

    def _arrive(self, engine: VirtualEngine) -> None:
        cap = self.rule.inflight_cap
        while self._due and self._due[0].t_intended_ns <= engine.now_ns:
            record = self._due.popleft()
            if cap is not None and len(self._live) >= cap:
                record.fail("inflight_cap")
                self.plan.take(record)
                continue
            served = engine.add(record.seq, *self.shape, record.t_intended_ns)
            self._live[record.seq] = record, served

    def _expire(self, engine: VirtualEngine) -> None:
        """Fail requests beyond their timeout, and all requests at the end of the drain."""
        now_ns = engine.now_ns
        timeout_ns = round(self.rule.request_timeout_s * 1e9)
        while self._live:
            seq, (record, _) = next(iter(self._live.items()))
            if record.t_intended_ns + timeout_ns > now_ns:
                break
            self._abort(engine, seq, "request_timeout")
        if self._wake_ns is not None:
            return
        assert self.plan.stop_ns is not None
        if now_ns >= self.plan.stop_ns + round(self.plan.drain_s * 1e9):
            for seq in list(self._live):
                self._abort(engine, seq, "drain_timeout")

    def _abort(self, engine: VirtualEngine, seq: int, kind: str) -> None:
        record, sequence = self._live.pop(seq)
        engine.abort(sequence)
        record.fail(kind)
        record.t_send_ns, record.t_done_ns = record.t_intended_ns, engine.now_ns
        self.plan.take(record)

    def _answer(self, emitted: Sequence[Served], engine: VirtualEngine) -> None:
        last_ns = engine.now_ns
        for served in emitted:
            record, _ = self._live[served.sink]
            if record.t_first_token_ns is None:
                record.t_first_token_ns = record.t_headers_ns = last_ns
                engine.count_first(served)
            if not served.finished:
                continue
            engine.count_finished(served)
            del self._live[served.sink]
            record.t_worker_ns = record.t_conn_ns = record.t_send_ns = record.t_intended_ns
            record.t_last_token_ns = record.t_done_ns = last_ns
            record.prompt_tokens = served.prompt_len
            record.completion_tokens = served.output_len
            record.worker = 0
            self.plan.take(record)


# ---- a launch


def virtual_engine(study: StudyDocument, launch: Launch, machine: Machine) -> VirtualEngine:
    """Return a launch's engine in virtual time."""
    return VirtualEngine(
        machine.engines[launch.configuration], launch_seed(study, launch), machine.device_us
    )


def rehearse_launch(study: StudyDocument, launch: Launch, root: Path, machine: Machine) -> None:
    """Run a launch in virtual time, and write its files below the study's folder `root`."""
    folder = launch.folder(root)
    folder.mkdir(parents=True, exist_ok=True)
    cells, reason = cell_order(study, launch), launch_skip_reason(root, launch)
    went: dict[str, Any] = {"status": "skipped", "reason": reason}
    timing = dict.fromkeys(("startup_s", "cells_s", "release_s"), 0.0)
    entries = [CellEntry(cell["cell"], "skipped", reason, {}) for cell in cells]
    if reason is None:
        rate = reference_rate(root, launch.phase)
        rates = cell_rates(study, launch.phase, rate, shape_limits(study, root, launch.phase))
        engine = virtual_engine(study, launch, machine)
        if read_json(root / paths.PATCH_STATUS)["step_timing_available"]:
            engine.steps = []
        files = _write_server(study, launch, engine, machine, folder)
        records = [
            _rehearse_cell(study, launch, cell, rates[cell["cell"]], engine, folder)
            for cell in cells
        ]
        went = {"rate_rps": rate, "files": files}
        entries = [finished_cell(record, folder / record["cell"]) for record in records]
        timing["startup_s"] = machine.startup_s
        timing["release_s"] = float(study["config"]["server"]["release_s"])
        timing["cells_s"] = sum(record["rehearsed"]["seconds"] for record in records)
        # What a look reads.
        summaries = {cell["cell"]: summarise_cell(folder / cell["cell"]) for cell in cells}
        write_json(folder / paths.SUMMARY, summaries)
    timing["wall_s"] = sum(timing.values())
    times = {"started_utc": BEGUN, "ended_utc": BEGUN, "timing": timing}
    write_index(folder, launch_index(study, launch, entries, **went, **times))


def _write_server(
    study: StudyDocument, launch: Launch, engine: VirtualEngine, machine: Machine, folder: Path
) -> dict[str, str]:
    """Write the server records of a launch; return the files' hashes."""
    tax = machine.engines[launch.configuration].tax
    idle = tax.background_cpu if tax else 0.0
    settings = virtual_engine_record(study["config"]["engine"], engine.page().decode())
    records = {
        paths.RESOURCES: virtual_resources(launch, machine.startup_s, idle, engine.now_ns),
        paths.SETTINGS: {"launch": launch.name, "attempt": 1, **settings},
    }
    for name, record in records.items():
        write_json(folder / name, record)
    return {name: sha256_file(folder / name) for name in records}


def _rehearse_cell(
    study: StudyDocument,
    launch: Launch,
    planned: CellPlan,
    rate_rps: float | None,
    engine: VirtualEngine,
    launch_folder: Path,
) -> CellRecord:
    """Serve one cell and write its folder; return the content of its record.

    It is checked like a measured cell, with an undisturbed machine.
    """
    assert rate_rps is not None
    config, name = study["config"], planned["cell"]
    prepared = prepare(study, launch_folder, launch, planned, rate_rps, attempt=1, measurement=1)
    assert prepared.offsets_ns is not None  # a study of `ab` is not rehearsed
    shape = (planned["input_tokens"], planned["output_tokens"])
    scrape_ns = round(config["metrics"]["interval_s"] * 1e9)
    rule = cell_rule(config, launch.phase)
    cell = VirtualCell(prepared.offsets_ns, rule, shape, scrape_ns)
    began_ns, preempted = engine.now_ns, engine.scheduler.preemptions
    cell.serve(engine)
    result = CellResult.of(cell.plan, engine.now_ns, "worker", HEALTHY)
    requests = [cast(RequestLine, record.fields(STUDY_FIELDS)) for record in result.records]
    measured = cell_record(study, launch, prepared, result, requests, BEGUN)
    lines = [scrape.line for scrape in cell.scrapes]
    counters: ServerCounters = {
        "before": server_counters(lines[0]["values"]),
        "after": server_counters(lines[-1]["values"]),
    }
    measured["server_counters"] = counters
    measured["load_generator"], measured["suspended_ms"] = HEALTHY, 0
    checks = assess(measured, requests, lines, config)
    reasons = void_reasons(checks)
    took_ns = engine.now_ns - began_ns
    inflight = [s.inflight for s in cell.scrapes[1:-1] if s.line["t_ns"] < result.t_stop_ns]
    folder = launch_folder / name
    folder.mkdir(parents=True)
    executed = engine.steps or []
    steps = [step.line(process) for process in STEP_PROCESSES for step in executed]
    executed.clear()
    logs: dict[str, Iterable[Any]] = {"requests": requests, "metrics": lines, "engine_step": steps}
    for kind, values in logs.items():
        content = msgspec.json.Encoder().encode_lines(values)
        # Not synced: a rehearsal's folder is temporary, and its syncs take longer than its cells.
        (folder / paths.cell_log(kind, launch.phase, name)).write_bytes(content)
    used = ServerCpu(began_ns - 1, engine.now_ns + 1, {SERVER: cell.busy_ns / 1e9}, None)
    record: CellRecord = {
        **measured,
        "health": checks,
        "valid": not reasons,
        "void_reasons": reasons,
        "server_cpu": cell_cpu(used, counters, {}, {}),
        "files": {path.name: sha256_file(path) for path in sorted(folder.iterdir())},
    }
    measurements = 1 if void_cause(record) in (None, OVERLOADED) else MEASUREMENTS_OF_A_VOID_CELL
    record["rehearsed"] = {
        "seconds": took_ns / 1e9 * measurements,
        "load": cell.busy_ns / took_ns,
        "inflight_p50": float(np.median(inflight)),
        "preemptions": engine.scheduler.preemptions - preempted,
    }
    write_json(folder / paths.cell_record(launch.phase, name), record)
    return record


# ---- parallel processes


class SimulationError(Exception):
    """A process of a simulation failed; the text is its output."""


def in_processes(module: str, arguments: Sequence[str], tasks: Sequence[Any]) -> list[Any]:
    """Return the results of `python -m module *arguments` for each task (`answer_tasks`), in order.

    The tasks are distributed to one process per CPU, as JSON lines.

    Raises:
        SimulationError: a process failed.
    """
    count = min(len(tasks), len(os.sched_getaffinity(0)))
    command = [sys.executable, "-m", module, *arguments]
    results: list[Any] = [None] * len(tasks)

    def run(number: int) -> None:
        done = subprocess.run(
            command,
            input=json.dumps(tasks[number::count]),
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=die_with_parent,
        )
        if done.returncode:
            text = f"{' '.join(command)}: ended with status {done.returncode}"
            raise SimulationError(f"{text}\n{done.stderr}")
        results[number::count] = map(json.loads, done.stdout.splitlines())

    if count:
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(run, range(count)))
    return results


def answer_tasks(answer: Callable[..., Any]) -> None:
    """Read tasks from stdin, call `answer` with the arguments of each, and print the results."""
    for task in json.load(sys.stdin):
        print(json.dumps(answer(*task)), flush=True)


if __name__ == "__main__":
    ROOT = Path(sys.argv[1])
    STUDY = read_study(ROOT / paths.STUDY)
    MACHINE = machine_of(STUDY)
    answer_tasks(lambda *launch: rehearse_launch(STUDY, Launch(*launch), ROOT, MACHINE))

"""Prepare, measure and check one cell, and rename its folder into place once it is complete.

The schedule exists before the first arrival; request bodies are made a little ahead. The cell is
written to `<cell>.partial/`, fsynced and renamed to `<cell>/`. A finished cell records the SHA-256
of its files, so that a later run can detect damage.
"""

import functools
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from connector_tax.analysis.device_time import device_values
from connector_tax.analysis.machine import read_machine
from connector_tax.analysis.validity import assess, counted, server_counters, void_reasons
from connector_tax.artifacts import paths
from connector_tax.artifacts.cell_records import (
    CellRecord,
    MeasuredCellRecord,
    RequestLine,
    ScrapeLine,
    ServerCounters,
    WindowRecord,
)
from connector_tax.artifacts.names import CLOSED, TRACE, Launch, baseline_of
from connector_tax.artifacts.record_reader import checked
from connector_tax.artifacts.study_records import CellPlan, StudyConfig, StudyDocument
from connector_tax.config import MOST_REQUESTS
from connector_tax.files import (
    ArtifactError,
    fsync,
    is_intact,
    make_durable,
    read_json,
    read_jsonl,
    sha256_file,
    write_bytes,
    write_json,
)
from connector_tax.loadgen.affinity import AffinityPlan
from connector_tax.loadgen.generator import CellResult, LoadGenerator, LoadGeneratorOptions
from connector_tax.loadgen.messages import STUDY_FIELDS
from connector_tax.loadgen.plan import CellRule, Progress, closed_loop, open_loop
from connector_tax.loadgen.sessions import (
    RequestSource,
    random_requests,
    random_tokens,
    random_words,
)
from connector_tax.loadgen.traffic import make_offsets
from connector_tax.servers.kinds import engine_of
from connector_tax.study.guard import utc
from connector_tax.study.machine_watch import MachineWatch
from connector_tax.study.processes import ServerProcesses, cpu_between, suspended_ms
from connector_tax.study.resources import cell_cpu, thread_times
from connector_tax.study.scraper import MetricsSampler
from connector_tax.study.server import Server
from connector_tax.study.steplog import LaunchStepLog
from connector_tax.study.traffic import recorded_requests

# ---- what is sent

# Ids below this are special tokens in common tokenizers; random prompts avoid them.
FIRST_PLAIN_TOKEN = 10
# By what a server takes.
_LEFT_OUT = {
    "vllm": (),
    "openai": ("min_tokens", "ignore_eos"),
    "bare": ("min_tokens", "ignore_eos", "stream_options"),
}


def planned_requests(
    study: StudyDocument, name: str, shape: tuple[int, int], count: int
) -> RequestSource:
    """Return `count` streaming completion requests of one shape, which are made lazily.

    All configurations do the same work without reuse: equal lengths, fresh random ids so that no
    cache can hit, `ignore_eos` with `max_tokens` = `min_tokens`, and usage requested. Token ids are
    drawn uniformly from [10, vocab_size). A server that accepts no token ids gets random words,
    whose number gives the requested length by the server's own count.

    Args:
        name: the path-like name of this cell's content.
        shape: input and output tokens.
    """
    input_tokens, output_tokens = shape
    served = engine_of(study["config"]["engine"]).served
    before = {"model": served["model"]}
    after: dict[str, Any] = {
        "max_tokens": output_tokens,
        "min_tokens": output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    for key in _LEFT_OUT[served.get("body", "vllm")]:
        del after[key]
    stream = _stream(study, name)
    wanted = output_tokens if served.get("exact_output", True) else None
    prompt: Callable[[], str | list[int]]
    vocab_size, prompt_tokens = served["vocab_size"], None
    if vocab_size is None:
        words = (input_tokens - served["fixed_tokens"]) / served["tokens_per_word"]
        prompt = random_words(stream, max(1, round(words)))
    else:
        prompt = random_tokens(stream, input_tokens, FIRST_PLAIN_TOKEN, vocab_size)
        prompt_tokens = input_tokens
    chat = vocab_size is None and served["chat"]
    return random_requests(name, count, prompt, chat, before, after, prompt_tokens, wanted)


# ---- a cell

# A server may count a request just after its last byte: number and pause of further scrapes.
COUNTER_READS = 20
COUNTER_PAUSE_S = 0.1
# Interval of the checks during a cell that the server and its engine are alive.
ALIVE_S = 2.0


class _Offered(TypedDict):
    rate_rps: float


class FinishedCell(TypedDict):
    """The fields of a finished cell that a resumed launch reads; every version writes them."""

    files: dict[str, str]
    schedule: _Offered
    valid: bool
    void_reasons: list[str]
    window: dict[str, Any]
    load_generator: dict[str, Any]


@dataclass(frozen=True, slots=True)
class PreparedCell:
    """A cell ready to be measured: arrival offsets (ns from its origin) and its requests.

    A closed loop has no offsets.
    """

    cell: CellPlan
    rate_rps: float
    attempt: int
    arrivals_seed: str
    offsets_ns: NDArray[np.int64] | None
    requests: RequestSource


@dataclass(frozen=True, slots=True)
class Instruments:
    """A running server in the launch's folder, and the instruments that measure its cells.

    Attributes:
        watch: None if the machine is not watched.
    """

    server: Server
    processes: ServerProcesses
    generator: LoadGenerator
    sampler: MetricsSampler
    step_log: LaunchStepLog
    watch: MachineWatch | None


def cell_rule(config: StudyConfig, phase: str) -> CellRule:
    """Return the load generator's rule for the length of a phase's cells (section `cell`).

    Cells of Phase A never end early on overload, since Phase A measures where saturation begins.
    """
    cell: dict[str, Any] = {**config["cell"]}
    if phase == "A":
        cell["end_overloaded"] = False
    return CellRule(**cell)


def load_generator(study: StudyDocument, server: Server, plan: AffinityPlan) -> LoadGenerator:
    """Return the load generator of the study's `load_generator` section, for `server`."""
    options = study["config"]["load_generator"]
    served = engine_of(study["config"]["engine"]).served
    return LoadGenerator(
        server.endpoint.target(chat=served.get("chat", False)),
        LoadGeneratorOptions(
            workers=options["workers"],
            connections_per_worker=options["connections_per_worker"],
            strict=served.get("counters", True),
            keep_reads=options["keep_reads"],
            cpus=plan,
        ),
    )


def prepare(
    study: StudyDocument,
    root: Path,
    launch: Launch,
    cell: CellPlan,
    rate_rps: float,
    *,
    attempt: int,
    measurement: int,
) -> PreparedCell:
    """Draw a cell's arrival times, cool-down included, and a new request body for each arrival.

    The arrivals' random stream does not depend on the configuration: every configuration gets the
    same arrival times. The prompts' stream also depends on the launch, the attempt and the
    measurement, so that no prompt repeats.

    Args:
        root: the study's folder, which holds the requests of a file.
        attempt: the launch's attempt, from 1.
        measurement: number of the measurement of this cell in this attempt, from 1; a void cell is
            measured again.
    """
    config = study["config"]
    arrivals_seed = f"{study['seed']}/arrivals/block{launch.block}/{launch.phase}/{cell['cell']}"
    name = f"{launch.name}/{cell['cell']}/attempt{attempt}{measurement}"
    recorded = None
    if (traffic := config["phase_a"].get("traffic")) is not None:
        served, stream = engine_of(config["engine"]).served, _stream(study, name)
        recorded = recorded_requests(
            root / paths.TRAFFIC, traffic, served, stream, name, FIRST_PLAIN_TOKEN
        )
    offsets: NDArray[np.int64] | None
    if config["phase_a"].get("concurrency"):
        offsets = None
    elif recorded is not None and recorded.offsets_ns is not None:
        offsets = recorded.offsets_ns
    else:
        offsets = make_offsets(
            config["arrivals"]["process"],
            rate_rps,
            cell_rule(config, launch.phase).schedule_s,
            arrivals_seed,
            gamma_shape=config["arrivals"]["gamma_shape"],
            most=None if recorded is None else recorded.count,
        )
    shape = cell["input_tokens"], cell["output_tokens"]
    if recorded is None:
        count = MOST_REQUESTS if offsets is None else len(offsets)
        requests = planned_requests(study, name, shape, count)
    else:
        requests = recorded.requests
    return PreparedCell(cell, rate_rps, attempt, arrivals_seed, offsets, requests)


def _stream(study: StudyDocument, name: str) -> str:
    """Return the name of the random stream from which a cell's prompts are drawn."""
    return f"{study['seed']}/content/{name}"


def while_alive(
    alive: Callable[[], object], then: Callable[[Progress], object] = lambda _: None
) -> Callable[[Progress], None]:
    """Return an `on_progress` callback that calls `alive` every ALIVE_S and `then` at each call.

    An error of either ends the run.
    """
    looked = time.monotonic()

    def progress(now: Progress) -> None:
        nonlocal looked
        if time.monotonic() - looked > ALIVE_S:
            looked = time.monotonic()
            alive()
        then(now)

    return progress


def measure(
    study: StudyDocument,
    launch: Launch,
    prepared: PreparedCell,
    instruments: Instruments,
    on_progress: Callable[[Progress], None],
) -> CellRecord:
    """Measure one cell into `<cell>/` of the launch's folder; return the content of its cell file.

    The folder appears by rename when everything in it is written; an earlier folder of that name
    must have been moved away.

    Raises:
        ServerError: the server has ended; such a cell is not kept.
    """
    folder, watch = instruments.server.folder, instruments.watch
    sampler, step_log = instruments.sampler, instruments.step_log
    name = prepared.cell["cell"]
    partial = paths.partial_cell(folder, name)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    requests_file, metrics_file, steps_file, machine_file = (
        partial / paths.cell_log(kind, launch.phase, name) for kind in paths.CELL_LOGS
    )
    device_name = paths.cell_log(paths.DEVICE_LOG, launch.phase, name)
    alive = functools.partial(instruments.server.check_alive, f"in cell {name}")
    sampler.meanwhile = alive
    if watch is not None:
        watch.meanwhile = alive
    started_utc = utc()
    if watch is not None:
        watch.open(machine_file, instruments.server.pid)
    before = sampler.open(metrics_file, f"{prepared.arrivals_seed}/scrapes")
    step_log.mark()
    suspended_before = suspended_ms()
    used_before = instruments.processes.read()
    threads_before = thread_times(used_before.engine)
    rule = cell_rule(study["config"], launch.phase)
    if prepared.offsets_ns is None:
        concurrency = study["config"]["phase_a"]["concurrency"]
        load = closed_loop(concurrency, prepared.requests, MOST_REQUESTS, rule)
    else:
        load = open_loop(prepared.offsets_ns, prepared.requests, rule)
    result = instruments.generator.run(load, rule, while_alive(alive, on_progress))
    threads_after = thread_times(used_before.engine)
    used_after = instruments.processes.read()
    alive()
    after = _final_scrape(sampler, before, result)
    if watch is not None:
        watch.close()
    records = [cast(RequestLine, record.fields(STUDY_FIELDS)) for record in result.records]
    if prepared.offsets_ns is None:
        records = [_due_when_sent(record, result) for record in records]
    write_bytes(requests_file, msgspec.json.Encoder().encode_lines(records))
    steps = step_log.take(result.t_origin_ns, result.t_drained_ns)
    write_bytes(steps_file, steps)
    device = _take_device(study, launch, step_log, partial / device_name, steps)
    measured = cell_record(study, launch, prepared, result, records, started_utc)
    measured["suspended_ms"] = suspended_ms() - suspended_before
    counters: ServerCounters = {
        "before": server_counters(before["values"]),
        "after": server_counters(after["values"]),
    }
    measured["server_counters"], measured["load_generator"] = counters, result.health
    checks = assess(
        measured,
        records,
        list(read_jsonl(metrics_file)),
        study["config"],
        machine=None if watch is None else read_machine(machine_file, None),
        watched=watch is not None,
        device=device,
        counted_by_server=engine_of(study["config"]["engine"]).served.get("counters", True),
    )
    reasons = void_reasons(checks)
    # The scrapes and the machine's samples were written by other processes.
    make_durable(partial)
    content: CellRecord = {
        **measured,
        "health": checks,
        "valid": not reasons,
        "void_reasons": reasons,
        "server_cpu": cell_cpu(
            cpu_between(used_before, used_after), counters, threads_before, threads_after
        ),
        "files": {path.name: sha256_file(path) for path in sorted(partial.iterdir())},
    }
    write_json(partial / paths.cell_record(launch.phase, name), content)
    for path in partial.iterdir():
        path.chmod(0o444)
    fsync(partial)
    partial.rename(folder / name)
    fsync(folder)
    return content


def _due_when_sent(record: RequestLine, result: CellResult) -> RequestLine:
    """Return a closed-loop request, with the time at which it was sent as its due time."""
    if (sent := record["t_send_ns"]) is None:
        return record
    warmup, cooldown = sent < result.t_warmup_end_ns, sent >= result.t_stop_ns
    return {**record, "t_intended_ns": sent, "warmup": warmup, "cooldown": cooldown}


def _take_device(
    study: StudyDocument, launch: Launch, step_log: LaunchStepLog, file: Path, steps: bytes
) -> dict[str, float | None] | None:
    """Write the emulated device's log; return its checks' values (None for a real device)."""
    if study["config"]["engine"].get("device") != "emulated":
        return None
    lines = step_log.take_device()
    write_bytes(file, msgspec.json.Encoder().encode_lines(lines))
    is_baseline = launch.configuration == baseline_of(study["config"])
    return device_values(lines, map(msgspec.json.decode, steps.splitlines()), is_baseline)


def read_intact(folder: Path, phase: str, name: str) -> CellRecord | None:
    """Return a finished cell's record, or None if the cell is not finished.

    Raises:
        ArtifactError: the cell is damaged; names the file.
    """
    path = folder / name
    if not path.exists():
        return None
    record_path = path / paths.cell_record(phase, name)
    content: CellRecord = read_json(record_path)
    checked(content, FinishedCell, str(record_path))
    for file, digest in content["files"].items():
        if not is_intact(path / file, digest):
            raise ArtifactError(f"{path / file}: missing or changed since it was measured")
    return content


def _final_scrape(sampler: MetricsSampler, before: ScrapeLine, result: CellResult) -> ScrapeLine:
    start = server_counters(before["values"])["success"]
    ok = sum(record.status == "ok" for record in result.records)
    for _ in range(COUNTER_READS):
        completed = server_counters(sampler.peek()["values"])["success"]
        if completed is None or start is None or completed - start >= ok:
            break
        sampler.meanwhile()
        time.sleep(COUNTER_PAUSE_S)
    return sampler.close()


def schedule_kind(config: StudyConfig) -> str:
    """Return the arrival process; TRACE for the times of a trace, CLOSED for a closed loop."""
    if config["phase_a"].get("concurrency"):
        return CLOSED
    traffic = config["phase_a"].get("traffic")
    return TRACE if traffic and traffic["kind"] == TRACE else config["arrivals"]["process"]


def cell_record(
    study: StudyDocument,
    launch: Launch,
    prepared: PreparedCell,
    result: CellResult,
    records: Sequence[RequestLine],
    started_utc: str,
) -> MeasuredCellRecord:
    """Return a cell's plan and outcome, before its validity is checked."""
    if prepared.offsets_ns is None:
        handed_out, planned = result.handed_out, len(records)
    else:
        end_ns = result.t_cooldown_end_ns - result.t_origin_ns
        handed_out = planned = int(np.searchsorted(prepared.offsets_ns, end_ns, side="left"))
    window: WindowRecord = {
        "t_origin_ns": result.t_origin_ns,
        "t_warmup_end_ns": result.t_warmup_end_ns,
        "t_stop_ns": result.t_stop_ns,
        "t_cooldown_end_ns": result.t_cooldown_end_ns,
        "t_drained_ns": result.t_drained_ns,
        "started_utc": started_utc,
    }
    return {
        "phase": launch.phase,
        "cell": prepared.cell["cell"],
        "config": launch.config,
        "configuration": launch.configuration,
        "block": launch.block,
        "label": study["engine_label"],
        "input_tokens": prepared.cell["input_tokens"],
        "output_tokens": prepared.cell["output_tokens"],
        "schedule": {
            "kind": schedule_kind(study["config"]),
            "gamma_shape": study["config"]["arrivals"]["gamma_shape"],
            "rate_rps": prepared.rate_rps,
            "seed": prepared.arrivals_seed,
            "n": handed_out,
        },
        "prompts_sha256": result.bodies_sha256,
        "window": window,
        "cooldown": {
            "requests": sum(r["cooldown"] for r in records),
            "ended_by": result.cooldown_ended_by,
        },
        "counts": {**counted(records, window), "planned": planned},
        "extended_s": result.extended_s,
        "clock": result.clock,
        "attempt": prepared.attempt,
    }

"""The driver of one server launch: start the server, measure its cells, stop it, write index.json.

Snakemake knows only `index.json`, which is renamed into place last. Finished, intact cells are
kept, so that an interrupted launch resumes at the first missing cell. A launch that fails (the
server dies or cannot be started) is recorded as `status: failed` with the end of the server's log,
and the study continues; `connector_tax.study.complete` then makes the run exit non-zero. A failed
baseline launch ends the run at once, because every tax is a comparison with the baseline.

SIGTERM ends the driver after the current cell, SIGINT at once; neither writes an index.json.
"""

import argparse
import contextlib
import functools
import gc
import importlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from connector_tax.artifacts import paths
from connector_tax.artifacts.cell_records import CellRecord, CountsRecord
from connector_tax.artifacts.folder import LaunchFolder
from connector_tax.artifacts.index import CellEntry, finished_cell, launch_index
from connector_tax.artifacts.launch_files import AttemptRecord, EngineFiles, NodeRecord
from connector_tax.artifacts.looks import decided_earlier
from connector_tax.artifacts.names import PHASES, SAME_RATES, Launch, baseline_of
from connector_tax.artifacts.record_reader import read_record
from connector_tax.artifacts.stage_records import GateRecord, RatesRecord
from connector_tax.artifacts.study_file import (
    cell_rates,
    every_launch,
    launches,
    read_study,
    shape_limits,
)
from connector_tax.artifacts.study_records import CellPlan, StudyDocument
from connector_tax.commands import run_command, study_parser
from connector_tax.config import ConfigError
from connector_tax.files import ArtifactError, make_durable, read_json, write_json, write_text
from connector_tax.loadgen.affinity import AffinityPlan
from connector_tax.loadgen.messages import LoadGeneratorError
from connector_tax.seals import seal_launch, seal_settings
from connector_tax.servers.kinds import ServerError, command_for, free_port
from connector_tax.study import cell as cells
from connector_tax.study.child import ChildError
from connector_tax.study.design import cell_order, described
from connector_tax.study.device import (
    DeviceError,
    await_free_memory,
    claim_device,
    describe_node,
    devices_of,
    enter_block_slot,
    hold_devices,
)
from connector_tax.study.guard import (
    OwnerError,
    kill_leftovers,
    own_launch,
    remove_temporary_folder,
    utc,
    watch_parent,
)
from connector_tax.study.machine_watch import MachineWatch
from connector_tax.study.plan import reference_rate
from connector_tax.study.processes import (
    STOLEN_WORTH_SAYING,
    busiest_other,
    every_cpu_ms,
    own_processes,
)
from connector_tax.study.progress import LaunchProgress
from connector_tax.study.remeasure import (
    MACHINE_CAUSES,
    OVERLOADED,
    move_aside,
    refuse_other_design,
    stolen_share,
    superseded,
    void_cause,
    withdraw_failed,
)
from connector_tax.study.resources import ServerUse
from connector_tax.study.scraper import MetricsSampler
from connector_tax.study.server import (
    LOGS,
    PortTakenError,
    Server,
    make_publishable,
    on_a_free_port,
    removed_lines,
)
from connector_tax.study.server_command import affinity_plan, probe_overlay, server_cpus
from connector_tax.study.steplog import LaunchStepLog
from connector_tax.vllm.evidence import dead_reason
from connector_tax.vllm.overlay import engine_files

# ---- index.json and summary.json

SUMMARY_MODULE = "connector_tax.analysis.measure"


@dataclass(frozen=True, slots=True)
class LaunchOutcome:
    """The outcome of a launch: `done`, or `failed` or `skipped` with a reason.

    `rate_rps` is the rate of the cells whose plan has no rate; None in Phase A.
    """

    status: str
    reason: str | None
    rate_rps: float | None = None
    attempts: Sequence[AttemptRecord] = ()


def conclude(study: StudyDocument, launch: Launch, folder: Path, outcome: LaunchOutcome) -> None:
    """Write summary.json, the percentiles of each finished cell, then index.json and its seal.

    Cells, records and logs are fsynced before index.json lists them.
    """
    content, order = index_of(study, launch, folder, outcome), cell_order(study, launch)
    module = importlib.import_module(SUMMARY_MODULE)
    finished = [folder / cell["cell"] for cell in order if (folder / cell["cell"]).exists()]
    summaries = {path.name: module.summarise_cell(path) for path in finished}
    write_json(folder / paths.SUMMARY, summaries)
    make_durable(folder)
    seal_launch(folder.parents[3], launch.name, folder / paths.INDEX, content)


def index_of(
    study: StudyDocument, launch: Launch, folder: Path, outcome: LaunchOutcome
) -> dict[str, Any]:
    """Return the content of index.json without `files` and `seal`.

    A launch without attempts ends now.
    """
    attempts, now = list(outcome.attempts), utc()
    index = launch_index(
        study,
        launch,
        [_entry(launch, folder, cell, outcome) for cell in cell_order(study, launch)],
        status=outcome.status,
        reason=outcome.reason,
        rate_rps=outcome.rate_rps,
        started_utc=attempts[0]["started_utc"] if attempts else now,
        ended_utc=attempts[-1]["ended_utc"] if attempts else now,
        attempts=attempts,
        timing=_timing(study, folder, attempts),
    )
    content: dict[str, Any] = msgspec.to_builtins(index)
    return content


def _entry(launch: Launch, folder: Path, cell: CellPlan, outcome: LaunchOutcome) -> CellEntry:
    name = cell["cell"]
    if outcome.status == "skipped":
        return CellEntry(name, "skipped", outcome.reason, {})
    try:
        content = cells.read_intact(folder, launch.phase, name)
    except ArtifactError as error:
        raise ArtifactError(f"{error}; rerun the same command to measure the cell again") from None
    if content is None:
        return CellEntry(name, "missing", outcome.reason, {})
    return finished_cell(content, folder / name)


def _timing(
    study: StudyDocument, folder: Path, attempts: Sequence[AttemptRecord]
) -> dict[str, float]:
    # Includes earlier measurements of a void cell, kept as <cell>.void<k>.
    windows = [
        cast(CellRecord, read_json(path))["window"]
        for path in folder.glob("*/cell_*.json")
        if ".damaged" not in path.parent.name
    ]
    return {
        "startup_s": sum(a.get("startup_s", 0.0) for a in attempts),
        "cells_s": sum(w["t_drained_ns"] - w["t_origin_ns"] for w in windows) / 1e9,
        "release_s": study["config"]["server"]["release_s"] * len(attempts),
        "wall_s": sum(a.get("wall_s", 0.0) for a in attempts),
    }


# ---- resuming an earlier run of the launch


def launch_title(study: StudyDocument, launch: Launch) -> str:
    """Return the first comment of a launch's launch.sh."""
    return f"{launch.name} of study {study['study']} ({study['engine_label']})"


def launch_skip_reason(study_folder: Path, launch: Launch) -> str | None:
    """Return why the launch is skipped, or None if it is run."""
    gates: dict[str, GateRecord] = read_json(study_folder / paths.PREFLIGHT_STATUS)
    gate = gates[launch.configuration]
    if not gate["include"]:
        return f"pre-flight: {gate['reason']}"
    decided = decided_earlier(study_folder, launch)
    if decided is not None or launch.phase == "A":
        return decided
    rates: RatesRecord = read_json(study_folder / paths.REFERENCE_RATES)
    if launch.phase == "Bp" and rates["ref_load"] == rates["ref_safe"]:
        return f"{SAME_RATES} ({rates['ref_safe']:g} req/s)"
    return None


def clear_interrupted(folder: Path, attempts: "Attempts", say: Callable[[str], None]) -> None:
    """Remove the processes and unfinished cells of an interrupted run of a launch."""
    # Killed in the whole study, since leftovers of another launch would run beside this one.
    killed = kill_leftovers(folder.parents[3])
    if killed:
        say(f"killed {killed} processes left over from an interrupted run")
    # Not done by an interrupted run; needed even if no cell is missing.
    redacted = make_publishable(folder)
    if redacted and attempts.entries:
        attempts.entries[-1]["redacted"] = redacted
        attempts.write()
    remove_temporary_folder(folder)
    for partial in folder.glob("*.partial"):
        shutil.rmtree(partial)


def missing_cells(
    study: StudyDocument,
    launch: Launch,
    folder: Path,
    rates: Mapping[str, float | None],
    say: Callable[[str], None],
) -> list[CellPlan]:
    """Return the launch's cells still to measure, in run order, and move unusable ones aside.

    Args:
        rates: requests/s by cell name.
    """
    missing = []
    for cell in cell_order(study, launch):
        name, rate_rps = cell["cell"], rates[cell["cell"]]
        try:
            content = cells.read_intact(folder, launch.phase, name)
        except ArtifactError as error:
            aside = move_aside(folder / name, "damaged")
            say(f"{error}; moved to {aside.name}, measuring the cell again")
            content = None
        if content is not None:
            measured_rps = content["schedule"]["rate_rps"]
            if measured_rps == rate_rps:
                say(f"cell {name} is already measured and intact; kept")
                continue
            aside = move_aside(folder / name, "otherrate")
            say(
                f"cell {name} was measured at {measured_rps:g} req/s, but its "
                f"rate is now {rate_rps:g}; kept as {aside.name}, measuring the cell again"
            )
        missing.append(cell)
    return missing


class Attempts:
    """The file attempts.json, with one object for each start of the launch's server."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / paths.ATTEMPTS
        self.entries = read_record(self._path, list[AttemptRecord]) if self._path.exists() else []

    @contextlib.contextmanager
    def another(self, node: NodeRecord, supersedes: str | None) -> Iterator[AttemptRecord]:
        """Yield a new attempt and record its start and end; rename the previous attempt's files."""
        number = len(self.entries) + 1
        for name in (paths.LAUNCH_SCRIPT, paths.RESOURCES, paths.SETTINGS, *LOGS):
            if (self._folder / name).exists():
                stem, suffix = name.rsplit(".", 1)
                (self._folder / name).rename(self._folder / f"{stem}.attempt{number - 1}.{suffix}")
        # `ended_utc` stays as it is when the driver is killed.
        attempt: AttemptRecord = {
            "attempt": number,
            "pid": os.getpid(),
            "started_utc": utc(),
            "ended_utc": None,
            "started_ns": time.monotonic_ns(),
            "node": node,
            "supersedes": supersedes,
        }
        self.entries.append(attempt)
        self.write()
        try:
            yield attempt
        finally:
            attempt["ended_utc"], attempt["ended_ns"] = utc(), time.monotonic_ns()
            attempt["wall_s"] = (attempt["ended_ns"] - attempt["started_ns"]) / 1e9
            self.write()

    def write(self) -> None:
        """Write the entries to attempts.json."""
        write_json(self._path, self.entries)


# ---- the driver

MEASUREMENTS_OF_A_VOID_CELL = 2


class StopRequested(BaseException):
    """SIGTERM arrived: the driver stops at the next cell boundary."""


class LaunchDriver:
    """The driver of one launch of a study.

    Args:
        files: `engine_files` of the study's engine; if None, they are read from the machine.
    """

    def __init__(
        self,
        study_file: Path,
        launch: Launch,
        progress: LaunchProgress,
        files: dict[str, EngineFiles] | None,
    ) -> None:
        self.study = enter_block_slot(read_study(study_file), study_file.parent, launch.block)
        self.folder = launch.folder(study_file.parent)
        self.launch = launch
        self.progress = progress
        self._files = files
        self._study_folder = study_file.parent
        self._server: Server | None = None
        self._stop_requested = False
        self._attempts: Attempts

    def run(self) -> LaunchOutcome:
        """Measure the missing cells; return the outcome.

        Raises:
            StopRequested: SIGTERM arrived; finished cells stay.
            DeviceError: another launch holds the device, or it is not the block's device.
            ConfigError: the folder holds cells of another design.
        """
        refuse_other_design(self.study, self.launch, self._study_folder)
        self._attempts = Attempts(self.folder)
        rate, status = None, "skipped"
        reason = launch_skip_reason(self._study_folder, self.launch)
        if reason is None:
            rate = reference_rate(self._study_folder, self.launch.phase)
            self.folder.mkdir(parents=True, exist_ok=True)
            phase = self.launch.phase
            limits = shape_limits(self.study, self._study_folder, phase)
            reason = self._run_cells(cell_rates(self.study, phase, rate, limits))
            status = "failed" if reason else "done"
        else:
            self._say_skipped(reason)
        return LaunchOutcome(status, reason, rate, self._attempts.entries)

    def _say_skipped(self, reason: str) -> None:
        """Print why the launch is skipped; in a skipped phase, only for the first launch."""
        if not reason.startswith(SAME_RATES):
            self.progress.say(f"skipped: {reason}")
            return
        of_phase = launches(self.study, self.launch.phase)
        # Others may be skipped by their gate or an interim analysis.
        alike = (la for la in of_phase if launch_skip_reason(self._study_folder, la) == reason)
        if self.launch == next(alike):
            self.progress.say(f"the whole phase is skipped: {reason}")
        else:
            self.progress.note(f"skipped: {reason}")

    def stop_at_next_boundary(self, *_: object) -> None:
        """Handle SIGTERM: stop after the current cell."""
        # Print nothing here: the interrupted code may hold the progress display's lock.
        self._stop_requested = True

    def die(self, why: str) -> None:
        """Kill the server and exit at once with status 1."""
        if self._server is not None:
            self._server.kill()
        try:
            # Only in the log: the terminal may be closed.
            self.progress.note(f"{why}: this launch ends")
        finally:
            os._exit(1)

    def _run_cells(self, rates: Mapping[str, float | None]) -> str | None:
        """Measure every missing cell; return why the launch failed, or None."""
        say = self.progress.say
        clear_interrupted(self.folder, self._attempts, say)
        # Left by a driver that was killed after its last cell.
        LaunchStepLog(self.folder, self.study["config"]["engine"]).remove()
        missing = missing_cells(self.study, self.launch, self.folder, rates, say)
        if not missing:
            return None
        with hold_devices(devices_of(self.study["config"]), say=say):
            return self._run_missing(missing, rates)

    def _run_missing(
        self, missing: Sequence[CellPlan], rates: Mapping[str, float | None]
    ) -> str | None:
        say = self.progress.say
        engine, design = self.study["config"]["engine"], self.study["design_sha256"]
        node = describe_node(self.study["config"])
        node["engine_files"] = engine_files(engine) if self._files is None else self._files
        claim_device(self._study_folder, self.launch.block, design, node)
        replaced = superseded(self.launch, self._study_folder)
        with self._attempts.another(node, replaced) as attempt:
            try:
                measure = functools.partial(self._measure_on_one_port, missing, rates, attempt)
                on_a_free_port(measure, say)
            except (ServerError, LoadGeneratorError) as error:
                attempt["failure"] = str(error)
                say(f"FAILED: {error}")
                return str(error)
        return None

    def _measure_on_one_port(
        self,
        missing: Sequence[CellPlan],
        rates: Mapping[str, float | None],
        attempt: AttemptRecord,
    ) -> None:
        try:
            with contextlib.ExitStack() as stack:
                instruments, use = self._start(stack, attempt)
                self._measure_all(instruments, missing, rates, attempt["attempt"])
                use.after_load()
        except PortTakenError as error:
            if "startup_s" in attempt:
                raise ServerError(str(error)) from error
            raise

    def _start(
        self, stack: contextlib.ExitStack, attempt: AttemptRecord
    ) -> tuple[cells.Instruments, ServerUse]:
        """Start the server and, while it starts, its instruments; `stack` stops them."""
        plan = affinity_plan(self.study)
        for line in plan.lines():
            self.progress.note(line)
        config = self.study["config"]
        step_log = LaunchStepLog(self.folder, config["engine"])
        step_log.remove()
        server = self._start_server(attempt, plan)
        stack.callback(step_log.remove)
        threads = ThreadPoolExecutor(2)
        # Runs after the server's stop, when the thread that waits for it has ended too.
        stack.callback(threads.shutdown)
        stack.callback(self._stop_server, server, attempt)
        startup_s = threads.submit(
            server.wait_ready, config["server"]["ready_timeout_s"], self.progress.say
        )
        # The instruments start while the server does; nothing they allocate is garbage.
        gc.disable()
        summaries = threads.submit(importlib.import_module, SUMMARY_MODULE)
        own_cpus = plan.loadgen if plan.enabled else ()
        interval_s = config["metrics"]["interval_s"]
        # If other programs may use the CPUs all the time, no CPU may ever be idle for a scrape.
        yields = config["validity"]["max_foreign_cpu"] < 1
        sampler = stack.enter_context(
            MetricsSampler(server.endpoint, interval_s, own_cpus, yields=yields)
        )
        gpus = [gpu["uuid"] for gpu in attempt["node"]["gpus"]]
        watch = stack.enter_context(MachineWatch(plan, gpus))
        generator = stack.enter_context(cells.load_generator(self.study, server, plan))
        attempt["load_generator"] = generator.describe()
        summaries.result()
        # Permanent objects are exempted from the collection before every cell.
        gc.freeze()
        gc.enable()
        attempt["startup_s"] = startup_s.result()
        self._refuse_dead_connector(server)
        if own_cpus:
            # Pinned only now, since imports may use the server's CPUs until here.
            os.sched_setaffinity(0, own_cpus)
        use = ServerUse(self.study, self.launch, server, attempt)
        use.before_load()
        instruments = cells.Instruments(server, use.processes, generator, sampler, step_log, watch)
        return instruments, use

    def _measure_all(
        self,
        instruments: cells.Instruments,
        missing: Sequence[CellPlan],
        rates: Mapping[str, float | None],
        attempt: int,
    ) -> None:
        measured = []
        for position, cell in enumerate(missing, 1):
            rate = rates[cell["cell"]]
            assert rate is not None
            for measurement in range(1, MEASUREMENTS_OF_A_VOID_CELL + 1):
                if self._stop_requested:
                    self.progress.say("SIGTERM: stopped at the end of a cell")
                    raise StopRequested
                prepared = cells.prepare(
                    self.study, self._study_folder, self.launch, cell, rate,
                    attempt=attempt, measurement=measurement,
                )  # fmt: skip
                self.progress.start_cell(cell["cell"], position, len(missing), rate)
                began, used = time.monotonic(), every_cpu_ms()
                content = cells.measure(
                    self.study, self.launch, prepared, instruments, self.progress.update
                )
                try:
                    self._refuse_dead_connector(instruments.server)
                except ServerError:
                    move_aside(self.folder / cell["cell"], "void")
                    raise
                if content["load_generator"]["workers_died"]:
                    aside = move_aside(self.folder / cell["cell"], "void")
                    raise LoadGeneratorError(
                        f"a worker of the load generator died in cell {cell['cell']} (kept as "
                        f"{aside.name}): it was killed, or memory ran out. The launch stops; "
                        "rerun the same command to measure the missing cells"
                    )
                if content["valid"]:
                    measured.append(f"{cell['cell']} {_counted(content['counts'])}")
                    self.progress.note(f"cell {measured[-1]}")
                    break
                seconds = time.monotonic() - began
                who = self._disturber(content, instruments, used, seconds)
                reasons = "; ".join(content["void_reasons"])
                self.progress.say(f"cell {cell['cell']} VOID: {reasons}{who}")
                if void_cause(content) == OVERLOADED:
                    self.progress.say("overloaded; not retried, since it would overload again")
                    break
                if self._sends_prompts:
                    self.progress.say(
                        "not measured again, since the server has now seen these prompts"
                    )
                    break
                if measurement < MEASUREMENTS_OF_A_VOID_CELL:
                    move_aside(self.folder / cell["cell"], "void")
        if measured:
            self.progress.say("; ".join(measured))
        elif self.launch.configuration == baseline_of(self.study["config"]):
            self.progress.say("no cell is valid, and every tax is a comparison with this launch")

    @property
    def _sends_prompts(self) -> bool:
        traffic = self.study["config"]["phase_a"].get("traffic")
        return traffic is not None and traffic["kind"] == "prompts"

    def _refuse_dead_connector(self, server: Server) -> None:
        """Raise `ServerError` if the log shows that the server's connector cannot transfer."""
        device = self.study["config"]["engine"].get("device", "")
        if dead := dead_reason(server.log_text(), device, server.command.argv):
            raise ServerError(dead)

    def _disturber(
        self,
        cell: CellRecord,
        instruments: cells.Instruments,
        used: Mapping[int, float],
        seconds: float,
    ) -> str:
        """Return a text on the processes or host that took CPU time from a void cell, or ""."""
        causes = []
        disturbed = void_cause(cell) in MACHINE_CAUSES
        if disturbed:
            study_pids = own_processes(os.getpid(), instruments.server.pid)
            causes.append(
                busiest_other(used, {pid for side in study_pids for pid in side}, seconds)
            )
        machine_file = LaunchFolder(self._study_folder, self.launch).file("machine", cell["cell"])
        if (stolen := stolen_share(machine_file)) >= STOLEN_WORTH_SAYING:
            causes.append(f"the host took {stolen:.0%} of the CPU time (steal)")
        known = [text for text in causes if text]
        if disturbed and not known:
            known = ["the process that disturbed the cell is not known"]
        return "".join(f"; {text}" for text in known)

    def _start_server(self, attempt: AttemptRecord, plan: AffinityPlan) -> Server:
        await_free_memory(self.study["config"])
        port = free_port()
        probe = probe_overlay(self.study, self._study_folder)
        command = command_for(self.study, self.launch, port, probe)
        title = launch_title(self.study, self.launch)
        self._server = server = Server(self.folder, command, title, port, server_cpus(plan))
        attempt["port"] = server.port
        command_record = {"argv": command.argv, "environment": command.environment}
        design = described(self.study, self.launch)
        write_json(self.folder / paths.LAUNCH_CONFIG, {**design, **command_record})
        environment = self._study_folder / paths.ENV_TEXT
        write_text(self.folder / paths.ENV_TEXT, environment.read_text(encoding="utf-8"))
        server.start()
        return server

    def _stop_server(self, server: Server, attempt: AttemptRecord) -> None:
        try:
            attempt["stopped"] = server.stop(self.study["config"]["server"]["stop_grace_s"])
        finally:
            if server.redacted:
                attempt["redacted"] = server.redacted
                self.progress.say(removed_lines(server.redacted))
        self._server = None
        time.sleep(self.study["config"]["server"]["release_s"])


def _counted(counts: CountsRecord) -> str:
    text = f"valid, {counts['measured_ok']} requests"
    others = {**counts["failed"], "dropped": counts["dropped"]}
    return ", ".join([text, *(f"{number} {kind}" for kind, number in others.items() if number)])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one server launch of a study: every missing cell of (configuration, block, phase)."""
    parser = study_parser("study.launch", main.__doc__)
    parser.add_argument("--config", required=True, help="configuration id, or plain_2 and so on")
    parser.add_argument("--block", type=int, required=True)
    parser.add_argument("--phase", choices=PHASES, required=True)
    parser.add_argument("--log", type=Path, required=True)
    words = "output of vllm.overlay.engine_files, as JSON [read from the machine]"
    parser.add_argument("--engine-files", type=json.loads, help=words)
    # With a full or read-only disk there is no index.json; the next run measures what is missing.
    refusals = (ArtifactError, ConfigError, DeviceError, OwnerError, ChildError, OSError)
    return run_command(parser, argv, _drive, refusals)


def _drive(arguments: argparse.Namespace) -> int:
    launch = Launch(arguments.config, arguments.block, arguments.phase)
    try:
        study = read_study(arguments.study)
        if launch not in launches(study, launch.phase):
            print(f"{arguments.study}: no launch {launch.name} in run_order", file=sys.stderr)
            return 2
        with LaunchProgress(study, arguments.study.parent, launch, arguments.log) as progress:
            driver = LaunchDriver(arguments.study, launch, progress, arguments.engine_files)
            watch_parent(lambda: driver.die("Snakemake has ended"), progress.say)
            signal.signal(signal.SIGTERM, driver.stop_at_next_boundary)
            on_loss = functools.partial(driver.die, "another driver has taken the launch over")
            with own_launch(arguments.study.parent, launch, on_loss):
                sealed = seal_settings(arguments.study.parent, study)
                if sealed is not None:
                    progress.say(
                        f"seal {sealed}: publish this line to prove that margins and names were "
                        "fixed before the data"
                    )
                outcome = driver.run()
                conclude(driver.study, launch, driver.folder, outcome)
            baseline = baseline_of(driver.study["config"])
            if outcome.status == "failed" and launch.configuration == baseline:
                withdraw_failed(every_launch(study), arguments.study.parent)
                progress.say(
                    f"{launch.name} failed, and every tax is a comparison with {baseline}: the run "
                    f"ends here. The server's logs are in {driver.folder}. Fix the cause and "
                    "rerun the same command: it resumes at this launch and keeps measured ones."
                )
                return 1
    except StopRequested:
        return 128 + signal.SIGTERM
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
